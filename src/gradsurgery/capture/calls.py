"""What a call in a forward calls: another function of the forward, a child, or an op, and by which name."""

import ast
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import nn

from .names import MISSING, NUMBER_METHODS, TENSOR_METHODS
from .source import Function
from .unit import Reach, Unit

if TYPE_CHECKING:
    from .anatomy import Anatomy

_BUILTIN_OPS = ("sum", "max", "min", "abs", "pow")
# Methods of tensors that are everyday names of children as well.
_CHILDISH = frozenset({"norm", "relu", "softmax", "sigmoid", "tanh", "flatten"})
_TENSOR = frozenset(dir(torch.Tensor))
_QUESTIONS = re.compile(r"is_|get_|_assert$|_unwrap|finfo$|iinfo$")  # functions of torch that return no tensor


class Naming(NamedTuple):
    """The fields of a :class:`.flow.Site` that a callee decides."""

    name: str | None
    kind: Literal["op", "child"] = "op"
    sure: bool = False
    prefix: str = ""
    tail: str | None = None


class Calls:
    """Resolves the callees of one function."""

    def __init__(self, anatomy: "Anatomy", unit: Unit) -> None:
        self.anatomy, self.unit, self.names = anatomy, unit, unit.names

    def reach(self, node: ast.expr, call: ast.Call | None = None) -> Reach | None:
        """The function of this forward that an expression names; ``call`` where it is called there and then."""
        if isinstance(node, ast.Attribute):
            if self.names.is_self(node.value):
                return _reach(self.anatomy.method(node.attr))
            if self.is_super(node.value):
                return _reach(self.anatomy.above(self.unit, node.attr))
        found = self.names.outside(node)
        if not isinstance(found, Function):
            return None
        if call is not None and self._passes_self(call):
            in_mro = any(found in vars(base).values() for base in self.anatomy.cls.__mro__ if base is not nn.Module)
            if in_mro or (isinstance(node, ast.Name) and node.id in self.names.cells):
                return _reach(self.anatomy.explicit(found), drops_self=True)
        return _reach(self.anatomy.helper(found))

    def is_checkpoint(self, node: ast.expr) -> bool:
        """Whether a callee runs the function it is handed once; running it again in the backward is no other call."""
        found = self.names.outside(node)
        package = (getattr(found, "__module__", None) or "").partition(".")[0]
        return getattr(found, "__name__", "") == "checkpoint" and package in ("torch", "timm")

    def is_super(self, node: ast.expr) -> bool:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"):
            return False
        return not node.args or (len(node.args) == 2 and self.names.is_self(node.args[1]))

    def name(self, func: ast.expr) -> Naming | None:
        """By which name the call of an expression goes, or None for what is no op and no child."""
        outside = self.names.outside(func)
        if outside is not MISSING and not isinstance(outside, nn.Module):
            return self._function(func, outside)
        path = self._child_path(func)
        if path is not None:
            return Naming(path, "child", sure=True)
        if isinstance(func, ast.Attribute):
            return self._method(func)
        if isinstance(func, ast.Name) and (
            func.id in self.names.functions or self.names.is_self(func) or func.id not in self.names.bound
        ):
            return None
        return Naming(None, "child", prefix=self.names.origin(func) or "")

    def _function(self, func: ast.expr, found: object) -> Naming | None:
        name = getattr(found, "__name__", None) or _last(func)
        module = getattr(found, "__module__", None) or ""
        if isinstance(found, type) or (module in ("math", "builtins") and name not in _BUILTIN_OPS):
            return None
        if (module.startswith("torch") and _QUESTIONS.match(name)) or module == "torch.jit":
            return None
        return Naming(_identifier(name if name != "<lambda>" else _last(func)), sure=module.startswith("torch"))

    def _method(self, func: ast.Attribute) -> Naming | None:
        if func.attr in NUMBER_METHODS or self.names.is_number(func.value) or self.is_super(func.value):
            return None
        if self.names.is_self(func.value):  # a method of nn.Module
            return None
        origin = self.names.origin(func.value)
        if origin is None or (func.attr in _TENSOR and func.attr not in _CHILDISH):
            return Naming(func.attr, sure=func.attr in TENSOR_METHODS)
        return Naming(None, "child", prefix=origin, tail=func.attr)

    def _child_path(self, node: ast.expr) -> str | None:
        """The path of a child that is written out: ``self.conv1``, ``self.downsample[0]``."""
        if isinstance(node, ast.Attribute) and self.names.is_self(node.value):
            return None if hasattr(nn.Module, node.attr) else node.attr
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            key, holder = node.slice.value, self._child_path(node.value)
            if holder is not None and (isinstance(key, str) or (isinstance(key, int) and key >= 0)):
                return f"{holder}.{key}"
        return None

    def _passes_self(self, call: ast.Call) -> bool:
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Starred):
            vararg = self.unit.parsed.tree.args.vararg
            is_vararg = isinstance(first.value, ast.Name) and vararg is not None and first.value.id == vararg.arg
            return is_vararg and self.names.self_name is None and not self.unit.is_helper
        return first is not None and self.names.is_self(first)


def _reach(unit: Unit | None, drops_self: bool = False) -> Reach | None:
    return Reach(unit, drops_self) if unit is not None else None


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "call")


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name).strip("_") if not name.isidentifier() else name
