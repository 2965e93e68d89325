"""Which compiled methods call which modules: what runs can be operated on, and what was inlined cannot."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch.jit import ScriptModule

from .._torchscript import compiled_type, graph_of_method, methods_of
from .place import walk_compiled

__all__ = ["Calls"]


class _Call(NamedTuple):
    """A call in a graph: of the module at a path from the owner of the graph, or of any module of a type."""

    path: tuple[str, ...] | None
    kind: str
    method: str
    is_read: bool


@dataclass
class Calls:
    """The calls in a ScriptModule, from every method of the root on."""

    root: ScriptModule

    @cached_property
    def modules(self) -> dict[str, ScriptModule]:
        """Every module by its path."""
        return dict(walk_compiled(self.root))

    @cached_property
    def made(self) -> dict[str, dict[str, list[bool]]]:
        """For each path the methods that are called there, with whether each call's value is read."""
        made: dict[str, dict[str, list[bool]]] = {"": {name: [True] for name in methods_of(self.root)}}
        todo = [("", name) for name in methods_of(self.root)]
        summaries: dict[tuple[str, str], list[_Call]] = {}
        while todo:
            path, method = todo.pop()
            module = self.modules[path]
            key = (_name(compiled_type(module)), method)
            if key not in summaries:
                summaries[key] = _calls_in(graph_of_method(module, method))
            for call in summaries[key]:
                for callee in self._callees(path, call):
                    calls = made.setdefault(callee, {}).setdefault(call.method, [])
                    if not calls:
                        todo.append((callee, call.method))
                    calls.append(call.is_read)
        return made

    def _callees(self, path: str, call: _Call) -> list[str]:
        if call.path is not None:
            callee = ".".join([path, *call.path] if path else call.path)
            return [callee] if callee in self.modules else []  # an operator of this package is none
        # Chosen as it runs, from a container or a branch: any module that fits.
        same = [p for p, module in self.modules.items() if _name(compiled_type(module)) == call.kind]
        return same or [p for p, module in self.modules.items() if call.method in methods_of(module)]


def _calls_in(graph: Any) -> list[_Call]:
    calls: list[_Call] = []
    _collect(graph, {next(iter(graph.inputs())).unique(): ()}, calls)
    return calls


def _collect(block: Any, paths: dict[int, tuple[str, ...]], calls: list[_Call]) -> None:
    for node in block.nodes():
        kind = node.kind()
        if kind == "prim::GetAttr" and node.input().unique() in paths:
            paths[node.output().unique()] = (*paths[node.input().unique()], node.s("name"))
        elif kind == "prim::CallMethod":
            callee = node.inputsAt(0)
            path = paths.get(callee.unique())
            calls.append(_Call(path, _name(callee.type()), node.s("name"), bool(node.output().uses())))
        for inner in node.blocks():
            _collect(inner, paths, calls)
        if node.hasAttribute("Subgraph"):  # what torch.jit.fork runs
            inside = node.g("Subgraph")
            pairs = zip(inside.inputs(), node.inputs(), strict=False)
            known = {mine.unique(): paths[its.unique()] for mine, its in pairs if its.unique() in paths}
            _collect(inside, known, calls)


def _name(kind: Any) -> str:
    return str(kind.annotation_str)
