"""Parametrisations, pruning, quantisation, adapters, and trainers."""

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from .nets import Patient, linear
from .outcome import NAMES, NotApplicableError, NotRunError, Outcome, step
from .tools import eager, tool

ECOSYSTEM = "Ecosystem"


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in model.named_modules() if "weight" in m._parameters and name + ".weight" in NAMES]


def _renamed(found: Outcome, old: str) -> Outcome:
    return {name.replace(old, "weight"): value for name, value in found.items()}


def _parametrised(before: bool) -> Callable[[Patient, Tensor], Outcome]:
    def run(patient: Patient, x: Tensor) -> Outcome:
        if before and (patient.is_layer or patient.place == "GraphModule"):
            raise NotApplicableError("the same as after surgery")
        model = patient.bare() if before else patient.operated()
        for _, layer in _layers(model):
            parametrize.register_parametrization(layer, "weight", Doubled())
        if before:
            patient.operate(model)
        return _renamed(step(model, x), "parametrizations.weight.original")

    return run


def _doubled(patient: Patient, x: Tensor) -> Outcome:
    model = patient.by_hand()
    for _, layer in _layers(model):
        parametrize.register_parametrization(layer, "weight", Doubled())
    return _renamed(step(model, x), "parametrizations.weight.original")


tool(ECOSYSTEM, "parametrize after surgery", right=_doubled)(_parametrised(before=False))
tool(ECOSYSTEM, "parametrize before surgery", right=_doubled)(_parametrised(before=True))


@tool(ECOSYSTEM, "parametrize, then removed")
def unparametrised(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    layers = _layers(model)
    for _, layer in layers:
        parametrize.register_parametrization(layer, "weight", Doubled())
    for _, layer in layers:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    return step(model, x)


@tool(ECOSYSTEM, "weight_norm", right=None)
def weight_norm(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    for _, layer in _layers(model):
        torch.nn.utils.parametrizations.weight_norm(layer)
    return step(model, x)


def _pruned(model: nn.Module) -> nn.Module:
    for _, layer in _layers(model):
        prune.custom_from_mask(layer, "weight", torch.ones_like(layer.weight))  # type: ignore[arg-type]
    return model


@tool(ECOSYSTEM, "pruning")
def pruned(patient: Patient, x: Tensor) -> Outcome:
    return _renamed(step(_pruned(patient.operated()), x), "weight_orig")


@tool(ECOSYSTEM, "pruning made permanent")
def pruned_for_good(patient: Patient, x: Tensor) -> Outcome:
    model = _pruned(patient.operated())
    for _, layer in _layers(model) or [(n, m) for n, m in model.named_modules() if "weight_orig" in m._parameters]:
        prune.remove(layer, "weight")
    return step(model, x)


# --- adapters --------------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A low-rank adapter beside a layer, as PEFT puts one."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.a, self.b = linear(1.0), linear(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.b(self.a(x))
        return out


@tool(ECOSYSTEM, "adapter beside an untouched layer", right=None)
def adapter(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    model.set_submodule("seq.0", Lora(model.get_submodule("seq.0")))
    found = step(model, x)
    return {name.replace(".base_layer", ""): value for name, value in found.items()}


@tool(ECOSYSTEM, "PEFT LoRA", right=None)
def peft_lora(patient: Patient, x: Tensor) -> Outcome:
    try:
        import peft
    except ImportError:
        raise NotRunError("peft is not installed") from None
    if patient.place == "GraphModule":
        raise NotApplicableError("PEFT addresses modules that a trace has dissolved")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=[r"fc"], r=1, lora_alpha=1, init_lora_weights=False)
    model = peft.get_peft_model(patient.operated(), config)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.constant_(parameter, 0.5)
    found = step(model, x)
    return {name.replace("base_model.model.", "").replace(".base_layer", ""): value for name, value in found.items()}


# --- quantisation ----------------------------------------------------------------------------------------------------


class Int8(nn.Module):
    """Weight-only quantisation: int8 and a scale in place of a layer's weight, its gradient to the input kept."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = float(layer.weight.detach().abs().max() / 64)
        self.register_buffer("quantised", (layer.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.quantised.to(x.dtype) * self.scale  # type: ignore[operator]
        return torch.nn.functional.linear(x, weight)


@tool(ECOSYSTEM, "weight-only int8 around the place", right=None)
def int8(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    model.set_submodule("seq.0", Int8(model.get_submodule("seq.0")))  # type: ignore[arg-type]
    return step(model, x)


@tool(ECOSYSTEM, "torchao int8 weight-only", right=None, cost="dear")
def torchao_int8(patient: Patient, x: Tensor) -> Outcome:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise NotRunError("torchao is not installed") from None
    model = patient.operated()
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, name: name in ("seq.0", "enc", "head"))
    x = x.clone().requires_grad_()
    out = model(x)
    if out.requires_grad:
        out.square().sum().backward()
    # The scale of int8 is no power of two.
    return {"about output": out.detach(), "about x": x.grad}


@tool(ECOSYSTEM, "torch.ao quantize_dynamic around the place", right=None)
def quantize_dynamic(patient: Patient, x: Tensor) -> Outcome:
    """The head alone becomes int8: inference only, so the forward is what there is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if patient.place in ("input side", "root") or patient.place == "GraphModule":
            raise NotApplicableError("the layer that is replaced is the place: see the tests of what is lost")
        model = copy.deepcopy(patient.operated()).eval()
        to_int8 = {"head": torch.ao.quantization.default_dynamic_qconfig}
        torch.ao.quantization.quantize_dynamic(model, to_int8, inplace=True)
        with torch.no_grad():
            return {"output": model(x)}


# --- trainers --------------------------------------------------------------------------------------------------------


@tool(ECOSYSTEM, "accelerate")
def accelerated(patient: Patient, x: Tensor) -> Outcome:
    try:
        from accelerate import Accelerator
    except ImportError:
        raise NotRunError("accelerate is not installed") from None
    accelerator = Accelerator(cpu=True)
    model = patient.operated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = x.clone().requires_grad_()
    out = model(x)
    if out.requires_grad:
        accelerator.backward(out.square().sum())
    grads = {name: p.grad for name, p in accelerator.unwrap_model(model).named_parameters()}
    return {"output": out.detach(), "x": x.grad, **grads}


@tool(ECOSYSTEM, "accelerate hooks, then removed")
def accelerate_hooks(patient: Patient, x: Tensor) -> Outcome:
    try:
        from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
    except ImportError:
        raise NotRunError("accelerate is not installed") from None
    model = patient.operated()
    for child in list(model.children()):
        add_hook_to_module(child, ModelHook())
    found = step(model, x)
    for child in list(model.children()):
        remove_hook_from_module(child)
    again = step(model, x)
    assert torch.equal(found["output"], again["output"])
    return found


def _without_input(patient: Patient, x: Tensor) -> Outcome:
    return {name: value for name, value in eager(patient, x).items() if name != "x"}


@tool(ECOSYSTEM, "LightningModule", right=_without_input, cost="dear")
def lightning_module(patient: Patient, x: Tensor) -> Outcome:
    try:
        import lightning
    except ImportError:
        raise NotRunError("lightning is not installed") from None

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = patient.operated()

        def training_step(self, batch: Any, index: int) -> Tensor:
            found["output"] = out = self.model(batch[0])
            return out.square().sum()

        def on_after_backward(self) -> None:
            found.update({name: p.grad for name, p in self.model.named_parameters()})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    if patient.place == "root" and patient.operator in ("StopGradient", "DetachedTransform"):
        raise NotApplicableError("the loss has no gradient to begin with")
    found: Outcome = {}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2))
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}


@tool(ECOSYSTEM, "clip_grad_norm_ and AdamW", right=None)
def clipped(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "fn." not in n], weight_decay=0.5)
    out = model(x)
    if out.requires_grad:
        out.square().sum().backward()
    trained = [p for n, p in model.named_parameters() if "fn." not in n]
    norm = nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    return {"norm": norm.detach(), **{n: p.detach() for n, p in model.named_parameters() if "fn." not in n}}
