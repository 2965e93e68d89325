"""Calls of an operator in the graphs of compiled methods, put in and taken out."""

import dataclasses
from typing import Any

import torch
from torch.jit import ScriptModule

from .._torchscript import graph_of_method, methods_of
from ..address import Where
from .values import index_in, method_for, passes

__all__ = ["put", "take_out"]


@dataclasses.dataclass
class _Editor:
    """Puts calls of the operator that is the attribute ``name`` where nodes are inserted in a graph now."""

    graph: Any
    name: str
    kind: Any
    last: Any = None  # the last node that was put in

    def node(self, kind: str, *inputs: Any, outputs: int = 1) -> Any:
        node = self.graph.create(kind, list(inputs), outputs)
        self.graph.insertNode(node)
        self.last = node
        return node

    def through(self, value: Any, element: tuple[Any, ...], strict: bool = True) -> Any:
        """The value with every tensor in it, or in the element of it, operated on."""
        kind = value.type()
        if kind.kind() == "TupleType":
            return self._through_tuple(value, kind, element)
        method = method_for(kind)
        if method is None or passes(kind):
            return value
        owner = self.node("prim::GetAttr", next(iter(self.graph.inputs())))
        owner.s_("name", self.name)
        owner.output().setType(self.kind)
        call = self.node("prim::CallMethod", owner.output(), value)
        call.s_("name", method if strict or method != "forward" else "each")
        call.output().setType(torch._C.TensorType.get() if method == "forward" else kind)
        return call.output()

    def _through_tuple(self, value: Any, kind: Any, element: tuple[Any, ...]) -> Any:
        chosen = [index_in(kind, element[0], "")] if element else range(len(kind.elements()))
        unpack = self.node("prim::TupleUnpack", value, outputs=len(kind.elements()))
        parts = list(unpack.outputs())
        for part, its in zip(parts, kind.elements(), strict=True):
            part.setType(its)
        for k in chosen:
            parts[k] = self.through(parts[k], element[1:], strict=bool(element))
        again = self.node("prim::TupleConstruct", *parts)
        again.output().setType(kind)
        return again.output()


def put(module: ScriptModule, method: str, name: str, kind: Any, where: Where) -> None:
    """Call the operator that is the attribute ``name`` in a method, after those that are at the place already."""
    graph = graph_of_method(module, method)
    editor = _Editor(graph, name, kind)
    if where.kind == "output":
        end = graph.return_node()
        graph.setInsertPoint(end)
        value = end.inputsAt(0)
        end.replaceInputWith(value, editor.through(value, where.element))
    else:
        received = list(graph.inputs())[1:]
        chosen = [received[int(where.element[0])]] if where.element else received
        for value in chosen:
            value = _after_ours(value)
            graph.setInsertPoint(_first_after(graph, value))
            strict = len(chosen) == 1
            new = editor.through(value, where.element[1:], strict)
            if new is not value and editor.last is not None:
                value.replaceAllUsesAfterNodeWith(editor.last, new)
    graph.lint()


def take_out(module: ScriptModule, names: set[str]) -> None:
    """Take every call of the operators that are these attributes out of all methods."""
    for method in methods_of(module):
        graph = graph_of_method(module, method)
        for call in [call for call in graph.findAllNodes("prim::CallMethod") if _called(call) in names]:
            owner, value, result = call.inputsAt(0).node(), call.inputsAt(1), call.output()
            result.replaceAllUsesWith(value)
            call.destroy()
            if not owner.output().uses():
                owner.destroy()
            _close(value)
        graph.lint()


def _called(call: Any) -> str | None:
    """The attribute of ``self`` that is called."""
    owner = call.inputsAt(0).node()
    return owner.s("name") if owner.kind() == "prim::GetAttr" else None


def _close(value: Any) -> None:
    """Drop a tuple that is taken apart only to be put together again."""
    unpack = value.node()
    if unpack.kind() != "prim::TupleUnpack":
        return
    parts = [part.unique() for part in unpack.outputs()]
    users = [use.user for part in unpack.outputs() for use in part.uses()]
    again = users[0] if users else None
    if (
        again is None
        or again.kind() != "prim::TupleConstruct"
        or len(users) != len(parts)
        or [part.unique() for part in again.inputs()] != parts
    ):
        return
    whole = unpack.input()
    again.output().replaceAllUsesWith(whole)
    again.destroy()
    unpack.destroy()
    _close(whole)


def _after_ours(value: Any) -> Any:
    """What a value has become behind the operators that are at it already."""
    while (after := _next(value)) is not None:
        value = after
    return value


def _next(value: Any) -> Any:
    users = [use.user for use in value.uses()]
    if len(users) != 1:
        return None
    if users[0].kind() == "prim::CallMethod" and (_called(users[0]) or "").startswith("gs_"):
        return users[0].output()
    if users[0].kind() != "prim::TupleUnpack":
        return None
    ends = [_after_ours(part) for part in users[0].outputs()]
    last = [use.user for end in ends for use in end.uses()]
    if len(last) == len(ends) and last[0].kind() == "prim::TupleConstruct" and any(_is_called(end) for end in ends):
        whole = [part.unique() for part in last[0].inputs()] == [end.unique() for end in ends]
        return last[0].output() if whole else None
    return None


def _is_called(value: Any) -> bool:
    return value.node().kind() in ("prim::CallMethod", "prim::TupleConstruct")


def _first_after(graph: Any, value: Any) -> Any:
    """The node before which what follows a value can stand: right behind it, or first of all for an argument."""
    nodes = [*graph.nodes(), graph.return_node()]
    maker = value.node()
    return nodes[0] if maker.kind() == "prim::Param" else nodes[nodes.index(maker) + 1]
