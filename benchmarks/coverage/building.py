"""Subjects of the sweep, and how to build one quickly: the values of the weights do not matter, their time does."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Inputs = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
"""Positional and keyword arguments made anew on a device, from the seed of the harness."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way to build a model and feed it, such as an image size."""

    said: str
    build: Callable[[], nn.Module]
    train: Inputs
    eval: Inputs
    input_gradient: bool = True


@dataclasses.dataclass(frozen=True)
class Subject:
    """One model of one library; the first of its trials that the model takes is the one that counts."""

    library: str
    name: str
    group: str
    trials: Callable[[], Iterator[Trial]]

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


_FILLING = {"uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_", "orthogonal_"}


class _QuickNoise(TorchFunctionMode):
    """Random initialisation from one block of noise, repeated: a distribution costs more than the model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)) * 0.02

    def fill(self, value: Tensor) -> Tensor:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            flat = value.view(-1) if value.is_contiguous() else None
            if flat is None:
                return value
            whole = flat.numel() // len(self.noise) * len(self.noise)
            if whole:
                flat[:whole].view(-1, len(self.noise)).copy_(self.noise)
            flat[whole:].copy_(self.noise[: flat.numel() - whole])
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        value = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes itself on by keyword
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() > 10_000:
            if name in _FILLING:
                return self.fill(value)
            if name == "erfinv_":  # of a truncated normal drawn by its inverse, which has become noise already
                return value
        return func(*args, **kwargs)


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Build models in a fraction of the time, with weights that are as random as a comparison of bits needs."""
    with _QuickNoise():
        yield


def liven(model: nn.Module) -> nn.Module:
    """Noise on every parameter, so that no zero-initialised scale hides a path from the comparison."""
    noise = torch.randn(1 << 16, generator=torch.Generator().manual_seed(11)) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.device.type == "cpu" and parameter.is_contiguous():
                flat = parameter.view(-1)
                whole = flat.numel() // len(noise) * len(noise)
                if whole:
                    flat[:whole].view(-1, len(noise)).add_(noise.to(flat.dtype))
                flat[whole:].add_(noise[: flat.numel() - whole].to(flat.dtype))
    return model
