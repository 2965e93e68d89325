"""Numbers held against numbers: the same bits, one factor, or a difference no larger than rounding.

Rounding is measured, not assumed. The backward of half the loss must give exactly half of every gradient, since powers
of two do not round; that of three and of five quarters of it differs by as much as this model rounds.
"""

import statistics
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .measure import Gradients, Step, strided

__all__ = ["SHARES", "Rounding", "factor_of", "gap", "has", "largest", "same", "same_bits"]

SHARES = (0.5, 0.75, 1.25)
"""Of the loss, in the steps that measure rounding."""

MARGIN = 16.0
"""How much more than was measured still counts as rounding."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike to the last bit, the sign of a zero and the bits of a nan included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    rows = [strided(tensor).reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*rows)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two gradients are equal, nan to nan and zero to zero of either sign."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor as one row of doubles."""
    tensor = strided(tensor.detach())
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference of two elements; infinite where one is not finite and the other is not the same."""
    a, b = flat(one), flat(other)
    differ = (a != b) & ~(a.isnan() & b.isnan())
    return float((a - b)[differ].abs().nan_to_num(nan=torch.inf).max()) if differ.any() else 0.0


def largest(tensor: Tensor | None) -> float:
    """The largest finite magnitude in a tensor."""
    if tensor is None or not tensor.numel():
        return 0.0
    values = flat(tensor).abs()
    return float(values[values.isfinite()].max()) if values.isfinite().any() else 0.0


def has(gradient: Tensor | None) -> bool:
    """Whether there is a gradient and it is not zero all over."""
    return gradient is not None and bool(gradient.any())


class Rounding:
    """How far apart two gradients of one parameter may be where only rounding tells them apart.

    Args:
        plain: a step of the whole loss.
        shaken: steps of the :data:`SHARES` of the loss, in their order.
    """

    def __init__(self, plain: Step, shaken: Sequence[Step]) -> None:
        self.relative = {name: self._relative(name, plain, shaken) for name in plain.gradients}
        known = [one for name, one in self.relative.items() if has(plain.gradients[name])]
        self.typical = statistics.median(known) if known else 0.0
        self.reproducible = _is_half(plain.gradients, shaken[0].gradients)
        self.forward = self._forward(plain, shaken)

    def _relative(self, name: str, plain: Step, shaken: Sequence[Step]) -> float:
        gradient = plain.gradients[name]
        if gradient is None or not has(gradient):
            return 0.0
        pairs = [(share, step.gradients[name]) for share, step in zip(SHARES, shaken, strict=True)]
        gaps = [gap(flat(other) / share, flat(gradient)) for share, other in pairs if other is not None]
        return max(*gaps, 4 * torch.finfo(gradient.dtype).eps * largest(gradient)) / (largest(gradient) or 1.0)

    def _forward(self, plain: Step, shaken: Sequence[Step]) -> float:
        """How far apart the outputs of equal steps are: 0 where their bits are the same."""
        if plain.outputs is None:
            return 0.0
        return max(difference(plain.outputs, step.outputs or []) for step in shaken)

    def bound(self, name: str, *sizes: float) -> float:
        """The largest difference that counts as rounding, for terms of these sizes."""
        return MARGIN * max(self.relative.get(name, 0.0), self.typical) * sum(sizes)

    def hides(self, name: str) -> bool:
        """Whether a gradient is all rounding, as that of a bias before a BatchNorm is, so that nothing can be told."""
        return self.relative.get(name, 0.0) * MARGIN >= 1.0


def difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of two outputs: 0 where their bits are the same, infinite where they do not compare."""
    if len(some) != len(others):
        return torch.inf
    gaps = [0.0]
    for one, other in zip(some, others, strict=True):
        if not same_bits(one, other):
            gaps.append(
                max(gap(one, other), torch.finfo(torch.float64).tiny) if one.shape == other.shape else torch.inf
            )
    return max(gaps)


def factor_of(plain: Tensor, operated: Tensor, known: Iterable[float], rounding: float) -> tuple[float | None, bool]:
    """The one factor that makes a gradient of another, and whether it does so exactly; None where none does.

    Args:
        plain: the gradient.
        operated: the other.
        known: factors that are likely, of which the nearest is tried before the measured ratio.
        rounding: the part of the largest element by which two may differ.
    """
    before, after = flat(plain), flat(operated)
    if not before.numel() or not before.any():
        return None, False
    k = int(before.abs().nan_to_num(nan=0.0, posinf=0.0).argmax())
    ratio = float(after[k] / before[k])
    slack = rounding * max(1.0, abs(ratio))
    nearest = min(known, key=lambda one: abs(one - ratio), default=ratio)
    chosen = nearest if abs(nearest - ratio) <= slack else ratio
    if same(operated, plain * chosen):
        return chosen, True
    if gap(after, before * chosen) <= slack * largest(plain):
        return chosen, False
    return None, False


def _is_half(whole: Gradients, half: Gradients) -> bool:
    return all(
        (one is None and other is None) or (one is not None and other is not None and same(one * 0.5, other))
        for one, other in ((one, half[name]) for name, one in whole.items())
    )
