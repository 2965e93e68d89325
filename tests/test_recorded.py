"""Operators that were recorded with their model: found, set, switched off and taken out of the program of an export."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import gradsurgery as gs

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """A branch, an in-place neighbour, an op that occurs twice, and a value that two read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.fc(x)))
        return (y * y + x).sin() + x


class Two(nn.Module):
    """Gives two tensors, of which an operator may take one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.body = nn.Sequential(Block(), Block())
        self.two = Two()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        sin, cos = self.two(x)
        return self.head(sin * 2 + cos * x)


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def program(model: nn.Module, through_a_file: bool = False, **options: Any) -> GraphModule:
    exported = torch.export.export(model, (X,), **options)
    if through_a_file:
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        exported = torch.export.load(file)
    return exported.module()  # type: ignore[return-value]


def step(model: nn.Module) -> dict[str, Tensor | None]:
    """The output, every gradient by name, and the running statistics after one step from fresh ones."""
    model.zero_grad(set_to_none=True)
    for name, buffer in model.named_buffers():
        buffer.zero_() if "mean" in name else buffer.fill_(1)
    x = X.clone().requires_grad_()
    out = model(x)
    (out * torch.arange(out.numel()).view_as(out)).sum().backward()
    named = {name: p.grad for name, p in model.named_parameters() if "gs_" not in name}
    return {"out": out.detach(), "x": x.grad, **named, **dict(model.named_buffers())}


def ops(model: GraphModule) -> list[tuple[str, str]]:
    """What a graph computes, without the numbers that names have."""
    return [(node.op, str(node.target)) for node in model.graph.nodes]


def equal(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    assert one.keys() == other.keys()
    pairs = [(one[key], other[key]) for key in one]
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


FACTOR: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: gs.GradientReversal(0.5), "GradientReversal(lambd=0.5)"),
    (lambda: gs.GradientReversal(0.0), "GradientReversal(lambd=0.0)"),
    (lambda: gs.ScaleGradient(0.25), "ScaleGradient(scale=0.25)"),
    (lambda: gs.StopGradient(), "StopGradient()"),
    (lambda: gs.MapGradient(F.relu), "MapGradient(fn=torch.nn.functional:relu)"),
]
TRANSFORM: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: gs.StraightThrough(torch.round), "StraightThrough(fn=as recorded)"),
    (lambda: gs.StraightThrough(nn.Linear(6, 6)), "StraightThrough(fn=as recorded)"),
    (lambda: gs.FrozenTransform(nn.Linear(6, 6)), "FrozenTransform(fn=as recorded)"),
    (lambda: gs.DetachedTransform(nn.Linear(6, 6)), "DetachedTransform(fn=as recorded)"),
]
PLACES = [
    # where it is inserted, and the address it is listed under afterwards
    ("stem", "output", "stem", "output"),
    ("stem", "input", "stem", "input"),
    ("body.0.act", "output", "body.0.act", "output"),
    ("body.0.norm", "input", "body.0.norm", "input"),
    ("body.0", "output", "body.0", "output"),
    ("body", "output", "body.1", "output"),
    ("two[0]", "output", "two:sin", "op"),
    ("", "output", "", "output"),
]


@pytest.mark.parametrize(("make", "shown"), FACTOR + TRANSFORM, ids=[shown for _, shown in FACTOR + TRANSFORM])
@pytest.mark.parametrize("through_a_file", [False, True], ids=["program", "file"])
def test_an_operator_is_found_switched_off_and_taken_out(
    make: Callable[[], nn.Module], shown: str, through_a_file: bool
) -> None:
    operated = gs.insert(made(), "body.0.act", make())
    model = program(operated, through_a_file)
    untouched = step(program(made()))
    due = step(model)
    assert not equal(due, untouched)
    assert equal(due, step(operated))
    (row,) = gs.operations(model)
    assert (row.address, row.side, repr(row.operator), row.runs) == ("body.0.act", "output", shown, None)
    assert "not counted" in str(gs.operations(model))
    with gs.disabled(model):
        assert equal(step(model), untouched)
    assert equal(step(model), due)
    gs.remove(model, "body.0.act")
    assert equal(step(model), untouched)
    assert ops(model) == ops(program(made()))
    assert gs.operations(model) == []
    assert not [name for name, _ in model.named_modules() if "gs_" in name]


@pytest.mark.parametrize(("at", "side", "address", "listed"), PLACES)
@pytest.mark.parametrize("strict", [False, True])
def test_a_place_is_named_and_removed_by_the_name_it_was_given(
    at: str, side: str, address: str, listed: str, strict: bool
) -> None:
    model = program(gs.insert_grl(made(), at, 0.5, side=side), strict=strict)
    (row,) = gs.operations(model)
    assert (row.address, row.side) == (address, listed)
    gs.remove(model, row.address)
    assert equal(step(model), step(program(made())))


@pytest.mark.parametrize("at", ["body", "body.1", "body.*", "**.act"])
def test_the_name_that_was_given_at_the_insertion_removes(at: str) -> None:
    model = program(gs.insert_grl(made(), at, 0.5))
    gs.remove(model, at)
    assert gs.operations(model) == []
    assert equal(step(model), step(program(made())))


def test_several_places_are_told_apart() -> None:
    operated = gs.insert_grl(made(), "stem", 0.5)
    gs.insert_scale_gradient(operated, "body.0", 0.25)
    gs.insert_stop_gradient(operated, "two[1]")
    gs.insert_scale_gradient(operated, "body.0", 2.0)
    model = program(operated)
    rows = [(row.address, repr(row.operator)) for row in gs.operations(model)]
    assert rows == [
        ("stem", "GradientReversal(lambd=0.5)"),
        ("body.0", "ScaleGradient(scale=0.25)"),
        ("body.0", "ScaleGradient(scale=2.0)"),
        ("two:cos", "StopGradient()"),
    ]
    gs.remove(model, "body.0")
    left = gs.insert_stop_gradient(gs.insert_grl(made(), "stem", 0.5), "two[1]")
    assert equal(step(model), step(program(left)))
    gs.remove(model)
    assert equal(step(model), step(program(made())))


@pytest.mark.parametrize(
    ("wanted", "address"),
    [
        ([("stem", "output", 0.5), ("body", "input", 0.25)], ["stem", "body.0"]),
        ([("head", "output", 0.5), ("", "output", 0.25)], ["head", ""]),
        ([("", "input", 0.5), ("stem", "input", 0.25)], ["", "stem"]),
        ([("body.0", "output", 0.5), ("body.1", "input", 0.25)], ["body.0", "body.1"]),
        ([("two[0]", "output", 0.5), ("two[1]", "output", 0.25)], ["two:sin", "two:cos"]),
    ],
)
def test_neighbours_at_one_value_are_told_apart(wanted: list[tuple[str, str, float]], address: list[str]) -> None:
    operated = made()
    for at, side, lambd in wanted:
        gs.insert_grl(operated, at, lambd, side=side)
    model = program(operated)
    rows = gs.operations(model)
    assert [row.operator.lambd for row in rows] == [lambd for _, _, lambd in wanted]
    for k, row in enumerate(rows):
        assert row.address == address[k]
        one = program(operated)
        gs.remove(one, row.address)
        at, side, lambd = wanted[1 - k]
        assert equal(step(one), step(gs.insert_grl(made(), at, lambd, side=side)))


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) + self.c(x)


def forked() -> Forked:
    torch.manual_seed(0)
    return Forked()


def test_an_edge_is_listed_at_its_op_and_is_no_recipe() -> None:
    operated = gs.insert_grl(gs.insert_grl(forked(), "a", 0.5), "a -> b", 0.25)
    model = program(operated)
    assert [(row.address, row.operator.lambd) for row in gs.operations(model)] == [("a", 0.5), (":a", 0.25)]
    with pytest.raises(gs.SurgeryError, match=r"':a'.*takes a part"):
        gs.recipe(model)
    gs.remove(model, ":a")
    assert equal(step(model), step(gs.insert_grl(forked(), "a", 0.5)))


def test_an_edge_in_a_graph_is_refused() -> None:
    model = program(forked())
    code = model.code
    with pytest.raises(gs.CaptureError, match="edge 'a -> b' was asked for in a graph"):
        gs.insert_grl(model, "a -> b")
    assert model.code == code


def test_operators_on_one_value_at_two_places_are_told_apart() -> None:
    operated = gs.insert_grl(made(), "body.1", 0.5)
    gs.insert_scale_gradient(operated, "body:1", 0.25)
    gs.insert_transform(operated, ":head", torch.round)
    gs.insert_stop_gradient(operated, "stem")
    gs.insert_scale_gradient(operated, ":stem", 2.0)
    model = program(operated)
    assert [(row.address, row.side) for row in gs.operations(model)] == [
        ("stem", "output"),
        (":stem", "op"),
        ("body.1", "output"),
        ("body", "output"),
        ("", "output"),
    ]
    for at, eager in (("stem", "stem"), ("body", "body:1"), ("", ":head"), (":stem", ":stem"), ("body.1", "body.1")):
        gs.remove(model, at)
        gs.remove(operated, eager)
        assert equal(step(model), step(operated)), at
    assert gs.operations(model) == []


def test_a_strength_that_is_set_is_what_runs() -> None:
    model = program(gs.insert_grl(made(), "body.0", 0.5))
    (row,) = gs.operations(model)
    row.operator.lambd = 4
    assert row.operator.lambd == 4.0
    assert equal(step(model), step(gs.insert_grl(made(), "body.0", 4.0)))
    with pytest.raises(gs.OperatorError, match="lambd is a finite number >= 0"):
        row.operator.lambd = -1
    gs.remove(model)
    with pytest.raises(gs.OperatorError, match="from which it was removed"):
        row.operator.lambd = 1.0


def test_a_schedule_drives_what_was_recorded() -> None:
    model = program(gs.insert_grl(made(), "body.0", 1.0))
    schedule = gs.GRLScheduler(model, total_steps=4)
    for _ in range(2):
        schedule.step()
    (row,) = gs.operations(model)
    again = gs.insert_grl(made(), "body.0", row.operator.lambd)
    assert 0.5 < row.operator.lambd < 1.0
    assert equal(step(model), step(again))


def test_a_module_that_was_called_twice_is_one_row() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x).sin())

    torch.manual_seed(0)
    plain = Twice()
    model = program(gs.insert_grl(plain, "fc", 0.5))
    (row,) = gs.operations(model)
    row.operator.lambd = 2.0
    gs.operations(plain)[0].operator.lambd = 2.0
    assert equal(step(model), step(plain))
    gs.remove(model)
    assert equal(step(model), step(gs.remove(plain)))


def test_a_recipe_of_what_was_recorded_repeats_it() -> None:
    operated = gs.insert_stop_gradient(gs.insert_grl(made(), "body.0", 0.5), "two")
    gs.insert(operated, "stem", gs.MapGradient(F.relu))
    again = gs.apply(made(), gs.recipe(program(operated)), functions={"torch.nn.functional:relu": F.relu})
    assert equal(step(again), step(operated))


def test_a_recorded_transform_is_no_recipe() -> None:
    model = program(gs.insert_transform(made(), "stem", torch.round))
    with pytest.raises(gs.OperatorError, match="not which function that was"):
        gs.recipe(model)


def test_what_is_inserted_later_comes_after_and_goes_alone() -> None:
    model = program(gs.insert_grl(made(), "body.0", 0.5))
    gs.insert_scale_gradient(model, "body.0", 0.25)
    both = gs.insert_scale_gradient(gs.insert_grl(made(), "body.0", 0.5), "body.0", 0.25)
    assert equal(step(model), step(both))
    assert [type(row.operator).__name__ for row in gs.operations(model)] == ["LiveReversal", "ScaleGradient"]
    with gs.disabled(model):
        assert equal(step(model), step(made()))
    gs.remove(model, "body.0")
    assert equal(step(model), step(made()))


def test_its_ops_are_no_ops_of_the_model() -> None:
    plain, model = program(made()), program(gs.insert_grl(made(), "body.0.act", 0.5))
    assert [site.address for site in gs.sites(model, "**:*")] == [site.address for site in gs.sites(plain, "**:*")]


def test_an_operated_program_that_is_exported_again_is_found_in_the_new_one() -> None:
    first = program(made())
    gs.insert_grl(first, "body.0", 0.5)
    gs.insert_transform(first, "stem", torch.round)
    second = program(first)
    assert [(row.address, repr(row.operator)) for row in gs.operations(second)] == [
        ("stem", "StraightThrough(fn=as recorded)"),
        ("body.0", "GradientReversal(lambd=0.5)"),
    ]
    due = step(first)
    assert equal(step(second), due)
    gs.remove(second)
    assert equal(step(second), step(program(made())))


def test_a_program_inside_of_another_model() -> None:
    model = nn.Sequential(program(gs.insert_grl(made(), "body.0", 0.5)), nn.Linear(2, 2))
    plain = nn.Sequential(program(made()), nn.Linear(2, 2))
    plain[1].load_state_dict(model[1].state_dict())
    (row,) = gs.operations(model)
    assert row.address == "0.body.0"
    with gs.disabled(model):
        assert equal(step(model), step(plain))
    gs.remove(model, "0.body.0")
    assert equal(step(model), step(plain))


@pytest.mark.parametrize("make", [make for make, _ in TRANSFORM if "Frozen" not in _])
def test_a_transform_that_lies_in_two_graphs_is_listed_and_refused(make: Callable[[], nn.Module]) -> None:
    model = program(gs.insert(made(), "stem", make()), strict=True)
    (row,) = gs.operations(model)
    assert row.address == "stem"
    due, code = step(model), model.code
    for call in (lambda: gs.remove(model), lambda: gs.disabled(model).__enter__()):
        with pytest.raises(gs.SurgeryError, match=r"does not tell what it was given.*record that again"):
            call()
    assert model.code == code
    assert equal(step(model), due)


def test_each_operator_alone_is_not_verified_but_all_are_audited() -> None:
    model = program(gs.insert_grl(made(), "body.0", 0.5))
    with pytest.raises(gs.SurgeryError, match="recorded as a graph of ops"):
        gs.verify(model, X)
    found = str(gs.audit(model, X))
    assert "-0.5" in found


def test_for_inference_they_are_left_out(tmp_path: Any) -> None:
    model = program(gs.insert_grl(made().eval(), "body.0", 0.5))
    shipped = gs.to_exported(model, X, tmp_path / "model.pt2", for_inference=True).module()
    assert gs.operations(shipped) == []
    assert ops(shipped) == ops(program(made().eval()))
    assert len(gs.operations(model)) == 1


def test_layers_and_functions_of_the_user_are_listed_too() -> None:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.grl = gs.GradientReversal(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = gs.straight_through(self.grl(self.fc(x)), torch.round)
            return gs.scale_gradient(y.sin() + x, 0.25).cos()

    torch.manual_seed(0)
    plain = Critic()
    model = program(plain)
    rows = [(row.address, row.side, repr(row.operator)) for row in gs.operations(model)]
    assert rows == [
        ("grl", "output", "GradientReversal(lambd=0.5)"),
        (":grl", "op", "StraightThrough(fn=as recorded)"),
        (":add", "op", "ScaleGradient(scale=0.25)"),
    ]
    gs.remove(model)
    plain.grl = nn.Identity()
    plain.forward = lambda x: (plain.fc(x).sin() + x).cos()  # type: ignore[method-assign]
    assert equal(step(model), step(plain))


def test_a_formula_that_only_looks_alike_is_not_one() -> None:
    class Alike(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y, z = x * -0.5, x.clone()
            y.detach().copy_(x.sin().detach())
            z.detach().copy_(x.round().detach())
            w = x.clone()
            w.detach().copy_(x.detach())
            return y + z + w + (x + (x.round() - x).detach())

    assert gs.operations(program(Alike())) == []


def _read_too_soon(x: Tensor) -> Tensor:
    y = x * 2
    z = y.sin()
    y.detach().copy_(x.detach())
    return y + z


def _written_again(x: Tensor) -> Tensor:
    y = x * 2
    alias = y.detach()
    alias.copy_(x.detach())
    alias.add_(1)
    return y.sin()


def _written_through_the_copy(x: Tensor) -> Tensor:
    y = x * 2
    y.detach().copy_(x.detach()).add_(1)
    return y.sin()


def _changed_between(x: Tensor) -> Tensor:
    x = x.cos()
    y = x * 2
    x.mul_(3)
    y.detach().copy_(x.detach())
    return y.sin()


@pytest.mark.parametrize("by_hand", [_read_too_soon, _written_again, _written_through_the_copy, _changed_between])
def test_what_is_read_or_written_besides_the_formula_is_no_operator(
    by_hand: Callable[[Tensor], Tensor],
) -> None:
    class ByHand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return by_hand(x)

    assert gs.operations(program(ByHand())) == []


def test_a_value_of_uneven_strides() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.part = Part()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.fc(x)).cos()

    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()[:, ::2]

    torch.manual_seed(0)
    plain = Strided()
    model = program(gs.insert_grl(plain, "part", 0.5))
    (row,) = gs.operations(model)
    assert (row.address, repr(row.operator)) == ("part", "GradientReversal(lambd=0.5)")
    assert equal(step(model), step(plain))
    gs.remove(model)
    assert equal(step(model), step(gs.remove(plain)))
