"""The edit of one function: operators around the expressions that were named, counters where they are needed."""

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from ..errors import CaptureError
from .edges import call, counts, received
from .flow import Site
from .inplace import is_read, overwritten, read_after, same_again
from .unit import HELPER_SELF, Reach, Unit

if TYPE_CHECKING:
    from .rewrite import Orders

Counting = Literal["none", "outer", "inner"]


def inner_key(unit: Unit) -> str:
    """Where the copy of a function lives that goes on with the counters of its caller."""
    return f"_gs_inner_{unit.key}"


class Editor(ast.NodeTransformer):
    """Edits a copy of the tree of one function.

    Args:
        unit: the function.
        orders: what is to be done at each site.
        touched: the functions that are edited.
        counted: those of them that need counters.
        counting: whether this copy makes the counters ("outer"), or receives them ("inner").
    """

    def __init__(
        self, unit: Unit, orders: "Orders", touched: set[Unit], counted: set[Unit], counting: Counting
    ) -> None:
        self.unit, self.orders, self.touched, self.counted, self.counting = unit, orders, touched, counted, counting
        self.provided: dict[str, Any] = {"_gs": orders.plan}
        self.depth = 0
        self.settled: set[ast.AST] = set()  # in-place calls whose name is taken care of further out
        self.tree: ast.FunctionDef

    def edit(self, tree: ast.FunctionDef, key: str) -> ast.FunctionDef:
        self.tree = tree
        tree.name = key
        body = [statement for old in tree.body for statement in _listed(self.visit(old))]
        if self.counting == "outer":
            whole = ast.Constant(self.unit.key == "forward")
            begin = ast.Assign([ast.Name("_gs_count", ast.Store())], call("begin", whole))
            if not isinstance(body[-1], ast.Return | ast.Raise):
                body.append(ast.Expr(call("end", self.unit.module(), counts(), whole)))
            body = [begin, ast.Try(body, [], [], [ast.Expr(call("close", counts()))])]
        elif self.counting == "inner":
            _add_keyword(tree.args)
        if self.unit.is_helper:
            first = tree.args.posonlyargs or tree.args.args
            first.insert(0, ast.arg(HELPER_SELF))
        tree.body = body
        return tree

    # Sites

    def site_of(self, node: ast.AST) -> Site | None:
        """The site on a node, where something is to be done there."""
        place = (self.unit, getattr(node, "_gs_node", 0))
        ordered = place in self.orders.plain or place in self.orders.slots
        return self.unit.sites.get(place[1]) if ordered else None

    def wrap(self, node: ast.AST, value: ast.expr, read: bool = True) -> ast.expr:
        """Pass a value through what is ordered at a node."""
        place = (self.unit, node._gs_node)  # type: ignore[attr-defined]
        methods = self.orders.plain.get(place, [])
        if methods and not read:
            site = self.unit.sites[place[1]]
            raise CaptureError(
                f"asked for '{site.name}' of {self.unit.parsed.function.__qualname__}; nobody reads the value of "
                f"'{site.text}' ({site.source}), so an operator there would do nothing. "
                "Address the op that reads what it changes, or the output of the module."
            )
        for method in methods:
            value = ast.Call(ast.Attribute(self.unit.module(), method, ast.Load()), [value], [])
        for slot in self.orders.slots.get(place, []):
            value = call("step" if read else "drop", self.unit.module(), counts(), ast.Constant(slot), value)
        return value

    def expression(self, node: Any) -> Any:
        self.generic_visit(node)
        return self.wrap(node, self.receive(node)) if self.site_of(node) else node

    def receive(self, node: Any) -> Any:
        """Let what an expression computes with come over the edges that lead to it."""
        slots = self.orders.consumers.get((self.unit, node._gs_node))
        return received(self.unit, node, slots, self.provided) if slots else node

    visit_BinOp = visit_UnaryOp = visit_Subscript = expression

    def visit_Call(self, node: ast.Call, read: bool = True) -> ast.expr:
        chain = list(overwritten(node))
        root = chain[-1][1] if chain else None
        rebinds = (
            read
            and isinstance(root, ast.Name)
            and node not in self.settled
            and any(self.site_of(call) for call, _ in chain)
            and read_after(self.tree, node, root.id)
        )
        self.settled.update(call for call, _ in chain)
        reach = self.reach(node)
        if reach is not None:
            return self.enter(node, reach)
        self.generic_visit(node)
        value = self.value(node, read)
        if rebinds:
            assert isinstance(root, ast.Name)
            return ast.NamedExpr(ast.Name(root.id, ast.Store()), value)
        return value

    def value(self, node: ast.Call, read: bool) -> ast.expr:
        site = self.site_of(node)
        if site is None:
            return node
        if site.name is not None:
            return self.wrap(node, self.receive(node), read)
        name = f"_gs_site_{site.node}"
        self.provided[name] = site
        slots = self.orders.slots[self.unit, site.node]
        numbers: list[ast.expr] = [ast.Constant(slot) for slot in slots]
        known = [self.unit.module(), counts(), ast.Tuple(numbers, ast.Load()), ast.Name(name, ast.Load())]
        return ast.Call(
            ast.Attribute(ast.Name("_gs", ast.Load()), "call" if read else "call_dropped", ast.Load()),
            [*known, node.func, *node.args],
            node.keywords,
        )

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        if self.site_of(node) is None:
            return node
        if (self.unit, node._gs_node) in self.orders.consumers:  # type: ignore[attr-defined]
            node.value = self.receive(node)
        again = same_again(node.target)
        if isinstance(node.target, ast.Name):
            readable = read_after(self.tree, node, node.target.id)
        else:
            # Writing to an attribute could put a new tensor in the place of a buffer.
            readable = isinstance(node.target, ast.Subscript) and again is not None
        if again is None:
            again = ast.Constant(None)
        value = self.wrap(node, again, readable)
        return [node, ast.Assign([node.target], value) if readable else ast.Expr(value)]

    def visit_Assign(self, node: ast.Assign) -> Any:
        """An assignment to a name that is never read is as good as a dropped value."""
        target, value = node.targets[0], node.value
        is_read_by_name = not isinstance(target, ast.Name) or len(node.targets) > 1 or is_read(self.tree, target.id)
        if is_read_by_name or not isinstance(value, ast.Call) or any(overwritten(value)):
            return self.generic_visit(node)
        node.value = self.visit_Call(value, read=False)
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        """A statement whose value is dropped: in place, the name it changed is bound anew; else nobody reads it."""
        if not isinstance(node.value, ast.Call):
            if self.site_of(node.value):
                dropped = node.value
                self.generic_visit(dropped)
                return ast.Expr(self.wrap(dropped, dropped, read=False))
            return self.generic_visit(node)
        chain = list(overwritten(node.value))
        if any(self.site_of(call) for call, _ in chain):
            root = chain[-1][1]
            readable = isinstance(root, ast.Name) and read_after(self.tree, node, root.id)
            target = same_again(root) if readable or isinstance(root, ast.Subscript) else None
            if target is not None:
                self.settled.update(call for call, _ in chain)
                target.ctx = ast.Store()  # type: ignore[attr-defined]
                return ast.Assign([target], self.visit_Call(node.value))
            for call, _ in chain[1:]:
                if self.site_of(call):
                    self.wrap(call, call, read=False)  # refuses
        return ast.Expr(self.visit_Call(node.value, read=False))

    # Calls of other functions of the forward

    def reach(self, node: ast.AST) -> Reach | None:
        found = self.unit.reaches.get(getattr(node, "_gs_node", 0))
        return found if found is not None and found.unit in self.touched else None

    def copy_of(self, unit: Unit) -> ast.expr:
        key = inner_key(unit) if unit in self.counted else unit.key
        return ast.Attribute(self.unit.module(), key, ast.Load())

    def enter(self, node: ast.Call, reach: Reach) -> ast.expr:
        arguments = node.args
        if reach.drops_self:
            first, *arguments = arguments
            if isinstance(first, ast.Starred):
                rest = ast.Subscript(first.value, ast.Slice(ast.Constant(1)), ast.Load())
                arguments = [ast.Starred(rest, ast.Load()), *arguments]
        keywords = [self.visit(keyword) for keyword in node.keywords]
        if reach.unit in self.counted:
            keywords.append(ast.keyword("_gs_count", counts()))
        return ast.Call(self.copy_of(reach.unit), [self.visit(argument) for argument in arguments], keywords)

    def visit_Attribute(self, node: Any) -> ast.expr:
        reach = self.reach(node)
        if reach is None:
            self.generic_visit(node)
            return node
        copied = self.copy_of(reach.unit)
        return call("carry", copied, counts()) if reach.unit in self.counted else copied

    visit_Name = visit_Attribute

    # Functions inside the function, and its returns

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        has_counts = self.counts_in(node)
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        if has_counts:
            _add_keyword(node.args)
            node.decorator_list.append(call("carried", counts()))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        has_counts = self.counts_in(node)
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        if not has_counts:
            return node
        _add_keyword(node.args)
        return call("carry", node, counts())

    def counts_in(self, node: ast.AST) -> bool:
        for inner in ast.walk(node):
            number = getattr(inner, "_gs_node", 0)
            reach = self.reach(inner)
            if (self.unit, number) in self.orders.slots or (reach is not None and reach.unit in self.counted):
                return True
        return False

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if self.counting == "outer" and not self.depth:
            whole = ast.Constant(self.unit.key == "forward")
            value = [node.value] if node.value else []
            node.value = call("end", self.unit.module(), counts(), whole, *value)
        return node


def _add_keyword(arguments: ast.arguments) -> None:
    arguments.kwonlyargs.append(ast.arg("_gs_count"))
    arguments.kw_defaults.append(None)


def _listed(node: Any) -> Iterator[ast.stmt]:
    yield from node if isinstance(node, list) else [node]
