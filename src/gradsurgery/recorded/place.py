"""The places of the operators in a recorded graph, as the rest of this package speaks of them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ..address import Where
from ..errors import OperatorError, SurgeryError
from ..graph_module import recompile
from ..operators import GradientReversal, MapGradient, ScaleGradient, StopGradient
from ..operators.live import LiveMap, LiveReversal, LiveScale, RecordedTransform
from ..stacks import Call, Stacks, is_ours, name_in
from ..wrappers import HOLDER
from .parts import Part, graphs_without_gradients, parts_in

__all__ = ["RecordedPlace", "bypassed", "recorded_graphs", "recorded_places", "remove_recorded"]


class RecordedPlace:
    """One operator at one place, with what :class:`gradsurgery.tables.Operation` asks of a place.

    Attributes:
        inner: the path of the module in the graph.
        where: the place inside the module.
        parts: each tensor that it was applied to.
        values: the values that are at this place: what leaves a module, or else what the operators are given.
    """

    hops = 0
    runs = None  # nobody counts

    def __init__(self, module: GraphModule, inner: str, where: Where, found: "list[_Found]") -> None:
        self.inner = inner
        self.where = where
        self.parts = [one.part for one in found]
        self.values = {one.end if where.kind == "output" else one.start for one in found}
        self._operator = _live(module, self.parts)

    def operator(self, module: nn.Module) -> nn.Module:
        """The operator, live: a strength that is set on it counts from the next forward on."""
        return self._operator


@dataclass(frozen=True)
class _Found:
    """A part, and the chain of operators at one place that it belongs to.

    ``start`` is what the first of them was given, ``end`` what the last one gave, and ``depth`` how many come before.
    """

    part: Part
    start: Node | None
    end: Node | None
    depth: int


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
    ends = {found.end for found in chains}
    same: dict[object, list[_Found]] = {}
    for found in chains:
        part = found.part
        path, where = _place(stacks, found, ends)
        factor = part.factor.args[1] if part.factor is not None else None
        same.setdefault((path, where, found.depth, part.kind, factor, part.fn, part.layer), []).append(found)
    for (path, where, *_), group in same.items():  # type: ignore[misc]
        yield RecordedPlace(module, path, where, group)


def _chains(parts: list[Part]) -> list[_Found]:
    computed = {node for part in parts for node in part.nodes}
    by_value = {part.value: part for part in parts if part.value is not None}
    after = {part.received: part for part in parts if part.received in by_value}
    after = {value: part for value, part in after.items() if _owner(value) == _owner(part.nodes[-1])}
    found = []
    for part in parts:
        start, end, depth = part.received, part.value, 0
        while start in after:
            start, depth = by_value[start].received, depth + 1
        while end is not None:
            others = [user for user in end.users if user not in computed]
            if end in after:
                end = after[end].value
            elif len(others) == 1 and is_ours(others[0]):  # inserted in the graph itself, after what was recorded
                end = others[0]
            else:
                break
        found.append(_Found(part, start, end, depth))
    return found


def _place(stacks: Stacks, found: _Found, ends: set[Node | None]) -> tuple[str, Where]:
    """Where a chain of operators is: at what leaves a module, at what it receives, or at an op in its forward."""
    start, end = found.start, found.end
    key, path = _owner(end or found.part.nodes[-1])
    call = stacks.calls[path][key]
    if start is None or end is None:
        return path, Where("output")
    if _leaves(end, call) and all(value in ends for value in _leaving(call)):
        return path, Where("output")
    if start not in call:
        return path, Where("input")
    nodes = list(stacks.ops.get(path, {}).get(key, ()))
    if start not in nodes:
        return path, _of_child(stacks, start, path, call)
    name = name_in(start, path)
    named = [node for node in nodes if name_in(node, path) == name]
    return path, Where("op", (), name, named.index(start) if len(named) > 1 else None)


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


def _leaving(call: Call) -> list[Node]:
    """What leaves a module and can have a gradient."""
    leaving = [(node, node.meta.get("val")) for node in call if _leaves(node, call)]
    return [
        n for n, value in leaving if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    ]


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
    for layer in dict.fromkeys(part.layer for part, *_ in parts if part.layer):
        named = [str(node.target) for node in module.graph.nodes if node.op in _NAMING]
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
        if any(node not in set(module.graph.nodes) for node in factors):
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
