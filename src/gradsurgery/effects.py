"""What became of the gradient of each parameter: one row for each, with one word for it."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from .compare import MARGIN, Rounding, factor_of, flat, has
from .measure import Gradients

__all__ = ["EFFECTS", "Effect", "Row", "products", "rows_of"]

Effect = Literal["unchanged", "reversed", "scaled", "mixed", "blocked", "zero", "untouched", "added"]

EFFECTS: dict[Effect, str] = {
    "unchanged": "the same gradient as without the operators",
    "reversed": "a negative multiple of it: the parameter climbs",
    "scaled": "a positive multiple of it",
    "mixed": "no multiple of it: it arrives by several ways",
    "blocked": "none, or zero, where there was some: the parameter can no longer train",
    "zero": "zero either way, if need be up to rounding, so that nothing can be told",
    "untouched": "none either way",
    "added": "some where there was none",
}


@dataclass(frozen=True)
class Row:
    """What reaches one parameter.

    Attributes:
        parameter: its name.
        effect: one of the words of :data:`EFFECTS`.
        factor: what the plain gradient is multiplied by, where that is one number.
        exact: whether every bit is that of the multiple; False is up to rounding.
        cosine: of the angle between the gradient without the operators and with them.
        norm: of the gradient with the operators; None where there is none.
        plain: of the gradient without them; likewise.
        trains: whether the parameter has ``requires_grad``.
    """

    parameter: str
    effect: Effect
    factor: float | None
    exact: bool
    cosine: float | None
    norm: float | None
    plain: float | None
    trains: bool = True

    head: ClassVar = ("parameter", "effect", "factor", "exact", "cosine", "norm", "plain", "trains")


def rows_of(
    names: Iterable[str],
    plain: Gradients,
    operated: Gradients,
    rounding: Rounding,
    known: Sequence[float],
    owned: Collection[str],
    frozen: Collection[str],
) -> list[Row]:
    """One row for each name; ``owned`` are the parameters of the operators, ``frozen`` those that require no grad."""
    return [
        _row(name, plain[name], operated[name], rounding, known, name in owned, name not in frozen) for name in names
    ]


def _row(
    name: str,
    before: Tensor | None,
    after: Tensor | None,
    rounding: Rounding,
    known: Sequence[float],
    own: bool,
    trains: bool,
) -> Row:
    factor, exact, cosine = None, False, None
    norm, plain = (None if one is None else float(flat(one).norm()) for one in (after, before))
    if after is None or before is None:
        effect: Effect = "added" if after is not None else "untouched"
        if after is None and (before is not None or (own and trains)):
            effect = "blocked"
        return Row(name, effect, factor, exact, cosine, norm, plain, trains)
    if has(before) and has(after):
        relative = MARGIN * max(rounding.relative[name], rounding.typical)
        factor, exact = factor_of(before, after, known, relative)
        cosine = _cosine(before, after)
        effect = _named(factor)
        if rounding.hides(name) and not exact:
            effect, factor = "zero", None
    elif has(before):
        effect, factor, exact = "blocked", 0.0, True
    else:
        effect = "added" if has(after) else "zero"
    return Row(name, effect, factor, exact, cosine, norm, plain, trains)


def _named(factor: float | None) -> Effect:
    if factor is None:
        return "mixed"
    if factor == 0.0:
        return "blocked"
    return "unchanged" if factor == 1.0 else "reversed" if factor < 0 else "scaled"


def _cosine(one: Tensor, other: Tensor) -> float | None:
    a, b = flat(one), flat(other)
    length = float(a.norm()) * float(b.norm())
    return max(-1.0, min(1.0, float(a @ b) / length)) if length and math.isfinite(length) else None


def products(factors: Iterable[float]) -> list[float]:
    """The factors that operators in a row can come to, with 1 and 0."""
    known = [1.0, 0.0]
    for factor in factors:
        known = list(dict.fromkeys([*known, *(one * factor for one in known)]))[:512]
    return known
