"""GraphModules with parts called twice, several values, in-place ops; and as parts of ordinary models."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import chain, factors, seeded
from torch import Tensor, fx, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))

FORMS: dict[str, Callable[[nn.Module], fx.GraphModule]] = {
    "fx": fx.symbolic_trace,
    "export": lambda m: torch.export.export(m, (X,)).module(),
    "export strict": lambda m: torch.export.export(m, (X,), strict=True).module(),
}
each_form = pytest.mark.parametrize("form", FORMS)


class Twice(nn.Module):
    """One module called twice, and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner = nn.Linear(3, 3), Inner()
        self.again = self.inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(self.a(x)))


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 2)


@each_form
def test_a_module_that_is_called_twice(form: str) -> None:
    model = gs.insert_grl(FORMS[form](seeded(Twice)), "inner", 0.5)
    assert factors(seeded(Twice), model, X)["a"] == 0.25
    gs.remove(model)
    gs.insert_scale_gradient(model, "inner", 0.5, side="input")
    assert factors(seeded(Twice), model, X)["a"] == 0.25


class Several(nn.Module):
    """A part with several values in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.part = nn.Linear(3, 3), nn.Linear(3, 3), Part()

    def forward(self, x: Tensor) -> Tensor:
        out = self.part({"p": self.a(x), "q": (self.b(x),)})
        return out["sum"] + out["both"][1]


class Part(nn.Module):
    def forward(self, held: dict[str, Any]) -> dict[str, Any]:
        p, (q,) = held["p"], held["q"]
        return {"sum": p + q, "both": (p * 2, q * 4)}


@each_form
@pytest.mark.parametrize("side", ["output", "input"])
def test_several_values(form: str, side: str) -> None:
    model = gs.insert_grl(FORMS[form](seeded(Several)), "part", 0.5, side=side)
    assert factors(seeded(Several), model, X) == {"a": -0.5, "b": -0.5}


class InPlaceInside(nn.Module):
    """A part that goes on working in place on the value that it returns, and on the one that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.part, self.b = nn.Linear(3, 3), InPlacePart(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 2
        h.add_(1)
        return self.b(self.part(h))


class InPlacePart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.mul_(4)
        torch.relu_(y)
        return y


@each_form
@pytest.mark.parametrize("side", ["output", "input"])
def test_in_place_ops_after_the_value(form: str, side: str) -> None:
    model = gs.insert_grl(FORMS[form](seeded(InPlaceInside)), "part", 0.5, side=side)
    got = factors(seeded(InPlaceInside), model, X)
    assert got == {"a": -0.5, "b": 1.0}


@pytest.mark.parametrize("at", ["part", "part.0", "part.*", re.compile(r"part\.\d"), nn.Tanh])
def test_a_graph_as_part_of_an_ordinary_model(at: Any) -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "part": fx.symbolic_trace(chain(nn.Tanh()))})
        return OfParts(model["a"], model["part"])

    plain, model = seeded(make), seeded(make)
    code = model.part.code
    gs.insert_grl(model, at, 0.5)
    listed = [o.address for o in gs.operations(model)]
    assert all(path.startswith("part") for path in listed)
    assert factors(plain, model, X)["a"] in (-0.5, -0.125)
    with gs.disabled(model):
        assert set(factors(plain, model, X).values()) == {1.0}
    twin = gs.insert_grl(model, "a", 4.0, inplace=False)
    assert len(gs.operations(twin)) == len(listed) + 1
    for path in listed:
        gs.remove(model, path)  # every listed address is one that can be removed
    assert model.part.code == code
    assert set(factors(plain, model, X).values()) == {1.0}
    assert len(gs.operations(twin)) == len(listed) + 1


class OfParts(nn.Module):
    def __init__(self, a: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.a, self.part = a, part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.a(x))


def test_a_graph_that_has_lost_its_module_stack_is_refused() -> None:
    model = pickle.loads(pickle.dumps(fx.symbolic_trace(seeded())))
    for node in model.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    code = model.code
    with pytest.raises(gs.CaptureError, match="nn_module_stack"):
        gs.insert_grl(model, "blocks.0")
    assert model.code == code
    gs.insert_grl(model, "stem", 0.5)  # what the graph calls is there
    assert factors(seeded(), model, X)["stem"] == -0.5


class Three(nn.Module):
    """Gives two values with a gradient and one without."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin(), x.argmax(1), x.cos()


class OfThree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.three = Three()
        self.ints = Ints()

    def forward(self, x: Tensor) -> Tensor:
        sin, index, cos = self.three(self.stem(x))
        return sin * cos + index[:, None] + self.ints(sin)


class Ints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)[:, None]


def exported_three() -> torch.fx.GraphModule:
    torch.manual_seed(0)
    return torch.export.export(OfThree(), (torch.randn(4, 3),)).module()  # type: ignore[return-value]


def test_of_several_values_those_without_a_gradient_pass() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    plain, operated = exported_three(), gs.insert_grl(exported_three(), "three", 0.5)
    due, out = plain(x), operated(x)
    assert torch.equal(out, due)
    due.sum().backward()
    out.sum().backward()
    assert torch.equal(operated.get_parameter("stem.weight").grad, -0.5 * plain.get_parameter("stem.weight").grad)


@pytest.mark.parametrize(
    ("at", "side", "error", "text"),
    [
        ("three[0]", "output", gs.CaptureError, r"which element of a value that was.*gs.sites\(model, 'three:\*'\)"),
        ("stem['input']", "input", gs.CaptureError, "holds every tensor by itself"),
        ("ints", "output", gs.OperatorError, "a tensor of torch.int64, which has no gradient"),
    ],
)
def test_what_no_forward_could_do_is_refused_at_once(at: str, side: Any, error: type, text: str) -> None:
    model = exported_three()
    code = model.code
    with pytest.raises(error, match=text):
        gs.insert_grl(model, at, side=side)
    assert model.code == code
    assert gs.operations(model) == []
