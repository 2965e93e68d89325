"""A GraphModule as the patient: traced, exported, copied, traced again, and as a part of an ordinary model."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import seeded, step
from torch import Tensor, fx, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))

FORMS: dict[str, Callable[[nn.Module], fx.GraphModule]] = {
    "fx": fx.symbolic_trace,
    "export": lambda m: torch.export.export(m, (X,)).module(),
    "export, eval": lambda m: torch.export.export(m.eval(), (X,)).module(),
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
