"""The formats that a model is converted to: make one, load it again, run it, write it."""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .conversion import Conversion
from .errors import SurgeryError, first_line
from .example import Arguments
from .measure import strided
from .operators.values import tensors_in

__all__ = [
    "PathLike",
    "loaded_program",
    "loaded_script",
    "made_by",
    "onnx_runtime",
    "quiet",
    "refuse_existing",
    "run_onnx",
    "scripted_or_traced",
    "written",
]

PathLike = str | os.PathLike[str]


def scripted_or_traced(root: nn.Module, arguments: Arguments | None) -> tuple[str, torch.jit.ScriptModule]:
    """How a model was made TorchScript, and what it became.

    Raises:
        SurgeryError: where it can neither be scripted nor traced.
    """
    if isinstance(root, torch.jit.ScriptModule):
        return "a script already", root
    try:
        return "scripted", torch.jit.script(root)
    except Exception as error:  # of many kinds, one for each thing that TorchScript does not know
        reason = first_line(error).rstrip(".")
        if arguments is None:
            raise SurgeryError(
                f"TorchScript was asked for, and cannot compile this model: {reason}. Give example=, on which it can "
                "be traced instead."
            ) from error
    args, kwargs = arguments
    try:
        made = torch.jit.trace(root, args, example_kwarg_inputs=kwargs or None, strict=False, check_trace=False)
    except Exception as error:
        also = first_line(error).rstrip(".")
        raise SurgeryError(
            f"TorchScript was asked for, and this model can neither be compiled ({reason}) nor traced "
            f"({also}). Convert it to another format, or take out what the messages name."
        ) from error
    return f"traced, since it cannot be scripted: {reason}", made


def loaded_script(buffer: io.BytesIO) -> torch.jit.ScriptModule:
    """What a file of TorchScript holds."""
    buffer.seek(0)
    return torch.jit.load(buffer)


def loaded_program(buffer: io.BytesIO) -> torch.export.ExportedProgram:
    """What a file of ``torch.export`` holds."""
    buffer.seek(0)
    return torch.export.load(buffer)


def onnx_runtime() -> Any:
    """The package that runs ONNX.

    Raises:
        SurgeryError: where it is not installed.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - what torch.onnx exports with
    except ImportError as error:
        raise SurgeryError(
            f"to_onnx was asked for a verified ONNX file, and {error.name} is not installed. "
            'Install it with python -m pip install "gradsurgery[onnx]".'
        ) from error
    return onnxruntime


def run_onnx(runtime: Any, content: bytes, arguments: Arguments) -> list[torch.Tensor]:
    """The outputs of an ONNX file on an example."""
    given = tensors_in(arguments)
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    if len(names) != len(given):
        raise ValueError(f"it takes {len(names)} inputs ({', '.join(names)}), and the example has {len(given)} tensors")
    fed = {name: strided(t.detach()).cpu().numpy() for name, t in zip(names, given, strict=True)}
    return [torch.from_numpy(one) for one in session.run(None, fed)]


def made_by(tool: str, make: Callable[[], Any]) -> Any:
    """What a tool makes.

    Raises:
        SurgeryError: with what the tool has said, where it refuses.
    """
    try:
        return make()
    except SurgeryError:
        raise
    except Exception as error:
        said = first_line(error).rstrip(".")
        raise SurgeryError(
            f"{tool} was asked for, and refuses this model: {type(error).__name__}: {said}. "
            "gs.disabled(model) tells whether it takes the model without the operators."
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """What torch warns of while it converts is either said here in the report or for whoever maintains torch."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield warned


def refuse_existing(path: PathLike, force: bool) -> None:
    """Refuse to write where there is something already, or where nothing can be."""
    asked = Path(path)
    if asked.exists() and not asked.is_file():
        what = "a directory" if asked.is_dir() else "no ordinary file"
        raise SurgeryError(f"{str(asked)!r} was to be written, and is {what}. Give the name of a file.")
    if not asked.parent.is_dir():
        raise SurgeryError(f"{str(asked)!r} was to be written, and there is no directory {str(asked.parent)!r}.")
    if asked.exists() and not force:
        raise SurgeryError(
            f"{str(asked)!r} was to be written, and exists already. Give another path, or force=True (--force) to "
            "replace it."
        )


def written(conversion: Conversion, path: PathLike | None, force: bool) -> Conversion:
    """Write what was verified: whole, or not at all.

    Raises:
        SurgeryError: where it cannot be written.
    """
    if path is not None:
        refuse_existing(path, force)  # it took a while
        target = Path(path).resolve()  # what a link leads to, and not the link
        part = target.with_name(f"{target.name}.part")
        try:
            part.write_bytes(conversion.content)
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise SurgeryError(f"{os.fspath(path)!r} could not be written: {error}.") from error
        conversion.path = os.fspath(path)
    return conversion
