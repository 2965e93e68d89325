"""Bad input is a ``SurgeryError`` that says what was asked, what is there, what to do; the model is untouched."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import Net, assert_untouched, seeded, snapshot
from torch import Tensor, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))


class Model(Net):
    """With a module that never runs, one that is read and not called, a list, and outputs without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.unused = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.count = Count()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](self.blocks(self.stem(x)))
        return self.head(self.attention(y, y, y)[0]) * self.count(x)[0]


class Count(nn.Module):
    def forward(self, x: Tensor) -> tuple[int, Tensor]:
        return len(x), torch.ones(3, dtype=torch.long)


Call = Callable[[nn.Module], Any]

AT_ONCE: list[tuple[str, Call, type[Exception], list[str]]] = [
    # addresses
    ("a path", lambda m: gs.insert_grl(m, "steem"), gs.AddressError, ["'steem'", "'stem'", "gs.sites"]),
    ("a deep path", lambda m: gs.insert_grl(m, "blocks.0.fc1"), gs.AddressError, ["'blocks.0.fc1'", "'blocks.0.fc'"]),
    ("an index", lambda m: gs.insert_grl(m, "blocks.7"), gs.AddressError, ["'blocks.7'", "'blocks.1'"]),
    ("a glob", lambda m: gs.insert_grl(m, "block.*"), gs.AddressError, ["'block.*'", "blocks", "gs.sites"]),
    ("a glob over what never runs", lambda m: gs.insert_grl(m, "lay*"), gs.AddressError, ["'lay*'"]),
    ("a type", lambda m: gs.insert_grl(m, nn.Conv2d), gs.AddressError, ["Conv2d", "LayerNorm"]),
    ("a type of another kind", lambda m: gs.insert_grl(m, int), gs.AddressError, ["int"]),
    ("a predicate", lambda m: gs.insert_grl(m, lambda n, c: False), gs.AddressError, ["predicate", "LayerNorm"]),
    ("a pattern", lambda m: gs.insert_grl(m, re.compile("st")), gs.AddressError, ["'st'", "whole paths"]),
    ("another's module", lambda m: gs.insert_grl(m, nn.Linear(3, 3)), gs.AddressError, ["Linear", "no part"]),
    ("a number", lambda m: gs.insert_grl(m, 3), gs.AddressError, ["3", "int", "re.Pattern"]),
    ("nothing", lambda m: gs.insert_grl(m, None), gs.AddressError, ["None", "'layer3'"]),
    ("no place", lambda m: gs.insert_grl(m, []), gs.AddressError, ["empty list"]),
    ("an empty nested list", lambda m: gs.insert_grl(m, ["stem", []]), gs.AddressError, ["empty list"]),
    ("one wrong of two", lambda m: gs.insert_grl(m, ["stem", "nope"]), gs.AddressError, ["'nope'"]),
    ("a broken address", lambda m: gs.insert_grl(m, "stem[x]"), gs.AddressError, ["'stem[x]'", "PATH"]),
    ("no edge", lambda m: gs.insert_grl(m, "stem -> nope"), gs.AddressError, ["'nope'", "does not have"]),
    (
        "expect",
        lambda m: gs.insert_grl(m, nn.LayerNorm, expect=3),
        gs.AddressError,
        ["exactly 3", "names 2", "blocks.0"],
    ),
    ("out_proj", lambda m: gs.insert_grl(m, "attention.out_proj"), gs.AddressError, ["out_proj", "never", "weight"]),
    ("out_proj itself", lambda m: gs.insert_grl(m, m.attention.out_proj), gs.AddressError, ["out_proj", "never"]),
    ("a ModuleList", lambda m: gs.insert_grl(m, "layers"), gs.AddressError, ["'layers'", "ModuleList", "no forward"]),
    ("what does not run", lambda m: gs.insert_grl(m, "unused", example=X), gs.AddressError, ["'unused'", "never ran"]),
    (
        "one of two does not run",
        lambda m: gs.insert_grl(m, ["stem", "unused"], example=X),
        gs.AddressError,
        ["'unused'"],
    ),
    ("the input of an op", lambda m: gs.insert_grl(m, "stem:linear", side="input"), gs.AddressError, ["no input side"]),
    ("remove where nothing is", lambda m: gs.remove(m), gs.AddressError, ["nothing was inserted"]),
    ("remove at", lambda m: gs.remove(m, "stem"), gs.AddressError, ["nothing was inserted", "'stem'"]),
    ("remove at no place", lambda m: gs.remove(m, "steem"), gs.AddressError, ["'steem'", "'stem'"]),
    ("graph of two", lambda m: gs.graph(m, nn.LayerNorm), gs.AddressError, ["exactly 1 place;", "names 2"]),
    # coefficients
    ("lambd negative", lambda m: gs.insert_grl(m, "stem", -0.5), gs.OperatorError, ["-0.5", "negative", ">= 0"]),
    ("lambd nan", lambda m: gs.insert_grl(m, "stem", float("nan")), gs.OperatorError, ["nan", "not finite"]),
    ("lambd inf", lambda m: gs.insert_grl(m, "stem", float("inf")), gs.OperatorError, ["inf", "not finite"]),
    ("lambd bool", lambda m: gs.insert_grl(m, "stem", True), gs.OperatorError, ["True", "bool"]),
    ("lambd string", lambda m: gs.insert_grl(m, "stem", "1"), gs.OperatorError, ["'1'", "str"]),
    ("lambd None", lambda m: gs.insert_grl(m, "stem", None), gs.OperatorError, ["None"]),
    ("lambd learnable", lambda m: gs.insert_grl(m, "stem", nn.Parameter(torch.ones(()))), gs.OperatorError, ["grad"]),
    ("lambd of two", lambda m: gs.insert_grl(m, "stem", torch.ones(2)), gs.OperatorError, ["2 elements"]),
    ("scale inf", lambda m: gs.insert_scale_gradient(m, "stem", -float("inf")), gs.OperatorError, ["-inf", "finite"]),
    ("scale nan", lambda m: gs.insert_scale_gradient(m, "stem", float("nan")), gs.OperatorError, ["nan", "finite"]),
    ("scale bool", lambda m: gs.insert_scale_gradient(m, "stem", False), gs.OperatorError, ["False", "bool"]),
    # operators and options
    ("a function as operator", lambda m: gs.insert(m, "stem", torch.round), gs.OperatorError, ["insert_transform"]),
    ("a class as operator", lambda m: gs.insert(m, "stem", gs.StopGradient), gs.OperatorError, ["StopGradient(...)"]),
    ("fn is no function", lambda m: gs.insert_transform(m, "stem", 3), gs.OperatorError, ["3", "int"]),
    ("fn is a module class", lambda m: gs.insert_transform(m, "stem", nn.ReLU), gs.OperatorError, ["ReLU", "class"]),
    ("backward", lambda m: gs.insert_transform(m, "stem", abs, backward="no"), gs.SurgeryError, ["'no'", "'frozen'"]),
    ("side", lambda m: gs.insert_grl(m, "stem", side="left"), gs.SurgeryError, ["'left'", "'input'"]),
    ("example", lambda m: gs.insert_grl(m, "stem", example=[X]), gs.SurgeryError, ["list", "tuple"]),
    ("the model in its own operator", lambda m: gs.insert(m, "stem", m), gs.OperatorError, ["'stem'", "contains"]),
]


@pytest.mark.parametrize(("call", "error", "words"), [c[1:] for c in AT_ONCE], ids=[c[0] for c in AT_ONCE])
def test_refused_at_once(call: Call, error: type[Exception], words: list[str]) -> None:
    model = seeded(Model)
    before, y = snapshot(model), model(X).detach()
    with pytest.raises(gs.SurgeryError) as caught:
        call(model)
    assert type(caught.value) is error
    said = str(caught.value)
    assert [word for word in words if word not in said] == [], said
    assert said.rstrip().endswith(".")
    assert_untouched(before, model)
    assert torch.equal(model(X), y)
    assert gs.operations(model) == []


@pytest.mark.parametrize("operated", [False, True])
def test_a_refusal_leaves_earlier_operations_alone(operated: bool) -> None:
    model = seeded(Model)
    if operated:
        gs.insert_grl(model, ["stem", "blocks.0"], 0.5)
    before = snapshot(model)
    for _, call, error, _ in AT_ONCE:
        if error is not gs.AddressError or not operated:
            with pytest.raises(gs.SurgeryError):
                call(model)
    assert_untouched(before, model)


BUILTINS = {gs.AddressError: LookupError, gs.OperatorError: ValueError, gs.CaptureError: RuntimeError}


@pytest.mark.parametrize("error", BUILTINS)
def test_errors_are_the_builtins_that_callers_expect(error: type[Exception]) -> None:
    assert issubclass(error, BUILTINS[error])
    assert issubclass(error, gs.SurgeryError)


NO_MODEL: list[tuple[str, Callable[[], Any], list[str]]] = [
    ("a number", lambda: 3, ["int", "nn.Module"]),
    ("None", lambda: None, ["NoneType", "nn.Module"]),
    ("a class", lambda: Net, ["class Net", "instance"]),
    ("a state_dict", lambda: seeded().state_dict(), ["state_dict"]),
    ("a list of modules", lambda: [nn.Linear(3, 3)], ["list", "nn.Module"]),
    ("a function", lambda: torch.relu, ["nn.Module"]),
    ("DataParallel", lambda: nn.DataParallel(seeded()), ["DataParallel", "model.module", "before"]),
]
CALLS: dict[str, Callable[[Any], Any]] = {
    "insert": lambda m: gs.insert_grl(m, ""),
    "remove": gs.remove,
    "operations": gs.operations,
    "sites": gs.sites,
    "disabled": lambda m: gs.disabled(m).__enter__(),
    "graph": lambda m: gs.graph(m, ""),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("make", "words"), [c[1:] for c in NO_MODEL], ids=[c[0] for c in NO_MODEL])
def test_no_model(make: Callable[[], Any], words: list[str], call: str) -> None:
    with pytest.raises(gs.SurgeryError) as caught:
        CALLS[call](make())
    assert [word for word in words if word not in str(caught.value)] == []


WHEN_RUN: list[tuple[str, Call, list[str]]] = [
    (
        "another shape",
        lambda m: gs.insert_transform(m, "stem", lambda v: v[:, :2]),
        ["straight_through", "shape", "(5, 2)"],
    ),
    ("no tensor", lambda m: gs.insert_transform(m, "stem", lambda v: 3), ["straight_through", "int"]),
    ("a None", lambda m: gs.insert_transform(m, "stem", lambda v: None), ["straight_through", "None"]),
    ("no floating tensor", lambda m: gs.insert_grl(m, "count"), ["no floating-point", "Choose"]),
    ("an element that is none", lambda m: gs.insert_grl(m, "count[1]"), ["no floating-point"]),
    ("an element that is a number", lambda m: gs.insert_grl(m, "count[0]"), ["no floating-point"]),
    ("an element of a tensor", lambda m: gs.insert_grl(m, "stem[0]"), ["[0]", "tensor"]),
    ("an element too far", lambda m: gs.insert_grl(m, "count[2]"), ["[2]", "[0], [1]"]),
]


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize(("call", "words"), [c[1:] for c in WHEN_RUN], ids=[c[0] for c in WHEN_RUN])
def test_refused_when_it_runs(
    call: Call, words: list[str], with_example: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is known at the forward only; with an example that is the insertion, and then the model is untouched."""
    model = seeded(Model)
    before, y = snapshot(model), model(X).detach()
    if with_example:
        give_example(monkeypatch)
    with pytest.raises(gs.OperatorError) as caught:
        call(model)(X)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    if not with_example:
        gs.remove(model)
    assert_untouched(before, model)
    assert torch.equal(model(X), y)


def give_example(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("insert_grl", "insert_transform"):
        plain = getattr(gs, name)
        monkeypatch.setattr(gs, name, lambda *args, _plain=plain, **kwargs: _plain(*args, example=X, **kwargs))


def test_an_example_on_which_the_model_itself_fails() -> None:
    model = seeded(Model)
    before = snapshot(model)
    with pytest.raises(RuntimeError):
        gs.insert_grl(model, "stem", example=torch.randn(5, 7))
    assert_untouched(before, model)
