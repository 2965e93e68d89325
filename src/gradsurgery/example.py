"""What a user gives as ``example``: inputs to run the model on once, so that facts replace guesses."""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .capture.preserve import preserved
from .capture.record import Op, record_ops
from .errors import CaptureError, SurgeryError
from .graft import without
from .legacy import cure_of
from .operators.values import tensors_in
from .resolve import Ops, ops_of_source

__all__ = ["Arguments", "Example", "ops_on", "outputs_on", "read_example", "run_on"]

Example: TypeAlias = Tensor | tuple[Any, ...] | tuple[tuple[Any, ...], dict[str, Any]] | None

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

Outputs: TypeAlias = dict[int, tuple[tuple[int, ...] | None, torch.dtype | None]]
"""By the ``id`` of a module that ran: the shape and dtype of the first tensor it returned, where it returned one."""


def read_example(example: Example) -> Arguments | None:
    """The positional and keyword arguments that an example stands for.

    Raises:
        SurgeryError: where it is neither a tensor, a tuple of arguments, nor a pair of a tuple and a dict.
    """
    if example is None:
        return None
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple):
        if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], dict):
            return example
        return example, {}
    raise SurgeryError(
        f"example is a {type(example).__name__}. Give a tensor, a tuple of positional arguments, or a pair "
        "(args, kwargs) of a tuple and a dict."
    )


def run_on(root: nn.Module, arguments: Arguments) -> None:
    """Run a model once without gradients and put back everything that the run changes.

    Raises:
        CaptureError: where the model itself fails, with what it says.
    """
    args, kwargs = arguments
    with preserved(root), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            root(*args, **kwargs)
        except SurgeryError:
            raise
        except Exception as error:
            raise CaptureError(
                f"during the run on the example the model raised {type(error).__name__}: {error}. "
                + cure_of(error, "Give an example that the model takes as it is now (shape, dtype, device).")
            ) from error


def outputs_on(root: nn.Module, arguments: Arguments) -> Outputs:
    """What each module returns in a run on an example."""
    outputs: Outputs = {}

    def note(module: nn.Module, args: Any, value: Any) -> None:
        tensors = tensors_in(value)
        outputs[id(module)] = (tuple(tensors[0].shape), tensors[0].dtype) if tensors else (None, None)

    handles = [module.register_forward_hook(note) for module in root.modules()]
    try:
        run_on(root, arguments)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def ops_on(root: nn.Module, arguments: Arguments | None) -> Ops:
    """How to list ops: from a run on the example where there is one, from the source where not."""
    if arguments is None:
        return ops_of_source

    def ops(owners: list[nn.Module]) -> list[list[Op]]:
        with without(owners):
            recorded = record_ops(root, owners, *arguments)
        return [recorded[k] for k in range(len(owners))]

    return ops
