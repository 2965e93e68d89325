"""Lists that print as a table, and the two kinds of rows that this package hands out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from .place import Place
from .recorded.place import RecordedPlace
from .scripted.place import CompiledPlace
from .tap import Tap, TapPlace

__all__ = ["Operation", "Site", "Table", "columns"]

Row = TypeVar("Row", bound="Site | Operation")


class Operation:
    """One operator at one place of a model, live: what is set on ``operator`` counts from the next forward on.

    Attributes:
        address: where, as :func:`gradsurgery.remove` takes it.
        side: ``"output"`` or ``"input"`` of the module, ``"op"``, ``"edge"``, or ``"head"`` where a value leaves for
            one.
        head: the name of that head, or None.
        operator: the module that does it.
        runs: eager forwards through it since it was inserted; compiled code does not count. None in TorchScript, and
            where it was recorded with its model.
        lost: the class of an operator that another tool has dropped, with the module that it was on, or None. Then
            ``operator`` is None; insert again, or :func:`gradsurgery.remove` the row.
    """

    titles: ClassVar = ("address", "side", "operator", "runs")
    # operation.lambd = 1 would do nothing in silence
    __slots__ = ("_module", "_place", "address", "head", "lost", "side")

    def __init__(
        self,
        address: str,
        module: nn.Module | None,
        place: Place | CompiledPlace | RecordedPlace,
        lost: str | None = None,
    ) -> None:
        self.address = address
        self.lost = lost
        self.side = "head" if isinstance(place, TapPlace) else place.where.kind
        self.head = place.tap.name if isinstance(place, TapPlace) else None
        self._module = module
        self._place = place

    @property
    def operator(self) -> Any:
        """The live operator, or None where it is lost."""
        return None if self._module is None else self._place.operator(self._module)

    @property
    def runs(self) -> int | None:
        """Eager forwards since the insertion; None where nobody counts."""
        return self._place.runs

    def cells(self) -> tuple[str, ...]:
        """What the table shows."""
        if self.lost is not None:
            return repr(self.address), self.side, f"lost: the {self.lost} went with the module it was on", ""
        runs = "not counted" if self.runs is None else str(self.runs) if self.runs else "0 (no eager run yet)"
        operator = one_line(self.operator)
        if self.head is not None:
            operator = f"{operator} -> {self.head!r}" if not isinstance(self.operator, Tap) else f"-> {self.head!r}"
        return repr(self.address), self.side, operator, runs

    def __repr__(self) -> str:
        return f"Operation({', '.join(f'{n}={c}' for n, c in zip(self.titles, self.cells(), strict=True))})"


@dataclass(frozen=True)
class Site:
    """One address that can be operated on.

    Attributes:
        address: the string to use.
        kind: ``"module"`` or ``"op"``.
        op: the class of the module, or the name of the op.
        shape: of the value, where an example was given; the first tensor of a nested value.
        dtype: likewise.
        source: the file and line where the forward, or the op, is written.
    """

    address: str
    kind: str
    op: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    source: str = ""

    titles: ClassVar = ("address", "kind", "op", "shape", "dtype", "source")

    def cells(self) -> tuple[str, ...]:
        """What the table shows."""
        shape = "" if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        source = self.source.replace("\\", "/").rpartition("/")[2]
        return repr(self.address), self.kind, self.op, shape, dtype, source

    def __str__(self) -> str:
        return "  ".join(cell for cell in self.cells() if cell)


class Table(list[Row], Generic[Row]):
    """A list whose text is a table with one row an item."""

    def __init__(self, kind: type[Row], rows: Iterable[Row] = ()) -> None:
        super().__init__(rows)
        self._head: tuple[str, ...] = kind.titles

    def __repr__(self) -> str:
        return columns(self._head, [row.cells() for row in self])

    __str__ = __repr__


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under a head, each column as wide as it needs; columns that say nothing are left out."""
    kept = [k for k in range(len(head)) if not rows or any(row[k] for row in rows)]
    lines = [[line[k] for k in kept] for line in (head, *rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(kept))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def one_line(module: Any) -> str:
    """A module's text on one line."""
    return " ".join(repr(module).split())
