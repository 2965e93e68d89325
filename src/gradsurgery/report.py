"""What an audit found: a table to print, rows to compute with, a picture."""

import io
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .effects import Effect, Row
from .errors import SurgeryError
from .tables import columns

__all__ = ["Audit", "Check", "Group", "Inserted", "grouped"]


@dataclass(frozen=True)
class Check:
    """One promise of one operator, and how far it was checked.

    Attributes:
        address: where the operator is.
        operator: as it prints.
        promise: what was checked.
        result: ``"exact"``, ``"within rounding"`` or ``"not checked"``.
        note: why it was not checked, or how many parameters were.
    """

    address: str
    operator: str
    promise: str
    result: str
    note: str = ""


@dataclass(frozen=True)
class Inserted:
    """One operator, as an audit met it: where, on which side of the module, and its text."""

    address: str
    side: str
    operator: str


@dataclass(frozen=True)
class Group:
    """Rows that lie together in the model and share one effect."""

    name: str
    rows: tuple[Row, ...]

    @property
    def row(self) -> Row:
        """The row that stands for all of them: one of which something can be told, where there is one."""
        return next((row for row in self.rows if row.effect != "zero"), self.rows[0])

    @property
    def norms(self) -> tuple[float | None, float | None]:
        """Of the gradients of the group, with the operators and without them."""
        return _norm([row.norm for row in self.rows]), _norm([row.plain for row in self.rows])

    @property
    def cosine(self) -> float | None:
        """Of the gradients of the group."""
        dots = [r.cosine * r.norm * r.plain for r in self.rows if r.cosine is not None and r.norm and r.plain]
        after, before = self.norms
        return max(-1.0, min(1.0, sum(dots) / (after * before))) if dots and after and before else None

    def cells(self) -> tuple[str, ...]:
        """What the table shows."""
        row, zeros = self.row, sum(row.effect == "zero" for row in self.rows)
        effect = f"{row.effect} ({zeros} are zero)" if zeros and row.effect != "zero" else str(row.effect)
        if not any(row.trains for row in self.rows):
            effect += " (frozen)"
        exact = all(row.exact for row in self.rows if row.factor is not None)
        factor = "" if row.factor is None else f"{'' if exact else '~'}{row.factor:.6g}"
        cosine = "" if self.cosine is None else f"{self.cosine:+.3f}"
        norms = ["none" if norm is None else f"{norm:.3g}" for norm in reversed(self.norms)]
        return self.name, str(len(self.rows)), effect, factor, cosine, *norms


class Audit:
    """What reaches each parameter of a model, with its operators on and off; printed, it is a table by modules.

        audit = gs.audit(model, images)
        print(audit)
        audit.blocked           # the parameters that can no longer train
        audit.plot("audit.png")

    Attributes:
        rows: one for each parameter, in the order in which the modules run.
        operators: where each operator was, and its text.
        forward_identical: whether the outputs are bit-identical; None where they could not be compared.
        loss: with the operators.
        plain_loss: without them.
        checks: what :func:`gradsurgery.verify` has checked, and what not.
        notes: what else there is to know.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        operators: Sequence[Inserted],
        forward_identical: bool | None,
        losses: tuple[float, float],
        notes: Sequence[str] = (),
        checks: Sequence[Check] = (),
    ) -> None:
        self.rows = list(rows)
        self.operators = list(operators)
        self.forward_identical = forward_identical
        self.loss, self.plain_loss = losses
        self.notes = list(notes)
        self.checks = list(checks)

    @property
    def blocked(self) -> list[str]:
        """The names of the parameters that can no longer train: no gradient, or zero, where there would be some."""
        return [row.parameter for row in self.rows if row.effect == "blocked"]

    def __getitem__(self, parameter: str) -> Row:
        """The row of a parameter."""
        for row in self.rows:
            if row.parameter == parameter:
                return row
        raise KeyError(parameter)

    def __str__(self) -> str:
        head = ("parameters of", "count", "effect", "factor", "cosine", "norm off", "norm on")
        parts = [_table(head, [group.cells() for group in grouped(self.rows)])]
        if self.checks:
            parts.append(_table(("operator", "at", "promise", "result", "note"), _together(self.checks)))
        forward = {True: "bit-identical", False: "not the same", None: "not compared"}[self.forward_identical]
        said = [f"forward: {forward}; loss {self.plain_loss:.6g} without the operators, {self.loss:.6g} with them"]
        if self.blocked:
            more = f" and {len(self.blocked) - 5} more" if len(self.blocked) > 5 else ""
            said.append(f"can no longer train: {', '.join(self.blocked[:5])}{more}")
        return "\n".join([*parts, *said, *self.notes])

    __repr__ = __str__

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``, one for each parameter.

        Raises:
            SurgeryError: where pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise SurgeryError(
                "to_pandas() was asked for a DataFrame, and pandas is not installed. "
                'Install it with python -m pip install "gradsurgery[pandas]", or use .rows.'
            ) from error
        names = [field.name for field in fields(Row)]
        return pd.DataFrame([{name: getattr(row, name) for name in names} for row in self.rows], columns=names)

    def plot(self, path: str | Path | None = None) -> Any:
        """One picture of the layers, from input to output: which climb, which are blocked, which are untouched.

        Args:
            path: where to save it; the ending is the format.

        Returns:
            The ``matplotlib`` figure.

        Raises:
            SurgeryError: where matplotlib is not installed.
        """
        from .draw import draw

        return draw(self, path)


def _together(checks: Sequence[Check]) -> list[tuple[str, ...]]:
    """Lines for the table, one for all places of which the same is to be said."""
    said: dict[tuple[str, ...], list[Check]] = {}
    for check in checks:
        said.setdefault((check.operator, check.promise, check.result), []).append(check)
    lines = []
    for (operator, *rest), alike in said.items():
        where = ", ".join(check.address or "(output)" for check in alike[:2])
        more = f" and {len(alike) - 2} more" if len(alike) > 2 else ""
        notes = {check.note for check in alike}
        lines.append((operator, where + more, *rest, notes.pop() if len(notes) == 1 else ""))
    return lines


def grouped(rows: Sequence[Row], most: float = math.inf, least: int = 0) -> list[Group]:
    """Rows by the largest modules all of whose parameters share one effect and one factor.

    Args:
        rows: in order.
        most: the number of groups that no further level of modules may exceed.
        least: the number of groups below which every module is taken apart.
    """
    groups = _split(Group("", tuple(rows)))
    while True:
        few = len(groups) < least
        apart = [_split(group) if _differs(group) or (few and _is_deep(group)) else [group] for group in groups]
        finer = [group for parts in apart for group in parts]
        if finer == groups or len(finer) > most:
            return groups
        groups = finer


def _differs(group: Group) -> bool:
    return len({(row.effect, row.factor) for row in group.rows if row.effect != "zero"}) > 1


def _is_deep(group: Group) -> bool:
    """Whether there are modules in it, and not parameters alone."""
    return any(row.parameter.removeprefix(f"{group.name}.").count(".") for row in group.rows)


def _split(group: Group) -> list[Group]:
    """A group by the next name on the path of each of its rows."""
    depth = len(group.name.split(".")) if group.name else 0
    parts: dict[str, list[Row]] = {}
    for row in group.rows:
        parts.setdefault(".".join(row.parameter.split(".")[: depth + 1]), []).append(row)
    return [Group(name, tuple(rows)) for name, rows in parts.items()]


def _norm(norms: Sequence[float | None]) -> float | None:
    there = [norm for norm in norms if norm is not None]
    return math.sqrt(sum(norm * norm for norm in there)) if there else None


_STYLES: dict[Effect, str] = {"reversed": "red", "blocked": "bold", "mixed": "magenta", "scaled": "cyan"}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a head: a table of rich where that is installed, columns of text where not."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return columns(head, rows)
    kept = [k for k in range(len(head)) if any(row[k] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for k in kept:
        table.add_column(head[k], justify="right" if head[k] in ("count", "factor", "cosine") else "left")
    for row in rows:
        style = next((style for effect, style in _STYLES.items() if any(c.split(" ")[0] == effect for c in row)), "")
        table.add_row(*(Text(row[k]) for k in kept), style=style)
    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((120, 24)).columns if on_terminal else 160
    console = Console(file=io.StringIO(), width=width, force_terminal=on_terminal, legacy_windows=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())
