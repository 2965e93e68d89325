"""One tensor in, one tensor out: the value of one tensor with the gradient of another.

Two encodings of the same thing. Plain eager runs a tiny ``autograd.Function``, which saves nothing and allocates only
its output. A tool that looks at the single ops would lose a Function's backward (``torch.export`` and ``torch.fx`` do
so in silence), so it gets the aten formula: a tensor that carries the gradient, its value overwritten outside of
autograd.

The output never shares memory with an input that needs a gradient: an in-place neighbour such as ``ReLU(inplace=True)``
raises on a view and is silently wrong on an alias. The copy has the very strides of its source, dimensions of size 1
included, since a convolution chooses its kernel by them, and another kernel gives other bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from .._torch import is_observed, is_recorded_transform
from .._torchscript import without_announcements
from ..errors import OperatorError
from .coefficient import name_of
from .shape import refuse_other_shape

__all__ = [
    "Scaled",
    "copied",
    "exact_copy",
    "is_differentiable",
    "private_copy",
    "replaced",
    "replaced_by_formula",
    "scaled",
    "scaled_by_formula",
    "stopped",
    "stopped_by_formula",
]


def is_differentiable(x: Tensor) -> bool:
    """Whether tensors of this dtype have gradients at all."""
    return x.is_floating_point() or x.is_complex()


def _overlaps(size: list[int], stride: list[int]) -> bool:
    """Whether two elements may share memory; a yes may be wrong (for interleaved strides), a no never is."""
    reach = 0
    for step, length in sorted([(step, length) for step, length in zip(stride, size)]):  # noqa: B905 - TorchScript
        if length == 0:
            return False
        if length > 1:
            if step <= reach:
                return True
            reach += step * (length - 1)
    return False


def exact_copy(x: Tensor) -> Tensor:
    """A copy in memory of its own, same bits and same strides; for where autograd does not record."""
    y = x.clone()
    if x.layout is not torch.strided or x.is_nested or y.stride() == x.stride():
        return y
    y = x.new_empty_strided(x.size(), x.stride())
    if not _overlaps(list(x.size()), list(x.stride())):
        return y.copy_(x)
    # torch refuses to write through overlapping strides, so the memory below them is copied as one flat run.
    span = 1 + sum((length - 1) * step for length, step in zip(x.size(), x.stride()))  # noqa: B905
    y.as_strided((span,), (1,)).copy_(x.as_strided((span,), (1,), x.storage_offset()))
    return y


# --- the aten formula; TorchScript compiles and saves what follows, so it is written in its language ------------------


def _cut(x: Tensor) -> Tensor:
    """An alias of ``x`` without its history. Not ``detach`` in TorchScript: ``torch.jit.freeze`` drops every one."""
    if torch.jit.is_scripting():
        return x.data
    else:
        return x.detach()


def _overwritten(carrier: Tensor, value: Tensor) -> Tensor:
    """The gradient of ``carrier`` with the bits and the strides of ``value``.

    Overlapping memory becomes dense here: no aten op writes to it and keeps a gradient for each element.
    """
    if value.is_sparse:
        raise OperatorError(
            "An operator was asked to act on a sparse COO tensor under a tool that records single ops. "
            "Its values cannot be overwritten outside of autograd there. Call .to_dense() first, or run in eager."
        )
    flat = value.layout == torch.strided and not value.is_nested
    if flat and carrier.stride() != value.stride() and not _overlaps(list(value.size()), list(value.stride())):
        carrier = value.new_empty_strided(value.size(), value.stride()).copy_(carrier)
    _cut(carrier).copy_(value)
    return carrier


def scaled_by_formula(x: Tensor, factor: float) -> Tensor:
    """The value of ``x`` and ``factor`` times its gradient."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    return _overwritten(x * factor, _cut(x))


def stopped_by_formula(x: Tensor) -> Tensor:
    """The value of ``x`` without its history, in memory of its own."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    return _overwritten(_cut(x).clone(), _cut(x))


def replaced_by_formula(x: Tensor, value: Tensor) -> Tensor:
    """The value of ``value`` and the gradient of ``x``."""
    # copy_ would broadcast a smaller value in silence; outside of TorchScript the caller has looked.
    if torch.jit.is_scripting() and value.size() != x.size():
        raise OperatorError("straight_through asks of fn a tensor of the shape it is given; fn returned another shape.")
    return _overwritten(x.clone(), _cut(value).to(x.dtype))


def _recorded(formula: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Apply a formula; ``torch.jit.trace`` gets it as TorchScript.

    A trace of the single ops would bake the strides as constants, and ``torch.jit.freeze`` would drop what it detaches.
    """
    if not torch.jit.is_tracing():
        return formula(*arguments)
    return _scripted(formula)(*arguments)


@functools.cache
def _scripted(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with without_announcements():
        return torch.jit.script(formula)


# --- the eager Functions ----------------------------------------------------------------------------------------------
#
# forward(ctx, ...) without setup_context: ten times cheaper to call. No jvp, at which Dynamo would refuse the Function.
# Gradients are not materialised, so that "no gradient" (None) stays none on its way up instead of becoming zeros.


class Scaled(Function):
    """The value of ``x`` in memory of its own, and ``factor`` times its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Copy the value."""
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return exact_copy(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """Multiply the gradient."""
        if grad is None:
            return None, None
        # The same bits in half the time where the gradient is small: no scalar becomes a tensor.
        return grad.neg() if ctx.factor == -1.0 else grad * ctx.factor, None


class _Replaced(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return exact_copy(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return grad, None


# --- the same with rules for every transform --------------------------------------------------------------------------
#
# For a transform that is itself recorded (torch.func.linearize): what is recorded there may write to nothing in place,
# since it folds what the input does not reach into constants.


class _ScaledInTransform(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return exact_copy(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent * ctx.factor


class _ReplacedInTransform(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, value: Tensor) -> Tensor:
        return exact_copy(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.clone()


# --- the dispatch -----------------------------------------------------------------------------------------------------


def _takes_functions(x: Tensor) -> bool:
    """Every layout does but the older nested tensor, whose shape a Function asks for and fails."""
    return not (x.is_nested and x.layout is torch.strided)


def scaled(x: Tensor, factor: float) -> Tensor:
    """The value of ``x`` and ``factor`` times its gradient, in the encoding that whoever looks can keep."""
    if not is_differentiable(x):
        return x
    if not is_observed():
        if not x.requires_grad:
            return x
        if not torch.is_grad_enabled():
            # Not x itself: used later with gradients on, it would pass the gradient unscaled.
            return x.detach()
        if _takes_functions(x):
            return Scaled.apply(x, factor)
    elif torch.onnx.is_in_onnx_export():
        # A graph for inference: the older exporter would drop the overwriting and keep the product.
        return x
    elif is_recorded_transform():
        return _ScaledInTransform.apply(x, factor)
    return _recorded(scaled_by_formula, x, factor)


def private_copy(x: Tensor) -> Tensor:
    """The value of ``x`` without its history, in memory of its own: safe to work on in place."""
    if not is_observed() or is_recorded_transform():
        return exact_copy(x.detach())
    if torch.onnx.is_in_onnx_export():
        return x.detach()
    return _recorded(stopped_by_formula, x)


def copied(x: Tensor) -> Tensor:
    """The value and the gradient of ``x`` in memory of its own: what follows in place does not reach it."""
    if not is_observed():
        return _Replaced.apply(x, x.detach()) if is_differentiable(x) and _takes_functions(x) else x.clone()
    if torch.onnx.is_in_onnx_export():
        return x.clone()
    return _recorded(replaced_by_formula, x, x) if is_differentiable(x) else x.clone()


def stopped(x: Tensor) -> Tensor:
    """The value of ``x`` without its history; ``x`` itself in eager where it has none."""
    if not is_differentiable(x) or not (x.requires_grad or is_observed()):
        return x
    return private_copy(x)


def replaced(x: Tensor, value: Any, fn: Callable[..., Any]) -> Tensor:
    """The value of ``value``, which ``fn`` returned for ``x``, and the gradient of ``x``."""
    refuse_other_shape("straight_through", fn, x, value)
    if value.device != x.device or (value.is_complex() and not x.is_complex()):
        raise OperatorError(
            f"straight_through asks of fn a value that fits {x.dtype} on {x.device}. "
            f"fn={name_of(fn)} returned {value.dtype} on {value.device}. Convert it in fn."
        )
    value = value.detach().to(x.dtype)
    if not is_observed():
        if _takes_functions(x):
            return _Replaced.apply(x, value)
    elif torch.onnx.is_in_onnx_export():
        return value
    elif is_recorded_transform():
        return _ReplacedInTransform.apply(x, value)
    return _recorded(replaced_by_formula, x, value)
