"""Other tools that change a module's class, its forward or its parameters: before the surgery, after it, and undone."""

import copy
import functools
import types
import warnings
from collections.abc import Callable

import pytest
import torch
from core_helpers import assert_untouched, chain, factors, snapshot, step
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
MIDDLE = {"0": -0.5, "2": 1.0}


# --- a patched forward -----------------------------------------------------------------------------------------------


class Patched(nn.Module):
    """As timm's Partial_conv3 chooses its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        if how == "method":
            self.forward = self.other
        elif how == "partial":
            self.forward = functools.partial(Patched.other, self, k=2)
        elif how == "wrapper":
            plain = self.forward
            self.forward = functools.update_wrapper(functools.partial(doubled, plain), plain)
        elif how == "bound function":
            self.forward = types.MethodType(elsewhere, self)
        elif how == "lambda":
            self.forward = lambda x: torch.tanh(x)
        elif how == "builtin":
            self.forward = torch.tanh
        elif how == "module":
            self.__dict__["forward"] = nn.Tanh()

    def other(self, x: Tensor, k: int = 2) -> Tensor:
        return self.l(x) * k

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)


def doubled(forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    return forward(x) * 2


def elsewhere(self: Patched, x: Tensor, *, k: int = 4) -> Tensor:
    return self.l(x) * k


PATCHES = ["method", "partial", "wrapper", "bound function", "lambda", "builtin", "module"]


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("how", PATCHES)
def test_a_patched_forward(how: str, side: str) -> None:
    plain, model = (chain(Patched(how)) for _ in range(2))
    if how == "wrapper":
        plain[1].load_state_dict(model[1].state_dict())
    model.load_state_dict(plain.state_dict())
    before = snapshot(model)
    gs.insert_grl(model, "1", 0.5, side=side)
    right = {"0": -0.5, "2": 1.0}
    if how not in ("lambda", "builtin", "module"):
        right["1.l"] = -0.5 if side == "output" else 1.0
    assert factors(plain, model, X) == right
    if how in ("method", "bound function", "lambda"):
        again = copy.deepcopy(model)
        assert factors(plain, again, X) == right
        gs.remove(again)
        assert set(factors(plain, again, X).values()) == {1.0}
    twin = gs.insert_scale_gradient(model, "2", 2, inplace=False)
    if how != "wrapper":
        assert factors(plain, twin, X) == {name: 2 * factor for name, factor in right.items()}
    with gs.disabled(model):
        assert set(factors(plain, model, X).values()) == {1.0}
    assert factors(plain, model, X) == right
    model.zero_grad()
    gs.remove(model)
    assert_untouched(before, model)


def test_a_wrapper_put_on_afterwards_is_not_lost() -> None:
    plain, model = chain(nn.Tanh()), chain(nn.Tanh())
    gs.insert_grl(model, "1", 0.5)
    operated = model[1].forward
    model[1].forward = lambda x: operated(x) * 2
    with pytest.raises(gs.SurgeryError, match="another tool has wrapped"):
        gs.insert_grl(model, "1")
    with pytest.raises(gs.SurgeryError, match="another tool has wrapped"):
        gs.remove(model)
    with pytest.raises(gs.SurgeryError, match="another tool has wrapped"), gs.disabled(model):
        pass
    assert torch.equal(model[2](torch.tanh(model[0](X)) * 2), model(X))
    del model[1].forward
    assert factors(plain, model, X) == MIDDLE
    gs.remove(model)
    assert type(model[1]) is nn.Tanh


def test_a_forward_newly_assigned_to_the_class_is_the_one_that_runs() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model = chain(Changing())
    gs.insert_grl(model, "1", 0.5)
    gs.remove(model)
    Changing.forward = lambda self, x: x * 4
    plain = chain(Changing())
    gs.insert_grl(model, "1", 0.5)
    assert factors(plain, model, X) == MIDDLE


# --- parametrisations ------------------------------------------------------------------------------------------------


def softplus(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", nn.Softplus())


def old_weight_norm(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(module)


def undo(module: nn.Module, norm: str) -> None:
    if norm == "old weight_norm":
        nn.utils.remove_weight_norm(module)
    elif norm == "old spectral_norm":
        nn.utils.remove_spectral_norm(module)
    else:
        parametrize.remove_parametrizations(module, "weight")


NORMS: dict[str, Callable[[nn.Module], object]] = {
    "parametrize": softplus,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": old_weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


def normed(norm: str) -> nn.Module:
    model = chain(nn.Linear(3, 3))
    NORMS[norm](model[1])
    return model


@pytest.mark.parametrize("removed", ["surgery first", "norm first"])
@pytest.mark.parametrize("order", ["norm, surgery", "surgery, norm"])
@pytest.mark.parametrize("norm", NORMS)
def test_parametrised_modules(norm: str, order: str, removed: str) -> None:
    plain = normed(norm)
    cls = type(plain[1])
    if order == "norm, surgery":
        model = gs.insert_grl(normed(norm), "1", 0.5)
    else:
        model = gs.insert_grl(chain(nn.Linear(3, 3)), "1", 0.5)
        NORMS[norm](model[1])
    assert isinstance(model[1], nn.Linear)
    assert type(model[1]).__name__ == cls.__name__
    got = factors(plain, model, X)
    assert got.pop("2") == 1.0
    assert set(got.values()) == {-0.5}
    if "old" not in norm:
        copies = copy.deepcopy(plain), copy.deepcopy(model)
        assert set(factors(*copies, X).values()) == {-0.5, 1.0}
    with gs.disabled(model):
        assert set(factors(plain, model, X).values()) == {1.0}
    gs.insert_scale_gradient(model, "1", 2)
    assert set(factors(plain, model, X).values()) == {-1.0, 1.0}
    if removed == "surgery first":
        gs.remove(model)
        assert type(model[1]).__name__ == cls.__name__
        assert set(factors(plain, model, X).values()) == {1.0}
        undo(model[1], norm)
    else:
        undo(model[1], norm)
        undo(plain[1], norm)
        assert set(factors(plain, model, X).values()) == {-1.0, 1.0}
        gs.remove(model)
    assert type(model[1]) is nn.Linear
    assert not [name for name in model[1].__dict__ if name.startswith("_gs")]


def test_a_parametrisation_on_one_instance_is_not_on_another() -> None:
    first, second = (gs.insert_grl(chain(nn.Linear(3, 3)), "1", 0.5) for _ in range(2))
    softplus(first[1])
    assert parametrize.is_parametrized(first[1])
    assert not parametrize.is_parametrized(second[1])
    assert factors(chain(nn.Linear(3, 3)), second, X) == {"0": -0.5, "1": -0.5, "2": 1.0}


def test_two_parametrisations_of_one_module_around_the_surgery() -> None:
    def make(operate: bool) -> nn.Module:
        model = chain(nn.Linear(3, 3))
        softplus(model[1])
        if operate:
            gs.insert_grl(model, "1", 0.5)
        parametrize.register_parametrization(model[1], "bias", nn.Softplus())
        return model

    plain, model = make(False), make(True)
    assert set(factors(plain, model, X).values()) == {-0.5, 1.0}
    gs.remove(model)
    assert set(factors(plain, model, X).values()) == {1.0}
    assert {"weight", "bias"} <= set(vars(type(model[1])))


# --- lazy modules ----------------------------------------------------------------------------------------------------

LAZY: dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]] = {
    "LazyLinear": (lambda: nn.LazyLinear(3), nn.Linear),
    "LazyBatchNorm1d": (nn.LazyBatchNorm1d, nn.BatchNorm1d),
}


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("name", LAZY)
def test_lazy_modules_keep_their_operator_when_they_change_class(name: str, with_state: bool, side: str) -> None:
    make, becomes = LAZY[name]
    plain, model = chain(make()), chain(make())
    plain(X)
    gs.insert_grl(model, "1", 0.5, side=side)
    if with_state:
        gs.insert(model, "1", nn.Identity(), side=side)
    copies = [copy.deepcopy(model)] if name == "LazyLinear" else []  # torch cannot copy a lazy buffer
    for one in (model, *copies):
        one(X)
        one.load_state_dict(dict(plain.state_dict().items()))
        assert isinstance(one[1], becomes)
        right = {"0": -0.5, "1": -0.5 if side == "output" else 1.0, "2": 1.0}
        assert factors(plain, one, X) == right
        assert [o.runs for o in gs.operations(one)] == [2] * (1 + with_state)
        gs.remove(one)
        assert type(one[1]) is becomes
        assert set(factors(plain, one, X).values()) == {1.0}


def test_a_lazy_module_that_is_undone_before_it_runs() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    before = snapshot(model)
    gs.insert_grl(model, "0")
    gs.remove(model)
    assert_untouched(before, model)
    model(X)
    assert type(model[0]) is nn.Linear
    gs.insert_grl(model, "0")
    with gs.disabled(model):
        assert type(model[0]) is nn.Linear


def test_a_lazy_module_that_first_runs_while_disabled() -> None:
    model = gs.insert_grl(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), "0", 0.5)
    with gs.disabled(model):
        model(X)
    _y, grads = step(model, X)
    model.zero_grad()
    with gs.disabled(model):
        _, plain = step(model, X)
    assert torch.equal(grads["0.weight"], plain["0.weight"] * -0.5)


# --- a hidden module of TorchScript ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("scripting")
def test_a_scripted_child_is_refused_and_its_siblings_are_not() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    model = nn.Sequential(nn.Linear(3, 3), scripted, nn.Linear(3, 1))
    before = [type(m) for m in model.modules()]
    for at in ("1", "1.0", "**", nn.Module):
        with pytest.raises(gs.SurgeryError, match="TorchScript"):
            gs.insert_grl(model, at)
    assert [type(m) for m in model.modules()] == before
    assert [site.address for site in gs.sites(model)] == ["", "0", "2"]
    grads = []
    for _ in range(2):
        model[0].weight.grad = None
        model(X).sum().backward()
        grads.append(model[0].weight.grad)
        if not gs.operations(model):
            gs.insert_grl(model, "0", 0.5)
    assert torch.equal(grads[1], grads[0] * -0.5)
