"""What torch says of an ``autograd.Function`` of the old kind, with the name of the class, which torch leaves out."""

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.autograd.function import Function

__all__ = ["cure_of"]


def cure_of(error: Exception, otherwise: str) -> str:
    """What to do about an error that a model raised: for a legacy Function its name and its replacement."""
    if "Legacy autograd function" not in str(error):
        return otherwise
    found = next(_legacy_on_the_way(error), None)
    there = (
        "an autograd.Function" if found is None else f"{found.__module__}.{found.__qualname__}, an autograd.Function"
    )
    return (
        f"It is {there} of the kind before static methods, which torch no longer runs. "
        "Replace it by what it was to do: gradsurgery.reverse_gradient, scale_gradient, stop_gradient or map_gradient."
    )


def _legacy_on_the_way(error: Exception) -> Iterator[type[Function]]:
    frames: list[FrameType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):  # the innermost is the one that called it
        for name in frame.f_code.co_names:
            holders = [frame.f_globals.get(name), *(_attribute(held, name) for held in frame.f_locals.values())]
            yield from (cls for held in holders if (cls := _legacy_class(held)) is not None)
        yield from (cls for held in frame.f_locals.values() if (cls := _legacy_class(held)) is not None)


def _attribute(held: Any, name: str) -> Any:
    # Not getattr: a property may run code, or read what is not there yet.
    parts = getattr(held, "__dict__", None)
    return parts.get(name) if isinstance(parts, dict) else None


def _legacy_class(held: Any) -> type[Function] | None:
    cls = held if isinstance(held, type) else type(held)
    if not issubclass(cls, Function) or isinstance(cls.__dict__.get("forward"), staticmethod | None):
        return None
    return cls
