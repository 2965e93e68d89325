"""Insert an operator at a place of a model: the public calls, one for each kind of operator."""

from collections.abc import Callable
from typing import Literal, TypeVar

from torch import Tensor, nn

from .errors import SurgeryError
from .example import Example
from .operate import Side, Wanted, operate
from .operators import (
    DetachedTransform,
    FrozenTransform,
    GradientReversal,
    ScaleGradient,
    StopGradient,
    StraightThrough,
)
from .operators.coefficient import checked_factor, checked_lambd
from .resolve import At

__all__ = ["insert", "insert_grl", "insert_scale_gradient", "insert_stop_gradient", "insert_transform"]

M = TypeVar("M", bound=nn.Module)


def insert(
    model: M,
    at: At,
    operator: nn.Module,
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Operate on the gradient, or the value, at every place that ``at`` names.

        gs.insert(model, "layer3", gs.ScaleGradient(0.1))
        gs.insert(model, nn.BatchNorm2d, gs.MapGradient(torch.nn.functional.normalize))

    The model keeps its identity: its class (a generated subclass of it that passes ``isinstance``), methods, hooks,
    parameters and ``state_dict`` keys. A place that has operators already gets the new one after them.

    Args:
        model: any ``nn.Module``, also compiled, wrapped in DDP or ``fully_shard``, or a ``torch.fx.GraphModule``.
        at: an address such as ``"layer3"``, ``"blocks.*.attn"``, ``"layer3.0:add"``, ``"lstm[0]"``,
            ``"layer3 -> layer4"``; a module type, a module of the model, a compiled pattern that matches whole module
            paths, a predicate ``(name, module) -> bool``, or a list of any of these. :func:`sites` lists the addresses.
        operator: one of this package, or any module that maps a tensor to a tensor. The same object serves every place.
        side: whether a module path means what the module returns, or what it receives.
        example: inputs to run the model on once, leaving no trace, to check that every place runs: a tensor, a tuple
            of positional arguments, or a pair ``(args, kwargs)``.
        expect: how many places there must be.
        inplace: False leaves the model alone and returns a twin that shares every parameter and buffer.

    Returns:
        The model, or its twin.

    Raises:
        AddressError: where ``at`` names no place, or not ``expect`` of them.
        CaptureError: where the forward that owns a place cannot be opened.
        OperatorError: where ``operator`` is not a module instance.
        SurgeryError: where the model cannot be operated on. The base of the three above.
    """
    return operate(model, [Wanted(at, lambda: operator, side, expect)], example, inplace)


def insert_grl(
    model: M,
    at: At,
    lambd: float = 1.0,
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Reverse the gradient at a place: what lies before it climbs the loss that what lies after it descends.

        gs.insert_grl(model, "layer3")
        gs.insert_grl(model, "layer3", lambd=0.5, example=torch.randn(1, 3, 224, 224))

    The gradient reversal layer of Ganin and Lempitsky (2015, https://arxiv.org/abs/1409.7495): the identity forward,
    the gradient times ``-lambd`` backward. A layer after the place is not affected.

    Args:
        model: as in :func:`insert`.
        at: as in :func:`insert`.
        lambd: the strength, finite and not negative; set it later through ``operations(model)[0].operator.lambd``.
        side: as in :func:`insert`.
        example: as in :func:`insert`.
        expect: as in :func:`insert`.
        inplace: as in :func:`insert`.

    Raises:
        OperatorError: where ``lambd`` is negative, not finite or not a number.
        SurgeryError: as in :func:`insert`.
    """
    checked_lambd(lambd, "GradientReversal")  # a wrong strength is the first thing to hear about
    return operate(model, [Wanted(at, lambda: GradientReversal(lambd), side, expect)], example, inplace)


def insert_scale_gradient(
    model: M,
    at: At,
    scale: float,
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Multiply the gradient at a place by any finite number, and leave the forward as it is.

        gs.insert_scale_gradient(model, "backbone", 0.1)

    Args:
        model: as in :func:`insert`.
        at: as in :func:`insert`.
        scale: the factor. 0 gives gradients of zero, on which weight decay and momentum still act; for none at all
            see :func:`insert_stop_gradient`.
        side: as in :func:`insert`.
        example: as in :func:`insert`.
        expect: as in :func:`insert`.
        inplace: as in :func:`insert`.

    Raises:
        OperatorError: where ``scale`` is not finite or not a number.
        SurgeryError: as in :func:`insert`.
    """
    checked_factor(scale, "ScaleGradient")
    return operate(model, [Wanted(at, lambda: ScaleGradient(scale), side, expect)], example, inplace)


def insert_stop_gradient(
    model: M,
    at: At,
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Stop the gradient at a place: parameters before it that reach the loss only through it get ``grad`` None.

        gs.insert_stop_gradient(model, "layer2")

    Args:
        model: as in :func:`insert`.
        at: as in :func:`insert`.
        side: as in :func:`insert`.
        example: as in :func:`insert`.
        expect: as in :func:`insert`.
        inplace: as in :func:`insert`.

    Raises:
        SurgeryError: as in :func:`insert`.
    """
    return operate(model, [Wanted(at, StopGradient, side, expect)], example, inplace)


def insert_transform(
    model: M,
    at: At,
    fn: Callable[[Tensor], Tensor],
    backward: Literal["straight_through", "frozen", "none"] = "straight_through",
    *,
    side: Side = "output",
    example: Example = None,
    expect: int | None = None,
    inplace: bool = True,
) -> M:
    """Replace the value at a place by ``fn`` of it, with a backward of your choice.

        gs.insert_transform(model, "layer2", torch.round)                          # quantise, gradient as if not
        gs.insert_transform(model, "layer2", denoiser, backward="frozen")          # gradient through, none for denoiser
        gs.insert_transform(model, "layer2", augment, backward="none")             # nothing flows back

    Args:
        model: as in :func:`insert`.
        at: as in :func:`insert`.
        fn: a function, or a module, whose parameters and buffers then become part of the model.
        backward: ``"straight_through"`` passes the gradient on as if ``fn`` were the identity (Bengio et al. 2013,
            https://arxiv.org/abs/1308.3432), and ``fn`` must keep the shape; ``"frozen"`` differentiates ``fn`` with
            respect to its input only; ``"none"`` cuts the gradient.
        side: as in :func:`insert`.
        example: as in :func:`insert`.
        expect: as in :func:`insert`.
        inplace: as in :func:`insert`.

    Raises:
        OperatorError: where ``fn`` cannot be called, or at the forward where it breaks its promise.
        SurgeryError: as in :func:`insert`.
    """
    kinds = {"straight_through": StraightThrough, "frozen": FrozenTransform, "none": DetachedTransform}
    if backward not in kinds:
        raise SurgeryError(f"backward={backward!r} was asked for. It is one of {', '.join(map(repr, kinds))}.")
    operator = kinds[backward](fn)
    return operate(model, [Wanted(at, lambda: operator, side, expect)], example, inplace)
