"""The model that a command names, and inputs for it: a timm name, a factory or a file; an image or shapes."""

import contextlib
import importlib
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SurgeryError, closest, first_line
from ..progress import Progress
from .files import import_from_here, load_file

__all__ = ["Patient", "load"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet, where a model does not say what it was trained on."""


@dataclass
class Patient:
    """A model with its name and what is known of its inputs.

    Attributes:
        name: as it was given.
        model: in evaluation mode.
        inputs: that came with it, as a pair of positional and keyword arguments.
        size: of an image that it takes, ``(C, H, W)``.
        notes: what its user should hear.
    """

    name: str
    model: nn.Module
    inputs: Any = None
    size: tuple[int, int, int] | None = None
    notes: list[str] = field(default_factory=list)

    def example(self, image: Path | None, shapes: list[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs that a command asks for, those that came with the model, or two random images.

        Raises:
            SurgeryError: where none can be made.
        """
        if image is not None:
            return (self._read_image(image, shapes),), {}
        if shapes:
            return tuple(_random(shape) for shape in shapes), {}
        if self.inputs is not None:
            return self.inputs
        if self.size is not None:
            return (torch.randn(2, *self.size),), {}
        raise SurgeryError(
            f"what {self.name!r} takes is not known. Give the shape of each input, such as --input 2x3x224x224 or "
            "--input 1x128:int64, or an image."
        )

    def _read_image(self, path: Path, shapes: list[str]) -> Tensor:
        try:
            from PIL import Image
        except ImportError as error:
            raise SurgeryError(
                f"the image {str(path)!r} was given, and pillow is not installed. "
                "Install it with python -m pip install pillow."
            ) from error
        *_, height, width = _random(shapes[0]).shape if shapes else self.size or (3, 224, 224)
        try:
            with Image.open(path) as opened:
                resized = opened.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        except (OSError, ValueError) as error:
            raise SurgeryError(f"the image {str(path)!r} cannot be read: {error}.") from error
        pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
        values = pixels.view(height, width, 3).permute(2, 0, 1).float() / 255
        known = getattr(self.model, "pretrained_cfg", None) or {}
        mean, std = (torch.tensor(known.get(key, one)).view(3, 1, 1) for key, one in (("mean", MEAN), ("std", STD)))
        return ((values - mean) / std)[None].contiguous()


def load(name: str, pretrained: bool, trust: bool) -> Patient:
    """The model of that name.

    Raises:
        SurgeryError: where there is none, or it cannot be read.
    """
    is_hub = name.startswith(("hf-hub:", "hf_hub:", "local-dir:"))
    is_file = name and not is_hub and (Path(name).exists() or Path(name).suffix in _ENDINGS or "/" in name)
    torch.manual_seed(0)  # random weights and inputs are the same in every run
    with Progress(f"load {name}"):
        if is_file:
            model, inputs = load_file(name, trust)
            patient = Patient(name, model, inputs)
        elif ":" in name and not is_hub:
            patient = Patient(name, _from_factory(name))
        else:
            patient = _from_timm(name, pretrained)
    if pretrained and (is_file or (":" in name and not is_hub)):
        raise SurgeryError(f"--pretrained was asked for {name!r}, which is no timm name. Leave it off.")
    with contextlib.suppress(NotImplementedError):  # the program of an export has one mode
        patient.model.eval()
    return patient


_ENDINGS = (".pt", ".pt2", ".pth", ".pkl", ".bin", ".ckpt", ".safetensors", ".onnx")


def _from_factory(name: str) -> nn.Module:
    module_name, _, qualname = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *qualname.split("."))):
        raise SurgeryError(f"{name!r} is no package.module:factory. Give one such as torchvision.models:resnet18.")
    import_from_here()
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise SurgeryError(f"{name!r} was asked for, and cannot be imported: {error}.") from error
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise SurgeryError(
            f"{name!r} was asked for, and importing {module_name!r} raised {type(error).__name__}: {error}."
        ) from error
    try:
        for part in qualname.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise SurgeryError(f"{name!r} was asked for, and cannot be imported: {error}.") from error
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise SurgeryError(f"{name!r} is a {type(found).__name__}. Give a function or class that builds the model.")
    try:
        model = found()
    except (Exception, SystemExit) as error:
        raise SurgeryError(
            f"{name!r} was called without arguments and raised {type(error).__name__}: {error}. Give a factory that "
            f"needs none; its signature is {_signature(found)}."
        ) from error
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"{name!r} returned a {type(model).__name__}. Give a function that returns an nn.Module.")
    return model


def _signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "not known"


def _from_timm(name: str, pretrained: bool) -> Patient:
    try:
        import timm
    except ImportError as error:
        raise SurgeryError(
            f"the timm model {name!r} was asked for, and timm is not installed. Install it with "
            'python -m pip install "gradsurgery[timm]", or give a file or package.module:factory.'
        ) from error
    if ":" not in name and not timm.is_model(name):
        raise SurgeryError(
            f"{name!r} is no model of timm {timm.__version__}; {closest(name, timm.list_models())}. A file ends "
            "in .pt or .pt2, and a factory is package.module:factory."
        )
    notes = []
    try:
        model = timm.create_model(name, pretrained=pretrained)
    except Exception as error:  # of many kinds: the hub's, the network's, the file system's
        if not pretrained:
            raise SurgeryError(f"timm cannot build {name!r}: {error}.") from error
        try:
            model = timm.create_model(name, pretrained=False)
        except Exception:
            raise SurgeryError(f"timm cannot build {name!r}: {error}.") from error
        notes.append(f"the weights of {name} could not be had ({type(error).__name__}), so they are random")
    config = getattr(model, "pretrained_cfg", {})
    return Patient(name, model, size=config.get("input_size"), notes=notes)


def _random(shape: str) -> Tensor:
    """A random tensor of a shape such as ``2x3x224x224`` or ``1x128:int64``."""
    sizes, _, dtype_name = shape.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    if not isinstance(dtype, torch.dtype) or not all(size.isdigit() for size in sizes.split("x")):
        raise SurgeryError(
            f"--input {shape!r} is no shape. Give sizes and a dtype, such as 2x3x224x224 or 1x128:int64."
        )
    dims = [int(size) for size in sizes.split("x")]
    try:
        return (torch.randn(dims) if dtype.is_floating_point or dtype.is_complex else torch.randint(0, 2, dims)).to(
            dtype
        )
    except RuntimeError as error:
        raise SurgeryError(f"--input {shape!r} cannot be made: {first_line(error)}.") from error
