"""Proof: every operator of a model, alone, held against what it promises."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .audit import Measured, measure
from .compare import SHARES, difference, factor_of, has
from .errors import CaptureError, VerificationError
from .ledger import lost_places
from .measure import Loss, Step
from .operators import DetachedTransform, FrozenTransform, MapGradient, ScaleGradient, StopGradient, StraightThrough
from .progress import Progress
from .promises import Verdict, by_formula, by_hand
from .report import Audit, Check
from .stand_in import Counter, Cut, Held, factor_set, held_places, keeps_value, replaced, runs_kept
from .wrappers import bare

__all__ = ["refuse_lost", "verify"]

_HAND = "gradient as by hand"
_ADVICE = (
    "Look at it with print(gs.operations(model)) and print(gs.audit(model, ...)): something that came after the "
    "insertion changed it, or runs in its place. If nothing did, report this message with the model that shows it."
)


def verify(model: nn.Module, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Audit:
    """Check that every operator of a model does what it promises, on these inputs; the rest is as in :func:`audit`.

        gs.verify(model, images)        # raises, or returns the audit with a list of what was checked

    Each operator is measured with the others switched off. A reversal or a scale of factor ``s`` has to give
    ``g(s) = s g(1) + (1 - s) g(0)`` in every parameter, where ``g(1)`` is the gradient without it and ``g(0)`` that
    with a stop in its place; that holds as well where other ways lead around the place. Every other operator of this
    package, and a reversal or scale that runs more than once, is held against a graph that is cut at its place by hand.
    The forward has to be bit-identical where the operator promises that, and that of the hand-cut graph where not.

    Gradients are equal to the last bit where nothing rounds; elsewhere they differ by at most 16 times what this very
    model rounds, which is measured. What could not be checked says so in ``audit.checks``, an operator of your own
    among it.

    Args:
        model: the operated model, also through its wrapper.
        *args: what its forward takes.
        loss: as in :func:`audit`.
        **kwargs: what its forward takes by name.

    Raises:
        VerificationError: where a promise does not hold, a place did not run, or another tool has lost an operator.
        SurgeryError: as in :func:`audit`.
    """
    refuse_lost(bare(model))
    steps = 2 + len(SHARES) + 2 * len(held_places(bare(model)))
    with Progress("verify", steps) as progress:
        measured = measure(model, args, kwargs, loss, progress, alone=True)
        if measured.idle:
            names = ", ".join(map(str, measured.idle))
            raise VerificationError(
                f"{names} was to act on what passes there, and did not run in this forward. Either the forward takes "
                "another branch on these inputs and in this mode, or the module was replaced or is called past its "
                "forward. Operate on what runs; gs.sites(model, example=...) lists it."
            )
        checks: list[Check] = []
        with runs_kept(measured.bench.root):
            for held in measured.places:
                checks += _Trial(measured, held, progress).checks()
        checks += _together(measured)
    return measured.audit(checks)


def refuse_lost(root: nn.Module) -> None:
    """Refuse a model of which another tool has lost an operator."""
    lost = [f"the {operator} at {place.where.text(path)!r}" for path, place, operator in lost_places(root)]
    if lost:
        raise VerificationError(
            f"{', '.join(lost)} was inserted and is lost: another tool has replaced the module that it was on. "
            "Insert it again, after that tool; or drop it from the list with gs.remove(model, at)."
        )


def _together(measured: Measured) -> list[Check]:
    """The forward with every operator at once."""
    if not all(keeps_value(held.operator) for held in measured.places) or len(measured.places) < 2:
        return []
    found = _forward(measured, measured.plain, measured.operated, "all operators together were")
    return [Check("all", f"{len(measured.places)} operators", "forward bit-identical", *found)]


def _forward(measured: Measured, due: Step, there: Step, who: str) -> tuple[str, str]:
    if due.outputs is None or there.outputs is None:
        return "not checked", "the output is of a type that cannot be looked into"
    apart = difference(due.outputs, there.outputs)
    if apart == 0.0:
        return "exact", ""
    if apart <= 16 * measured.rounding.forward:
        return "within rounding", "two equal forwards differ as much"
    raise VerificationError(
        f"{who} to leave the forward as promised, to the last bit. The output differs by up to {apart:.3g}. {_ADVICE}"
    )


class _Trial:
    """One operator, alone."""

    def __init__(self, measured: Measured, held: Held, progress: Progress) -> None:
        self.measured, self.held, self.progress = measured, held, progress
        self.operator = held.operator

    def checks(self) -> list[Check]:
        """Measure it and hold it against its promises.

        Raises:
            VerificationError: where one does not hold.
        """
        counter = Counter(self.operator)
        there = self._step(counter)
        if not counter.log.calls:
            return [self._check("any", "not checked", "it did not run while the other operators were switched off")]
        factor = factor_set(self.operator)
        if factor is None and not isinstance(self.operator, _CUT):
            return self._own(there)
        found = []
        if keeps_value(self.operator):
            result = _forward(self.measured, self.measured.plain, there, f"{self.held} was")
            found.append(self._check("forward bit-identical", *result))
        if factor is not None and counter.log.calls == 1:
            return [*found, self._linear(there, factor)]
        return [*found, *self._by_hand(there)]

    def _linear(self, there: Step, factor: float) -> Check:
        plain, stopped = self.measured.plain.gradients, self._stopped().gradients
        rounding = self.measured.rounding
        promise = f"g(s) = s g(1) + (1-s) g(0), s = {factor:.6g}"
        verdict = by_formula(plain, stopped, there.gradients, factor, rounding)
        if verdict.wrong and rounding.reproducible and not self._is_repeatable(there):
            rounding.reproducible = False  # it was by chance that earlier steps were
            verdict = by_formula(plain, stopped, there.gradients, factor, rounding)
        if verdict.wrong:
            self._refuse(promise, verdict)
        if not any(has(gradient) and not _equal(gradient, stopped[name]) for name, gradient in plain.items()):
            return self._check(promise, "not checked", "no gradient of a parameter passes here, or only zero")
        return self._check(promise, verdict.result, verdict.note)

    def _by_hand(self, there: Step) -> list[Check]:
        cut = Cut(self.operator)
        why = "it lies under activation checkpointing, where a graph cannot be cut by hand"
        try:
            due = self._step(cut, cut.finish)
        except CaptureError:
            if not cut.log.recomputed:
                raise
            return [self._check(_HAND, "not checked", why)]
        if cut.log.recomputed:
            return [self._check(_HAND, "not checked", why)]
        found = []
        if not keeps_value(self.operator):
            found.append(self._check("forward as by hand", *_forward(self.measured, due, there, f"{self.held} was")))
        if cut.log.random:
            return [*found, self._check(_HAND, "not checked", "its function gives another gradient at each call")]
        plain = self.measured.plain.gradients
        verdict = by_hand(due.gradients, there.gradients, plain, self.measured.rounding)
        if verdict.wrong:
            self._refuse(_HAND, verdict)
        return [*found, self._check(_HAND, verdict.result, verdict.note)]

    def _own(self, there: Step) -> list[Check]:
        """An operator that somebody wrote: it promises nothing, unless it has a ``backward`` that nobody calls."""
        plain, same_forward = self.measured.plain, None
        if plain.outputs is not None and there.outputs is not None:
            same_forward = difference(plain.outputs, there.outputs) == 0.0
        changed = [n for n, g in plain.gradients.items() if not _equal(g, there.gradients[n])]
        if same_forward and not changed and callable(getattr(type(self.operator), "backward", None)):
            raise VerificationError(
                f"{self.held} has a method called backward, so it was to change the gradient. No gradient is other "
                "than without it: autograd never calls a method of an nn.Module. Put the backward into a "
                "torch.autograd.Function, or use gs.GradientReversal or gs.MapGradient."
            )
        said = {True: "forward bit-identical", False: "changes the forward", None: "forward not compared"}[same_forward]
        return [
            self._check("none: an operator of your own", "not checked", f"{said}; {self._measured(there, changed)}")
        ]

    def _measured(self, there: Step, changed: list[str]) -> str:
        factors = {
            factor_of(before, after, (), 1e-4)[0] if (after := there.gradients[n]) is not None else None
            for n in changed
            if has(before := self.measured.plain.gradients[n]) and before is not None
        }
        told = {f"{factor:.4g}" for factor in factors if factor is not None}
        what = f", all by {told.pop()}" if len(told) == 1 and None not in factors else ""
        return f"changes the gradient of {len(changed)} parameters{what}"

    def _stopped(self) -> Step:
        try:
            return self._step(StopGradient())
        except CaptureError:  # a checkpoint whose inside has no gradient left is refused by torch
            return self._step(ScaleGradient(0.0))

    def _step(self, stand_in: nn.Module, then: Callable[[], None] | None = None) -> Step:
        with replaced(self.measured.places, {id(self.held.place): stand_in}):
            step = self.measured.bench.step(then=then)
        self.progress.step()
        return step

    def _is_repeatable(self, there: Step) -> bool:
        """Whether the same step again gives the same bits; where not, a strict comparison says nothing."""
        again = self._step(self.operator)
        return all(_equal(gradient, again.gradients[name]) for name, gradient in there.gradients.items())

    def _refuse(self, promise: str, verdict: Verdict) -> None:
        wrong = verdict.wrong
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise VerificationError(
            f"{self.held} was to keep its promise: {promise}. It does not in {len(wrong)} parameters: "
            f"{'; '.join(wrong[:3])}{more}. {_ADVICE}"
        )

    def _check(self, promise: str, result: str, note: str = "") -> Check:
        return Check(self.held.address, type(self.operator).__name__, promise, result, note)


_CUT = (StopGradient, StraightThrough, FrozenTransform, DetachedTransform, MapGradient)


def _equal(one: Any, other: Any) -> bool:
    return one is other if one is None or other is None else bool(one.equal(other))
