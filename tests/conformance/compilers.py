"""torch.compile: before and after the surgery, with changing coefficients and shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import gradsurgery as gs

from .nets import HAND, ByHand, Patient
from .outcome import NotApplicableError, Outcome, assert_right, step
from .tools import eager, tool

COMPILERS = "torch.compile"


def _compiled(backend: str, **options: Any) -> Callable[[Patient, Tensor], Outcome]:
    def run(patient: Patient, x: Tensor) -> Outcome:
        torch._dynamo.reset()
        model = patient.operated()
        run = torch.compile(model, backend=backend, fullgraph=True, **options)
        step(run, x, model)
        return step(run, x, model)

    return run


tool(COMPILERS, "compile, backend eager")(_compiled("eager"))
tool(COMPILERS, "compile, aot_eager", cost="dear")(_compiled("aot_eager"))
tool(COMPILERS, "compile, inductor", cost="slow")(_compiled("inductor"))


def through_sizes(run: Callable[[Tensor], Tensor], model: nn.Module, patient: Patient, x: Tensor) -> Outcome:
    for copies in (3, 5, 2):
        more = x.repeat(copies, 1)
        assert_right(step(run, more, model), eager(patient, more))
    return step(run, x, model)


@tool(COMPILERS, "compile, dynamic shapes", cost="dear")
def dynamic(patient: Patient, x: Tensor) -> Outcome:
    torch._dynamo.reset()
    model = patient.operated()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    step(run, x.repeat(4, 1), model)
    before = counter.frame_count
    found = through_sizes(run, model, patient, x)
    assert counter.frame_count == before, "a size compiled anew"
    return found


@tool(COMPILERS, "compile, train and eval", cost="dear")
def modes(patient: Patient, x: Tensor) -> Outcome:
    torch._dynamo.reset()
    model = patient.operated()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for training in (True, False, True, False):
        model.train(training)
        found = step(run, x, model)
        assert_right(found, eager(patient, x))
    return found


@tool(COMPILERS, "compile, 30 coefficients", cost="dear")
def coefficients(patient: Patient, x: Tensor) -> Outcome:
    torch._dynamo.reset()
    attribute = {"GradientReversal": "lambd", "ScaleGradient": "scale"}.get(patient.operator)
    if attribute is None:
        raise NotApplicableError("there is no coefficient")
    model = patient.operated()
    operator = patient.live(model)
    before = getattr(operator, attribute)
    spot = patient.by_hand()
    assert isinstance(spot, ByHand)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    sign = -1 if attribute == "lambd" else 1
    for k in range(30):
        setattr(operator, attribute, k / 8)
        right = Scaled(spot.spot, sign * k / 8)
        assert_right(step(run, x, model), step(right, x))
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations"
    setattr(operator, attribute, before)
    return step(run, x, model)


class Scaled(ByHand):
    def __init__(self, spot: str, factor: float) -> None:
        super().__init__("none", spot)
        self.factor = factor

    def at(self, spot: str, x: Tensor) -> Tensor:
        return x * self.factor + (x * (1 - self.factor)).detach() if spot == self.spot else HAND["none"](x)


@tool(COMPILERS, "module.compile()", cost="dear")
def in_place(patient: Patient, x: Tensor) -> Outcome:
    torch._dynamo.reset()
    model = patient.operated()
    model.compile(backend="aot_eager", fullgraph=True)
    return step(model, x)


@tool(COMPILERS, "children compiled", cost="dear")
def children(patient: Patient, x: Tensor) -> Outcome:
    torch._dynamo.reset()
    model = patient.operated()
    for child in model.children():
        child.compile(backend="aot_eager")
    return step(model, x)


def _live(backend: str) -> Callable[[Patient, Tensor], Outcome]:
    """Compile first, then operate, remove, and operate again, with a step after each."""

    def run(patient: Patient, x: Tensor) -> Outcome:
        if patient.is_layer:
            raise NotApplicableError("a layer is not inserted")
        torch._dynamo.reset()
        model = patient.bare()
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        untouched = step(ByHand("none", ""), x)
        assert_right(step(compiled, x, model), untouched)
        patient.operate(compiled)
        assert_right(step(compiled, x, model), eager(patient, x))
        gs.remove(compiled)
        assert_right(step(compiled, x, model), untouched)
        patient.operate(compiled)
        return step(compiled, x, model)

    return run


tool(COMPILERS, "operated after compile, eager")(_live("eager"))
tool(COMPILERS, "operated after compile, aot_eager", cost="dear")(_live("aot_eager"))
tool(COMPILERS, "operated after compile, inductor", cost="slow")(_live("inductor"))


@tool(COMPILERS, "compile of func.grad", right=None, cost="dear")
def compiled_grad(patient: Patient, x: Tensor) -> Outcome:
    torch._dynamo.reset()
    model = patient.operated()
    if type(model) is ByHand:
        return {"x": torch.func.grad(lambda x: model(x).square().sum())(x)}
    run = torch.compile(torch.func.grad(lambda x: model(x).square().sum()), backend="aot_eager", fullgraph=True)
    return {"x": run(x)}


@tool(COMPILERS, "compiled autograd", cost="dear")
def compiled_autograd(patient: Patient, x: Tensor) -> Outcome:
    torch._dynamo.reset()
    model = patient.operated()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        return step(model, x)
