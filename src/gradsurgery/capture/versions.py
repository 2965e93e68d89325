"""Whether a tensor was changed in place since it was looked at: told by the version that torch counts.

Dynamo makes a version an unknown number, so under it the stand-in that it traces with is asked, while it traces. A
graph break between the two looks leaves nothing to ask; that is an answer of its own.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import CaptureError

__all__ = ["is_changed", "note_version", "refuse_other_version", "version"]

_changed: dict[str, bool] = {}
"""What Dynamo found of each key as it last traced: compiled code is guarded by it."""


def version(value: Any) -> int:
    """How often a tensor has been changed in place so far; 0 where torch does not count it, and under Dynamo."""
    if torch.compiler.is_dynamo_compiling() or not isinstance(value, Tensor) or value.is_inference():
        return 0
    return value._version


def note_version(value: Any, key: str) -> None:
    """Under Dynamo, remember the version that a tensor has now; elsewhere see :func:`version`."""
    if torch.compiler.is_dynamo_compiling() and isinstance(value, Tensor):
        from torch._dynamo.comptime import comptime

        comptime(_note)


def is_changed(value: Tensor, key: str, before: int) -> bool:
    """Whether a tensor was changed since its version ``before`` was read and, under Dynamo, noted.

    Yes where that cannot be told: where a graph break lies between, and of inference tensors.

    Args:
        value: the tensor.
        key: what it was noted under, of this one place in this one model.
        before: the version at that time.
    """
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_tell)
        return _changed[key]
    return value.is_inference() or value._version != before


def refuse_other_version(value: Any, key: str, message: str, broken: str = "") -> None:
    """Under Dynamo, refuse a tensor that was changed since its version was noted.

    Args:
        value: the tensor.
        key: what it was noted under.
        message: what to say where it was changed.
        broken: what to say where a graph break lies between; nothing where that is to pass.
    """
    if torch.compiler.is_dynamo_compiling() and isinstance(value, Tensor):
        from torch._dynamo.comptime import comptime

        comptime(_compare)


def _read(context: Any) -> tuple[Any, str]:
    return context.get_local("value").as_fake(), context.get_local("key").as_python_constant()


def _note(context: Any) -> None:
    fake, key = _read(context)
    if not hasattr(fake, "_gs_versions"):
        fake._gs_versions = {}
    fake._gs_versions[key] = fake._version


def _tell(context: Any) -> None:
    fake, key = _read(context)
    _changed[key] = getattr(fake, "_gs_versions", {}).get(key) != fake._version


def _compare(context: Any) -> None:
    fake, key = _read(context)
    before = getattr(fake, "_gs_versions", {}).get(key)
    name = "broken" if before is None else "message"
    message = context.get_local(name).as_python_constant()
    if message and before != fake._version:
        raise CaptureError(message)
