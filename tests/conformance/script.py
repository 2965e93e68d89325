"""TorchScript: script, trace, freeze, and files loaded where this package cannot be imported."""

import atexit
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from .compilers import Scaled
from .nets import ByHand, Patient
from .outcome import NotApplicableError, Outcome, assert_right, step
from .tools import eager, tool

SCRIPT = "TorchScript"


def _script(patient: Patient, x: Tensor) -> Any:
    return torch.jit.script(patient.operated())


def _trace(patient: Patient, x: Tensor) -> Any:
    return torch.jit.trace(patient.operated(), x)


def _often(model: Any, patient: Patient, x: Tensor) -> Outcome:
    """Until the profiling executor has its optimised plan."""
    for _ in range(3):
        assert_right(found := step(model, x), eager(patient, x))
    return found


def _here(convert: Callable[[Patient, Tensor], Any]) -> Callable[[Patient, Tensor], Outcome]:
    return lambda patient, x: _often(convert(patient, x), patient, x)


def _saved(convert: Callable[[Patient, Tensor], Any]) -> Callable[[Patient, Tensor], Outcome]:
    def run(patient: Patient, x: Tensor) -> Outcome:
        buffer = io.BytesIO()
        torch.jit.save(convert(patient, x), buffer)
        buffer.seek(0)
        return _often(torch.jit.load(buffer), patient, x)

    return run


ELSEWHERE = """
import sys
sys.modules["gradsurgery"] = None
import warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
for line in sys.stdin:
    model = torch.jit.load(line.strip() + "/model.pt")
    x = torch.load(line.strip() + "/x.pt").requires_grad_()
    for _ in range(3):
        model.zero_grad()
        x.grad = None
        out = model(x)
        if out.requires_grad:
            out.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    torch.save({"output": out.detach(), "x": x.grad, **grads}, line.strip() + "/out.pt")
    print("done", flush=True)
"""


class Elsewhere:
    """One process that cannot import this package and runs the files it is told of."""

    process: "subprocess.Popen[str] | None" = None

    def run(self, folder: str) -> None:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", ELSEWHERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            atexit.register(self.process.kill)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(folder, file=self.process.stdin, flush=True)
        if self.process.stdout.readline().strip() != "done":
            raise RuntimeError("the other process could not run the file")


elsewhere = Elsewhere()


def _away(convert: Callable[[Patient, Tensor], Any]) -> Callable[[Patient, Tensor], Outcome]:
    def run(patient: Patient, x: Tensor) -> Outcome:
        with TemporaryDirectory() as folder:
            convert(patient, x).save(Path(folder) / "model.pt")
            torch.save(x, Path(folder) / "x.pt")
            elsewhere.run(folder)
            return torch.load(Path(folder) / "out.pt")  # type: ignore[no-any-return]

    return run


tool(SCRIPT, "script")(_here(_script))
tool(SCRIPT, "script, saved and loaded")(_saved(_script))
tool(SCRIPT, "script, loaded without this package")(_away(_script))
tool(SCRIPT, "trace")(_here(_trace))
tool(SCRIPT, "trace, saved and loaded")(_saved(_trace))
tool(SCRIPT, "trace, loaded without this package")(_away(_trace))


@tool(SCRIPT, "script, coefficient set")
def settable(patient: Patient, x: Tensor) -> Outcome:
    attribute = {"GradientReversal": "lambd", "ScaleGradient": "scale"}.get(patient.operator)
    if attribute is None:
        raise NotApplicableError("there is no coefficient")
    model = torch.jit.script(patient.operated())
    (holder, name), *_ = [(m, n) for m in model.modules() for n in (attribute, f"_gs_0_{attribute}") if hasattr(m, n)]
    before = getattr(holder, name)
    hand = patient.by_hand()
    assert isinstance(hand, ByHand)
    for value in (2.0, 0.25):
        setattr(holder, name, value)
        right = Scaled(hand.spot, -value if attribute == "lambd" else value)
        for _ in range(3):
            assert_right(step(model, x), step(right, x))
    setattr(holder, name, before)
    return step(model, x)


def _input_alone(patient: Patient, x: Tensor) -> Outcome:
    """Freezing makes constants of the parameters: the input alone still has a gradient."""
    right = eager(patient, x)
    return {"output": right["output"], "x": right["x"]}


def _frozen(convert: Callable[[Patient, Tensor], Any]) -> Callable[[Patient, Tensor], Outcome]:
    def run(patient: Patient, x: Tensor) -> Outcome:
        model = torch.jit.freeze(convert(patient, x).eval())
        for _ in range(3):
            found = step(model, x)
        return found

    return run


tool(SCRIPT, "script, frozen in eval", right=_input_alone)(_frozen(_script))
tool(SCRIPT, "trace, frozen in eval", right=_input_alone)(_frozen(_trace))


@tool(SCRIPT, "script of a trace of fx")
def scripted_graph(patient: Patient, x: Tensor) -> Outcome:
    return _often(torch.jit.script(torch.fx.symbolic_trace(patient.operated())), patient, x)


@tool(SCRIPT, "trace, another batch size")
def traced_sizes(patient: Patient, x: Tensor) -> Outcome:
    model = _trace(patient, x)
    more = x.repeat(3, 1)
    assert_right(step(model, more), eager(patient, more))
    return step(model, x)
