"""Operators without a copy: where nobody else can read the value, and nowhere else."""

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgery as gs
from gradsurgery.operators import moved as rule

OPERATORS = {"reverse": gs.GradientReversal(0.5), "scale": gs.ScaleGradient(0.25), "stop": gs.StopGradient()}
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
pytestmark = pytest.mark.skipif(sys.version_info >= (3, 13), reason="from Python 3.13 on the value is always copied")


class Makes(nn.Module):
    """Returns what ``make`` makes of a tensor and a list that outlives the forward; notes where its memory was."""

    def __init__(self, make: Callable[[Tensor, list[Any]], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.held: list[Any] = []
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.make(self.weight * x, self.held)
        self.memory = y.data_ptr()
        return y


def is_copied(make: Callable[[Tensor, list[Any]], Tensor], operator: nn.Module) -> bool:
    module = gs.insert(Makes(make), "", operator)
    return module(torch.ones(3)).data_ptr() != module.memory


def _paused(x: Tensor) -> Iterator[None]:
    held = x
    yield
    del held


def in_a_paused_frame(x: Tensor, held: list[Any]) -> Tensor:
    held.append(_paused(x))
    next(held[0])
    return x


def kept(x: Tensor, held: list[Any], keep: Callable[[Tensor], Any] = lambda x: x) -> Tensor:
    held.append(keep(x))
    return x


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


READERS: dict[str, Callable[[Tensor, list[Any]], Tensor]] = {
    "a container": kept,
    "a closure": lambda x, held: kept(x, held, lambda x: lambda: x),
    "a bound method": lambda x, held: kept(x, held, lambda x: x.sum),
    "a running frame": in_a_paused_frame,
    "a weak reference": lambda x, held: kept(x, held, weakref.ref),
    "an array": lambda x, held: kept(x.detach(), held, Tensor.numpy).requires_grad_(),
    "a view of it": lambda x, held: kept(x, held, lambda x: x[:2]),
    "its base": lambda x, held: kept(x, held).view(3),
    "its base in the graph": lambda x, held: kept(x, held, torch.square).view(3),
    "the graph, for backward": lambda x, held: kept(x, held, torch.square),
    "the graph of a Function": lambda x, held: kept(x, held, Saves.apply),
    "the graph, through a view": lambda x, held: kept(x, held, lambda x: x.view(3).square()),
    "whoever asks a leaf": lambda x, held: x.detach().requires_grad_(),
    "its module, a parameter": lambda x, held: nn.Parameter(x.detach()),
}


@each_operator
@pytest.mark.parametrize("make", READERS.values(), ids=READERS)
def test_copied_where_somebody_can_read_it(make: Callable[[Tensor, list[Any]], Tensor], operator: nn.Module) -> None:
    assert is_copied(make, operator)


NOBODY: dict[str, Callable[[Tensor, list[Any]], Tensor]] = {
    "a product": lambda x, held: x * 2,
    "a saved result": lambda x, held: x.sigmoid(),
    "changed in place": lambda x, held: x.add_(1).relu_(),
    "a hook on it": lambda x, held: (x.register_hook(lambda g: g), x)[1],
    "an alias without gradient": lambda x, held: kept(x, held, Tensor.detach),
}


@each_operator
@pytest.mark.parametrize("make", NOBODY.values(), ids=NOBODY)
def test_not_copied_where_nobody_can(make: Callable[[Tensor, list[Any]], Tensor], operator: nn.Module) -> None:
    assert not is_copied(make, operator)


@each_operator
def test_the_argument_of_an_identity_is_its_callers(operator: nn.Module) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.same = nn.Linear(3, 3), gs.insert(nn.Identity(), "", operator)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            y = self.same(h)
            y.mul_(2)
            return h + y

    model = Keeps()
    h = model.linear(torch.ones(3)).detach()
    y = model(torch.ones(3))
    assert torch.equal(y, 3 * h)
    (g,) = torch.autograd.grad(y.sum(), model.linear.bias)
    factor = {"GradientReversal": -0.5, "ScaleGradient": 0.25, "StopGradient": 0.0}[type(operator).__name__]
    assert torch.equal(g, torch.full((3,), 1 + 2 * factor))


class By(nn.Module):
    """A network around a place, with an in-place neighbour and other readers of what passes there."""

    def __init__(self, middle: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], reads: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.place, self.after, self.reads = Around(middle), after, reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.place(self.first(x))
        z = self.after(y)
        return self.last(z + y if self.reads else z)


class Around(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def _row(x: Tensor) -> Tensor:
    x[0].mul_(3)
    return x


MIDDLE = {"linear": lambda x: x * 2, "relu": torch.relu, "identity": lambda x: x, "slice": lambda x: x[:, :4]}
AFTER = {
    "relu_": lambda x: x.relu_(),
    "add_": lambda x: x.add_(1),
    "row": _row,
    "out of place": lambda x: x * x,
    "without gradient": lambda x: (x.detach().mul_(2), x * 3)[1],
}


def written_by_hand(model: By, factor: float) -> By:
    """The network with the operator as an op that leaves the tensor itself in place: nothing but its edge changes."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * factor

    by_hand = copy.deepcopy(model)
    fn = by_hand.place.fn
    by_hand.place.fn = lambda x: Scaled.apply(fn(x))
    return by_hand


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None] | None:
    """Of every parameter; None where autograd refuses, since what it saved was changed in place."""
    loss = model(x).square().sum()
    try:
        loss.backward()
    except RuntimeError as error:
        return None if "inplace operation" in str(error) else pytest.fail(str(error))
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reads", [False, True], ids=["alone", "read again"])
@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("middle", MIDDLE.values(), ids=MIDDLE)
def test_gradient_as_by_hand_or_refused_as_untouched(
    middle: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], reads: bool
) -> None:
    torch.manual_seed(0)
    plain = By(middle, after, reads)
    by_hand, operated = written_by_hand(plain, -0.5), gs.insert_grl(copy.deepcopy(plain), "place", 0.5)
    x = torch.randn(3, 4)
    of_plain, of_hand, got = (gradients(model, x) for model in (plain, by_hand, operated))
    if got is None:
        assert of_plain is None  # what autograd saved of the value was changed, with the operator and without
    else:
        assert of_hand is not None
        assert all(map(torch.equal, got, of_hand))
        assert torch.equal(operated(x), by_hand(x))


def test_second_order_and_checkpointing() -> None:
    module = gs.insert_grl(Makes(lambda x, held: x * x), "", 0.5)
    (g,) = torch.autograd.grad(module(torch.ones(3)).relu_().pow(2).sum(), module.weight, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), module.weight)
    assert torch.equal(g, -0.5 * 4 * module.weight**3)
    # Once more through the operator: of 4 w^3, what depends on the value y = w^2 is reversed again.
    assert torch.equal(h, -0.5 * (2 * 2 * module.weight**2 + -0.5 * 2 * 2 * module.weight * 2 * module.weight))
    for reentrant in (False, True):
        (again,) = torch.autograd.grad(module(torch.ones(3)).pow(2).sum(), module.weight)
        module.weight.grad = None
        checkpoint(module, torch.ones(3, requires_grad=True), use_reentrant=reentrant).pow(2).sum().backward()
        assert torch.equal(module.weight.grad, again)


def test_the_count_is_exact() -> None:
    """One reference more than those of the package, from wherever, and there is a copy; none more, and there is not."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradsurgery.place.moved", lambda operator, x: seen.append(sys.getrefcount(x)) or None)
        module = gs.insert_grl(Makes(lambda x, held: x * 2), "")
        module(torch.ones(3))
        module.make = kept
        module(torch.ones(3))
    assert len(seen) == 1


def test_without_the_private_count_there_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "is_held_once", lambda x: False)
    assert is_copied(lambda x, held: x * 2, gs.GradientReversal())


def test_an_operator_of_ones_own_is_called() -> None:
    class Louder(gs.GradientReversal):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    module = gs.insert(Makes(lambda x, held: x * 1), "", Louder())
    assert torch.equal(module(torch.ones(3)), 2 * module.weight)


def test_an_operator_that_was_put_in_its_place_is_called() -> None:
    called = []

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            called.append(x)
            return x * 3

    module = gs.insert_grl(Makes(lambda x, held: x * 1), "")
    module._gs_graft.places[0].put(module, Other())
    assert torch.equal(module(torch.ones(3)), 3 * module.weight)
    assert called


def test_modes_that_watch_see_the_operator() -> None:
    seen: list[Any] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    module = gs.insert_grl(Makes(lambda x, held: x * 2), "")
    with Watch():
        module(torch.ones(3))
    assert gs.reverse_gradient in seen


@pytest.mark.parametrize("on", ["the instance", "the class"])
@each_operator
def test_a_forward_that_was_patched_is_called(on: str, operator: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = copy.deepcopy(operator)
    module = gs.insert(Makes(lambda x, held: x * 1), "", operator)
    if on == "the instance":
        monkeypatch.setattr(operator, "forward", lambda x: x * 3, raising=False)
    else:
        monkeypatch.setattr(type(operator), "forward", lambda self, x: x * 3)
    assert torch.equal(module(torch.ones(3)), 3 * module.weight)
