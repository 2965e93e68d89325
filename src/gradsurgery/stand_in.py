"""Other operators in the places of a model, for a while: each place alone, and the graph cut there by hand."""

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import in_backward
from .compare import same
from .errors import SurgeryError
from .listing import places_of
from .operators import (
    DetachedTransform,
    FrozenTransform,
    GradientReversal,
    MapGradient,
    ScaleGradient,
    StopGradient,
    StraightThrough,
)
from .operators.formula import is_differentiable, private_copy
from .operators.values import map_tensors
from .place import Place
from .recorded.place import RecordedPlace, bypassed
from .review import disabled
from .scripted.place import CompiledPlace
from .scripted.surgery import switched_off_compiled
from .tables import one_line
from .tap import HeadPlace, TapPlace

__all__ = [
    "Counter",
    "Cut",
    "Held",
    "factor_set",
    "held_places",
    "keeps_value",
    "replaced",
    "runs_kept",
    "switched_off",
]


@dataclass(frozen=True)
class Held:
    """An operator at a place, under the first of its names."""

    address: str
    side: str
    module: nn.Module
    place: Place | CompiledPlace | RecordedPlace
    operator: nn.Module

    def __str__(self) -> str:
        return f"{textwrap.shorten(one_line(self.operator), 100, placeholder=' ...')} at {self.address!r}"


def held_places(root: nn.Module, alone: bool = True) -> list[Held]:
    """Every operator of a model once, also where a module has two names; the operator of a head is where it runs.

    Raises:
        SurgeryError: where each is to be measured ``alone``, and TorchScript has compiled one in.
    """
    found: dict[int, Held] = {}
    for path, module, place in places_of(root):
        if isinstance(place, HeadPlace):
            if place.branch is not None:
                found.setdefault(id(place), Held(place.tap.address, "head", module, place, place.branch))
        elif isinstance(place, CompiledPlace | RecordedPlace) and alone:
            part = "TorchScript has compiled" if isinstance(place, CompiledPlace) else "was recorded as a graph of ops"
            raise SurgeryError(
                f"each operator was to be verified alone, and the one at {place.where.text(path)!r} is in a part of "
                f"the model that {part}, where no other can be put in its place. gs.audit(model, ...) measures what "
                "all of them do together; or verify the nn.Module, then convert it."
            )
        elif not isinstance(place, TapPlace):
            where = place.where
            found.setdefault(id(place), Held(where.text(path), where.kind, module, place, place.operator(module)))
    return list(found.values())


@contextlib.contextmanager
def switched_off(root: nn.Module, places: list[Held]) -> Iterator[None]:
    """Context manager in which no operator acts: the model as it was, but for its heads, which the loss may need."""
    heads = any(isinstance(place, HeadPlace) for _, _, place in places_of(root))
    with contextlib.ExitStack() as stack:
        if heads:
            stack.enter_context(replaced(places, {}))
            stack.enter_context(switched_off_compiled(root.modules()))
            stack.enter_context(bypassed(root.modules()))
        else:
            stack.enter_context(disabled(root))
        yield


def factor_set(operator: nn.Module) -> float | None:
    """The factor that an operator multiplies the gradient by, for the two kinds that promise one."""
    if isinstance(operator, GradientReversal):
        return -operator.lambd
    return operator.scale if isinstance(operator, ScaleGradient) else None


def keeps_value(operator: nn.Module) -> bool:
    """Whether an operator promises to leave the value as it is."""
    return isinstance(operator, GradientReversal | ScaleGradient | StopGradient | MapGradient)


@contextlib.contextmanager
def runs_kept(root: nn.Module) -> Iterator[None]:
    """Context manager after which every place has run as often as before, and no tap holds a value."""
    runs = [(place, place.runs) for _, _, place in places_of(root) if isinstance(place, Place)]
    try:
        yield
    finally:
        for place, before in runs:
            place.runs = before
            if isinstance(place, HeadPlace):
                place.tap.disarm()


@contextlib.contextmanager
def replaced(places: list[Held], stand_ins: dict[int, nn.Module]) -> Iterator[None]:
    """Context manager in which other operators are at the places, by the ``id`` of each, and none at any other."""
    live = [(held, held.place) for held in places if isinstance(held.place, Place)]
    try:
        for held, place in live:
            place.put(held.module, stand_ins.get(id(place)) or _Nothing())
        yield
    finally:
        for held, place in live:
            place.put(held.module, held.operator)


class _Nothing(nn.Module):
    """In the place of an operator that is switched off."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Log:
    """What a stand-in has seen, in an object of its own, since attributes of modules are put back after each step.

    Attributes:
        calls: in the forward; that it runs again in a backward does not count.
        recomputed: whether it runs again in a backward.
        random: whether the function of its operator gives another gradient at each call.
        cuts: what came in, and how to get the gradient that leaves there.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.recomputed = False
        self.random = False
        self.cuts: list[tuple[Tensor, Callable[[], Tensor | None]]] = []


class Counter(nn.Module):
    """An operator, with a log of its calls."""

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.operator = operator
        self.log = Log()

    def forward(self, x: Tensor) -> Any:
        """Call the operator."""
        self.log.calls += not in_backward()
        return self.operator(x)


class Cut(nn.Module):
    """The value that an operator promises, with the graph cut there; :meth:`finish` carries the gradient across.

    It is written with ``detach`` and ``backward`` alone and shares no backward with the operators, so that what it
    gives is the gradient by hand.

    Args:
        operator: one of this package.
    """

    def __init__(self, operator: nn.Module) -> None:
        super().__init__()
        self.operator = operator
        self.log = Log()

    def forward(self, x: Any) -> Any:
        """The promised value, cut off from what lies before."""
        return map_tensors(self._cut, x)  # what a head takes may be nested

    def _cut(self, x: Tensor) -> Any:
        if not is_differentiable(x):
            return x
        if in_backward() or not torch.is_grad_enabled():
            self.log.recomputed = True
            return self.operator(x)
        if isinstance(self.operator, FrozenTransform):
            return self._through(x, self.operator.fn)
        if isinstance(self.operator, StraightThrough | DetachedTransform):
            with torch.no_grad():
                value = self.operator.fn(private_copy(x.detach()))
            if isinstance(self.operator, DetachedTransform):
                return map_tensors(lambda tensor: tensor.detach(), value)
            value = value.detach().to(x.dtype)
        else:
            value = x
        return self._leaf(x, value)

    def _leaf(self, x: Tensor, value: Tensor) -> Tensor:
        y = private_copy(value.detach())
        if not x.requires_grad or not is_differentiable(y):
            return y
        y.requires_grad_()
        # In-place neighbours change what they are handed, and a leaf may not be changed.
        self.log.cuts.append((x, lambda: self._rule(y.grad)))
        return _handed_on(y)

    def _through(self, x: Tensor, fn: Callable[[Tensor], Any]) -> Any:
        inside = private_copy(x.detach())
        if not x.requires_grad:
            with torch.no_grad():
                return fn(inside)
        inside.requires_grad_()
        pairs: list[tuple[Tensor, Tensor]] = []

        def cut(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                return tensor
            y = private_copy(tensor.detach()).requires_grad_()
            pairs.append((tensor, y))
            return _handed_on(y)

        value = map_tensors(cut, fn(_handed_on(inside)))

        def pull() -> Tensor | None:
            there = [(out, y.grad) for out, y in pairs if y.grad is not None]
            if not there:
                return None
            outs, gradients = zip(*there, strict=True)
            # Of the input alone, so that no parameter of fn gets any.
            return torch.autograd.grad(outs, inside, gradients, retain_graph=True, allow_unused=True)[0]

        self.log.cuts.append((x, pull))
        return value

    def _rule(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        operator = self.operator
        if isinstance(operator, MapGradient):
            new = operator.fn(gradient.clone())
            self.log.random = self.log.random or not same(new, operator.fn(gradient.clone()))
            return new
        factor = factor_set(operator)
        return gradient * factor if factor is not None else gradient if isinstance(operator, StraightThrough) else None

    def finish(self) -> None:
        """Carry the gradient across every cut, the last one first: what is cut earlier may lie before it."""
        for x, pull in reversed(self.log.cuts):
            gradient = pull()
            if gradient is not None and x.requires_grad:
                x.backward(gradient, retain_graph=True)


def _handed_on(leaf: Tensor) -> Tensor:
    """A tensor of its own memory and strides whose gradient is that of a leaf, and which may be changed in place."""
    return _HandedOn.apply(leaf)


class _HandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return private_copy(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
