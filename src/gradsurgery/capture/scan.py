"""One walk over a function in the order in which Python evaluates it: its sites, its calls, and the flow between."""

import ast
from typing import TYPE_CHECKING, Any

from .calls import Calls, Naming
from .flow import Attempt, Branch, Enter, Flow, Leave, Loop, Loose, Site
from .unit import Unit

if TYPE_CHECKING:
    from .anatomy import Anatomy

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
_CONSUMERS = ("sum", "tuple", "list", "max", "min", "set", "dict", "sorted", "any", "all")


class Scanner:
    """Fills in the flow, the sites and the reaches of one unit, and numbers the nodes that they stand on."""

    def __init__(self, anatomy: "Anatomy", unit: Unit) -> None:
        self.unit, self.names = unit, unit.names
        self.calls = Calls(anatomy, unit)
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
        self.flow.append(Branch((self.part(node.body), self.part(node.orelse)), node.test))

    def visit_Match(self, node: Any) -> None:
        self.visit(node.subject)
        cases = [self.part([*([case.guard] if case.guard else []), *case.body]) for case in node.cases]
        self.flow.append(Branch((*cases, [])))

    def visit_Try(self, node: ast.Try) -> None:
        handlers = tuple(self.part(handler.body) for handler in node.handlers)
        self.flow.append(Attempt(self.part(node.body), handlers, self.part(node.orelse)))
        # It also runs on the way out of a return or a raise, whose counts differ.
        self.flow.append(Loose(self.part(node.finalbody)))

    visit_TryStar = visit_Try

    def visit_With(self, node: ast.With) -> None:
        self.block([item.context_expr for item in node.items])
        body = self.part(node.body)
        callees = [item.context_expr for item in node.items]
        known = [self.names.outside(c.func if isinstance(c, ast.Call) else c) for c in callees]
        if all((getattr(found, "__module__", None) or "").startswith("torch") for found in known):
            self.flow += body
        else:  # any other may swallow an exception, as contextlib.suppress does
            self.flow.append(Attempt(body, ([],), []))

    def visit_Return(self, node: ast.Return) -> None:
        self.visit_children(node)
        self.flow.append(Leave(returns=True))

    def visit_Raise(self, node: ast.Raise) -> None:
        self.visit_children(node)
        self.flow.append(Leave(returns=False))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.block([*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)])
        self.flow.append(Loose(self.part(node.body)))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.block([*node.args.defaults, *(d for d in node.args.kw_defaults if d)])
        self.flow.append(Loose(self.part([node.body])))

    def visit_AsyncFunctionDef(self, node: ast.AST) -> None:
        """Neither coroutines nor classes inside a forward are looked into: what they hold is no part of it."""

    visit_ClassDef = visit_AsyncFunctionDef

    # Expressions

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        if len(node.values) > 1:
            rest = node.values[1] if len(node.values) == 2 else ast.BoolOp(node.op, node.values[1:])
            first = node.values[0]
            condition = first if isinstance(node.op, ast.And) else ast.UnaryOp(ast.Not(), first)
            self.flow.append(Branch((self.part([rest]), []), condition))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.flow.append(Branch((self.part([node.body]), self.part([node.orelse])), node.test))

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
        reach = self.calls.reach(node)
        if reach is None:
            return False
        self.unit.reaches[self.number(node)] = reach
        self.flow.append(Enter(reach.unit, loose))
        return True

    def visit_Call(self, node: ast.Call) -> None:
        reach = self.calls.reach(node.func, node)
        if reach is not None:
            self.unit.reaches[self.number(node)] = reach
        elif isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            self.visit(node.func)
        first: ast.expr | None
        first, *others = node.args or [None]  # type: ignore[list-item]
        if isinstance(first, ast.GeneratorExp) and isinstance(node.func, ast.Name) and node.func.id in _CONSUMERS:
            self.comprehension(first)
        elif first is not None and not (self.calls.is_checkpoint(node.func) and self.hand_over(first, loose=False)):
            self.visit(first)
        self.block([*others, *node.keywords])
        if reach is not None:
            self.flow.append(Enter(reach.unit))
        elif (naming := self.calls.name(node.func)) is not None:
            self.add(node, naming)

    # Bookkeeping

    def number(self, node: ast.AST) -> int:
        """A number for a node, which stays on its copies."""
        known = getattr(node, "_gs_node", None)
        if known is None:
            tree: Any = self.unit.parsed.tree
            known = tree._gs_nodes = getattr(tree, "_gs_nodes", 0) + 1
            node._gs_node = known  # type: ignore[attr-defined]
        return int(known)

    def site(self, node: ast.AST, name: str, sure: bool) -> None:
        self.add(node, Naming(name, "op", sure))

    def add(self, node: ast.AST, naming: Naming) -> None:
        parsed = self.unit.parsed
        where, text = parsed.where(node), parsed.segment(node)
        site = Site(self.number(node), naming.name, naming.prefix, naming.tail, naming.kind, naming.sure, where, text)
        self.unit.sites[site.node] = site
        self.flow.append(site)
