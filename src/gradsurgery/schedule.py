"""The strength of a reversal over a training run."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import nn

from .errors import OperatorError
from .operators import GradientReversal
from .review import operations

__all__ = ["GRLScheduler"]

Ramp = Callable[[float], float]


class GRLScheduler:
    """Raise the strength of the reversals of a model step by step, as DANN training needs it.

        scheduler = gs.GRLScheduler(model, total_steps=len(loader) * epochs)
        for batch in loader:
            ...
            optimizer.step()
            scheduler.step()

    Early on the features are noise to the domain head, so a full reversal from the start only disturbs them (Ganin et
    al. 2016, section 5.2). Like a learning-rate scheduler of torch it moves when ``step()`` is called and never by
    itself: neither a second forward nor evaluation advances it. The horizon is asked for, since a ramp that is tied to
    somebody else's number of steps ends at the wrong strength.

    Args:
        reversals: a model, each of whose reversals is driven, or the ``GradientReversal`` layers themselves.
        total_steps: the step at which the ramp ends, at least 1.
        ramp: ``"dann"`` is ``2 / (1 + exp(-gamma * p)) - 1`` for a progress ``p`` from 0 to 1; ``"linear"`` is ``p``;
            ``"cosine"`` is ``(1 - cos(pi * p)) / 2``; ``"constant"`` is 1; or any function of ``p``, not negative.
        gamma: the steepness of ``"dann"``.
        max_lambd: what the ramp is multiplied by.

    Raises:
        OperatorError: where there is no reversal to drive, ``total_steps`` is below 1, or a coefficient is not usable.
    """

    def __init__(
        self,
        reversals: nn.Module | Iterable[GradientReversal],
        total_steps: int,
        ramp: Literal["dann", "linear", "cosine", "constant"] | Ramp = "dann",
        gamma: float = 10.0,
        max_lambd: float = 1.0,
    ) -> None:
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
            raise OperatorError(
                f"total_steps={total_steps!r} was asked for. It is the number of calls of step() in the whole "
                "training, an int of at least 1, such as len(loader) * epochs."
            )
        self.total_steps = total_steps
        self.max_lambd = GradientReversal(max_lambd).lambd
        self.last_step = 0
        self.ramp = ramp
        self.gamma = gamma
        self._ramp = _named_ramp(ramp, gamma)
        self._reversals = _reversals_of(reversals)
        self._set()

    @property
    def last_lambd(self) -> float:
        """The strength that is set now."""
        progress = min(self.last_step / self.total_steps, 1.0)
        return self.max_lambd * self._ramp(progress)

    def step(self) -> None:
        """Advance by one step; past the end the strength stays at the end, which is said once."""
        self.last_step += 1
        if self.last_step == self.total_steps + 1:
            warnings.warn(
                f"step() was called more than total_steps={self.total_steps} times; the strength stays where it ended.",
                stacklevel=2,
            )
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved to go on after a restart; a ramp that is a function of yours is not in it."""
        ramp = None if callable(self.ramp) else self.ramp
        kept = {name: getattr(self, name) for name in ("last_step", "total_steps", "gamma", "max_lambd")}
        return {**kept, "ramp": ramp}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with the ramp and the strength that belong to it.

        Raises:
            OperatorError: where it was saved with a function as the ramp, and this scheduler has none.
        """
        if state["ramp"] is None and not callable(self.ramp):
            raise OperatorError(
                f"a state was to be loaded that was saved with a function as the ramp, and this scheduler has "
                f"ramp={self.ramp!r}. Make it with the same function: GRLScheduler(..., ramp=function)."
            )
        self.ramp = state["ramp"] if state["ramp"] is not None else self.ramp
        self.last_step, self.total_steps = int(state["last_step"]), int(state["total_steps"])
        self.gamma, self.max_lambd = float(state["gamma"]), float(state["max_lambd"])
        self._ramp = _named_ramp(self.ramp, self.gamma)
        self._set()

    def __repr__(self) -> str:
        return f"GRLScheduler(step {self.last_step} of {self.total_steps}, lambd={self.last_lambd:.6g})"

    def _set(self) -> None:
        for reversal in self._reversals:
            reversal.lambd = self.last_lambd


def _named_ramp(ramp: str | Ramp, gamma: float) -> Ramp:
    named: dict[str, Ramp] = {
        "dann": lambda p: 2.0 / (1.0 + math.exp(-gamma * p)) - 1.0,
        "linear": lambda p: p,
        "cosine": lambda p: (1.0 - math.cos(math.pi * p)) / 2.0,
        "constant": lambda p: 1.0,
    }
    if callable(ramp):
        return ramp
    if ramp not in named:
        raise OperatorError(f"ramp={ramp!r} was asked for. It is one of {', '.join(map(repr, named))}, or a function.")
    return named[ramp]


def _reversals_of(given: nn.Module | Iterable[GradientReversal]) -> list[GradientReversal]:
    if isinstance(given, GradientReversal):
        return [given]
    if isinstance(given, nn.Module):
        inserted = [operation.operator for operation in operations(given)]
        found = [m for m in (*inserted, *given.modules()) if isinstance(m, GradientReversal)]
    else:
        found = list(given)
    if not found or not all(isinstance(reversal, GradientReversal) for reversal in found):
        raise OperatorError(
            "a scheduler was asked for, but there is no gradient reversal for it to drive. Insert one first "
            "(gs.insert_grl), or give the GradientReversal layers themselves."
        )
    return list(dict.fromkeys(found))
