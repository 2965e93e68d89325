"""The operators around a function or a module, as layers."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._torchscript import without_announcements
from ..errors import OperatorError, first_line
from .coefficient import checked_fn, name_of
from .formula import is_differentiable, replaced_by_formula, stopped_by_formula
from .frozen import buffers_in_training, modules_of
from .functions import (
    detached_transform,
    frozen_transform,
    map_gradient,
    map_gradient_by_name,
    straight_through,
)
from .kept import kept_name

__all__ = [
    "DetachedTransform",
    "FrozenTransform",
    "MapGradient",
    "StraightThrough",
    "refuse_unscriptable",
]


class _OfFunction(nn.Module):
    """A layer around a function or a module; a module becomes a child, so its parameters move and save as usual."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = checked_fn(fn, type(self).__name__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(fn={name_of(self.fn)})"

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_unscriptable(self)
        return self


def refuse_unscriptable(operator: nn.Module, address: str | None = None) -> None:
    """Refuse an operator whose ``fn`` TorchScript cannot compile, by name and place; torch tells neither.

    Raises:
        OperatorError: from ``torch.jit.script``.
    """
    fn = getattr(operator, "fn", None) if isinstance(operator, _OfFunction) else None
    why = None
    if isinstance(fn, functools.partial | types.MethodType):
        why = f"it is a {type(fn).__name__}"
    elif isinstance(fn, types.FunctionType):
        try:
            with without_announcements():
                torch.jit.script(fn)
        except Exception as error:  # of many kinds, one for each thing that TorchScript does not know
            why = first_line(error)
    if why is not None:
        at = "" if address is None else f" at {address!r}"
        raise OperatorError(
            f"torch.jit.script was asked for {type(operator).__name__}{at}, whose fn={name_of(fn)} TorchScript cannot "
            f"compile: {why} Give an fn in its language, such as an nn.Module, or trace the model instead."
        )


class StraightThrough(_OfFunction):
    """A layer whose value is ``fn(x)`` and whose gradient is that of the identity.

    See ``straight_through``.

    >>> quantise = StraightThrough(torch.round)

    Args:
        fn: a function of one tensor or an ``nn.Module`` that keeps the shape.

    Raises:
        OperatorError: ``fn`` cannot be called, or in forward, it returned something that does not fit.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            y = x
            if is_differentiable(x):
                with torch.no_grad():
                    value = self.fn(stopped_by_formula(x))
                y = replaced_by_formula(x, value)
        else:
            y = straight_through(x, self.fn)
        return y


class FrozenTransform(_OfFunction):
    """A layer whose value is ``fn(x)`` and whose gradient passes to ``x`` and not to the parameters of ``fn``.

    See ``frozen_transform``.

    >>> perceptual = FrozenTransform(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    Args:
        fn: an ``nn.Module`` or a function of one tensor.

    Raises:
        OperatorError: ``fn`` cannot be called; in forward, as ``frozen_transform``; and from ``torch.jit.script`` when
            ``fn`` has parameters that require grad, or buffers in training mode, which TorchScript would change.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            y = x
            if is_differentiable(x):
                y = self.fn(x)
        else:
            y = frozen_transform(x, self.fn)
        return y

    def __prepare_scriptable__(self) -> nn.Module:
        refuse_unscriptable(self)
        learning = [name for held in modules_of(self.fn) for name, p in held.named_parameters() if p.requires_grad]
        if learning:
            raise OperatorError(
                f"torch.jit.script was asked for {type(self).__name__}. "
                f"Its fn has parameters that require grad: {', '.join(learning[:5])}; in TorchScript they would get it."
                " Call fn.requires_grad_(False) before scripting."
            )
        if any(buffers_in_training(held) for held in modules_of(self.fn)):
            raise OperatorError(
                f"torch.jit.script was asked for {type(self).__name__}. Its fn is in training mode and has buffers, "
                "such as the statistics of a BatchNorm, which in TorchScript it would go on changing. "
                "Call fn.eval() before scripting, or trace the model instead."
            )
        return self


class DetachedTransform(_OfFunction):
    """A layer whose value is ``fn(x)`` and that passes no gradient at all.

    See ``detached_transform``.

    >>> target = DetachedTransform(nn.Linear(8, 8))

    Args:
        fn: a function of one tensor or an ``nn.Module``.

    Raises:
        OperatorError: ``fn`` cannot be called.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            y = x
            if is_differentiable(x):
                with torch.no_grad():
                    value = self.fn(stopped_by_formula(x))
                y = stopped_by_formula(value)
        else:
            y = detached_transform(x, self.fn)
        return y


class MapGradient(_OfFunction):
    """A layer that passes its input on and hands the gradient ``g`` that comes back on as ``fn(g)``.

    See ``map_gradient``.

    >>> clip = MapGradient(lambda g: g.clamp(-1.0, 1.0))

    Args:
        fn: a function of one tensor that keeps its shape.

    Raises:
        OperatorError: ``fn`` cannot be called; in backward, when it returns another shape; and from every tool that
            cannot keep ``fn``; see ``map_gradient``.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__(fn)
        kept_name(fn)  # a graph that was recorded elsewhere finds it from here on

    def forward(self, x: Tensor) -> Tensor:
        return map_gradient(x, self.fn)

    def __prepare_scriptable__(self) -> nn.Module:
        name = kept_name(self.fn)
        if name is None:
            raise OperatorError(
                f"torch.jit.script was asked for {self!r}. TorchScript keeps a function of a gradient by its name, as "
                "pickle does, and this one has none. Define it at the top of a module that can be imported, use "
                "ScaleGradient where it is a factor, or torch.compile."
            )
        return _MappedByName(name)


class _MappedByName(nn.Module):
    """What ``torch.jit.script`` makes of a ``MapGradient``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return map_gradient_by_name(x, self.name)
