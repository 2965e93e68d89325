"""What each kind of operator promises about the gradient of a parameter, held against what was measured."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from .compare import Rounding, factor_of, flat, gap, has, largest, same
from .measure import Gradients

__all__ = ["Verdict", "by_formula", "by_hand"]


@dataclass
class Verdict:
    """How the parameters of a model compare with what was promised."""

    exact: int = 0
    rounded: int = 0
    untold: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """One of the results of a :class:`.report.Check`."""
        if self.rounded:
            return "within rounding"
        return "exact" if self.exact else "not checked"

    @property
    def note(self) -> str:
        """How many parameters were checked in which way."""
        parts = [
            (self.exact, "exact"),
            (self.rounded, "within rounding"),
            (self.untold, "zero or all rounding, not told"),
        ]
        told = [f"{count} {what}" for count, what in parts if count]
        return ", ".join(told)

    def differs(
        self, name: str, expected: Tensor | None, got: Tensor | None, plain: Tensor | None, bound: float
    ) -> None:
        """Note a parameter whose gradient is not the promised one."""
        if got is None or expected is None:
            there, due = ("none" if one is None else f"one up to {largest(one):.3g}" for one in (got, expected))
            self.wrong.append(f"{name}: gradient {there}, where {due} was due")
            return
        factors = [factor_of(plain, one, (), 1e-4)[0] if plain is not None else None for one in (got, expected)]
        if None in factors:
            self.wrong.append(f"{name}: differs by up to {gap(flat(got), flat(expected)):.3g}, rounding is {bound:.2g}")
        else:
            self.wrong.append(f"{name}: factor {factors[0]:.6g}, where {factors[1]:.6g} was due")


def by_formula(plain: Gradients, stopped: Gradients, got: Gradients, factor: float, rounding: Rounding) -> Verdict:
    """Whether ``g(s) = s g(1) + (1 - s) g(0)`` in every parameter.

    Where the place is the only way, or no way, to a parameter and ``s`` is a power of two, nothing rounds, and every
    bit has to be right, if two equal steps of this model give equal bits.
    """
    verdict = Verdict()
    for name, whole in plain.items():
        rest, there = stopped[name], got[name]
        if whole is None:
            _compare(verdict, name, rest, there, whole, rounding, strict=True)
        elif rest is None or not has(rest):
            _compare(verdict, name, whole * factor, there, whole, rounding, strict=_is_power_of_two(factor))
        elif same(whole, rest):
            _compare(verdict, name, whole, there, whole, rounding, strict=True)
        else:
            sum_of_both = flat(whole) * factor + flat(rest) * (1 - factor)
            sizes = (abs(factor) * largest(whole), abs(1 - factor) * largest(rest))
            _compare(verdict, name, sum_of_both, there, whole, rounding, sizes=sizes)
    return verdict


def by_hand(expected: Gradients, got: Gradients, plain: Gradients, rounding: Rounding) -> Verdict:
    """Whether the gradients are those of a graph that was cut by hand; ``None`` has to be ``None``."""
    verdict = Verdict()
    for name, due in expected.items():
        sizes = (largest(due), largest(plain[name]))
        _compare(verdict, name, due, got[name], plain[name], rounding, sizes=sizes)
    return verdict


def _compare(
    verdict: Verdict,
    name: str,
    due: Tensor | None,
    there: Tensor | None,
    plain: Tensor | None,
    rounding: Rounding,
    *,
    strict: bool = False,
    sizes: tuple[float, ...] | None = None,
) -> None:
    if due is None and there is None:
        verdict.exact += 1
        return
    if due is None or there is None:
        verdict.differs(name, due, there, plain, 0.0)
        return
    if not has(due) and not has(there) and not has(plain):
        verdict.untold += 1
        return
    if due.shape == there.shape and same(due, there):
        verdict.exact += 1
        return
    bound = rounding.bound(name, *(sizes if sizes is not None else (largest(due),)))
    if strict and rounding.reproducible:
        bound = 0.0
    if gap(flat(due), flat(there)) <= bound:
        if rounding.hides(name):
            verdict.untold += 1
        else:
            verdict.rounded += 1
    else:
        verdict.differs(name, due.reshape(there.shape) if not there.is_complex() else None, there, plain, bound)


def _is_power_of_two(factor: float) -> bool:
    """Of those that neither overflow nor fall below the normal numbers."""
    return factor == 0.0 or (abs(math.frexp(factor)[0]) == 0.5 and 2.0**-8 <= abs(factor) <= 2.0**8)
