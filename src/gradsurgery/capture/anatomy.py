"""The functions that make up one forward, and where they call each other.

A forward is the method of that name, every method that it calls on ``self`` or ``super()``, and every plain Python helper
outside of torch. An op in any of them belongs to the module, as it does for torch.fx.
"""

import ast
import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..errors import CaptureError
from .flow import Flow, Site
from .names import Names
from .source import Function, Parsed, parse, unwrap

# Their functions are ops to whoever reads a forward, not parts of it.
_CLOSED = frozenset({"torch", "numpy", "einops", "triton", "typing_extensions"}) | sys.stdlib_module_names

HELPER_SELF = "_gs_self"
"""The parameter through which the copy of a helper, which has no ``self``, receives the module."""


@dataclass(eq=False)
class Unit:
    """One function of a forward."""

    key: str  # the attribute of the generated class that its edited copy lives under
    public: bool  # found under that very name: also called from outside
    is_helper: bool
    function: Any  # with its wrappers, as the class or the caller holds it
    wrappers: list[Function]
    parsed: Parsed
    names: Names
    flow: Flow = field(default_factory=list)
    sites: dict[int, Site] = field(default_factory=dict)
    reaches: "dict[int, Reach]" = field(default_factory=dict)

    def module(self) -> ast.expr:
        """An expression for the module, inside the function."""
        if self.is_helper:
            return ast.Name(HELPER_SELF, ast.Load())
        if self.names.self_name is not None:
            return ast.Name(self.names.self_name, ast.Load())
        vararg = self.parsed.tree.args.vararg
        assert vararg is not None  # see _takes_self()
        return ast.Subscript(ast.Name(vararg.arg, ast.Load()), ast.Constant(0), ast.Load())


@dataclass(frozen=True)
class Reach:
    """A place where one function of a forward names another."""

    unit: Unit
    drops_self: bool = False  # the call passes the module itself: ``Base.forward(self, x)``


class Anatomy:
    """The functions of the forward of one class, the root first.

    Raises:
        CaptureError: where the source of the forward itself is out of reach.
    """

    def __init__(self, cls: type, forward: Callable[..., Any] | None = None) -> None:
        from .scan import Scanner

        self.cls = cls
        self.units: dict[tuple[int, bool], Unit] = {}
        self._scanner = Scanner
        found = forward if forward is not None else inspect.getattr_static(cls, "forward", None)
        if found is None or found is nn.Module.forward:
            raise CaptureError(
                f"asked for an op inside the forward of {cls.__qualname__}; the class has no forward of its own. "
                "Operate on the children that do."
            )
        self.root = self._unit("forward", True, False, found)
        if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in _own_nodes(self.root.parsed.tree)):
            raise CaptureError(
                f"asked for an op inside the forward of {cls.__qualname__} ({self.root.parsed.where(ast.Pass())}); "
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

    def owner_of(self, name: str) -> Any:
        return inspect.getattr_static(self.cls, name, None)

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
                "Operate on the output of the module instead."
            )
        key = name if public else f"_gs_{name.strip('<>')}_{len(self.units)}"
        unit = Unit(key, public, is_helper, function, wrappers, parsed, Names(inner, parsed.tree, self_name))
        self.units[id(function), public] = unit
        self._scanner(self, unit).run()
        return unit


@functools.lru_cache(maxsize=1024)
def anatomy(cls: type, forward: Callable[..., Any] | None = None) -> Anatomy:
    return Anatomy(cls, forward)


def _self_name(tree: ast.FunctionDef) -> str | None:
    parameters = [*tree.args.posonlyargs, *tree.args.args]
    return parameters[0].arg if parameters else None


def _own_nodes(tree: ast.AST) -> Any:
    """The nodes of a function without those of the functions inside it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef | ast.GeneratorExp):
            yield node
            yield from _own_nodes(node)


def is_plain_object(value: Any) -> bool:
    return isinstance(value, types.ModuleType | type)
