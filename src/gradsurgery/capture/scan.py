"""One walk over a function in the order in which Python evaluates it: its sites, its calls, and the flow between."""

import ast
import re
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .flow import Attempt, Branch, Enter, Flow, Leave, Loop, Loose, Site
from .names import MISSING, NUMBER_METHODS, TENSOR_METHODS
from .source import Function

if TYPE_CHECKING:
    from .anatomy import Anatomy, Reach, Unit

_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.MatMult: "matmul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
}
_BUILTIN_OPS = ("sum", "max", "min", "abs", "pow")
_CONSUMERS = ("sum", "tuple", "list", "max", "min", "set", "dict", "sorted", "any", "all")
# Methods of tensors that are everyday names of children as well.
_CHILDISH = frozenset({"norm", "relu", "softmax", "sigmoid", "tanh", "flatten", "norm1", "norm2"})
_TENSOR = frozenset(dir(torch.Tensor))
_QUESTIONS = re.compile(r"is_|get_|_assert$|_unwrap|finfo$|iinfo$")  # functions of torch that return no tensor


class Scanner:
    """Fills in the flow, the sites and the reaches of one unit, and numbers the nodes that they stand on."""

    def __init__(self, anatomy: "Anatomy", unit: "Unit") -> None:
        self.anatomy, self.unit, self.names = anatomy, unit, unit.names
        self.flow: Flow = unit.flow

    def run(self) -> None:
        self.block(self.unit.parsed.tree.body)

    def block(self, body: list[Any]) -> None:
        for node in body:
            self.visit(node)

    def part(self, nodes: list[Any]) -> Flow:
        """The flow of some nodes, on its own."""
        outer, self.flow = self.flow, []
        self.block(nodes)
        inner, self.flow = self.flow, outer
        return inner

    def visit(self, node: ast.AST) -> None:
        getattr(self, f"visit_{type(node).__name__}", self.visit_children)(node)

    def visit_children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    # Statements

    def visit_Assign(self, node: ast.Assign) -> None:
        self.block([node.value, *node.targets])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.block([node.value, node.target] if node.value else [])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.visit_children(node.target)
        self.visit(node.value)
        name = _OPERATORS.get(type(node.op))
        bound = isinstance(node.target, ast.Name) and self.names.is_number(node.target)
        if name and not bound:
            sure = isinstance(node.target, ast.Name) and self.names.is_tensor(node.target)
            self.site(node, name, sure=sure or self.names.is_tensor(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.flow.append(Loop(self.part([node.target, *node.body])))
        self.flow.append(Branch((self.part(node.orelse), [])))

    def visit_While(self, node: ast.While) -> None:
        self.flow.append(Loop(self.part([node.test, *node.body])))
        self.flow.append(Branch((self.part(node.orelse), [])))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.flow.append(Branch((self.part(node.body), self.part(node.orelse))))

    def visit_Match(self, node: Any) -> None:
        self.visit(node.subject)
        cases = [self.part([*([case.guard] if case.guard else []), *case.body]) for case in node.cases]
        self.flow.append(Branch((*cases, [])))

    def visit_Try(self, node: ast.Try) -> None:
        handlers = tuple(self.part(handler.body) for handler in node.handlers)
        self.flow.append(Attempt(self.part(node.body), handlers, self.part(node.orelse)))
        self.block(node.finalbody)

    visit_TryStar = visit_Try

    def visit_Return(self, node: ast.Return) -> None:
        self.visit_children(node)
        self.flow.append(Leave(returns=True))

    def visit_Raise(self, node: ast.Raise) -> None:
        self.visit_children(node)
        self.flow.append(Leave(returns=False))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.block([*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)])
        self.flow.append(Loose(self.part(node.body)))
        self.number(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.block([*node.args.defaults, *(d for d in node.args.kw_defaults if d)])
        self.flow.append(Loose(self.part([node.body])))
        self.number(node)

    def visit_AsyncFunctionDef(self, node: ast.AST) -> None:
        """Neither coroutines nor classes inside a forward are looked into: what they hold is no part of it."""

    visit_ClassDef = visit_AsyncFunctionDef

    # Expressions

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        if len(node.values) > 1:
            rest = node.values[1] if len(node.values) == 2 else ast.BoolOp(node.op, node.values[1:])
            self.flow.append(Branch((self.part([rest]), [])))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.flow.append(Branch((self.part([node.body]), self.part([node.orelse]))))

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            self.block([*([key] if key else []), value])

    def comprehension(self, node: Any, lazy: bool = False) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        inner = [first.target, *first.ifs]
        for generator in others:
            inner += [generator.iter, generator.target, *generator.ifs]
        inner += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        body = self.part(inner)
        self.flow.append(Loose(body) if lazy else Loop(body))

    visit_ListComp = visit_SetComp = visit_DictComp = comprehension

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self.comprehension(node, lazy=True)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.visit_children(node)
        name = _OPERATORS.get(type(node.op))
        if name and not self.names.is_number(node):
            self.site(node, name, sure=self.names.is_tensor(node))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.visit_children(node)
        if isinstance(node.op, ast.USub) and not self.names.is_number(node):
            self.site(node, "neg", sure=self.names.is_tensor(node))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit_children(node)
        if isinstance(node.ctx, ast.Load) and not self.names.is_number(node):
            self.site(node, "getitem", sure=self.names.is_tensor(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (isinstance(node.ctx, ast.Load) and self.hand_over(node)):
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.hand_over(node)

    def hand_over(self, node: ast.expr, loose: bool = True) -> bool:
        """A function of the forward that is named without being called."""
        reach = self.reach(node, None)
        if reach is None:
            return False
        self.unit.reaches[self.number(node)] = reach
        self.flow.append(Enter(reach.unit, loose))
        return True

    def visit_Call(self, node: ast.Call) -> None:
        reach = self.reach(node.func, node)
        if reach is not None:
            self.unit.reaches[self.number(node)] = reach
        elif isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            self.visit(node.func)
        arguments = [*node.args, *node.keywords]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if len(arguments) == 1 and isinstance(node.args[:1], list) and name in _CONSUMERS and node.args:
            if isinstance(node.args[0], ast.GeneratorExp):
                self.comprehension(node.args[0])
                arguments = []
        # A checkpoint runs what it is handed once; running it again in the backward is no other call.
        if name == "checkpoint" and node.args and self.reach(node.args[0], None):
            self.hand_over(arguments.pop(0), loose=False)
        self.block(arguments)
        if reach is not None:
            self.flow.append(Enter(reach.unit))
        else:
            self.call_site(node)

    # What a call calls

    def reach(self, node: ast.expr, call: ast.Call | None) -> "Reach | None":
        """The function of this forward that an expression names."""
        from .anatomy import Reach

        if isinstance(node, ast.Attribute):
            if self.names.is_self(node.value):
                unit = self.anatomy.method(node.attr)
                return Reach(unit) if unit else None
            if _is_super(node.value, self.names):
                unit = self.anatomy.above(self.unit, node.attr)
                return Reach(unit) if unit else None
        found = self.names.outside(node)
        if not isinstance(found, Function):
            return None
        if call is not None and self.passes_self(call):
            in_mro = any(found in vars(base).values() for base in self.anatomy.cls.__mro__ if base is not nn.Module)
            if in_mro or (isinstance(node, ast.Name) and node.id in self.names.cells):
                unit = self.anatomy.explicit(found)
                return Reach(unit, drops_self=True) if unit else None
        unit = self.anatomy.helper(found)
        return Reach(unit) if unit else None

    def passes_self(self, call: ast.Call) -> bool:
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Starred):
            vararg = self.unit.parsed.tree.args.vararg
            is_vararg = isinstance(first.value, ast.Name) and vararg is not None and first.value.id == vararg.arg
            return is_vararg and self.names.self_name is None and not self.unit.is_helper
        return first is not None and self.names.is_self(first)

    def call_site(self, node: ast.Call) -> None:
        func = node.func
        outside = self.names.outside(func)
        if outside is not MISSING and not isinstance(outside, nn.Module):
            name = getattr(outside, "__name__", None) or _last(func)
            module = getattr(outside, "__module__", None) or ""
            if isinstance(outside, type) or module in ("math", "builtins") and name not in _BUILTIN_OPS:
                return
            if module.startswith("torch") and _QUESTIONS.match(name) or module == "torch.jit":
                return
            self.site(node, _identifier(name if name != "<lambda>" else _last(func)), sure=module.startswith("torch"))
        elif (path := self.child_path(func)) is not None:
            self.site(node, path, kind="child", sure=True)
        elif isinstance(func, ast.Attribute):
            self.method_site(node, func)
        elif not (isinstance(func, ast.Name) and (func.id in self.names.functions or self.names.is_self(func))):
            if not (isinstance(func, ast.Name) and outside is MISSING and func.id not in self.names.bound):
                self.site(node, None, prefix=self.names.origin(func) or "", kind="child")

    def method_site(self, node: ast.Call, func: ast.Attribute) -> None:
        if func.attr in NUMBER_METHODS or self.names.is_number(func.value) or _is_super(func.value, self.names):
            return
        if self.names.is_self(func.value):
            if not hasattr(nn.Module, func.attr):
                self.site(node, func.attr, kind="child")
            return
        origin = self.names.origin(func.value)
        if origin is None or (func.attr in _TENSOR and func.attr not in _CHILDISH):
            self.site(node, func.attr, sure=func.attr in TENSOR_METHODS)
        else:
            self.site(node, None, prefix=origin, tail=func.attr, kind="child")

    def child_path(self, node: ast.expr) -> str | None:
        """The path of a child that is written out: ``self.conv1``, ``self.downsample[0]``."""
        if isinstance(node, ast.Attribute) and self.names.is_self(node.value):
            return None if hasattr(nn.Module, node.attr) else node.attr
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            key, holder = node.slice.value, self.child_path(node.value)
            if holder is not None and (isinstance(key, str) or (isinstance(key, int) and key >= 0)):
                return f"{holder}.{key}"
        return None

    # Bookkeeping

    def number(self, node: ast.AST) -> int:
        """A number for a node, which stays on its copies."""
        known = getattr(node, "_gs_node", None)
        if known is None:
            tree: Any = self.unit.parsed.tree
            known = tree._gs_nodes = getattr(tree, "_gs_nodes", 0) + 1
            node._gs_node = known  # type: ignore[attr-defined]
        return known  # type: ignore[no-any-return]

    def site(
        self,
        node: ast.AST,
        name: str | None,
        prefix: str = "",
        tail: str | None = None,
        kind: Literal["op", "child"] = "op",
        sure: bool = False,
    ) -> None:
        parsed = self.unit.parsed
        site = Site(self.number(node), name, prefix, tail, kind, sure, parsed.where(node), parsed.segment(node))
        self.unit.sites[site.node] = site
        self.flow.append(site)


def _is_super(node: ast.expr, names: Any) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"):
        return False
    return not node.args or (len(node.args) == 2 and names.is_self(node.args[1]))


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "call")


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name).strip("_") if not name.isidentifier() else name
