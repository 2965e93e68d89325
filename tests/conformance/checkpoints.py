"""Activation checkpointing, saved-tensor hooks, hooks of every kind, and graphs that are kept."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .nets import Make, Part, Patient, linear
from .outcome import NotApplicableError, Outcome, gradients, loss_of, step
from .tools import eager, tool

CHECKPOINTS = "Checkpointing and hooks"


def _around(**options: Any) -> Callable[[Patient, Tensor], Outcome]:
    def run(patient: Patient, x: Tensor) -> Outcome:
        model = patient.operated()
        return step(lambda x: checkpoint(model, x, **options), x, model)

    return run


tool(CHECKPOINTS, "checkpoint around, reentrant")(_around(use_reentrant=True))
tool(CHECKPOINTS, "checkpoint around")(_around(use_reentrant=False))


def _policy(policy: CheckpointPolicy) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *args, **kwargs: policy)


for _name, _chosen in (("save", CheckpointPolicy.MUST_SAVE), ("recompute", CheckpointPolicy.MUST_RECOMPUTE)):
    tool(CHECKPOINTS, f"selective checkpoint, {_name} all")(_around(use_reentrant=False, context_fn=_policy(_chosen)))


class Checkpointed(nn.Module):
    """A layer that checkpoints its own inside."""

    def __init__(self, weight: float, reentrant: bool) -> None:
        super().__init__()
        self.inner = linear(weight)
        self.reentrant = reentrant

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


def _inside(reentrant: bool) -> Callable[[Patient, Tensor], Outcome]:
    """Every layer of the net checkpoints its inside; the places are at the boundaries of such layers."""

    def run(patient: Patient, x: Tensor) -> Outcome:
        if patient.place == "GraphModule":
            raise NotApplicableError("a trace of fx removes checkpoints")
        make: Make = functools.partial(Checkpointed, reentrant=reentrant)
        found = step(patient.of(make).operated(), x)
        return {name.replace(".inner", ""): value for name, value in found.items()}

    return run


# By hand too, a layer that checkpoints this way trains nothing where its input needs no gradient: below a stop.
tool(CHECKPOINTS, "checkpoint inside, reentrant", right=None)(_inside(reentrant=True))
tool(CHECKPOINTS, "checkpoint inside")(_inside(reentrant=False))


def _module_checkpoint(model: nn.Module, reentrant: bool) -> nn.Module:
    """As models do that call their children through a checkpoint, so that the operator runs inside of one."""
    for child in model.children():
        if isinstance(child, Part | nn.Sequential | nn.Linear):
            plain = child.forward
            child.forward = functools.partial(checkpoint, plain, use_reentrant=reentrant)  # type: ignore[method-assign]
    return model


@tool(CHECKPOINTS, "children called through checkpoint")
def wrapped(patient: Patient, x: Tensor) -> Outcome:
    if patient.place == "GraphModule":
        raise NotApplicableError("a trace of fx has dissolved the children")
    return step(_module_checkpoint(patient.operated(), False), x)


@tool(CHECKPOINTS, "checkpoint_wrapper of children")
def checkpoint_wrapper(patient: Patient, x: Tensor) -> Outcome:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    if patient.place == "GraphModule":
        raise NotApplicableError("a trace of fx has dissolved the children")
    model = patient.operated()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
    return step(model, x)


@tool(CHECKPOINTS, "saved_tensors_hooks")
def packed(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
        return step(model, x)


@tool(CHECKPOINTS, "save_on_cpu")
def offloaded(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    with torch.autograd.graph.save_on_cpu():
        return step(model, x)


@tool(CHECKPOINTS, "retain_graph, two backward calls", right=None)
def retained(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    x = x.clone().requires_grad_()
    out = model(x)
    if out.requires_grad:
        loss_of(out).backward(retain_graph=True)
        loss_of(out).backward()
    return {"output": out.detach(), "x": x.grad, **gradients(model)}


@tool(CHECKPOINTS, "two losses through one forward", right=None)
def two_losses(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    x = x.clone().requires_grad_()
    out = model(x)
    if out.requires_grad:
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
    return {"output": out.detach(), "x": x.grad, **gradients(model)}


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward pre-hook": lambda m, seen: m.register_forward_pre_hook(lambda *a: seen()),
    "forward hook": lambda m, seen: m.register_forward_hook(lambda *a: seen()),
    "forward hook with kwargs, always": lambda m, seen: m.register_forward_hook(
        lambda *a: seen(), with_kwargs=True, always_call=True
    ),
    "full backward pre-hook": lambda m, seen: m.register_full_backward_pre_hook(lambda *a: seen()),
    "full backward hook": lambda m, seen: m.register_full_backward_hook(lambda *a: seen()),
}


def _hooked(name: str, before: bool) -> Callable[[Patient, Tensor], Outcome]:
    def run(patient: Patient, x: Tensor) -> Outcome:
        if before and patient.is_layer:
            raise NotApplicableError("a layer is not inserted")
        model = patient.bare() if before else patient.operated()
        calls: list[str] = []
        hooked = [child for child in model.modules() if not list(child.children()) or child is model]
        reached = [m for m in hooked if type(m).__module__.startswith("torch.nn") or m is model]
        for module in reached:
            HOOKS[name](module, functools.partial(calls.append, type(module).__name__))
        if before:
            patient.operate(model)
        found = step(model, x)
        assert calls or "backward" in name, "the hook was lost"
        if "backward" not in name:
            assert len(calls) == len(reached), calls
        return found

    return run


for _hook in HOOKS:
    tool(CHECKPOINTS, f"{_hook} after surgery")(_hooked(_hook, before=False))
    tool(CHECKPOINTS, f"{_hook} before surgery")(_hooked(_hook, before=True))


@tool(CHECKPOINTS, "hook on the tensor that leaves")
def tensor_hook(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    seen: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        if out.requires_grad:
            out.register_hook(seen.append)
        return out

    found = step(run, x, model)
    if seen:
        assert torch.equal(seen[0], 2 * eager(patient, x)["output"])
    return found


@tool(CHECKPOINTS, "gradient accumulated over two steps", right=None)
def accumulated(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    for _ in range(2):
        out = model(x)
        if out.requires_grad:
            loss_of(out).backward()
    return gradients(model)


def _descend(parameter: Tensor) -> None:
    parameter.data.sub_(parameter.grad, alpha=2.0**-10)  # type: ignore[arg-type]


@tool(CHECKPOINTS, "optimizer in backward", right=None)
def in_backward(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_descend)
    out = model(x)
    if out.requires_grad:
        loss_of(out).backward()
    return {name: p.detach() for name, p in model.named_parameters() if "fn." not in name}
