"""What a function returned has the shape of what it was given, or is refused."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import OperatorError
from .coefficient import name_of

__all__ = ["refuse_other_shape"]


def _shape_of(x: Tensor) -> tuple[Any, ...]:
    if x.is_nested and x.layout is torch.strided:
        return tuple(tuple(part.shape) for part in x.unbind())
    if not torch.jit.is_tracing():
        return tuple(x.shape)
    with warnings.catch_warnings():
        # In a trace sizes are tensors, and reading one is announced as a possible mistake.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return tuple(int(length) for length in x.shape)


def refuse_other_shape(asker: str, fn: Callable[..., Any], given: Tensor, got: Any) -> None:
    """Refuse what ``fn`` returned where it has not the shape of what it was given."""
    asked = _shape_of(given)
    if isinstance(got, Tensor) and _shape_of(got) == asked:
        return
    there = f"a tensor of shape {_shape_of(got)}" if isinstance(got, Tensor) else f"a {type(got).__name__}"
    raise OperatorError(
        f"{asker} asks of fn a tensor of the shape it is given, here {asked}. "
        f"fn={name_of(fn)} returned {there}. "
        "Give an fn that keeps the shape; frozen_transform accepts one that changes it."
    )
