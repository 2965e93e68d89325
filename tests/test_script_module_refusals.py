"""What cannot be operated on in a ScriptModule, each with the reason."""

import copy
from typing import Any

import pytest
import torch
from script_helpers import CallsBack, X, net, same, saved, traced, whole
from torch import Tensor, nn

import gradsurgery as gs

pytestmark = pytest.mark.usefixtures("scripting")


class Reads(nn.Module):
    """A child whose weight alone is read, one that is walked and not called, and one that is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.walked, self.fc = nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)]), nn.Linear(3, 3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.walked:
            x = layer(x)
        y = self.fc(x)
        self.act(y)
        return nn.functional.linear(y, self.read.weight)


class Numbers(nn.Module):
    def forward(self, x: Tensor) -> int:
        return x.ndim


class Lists(nn.Module):
    def forward(self, x: Tensor) -> list[list[Tensor]]:
        return [[x]]


def script(make: Any = net) -> torch.jit.ScriptModule:
    return torch.jit.script(make())


def grl(make: Any, at: Any, **options: Any) -> Any:
    return lambda: gs.insert_grl(make(), at, **options)


def scripts(make: Any) -> Any:
    return lambda: script(make)


def traces(make: Any) -> Any:
    return lambda: traced(make())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lstm = nn.Linear(3, 3), nn.LSTM(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, _) = self.lstm(self.fc(x)[None])
        return out[0] + h[0, 0]


class Misnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = Named()

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x) + self.m.forward1(x)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def forward1(self, x: Tensor) -> Tensor:
        return self.fc(x).relu() * 2


def frozen() -> torch.jit.ScriptModule:
    return torch.jit.freeze(script().eval())


REFUSALS: dict[str, tuple[type[gs.SurgeryError], Any, str]] = {
    "frozen": (gs.SurgeryError, lambda: gs.insert_grl(frozen(), "stem"), "the ScriptModule is frozen"),
    "frozen root": (gs.SurgeryError, lambda: gs.insert_grl(frozen(), ""), "the ScriptModule is frozen"),
    "frozen sites": (gs.SurgeryError, lambda: gs.sites(frozen()), "the ScriptModule is frozen"),
    "optimized": (
        gs.SurgeryError,
        lambda: gs.insert_grl(torch.jit.optimize_for_inference(script().eval()), ""),
        "the ScriptModule is frozen",
    ),
    "missing": (gs.AddressError, grl(script, "stemm"), "no module 'stemm'; closest: 'stem'"),
    "no match": (gs.AddressError, grl(script, "x.*"), "no module that runs matches"),
    "no such type": (gs.AddressError, grl(script, nn.Conv2d), "known by the name of its class alone"),
    "not of this model": (gs.AddressError, grl(script, nn.Linear(1, 1)), "no part of this ScriptModule"),
    "number": (gs.AddressError, grl(script, 3), "3 was given as the place"),
    "empty list": (gs.AddressError, grl(script, []), "an empty list"),
    "expect": (gs.AddressError, grl(script, "blocks.*", expect=3), "was to name exactly 3 places; it names 2"),
    "read": (gs.AddressError, grl(scripts(Reads), "read"), "no compiled method calls it"),
    "walked": (gs.AddressError, grl(scripts(Reads), "walked"), "no forward that was compiled"),
    "attention": (
        gs.AddressError,
        grl(scripts(lambda: nn.TransformerEncoderLayer(4, 2)), "self_attn.out_proj"),
        "no compiled method calls it",
    ),
    "no tensor": (gs.AddressError, grl(scripts(lambda: nn.Sequential(nn.Linear(3, 3))), "0.weight"), "no module"),
    "identity in a trace": (
        gs.AddressError,
        grl(traces(lambda: nn.Sequential(nn.Linear(3, 3), nn.Identity())), "1"),
        "it returns no tensor",
    ),
    "numbers": (gs.AddressError, grl(scripts(Numbers), ""), "it returns no tensor"),
    "op": (gs.CaptureError, grl(script, "blocks.0:add"), "has no name. Name a module"),
    "edge": (gs.CaptureError, grl(script, "blocks -> head"), "has no name. Name a module"),
    "op sites": (gs.CaptureError, lambda: gs.sites(script(), "blocks.0:*"), "have no names"),
    "lists": (gs.CaptureError, grl(scripts(Lists), ""), "has the type List\\[List\\[Tensor\\]\\]"),
    "element of a tensor": (gs.OperatorError, grl(script, "stem[0]"), "the value has the type Tensor there"),
    "no such argument": (gs.OperatorError, grl(script, "stem['y']", side="input"), "\\[0\\] or \\['input'\\]"),
    "in place": (gs.SurgeryError, grl(scripts(Reads), "act", side="input"), "works in place on what it receives"),
    "dropped": (gs.OperatorError, grl(scripts(Reads), "act"), "nobody reads what it returns"),
    "lifted": (gs.CaptureError, grl(traces(Two), "lstm"), "Several values leave that module"),
    "lifted, from a file": (gs.CaptureError, grl(lambda: saved(traced(Two())), "lstm[0]"), "Several values leave"),
    "map": (
        gs.OperatorError,
        lambda: gs.insert(script(), "stem", gs.MapGradient(lambda g: -g)),
        "TorchScript keeps a function of a gradient by its name",
    ),
    "lambda": (
        gs.OperatorError,
        lambda: gs.insert_transform(script(), "stem", lambda x: x),
        "TorchScript cannot compile",
    ),
    "not for TorchScript": (
        gs.OperatorError,
        lambda: gs.insert(script(), "stem", nn.DataParallel(nn.Linear(4, 4))),
        "TorchScript cannot compile it",
    ),
    "frozen that learns": (
        gs.OperatorError,
        lambda: gs.insert_transform(script(), "stem", nn.Linear(4, 4), backward="frozen"),
        "parameters that require grad",
    ),
    "calls Python": (gs.SurgeryError, grl(scripts(CallsBack), ""), "cannot be saved"),
    "example": (gs.SurgeryError, grl(script, "stem", example=X), "leave example off"),
    "sites of an example": (gs.SurgeryError, lambda: gs.sites(script(), example=X), "leave it off"),
    "side": (gs.SurgeryError, grl(script, "stem", side="x"), "side='x'"),
    "head": (gs.SurgeryError, lambda: gs.attach_head(script(), "stem", gs.DomainHead()), "a head was asked for"),
    "graph": (gs.SurgeryError, lambda: gs.graph(script(), "stem"), "the graph of a place"),
    "verify": (gs.SurgeryError, lambda: gs.verify(gs.insert_grl(script(), "stem"), X), "gs.audit"),
    "nothing to remove": (gs.AddressError, lambda: gs.remove(script()), "nothing was inserted in this model"),
    "nothing to remove there": (
        gs.AddressError,
        lambda: gs.remove(gs.insert_grl(script(), "stem"), "head"),
        "There are operators at 'stem'",
    ),
    "a function": (gs.SurgeryError, grl(lambda: torch.jit.script(gs.StopGradient()).forward, "x"), "Give an nn.Module"),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the LSTM, which looks at sizes
@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    error, call, message = REFUSALS[name]
    with pytest.raises(gs.SurgeryError, match=message) as caught:
        call()
    assert type(caught.value) is error


@pytest.mark.parametrize("at", ["stemm", "blocks.0:add", "stem[0]", ["stem", "nowhere"]])
def test_a_refusal_changes_nothing(at: Any) -> None:
    eager = net()
    model = torch.jit.script(eager)
    compiled = model._c
    with pytest.raises(gs.SurgeryError):
        gs.insert_grl(model, at)
    assert model._c is compiled and not gs.operations(model)
    same(model, eager, steps=1)


def test_an_exported_program_names_its_module() -> None:
    program = torch.export.export(net(), (X,))
    with pytest.raises(gs.SurgeryError, match=r"Operate on program.module\(\)"):
        gs.insert_grl(program, "stem")  # type: ignore[type-var]


def test_a_method_that_is_called_forward1_is_not_a_second_call() -> None:
    """A trace gives each call of a module a method of its own, of that very name."""
    eager = whole(Misnamed())
    other = copy.deepcopy(eager)
    other.m.register_forward_hook(lambda m, a, y: gs.reverse_gradient(y, 0.5))
    for model in (torch.jit.script(eager), saved(torch.jit.script(eager))):
        same(gs.insert_grl(model, "m", 0.5), other, torch.tensor([[1.0, -2.0, 3.0]]))
