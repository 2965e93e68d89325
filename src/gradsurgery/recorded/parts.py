"""What an operator has left in a graph: the value that it was given, the value that it gave, and the ops between.

A factor and a stop are known by their formula alone, whoever recorded it: a tensor that carries a gradient, overwritten
with the value. A transform has the ops of somebody's function in it, so its ops are those that were recorded inside of
its layer, or, by ``torch_fn``, inside of one call of its function.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ..operators import (
    DetachedTransform,
    FrozenTransform,
    GradientReversal,
    MapGradient,
    ScaleGradient,
    StopGradient,
    StraightThrough,
    detached_transform,
    frozen_transform,
    straight_through,
)

__all__ = ["Part", "graphs_without_gradients", "parts_in"]

aten = torch.ops.aten

_LAYERS = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in (StraightThrough, FrozenTransform, DetachedTransform)}
_FUNCTIONS: dict[str, type] = {
    f"function.{straight_through.__name__}": StraightThrough,
    f"function.{frozen_transform.__name__}": FrozenTransform,
    f"function.{detached_transform.__name__}": DetachedTransform,
}


@dataclass(frozen=True)
class Part:
    """One operator as it was applied to one tensor.

    Attributes:
        kind: the class of the operator.
        nodes: what it computes, in order.
        received: the value that it was given; None where the graph does not tell.
        value: the value that it gave; None where there are several.
        factor: the node that multiplies by the factor of the gradient.
        fn: the name of the function of a mapped gradient.
        layer: the path of the layer that was recorded.
    """

    kind: type
    nodes: tuple[Node, ...]
    received: Node | None
    value: Node | None
    factor: Node | None = None
    fn: str = ""
    layer: str = ""


def parts_in(graph: Graph) -> list[Part]:
    """The operators that were recorded in a graph, in the order in which they run."""
    parts = list(_transforms(graph))
    taken = {node for part in parts for node in part.nodes}
    parts += [part for node in graph.nodes if node not in taken and (part := _mapped(node) or _overwritten(node))]
    order = {node: k for k, node in enumerate(graph.nodes)} if parts else {}
    return sorted(parts, key=lambda part: order[part.nodes[-1]])


def _mapped(node: Node) -> Part | None:
    if not _is(node, torch.ops.gradsurgery.map_gradient.default):
        return None
    return Part(MapGradient, (node,), node.args[0], node, fn=str(node.args[1]))  # type: ignore[arg-type]


def _overwritten(copy: Node) -> Part | None:
    """The formula that ends with this node; it is ``_overwritten`` in ``operators/formula.py``, step by step."""
    if not _is(copy, aten.copy_.default) or not _is(into := copy.args[0], aten.detach.default):
        return None
    value, source = into.args[0], copy.args[1]
    carrier, nodes = value, [into, copy]
    if _is(value, aten.copy_.default) and _is(value.args[0], aten.new_empty_strided.default):  # laid out anew
        carrier = value.args[1]
        nodes = [value.args[0], value, *nodes]
    kind: type = StopGradient
    if _is(carrier, aten.mul.Tensor) and isinstance(factor := carrier.args[1], int | float):
        kind = GradientReversal if math.copysign(1.0, factor) < 0 else ScaleGradient
        given, made, times = carrier.args[0], [carrier], carrier
    elif _is(carrier, aten.clone.default) and _is(cut := carrier.args[0], aten.detach.default):
        given, made, times = cut.args[0], [cut, carrier], None
    else:
        return None
    if not _is_cut(source, given) or not isinstance(given, Node) or not isinstance(value, Node):
        return None
    found = {node for node in (*made, source, *nodes) if isinstance(node, Node)}
    between = _as_recorded(copy, found)
    if between is None or into.users.keys() != {copy} or copy.users:  # another alias, through which more is written
        return None
    if any(user in between for user in value.users if user not in found):  # read before it was overwritten
        return None
    return Part(kind, tuple(node for node in between if node in found), given, value, times)


def _as_recorded(last: Node, found: set[Node]) -> list[Node] | None:
    """The nodes of a formula in order; None where another op on tensors runs among them, which might write to one."""
    between, waiting = [last], found - {last}
    while waiting:
        node = between[0].prev
        if node.op == "root":
            return None
        if node not in found and node.op.startswith("call") and isinstance(node.meta.get("val"), Tensor | None):
            return None
        between.insert(0, node)
        waiting.discard(node)
    return between


def _is(node: object, target: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.op == "call_function" and node.target is target


def _is_cut(node: object, value: object) -> bool:
    return _is(node, aten.detach.default) and node.args[0] is value


# --- transforms -------------------------------------------------------------------------------------------------------


def _transforms(graph: Graph) -> Iterator[Part]:
    groups: dict[tuple[str, str, type], dict[Node, None]] = {}
    group_of: dict[Node, tuple[str, str, type]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        group = _group(node)
        if group is None and not node.users and node.all_input_nodes:
            # an assertion about a value of one
            group = next((group_of[n] for n in node.all_input_nodes if n in group_of), None)
        if group is not None:
            groups.setdefault(group, {})[node] = None
            group_of[node] = group
    for (_, layer, kind), nodes in groups.items():
        entering = _tensors(n for node in nodes for n in node.all_input_nodes if n not in nodes and n.op != "get_attr")
        leaving = _tensors(node for node in nodes if any(user not in nodes for user in node.users))
        received = entering[0] if len(entering) == 1 and not _is_of_other_graph(entering[0]) else None
        yield Part(kind, tuple(nodes), received, leaving[0] if len(leaving) == 1 else None, layer=layer)


def _group(node: Node) -> tuple[str, str, type] | None:
    """The call of a transform that a node belongs to: its name, the path of its layer and its class."""
    for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
        name = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind
        if name in _LAYERS:
            return key, path, _LAYERS[name]
    call, function = node.meta.get("torch_fn", ("", ""))
    return (call, "", _FUNCTIONS[function]) if function in _FUNCTIONS else None


def _tensors(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in dict.fromkeys(nodes) if isinstance(node.meta.get("val"), Tensor | list | tuple | None)]


def _is_of_other_graph(node: Node) -> bool:
    """Whether a value was computed in a graph of its own."""
    return any(_calls_graph(made) for made in (node, *node.all_input_nodes))


def _calls_graph(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def graphs_without_gradients(module: GraphModule) -> list[nn.Module]:
    """The graphs of their own that hold what ran under ``torch.no_grad``, as ``strict=True`` records it."""
    called = [node for node in module.graph.nodes if _calls_graph(node)]
    return [
        module.get_submodule(str(n.target)) for node in called for n in node.all_input_nodes if _is_graph(module, n)
    ]


def _is_graph(module: GraphModule, node: Node) -> bool:
    return node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), GraphModule)
