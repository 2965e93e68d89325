"""Any forward keeps its signature and its way of taking arguments; any output keeps its exact type."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import seeded, step
from torch import Tensor, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
DEFAULT = object()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)


class Defaults(Base):
    def forward(self, x: Tensor, k: float = 2.0, flag: object = DEFAULT, *, also: int = 1) -> Tensor:
        assert flag is DEFAULT
        return self.w(x) * k * also


class PlainDefaults(Base):
    def forward(self, x, k=2.0, flag=DEFAULT, opt=[]):  # noqa: B006
        assert flag is DEFAULT
        opt.append(1)
        return self.w(x) * k


class VarArgs(Base):
    def forward(self, *xs: Tensor) -> Tensor:
        return self.w(xs[0]) * len(xs)


class VarKwargs(Base):
    def forward(self, x, **options):
        return self.w(x) * (1 + len(options))


class Everything(Base):
    def forward(self, x, /, y=None, *rest, k, z=3, **options):
        return self.w(x) * k * z * (1 + len(rest) + len(options))


class PositionalOnly(Base):
    def forward(self, x, k=2.0, /):
        return self.w(x) * k


class NoParameters(Base):
    def forward(self):
        return self.w.weight * 2


class Unselfish(Base):
    def forward(this, x, k=4):  # noqa: N805
        return this.w(x) * k


class SelfSecond(Base):
    def forward(this, self):  # noqa: N805
        return this.w(self)


class Builtins(Base):
    def forward(self, input, len=2, getattr=3, torch=5, Tensor=7, _gs_0=1):  # noqa: A002, N803
        return self.w(input) * len * getattr * torch * Tensor


class StringAnnotations(Base):
    def forward(self, x: "Tensor", k: "Unknown | None" = None, m: "list[Nope]" = ()) -> "Nowhere":  # noqa: F821
        return self.w(x)


class OddAnnotations(Base):
    def forward(self, x: lambda v: v, k: [1, 2] = None) -> Callable[..., "Tensor"]:
        return self.w(x)


def doubling(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        # What was given and what was not is different to a decorator.
        return forward(self, *args, **kwargs) * (2 + len(args) + 2 * len(kwargs))

    return wrapper


class Decorated(Base):
    @doubling
    def forward(self, x: Tensor, k: float = 2.0) -> Tensor:
        return self.w(x) * k


class MangledName(Base):
    def forward(self, __x, *, __k=2):
        return self.w(__x) * __k


class WithSuper(Defaults):
    def forward(self, x, k=4.0):
        return super().forward(x, k) + self.__class__.__mro__.__len__() * 0


class Static(Base):
    @staticmethod
    def forward(x, k=2.0):
        return x * k


class Partial(Base):
    def other(self, k, x):
        return self.w(x) * k

    forward = functools.partialmethod(other, 3.0)


class Scale:
    def __call__(self, x):
        return x * 2


class CallableObject(Base):
    forward = Scale()


class Builtin(Base):
    forward = torch.tanh


CALLS = [
    (Defaults, [((X,), {}), ((X, 3.0), {}), ((), {"x": X, "also": 2}), ((X,), {"k": 3.0})]),
    (PlainDefaults, [((X,), {}), ((X, 3.0), {}), ((), {"k": 3.0, "x": X})]),
    (VarArgs, [((X,), {}), ((X, X, X), {})]),
    (VarKwargs, [((X,), {}), ((), {"x": X, "a": 1, "self_": 2})]),
    (Everything, [((X, 1, 2, 3), {"k": 2, "q": 1}), ((X,), {"k": 2}), ((X,), {"k": 1, "x": 5})]),
    (PositionalOnly, [((X,), {}), ((X, 3.0), {})]),
    (NoParameters, [((), {})]),
    (Unselfish, [((X,), {}), ((X,), {"k": 2})]),
    (SelfSecond, [((X,), {})]),
    (Builtins, [((X,), {}), ((X, 1), {"torch": 2, "Tensor": 3}), ((), {"input": X, "_gs_0": 3})]),
    (StringAnnotations, [((X,), {}), ((X, 1, 2), {})]),
    (OddAnnotations, [((X,), {}), ((X, 1), {})]),
    (Decorated, [((X,), {}), ((X, 2.0), {}), ((X,), {"k": 2.0}), ((), {"x": X, "k": 2.0})]),
    (MangledName, [((X,), {}), ((), {"_MangledName__x": X, "_MangledName__k": 1})]),
    (WithSuper, [((X,), {}), ((X, 1.0), {})]),
    (Static, [((X,), {}), ((X, 4.0), {}), ((X,), {"k": 8.0})]),
    (Partial, [((X,), {}), ((), {"x": X})]),
    (CallableObject, [((X,), {})]),
    (Builtin, [((X,), {})]),
]


@pytest.mark.parametrize("side", ["output", "input", "both"])
@pytest.mark.parametrize(("cls", "calls"), CALLS, ids=[cls.__name__ for cls, _ in CALLS])
def test_signatures(cls: type[nn.Module], calls: list[tuple[tuple[Any, ...], dict[str, Any]]], side: str) -> None:
    if cls is NoParameters and side != "output":
        return
    for args, kwargs in calls:
        plain, model = seeded(cls), seeded(cls)
        x = X.clone().requires_grad_()
        args = tuple(x if a is X else a for a in args)
        kwargs = {k: x if v is X else v for k, v in kwargs.items()}
        before = shown(model)
        for one in ("output", "input") if side == "both" else (side,):
            gs.insert_scale_gradient(model, "", 0.5, side=one)
        assert shown(model) == before
        results = []
        for one in (plain, model):
            x.grad = None
            y, grads = step(one, *args, **kwargs)
            results.append((y, grads, x.grad))
        (y0, g0, x0), (y1, g1, x1) = results
        assert torch.equal(y0[0], y1[0])
        factor = 1.0 if side == "input" else 0.5
        for name in g0:
            assert g0[name] is None or torch.equal(g1[name], g0[name] * factor), name
        assert x0 is None or torch.equal(x1, x0 * (0.25 if side == "both" else 0.5))
        assert [o.runs for o in gs.operations(model)] == [1] * (1 + (side == "both"))


def shown(model: nn.Module) -> tuple[Any, ...]:
    if isinstance(model, Builtin):  # has none to show
        return ()
    if isinstance(model, Partial | CallableObject):
        return (inspect.signature(model.forward),)
    return inspect.signature(model.forward), model.forward.__name__, model.forward.__doc__


def test_wrong_arguments_are_refused_as_before() -> None:
    for cls in (PlainDefaults, VarArgs, Everything, NoParameters):
        model = gs.insert_grl(cls(), "")
        with pytest.raises(TypeError):
            model(X, nope=1) if cls is not Everything else model()


def test_no_grad_on_the_forward() -> None:
    class Quiet(Base):
        @torch.no_grad()
        def forward(self, x: Tensor, k: float = 2.0) -> Tensor:
            return self.w(x) * k

    plain, model = seeded(Quiet), seeded(Quiet)
    gs.insert_grl(model, "")
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert torch.equal(model(X), plain(X))
    assert not model(X).requires_grad
