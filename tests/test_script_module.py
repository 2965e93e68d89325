"""A ScriptModule as the patient: scripted and traced, from memory and from a file."""

import copy
import re
import threading
from typing import Any

import pytest
import torch
from script_helpers import FORMS, X, by_hand, hooked, net, same, saved, step, whole
from torch import Tensor, nn

import gradsurgery as gs

pytestmark = pytest.mark.usefixtures("scripting")
each_form = pytest.mark.parametrize("form", FORMS)

PLACES: list[tuple[str, Any, str, list[str]]] = [
    ("leaf", "stem", "output", ["stem"]),
    ("one of two of a type", "blocks.0", "output", ["blocks.0"]),
    ("the other of the two", "blocks.1", "output", ["blocks.1"]),
    ("inside of one", "blocks.1.norm", "output", ["blocks.1.norm"]),
    ("Sequential", "blocks", "output", ["blocks.1"]),
    ("root", "", "output", [""]),
    ("input of a leaf", "head", "input", ["head"]),
    ("input of one of two", "blocks.1", "input", ["blocks.1"]),
    ("input of a Sequential", "blocks", "input", ["blocks.0"]),
    ("glob", "blocks.*", "output", ["blocks.0", "blocks.1"]),
    ("deep glob", "**.norm", "output", ["blocks.0.norm", "blocks.1.norm"]),
    ("type", nn.LayerNorm, "output", ["blocks.0.norm", "blocks.1.norm"]),
    ("pattern", re.compile(r"blocks\.\d\.fc"), "output", ["blocks.0.fc", "blocks.1.fc"]),
    ("list", ["stem", "blocks.1.fc"], "output", ["stem", "blocks.1.fc"]),
    (
        "predicate",
        lambda name, module: module.original_name == "Block",
        "output",
        ["blocks.0", "blocks.1"],
    ),
    ("called twice", "blocks.0.act", "output", ["blocks.0.act"]),
]


@each_form
@pytest.mark.parametrize(("at", "side", "paths"), [p[1:] for p in PLACES], ids=[p[0] for p in PLACES])
def test_places(form: str, at: Any, side: str, paths: list[str]) -> None:
    eager = net()
    model = FORMS[form](eager)
    code, keys = model.code, list(model.state_dict())
    children, parameters = dict(model.named_modules()), list(model.parameters())
    step(model, X)
    assert gs.insert_grl(model, at, 0.5, side=side, expect=len(paths)) is model
    assert len(gs.operations(model)) == len(paths)
    assert list(model.state_dict()) == keys
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(module is dict(model.named_modules())[name] for name, module in children.items())
    same(model, hooked(eager, paths, side))
    for operation in gs.operations(model):
        operation.operator.lambd = 2.0
    same(model, hooked(eager, paths, side, lambda x: by_hand(x, -2.0)))
    with gs.disabled(model):
        same(model, eager)
        assert len(gs.operations(model)) == len(paths)
    same(model, hooked(eager, paths, side, lambda x: by_hand(x, -2.0)))
    gs.remove(model, at)
    assert gs.operations(model) == []
    assert model.code == code
    assert list(dict(model.named_modules())) == list(children)
    same(model, eager)


@each_form
def test_a_file_remembers(form: str) -> None:
    eager = net()
    model = gs.insert_grl(FORMS[form](eager), "blocks", 0.5)
    gs.insert_scale_gradient(model, "blocks.0.norm", 0.25)
    gs.insert_stop_gradient(model, "head", side="input")
    loaded = saved(model)
    rows = [(row.address, row.side, repr(row.operator)) for row in gs.operations(loaded)]
    assert rows == [
        ("blocks.0.norm", "output", "ScaleGradient(scale=0.25)"),
        ("blocks", "output", "GradientReversal(lambd=0.5)"),
        ("head", "input", "StopGradient()"),
    ]
    gs.remove(loaded, "head")
    gs.operations(loaded)[1].operator.lambd = 4.0
    loaded = saved(loaded)
    by_blocks = hooked(eager, ["blocks.1"], operate=lambda x: by_hand(x, -4.0))
    same(loaded, hooked(by_blocks, ["blocks.0.norm"], operate=lambda x: by_hand(x, 0.25)))
    gs.remove(loaded)
    again = saved(loaded)
    assert [name for name, _ in again.named_modules()] == [name for name, _ in FORMS[form](eager).named_modules()]
    same(again, eager)


@each_form
def test_a_second_operator_comes_after_the_first(form: str) -> None:
    for at, side in (("blocks.0", "output"), ("stem", "output"), ("blocks.1", "input"), ("", "output")):
        eager = net()
        model = FORMS[form](eager)
        gs.insert_transform(model, at, Plus(), side=side)
        gs.insert_transform(model, at, Twice(), side=side)
        gs.insert_grl(model, at, 0.5, side=side)
        operate = lambda x: by_hand(x, -0.5, lambda v: (v + 1) * 2)  # noqa: E731
        same(model, hooked(eager, [at], side, operate))
        assert [type(row.operator).__name__.strip("_") for row in gs.operations(model)][-1] == "LiveReversal"


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def rounded(x: Tensor) -> Tensor:
    return torch.round(x * 4) / 4


def clipped(g: Tensor) -> Tensor:
    return g.clamp(-0.5, 0.5)


class MappedByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.5, 0.5)


def frozen_linear() -> nn.Module:
    torch.manual_seed(7)
    return nn.Linear(4, 4)


OPERATORS: dict[str, tuple[Any, Any]] = {
    "reversal": (lambda: gs.GradientReversal(0.5), lambda x: by_hand(x, -0.5)),
    "reversal by 0": (lambda: gs.GradientReversal(0.0), lambda x: by_hand(x, -0.0)),
    "scale": (lambda: gs.ScaleGradient(0.25), lambda x: by_hand(x, 0.25)),
    "stop": (gs.StopGradient, lambda x: by_hand(x, None)),
    "straight through, a function": (lambda: gs.StraightThrough(rounded), lambda x: by_hand(x, 1.0, rounded)),
    "straight through, a scripted function": (
        lambda: gs.StraightThrough(torch.jit.script(rounded)),
        lambda x: by_hand(x, 1.0, rounded),
    ),
    "straight through, torch.round": (lambda: gs.StraightThrough(torch.round), lambda x: by_hand(x, 1.0, torch.round)),
    "straight through, a ScriptModule": (
        lambda: gs.StraightThrough(torch.jit.script(Plus())),
        lambda x: by_hand(x, 1.0, Plus()),
    ),
    "detached": (lambda: gs.DetachedTransform(Twice()), lambda x: by_hand(x, None, Twice())),
    "frozen": (
        lambda: gs.FrozenTransform(frozen_linear().requires_grad_(False)),
        lambda x: nn.functional.linear(x, frozen_linear().weight.detach(), frozen_linear().bias.detach()),
    ),
    "a function of the gradient, by its name": (
        lambda: gs.MapGradient(clipped),
        lambda x: MappedByHand.apply(x),
    ),
    "a layer of one's own": (Twice, lambda x: x * 2),
}


@pytest.mark.parametrize("form", ["script", "trace, saved"])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("at", ["blocks.0", ["blocks.0", "blocks.1.norm"]], ids=["one", "two"])
def test_operators(form: str, name: str, at: Any) -> None:
    eager = net()
    make, operate = OPERATORS[name]
    model = gs.insert(FORMS[form](eager), at, make())
    paths = [at] if isinstance(at, str) else at
    for loaded in (model, saved(model)):
        other = hooked(eager, paths, operate=operate)
        y0, g0 = step(other, X)
        for _ in range(5):
            y1, g1 = step(loaded, X)
            assert all(torch.equal(a, b) for a, b in zip(y0, y1, strict=True))
            for key, g in g0.items():
                assert (g is None and g1[key] is None) or torch.equal(g, g1[key]), key
    gs.remove(model)
    same(model, eager)


def test_parameters_of_a_transform_are_added_and_trained() -> None:
    eager = net()
    model = torch.jit.script(eager)
    torch.manual_seed(7)
    layer = nn.Linear(4, 4)
    gs.insert(model, "blocks.0", layer)
    added = [name for name in model.state_dict() if "gs_" in name]
    assert added and any(p is layer.weight for p in model.parameters())
    model(X).sum().backward()
    assert layer.weight.grad is not None
    saved(model).load_state_dict(model.state_dict(), strict=True)


@each_form
def test_a_twin_leaves_the_original(form: str) -> None:
    eager = net()
    model = FORMS[form](eager)
    code = model.code
    twin = gs.insert_grl(model, "blocks.0", 0.5, inplace=False)
    assert twin is not model and model.code == code and not gs.operations(model)
    assert all(p is q for p, q in zip(twin.parameters(), model.parameters(), strict=True))
    assert all(p is q for p, q in zip(twin.buffers(), model.buffers(), strict=True))
    same(model, eager)
    same(twin, hooked(eager, ["blocks.0"]))
    same(model, eager)


def test_an_optimizer_stays_valid() -> None:
    model = torch.jit.script(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gs.insert_grl(model, "stem")
    before = model.stem.weight.detach().clone()
    model(X).sum().backward()
    optimizer.step()
    assert torch.equal(model.stem.weight, before - 0.5 * model.stem.weight.grad)


def test_what_was_scripted_from_the_same_module_is_not_touched() -> None:
    """Two scripted instances of one class share their types in the one process."""
    eager = net()
    one, other = torch.jit.script(eager), torch.jit.script(eager)
    gs.insert_grl(one, "blocks.0", 0.5)
    same(other, eager)
    same(torch.jit.script(eager), eager)
    same(one, hooked(eager, ["blocks.0"]))


def test_sites_and_operations_are_tables() -> None:
    model = gs.insert_grl(torch.jit.script(net()), "blocks.0", 0.5)
    assert [site.address for site in gs.sites(model, "blocks.0.*")] == ["blocks.0.fc", "blocks.0.norm", "blocks.0.act"]
    assert [site.op for site in gs.sites(model, "**.norm")] == ["LayerNorm", "LayerNorm"]
    assert str(gs.operations(model)).split() == (
        ["address", "side", "operator", "runs", "'blocks.0'", "output", "GradientReversal(lambd=0.5)", "not", "counted"]
    )


def test_the_strength_is_checked_and_scheduled() -> None:
    model = gs.insert_grl(torch.jit.script(net()), "blocks.0", 0.5)
    operator = gs.operations(model)[0].operator
    with pytest.raises(gs.OperatorError, match="negative"):
        operator.lambd = -1.0
    assert operator.lambd == 0.5
    scheduler = gs.GRLScheduler(model, total_steps=2, ramp=lambda p: p)
    for due in (0.0, 0.5, 1.0):
        assert gs.operations(model)[0].operator.lambd == due
        if due < 1.0:
            scheduler.step()
    gs.insert_stop_gradient(model, "stem")  # the compiled model is another now, and the operator the same
    operator.lambd = 0.25
    assert gs.operations(saved(model))[1].operator.lambd == 0.25


def test_autocast_and_a_second_derivative() -> None:
    """Held against the untouched script, which rounds as this one does."""

    def grads(model: Any) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(X)
        out.float().square().sum().backward()
        return [p.grad for p in model.parameters()]

    def second(model: Any) -> Tensor:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    plain, model = torch.jit.script(net()), gs.insert_grl(torch.jit.script(net()), "", 0.5)
    for _ in range(5):
        for due, there in zip(grads(plain), grads(model), strict=True):
            assert torch.equal(there, due * -0.5)
        # Up to rounding: what is written out by hand below adds and subtracts the value.
        torch.testing.assert_close(second(model), second_by_hand())


def second_by_hand() -> Tensor:
    x = X.clone().requires_grad_()
    out = net()(x)
    out = out * -0.5 + (out.detach() + 0.5 * out.detach())
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def test_threads_share_an_operated_module() -> None:
    model, due, seen = gs.insert_grl(torch.jit.script(net()), "blocks.0", 0.5), [], []

    def run(network: Any, into: list[Tensor]) -> None:
        x = X.clone().requires_grad_()
        into.extend(torch.autograd.grad(network(x).square().sum(), x))

    run(hooked(net(), ["blocks.0"]), due)
    threads = [threading.Thread(target=lambda: [run(model, seen) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 20 and all(torch.equal(one, due[0]) for one in seen)


@pytest.mark.parametrize("stop", [False, True])
def test_frozen_afterwards(stop: bool) -> None:
    model = torch.jit.script(net())
    model = gs.insert_stop_gradient(model, "blocks.0") if stop else gs.insert_grl(model, "blocks.0", 0.5)
    frozen, due = torch.jit.freeze(model.eval()), hooked(net(), ["blocks.0"])
    for _ in range(5):
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        out = frozen(x)
        assert torch.equal(out, due(y))
        assert out.requires_grad is not stop
        if not stop:
            assert torch.equal(*(torch.autograd.grad(o.square().sum(), i)[0] for o, i in ((out, x), (due(y), y))))


class Recursive(nn.Module):
    """Instances of one class inside of one another."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.inner: nn.Module = Recursive(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.fc(x)) + x


@pytest.mark.parametrize("at", ["", "inner", "inner.inner"])
def test_one_class_inside_of_itself(at: str) -> None:
    eager = whole(Recursive(2))
    x = torch.tensor([[1.0, -2.0, 3.0], [0.0, 1.0, 1.0]])
    same(gs.insert_grl(torch.jit.script(eager), at, 0.5), hooked(eager, [at]), x)


def test_one_of_several_is_removed_and_inserted_again() -> None:
    eager = net()
    model = gs.insert_grl(torch.jit.script(eager), "blocks.*", 0.5)
    gs.remove(model, "blocks.0")
    same(model, hooked(eager, ["blocks.1"]))
    gs.insert_grl(model, "blocks.0", 0.5)
    same(model, hooked(eager, ["blocks.0", "blocks.1"]))


def test_a_part_of_a_python_model_is_operated_on_by_itself() -> None:
    eager = net()
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(eager))
    plain = nn.Sequential(copy.deepcopy(model[0]), eager)
    gs.insert_grl(model[1], "blocks.0", 0.5)
    assert [row.address for row in gs.operations(model)] == ["1.blocks.0"]
    same(model, hooked(plain, ["1.blocks.0"]))
    with gs.disabled(model):
        same(model, plain)
    with pytest.raises(gs.SurgeryError, match="TorchScript has compiled"):
        gs.verify(model, X)
    rows = {row.parameter: row.factor for row in gs.audit(model, X).rows}
    assert (rows["0.weight"], rows["1.head.weight"]) == (-0.5, 1.0)
    gs.insert_grl(model, "0")
    gs.remove(model)
    assert not gs.operations(model)
    same(model, plain)


def test_a_part_of_a_script_module_is_refused_in_place() -> None:
    model = torch.jit.script(net())
    with pytest.raises(gs.SurgeryError, match="is the child 'blocks' of another one"):
        gs.insert_grl(model.blocks, "0")
    part = gs.insert_grl(model.blocks, "0", inplace=False)
    assert gs.operations(part) and not gs.operations(model)
    alone = saved(model).blocks  # whose parent is gone
    assert gs.operations(gs.insert_grl(alone, "0"))


def test_a_recipe_is_read_from_a_file_and_applied_to_another() -> None:
    eager = net()
    model = gs.insert_grl(torch.jit.script(eager), "blocks", 0.5)
    gs.insert_scale_gradient(model, ["blocks.0.norm", "blocks.1.norm"], 0.25)
    gs.insert_stop_gradient(model, "head", side="input")
    gs.insert_grl(model, "blocks", 0.25)
    loaded = saved(model)
    recipe = gs.recipe(loaded)
    assert [one["at"] for one in recipe["operations"]] == ["blocks.0.norm", "blocks", "blocks", "blocks.1.norm", "head"]
    assert recipe == gs.recipe(gs.apply(torch.jit.script(eager), recipe)) == gs.recipe(gs.apply(eager, recipe))
