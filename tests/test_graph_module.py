"""A GraphModule as the patient: traced, exported, copied, traced again, and as a part of an ordinary model."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import Net, chain, factors, seeded, step
from torch import Tensor, fx, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))

FORMS: dict[str, Callable[[nn.Module], fx.GraphModule]] = {
    "fx": fx.symbolic_trace,
    "export": lambda m: torch.export.export(m, (X,)).module(),
    "export strict": lambda m: torch.export.export(m, (X,), strict=True).module(),
}
each_form = pytest.mark.parametrize("form", FORMS)

PLACES: list[tuple[str, Any, str]] = [
    ("leaf", "stem", "output"),
    ("dissolved", "blocks.0", "output"),
    ("Sequential", "blocks", "output"),
    ("root", "", "output"),
    ("input of a leaf", "head", "input"),
    ("input of a dissolved one", "blocks.1", "input"),
    ("glob", "blocks.*", "output"),
    ("deep glob", "**.norm", "output"),
    ("type", nn.LayerNorm, "output"),
    ("pattern", re.compile(r"blocks\.\d\.fc"), "output"),
    ("list", ["stem", "blocks.1.fc"], "output"),
    ("called twice", "blocks.0.act", "output"),
]


def reference(at: Any, side: str, factor: float = 0.5) -> nn.Module:
    """The same places by module hooks."""
    model = seeded()
    listed = gs.operations(gs.insert_grl(seeded(), at, side=side))
    for path in {operation.address for operation in listed}:
        module = model.get_submodule(path)
        if side == "output":
            module.register_forward_hook(lambda m, a, y: gs.reverse_gradient(y, factor))
        else:
            module.register_forward_pre_hook(lambda m, a: gs.reverse_gradient(a, factor))
    return model


def same(model: nn.Module, other: nn.Module, x: Tensor = X) -> None:
    y0, g0 = step(other, x)
    y1, g1 = step(model, x)
    assert all(torch.equal(a, b) for a, b in zip(y0, y1, strict=True))
    assert g0.keys() == g1.keys()
    assert any(g is not None and g.any() for g in g0.values())
    for name, g in g0.items():
        assert (g is None and g1[name] is None) or torch.equal(g, g1[name]), name


@each_form
@pytest.mark.parametrize(("at", "side"), [p[1:] for p in PLACES], ids=[p[0] for p in PLACES])
def test_places(form: str, at: Any, side: str) -> None:
    model = FORMS[form](seeded())
    code, names = model.code, [n for n, _ in model.named_modules()]
    assert gs.insert_grl(model, at, 0.5, side=side) is model
    same(model, reference(at, side))
    assert "gradsurgery" in model.code  # to be seen by whoever reads the graph
    assert all(o.runs for o in gs.operations(model))
    for operation in gs.operations(model):
        operation.operator.lambd = 2.0
    same(model, reference(at, side, 2.0))
    with gs.disabled(model):
        same(model, seeded())
        with gs.disabled(model):
            same(model, seeded())
        same(model, seeded())
    same(model, reference(at, side, 2.0))
    gs.remove(model, at)
    assert model.code == code
    assert [n for n, _ in model.named_modules()] == names
    assert gs.operations(model) == []
    same(model, seeded())


@each_form
def test_keys_stay(form: str) -> None:
    model = FORMS[form](seeded())
    keys, order = list(model.state_dict()), [n for n, _ in model.named_parameters()]
    gs.insert_grl(model, ["", "blocks.0", "stem"])
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_parameters()] == order
    model.load_state_dict(seeded().state_dict(), strict=True)


@each_form
def test_a_second_operator_comes_after_the_first(form: str) -> None:
    for at, side in (("blocks.0", "output"), ("stem", "output"), ("blocks.1", "input"), ("", "output")):
        model, other = FORMS[form](seeded()), seeded()
        gs.insert_transform(model, at, lambda v: v + 1, side=side)
        gs.insert_transform(model, at, lambda v: v * 2, side=side)
        gs.insert_grl(model, at, 0.5, side=side)
        module = other.get_submodule(at)

        def operate(y: Tensor) -> Tensor:
            return gs.reverse_gradient(gs.straight_through(y, lambda v: (v + 1) * 2), 0.5)

        if side == "output":
            module.register_forward_hook(lambda m, a, y: operate(y))
        else:
            module.register_forward_pre_hook(lambda m, a: operate(a[0]))
        same(model, other)


@each_form
def test_a_twin(form: str) -> None:
    model = FORMS[form](seeded())
    gs.insert_grl(model, "stem", 0.5)
    twin = gs.insert_scale_gradient(model, "blocks.0", 2, inplace=False)
    assert len(gs.operations(model)) == 1
    assert all(p is q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    gs.operations(twin)[0].operator.lambd = 4.0
    same(model, reference("stem", "output"))
    _, g0 = step(seeded(), X)
    _, g = step(twin, X)
    assert torch.equal(g["stem.weight"], g0["stem.weight"] * -8)
    gs.remove(twin)
    assert len(gs.operations(model)) == 1


@each_form
def test_copies_and_traces_of_an_operated_graph(form: str) -> None:
    model = gs.insert_grl(FORMS[form](seeded()), ["blocks.0", "head"], 0.5)
    other = reference(["blocks.0", "head"], "output")
    copied = copy.deepcopy(model)
    same(copied, other)
    assert len(gs.operations(copied)) == 2
    gs.operations(copied)[0].operator.lambd = 8.0
    same(model, other)
    if form == "fx":
        same(pickle.loads(pickle.dumps(model)), other)
    same(fx.symbolic_trace(model), other)
    gs.remove(copied)
    same(copied, seeded())


@each_form
def test_listed_addresses_work(form: str) -> None:
    model = FORMS[form](seeded())
    sites = gs.sites(model)
    assert {"", "stem", "blocks.0", "blocks.1.norm", "head"} <= {site.address for site in sites}
    for site in [*sites, *gs.sites(model, "**:*")]:
        gs.insert_grl(model, site.address, 0.5)
        model(X)
        assert all(o.runs for o in gs.operations(model)), site
        gs.remove(model)
    same(model, seeded())


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
    same(model, reference("stem", "output"))


BAD: list[tuple[Any, str]] = [
    ("steem", "'stem'"), ("nope*", "'nope*'"), (nn.Conv2d, "Conv2d"), (lambda n, m: False, "predicate"), (3, "int"),
    (re.compile("x"), "'x'"), (nn.Linear(3, 3), "Linear"), (["stem", "nope"], "'nope'"), ("stem[0].x", "no address"),
    ("blocks.0:nope", "nope"), ([], "empty"), (None, "None"),
]  # fmt: skip


@each_form
@pytest.mark.parametrize(("at", "words"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_places(form: str, at: Any, words: str) -> None:
    model = FORMS[form](seeded())
    code, names = model.code, [n for n, _ in model.named_modules()]
    with pytest.raises(gs.AddressError) as caught:
        gs.insert_grl(model, at)
    assert words in str(caught.value)
    with pytest.raises(gs.AddressError, match="exactly 7"):
        gs.insert_grl(model, "stem", expect=7)
    with pytest.raises(gs.AddressError, match="nothing was inserted"):
        gs.remove(model)
    assert model.code == code
    assert [n for n, _ in model.named_modules()] == names


