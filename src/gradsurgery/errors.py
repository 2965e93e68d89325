"""The errors of the package: one base, one subclass per room, each also the builtin that a caller would expect.

Every message has three parts: what was asked, what is there, and what to do.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "AddressError",
    "CaptureError",
    "OperatorError",
    "SurgeryError",
    "VerificationError",
    "closest",
    "first_line",
]


class SurgeryError(Exception):
    """Base of every error raised by this package: ``except gs.SurgeryError`` catches them all."""


class AddressError(SurgeryError, LookupError):
    """An address names no place, or not the number of places that was expected."""


class CaptureError(SurgeryError, RuntimeError):
    """The forward that owns a place cannot be opened there, or no longer runs through it."""


class OperatorError(SurgeryError, ValueError):
    """An operator was given a coefficient, a function or a value that it cannot work with."""


class VerificationError(SurgeryError, AssertionError):
    """A promise about a forward or a gradient was measured and does not hold."""


def closest(asked: str, there: Iterable[str], most: int = 5) -> str:
    """The names nearest to ``asked``, as the middle sentence of a message."""
    names = list(dict.fromkeys(there))
    near = difflib.get_close_matches(asked, names, n=most, cutoff=0.4)
    if near:
        return "closest: " + ", ".join(repr(name) for name in near)
    shown = ", ".join(repr(name) for name in names[:most])
    return f"there: {shown}{', ...' if len(names) > most else ''}" if names else "there is none at all"


def first_line(error: Exception) -> str:
    """The first line of what another library says, to stand in a message of ours; the type where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
