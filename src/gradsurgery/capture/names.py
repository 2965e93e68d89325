"""What the names of one function stand for, as far as its source tells."""

import ast
import builtins
import types
from typing import Any

import torch

from .source import Function

MISSING = object()

_NUMBERS = ("len", "int", "float", "bool", "str", "range", "isinstance", "hasattr", "type")
_NUMBER_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "itemsize", "__name__", "__class__")
# Methods that hand back no tensor, of tensors, lists and strings alike.
NUMBER_METHODS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "item", "tolist", "stride", "storage_offset"),
        *("element_size", "get_device", "data_ptr", "numpy", "equal", "allclose"),
        *(name for name in dir(torch.Tensor) if name.startswith("is_")),
        *("append", "extend", "insert", "keys", "format", "join", "startswith", "endswith"),
    )
)
# Of tensors alone: a string has a ``split`` too.
TENSOR_METHODS = (
    frozenset(dir(torch.Tensor)) - NUMBER_METHODS - frozenset(dir(list)) - frozenset(dir(dict)) - frozenset(dir(str))
)
_VIEWS = ("values", "children", "modules", "named_children", "named_modules", "items", "keys")


class Names:
    """The names that a function binds anywhere in its body, and those that it takes from outside."""

    def __init__(self, function: Function, tree: ast.FunctionDef, self_name: str | None) -> None:
        self.function, self.self_name = function, self_name
        self.bound: dict[str, list[tuple[ast.expr | None, str]]] = {}
        self.functions: set[str] = set()  # nested ones, and names given to lambdas
        self.parameters = 0
        _Bindings(self).visit(tree)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = dict(cells)

    def rebinds_self(self) -> bool:
        return self.self_name is not None and len(self.bound.get(self.self_name, ())) > 1

    def outside(self, node: ast.expr) -> Any:
        """The object that an expression names outside the function, or MISSING."""
        if isinstance(node, ast.Name):
            if node.id in self.bound:
                return MISSING
            if node.id in self.cells:
                try:
                    return self.cells[node.id].cell_contents
                except ValueError:
                    return MISSING
            return self.function.__globals__.get(node.id, getattr(builtins, node.id, MISSING))
        if isinstance(node, ast.Attribute):
            holder = self.outside(node.value)
            if isinstance(holder, types.ModuleType | type):
                return getattr(holder, node.attr, MISSING)
        return MISSING

    def is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.self_name

    def is_number(self, node: ast.expr, _open: frozenset[str] = frozenset()) -> bool:
        """Whether a value is surely no tensor and holds none."""
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.Compare):
            # A comparison may well be a tensor, but one that never carries a gradient.
            return True
        if isinstance(node, ast.Attribute):
            return node.attr in _NUMBER_ATTRIBUTES
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                if node.func.attr in NUMBER_METHODS or self.is_number(node.func.value, _open):
                    return True
                return getattr(self.outside(node.func), "__module__", None) == "math"
            return isinstance(node.func, ast.Name) and node.func.id in _NUMBERS and node.func.id not in self.bound
        if isinstance(node, ast.BinOp):
            return self.is_number(node.left, _open) and self.is_number(node.right, _open)
        if isinstance(node, ast.UnaryOp):
            return self.is_number(node.operand, _open)
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.is_number(node.value, _open)
        if isinstance(node, ast.Tuple | ast.List):
            return all(self.is_number(element, _open) for element in node.elts)
        if isinstance(node, ast.IfExp):
            return self.is_number(node.body, _open) and self.is_number(node.orelse, _open)
        if isinstance(node, ast.BoolOp):
            return all(self.is_number(value, _open) for value in node.values)
        if isinstance(node, ast.Name) and node.id in self.bound:
            # A name in the middle of its own definition (``i = i + 1``) is what its other definitions make of it.
            values = [value for value, _ in self.bound[node.id]]
            return node.id in _open or (
                bool(values) and all(value is not None and self.is_number(value, _open | {node.id}) for value in values)
            )
        return False

    def is_tensor(self, node: ast.expr, _open: frozenset[str] = frozenset()) -> bool:
        """Whether a value is surely a tensor, or holds tensors, going by annotations and by torch's own functions."""
        if isinstance(node, ast.BinOp):
            return self.is_tensor(node.left, _open) or self.is_tensor(node.right, _open)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub) and self.is_tensor(node.operand, _open)
        if isinstance(node, ast.Subscript):
            return self.is_tensor(node.value, _open)
        if isinstance(node, ast.Call):
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if method in TENSOR_METHODS and self.is_tensor(node.func.value, _open):  # type: ignore[attr-defined]
                return True
            found = self.outside(node.func)
            module = getattr(found, "__module__", None) or ""
            return module in ("torch", "torch.nn.functional") and getattr(found, "__name__", "") in TENSOR_METHODS
        if isinstance(node, ast.Name) and node.id in self.bound:
            bound = self.bound[node.id]
            inner = _open | {node.id}
            return node.id in _open or (
                bool(bound)
                and all(
                    how == "tensor" or (value is not None and how == "value" and self.is_tensor(value, inner))
                    for value, how in bound
                )
            )
        return False

    def origin(self, node: ast.expr, _open: frozenset[str] = frozenset()) -> str | None:
        """The attribute of the module that a value is reached through, "" for any of them, None for none."""
        if self.is_self(node):
            return ""
        if isinstance(node, ast.Attribute):
            origin = self.origin(node.value, _open)
            return node.attr if origin == "" and self.is_self(node.value) else origin
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.origin(node.value, _open)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                return self.origin(node.func.value, _open) if node.func.attr in _VIEWS else None
            if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "enumerate", "zip", "reversed", "list"):
                return _common([self.origin(argument, _open) for argument in node.args])
            return None
        if isinstance(node, ast.IfExp):
            return _common([self.origin(node.body, _open), self.origin(node.orelse, _open)])
        if isinstance(node, ast.Name) and node.id in self.bound and node.id not in _open:
            values = [value for value, _ in self.bound[node.id]]
            return _common([self.origin(v, _open | {node.id}) if v is not None else None for v in values])
        return None


def _common(origins: list[str | None]) -> str | None:
    found = {origin for origin in origins if origin is not None}
    return None if not found else found.pop() if len(found) == 1 and None not in origins else ""


class _Bindings(ast.NodeVisitor):
    """Collects what each name is bound to.

    An expression and "value", or "item" for a part of it; nothing and "tensor" for a parameter annotated so; nothing
    and "" for what is not known.
    """

    def __init__(self, names: Names) -> None:
        self.names = names

    def bind(self, target: ast.AST, value: ast.expr | None, how: str) -> None:
        if isinstance(target, ast.Name):
            self.names.bound.setdefault(target.id, []).append((value, how))
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value, how)
        elif isinstance(target, ast.Tuple | ast.List):
            for k, element in enumerate(target.elts):
                self.bind(element, *self.part(value, how, k, len(target.elts)))

    def part(self, value: ast.expr | None, how: str, k: int, of: int) -> tuple[ast.expr | None, str]:
        """Which part of an unpacked value one target receives."""
        if isinstance(value, ast.Tuple | ast.List) and how == "value" and len(value.elts) == of:
            return value.elts[k], "value"
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and how == "item":
            if value.func.id == "enumerate" and value.args:
                return (ast.Constant(0), "value") if k == 0 else (value.args[0], "item")
            if value.func.id == "zip" and len(value.args) == of:
                return value.args[k], "item"
        return value, "item"

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.bind(target, node.value, "value")
            if isinstance(node.value, ast.Lambda) and isinstance(target, ast.Name):
                self.names.functions.add(target.id)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.bind(node.target, node.value, "value")
        self.generic_visit(node)

    visit_AugAssign = visit_AnnAssign  # type: ignore[assignment]

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bind(node.target, node.value, "value")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter, "item")
        self.generic_visit(node)

    visit_comprehension = visit_For  # type: ignore[assignment]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if self.names.parameters:
            self.names.functions.add(node.name)
            self.names.bound.setdefault(node.name, []).append((None, ""))
        self.names.parameters += 1
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        written = ast.unparse(node.annotation).strip("'\"") if node.annotation else ""
        how = "tensor" if written in ("Tensor", "torch.Tensor") else ""
        self.names.bound.setdefault(node.arg, []).append((None, how))

    def visit_Name(self, node: ast.Name) -> None:
        # Whatever else binds a name (with, except, del, match) leaves it unknown.
        if not isinstance(node.ctx, ast.Load):
            self.names.bound.setdefault(node.id, [])

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self.bind(node.optional_vars, None, "")
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.names.bound.setdefault(node.name, []).append((None, ""))
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.names.bound.setdefault(node.name, []).append((None, ""))
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs

    def visit_alias(self, node: ast.alias) -> None:
        self.names.bound.setdefault((node.asname or node.name).partition(".")[0], []).append((None, ""))
