"""The edit of an expression that takes in the value of an edge, and the calls that edited code makes at run time."""

import ast
import operator
from typing import Any

from .inplace import same_again
from .unit import Unit

_FUNCTIONS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.MatMult: operator.matmul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Subscript: operator.getitem,
}


def gs(method: str) -> ast.expr:
    """A method of the plan that an edited function was compiled with."""
    return ast.Attribute(ast.Name("_gs", ast.Load()), method, ast.Load())


def call(method: str, *arguments: ast.expr) -> ast.Call:
    """A call of one."""
    return ast.Call(gs(method), list(arguments), [])


def counts() -> ast.expr:
    """The counters of the running forward."""
    return ast.Name("_gs_count", ast.Load())


def received(unit: Unit, node: Any, slots: list[int], provided: dict[str, Any]) -> ast.expr:
    """An expression that computes the same, with what it receives over an edge operated on.

    Of ``x += y`` it is the expression for ``y``. All operands are evaluated before the first of them is looked at:
    which call of a name this is can be told only when the calls inside its own operands are over.
    """
    known = [unit.module(), counts(), ast.Tuple([ast.Constant(slot) for slot in slots], ast.Load())]
    if isinstance(node, ast.AugAssign):
        return call("meet_augmented", *known, same_again(node.target) or ast.Constant(None), node.value)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            method = [node.func.value, ast.Constant(node.func.attr)]
            return ast.Call(gs("meet_method"), [*known, *method, *node.args], node.keywords)
        return ast.Call(gs("meet"), [*known, node.func, *node.args], node.keywords)
    kind: type[ast.AST] = ast.Subscript if isinstance(node, ast.Subscript) else type(node.op)
    if isinstance(node, ast.BinOp):
        operands = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        operands = [node.operand]
    else:
        provided["_gs_slice"] = slice
        operands = [node.value, _index(node.slice)]
    name = f"_gs_{kind.__name__}"
    provided[name] = _FUNCTIONS[kind]
    return call("meet", *known, ast.Name(name, ast.Load()), *operands)


def _index(node: ast.expr) -> ast.expr:
    """An index as an ordinary expression: ``1:2`` is ``slice(1, 2, None)``."""
    if isinstance(node, ast.Tuple):
        return ast.Tuple([_index(item) for item in node.elts], ast.Load())
    if not isinstance(node, ast.Slice):
        return node
    bounds = [bound or ast.Constant(None) for bound in (node.lower, node.upper, node.step)]
    return ast.Call(ast.Name("_gs_slice", ast.Load()), bounds, [])
