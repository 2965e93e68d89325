"""What the terminal and JSON are shown: sites as rows, and a forward line by line with the operators marked."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from ..errors import AddressError, SurgeryError, closest
from ..graft import user_class
from ..graph_module import NodePlace
from ..listing import LeafTracer
from ..operators import (
    GradientReversal,
    ScaleGradient,
    StopGradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
)
from ..recorded.place import recorded_places
from ..review import operations, sites
from ..scripted.place import walk_compiled
from ..stacks import Stacks, op_name
from ..tables import Operation, Site, one_line
from ..wrappers import bare, children, walk

__all__ = ["Line", "graph_lines", "site_cells"]

MARK = "  <== "

_OF_FUNCTION: dict[Any, type[nn.Module]] = {
    reverse_gradient: GradientReversal,
    scale_gradient: ScaleGradient,
    stop_gradient: StopGradient,
}
"""The layer that a forward calls as a function."""


@dataclass(frozen=True)
class Line:
    """One line of a forward.

    Attributes:
        text: what it computes.
        operators: what acts on the gradient there.
    """

    text: str
    operators: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text + "".join(MARK + operator for operator in self.operators)


def site_cells(site: Site) -> dict[str, Any]:
    """A site as JSON holds it."""
    return {
        "address": site.address,
        "kind": site.kind,
        "op": site.op,
        "shape": site.shape,
        "dtype": None if site.dtype is None else str(site.dtype).removeprefix("torch."),
        "source": site.source,
    }


def graph_lines(model: nn.Module, at: str) -> list[Line]:
    """The forward of the module that ``at`` names, or of the one that holds the op it names.

    Where fx cannot trace it, its ops are listed in the order of the source, without what they read.

    Raises:
        AddressError: where there is no such module.
    """
    root, path = bare(model), at.partition(":")[0].strip()
    if isinstance(root, GraphModule):
        return _in_graph(root, path)
    there = list(operations(model))
    if isinstance(root, torch.jit.ScriptModule):
        return _in_script(root, path, there)
    modules = dict(walk(root))
    if path not in modules:
        raise AddressError(f"{at!r} was to be shown, and the model has no module {path!r}; {closest(path, modules)}.")
    owner = modules[path]
    head = Line(f"{path or 'the model'} ({user_class(owner).__name__})", _boundary(there, path))
    try:
        graph = LeafTracer().trace(owner)
    except SurgeryError:
        raise
    except Exception:  # of many kinds: whatever a forward does that a proxy cannot
        listed = sites(model, f"{path}:*")
        return [head, *(Line(f"  {site.op:24}{site.source}", _op(there, path, site)) for site in listed)]
    return [head, *(_line(n, _marks(n, owner, path, there)) for n in graph.nodes if n.op != "placeholder")]


def _in_graph(root: GraphModule, path: str) -> list[Line]:
    calls = Stacks(root.graph).calls
    if path not in calls:
        raise AddressError(f"{path!r} was to be shown, and the graph has no such module; {closest(path, calls)}.")
    lines = [Line(f"{path or 'the model'} (graph)")]
    marks = {p.value or p.nodes[-1]: place.operator(root) for place in recorded_places(root) for p in place.parts}
    for node in (node for call in calls[path].values() for node in call):
        held = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        operator = held.operator if isinstance(held, NodePlace) else marks.get(node)
        lines.append(_line(node, (one_line(operator),) if operator is not None else ()))
    return lines


def _in_script(root: torch.jit.ScriptModule, path: str, there: list[Operation]) -> list[Line]:
    """What TorchScript prints of a forward, which says what each part of it calls."""
    modules = dict(walk_compiled(root))
    if path not in modules:
        raise AddressError(f"{path!r} was to be shown, and the script has no such module; {closest(path, modules)}.")
    module = modules[path]
    lines = [Line(f"{path or 'the model'} ({module.original_name})", _boundary(there, path))]
    for text in str(module.code).splitlines():
        called = re.search(r'= (?:self\.(\w+)|getattr\(self, "(\w+)"\))$', text)
        child = f"{path}.{called[1] or called[2]}".removeprefix(".") if called else None
        lines.append(Line(f"  {text}", _boundary(there, child) if child else ()))
    return lines


def _line(node: Node, marks: tuple[str, ...]) -> Line:
    if node.op == "output":
        return Line(f"  return {node.args[0]}", marks)
    given = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    return Line(f"  %{node.name} = {op_name(node)}({', '.join(given)})", marks)


def _marks(node: Node, owner: nn.Module, path: str, there: list[Operation]) -> tuple[str, ...]:
    if kind := _OF_FUNCTION.get(node.target):
        # A model may call these functions itself, with a strength that it computes.
        given = [*node.args[1:], *(value for name, value in node.kwargs.items() if name != "x")]
        is_known = not any(isinstance(value, Node) for value in given)
        return (f"op: {one_line(kind(*given)) if is_known else kind.__name__}",)
    if node.op != "call_module":
        return ()
    name = str(node.target)
    if "." not in name and name not in children(owner):  # an operator that has state of its own, and so is a child
        return (f"op: {one_line(owner.get_submodule(name))}",)
    return _boundary(there, f"{path}.{name}".removeprefix("."))


def _boundary(there: list[Operation], path: str) -> tuple[str, ...]:
    """The operators on what a module receives or returns, or on an element of that."""
    named = (row for row in there if row.side != "op" and row.address.partition("[")[0] == path)
    return tuple(f"{row.side}: {one_line(row.operator)}" for row in named)


def _op(there: list[Operation], path: str, site: Site) -> tuple[str, ...]:
    bare_name = site.address.partition("@")[0]
    named = {site.address, bare_name, f"{bare_name}@*"}
    own = tuple(f"op: {one_line(row.operator)}" for row in there if row.address.partition("[")[0] in named)
    return own + _boundary(there, f"{path}.{site.op}".removeprefix("."))
