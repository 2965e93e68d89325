"""docs/errors/: what a page calls a symptom is what the library says, in the error whose page it is."""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from script_helpers import CallsBack
from torch import Tensor, nn

import gradsurgery as gs

PAGES = sorted((Path(__file__).parents[1] / "docs" / "errors").glob("*.md"))
SYMPTOMS = [
    (page.stem, symptom)
    for page in PAGES
    for symptom in re.findall(r"^\| `([^`]+)` \|", page.read_text(), flags=re.MULTILINE)
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x.abs()
        if self.training:
            x = x * 2
        return x + 1


class Indices(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


class Indexed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(1)


def without_source() -> nn.Module:
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        return x + 1", namespace)
    return namespace["Typed"]()


def scripted() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        return torch.jit.script(gs.StraightThrough(lambda x: x))


def lost() -> object:
    net = gs.insert_grl(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1")
    return gs.verify(nn.SyncBatchNorm.convert_sync_batchnorm(net), torch.ones(2, 2))


class Reads(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight)


def compiled(
    network: nn.Module | None, operate: Callable[[Any], object], trace: bool = False, freeze: bool = False
) -> Callable[[], object]:
    """Operate on a network as TorchScript."""

    def cause() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is deprecated, and that an LSTM looks at sizes
            network_ = nn.Sequential(nn.Linear(2, 2), nn.ReLU()) if network is None else network
            made = torch.jit.trace(network_, torch.ones(1, 2, 2)) if trace else torch.jit.script(network_)
            return operate(torch.jit.freeze(made.eval()) if freeze else made)

    return cause


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x)
        return out + hidden


def model() -> nn.Sequential:
    return nn.Sequential(Block(), nn.MultiheadAttention(2, 1), nn.ReLU())


def grl(*args: Any, on: Any = None, **kwargs: Any) -> Callable[[], object]:
    return lambda: gs.insert_grl(model() if on is None else on, *args, **kwargs)


def not_run() -> None:
    block = gs.insert_grl(Block(), ":mul")
    block.eval()(torch.ones(1, 2))


class Backward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def backward(self, gradient: Tensor) -> Tensor:
        return -gradient


class Louder(gs.GradientReversal):
    def forward(self, x: Tensor) -> Tensor:
        return gs.reverse_gradient(2 * x)


class Never(gs.GradientReversal):
    def forward(self, x: Tensor) -> Tensor:
        return x


def measured(operator: nn.Module, measure: Callable[..., object] = gs.verify, loss: Any = None) -> Callable[[], object]:
    return lambda: measure(gs.insert(nn.Sequential(nn.Linear(2, 2)), "0", operator), torch.ones(1, 2), loss=loss)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def idle() -> None:
    gs.verify(gs.insert_grl(Skips(), "idle"), torch.ones(1, 2))


def without_matplotlib() -> None:
    audit = measured(gs.StopGradient(), gs.audit)()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        audit.plot()  # type: ignore[attr-defined]


def recipe(**change: Any) -> Callable[[], object]:
    step = {"at": "0", "operator": "MapGradient", "fn": "os:abort"}
    return lambda: gs.apply(model(), {"format": 1, "operations": [step], **change})


class Scaled(nn.Module):
    """What TorchScript makes of it is another number, or no gradient."""

    def __init__(self, scripted: float, stop: bool = False) -> None:
        super().__init__()
        self.linear, self.scripted, self.stop = nn.Linear(2, 2), scripted, stop

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if torch.jit.is_scripting():
            if self.stop:
                x = x.detach()
            return x * self.scripted
        return x


class Unscriptable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if getattr(torch, "is_" + "tensor")(x) and torch.jit.is_tracing():
            raise ValueError("not to be traced")
        return x


def script(model: nn.Module, example: Any = None) -> Callable[[], object]:
    return lambda: gs.to_torchscript(model, example=example)


CAUSES: dict[str, Callable[[], object]] = {
    "the model has no module": grl("3"),
    "no module that runs": grl("x.*"),
    "names the op": grl("0:sub"),
    "names a module that never runs": grl("1.out_proj"),
    "was to name exactly": grl("*", expect=2),
    "nothing was inserted": lambda: gs.remove(model()),
    "asked for an op inside": lambda: gs.insert_grl(without_source(), ":add"),
    "nobody reads the value": grl("0:abs"),
    "so the operator would have been passed by": not_run,
    "during the run on the example the model raised": grl("2", example=torch.ones(1, 3)),
    "in the forward that was to be measured the model raised": lambda: gs.audit(grl("0")(), torch.ones(1, 3)),
    "are still to be made by a first forward": lambda: gs.audit(
        gs.insert_grl(nn.Sequential(nn.LazyLinear(2)), "0"), torch.ones(1, 3)
    ),
    "is no function that a module holds": measured(gs.MapGradient(lambda g: g), lambda net, *_, loss: gs.recipe(net)),
    "which is no data": measured(Backward(), lambda net, *_, loss: gs.recipe(net)),
    "Nothing is imported because a recipe says so": recipe(),
    "the recipe has format": recipe(format=2),
    "which means nothing here": recipe(heads=[]),
    "and a head has weights": lambda: gs.recipe(gs.attach_head(model(), "2", nn.Linear(2, 2))),
    "loss was asked for a scalar": measured(gs.StopGradient(), loss=lambda y: y),
    "no loss was given": lambda: gs.audit(gs.insert_grl(Indexed(), "linear"), torch.ones(1, 2)),
    "the loss depends on no parameter": measured(gs.StopGradient(), loss=lambda y: y.detach().sum()),
    "did not run in this forward": idle,
    "was to keep its promise": measured(Never()),
    "to leave the forward as promised": measured(Louder()),
    "to give the outputs of the original": script(Scaled(2.0), torch.ones(1, 2)),
    "to have the gradients of the original": script(Scaled(1.0, stop=True), torch.ones(1, 2)),
    "exists already": lambda: gs.to_torchscript(model(), __file__),
    "cannot compile this model": script(Unscriptable()),
    "can neither be compiled": script(Unscriptable(), torch.ones(1)),
    "refuses this model": lambda: gs.to_exported(Unscriptable(), (torch.ones(1), 1, 2)),
    "has a method called backward": measured(Backward()),
    "is not installed": without_matplotlib,
    "There is a negative number": grl("0", -1.0),
    "There is a number that is not finite": grl("0", float("nan")),
    "There is a tensor that requires grad": grl("0", torch.ones(1, requires_grad=True)),
    "holds no floating-point or complex tensor": lambda: gs.insert_grl(Indices(), "")(torch.ones(1, 2)),
    "Give an fn that keeps the shape": lambda: gs.straight_through(torch.ones(2), lambda x: x[:1]),
    "TorchScript cannot compile": scripted,
    "pushes tangents forward": lambda: torch.export.export(gs.MapGradient(torch.neg), (torch.ones(2),)),
    "A recorded graph asks for map_gradient": lambda: torch.ops.gradsurgery.map_gradient(
        torch.ones(2), "elsewhere:clip"
    ),
    "was inserted and is lost": lost,
    "no compiled method calls it": compiled(Reads(), lambda m: gs.insert_grl(m, "inner")),
    "has no name. Name a module": compiled(None, lambda m: gs.insert_grl(m, "0:add")),
    "Several values": compiled(Long(), lambda m: gs.insert_grl(m, "lstm"), trace=True),
    "TorchScript cannot compile it": compiled(None, lambda m: gs.insert(m, "0", nn.DataParallel(nn.Linear(2, 2)))),
    "the ScriptModule is frozen": compiled(None, lambda m: gs.insert_grl(m, "0"), freeze=True),
    "is the child": compiled(
        nn.Sequential(nn.Sequential(nn.Linear(2, 2))), lambda m: gs.insert_grl(getattr(m, "0"), "0")
    ),
    "cannot be saved": compiled(CallsBack(), lambda m: gs.insert_grl(m, "")),
    "is wrapped in nn.DataParallel": grl("0", on=nn.DataParallel(model())),
    "Give an nn.Module": grl("0", on={"a": 1}),
}


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(("error", "symptom"), SYMPTOMS)
def test_symptom_is_what_is_said(error: str, symptom: str) -> None:
    with pytest.raises(gs.SurgeryError, match=re.escape(symptom)) as caught:
        CAUSES[symptom]()
    assert type(caught.value).__name__ == error
