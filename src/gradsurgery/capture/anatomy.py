"""The functions that make up one forward, and where they call each other.

A forward is the method of that name, every method that it calls on ``self`` or ``super()``, and every plain Python
helper outside of torch. An op in any of them belongs to the module, as it does for torch.fx.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..errors import CaptureError
from .names import Names
from .scan import Scanner
from .source import Function, parse, passes_on, unwrap
from .unit import Unit

# Their functions are ops to whoever reads a forward, not parts of it.
_CLOSED = frozenset({"torch", "numpy", "einops", "triton", "typing_extensions"}) | sys.stdlib_module_names


class Anatomy:
    """The functions of the forward of one class, the root first.

    Raises:
        CaptureError: where the source of the forward itself is out of reach.
    """

    def __init__(self, cls: type, forward: Callable[..., Any] | None = None) -> None:
        self.cls, self.forward = cls, forward
        self.units: dict[tuple[int, bool], Unit] = {}
        found = forward if forward is not None else inspect.getattr_static(cls, "forward", None)
        if found is None or found is nn.Module.forward:
            raise CaptureError(
                f"asked for an op inside the forward of {cls.__qualname__}; the class has no forward of its own. "
                "Operate on the children that do."
            )
        self.root = self._unit("forward", True, False, found)
        if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in _own_nodes(self.root.parsed.tree)):
            raise CaptureError(
                f"asked for an op inside the forward of {cls.__qualname__} ({self.root.where}); "
                "it is a generator, which runs after the call that made it. Operate on a child instead."
            )

    def method(self, name: str) -> Unit | None:
        """The unit of ``self.<name>``, or None where that is no function whose source can be had."""
        found = inspect.getattr_static(self.cls, name, None)
        if found is not None and found is inspect.getattr_static(nn.Module, name, None):
            return None
        if isinstance(found, staticmethod):
            return self.helper(found.__func__, of_class=True)
        return self._maybe(name, True, False, found) if isinstance(found, Function) else None

    def above(self, unit: Unit, name: str) -> Unit | None:
        """The unit of ``super().<name>`` in a function."""
        cell = unit.names.cells.get("__class__")
        mro = self.cls.__mro__
        if cell is None or cell.cell_contents not in mro:
            return None
        for base in mro[mro.index(cell.cell_contents) + 1 :]:
            if base is nn.Module:
                return None
            if name in base.__dict__:
                found = base.__dict__[name]
                return self.explicit(found) if isinstance(found, Function) else None
        return None

    def explicit(self, function: Any) -> Unit | None:
        """The unit of a function that is named as it is, and given the module as its first argument."""
        return self._maybe(getattr(function, "__name__", "function"), False, False, function)

    def helper(self, function: Any, of_class: bool = False) -> Unit | None:
        """The unit of a plain function, or None where it is an op to whoever calls it."""
        package = (getattr(function, "__module__", None) or "").partition(".")[0]
        if not isinstance(function, Function) or (package in _CLOSED and not of_class):
            return None
        return self._maybe(function.__name__, False, True, function)

    def is_current(self) -> bool:
        """Whether the class still holds the functions that were looked at."""
        return all(
            unit.function is inspect.getattr_static(self.cls, unit.key, None)
            for unit in self.units.values()
            if unit.public and not (unit is self.root and self.forward is not None)
        )

    def _maybe(self, name: str, public: bool, is_helper: bool, function: Any) -> Unit | None:
        try:
            return self._unit(name, public, is_helper, function)
        except CaptureError:
            return None

    def _unit(self, name: str, public: bool, is_helper: bool, function: Any) -> Unit:
        known = self.units.get((id(function), public))
        if known is not None:
            return known
        wrappers, inner = unwrap(function)
        parsed = parse(inner)
        self_name = None if is_helper else _self_name(parsed.tree)
        if not is_helper and self_name is None and parsed.tree.args.vararg is None:
            raise CaptureError(
                f"asked for an op inside {inner.__qualname__} ({parsed.where(parsed.tree)}); it takes no `self`. "
                "Operate at the module boundary instead: on its output."
            )
        names = Names(inner, parsed.tree, self_name)
        if self.units and (names.rebinds_self() or not all(passes_on(wrapper, is_helper) for wrapper in wrappers)):
            raise CaptureError(f"{inner.__qualname__} cannot be handed a counter: to whoever calls it, it is one op.")
        key = name if public else f"_gs_{name.strip('<>')}_{len(self.units)}"
        unit = Unit(key, public, is_helper, function, wrappers, parsed, names)
        self.units[id(function), public] = unit
        Scanner(self, unit).run()
        return unit


def anatomy(cls: type, forward: Callable[..., Any] | None = None) -> Anatomy:
    """The anatomy of a forward, as the class is now."""
    found = _anatomy(cls, forward)
    if not found.is_current():
        _anatomy.cache_clear()  # a method was replaced on the class since
        found = _anatomy(cls, forward)
    return found


_anatomy = functools.lru_cache(maxsize=1024)(Anatomy)


def _self_name(tree: ast.FunctionDef) -> str | None:
    parameters = [*tree.args.posonlyargs, *tree.args.args]
    return parameters[0].arg if parameters else None


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions inside it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef | ast.GeneratorExp):
            yield node
            yield from _own_nodes(node)
