"""Expressions that change a tensor in place, and who reads the tensor afterwards."""

import ast
import copy
from collections.abc import Iterator

_INDEX = (ast.Name, ast.Constant, ast.Attribute, ast.Slice, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.Subscript)


def overwritten(node: ast.expr) -> Iterator[tuple[ast.Call, ast.expr]]:
    """The in-place calls of a chain such as ``x.mul_(2).add_(y)``, outermost first, each with what it changes."""
    while isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_inplace = name.endswith("_") and not name.endswith("__")
        flag = next((k.value for k in node.keywords if k.arg == "inplace"), None)
        if is_inplace and isinstance(node.func, ast.Attribute) and not _is_library(node.func.value):
            target = node.func.value
        elif node.args and (is_inplace or (isinstance(flag, ast.Constant) and flag.value is True)):
            target = node.args[0]
        else:
            return
        yield node, target
        node = target


def _is_library(node: ast.expr) -> bool:
    """``torch.relu_`` and ``F.relu_`` change their argument, not what they are taken from."""
    return ast.unparse(node) in ("torch", "F", "functional", "nn.functional", "torch.nn.functional")


def read_after(tree: ast.AST, node: ast.AST, name: str) -> bool:
    """Whether a function can read a name after one of its nodes has run."""
    inside = set(ast.walk(node))
    end = (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    around = [
        loop
        for loop in ast.walk(tree)
        if isinstance(loop, ast.For | ast.While) and any(inner is node for inner in ast.walk(loop))
    ]
    again = set()
    for loop in around:
        # The next round starts with another tensor where the name is that of the loop.
        if not (isinstance(loop, ast.For) and any(_is(n, name) for n in ast.walk(loop.target))):
            again |= set(ast.walk(loop))
    return any(
        _is(read, name)
        and isinstance(read.ctx, ast.Load)  # type: ignore[attr-defined]
        and read not in inside
        and (read in again or (read.lineno, read.col_offset) >= end)  # type: ignore[attr-defined]
        for read in ast.walk(tree)
    )


def is_read(tree: ast.AST, name: str) -> bool:
    """Whether a function reads a name anywhere, its inner functions included."""
    return any(_is(read, name) and isinstance(read.ctx, ast.Load | ast.Del) for read in ast.walk(tree))  # type: ignore[attr-defined]


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def same_again(target: ast.expr) -> ast.expr | None:
    """An expression that reads what was just written, or None where evaluating it again could do something else."""
    parts = [n for n in ast.walk(target) if isinstance(n, ast.expr | ast.slice)]
    if not all(isinstance(part, _INDEX) for part in parts):
        return None
    again = copy.deepcopy(target)
    again.ctx = ast.Load()  # type: ignore[attr-defined]
    for part in ast.walk(again):
        part.__dict__.pop("_gs_node", None)
    return again
