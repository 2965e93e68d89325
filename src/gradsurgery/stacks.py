"""Which call of which module each node of a graph belongs to.

Modules that a trace has dissolved into ops are found through ``nn_module_stack``, which fx and ``torch.export`` write
on every node, with one key for each call of a module. What leaves such a module is what nodes outside of it use.
"""

from torch import Tensor, nn
from torch.fx import Graph, Node

from .operators.formula import is_differentiable
from .recorded.parts import parts_in
from .wrappers import HOLDER

__all__ = ["Call", "Stacks", "has_gradient", "is_ours", "name_in", "op_name"]

Call = dict[Node, None]
"""The nodes of one call of one module, in order."""

_VALUES = ("call_function", "call_method", "call_module")


class Stacks:
    """The calls of each module that a graph holds, dissolved or not.

    Attributes:
        calls: the nodes of each call, by the path of the module and a key of the call.
        kinds: the class of each module, or its name.
        ops: likewise, those that the module's own forward computes, operators left out.
        known: whether the graph says which module its nodes come from.
    """

    def __init__(self, graph: Graph) -> None:
        self.calls: dict[str, dict[str, Call]] = {}
        self.kinds: dict[str, object] = {}
        self.ops: dict[str, dict[str, Call]] = {}
        nodes = [node for node in graph.nodes if node.op in _VALUES]
        self.known = any("nn_module_stack" in node.meta for node in nodes) or all(n.op == "call_module" for n in nodes)
        recorded = {node for part in parts_in(graph) for node in part.nodes}
        for node in nodes:
            stack = [(key, path, kind) for key, (path, kind) in node.meta.get("nn_module_stack", {}).items() if path]
            if node.op == "call_module" and not is_ours(node) and not (stack and stack[-1][1] == node.target):
                stack.append((node.name, str(node.target), None))
            for key, path, kind in stack:
                self.calls.setdefault(path, {}).setdefault(key, {})[node] = None
                self.kinds[path] = kind
            owner = stack[:-1] if node.op == "call_module" and not is_ours(node) else stack
            key, path = owner[-1][:2] if owner else ("", "")
            if node not in recorded:
                self.ops.setdefault(path, {}).setdefault(key, {})[node] = None
        self.calls[""] = {"": dict.fromkeys(nodes)}

    def passes_on(self, path: str) -> bool:
        """Whether a value of the module at a path is used outside of it; those of the guards of an export are not."""
        return any(user not in call for call in self.calls[path].values() for node in call for user in node.users)

    def is_a(self, path: str, held: nn.Module | None, cls: type) -> bool:
        """Whether the module at a path is of a class; ``torch.export`` notes the name of the class only."""
        kind = self.kinds.get(path)
        if isinstance(kind, type):
            return issubclass(kind, cls)
        return kind == f"{cls.__module__}.{cls.__qualname__}" or isinstance(held, cls)


def op_name(node: Node) -> str:
    """The name of what a node does, without fx's counter."""
    if node.op != "call_function":
        return str(node.target)
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    in_place = getattr(node.target, "__module__", "") == "_operator" and name in _IN_PLACE
    return name[1:] if in_place else name


_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imatmul", "imod", "ipow", "iand", "ior", "ixor"}


def name_in(node: Node, path: str) -> str:
    """The name of what a node does, as the forward of the module at a path calls it."""
    name = op_name(node)
    return name.removeprefix(path + ".") if node.op == "call_module" and path else name


def is_ours(node: Node) -> bool:
    """Whether a node calls an operator that was inserted in this graph."""
    return node.op == "call_module" and str(node.target).startswith(HOLDER + ".")


def has_gradient(node: Node) -> bool:
    """Whether whoever recorded a node has noted a tensor that can have a gradient."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and is_differentiable(value)
