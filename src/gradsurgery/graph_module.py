"""A ``torch.fx.GraphModule`` as the patient: operators become nodes of its own graph, where anyone can read them."""

import itertools
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from . import address as grammar
from ._torch import is_overlay
from .address import Address, Where
from .errors import AddressError, CaptureError, OperatorError, closest
from .operators.formula import is_differentiable
from .operators.modules import refuse_unscriptable
from .place import Place, Target
from .stacks import Call, Stacks, has_gradient, is_ours, name_in
from .wrappers import HOLDER

__all__ = ["NodePlace", "insert_node", "node_places", "recompile", "remove_nodes", "resolve_nodes", "values_at"]


class NodePlace(nn.Module):
    """An operator as a node calls it; a child of the GraphModule, so that copies and pickles keep it."""

    def __init__(self, place: Place, operator: nn.Module, strict: bool) -> None:
        super().__init__()
        self.place = place
        self.operator = operator
        self.strict = strict
        self.active = True

    # Without annotations, so that fx, export and TorchScript each take the value for what it is.
    def forward(self, value):  # type: ignore[no-untyped-def]
        if torch.jit.is_scripting():
            return self.operator(value) if self.active else value
        else:  # TorchScript leaves the other branch out only of an if that has one
            if not self.active or not (self.strict or (isinstance(value, Tensor) and is_differentiable(value))):
                return value
            return self.place.run(self, value)

    def __prepare_scriptable__(self) -> "NodePlace":
        refuse_unscriptable(self.operator, self.place.address)
        if self.place.where.element:
            raise OperatorError(
                f"torch.jit.script was asked for the operator at {self.place.where.text(self.place.inner)!r}, which "
                "takes one element of a value; in TorchScript it would take them all. Trace the model instead."
            )
        return self

    def extra_repr(self) -> str:
        return repr(self.place.where.text(self.place.inner))


def resolve_nodes(module: GraphModule, asked: Address, prefix: str = "") -> list[Target]:
    """The places of a graph that an address names; ``prefix`` is where the GraphModule stands in its model.

    Raises:
        AddressError: where the graph has no such module or op.
        CaptureError: where the graph does not say which module its ops come from, and for an edge.
    """
    if asked.where.kind == "edge":
        raise CaptureError(
            f"the edge {str(asked)!r} was asked for in a graph, which keeps no forward that calls both of its ends. "
            "Give the one that receives, with side='input', or operate on the model before it is recorded."
        )
    stacks = Stacks(module.graph)
    paths = [asked.path]
    if asked.is_glob:
        paths = [path for path in stacks.calls if grammar.matches(asked.path, path) and stacks.passes_on(path)]
    if not stacks.known and any(path and module_at(module, path) is None for path in paths):
        raise CaptureError(
            f"{str(asked)!r} was asked for in a graph that does not say which module an op comes from: its nodes have "
            "no 'nn_module_stack' (a pickle loses it). Operate before pickling, or on a module that the graph calls."
        )
    found = []
    for path in paths:
        wheres = _ops(stacks, path, asked) if asked.where.kind == "op" else [asked.where] * (path in stacks.calls)
        found += [Target(module, ".".join(filter(None, (prefix, path))), where, inner=path) for where in wheres]
    if not found:
        there = stacks.calls if asked.where.kind != "op" or asked.path not in stacks.ops else _names(stacks, asked.path)
        raise AddressError(
            f"nothing in this graph is called {str(asked)!r}; {closest(asked.where.op or asked.path, there)}. "
            "gs.sites(model) lists every address."
        )
    return found


def insert_node(target: Target, operator: nn.Module) -> Place:
    """Put an operator into the graph, after those that are at its place already."""
    module, where = target.module, target.where
    assert isinstance(module, GraphModule)
    anchors = list(_anchors(module.graph, target))
    if not anchors:
        raise CaptureError(
            f"nothing is left of {target.address!r} in this graph: no value of its own passes there. "
            "Choose a module that computes something."
        )
    _refuse_values(target, [value for value, _ in anchors])
    place = Place(where, operator, inner=target.inner)
    if HOLDER not in module._modules:
        module.add_module(HOLDER, nn.Module())
    holder = module.get_submodule(HOLDER)
    stem = re.sub(r"\W+", "_", where.text(target.inner)).strip("_") or "root"
    numbered = (f"{stem}_{k}" if k else stem for k in itertools.count())
    name = next(name for name in numbered if name not in holder._modules)
    holder.add_module(name, NodePlace(place, operator, strict=len(anchors) == 1))
    order = {node: k for k, node in enumerate(module.graph.nodes)}
    for value, users in anchors:
        # Just before its first use: until then, the ops of a module may go on working in place on its value.
        with module.graph.inserting_before(min(users, key=order.__getitem__)):
            node = module.graph.call_module(f"{HOLDER}.{name}", (value,))
        node.meta = {key: value.meta[key] for key in ("val", "tensor_meta") if key in value.meta}
        stacked = value if where.kind != "input" else next(iter(users))
        if "nn_module_stack" in stacked.meta:
            node.meta["nn_module_stack"] = stacked.meta["nn_module_stack"]
        for user in users:
            user.replace_input_with(value, node)
    module.graph.lint()
    recompile(module)
    return place


def _refuse_values(target: Target, values: list[Node]) -> None:
    """Refuse at once what no forward could do, where whoever recorded the graph has noted what the values are.

    Raises:
        CaptureError: where an element is asked for of values that the graph holds one by one.
        OperatorError: where none has a gradient.
    """
    noted = [value.meta.get("val") for value in values]
    if not all(isinstance(value, Tensor) for value in noted):
        return
    if target.where.element:
        raise CaptureError(
            f"{target.address!r} was asked for, and this graph holds every tensor by itself: it does not say which "
            f"element of a value that was. Name the op that makes it; gs.sites(model, '{target.path}:*') lists them."
        )
    if not any(has_gradient(value) for value in values):
        kinds = ", ".join(dict.fromkeys(f"a tensor of {value.dtype}" for value in noted if isinstance(value, Tensor)))
        raise OperatorError(
            f"{target.address!r} was to be operated on, but there is {kinds}, which has no gradient. Choose a place "
            "with a floating-point or complex tensor."
        )


def remove_nodes(module: GraphModule, gone: list[Place]) -> None:
    """Take operators out of a graph; its code is then what it was."""
    holder = module._modules.get(HOLDER)
    assert holder is not None
    names = {name for name, held in holder._modules.items() if isinstance(held, NodePlace) and held.place in gone}
    for node in list(module.graph.nodes):
        if is_ours(node) and str(node.target).rpartition(".")[2] in names:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    for name in names:
        del holder._modules[name]
    if not holder._modules:
        del module._modules[HOLDER]
    recompile(module)


def recompile(module: GraphModule) -> None:
    """Make the code of a GraphModule that of its graph, also where it is operated on itself."""
    module.recompile()
    cls = type(module)
    if is_overlay(cls):
        # fx wraps a call of this class around that of the class beneath, which would call it back without end.
        for name in {"__call__", "_wrapped_call"} & vars(cls).keys():
            delattr(cls, name)


def node_places(module: GraphModule) -> Iterator[NodePlace]:
    """The operators in a graph, in the order in which they run."""
    targets = dict.fromkeys(str(node.target) for node in module.graph.nodes if is_ours(node))
    for target in targets:
        held = module.get_submodule(target)
        if isinstance(held, NodePlace):
            yield held


def module_at(module: GraphModule, path: str) -> nn.Module | None:
    """The module that the graph calls under a path, if it calls one."""
    called = any(node.op == "call_module" and node.target == path for node in module.graph.nodes)
    return module.get_submodule(path) if called else None


def values_at(target: Target) -> set[Node]:
    """The values at a place."""
    assert isinstance(target.module, GraphModule)
    return {value for value, _ in _anchors(target.module.graph, target)}


def _anchors(graph: Graph, target: Target) -> Iterator[tuple[Node, list[Node]]]:
    """The values at a place, each with the nodes that are to use it operated on."""
    where, stacks = target.where, Stacks(graph)
    if where.kind == "op":
        for nodes in stacks.ops.get(target.inner, {}).values():
            same = [node for node in nodes if name_in(node, target.inner) == where.op or node.name == where.op]
            for node in same if where.call in (None, grammar.ALL_CALLS) else same[where.call : where.call + 1]:
                value = _after_ours(node, "op")
                if value.users:
                    yield value, list(value.users)
        return
    for call in stacks.calls.get(target.inner, {}).values():
        if where.kind == "output":
            leaving = [node for node in call if any(user not in call for user in node.users)]
            for node in leaving:
                yield node, [user for user in node.users if user not in call]
        else:
            yield from _entering(call)


def _entering(call: Call) -> Iterator[tuple[Node, list[Node]]]:
    entering = dict.fromkeys(value for node in call for value in node.all_input_nodes if value not in call)
    for value in entering:
        if value.op == "get_attr" or value.op == "output":
            continue  # a parameter, which the module does not receive
        users = [user for user in value.users if user in call]
        while len(users) == 1 and is_ours(users[0]):
            value, users = users[0], [user for user in users[0].users if user in call]
        yield value, users


def _after_ours(node: Node, kind: str) -> Node:
    """The last operator that is at this very value already."""
    while len(node.users) == 1 and is_ours(user := next(iter(node.users))):
        held = user.graph.owning_module.get_submodule(str(user.target)) if user.graph.owning_module else None
        if not isinstance(held, NodePlace) or held.place.where.kind != kind:
            break
        node = user
    return node


def _ops(stacks: Stacks, path: str, asked: Address) -> list[Where]:
    where = asked.where
    names = _names(stacks, path)
    if grammar.is_glob(where.op):
        chosen = [n for n in dict.fromkeys(names) if grammar.matches(where.op.replace(".", "\0"), n.replace(".", "\0"))]
        return [Where("op", where.element, name, grammar.ALL_CALLS) for name in chosen]
    count = names.count(where.op)
    if not count:
        by_name = [node for nodes in stacks.ops.get(path, {}).values() for node in nodes if node.name == where.op]
        return [where] * len(by_name)
    if where.call is None and count > 1:
        listed = ", ".join(f"'{path}:{where.op}@{k}'" for k in range(count))
        raise AddressError(f"{str(asked)!r} names the op {where.op!r}, which the graph has {count} times: {listed}.")
    if where.call is not None and where.call >= count:
        raise AddressError(f"{str(asked)!r} names call {where.call}, but the graph has {where.op!r} {count} times.")
    return [where]


def _names(stacks: Stacks, path: str) -> list[str]:
    """The ops of one module, those of its call with the most of them."""
    calls = [
        [name_in(node, path) for node in nodes if not is_ours(node)] for nodes in stacks.ops.get(path, {}).values()
    ]
    return max(calls, key=len, default=[])
