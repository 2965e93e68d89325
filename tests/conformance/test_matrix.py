"""Every operator at every kind of place stays right under every tool, or is refused for a reason that is listed.

``python -m pytest`` runs a chosen slice; ``python -m pytest tests/conformance --whole`` runs every cell and writes
``docs/conformance.md``.
"""

import re

import pytest

from .nets import OPERATORS, PLACES, Patient
from .outcome import assert_right, rows, step
from .refusals import refusal_of
from .tools import Cell, Verdict, judge

# What the tools announce is theirs; what this package warns of is a failure.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::gradsurgery")]


def test_cell(cell: Cell, verdicts: dict[Cell, Verdict], in_time: bool) -> None:
    verdict = verdicts[cell] = judge(cell) if in_time else Verdict("not run", "the time that was given was over")
    if verdict.kind in ("not run", "not applicable"):
        return
    listed = refusal_of(cell)
    if listed is None:
        assert verdict == Verdict("right")
    else:
        assert verdict.kind == "refused", f"listed as refused, and {verdict}"
        assert re.search(listed.message, verdict.why, re.DOTALL), verdict.why


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_comparison_tells_an_operator_from_none_and_from_the_others(operator: str, place: str) -> None:
    right = step(Patient(operator, place).by_hand(), rows())
    for other in ("none", *OPERATORS):
        found = step(Patient(other, place).by_hand(), rows())
        if other == operator:
            assert_right(found, right)
        else:
            with pytest.raises(AssertionError, match="is right"):
                assert_right(found, right)
