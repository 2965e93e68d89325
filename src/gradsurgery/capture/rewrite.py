"""Stand-in until the opened capture lands."""

from typing import Any


class OpEdit:
    def __init__(self, name: str, index: int | None, method: str) -> None: ...


def rewrite(*args: Any) -> dict[str, Any]:
    raise NotImplementedError
