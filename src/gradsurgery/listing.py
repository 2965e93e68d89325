"""To look before cutting, and after: the addresses of a model, what was inserted, and the rewritten graph."""

import inspect
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from . import address as grammar
from .capture import sealed
from .capture.record import Op
from .example import Arguments, ops_on, outputs_on
from .graft import graft_of, user_class
from .graph_module import node_places
from .ledger import lost_places
from .place import Place, Target
from .recorded.place import RecordedPlace, recorded_graphs, recorded_places
from .scripted.place import CompiledPlace, places_in
from .stacks import Stacks, name_in
from .tables import Operation, Site
from .tree import Tree
from .wrappers import walk

__all__ = ["LeafTracer", "graph_of", "graph_sites", "module_sites", "op_sites", "operations_of", "places_of"]


def places_of(root: nn.Module) -> Iterator[tuple[str, nn.Module, Place | CompiledPlace | RecordedPlace]]:
    """Every place that is operated on, under every name of its module, as (path that was named, module, place)."""
    there = list(walk(root))
    recorded = {id(graph) for graph in recorded_graphs(module for _, module in there)}
    for path, module in there:
        if isinstance(module, torch.fx.GraphModule):
            in_graph: list[Place | RecordedPlace] = [*recorded_places(module)] if id(module) in recorded else []
            in_graph += [held.place for held in node_places(module)]
            for placed in in_graph:
                yield ".".join(filter(None, (path, placed.inner))), module, placed
        if isinstance(module, torch.jit.ScriptModule):
            for compiled in places_in(module):
                names = [name for name in (*path.split("."), *compiled.path.split(".")) if name]
                yield ".".join(names[: len(names) - compiled.hops]), module, compiled
        graft = graft_of(module)
        for place in graft.places if graft is not None else ():
            names = path.split(".") if path else []
            yield ".".join(names[: len(names) - place.hops] if place.hops <= len(names) else names), module, place


def operations_of(root: nn.Module) -> Iterator[Operation]:
    """The rows of :func:`gradsurgery.operations`."""
    for path, module, place in places_of(root):
        if place.where.kind != "head":  # the place that its value comes from is listed
            yield Operation(place.where.text(path), module, place)
    for path, place, operator in lost_places(root):
        yield Operation(place.where.text(path), None, place, operator)


def module_sites(root: nn.Module, asked: grammar.Address, arguments: Arguments | None) -> Iterator[Site]:
    """The module boundaries that an address with globs stands for; with an example, those that ran on it."""
    outputs = outputs_on(root, arguments) if arguments is not None else None
    for path, module in Tree(root).that_run(lambda path, module: grammar.matches(asked.path, path)):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        shape, dtype = (None, None) if outputs is None else outputs.get(id(module), (None, None))
        if outputs is None or id(module) in outputs:
            yield Site(path, "module", user_class(module).__name__, shape, dtype, _source(user_class(module)))


def op_sites(root: nn.Module, asked: grammar.Address, arguments: Arguments | None) -> Iterator[Site]:
    """The ops that an address with globs stands for, each with the address that names it alone."""
    owners = Tree(root).that_run(lambda path, module: grammar.matches(asked.path, path))
    listed = ops_on(root, arguments)([module for _, module in owners])
    for (path, _), ops in zip(owners, listed, strict=True):
        calls = Counter(op.name for op in ops)
        for op in ops:
            if grammar.matches(asked.where.op.replace(".", "\0"), op.name.replace(".", "\0")) and (
                asked.where.call in (None, grammar.ALL_CALLS, op.index)
            ):
                yield _op_site(path, op, alone=calls[op.name] == 1)


def graph_sites(module: torch.fx.GraphModule, asked: grammar.Address) -> Iterator[Site]:
    """The addresses in a GraphModule: what its graph calls, and what it has dissolved into ops."""
    stacks = Stacks(module.graph)
    for path in stacks.calls if asked.where.kind == "output" else ():
        if grammar.matches(asked.path, path) and stacks.passes_on(path):
            yield Site(path, "module", _kind(stacks.kinds.get(path), module, path))
    for path, calls in stacks.ops.items() if asked.where.kind == "op" else ():
        nodes = max(map(list, calls.values()), key=len)
        names = [name_in(node, path) for node in nodes]
        for k, name in enumerate(names):
            if not nodes[k].users:
                continue
            if grammar.matches(asked.path, path) and grammar.matches(asked.where.op, name.replace(".", "_")):
                call = names[:k].count(name) if names.count(name) > 1 else None
                yield Site(grammar.Where("op", (), name, call).text(path), "op", name)


def _kind(kind: object, module: torch.fx.GraphModule, path: str) -> str:
    if isinstance(kind, type):
        return kind.__name__
    return str(kind).rpartition(".")[2] if kind else type(module.get_submodule(path)).__name__


def _op_site(path: str, op: Op, alone: bool) -> Site:
    where = grammar.Where("op", (), op.name, None if alone else op.index)
    return Site(where.text(path), "op", op.name, op.shape, op.dtype, op.source)


def graph_of(target: Target) -> torch.fx.Graph:
    """The graph of the forward that owns a place, as it stands now, operators included.

    Raises:
        CaptureError: where fx cannot trace that forward.
    """
    module = target.module
    if isinstance(module, torch.fx.GraphModule):
        return module.graph
    if target.where.kind != "op":
        return getattr(type(module), "_gs_graph", None) or sealed.seal(user_class(module).forward, (), ())
    return LeafTracer().trace(module)


class LeafTracer(torch.fx.Tracer):
    """Traces one forward: every child is a leaf, and so is every operator."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _source(cls: type) -> str:
    try:
        file = inspect.getsourcefile(cls.forward)  # type: ignore[attr-defined]
        line = inspect.getsourcelines(cls.forward)[1]  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return ""
    return f"{file}:{line}"
