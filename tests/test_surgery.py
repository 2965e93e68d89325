"""The surgery itself: every operator, what stays, several operators, shared modules, exact undo."""

import copy

import pytest
import torch
from core_helpers import Block, chain, factors, seeded, step
from torch import Tensor, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))


# --- the seven operators ---------------------------------------------------------------------------------------------

VALUE_KEPT = {
    "grl": (lambda m: gs.insert_grl(m, "1", 0.5), -0.5),
    "grl at its default": (lambda m: gs.insert_grl(m, "1"), -1.0),
    "scale": (lambda m: gs.insert_scale_gradient(m, "1", 0.25), 0.25),
    "scale negative": (lambda m: gs.insert_scale_gradient(m, "1", -2), -2.0),
    "scale zero": (lambda m: gs.insert_scale_gradient(m, "1", 0), 0.0),
    "stop": (lambda m: gs.insert_stop_gradient(m, "1"), None),
    "any: reversal": (lambda m: gs.insert(m, "1", gs.GradientReversal(2.0)), -2.0),
    "any: map": (lambda m: gs.insert(m, "1", gs.MapGradient(lambda g: g * 4)), 4.0),
    "straight through the identity": (lambda m: gs.insert_transform(m, "1", lambda v: v.clone()), 1.0),
    "none of the identity": (lambda m: gs.insert_transform(m, "1", lambda v: v, backward="none"), None),
    "frozen identity": (lambda m: gs.insert_transform(m, "1", lambda v: v * 1, backward="frozen"), 1.0),
    "a layer of one's own": (lambda m: gs.insert(m, "1", nn.Identity()), 1.0),
}


@pytest.mark.parametrize("name", VALUE_KEPT)
def test_operators(name: str) -> None:
    insert, factor = VALUE_KEPT[name]
    plain, model = chain(nn.Tanh()), chain(nn.Tanh())
    assert insert(model) is model
    assert factors(plain, model, X) == {"0": factor, "2": 1.0}


TRANSFORMED = {
    "straight_through": (lambda v: v * 4, lambda x, y: x + (y - x).detach()),
    "frozen": (lambda v: v * 4, lambda x, y: y),
    "none": (lambda v: v * 4, lambda x, y: y.detach()),
}


@pytest.mark.parametrize("backward", TRANSFORMED)
def test_transforms(backward: str) -> None:
    fn, combine = TRANSFORMED[backward]
    model, reference = chain(nn.Tanh()), chain(nn.Tanh())
    gs.insert_transform(model, "1", fn, backward=backward)
    x = reference[1](reference[0](X))
    y = reference[2](combine(x, fn(x)))
    y.square().sum().backward()
    out, grads = step(model, X)
    assert torch.allclose(out[0], y)
    for name, p in reference.named_parameters():
        assert (grads[name] is None) == (p.grad is None), name
        assert p.grad is None or torch.allclose(grads[name], p.grad), name


class Doubled(nn.Module):
    """A layer of one's own, with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * self.weight


def test_a_module_of_ones_own_learns_and_moves_with_the_model() -> None:
    model = seeded()
    keys, order = list(model.state_dict()), [n for n, _ in model.named_parameters()]
    mine = Doubled()
    gs.insert(model, "blocks.0", mine)
    assert gs.operations(model)[0].operator is mine
    _y, grads = step(model, X)
    added = [n for n in model.state_dict() if n not in keys]
    assert len(added) == 2
    assert [n for n in model.state_dict() if n not in added] == keys
    assert [n for n, _ in model.named_parameters() if n not in added] == order
    weight = next(n for n in added if n.endswith("weight"))
    assert grads[weight].any()
    assert mine.seen == 1
    model.eval().double().requires_grad_(False)
    assert not mine.training
    assert mine.weight.dtype == mine.seen.dtype == torch.float64
    assert not mine.weight.requires_grad
    model.train()
    assert mine.training
    loaded = seeded()
    gs.insert(loaded, "blocks.0", Doubled())
    loaded.load_state_dict(model.state_dict())
    assert loaded.state_dict()[added[1]] == 1
    gs.remove(model)
    assert list(model.state_dict()) == keys
    seeded().load_state_dict(model.state_dict())


# --- what stays ------------------------------------------------------------------------------------------------------


class Talkative(Block):
    """With class attributes, a property, a static and a class method, and hooks of every kind."""

    kind = "talkative"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.register_forward_pre_hook(lambda m, a: self.calls.append("pre"))
        self.register_forward_pre_hook(lambda m, a, k: self.calls.append("pre kw"), with_kwargs=True)
        self.register_forward_hook(lambda m, a, y: self.calls.append("post"))
        self.register_forward_hook(lambda m, a, k, y: self.calls.append("post kw"), with_kwargs=True, always_call=True)
        self.register_full_backward_pre_hook(lambda m, g: self.calls.append("backward pre"))
        self.register_full_backward_hook(lambda m, i, o: self.calls.append("backward"))
        self.register_state_dict_pre_hook(lambda m, prefix, keep: self.calls.append("save"))
        self.register_load_state_dict_post_hook(lambda m, keys: self.calls.append("load"))

    @property
    def width(self) -> int:
        return self.fc.in_features

    @classmethod
    def name(cls) -> str:
        return cls.__qualname__

    @staticmethod
    def three() -> int:
        return 3

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


def test_the_patient_stays_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Talkative(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    patient, cls = model[1], type(model[1])
    names, keys, state = list(model.named_parameters()), list(model.state_dict()), model.state_dict()
    buffers, modules = list(model.named_buffers()), list(model.named_modules())
    text, attributes = repr(model), set(dir(patient))
    pointers = [p.data_ptr() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gs.insert_grl(model, "1", 0.5)
    assert model[1] is patient
    assert isinstance(patient, Talkative)
    assert issubclass(type(patient), cls)
    assert (type(patient).__name__, type(patient).__module__) == (cls.__name__, cls.__module__)
    assert type(patient).__qualname__ == cls.__qualname__
    assert type(patient).__doc__ == cls.__doc__
    assert (patient.kind, patient.width, patient.name(), patient.three()) == ("talkative", 4, cls.__qualname__, 3)
    assert all(n == m and p is q for (n, p), (m, q) in zip(names, model.named_parameters(), strict=True))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert list(model.named_buffers()) == buffers
    assert list(model.named_modules()) == modules
    assert list(model.state_dict()) == keys
    assert repr(model) == text
    assert attributes <= set(dir(patient))
    assert model.load_state_dict(state, strict=True).missing_keys == []
    patient.calls.clear()
    step(model, X)
    assert patient.calls == ["pre", "pre kw", "post", "post kw", "backward pre", "backward"]
    weight = model[0].weight.clone()
    optimizer.step()
    step(plain, X)
    assert torch.equal(model[0].weight, weight + 0.25 * plain[0].weight.grad)  # climbs
    gs.remove(model)
    assert type(patient) is cls
    model.load_state_dict(state, strict=True)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


# --- several operators -----------------------------------------------------------------------------------------------


def test_several_at_one_place_run_in_the_order_of_insertion() -> None:
    model = chain(nn.Tanh())
    gs.insert_transform(model, "1", lambda v: v + 1)
    gs.insert_transform(model, "1", lambda v: v * 2)
    gs.insert_grl(model, "1", 0.5)
    y = model[2]((torch.tanh(model[0](X)) + 1) * 2)
    assert torch.equal(model(X), y)
    assert [o.address for o in gs.operations(model)] == ["1"] * 3
    plain = chain(nn.Tanh())
    gs.insert_scale_gradient(model, "1", 4)
    gs.remove(model)
    gs.insert_scale_gradient(gs.insert_grl(model, "1", 0.5), "1", 4)
    assert factors(plain, model, X) == {"0": -2.0, "2": 1.0}


def test_nested_places_and_repeated_insertion() -> None:
    plain, model = seeded(), seeded()
    for at, factor in (("", 2), ("blocks", 0.5), ("blocks.0", 0.5), ("blocks.0.fc", -1), ("stem", 4), ("stem", 0.25)):
        gs.insert_scale_gradient(model, at, factor)
    right = {
        "stem": None,
        "blocks.0.fc": -0.5,
        "blocks.0.norm": 0.5,
        "blocks.1.fc": 1.0,
        "blocks.1.norm": 1.0,
        "head": 2.0,
    }
    _, g0 = step(plain, X)
    _y, g = step(model, X)
    for name, factor in right.items():
        if factor is not None:
            assert torch.equal(g[f"{name}.weight"], g0[f"{name}.weight"] * factor), name
    before = len(gs.operations(model))
    for _ in range(3):
        gs.insert_grl(model, "head")
        gs.remove(model, "head")
    assert len(gs.operations(model)) == before


class Shared(nn.Module):
    """One object under two names, called under each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.a(x)))


def test_a_shared_module_is_operated_on_once_and_listed_twice() -> None:
    plain, model = seeded(Shared), seeded(Shared)
    gs.insert_scale_gradient(model, "first", 0.5)
    assert [o.address for o in gs.operations(model)] == ["first", "second"]
    _, g0 = step(plain, X)
    _, g = step(model, X)
    assert torch.equal(g["a.weight"], g0["a.weight"] * 0.25)  # once for each call
    assert {o.runs for o in gs.operations(model)} == {2}
    gs.remove(model, "second")
    assert gs.operations(model) == []
    gs.insert_scale_gradient(model, ["first", "second", nn.Linear], 0.5, expect=2)
    _, g = step(model, X)
    assert torch.equal(g["a.weight"], g0["a.weight"] * 0.125)


def test_a_reused_module_has_the_factor_at_each_call() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.b(self.b(self.a(x))))

    plain, model = seeded(Reused), seeded(Reused)
    gs.insert_grl(model, "b", 0.5)
    assert factors(plain, model, X) == {"a": -0.125}
