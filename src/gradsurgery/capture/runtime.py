"""What an edited forward calls as it runs, where the place of an operator cannot be told from the source alone.

The counters live in a list made by the outermost edited function of a call and handed on from there. Nothing is stored
on the module, so threads, recursion and replicas cannot count for each other.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from .flow import Site
from .meeting import ALL, Meeting, Slot, is_due

# Which backward is running, -1 outside of one. Where a version of torch lacks it, carry() goes by the end of the call.
_backward_id: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)


def holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor or a container that holds one: what makes an expression count as an op.

    What torch.fx has in the place of a tensor while it traces counts as well, or a trace would lose the operators.
    """
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, torch.fx.Proxy):
        return not _is_number(value.node)
    if isinstance(value, tuple | list):
        return any(holds_tensor(item) for item in value)
    if isinstance(value, dict):
        return any(holds_tensor(item) for item in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(holds_tensor(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


_NUMBER_OPS = ("size", "dim", "numel", "stride", "item", "tolist", "ndimension", "storage_offset")


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a traced value is a number: a shape, or what was computed from numbers alone."""
    if node.op == "call_method":
        return node.target in _NUMBER_OPS
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if name == "getattr":
        return node.args[1] in ("shape", "ndim", "dtype", "device", "is_cuda", "layout")
    # Only what Python's operators make of numbers are numbers: ``torch.zeros(h, w)`` is made of them too.
    inputs = node.all_input_nodes
    module = getattr(node.target, "__module__", "")
    return module in ("_operator", "math", "builtins") and bool(inputs) and all(map(_is_number, inputs))


def child_at(owner: nn.Module, path: str) -> nn.Module | None:
    """The child of a module at a path, or None."""
    child: nn.Module | None = owner
    for part in path.split("."):
        child = child._modules.get(part) if child is not None else None
    return child


def name_of(owner: nn.Module, callee: Any, site: Site) -> str | None:
    """The name of a call whose callee only the run knows: its path for a child, its own name for a function."""
    if isinstance(callee, nn.Module):
        if callee is owner:
            return None
        paths = (path for path, module in owner.named_modules(remove_duplicate=False) if module is callee)
        return next((path for path in paths if site.is_named(path) != "no"), None)
    if site.tail is not None:
        return site.tail
    name = getattr(callee, "__name__", None)
    return (site.prefix or name) if name and not isinstance(callee, type) else None


def shown_as(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the signature that ``function`` had before it counted: some callers count its parameters."""
    if not torch.compiler.is_compiling():
        run.__signature__ = _written(function)  # type: ignore[attr-defined]
    return run


def _written(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "_gs_count"]
    return signature.replace(parameters=kept)


def _mode(owner: nn.Module) -> str:
    return "train" if owner.training else "eval"


class Plan(Meeting):
    """The counted edits of one class: names in slots, and the edges between them."""

    def __init__(self, forward: str, slots: tuple[Slot, ...], edges: tuple[tuple[str, str], ...] = ()) -> None:
        self.forward, self.slots, self.edges = forward, slots, edges

    def begin(self, whole: bool) -> list[Any]:
        """Fresh counters for one call; not ``whole`` where the call came in by another way than the forward."""
        if not whole and torch.is_grad_enabled():
            for slot in self.slots:
                name = slot.name
                for index in slot.asked():
                    if index is not None and index != ALL:
                        raise CaptureError(
                            f"asked for '{name}@{index}' of {self.forward}, which is counted from the start of the "
                            "forward; a method of the module was called directly, where that call cannot be told. "
                            "Call the module itself, or address a child."
                        )
        return [0] * len(self.slots) + [[] for _ in self.edges] + [0] * (len(self.edges) + 1)

    def close(self, counts: list[Any]) -> None:
        for kept in counts[len(self.slots) : len(self.slots) + len(self.edges)]:
            kept.clear()  # an activation is held no longer than the call
        counts[-1] = 1

    def step(self, owner: nn.Module, counts: list[Any], slot: int, value: Any) -> Any:
        """Pass the value of an op on, through the methods that are due at this call of it."""
        if not holds_tensor(value):
            return value
        index = counts[slot]
        counts[slot] = index + 1
        for wanted, method in self.slots[slot].edits:
            if is_due(wanted, index):
                value = getattr(owner, method)(value)
        for edge, wanted in self.slots[slot].keeps:
            if is_due(wanted, index):
                self.keep(counts, edge, value)
        return value

    def drop(self, owner: nn.Module, counts: list[Any], slot: int, value: Any) -> Any:
        """Count an op whose value nobody reads."""
        ran, name = counts[slot], self.slots[slot].name
        asked = [index for index, _ in self.slots[slot].edits] + [index for _, index in self.slots[slot].keeps]
        due = any(is_due(index, ran) for index in asked)
        if holds_tensor(value):
            counts[slot] = ran + 1
            if due and torch.is_grad_enabled():
                raise CaptureError(
                    f"asked for '{name}' of {self.forward}; nobody reads the value of its call {ran}, so an operator "
                    "there would do nothing. Address the op that reads what it changes, or the output of the module."
                )
        return value

    def call(
        self, owner: nn.Module, counts: list[int], slots: tuple[int, ...], site: Site, *call: Any, **kwargs: Any
    ) -> Any:
        """Call what only the run knows, and pass its value on if it goes by one of the names."""
        return self._call(self.step, owner, counts, slots, site, call, kwargs)

    def call_dropped(
        self, owner: nn.Module, counts: list[int], slots: tuple[int, ...], site: Site, *call: Any, **kwargs: Any
    ) -> Any:
        """The same for a call whose value nobody reads."""
        return self._call(self.drop, owner, counts, slots, site, call, kwargs)

    def _call(
        self,
        then: Callable[..., Any],
        owner: nn.Module,
        counts: list[int],
        slots: tuple[int, ...],
        site: Site,
        call: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        callee, *args = call
        named = [slot for slot in slots if self._is_called(owner, callee, site, self.slots[slot].name)]
        value = self.meet(owner, counts, tuple(named), callee, *args, **kwargs)
        for slot in named:
            value = then(owner, counts, slot, value)
        return value

    def _is_called(self, owner: nn.Module, callee: Any, site: Site, name: str) -> bool:
        if isinstance(callee, nn.Module) and child_at(owner, name) is not callee:
            return False
        return name_of(owner, callee, site) == name

    def end(self, owner: nn.Module, counts: list[int], whole: bool, value: Any = None) -> Any:
        """Pass on what the call returns, once every op that was asked for has run as often as it should."""
        if torch.is_grad_enabled():
            for slot, ran in zip(self.slots, counts, strict=False):
                name = slot.name
                for index in slot.asked():
                    if index is None and ran > 1:
                        raise CaptureError(
                            f"asked for '{name}' of {self.forward}; it ran {ran} times in this call. "
                            f"Say which: '{name}@0' to '{name}@{ran - 1}', or '{name}@*' for all of them."
                        )
                    if whole and index != ALL and ran <= (index or 0):
                        asked = name if index is None else f"{name}@{index}"
                        raise CaptureError(
                            f"asked for '{asked}' of {self.forward}; in this call, in {_mode(owner)} mode, '{name}' "
                            f"ran {ran} times, so the operator would have been passed by. Take the mode and the "
                            "arguments under which it runs, run without gradients, or operate on the module's output."
                        )
            for (asked, _), taken in zip(self.edges, counts[-1 - len(self.edges) : -1], strict=True):
                if whole and not taken:
                    raise CaptureError(
                        f"asked for the edge '{asked}' of {self.forward}; in this call the second never received the "
                        "value of the first, or not as it is (a value computed from it, or changed in place since, is "
                        "another one). "
                        "Name the op that makes what it receives: gs.sites lists the ops of a forward."
                    )
        return value

    def carry(self, function: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
        """A function to hand to others: it goes on counting, and counts the same again when it is run again.

        A checkpoint runs its function once in the forward and once more in the backward. The second run is the same
        call of every op, so it starts from the counters that the first one found.
        """
        started: list[tuple[int, list[int]]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs, _gs_count=counts)
            backward = _backward_id() if _backward_id is not None else -1
            # Over, or inside a backward that the first run was not in: no new call, but an old one run again.
            if started and (counts[-1] or backward != started[0][0]):
                if len(started) > 1:
                    raise CaptureError(
                        f"asked for an op of {self.forward} in a function that it hands over, which ran {len(started)} "
                        "times and now runs again in a backward: which call this is cannot be told. "
                        "Operate on a child, or on the output of the module."
                    )
                return function(*args, **kwargs, _gs_count=list(started[0][1]))
            started.append((backward, list(counts)))
            return function(*args, **kwargs, _gs_count=counts)

        return shown_as(function, run)

    def carried(self, counts: list[int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator for the functions inside a forward, which may be handed over like any other."""
        return lambda function: functools.wraps(function)(self.carry(function, counts))
