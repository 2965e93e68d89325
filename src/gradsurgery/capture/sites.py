"""Stand-in until the opened capture lands."""

from dataclasses import dataclass
from typing import Any

from ..errors import CaptureError


@dataclass(frozen=True)
class Op:
    name: str
    index: int
    source: str = ""
    text: str = ""
    shape: Any = None
    dtype: Any = None
    kind: str = "op"


def list_ops(module: Any) -> list[Op]:
    raise CaptureError("ops cannot be listed yet")
