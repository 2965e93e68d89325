"""A reversal in whole timm models that TorchScript has compiled, scripted and traced, against a hand-written hook.

    python -m benchmarks.scripted                       # every model, both forms
    python -m benchmarks.scripted resnet18 vit_tiny_patch16_224

Each is compared as it is and after saving and loading, in three steps, since TorchScript optimises after two: the
output with that of the untouched script, and every gradient with that of the eager model with the hook, bit for bit.
Where the untouched script already derives otherwise than the eager model (TorchScript has formulas of its own for some
ops, and random numbers of its own for a drop path), the gradient is held against the script's own times the factor;
how many these were is counted. One line per model and form; the last line printed is the figure.
"""

import argparse
import copy
import io
import sys
import time
import warnings
from dataclasses import dataclass, field

import timm
import torch
from rich.progress import track
from torch import Tensor, nn

import gradsurgery as gs

from ._reference import Call, Step, enliven, hooked, same_output, step

LAMBD = 0.5
FACTOR = -LAMBD
STEPS = 3
"""TorchScript watches two forwards and has optimised the third."""

SMALL = {
    "test_resnet": ("layer2.0.bn1", 64),
    "test_efficientnet": ("blocks.2.0", 64),
    "test_vit": ("blocks.2.attn.proj", 160),
}
"""timm's smallest of three kinds, which the tests run: a place for each, and the size of an image."""

MODELS = SMALL | {
    "resnet18": ("layer3.0.bn1", 64),
    "efficientnet_b0": ("blocks.2.1", 64),
    "mobilenetv3_small_050": ("blocks.1.0.bn1", 64),
    "vit_tiny_patch16_224": ("blocks.5.attn.proj", 224),
    "swin_tiny_patch4_window7_224": ("layers.2.blocks.3", 224),
    "convnext_atto": ("stages.2.blocks.1.norm", 64),
}

ROUND_OTHERWISE = ("efficientnet_b0", "test_efficientnet", "swin_tiny_patch4_window7_224")
"""Models whose untouched script differs from the eager model."""

FORMS = ("script, training", "trace")


@dataclass
class Result:
    """What one model in one form has shown.

    Attributes:
        faults: the promises that are broken.
        compared: how many gradients were held against their reference.
        own: how many of these against the untouched script, which differs from the eager model there.
    """

    faults: list[str] = field(default_factory=list)
    compared: int = 0
    own: int = 0


def saved(model: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """A ScriptModule after saving and loading."""
    buffer = io.BytesIO()
    torch.jit.save(model, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def measured(name: str, form: str) -> Result:
    """A reversal at the model's place, with the model in that form."""
    at, size = MODELS[name]
    training = form != "trace"
    torch.manual_seed(0)
    eager = enliven(timm.create_model(name, scriptable=True)).train(training)
    x = torch.randn(2, 3, size, size)

    def compiled() -> torch.jit.ScriptModule:
        return torch.jit.script(eager) if training else torch.jit.trace(eager, x, check_trace=False)

    def call(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        return model(x), {}

    state = {key: value.clone() for key, value in eager.state_dict().items()}
    right = step(hooked(copy.deepcopy(eager), at, FACTOR), call, training)
    plain = step(copy.deepcopy(eager), call, training)
    operated = gs.insert_grl(compiled(), at, LAMBD)
    result = Result()
    if not right.gradient_faults(plain):
        result.faults.append("the hook changes no gradient, so nothing can be told")
    for kind, one in (("in memory", operated), ("saved and loaded", saved(operated))):
        untouched = saved(compiled())  # two scripts of one class share their code, which has been optimised then
        for k in range(STEPS):
            steps = [_from(state, model, call, training) for model in (untouched, one)]
            _compare(result, f"{kind}, step {k + 1}", right, plain, *steps)
    if result.own and name not in ROUND_OTHERWISE:
        result.faults.append(f"the untouched script differs from the eager model in {result.own} gradients")
    return result


def _from(state: dict[str, Tensor], model: nn.Module, call: Call, training: bool) -> Step:
    model.load_state_dict(state, strict=False)  # a BatchNorm has moved its statistics
    return step(model, call, training)


def _compare(result: Result, where: str, right: Step, plain: Step, untouched: Step, got: Step) -> None:
    if not same_output(got.output, untouched.output):
        result.faults.append(f"{where}: the output differs from that of the untouched script")
    if right.gradients.keys() != got.gradients.keys():
        result.faults.append(f"{where}: other parameters")
        return
    for name, due in right.gradients.items():
        result.compared += 1
        if not torch.equal(untouched.gradients[name], plain.gradients[name]):
            result.own += 1
            due = _factor(right, plain, name) * untouched.gradients[name]
        if not torch.equal(got.gradients[name], due):
            result.faults.append(f"{where}: the gradient of {name}")


def _factor(right: Step, plain: Step, name: str) -> float:
    """What the hook makes of the gradient of a parameter, which lies before the place or does not."""
    return next(f for f in (1.0, FACTOR) if torch.equal(plain.gradients[name] * f, right.gradients[name]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(MODELS)}")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"no such model: {', '.join(unknown)}")
    warnings.filterwarnings("ignore")
    wanted = [(name, form) for name in options.models or MODELS for form in FORMS]
    results = []
    for name, form in track(wanted, "models"):
        start = time.process_time()
        results.append(measured(name, form))
        found = results[-1]
        said = "; ".join(found.faults[:3]) or "exact"
        seconds = time.process_time() - start
        print(f"{name}, {form}: {said}, {found.compared} gradients, {found.own} as the script's own, {seconds:.0f} s")
    exact = sum(not result.faults for result in results)
    print(f"timm {timm.__version__}, torch {torch.__version__}: {exact} of {len(results)} exact")
    return 0 if exact == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
