"""What may stand as a coefficient or as a function of an operator, checked where it is given."""

import math
import numbers
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import OperatorError

__all__ = ["checked_factor", "checked_fn", "checked_lambd", "name_of"]

LARGEST = sys.float_info.max


def checked_lambd(asked: Any, asker: str) -> float:
    """The strength of a reversal as a python float: finite and not negative."""
    number = _as_float(asked)
    # Comparisons alone: to Dynamo a changing float is symbolic, and math.isfinite would compile each value anew.
    if number is not None and 0.0 <= number <= LARGEST:
        return number
    raise OperatorError(
        f"{asker} was asked for lambd={_shown(asked)}. "
        f"There is {_kind(asked)}; lambd is a finite number >= 0, since the reversal itself supplies the minus sign. "
        f"{_REMEDY} For other factors call scale_gradient or ScaleGradient."
    )


def checked_factor(asked: Any, asker: str) -> float:
    """The factor of a gradient as a python float: finite."""
    number = _as_float(asked)
    if number is not None and -LARGEST <= number <= LARGEST:
        return number
    raise OperatorError(
        f"{asker} was asked for scale={_shown(asked)}. "
        f"There is {_kind(asked)}; scale is a finite real number. {_REMEDY}"
    )


_REMEDY = "Give an int, a float, a numpy scalar, or a tensor of one element that does not require grad."


def _as_float(asked: Any) -> float | None:
    if type(asked) is float:
        return asked
    if isinstance(asked, Tensor):
        if asked.numel() != 1 or asked.requires_grad or asked.is_complex() or asked.is_meta:
            return None
        asked = asked.item()
    if isinstance(asked, bool) or not isinstance(asked, numbers.Real):
        return None
    try:
        return float(asked)
    except OverflowError:
        return math.inf


def _shown(asked: Any) -> str:
    return f"a tensor of shape {tuple(asked.shape)}" if isinstance(asked, Tensor) else repr(asked)


def _kind(asked: Any) -> str:
    if isinstance(asked, Tensor):
        if asked.requires_grad:
            return "a tensor that requires grad, and nothing in the loss depends on it, so nothing would train it"
        return f"a {asked.dtype} tensor of {asked.numel()} elements on {asked.device}"
    number = _as_float(asked)
    if number is None:
        return f"an object of type {type(asked).__name__}"
    return "a negative number" if -LARGEST <= number < 0.0 else "a number that is not finite"


def checked_fn(fn: Any, asker: str) -> Callable[..., Any]:
    """``fn`` itself where it can be called on a tensor."""
    if callable(fn) and not (isinstance(fn, type) and issubclass(fn, nn.Module)):
        return fn
    there = "a module class, whose instance can be called" if callable(fn) else f"a {type(fn).__name__}"
    raise OperatorError(
        f"{asker} was asked to call fn={name_of(fn)}. There is {there}. "
        "Give a function of one tensor or an instance of an nn.Module."
    )


def name_of(fn: Any) -> str:
    """The name of a function as it is written; the repr of anything else."""
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else repr(fn)
