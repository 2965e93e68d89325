"""What a user gives as ``example``: inputs to run the model on once, so that facts replace guesses."""

from typing import Any, TypeAlias

from torch import Tensor, nn

from .capture.record import record_ops
from .capture.sites import Op
from .errors import SurgeryError
from .resolve import Ops, ops_of_source

__all__ = ["Example", "ops_on", "read_example"]

Example: TypeAlias = Tensor | tuple[Any, ...] | tuple[tuple[Any, ...], dict[str, Any]] | None

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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


def ops_on(root: nn.Module, arguments: Arguments | None) -> Ops:
    """How to list ops: from a run on the example where there is one, from the source where not."""
    if arguments is None:
        return ops_of_source

    def ops(owners: list[nn.Module]) -> list[list[Op]]:
        recorded = record_ops(root, owners, *arguments)
        return [recorded[k] for k in range(len(owners))]

    return ops
