"""A second ScriptModule over the same parameters and buffers, with types and graphs of its own."""

import io
import re
import zipfile
from collections.abc import Iterable

import torch
from torch.jit import ScriptModule

from .._torchscript import has_compiled_value, set_compiled_value, tensors_of, without_announcements
from ..errors import SurgeryError, first_line

__all__ = ["copied"]


def copied(module: ScriptModule, without: Iterable[str] = ()) -> ScriptModule:
    """A copy that shares every tensor of ``module``, and no type: what is registered on one is not on the other.

    Saving and loading is the one copy of TorchScript that takes types and graphs along.

    Args:
        module: the original, which stays as it is.
        without: attributes that the copy is to have no more. No graph may read them.

    Raises:
        SurgeryError: where the module cannot be saved.
    """
    buffer = io.BytesIO()
    with without_announcements():
        try:
            torch.jit.save(module, buffer)
        except RuntimeError as error:
            raise SurgeryError(
                "an operation on a ScriptModule was asked for. It is done on a copy, and this one cannot be saved, so "
                f"not copied either: {first_line(error)} Operate on the nn.Module that it was made "
                "from, then script or trace that."
            ) from error
        buffer = _without(buffer, list(without))
        buffer.seek(0)
        copy = torch.jit.load(buffer)
    parts = dict(copy.named_modules(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        if path in parts:
            for name, tensor in tensors_of(part):
                set_compiled_value(parts[path], name, tensor)
    if left := [name for name in without if any(has_compiled_value(part, name) for part in parts.values())]:
        raise SurgeryError(
            f"operators were to be removed from a ScriptModule, and torch {torch.__version__} writes TorchScript in a "
            f"form from which {', '.join(left)} cannot be taken out. Load the file from before the operation instead."
        )
    return copy


def _without(archive: io.BytesIO, names: list[str]) -> io.BytesIO:
    """A saved module whose classes do not declare these attributes; what they held is then not loaded."""
    if not names:
        return archive
    declared = re.compile(rf"^  ({'|'.join(map(re.escape, names))}) : .*\n".encode(), re.MULTILINE)
    result = io.BytesIO()
    with zipfile.ZipFile(archive) as read, zipfile.ZipFile(result, "w", zipfile.ZIP_STORED) as written:
        for entry in read.infolist():
            data = read.read(entry)
            written.writestr(entry.filename, declared.sub(b"", data) if entry.filename.endswith(".py") else data)
    return result
