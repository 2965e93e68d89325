"""The modules of a model by their paths, as the user knows them."""

import sys
from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import nn
from torch.fx import GraphModule

from .errors import closest
from .graft import graft_of, user_class
from .operators.moved import COUNTS
from .wrappers import child, children, refuse_scripted, walk

__all__ = ["Tree", "runs_never"]


class Tree:
    """The modules of a model by path; walked only when a question needs all of them, which a plain path does not."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    @cached_property
    def all(self) -> list[tuple[str, nn.Module]]:
        """Every path, with its module."""
        return walk(self.root)

    def is_shared(self, module: nn.Module) -> bool:
        """Whether a module is a child more than once, of one or several; what lies inside of it is left out."""
        # Four are the parent's reference, the caller's, this variable and the argument: then there is no other parent.
        if COUNTS and sys.getrefcount(module) <= 4:
            return False
        names, seen, ahead = 0, {id(self.root), id(module)}, [self.root]
        while ahead:
            holder = ahead.pop()
            if isinstance(holder, torch.jit.ScriptModule):
                continue
            held: Iterable[nn.Module | None] = holder._modules.values()  # a wrapper has what it wraps for a child
            if graft_of(holder) is not None or isinstance(holder, GraphModule):
                held = [child(holder, name) for name in children(holder)]
            for one in held:
                if one is module:
                    names += 1
                elif one is not None and id(one) not in seen:
                    seen.add(id(one))
                    ahead.append(one)
        return names > 1

    def at(self, path: str) -> nn.Module | None:
        """The module at a path, or None."""
        module: nn.Module | None = self.root
        for name in path.split(".") if path else ():
            refuse_scripted(module, path)
            module = child(module, name)  # type: ignore[arg-type]
            if module is None:
                return None
        return module

    @cached_property
    def has_graphs(self) -> bool:
        """Whether a part of the model is a GraphModule."""
        return any(isinstance(module, GraphModule) for _, module in self.all)

    def graph_above(self, path: str) -> tuple[str, GraphModule] | None:
        """The first GraphModule on the way to a path: the rest of the path is for its graph to know."""
        names = path.split(".") if path else []
        for taken in range(len(names) + 1):
            prefix = ".".join(names[:taken])
            if isinstance(module := self.at(prefix), GraphModule):
                return prefix, module
        return None

    def runs_never(self, path: str, module: nn.Module) -> str | None:
        """Why the module at a path never runs, where that is known."""
        return runs_never(self.at(path.rpartition(".")[0]) if path else None, module)

    def that_run(self, keep: Callable[[str, nn.Module], bool]) -> list[tuple[str, nn.Module]]:
        """The modules that can run, of those to keep."""
        return [(path, m) for path, m in self.all if keep(path, m) and not self.runs_never(path, m)]

    def near(self, asked: str) -> str:
        """The paths closest to one that is not there, for a message."""
        return closest(asked, (path for path, _ in self.all if path)) + ". gs.sites(model) lists every address."

    def types(self) -> str:
        """The types of modules there are, for a message."""
        names = list(dict.fromkeys(user_class(module).__name__ for _, module in self.all))
        return "Modules there are of the types " + ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") + "."


def runs_never(parent: nn.Module | None, module: nn.Module) -> str | None:
    """Why a module's forward never runs, where that is known without running it."""
    if isinstance(parent, nn.MultiheadAttention) and parent._modules.get("out_proj") is module:
        return "nn.MultiheadAttention reads the weight of its out_proj and never calls it"
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if user_class(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        return f"a {user_class(module).__name__} has no forward: its children are called one by one"
    return None
