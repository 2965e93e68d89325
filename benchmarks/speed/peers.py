"""One operator in eight ways: the gradient reversals that people use, each as its source has it.

Three are packages, left out where they are not installed: ``pip install --no-deps pytorch-revgrad
torch-gradient-reversal pytorch-adapt pytorch-metric-learning`` (the last is imported by the one before it). The others
are written here in a few lines from what they do: Transfer-Learning-Library multiplies the value by 1.0 to get a new
tensor, fairseq returns an alias of it (``new(x)``), hooks change the gradient of a tensor or of a module in passing.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradsurgery as gs

__all__ = ["LIMIT", "OPERATORS", "OURS", "PACKAGES", "built"]

PACKAGES = {
    "pytorch-revgrad": ("pytorch_revgrad", "RevGrad"),
    "torch-gradient-reversal": ("gradient_reversal", "GradientReversalLayer"),
    "pytorch-adapt": ("pytorch_adapt.layers", "GradientReversal"),
}
"""The layers that are installed with a package of their own: its module, and the class there."""


class _Copying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.neg() * 1.0


class _Aliasing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * -1.0


class _Layer(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def _hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad * -1.0)
    return x


def _module_hook() -> nn.Module:
    layer = nn.Identity()
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * -1.0,))
    return layer


OURS, LAYER, LIMIT = "gs.insert_grl at a module", "gs.GradientReversal as a layer", "the limit"


def _layer_of(name: str) -> Callable[[], nn.Module] | None:
    module, layer = PACKAGES[name]
    try:
        return getattr(importlib.import_module(module), layer)
    except ImportError:  # it, or what it imports
        return None


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    **{name: layer for name in PACKAGES if (layer := _layer_of(name)) is not None},
    "`x * 1.0`, as in Transfer-Learning-Library": lambda: _Layer(_Copying.apply),
    "alias, as in fairseq": lambda: _Layer(_Aliasing.apply),
    "tensor hook": lambda: _Layer(_hooked),
    "module full-backward hook": _module_hook,
    LAYER: gs.GradientReversal,
}
"""Each operator as a layer; ``OURS`` needs none."""


def built(name: str, before: nn.Module, *after: nn.Module) -> nn.Sequential:
    """A network with an operator between ``before`` and ``after``; without one for the limit."""
    if name == OURS:
        return gs.insert_grl(nn.Sequential(before, *after), "0")
    if name == LIMIT:
        return nn.Sequential(before, *after)
    return nn.Sequential(before, OPERATORS[name](), *after)
