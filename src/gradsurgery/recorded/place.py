"""The places of the operators in a recorded graph, as the rest of this package speaks of them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ..address import Where
from ..errors import OperatorError, SurgeryError
from ..graph_module import recompile
from ..operators import GradientReversal, MapGradient, ScaleGradient, StopGradient
from ..operators.live import LiveMap, LiveReversal, LiveScale, RecordedTransform
from ..stacks import Call, Stacks, has_gradient, is_ours, name_in
from ..wrappers import HOLDER
from .parts import Part, graphs_without_gradients, parts_in

__all__ = ["RecordedPlace", "bypassed", "recorded_graphs", "recorded_places", "remove_recorded"]


class RecordedPlace:
    """One operator at one place, with what :class:`gradsurgery.tables.Operation` asks of a place.

    Attributes:
        inner: the path of the module in the graph.
        where: the place inside the module.
        parts: each tensor that it was applied to.
        values: the values that a target at this place has in the graph as it is.
        whole: whether it takes everything at this place; not so on an edge, or at one argument of several.
    """

    hops = 0
    runs = None  # nobody counts

    def __init__(self, module: GraphModule, inner: str, where: Where, found: "list[_Found]", whole: bool) -> None:
        self.inner = inner
        self.where = where
        self.parts = [one.part for one in found]
        self.values = {value for one in found for value in one.values(inner, where.kind) if value is not None}
        self.whole = whole
        self._operator = _live(module, self.parts)

    def operator(self, module: nn.Module) -> nn.Module:
        """The operator, live: a strength that is set on it counts from the next forward on."""
        return self._operator


@dataclass(frozen=True)
class _Found:
    """A part, and the chain of operators that the same call of the same module recorded one on another.

    ``start`` is what the first of them was given, ``end`` what the last one gave, and ``depth`` how many come before;
    ``origin`` is the value of the model, which operators of other modules may have been given first, and ``takes`` are
    the nodes that take the start for the chain.
    """

    part: Part
    start: Node | None
    end: Node | None
    depth: int
    origin: Node | None
    takes: frozenset[Node]

    @property
    def owner(self) -> tuple[str, str]:
        return _owner(self.part.nodes[-1])

    def values(self, path: str, kind: str) -> tuple[Node | None, ...]:
        """What a target of a kind has at this chain; what a child gives ends before what its parent has recorded."""
        if kind == "output":
            return (self.end if path == self.owner[1] else self.start,)
        return (self.start,) if kind == "input" else (self.start, self.origin)


def recorded_graphs(modules: Iterable[nn.Module]) -> list[GraphModule]:
    """The graphs among these modules in which a recorded operator acts: not those that run without gradients."""
    graphs = {id(module): module for module in modules if isinstance(module, GraphModule)}
    idle = {id(inner) for module in graphs.values() for inner in graphs_without_gradients(module)}
    return [module for key, module in graphs.items() if key not in idle]


def recorded_places(module: GraphModule) -> Iterator[RecordedPlace]:
    """The operators that were recorded in a graph, in the order in which they run."""
    parts = parts_in(module.graph)
    if not parts:
        return
    stacks = Stacks(module.graph)
    chains = _chains(parts)
    alike: dict[object, list[_Found]] = {}
    for found in chains:
        alike.setdefault((found.owner[1], _kind(found)), []).append(found)
    same: dict[tuple[tuple[str, Where, bool], object], list[_Found]] = {}
    for found in chains:
        at = _place(stacks, found, alike[found.owner[1], _kind(found)])
        same.setdefault((at, _kind(found)), []).append(found)
    for ((path, where, whole), _), group in same.items():
        yield RecordedPlace(module, path, where, group, whole)


def _kind(found: _Found) -> tuple[object, ...]:
    """What the parts of one operator have in common."""
    part = found.part
    factor = part.factor.args[1] if part.factor is not None else None
    return found.depth, part.kind, factor, part.fn, part.layer


def _chains(parts: list[Part]) -> list[_Found]:
    given = {part.value: part.received for part in parts if part.value is not None}
    nodes_of = {part.value: frozenset(part.nodes) for part in parts if part.value is not None}
    gives = {node: part.value or node for part in parts for node in part.nodes}

    def before(value: Node | None) -> Node | None:
        if value is None or not is_ours(value):
            return given.get(value) if value is not None else None
        return value.args[0]  # type: ignore[return-value]

    def readers(value: Node | None) -> list[Node]:
        users = value.users if value is not None else ()
        return list(dict.fromkeys(gives.get(user, user) for user in users if gives.get(user) is not value))

    found = []
    for part in parts:
        owner, start, end, depth, origin = _owner(part.nodes[-1]), part.received, part.value, 0, part.received
        takes = frozenset(part.nodes)
        while start is not None and before(start) and _owner(start) == owner and len(readers(start)) == 1:
            depth, takes = depth + (start in given), nodes_of.get(start, frozenset({start}))
            start = before(start)
        while len(after := readers(end)) == 1 and before(after[0]) is end and _owner(after[0]) == owner:
            end = after[0]
        while origin is not None and before(origin):
            origin = before(origin)
        found.append(_Found(part, start, end, depth, origin, takes))
    return found


def _place(stacks: Stacks, found: _Found, alike: list[_Found]) -> tuple[str, Where, bool]:
    """Where a chain of operators is: at what leaves a module, at what it receives, or at an op in its forward.

    The last one says whether one operator there would be these ones ``alike``, no fewer and no more.
    """
    start, end = found.start, found.end
    key, path = found.owner
    call = stacks.calls[path][key]
    if start is None or end is None or found.origin is None:
        return path, Where("output"), True
    if _leaves(end, call) and _is_all_that_leaves(stacks, path, alike):
        return path, Where("output"), True
    if start not in call:
        return path, Where("input"), _is_all_that_enters(stacks, path, alike)
    if start not in stacks.ops.get(path, {}).get(key, {}) and _owner(start) != (key, path):
        return path, _of_child(stacks, start, path, call), _is_read_by(start, alike)
    made = _owner(found.origin)[1]
    for nodes in stacks.ops.get(made, {}).values():
        if found.origin in nodes:
            name = name_in(found.origin, made)
            named = [node for node in nodes if name_in(node, made) == name]
            at = Where("op", (), name, named.index(found.origin) if len(named) > 1 else None)
            return made, at, len(stacks.ops[made]) == 1 and start is found.origin and _is_read_by(start, alike)
    return made, Where("output"), False


def _of_child(stacks: Stacks, value: Node, path: str, call: Call) -> Where:
    """The op in the forward of a module that is a call of its child, which made the value."""
    inside = [inner for inner, _ in value.meta.get("nn_module_stack", {}).values() if len(inner) > len(path)]
    if not inside:
        return Where("output")
    child = inside[0]
    name = child.removeprefix(f"{path}.") if path else child
    calls = [nodes for nodes in stacks.calls[child].values() if not nodes.keys().isdisjoint(call)]
    k = next(k for k, nodes in enumerate(calls) if value in nodes)
    return Where("op", (), name, k if len(calls) > 1 else None)


def _owner(node: Node) -> tuple[str, str]:
    """The innermost call of a module that a node belongs to, layers of this package that were inserted left out."""
    key, path = "", ""
    for inner, (where, _) in node.meta.get("nn_module_stack", {}).items():
        if where.partition(".")[0] == HOLDER or where.rpartition(".")[2].startswith("gs_"):
            break
        key, path = (inner, where) if where else ("", "")
    return key, path


def _leaves(node: Node, call: Call) -> bool:
    return any(user not in call for user in node.users)


def _is_all_that_leaves(stacks: Stacks, path: str, alike: list[_Found]) -> bool:
    starts, ends = {found.start for found in alike}, {found.end for found in alike}
    leaving = [(n, call) for call in stacks.calls[path].values() for n in call if _leaves(n, call) and has_gradient(n)]
    return all(n in ends or (n in starts and _is_read_by(n, alike, outside=call)) for n, call in leaving)


def _is_all_that_enters(stacks: Stacks, path: str, alike: list[_Found]) -> bool:
    starts = {found.start for found in alike}
    for call in stacks.calls[path].values():
        entering = dict.fromkeys(value for node in call for value in node.all_input_nodes if value not in call)
        received = [value for value in entering if value.op != "get_attr" and has_gradient(value)]
        if not all(value in starts and _is_read_by(value, alike, inside=call) for value in received):
            return False
    return True


def _is_read_by(value: Node, alike: list[_Found], inside: Call | None = None, outside: Call | None = None) -> bool:
    """Whether chains of operators alone read a value, in a call or outside of it; the guards of an export count not."""
    taken = {node for found in alike if found.start is value for node in found.takes}
    users = [n for n in value.users if (inside is None or n in inside) and (outside is None or n not in outside)]
    return all(user in taken for user in users if user.op != "call_module" or user.users)


# --- what can be done with one ----------------------------------------------------------------------------------------

_NAMING = ("get_attr", "call_module")


def remove_recorded(module: GraphModule, gone: Iterable[RecordedPlace]) -> None:
    """Take operators out of a graph, with the layers that only they used.

    Raises:
        SurgeryError: where the graph does not tell what an operator was given; then none is taken out.
    """
    parts = [(part, *_ends(place, part)) for place in gone for part in place.parts]
    for part, received, value in reversed(parts):
        _pass_by(part, received, value)
        for node in reversed([*_parameters(part), *part.nodes]):
            if not node.users:
                module.graph.erase_node(node)
    named = [str(node.target) for node in module.graph.nodes if node.op in _NAMING]
    for layer in dict.fromkeys(part.layer for part, *_ in parts if part.layer):
        if not any(name == layer or name.startswith(layer + ".") for name in named):
            module.delete_submodule(layer)
    module.graph.lint()
    recompile(module)


@contextlib.contextmanager
def bypassed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which no operator that was recorded in one of these acts.

    Raises:
        SurgeryError: where the graph does not tell what an operator was given.
    """
    found = [(module, place) for module in recorded_graphs(modules) for place in recorded_places(module)]
    parts = [(part, *_ends(place, part)) for _, place in found for part in place.parts]
    changed = list({id(module): module for module, _ in found}.values())
    before: list[tuple[Node, tuple[Argument, ...], dict[str, Argument]]] = []
    try:
        for part, received, value in reversed(parts):
            before += [(user, user.args, user.kwargs) for user in value.users if user not in part.nodes]
            _pass_by(part, received, value)
        for module in changed:
            recompile(module)
        yield
    finally:
        for user, args, kwargs in reversed(before):
            user.args, user.kwargs = args, kwargs
        for module in changed:
            recompile(module)


def _ends(place: RecordedPlace, part: Part) -> tuple[Node, Node]:
    """What an operator was given, and what it gave."""
    if part.received is None or part.value is None:
        raise SurgeryError(
            f"the {part.kind.__name__} at {place.where.text(place.inner)!r} was to be taken out of a recorded graph, "
            "which does not tell what it was given: a part of its ops lies in another graph (strict=True), or it "
            "takes or gives several values. Remove it from the model, with gs.remove, and record that again."
        )
    return part.received, part.value


def _pass_by(part: Part, received: Node, value: Node) -> None:
    for user in [user for user in value.users if user not in part.nodes]:
        user.replace_input_with(value, received)


def _parameters(part: Part) -> list[Node]:
    return list(dict.fromkeys(n for node in part.nodes for n in node.all_input_nodes if n.op == "get_attr"))


def _live(module: GraphModule, parts: list[Part]) -> nn.Module:
    kind, factors = parts[0].kind, [part.factor for part in parts if part.factor is not None]

    def read() -> float:
        return float(factors[0].args[1])  # type: ignore[arg-type]

    def write(factor: float) -> None:
        if not set(factors) <= set(module.graph.nodes):
            raise OperatorError(
                f"{kind.__name__} was to be set in a recorded graph, from which it was removed. "
                "gs.operations(model) lists what is there."
            )
        for node in factors:
            node.args = (node.args[0], factor)
        recompile(module)

    if kind is GradientReversal:
        return LiveReversal(lambda: -read(), lambda lambd: write(-lambd))
    if kind is ScaleGradient:
        return LiveScale(read, write)
    if kind is StopGradient:
        return StopGradient()
    return LiveMap(parts[0].fn) if kind is MapGradient else RecordedTransform(kind)
