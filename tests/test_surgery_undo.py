"""All or nothing, removal, the twin, disabling, the input side, Sequentials."""

import pytest
import torch
from core_helpers import Net, assert_untouched, factors, seeded, snapshot, step
from torch import Tensor, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
PLAIN = {"stem": 1.0, "blocks.0.fc": 1.0, "blocks.0.norm": 1.0, "blocks.1.fc": 1.0, "blocks.1.norm": 1.0, "head": 1.0}


def test_all_or_nothing() -> None:
    class Final(type):
        def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, object]) -> None:
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("final")

    class Closed(nn.Linear, metaclass=Final):
        pass

    for operator in (gs.GradientReversal(), nn.Linear(3, 3)):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Closed(3, 3))
        before = snapshot(model)
        with pytest.raises(gs.SurgeryError, match="final"):
            gs.insert(model, ["0", "1", "2"], operator)
        assert_untouched(before, model)
    model = seeded()
    gs.insert_grl(model, "stem")
    before = snapshot(model)
    with pytest.raises(gs.AddressError):
        gs.insert_grl(model, ["stem", "blocks.0", "nope"])
    assert_untouched(before, model)


UNDONE = {
    "one": ["stem"],
    "Sequential": ["blocks"],
    "root": [""],
    "nested": ["", "blocks", "blocks.0", "blocks.0.fc", "blocks.0.act"],
    "all": ["**"],
}


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("name", UNDONE)
def test_undo_is_exact(name: str, side: str) -> None:
    plain, model = seeded(), seeded()
    for block in (*plain.blocks, *model.blocks):
        block.act.inplace = side == "output"  # the input of a module that changes it in place is refused, see below
    before = snapshot(model)
    for at in UNDONE[name]:
        gs.insert_grl(model, at, 0.5, side=side)
        gs.insert_transform(model, at, nn.Identity(), side=side)
    step(model, X)
    model.zero_grad()
    gs.remove(model)
    assert_untouched(before, model)
    assert factors(plain, model, X) == PLAIN


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    model = seeded()
    gs.insert_grl(model, "blocks.0.act", side="input")
    with pytest.raises(gs.OperatorError, match="in\\s+place"):
        model(X)
    with torch.no_grad():  # nothing is copied where nothing can be wrong
        assert torch.equal(model(X), seeded()(X))


def test_remove_by_place_glob_type_and_module() -> None:
    model = seeded()

    def there() -> list[str]:
        return [o.address for o in gs.operations(model)]

    gs.insert_grl(model, ["stem", "blocks.0", nn.LayerNorm, "head"])
    gs.insert_grl(model, "stem", side="input")
    assert there() == ["stem", "stem", "blocks.0", "blocks.0.norm", "blocks.1.norm", "head"]
    assert gs.remove(model, "blocks.0") is model
    assert there() == ["stem", "stem", "blocks.0.norm", "blocks.1.norm", "head"]
    gs.remove(model, "stem")  # both sides
    assert there() == ["blocks.0.norm", "blocks.1.norm", "head"]
    gs.remove(model, "blocks.1.*")
    assert there() == ["blocks.0.norm", "head"]
    gs.remove(model, model.head)
    assert there() == ["blocks.0.norm"]
    gs.remove(model, nn.LayerNorm)
    assert there() == []
    with pytest.raises(gs.AddressError, match="nothing was inserted in this model"):
        gs.remove(model)


def test_remove_one_element_of_two() -> None:
    model = seeded(lambda: nn.Sequential(nn.LSTM(3, 4)))
    gs.insert_grl(model, ["0[0]", "0[1]"])
    gs.remove(model, "0[0]")
    assert [o.address for o in gs.operations(model)] == ["0[1]"]
    with pytest.raises(gs.AddressError, match=r"nothing was inserted at '0\[0\]'.*'0\[1\]'"):
        gs.remove(model, "0[0]")


def test_names_of_operators_with_state_stay_apart() -> None:
    """Removing one of two of a kind and inserting a third must not overwrite the one that stayed."""
    model = seeded(lambda: nn.Sequential(nn.LSTM(3, 4)))
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    gs.insert_transform(model, "0[0]", first)
    gs.insert_transform(model, "0[1]", second)
    gs.remove(model, "0[0]")
    gs.insert_transform(model, "0[0]", third)
    assert [o.operator.fn for o in gs.operations(model)] == [second, third]
    gs.remove(model, "0[0]")
    assert [o.operator.fn for o in gs.operations(model)] == [second]
    model(torch.randn(2, 5, 3))


# --- the twin --------------------------------------------------------------------------------------------------------


class Trainer:
    """An outside object that must not be copied."""

    def __init__(self) -> None:
        self.seen = 0

    def hook(self, module: nn.Module, args: object, y: Tensor) -> None:
        self.seen += 1

    def __deepcopy__(self, memo: object) -> "Trainer":
        raise AssertionError("copied")

    __copy__ = __reduce_ex__ = __deepcopy__  # type: ignore[assignment]


class Owner(nn.Module):
    """With hooks of its own, children in plain containers, buffers, slots and a tied parameter."""

    __slots__ = ("number", "slot")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.b.weight = self.a.weight
        self.held = {"layers": [self.a, (self.b,)]}
        self.slot = self.c
        self.number = 7
        self.count = 0
        self.a.register_forward_hook(self.counted)

    def counted(self, module: nn.Module, args: object, y: Tensor) -> None:
        self.count += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.slot(self.held["layers"][1][0](self.held["layers"][0](x)))


def test_a_twin_shares_state_and_no_structure() -> None:
    model, plain = seeded(Owner), seeded(Owner)
    trainer = Trainer()
    model.a.register_forward_hook(trainer.hook)
    model.trainer = trainer
    before = snapshot(model)
    twin = gs.insert_grl(model, "a", 0.5, inplace=False)
    assert twin is not model
    assert_untouched(before, model)
    assert gs.operations(model) == []
    assert [o.address for o in gs.operations(twin)] == ["a"]
    for (n, p), (m, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert n == m
        assert p is q
    assert all(p is q for p, q in zip(model.buffers(), twin.buffers(), strict=True))
    assert not {id(m) for m in model.modules()} & {id(m) for m in twin.modules()}
    assert twin.b.weight is twin.a.weight
    assert twin.trainer is trainer
    assert twin.held["layers"][0] is twin.a
    assert twin.slot is twin.c
    assert twin.number == 7
    y0, g0 = step(plain, X)
    y, g = step(twin, X)
    assert torch.equal(y[0], y0[0])
    assert torch.equal(g["a.bias"], g0["a.bias"] * -0.5)
    assert torch.equal(g["b.bias"], g0["b.bias"])
    assert (twin.count, model.count, trainer.seen) == (1, 0, 1)
    y, g = step(model, X)
    assert all(torch.equal(g[n], g0[n]) for n in g0)


def test_a_change_of_the_twins_structure_stays_there() -> None:
    model = seeded()
    before = snapshot(model)
    twin = gs.insert_grl(model, "stem", inplace=False)
    twin.head = nn.Linear(4, 7)
    twin.blocks.append(nn.Linear(4, 4))
    del twin.blocks[0]
    twin.stem.register_forward_hook(lambda *a: None)
    twin.stem.extra = 1
    twin.eval()
    twin.register_buffer("more", torch.zeros(1))
    assert_untouched(before, model)


def test_a_twin_of_an_operated_model_has_coefficients_of_its_own() -> None:
    model = gs.insert_grl(seeded(), "stem", 0.5)
    plain = seeded()
    step(model, X)
    twin = gs.insert_scale_gradient(model, "blocks.0", 2, inplace=False)
    assert [o.runs for o in gs.operations(twin)] == [0, 0]
    gs.operations(twin)[0].operator.lambd = 4.0
    assert factors(plain, model, X) == PLAIN | {"stem": -0.5}
    _y, g = step(twin, X)
    assert torch.equal(g["stem.weight"], step(plain, X)[1]["stem.weight"] * -8)
    gs.remove(twin)
    assert [o.address for o in gs.operations(model)] == ["stem"]
    assert type(twin) is Net


def test_a_twin_of_a_lazy_model_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(gs.SurgeryError, match=r"inplace=False.*(lazy|Lazy)"):
        gs.insert_grl(model, "0", inplace=False)
    model(X)
    assert gs.operations(gs.insert_grl(model, "0", inplace=False))


# --- disabled --------------------------------------------------------------------------------------------------------


def test_disabled() -> None:
    plain, model = seeded(), seeded()
    gs.insert_grl(model, "stem", 0.5)
    gs.insert_transform(model, "", lambda v: v * 1)
    operated = PLAIN | {"stem": -0.5}
    before = snapshot(model)
    with gs.disabled(model):
        assert type(model.stem) is nn.Linear
        assert factors(plain, model, X) == PLAIN
        with gs.disabled(model):
            assert factors(plain, model, X) == PLAIN
        assert factors(plain, model, X) == PLAIN
        assert [o.address for o in gs.operations(model)] == ["", "stem"]
    model.zero_grad()
    assert_untouched(before, model)
    assert factors(plain, model, X) == operated
    with pytest.raises(KeyError), gs.disabled(model), gs.disabled(model):
        raise KeyError
    assert factors(plain, model, X) == operated


def test_surgery_while_disabled_counts_afterwards() -> None:
    plain, model = seeded(), seeded()
    gs.insert_grl(model, "stem", 0.5)
    with gs.disabled(model):
        gs.remove(model, "stem")
        gs.insert_grl(model, "head", 0.5)
    assert [o.address for o in gs.operations(model)] == ["head"]
    assert factors(plain, model, X) == dict.fromkeys(PLAIN, -0.5)
    with gs.disabled(model):
        gs.insert_scale_gradient(model, "head", 2)
    assert factors(plain, model, X) == dict.fromkeys(PLAIN, -1.0)


# --- operations ------------------------------------------------------------------------------------------------------


def test_operations_are_live_and_print() -> None:
    plain, model = seeded(), seeded()
    gs.insert_grl(model, "stem", 0.5)
    gs.insert_stop_gradient(model, "head", side="input")
    gs.remove(model, "head")
    gs.insert_scale_gradient(model, "head", 1.0, side="input")
    first, last = gs.operations(model)
    assert (first.address, first.side, first.runs) == ("stem", "output", 0)
    assert "0 (no eager run yet)" in str(gs.operations(model))
    for lambd in (1.0, 2.0, 0.25):
        first.operator.lambd = lambd
        assert factors(plain, model, X) == PLAIN | {"stem": -lambd}
    assert (first.runs, last.runs) == (3, 3)
    assert repr(first) == "Operation(address='stem', side=output, operator=GradientReversal(lambd=0.25), runs=3)"
    lines = str(gs.operations(model)).splitlines()
    assert [line.split()[0] for line in lines] == ["address", "'stem'", "'head'"]
    with pytest.raises(gs.OperatorError):
        first.operator.lambd = -1
    assert first.operator.lambd == 0.25
