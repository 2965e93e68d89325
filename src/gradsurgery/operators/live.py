"""Operators whose value lies elsewhere, in compiled code or in a graph, where it is read, and set at once."""

from collections.abc import Callable

from torch import Tensor, nn

from .factors import GradientReversal, ScaleGradient
from .kept import known
from .modules import MapGradient

__all__ = ["LIVE_KINDS", "LiveMap", "LiveReversal", "LiveScale", "RecordedTransform"]

Read = Callable[[], float]
Write = Callable[[float], None]


class LiveReversal(GradientReversal):
    """A reversal whose strength is somewhere else."""

    def __init__(self, read: Read, write: Write) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(read=read, write=write)

    # The checks of GradientReversal come first: they are in its __setattr__.
    lambd: float = property(lambda self: self.read(), lambda self, value: self.write(value))  # type: ignore[assignment]

    def _get_name(self) -> str:
        return "GradientReversal"


class LiveScale(ScaleGradient):
    """A scale whose factor is somewhere else."""

    def __init__(self, read: Read, write: Write) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(read=read, write=write)

    scale: float = property(lambda self: self.read(), lambda self, value: self.write(value))  # type: ignore[assignment]

    def _get_name(self) -> str:
        return "ScaleGradient"


class LiveMap(MapGradient):
    """A mapped gradient in a recorded graph, which holds the name of the function."""

    name: str

    def __init__(self, name: str) -> None:
        nn.Module.__init__(self)
        self.__dict__["name"] = name

    @property
    def fn(self) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        """The function, where this process knows it."""
        return known(self.name)

    def __repr__(self) -> str:
        return f"MapGradient(fn={self.name})"


class RecordedTransform(nn.Module):
    """A transform in a recorded graph: the ops of its function are there, and the function itself is not.

    Args:
        kind: the class of the operator.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.kind = kind

    def __repr__(self) -> str:
        return f"{self.kind.__name__}(fn=as recorded)"


LIVE_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    LiveReversal: GradientReversal,
    LiveScale: ScaleGradient,
    LiveMap: MapGradient,
}
"""The operator that a live one is."""
