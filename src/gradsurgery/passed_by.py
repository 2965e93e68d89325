"""Ways in which a forward passes an operator by, told while it runs, where nothing tells before."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ._torch import is_observed
from .errors import OperatorError, SurgeryError

__all__ = ["is_as_written", "refuse_dropped", "refuse_other_forward"]


def refuse_other_forward(module: nn.Module) -> None:
    """Refuse a module whose class was given another forward since it was operated on: the one that is kept would run.

    Raises:
        SurgeryError: naming the method, ``forward`` or one that it calls.
    """
    cls: Any = type(module)
    for name, written in getattr(cls, "_gs_written", ()):
        if getattr(cls._gs_base, name) is not written:
            raise SurgeryError(
                f"{cls._gs_base.__qualname__}.{name} was replaced since this module was operated on, and the one of "
                "before would run. Call gs.remove and insert again, or replace it before operating."
            )


def is_as_written(module: nn.Module) -> bool:
    """Whether a generated class still runs what its base class would."""
    cls: Any = type(module)
    return all(getattr(cls._gs_base, name) is written for name, written in cls._gs_written)


def refuse_dropped(module: nn.Module, value: Any, result: Any) -> Any:
    """Let the backward refuse when the caller of an in-place module drops what it returns: ``self.relu(x)`` alone.

    The operated value is then dropped with it, and what the caller reads is the tensor that was changed. This is told
    by its getting a gradient although the node of the operator is gone. Compiled code and traces are not watched.
    """
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled() and not is_observed():
        node = result.grad_fn if isinstance(result, Tensor) and result.requires_grad else result
        if value.is_leaf or value._version == 0 or not (node is result or isinstance(node, BackwardCFunction)):
            return result
        alive, kind = weakref.ref(node), type(module).__name__

        def refuse(grad: Tensor) -> None:
            if alive() is None:
                raise OperatorError(
                    f"the output of this {kind} was operated on, but nobody reads what it returns: it works in place, "
                    "and the gradient comes through the tensor that it changed, past the operator. Let its caller take "
                    f"the value (x = {kind.lower()}(x)), or make it work out of place (inplace=False)."
                )

        value.register_hook(refuse)
    return result
