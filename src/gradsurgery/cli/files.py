"""A model from a file: what it is, told from what is in it, and read without running code unless it is trusted."""

import io
import logging
import pickle
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._torch import read_program
from ..errors import SurgeryError
from .program_file import TRUST, refuse_code

__all__ = ["import_from_here", "load_file"]

_PICKLE = b"\x80"
_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
"""The number that torch.save wrote first before it wrote zips."""


def import_from_here() -> None:
    """Let what lies in the current directory be imported, as ``python -m`` does."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def load_file(path: str, trust: bool) -> tuple[nn.Module, Any]:
    """The model in a file, and the inputs that an export archive brings along, or None.

    Raises:
        SurgeryError: where there is no model in it, or reading it would run code and it is not trusted.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise SurgeryError(f"the model {path!r} is no file that can be read: {error.strerror or error}.") from error
    if not content:
        raise SurgeryError(f"{path!r} is empty. Write or download it again.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of deprecated formats
        if content.startswith(b"PK\x03\x04"):
            return _load_zip(content, path, trust)
        if content.startswith(_PICKLE):
            return _load_pickle(content, path, trust), None
    if content[8:9] == b"{":
        raise SurgeryError(_state_dict(path, "a safetensors file, which holds a state dict"))
    raise SurgeryError(
        f"{path!r} begins with {content[:8]!r} and is no format that is known here. Give a TorchScript file, a "
        "torch.export archive, the name of a timm model, or package.module:factory."
    )


def _load_zip(content: bytes, path: str, trust: bool) -> tuple[nn.Module, Any]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = [name.partition("/")[2] or name for name in archive.namelist()]
            damaged = archive.testzip()
            first = min((info.header_offset for info in archive.infolist()), default=0)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise SurgeryError(f"{path!r} is truncated or damaged ({error}). Write or download it again.") from error
    if first:  # the end that was found is that of a zip inside, as one example of the inputs is
        raise SurgeryError(f"{path!r} is truncated: its end is missing. Write or download it again.")
    if damaged:
        raise SurgeryError(f"{path!r} is damaged: {damaged!r} in it is not what was written. Download it again.")
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return _load_program(content, path, trust)
    if "constants.pkl" in names:
        return _read(path, lambda: torch.jit.load(io.BytesIO(content), map_location="cpu")), None
    if "data.pkl" in names:
        return _load_pickle(content, path, trust), None
    listed = ", ".join(map(repr, names[:4]))
    raise SurgeryError(
        f"{path!r} is a zip of something else ({listed}{', ...' if len(names) > 4 else ''}). Give a TorchScript "
        "file or a torch.export archive."
    )


def _load_program(content: bytes, path: str, trust: bool) -> tuple[nn.Module, Any]:
    if trust:
        program = _read(path, lambda: torch.export.load(io.BytesIO(content)))
    else:
        _read(path, lambda: refuse_code(content, path))
        program = _read(path, lambda: read_program(io.BytesIO(content)))
    if program is None:
        raise SurgeryError(f"{path!r} is a torch.export archive without a program called 'model' in it.")
    return _read(path, program.module), program.example_inputs


def _load_pickle(content: bytes, path: str, trust: bool) -> nn.Module:
    try:
        held = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        if not trust:
            raise SurgeryError(
                f"{path!r} is a pickle of Python objects, and reading one runs whatever code it names. Save the model "
                f"as TorchScript or with torch.export, or give package.module:factory. {TRUST}"
            ) from error
        import_from_here()
        held = _read(path, lambda: _unpickled(content, path))
    if isinstance(held, nn.Module):
        return held
    if isinstance(held, dict):
        raise SurgeryError(_state_dict(path, f"a dict of {len(held)} entries ({', '.join(map(repr, list(held)[:3]))})"))
    raise SurgeryError(f"{path!r} holds a {type(held).__name__}, and no model.")


def _unpickled(content: bytes, path: str) -> Any:
    try:
        if content.startswith(b"PK") or _MAGIC in content[:16]:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        return pickle.loads(content)
    except (ImportError, AttributeError) as error:
        raise SurgeryError(
            f"{path!r} names a class or function that is not found here: {error}. Run the command where it can be "
            "imported, in the directory of its module for one."
        ) from error


def _state_dict(path: str, what: str) -> str:
    return (
        f"{path!r} is {what}: weights without a forward. Name the architecture, as a timm name or as package.module:"
        f"factory with a function that builds it and does load_state_dict(torch.load({path!r}))."
    )


def _read(path: str, read: Any) -> Any:
    """What a reader of torch returns; what it raises is said in one line."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return read()
    except SurgeryError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise SurgeryError(
            f"{path!r} cannot be read with torch {torch.__version__}: {type(error).__name__}: "
            f"{lines[0].rstrip('.') if lines else 'no reason given'}. If another version of torch has written it, a "
            "newer one above all, read it with that one; otherwise write or download it again."
        ) from error
    finally:
        logger.setLevel(level)
