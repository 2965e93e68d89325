"""What the examples show: a progress bar, a table, a picture."""

import statistics
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

T = TypeVar("T")

# Of Okabe and Ito, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """The items, with a bar on stderr."""
    return track(items, what, total=total, console=Console(stderr=True))


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, wide enough for its text where it goes to a file."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    shown = Table(*head, title=title, title_justify="left")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation over the seeds, as a paper's table has them; one seed has no spread."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Any]]:
    """An empty picture with that many axes side by side."""
    shown = Figure(figsize=(width, height), layout="constrained")
    return shown, list(shown.subplots(1, columns, squeeze=False)[0])


def save(shown: Figure, path: Path) -> None:
    """Write the picture in 128 colours, which keeps it small, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = BytesIO()
    shown.savefig(whole, dpi=110)
    Image.open(whole).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"picture: {path}")
