"""The gradient of a tensor handed on as a function of it, where something can carry a function of the gradient."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import Function

from .._torch import is_in_reverse, is_observed, is_transformed
from ..errors import OperatorError
from .coefficient import name_of
from .formula import exact_copy, is_differentiable
from .kept import kept_name, map_by_name, mapped_gradient

__all__ = ["mapped"]


def mapped(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The value of ``x`` and ``fn`` of its gradient."""
    if not is_differentiable(x):
        return x
    if is_observed():
        if torch.onnx.is_in_onnx_export():
            return x
        # Dynamo carries a Function over as it is, but drops its backward under a transform that it compiles.
        if is_transformed() and is_in_reverse():
            return _MappedInTransform.apply(x, fn)
        if is_transformed():
            _refuse_to_map(fn)
        if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
            name = kept_name(fn)
            return _refuse_to_map(fn) if name is None else map_by_name(x, name)
        return _Mapped.apply(x, fn)
    if not x.requires_grad:
        return x
    return _Mapped.apply(x, fn) if torch.is_grad_enabled() else x.detach()


class _Mapped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.fn = fn
        ctx.set_materialize_grads(False)
        return exact_copy(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        return mapped_gradient(ctx.fn, grad), None


class _MappedInTransform(Function):
    """The same for ``torch.func``: a rule for vmap, and none for forward mode, which has no gradient to map."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Callable[[Tensor], Tensor]], output: Tensor) -> None:
        ctx.fn = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return mapped_gradient(ctx.fn, grad), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_to_map(ctx.fn)


def _refuse_to_map(fn: Callable[..., Any]) -> NoReturn:
    raise OperatorError(
        f"map_gradient was asked for fn={name_of(fn)} under a tool that records single ops "
        "(torch.export, torch.jit.trace, make_fx) or pushes tangents forward (jvp, jacfwd, hessian, forward AD). "
        "A recorded graph keeps a function of the gradient by its name, as pickle does, and nothing at all keeps one "
        "going forward; the plain gradient would be left in silence. "
        "To record it, define fn at the top of a module that can be imported (not in __main__, no lambda, no module). "
        "Otherwise run it in eager, under torch.compile or a reverse transform of torch.func, use scale_gradient where "
        "the function is a factor, or call gradsurgery.remove first where the graph is for inference."
    )
