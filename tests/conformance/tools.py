"""The register of tools, and one cell of the matrix."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

import gradsurgery as gs

from .nets import Patient
from .outcome import NotApplicableError, NotRunError, Outcome, assert_right, rows, step

Run = Callable[[Patient, Tensor], Outcome]


@dataclasses.dataclass(frozen=True)
class Tool:
    """One thing that people do with a model.

    Attributes:
        name: as the matrix shows it.
        family: the section of the matrix.
        run: does it to an operated model and says what came out.
        right: what should come out, from the net written by hand; by default one step in eager.
        cost: ``"cheap"`` below a tenth of a second a cell, ``"dear"`` above, ``"slow"`` above a few seconds.
    """

    name: str
    family: str
    run: Run
    right: Run
    cost: str


TOOLS: dict[str, Tool] = {}


def eager(patient: Patient, x: Tensor) -> Outcome:
    return step(patient.by_hand(), x)


def tool(family: str, name: str, right: Run | None = eager, cost: str = "cheap") -> Callable[[Run], Run]:
    """Register a tool. ``right=None`` measures the net written by hand in the same way."""

    def register(run: Run) -> Run:
        def by_hand(patient: Patient, x: Tensor) -> Outcome:
            return run(Handwritten(patient.operator, patient.place, patient.make), x)

        assert name not in TOOLS, name
        TOOLS[name] = Tool(name, family, run, right or by_hand, cost)
        return run

    return register


class Handwritten(Patient):
    """A patient that is the net written by hand, for tools that measure in a way of their own."""

    def of(self, make: Callable[[float], torch.nn.Module]) -> Patient:
        return Handwritten(self.operator, self.place, make)

    def operated(self) -> torch.nn.Module:
        return self.by_hand()


@dataclasses.dataclass(frozen=True)
class Cell:
    """One operator at one place under one tool."""

    tool: str
    operator: str
    place: str

    def __str__(self) -> str:
        return f"{self.tool}-{self.operator}-{self.place}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a cell turned out to be, and why."""

    kind: Literal["right", "refused", "wrong", "not applicable", "not run"]
    why: str = ""


def judge(cell: Cell) -> Verdict:
    """Run one cell."""
    one = TOOLS[cell.tool]
    patient = Patient(cell.operator, cell.place)
    torch.manual_seed(0)
    try:
        found = one.run(patient, rows())
    except NotApplicableError as reason:
        return Verdict("not applicable", str(reason))
    except NotRunError as reason:
        return Verdict("not run", str(reason))
    except gs.SurgeryError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except AssertionError as error:
        return Verdict("wrong", str(error))
    except Exception as error:  # whatever a tool of torch raises is loud, and the table of refusals knows it
        return Verdict("refused", f"{type(error).__name__}: {error}")
    right = one.right(patient, rows())
    try:
        assert_right(found, right)
    except AssertionError as error:
        return Verdict("wrong", str(error))
    return Verdict("right")
