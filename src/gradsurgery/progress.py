"""A bar for what takes more than two seconds, where rich is installed and somebody watches."""

import threading
from types import TracebackType
from typing import Any

__all__ = ["Progress"]

PATIENCE = 2.0


class Progress:
    """Context manager that counts steps, and shows a bar on the terminal once they have taken two seconds.

    Args:
        what: is being done.
        total: the number of steps that is expected; None where there is but one.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._bar: Any = None
        self._over = False
        self._lock = threading.Lock()
        # From a thread: the first step may take longest.
        self._timer = threading.Timer(PATIENCE, self._show)
        self._timer.daemon = True

    def __enter__(self) -> "Progress":
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._over = True

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(0, completed=self.done, total=self._most())

    def _most(self) -> int | None:
        return None if self.total is None else max(self.total, self.done)

    def _show(self) -> None:
        with self._lock:
            if not self._over:
                self._bar = _bar(self.what, self._most(), self.done)


def _bar(what: str, total: int | None, done: int) -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    bar = Bar(console=console, transient=True)
    bar.add_task(what, total=total, completed=done)
    bar.start()
    return bar
