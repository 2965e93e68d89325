"""An operator without a copy: the memory of a value that nobody else can read is handed on.

A copy is there for whoever still reads the value: an in-place neighbour would change it under him, and on a bare alias
his gradient would be silently wrong. Where nobody does, nothing is to be kept. The one reference to the value is in the
hands of whoever operates on it and dies with it; what comes out takes its place, in the graph and in memory. It shares
the version counter too, so a change in place of what autograd has saved raises as in the untouched model.

That nobody does is counted, not assumed:

* the references to the Python object: any variable, container, closure, hook or running frame that holds it counts;
* the references to the tensor itself: its views have it for a base, and a graph that saved it has it, so both count;
* a weak reference counts too, since whoever has it could make a reference of it;
* a view is never handed on, since its base can be read, and neither is a leaf, since its gradient can.
"""

import sys
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary

from .._torch import is_held_once, is_observed
from .factors import GradientReversal, ScaleGradient, StopGradient
from .formula import Scaled

__all__ = ["COUNTS", "hands_on", "is_unpatched", "moved"]

COUNTS = sys.implementation.name == "cpython" and sys.version_info < (3, 13)
"""Whether each variable of a running function is a reference that counts; later versions of Python may borrow."""

_FORWARDS: dict[type[nn.Module], Any] = {cls: cls.forward for cls in (GradientReversal, ScaleGradient, StopGradient)}
"""The operators that can do without a copy, and what this module does in the place of."""


def hands_on(operator: type[nn.Module]) -> bool:
    """Whether operators of exactly this type can do without a copy."""
    return operator in _FORWARDS


def is_unpatched(operator: type[Any]) -> bool:
    """Whether this is such a type, and nobody has given it another forward."""
    return operator in _FORWARDS and operator.forward is _FORWARDS[operator]


def moved(operator: nn.Module, x: Any) -> Tensor | None:
    """What the operator makes of ``x`` in the memory of ``x``; None where it cannot be proven that nobody reads ``x``.

    Args:
        operator: the live operator; of a type that does not ``hands_on`` gives None.
        x: the value at a place, of which its caller has counted every reference, and keeps none.
    """
    if not COUNTS or type(x) is not Tensor or not x.requires_grad:
        return None
    if not torch.is_grad_enabled() or x.is_leaf or x._is_view():
        return None
    if not is_held_once(x) or getweakrefcount(x):
        return None
    if x.layout is not torch.strided or x.is_nested or has_torch_function_unary(x) or is_observed():
        return None
    # By the very forward: an operator of another type may stand in its place for a while, and people patch a forward.
    if "forward" in operator.__dict__ or not is_unpatched(type(operator)):
        return None
    if type(operator) is GradientReversal:
        return _Moved.apply(x, -operator.lambd)
    return _Moved.apply(x, operator.scale) if type(operator) is ScaleGradient else x.detach()


class _Moved(Scaled):
    """The same in the memory of ``x``: an alias by ``detach`` and no view, which could not be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x.detach()
