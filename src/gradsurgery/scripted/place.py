"""An operator at a place of a ScriptModule: the layer that its graph calls, and what Python knows of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Dict, List, Optional  # noqa: UP035 - the forms that TorchScript reads

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from .._torchscript import compiled_value, set_compiled_value
from ..address import Where, parse
from ..errors import OperatorError
from ..operators import StopGradient
from ..operators.live import LiveReversal, LiveScale

__all__ = [
    "CompiledPlace",
    "ScriptPlace",
    "is_place",
    "place_at",
    "places_in",
    "walk_compiled",
]


class ScriptPlace(nn.Module):
    """What a compiled method calls at a place. One method for each type that TorchScript tells apart.

    Attributes:
        placed: false in the instances that only share the type of the one that was operated on.
        active: false while switched off.
        side: ``"output"`` or ``"input"``.
        element: the element of the value, as it is written in an address.
        hops: as in :class:`gradsurgery.place.Target`.
    """

    placed: bool
    active: bool
    side: str
    element: str
    hops: int

    def __init__(self, operator: nn.Module, where: Where, hops: int, placed: bool) -> None:
        super().__init__()
        self.operator = operator
        self.placed = placed
        self.active = True
        self.side = where.kind
        self.element = Where("output", where.element).text("")
        self.hops = hops

    def forward(self, x: Tensor) -> Tensor:
        """The value of a place that is one tensor."""
        if not (self.placed and self.active):
            return x
        if not (x.is_floating_point() or x.is_complex()):
            raise OperatorError("the value holds no floating-point or complex tensor and so has no gradient.")
        return self.operator(x)

    @torch.jit.export
    def each(self, x: Tensor) -> Tensor:
        """One of several tensors, of which those without a gradient pass."""
        if not (self.placed and self.active) or not (x.is_floating_point() or x.is_complex()):
            return x
        return self.operator(x)

    @torch.jit.export
    def optional(self, x: Optional[Tensor]) -> Optional[Tensor]:  # noqa: UP045
        """A tensor or None."""
        return None if x is None else self.each(x)

    @torch.jit.export
    def list(self, x: List[Tensor]) -> List[Tensor]:  # noqa: UP006
        """The tensors of a list."""
        if not (self.placed and self.active):
            return x
        return [self.each(one) for one in x]

    @torch.jit.export
    def dict(self, x: Dict[str, Tensor]) -> Dict[str, Tensor]:  # noqa: UP006
        """The tensors of a dict."""
        if not (self.placed and self.active):
            return x
        return {key: self.each(one) for key, one in x.items()}


@dataclass(frozen=True)
class CompiledPlace:
    """One operator at one place, with what :class:`gradsurgery.tables.Operation` asks of a place.

    ``path`` is that of the module which is operated on, in its ScriptModule, and ``name`` its child that does it.
    """

    path: str
    name: str
    held: ScriptModule

    @property
    def where(self) -> Where:
        """The place inside the module."""
        side = compiled_value(self.held, "side")
        return parse(compiled_value(self.held, "element"), side).where

    @property
    def hops(self) -> int:
        """How many ``nn.Sequential`` lie between the module that was named and this one."""
        return int(compiled_value(self.held, "hops"))

    @property
    def runs(self) -> None:
        """TorchScript does not count."""
        return

    def operator(self, module: nn.Module) -> nn.Module:
        """The operator, live: a strength that is set on it counts from the next forward on."""
        operator = place_at(self.held, "operator")
        # The same object each time: places and operators are told apart by identity.
        return _kept(operator, "_gs_live", lambda: _live(operator))


def is_place(child: object) -> bool:
    """Whether a child of a ScriptModule is an operator that was inserted."""
    return isinstance(child, ScriptModule) and child.original_name == ScriptPlace.__name__


def place_at(module: ScriptModule, name: str) -> ScriptModule:
    """The operator that is a child of a module."""
    return module._modules[name]  # type: ignore[return-value]


def children_of(module: ScriptModule) -> list[tuple[str, ScriptModule]]:
    """The children of a ScriptModule without its operators."""
    return [(name, child) for name, child in module._modules.items() if child is not None and not is_place(child)]  # type: ignore[misc]


def walk_compiled(root: ScriptModule, path: str = "") -> Iterator[tuple[str, ScriptModule]]:
    """Every module by its path, operators left out."""
    yield path, root
    for name, child in children_of(root):
        yield from walk_compiled(child, f"{path}.{name}" if path else name)


def places_in(root: ScriptModule) -> Iterator[CompiledPlace]:
    """The operators of a ScriptModule, in the order of its modules."""
    for path, module in walk_compiled(root):
        for name, child in module._modules.items():
            if isinstance(child, ScriptModule) and is_place(child) and compiled_value(child, "placed"):
                # A part that was taken out of its parent has paths of its own.
                yield _kept(child, f"_gs_place {path}", lambda: CompiledPlace(path, name, child))  # noqa: B023


def _kept(module: ScriptModule, name: str, make: Callable[[], Any]) -> Any:
    """What the Python object of a module keeps under a name."""
    if name not in module.__dict__:
        module.__dict__[name] = make()
    return module.__dict__[name]


def _live(compiled: ScriptModule) -> nn.Module:
    name = {"GradientReversal": "lambd", "ScaleGradient": "scale"}.get(compiled.original_name, "")

    def read() -> float:
        return float(compiled_value(compiled, name))

    def write(value: float) -> None:
        set_compiled_value(compiled, name, value)

    if name == "lambd":
        return LiveReversal(read, write)
    if name == "scale":
        return LiveScale(read, write)
    return StopGradient() if compiled.original_name == "StopGradient" else compiled
