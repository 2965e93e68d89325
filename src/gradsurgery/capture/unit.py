"""One function of a forward, with what was found in it."""

import ast
from dataclasses import dataclass, field
from typing import Any

from .flow import Flow, Site
from .names import Names
from .source import Function, Parsed

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

    @property
    def where(self) -> str:
        return self.parsed.where(self.parsed.tree)

    @property
    def title(self) -> str:
        """The function and where it stands, for messages."""
        return f"{self.parsed.function.__qualname__} ({self.where})"

    def module(self) -> ast.expr:
        """An expression for the module, inside the function."""
        if self.is_helper:
            return ast.Name(HELPER_SELF, ast.Load())
        if self.names.self_name is not None:
            return ast.Name(self.names.self_name, ast.Load())
        vararg = self.parsed.tree.args.vararg
        assert vararg is not None  # no unit is made of a method that takes nothing
        return ast.Subscript(ast.Name(vararg.arg, ast.Load()), ast.Constant(0), ast.Load())


@dataclass(frozen=True)
class Reach:
    """A place where one function of a forward names another."""

    unit: Unit
    drops_self: bool = False  # the call passes the module itself: ``Base.forward(self, x)``
