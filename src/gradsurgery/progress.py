"""A bar for what takes more than two seconds, where rich is installed and somebody watches."""

import time
from types import TracebackType
from typing import Any

__all__ = ["Progress"]

PATIENCE = 2.0


class Progress:
    """Context manager that counts steps, and shows a bar on the terminal once they have taken two seconds.

    Args:
        what: is being done.
        total: the number of steps that is expected.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._start = time.monotonic()
        self._bar: Any = None
        self._tried = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if not self._tried and self.done < self.total and time.monotonic() - self._start > PATIENCE:
            self._tried = True
            self._bar = _bar(self.what, self.total)
        if self._bar is not None:
            self._bar.update(0, completed=self.done, total=max(self.total, self.done))


def _bar(what: str, total: int) -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    bar = Bar(console=console, transient=True)
    bar.add_task(what, total=total)
    bar.start()
    return bar
