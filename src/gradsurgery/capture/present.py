"""Conditions of a forward that hang on the module alone, decided as the module is now."""

import ast
import inspect
from typing import Any

import torch
from torch import nn

from .unit import Unit

_UNKNOWN = object()


class Present:
    """Decides conditions that hang on the module alone: its attributes as they are, and no optional argument given."""

    def __init__(self, module: nn.Module, root: Unit) -> None:
        self.module, self.root = module, root

    def __call__(self, unit: Unit, condition: ast.expr) -> bool | None:
        value = self.value(unit, condition)
        try:
            return None if value is _UNKNOWN or isinstance(value, torch.Tensor) else bool(value)
        except Exception:  # an object of the module's own that will not be a bool
            return None

    def value(self, unit: Unit, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute):
            holder = self.module if unit.names.is_self(node.value) else self.value(unit, node.value)
            # Not through a property, which runs code.
            return _attribute(holder, node.attr) if isinstance(holder, nn.Module) else _UNKNOWN
        if isinstance(node, ast.Name) and unit is self.root:
            return _default(unit, node.id)
        if isinstance(node, ast.Call):
            found = unit.names.outside(node.func)
            return False if found in (torch.jit.is_scripting, torch.jit.is_tracing) else _UNKNOWN
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            decided = self(unit, node.operand)
            return _UNKNOWN if decided is None else not decided
        if isinstance(node, ast.BoolOp):
            parts = [self(unit, value) for value in node.values]
            settling = isinstance(node.op, ast.Or)
            return settling if settling in parts else _UNKNOWN if None in parts else not settling
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _compare(self.value(unit, node.left), node.ops[0], self.value(unit, node.comparators[0]))
        return _UNKNOWN


def _attribute(holder: nn.Module, name: str) -> Any:
    for place in (holder.__dict__, holder._parameters, holder._buffers, holder._modules):
        if name in place:
            return place[name]
    found = inspect.getattr_static(type(holder), name, _UNKNOWN)
    return found if isinstance(found, bool | int | float | str | None) else _UNKNOWN


def _default(unit: Unit, name: str) -> Any:
    """The default of an optional parameter that the function never binds to anything else."""
    if len(unit.names.bound.get(name, ())) != 1:
        return _UNKNOWN
    parameter = inspect.signature(unit.parsed.function).parameters.get(name)
    return _UNKNOWN if parameter is None or parameter.default is parameter.empty else parameter.default


def _compare(left: Any, op: ast.cmpop, right: Any) -> Any:
    if left is _UNKNOWN or right is _UNKNOWN:
        return _UNKNOWN
    if isinstance(op, ast.Is | ast.IsNot):
        return (left is right) == isinstance(op, ast.Is)
    plain = (bool, int, float, str)
    if isinstance(op, ast.Eq | ast.NotEq) and isinstance(left, plain) and isinstance(right, plain):
        return (left == right) == isinstance(op, ast.Eq)
    return _UNKNOWN
