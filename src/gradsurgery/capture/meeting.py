"""What an edited forward calls where the value of an edge arrives: which argument it is, is told by identity."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError

ALL = -1
"""The index of an edit that holds for every call of a name."""


@dataclass(frozen=True)
class Slot:
    """One name whose calls are counted, and what is due at each of them."""

    name: str
    edits: tuple[tuple[int | None, str], ...] = ()  # pass the value through a method
    keeps: tuple[tuple[int, int | None], ...] = ()  # the value is what an edge comes from
    takes: tuple[tuple[int, int | None], ...] = ()  # the arguments are where an edge leads to

    def asked(self) -> list[int | None]:
        return [index for index, _ in self.edits] + [index for _, index in (*self.keeps, *self.takes)]


class Meeting:
    """The consumers of the edges of one class.

    The counters of one call are a list: a number for each slot, then for each edge the values it comes from and how
    often it was taken, and last whether the call is over.
    """

    forward: str
    slots: tuple[Slot, ...]
    edges: tuple[tuple[str, str], ...]  # each as it was asked for, and its method

    def meet(
        self, owner: nn.Module, counts: list[Any], slots: tuple[int, ...], callee: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a consumer, with what it receives over an edge passed through the method of that edge."""
        due = [edge for k in slots for edge, wanted in self.slots[k].takes if is_due(wanted, counts[k])]
        if not due:
            return callee(*args, **kwargs)
        copies: list[Any] = []

        def receive(value: Any) -> Any:
            new = value
            for edge in due:
                if any(value is one for one in counts[len(self.slots) + edge]):
                    counts[len(self.slots) + len(self.edges) + edge] += 1
                    new = getattr(owner, self.edges[edge][1])(new)
            if new is not value:
                copies.append(new)
            return new

        args, kwargs = _mapped(receive, args), _mapped(receive, kwargs)
        versions = _versions(copies)
        value = callee(*args, **kwargs)
        if copies and (_says_in_place(callee, kwargs) or versions != _versions(copies)):
            raise CaptureError(self._changed(due[0]))
        return value

    def meet_augmented(
        self, owner: nn.Module, counts: list[Any], slots: tuple[int, ...], changed: Any, received: Any
    ) -> Any:
        """The right side of ``x += y``: ``x`` is changed in place, so no edge may lead to it."""
        for edge in (edge for k in slots for edge, wanted in self.slots[k].takes if is_due(wanted, counts[k])):
            if any(changed is one for one in counts[len(self.slots) + edge]):
                raise CaptureError(self._changed(edge))
        return self.meet(owner, counts, slots, lambda same: same, received)

    def _changed(self, edge: int) -> str:
        return (
            f"asked for the edge '{self.edges[edge][0]}' of {self.forward}; the consumer works in place, so it changes "
            "the operated copy and not the value that the others read. Operate on the output of the producer instead, "
            "or make the consumer work out of place (inplace=False)."
        )

    def meet_method(
        self,
        owner: nn.Module,
        counts: list[Any],
        slots: tuple[int, ...],
        receiver: Any,
        method: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The same for a method, whose receiver is one of the values that it receives."""
        if isinstance(receiver, nn.Module) or not hasattr(receiver, "__torch_function__"):
            return self.meet(owner, counts, slots, getattr(receiver, method), *args, **kwargs)

        if method.endswith("_") and not method.endswith("__"):
            # It changes its receiver, so what it receives are its arguments.
            self.meet_augmented(owner, counts, slots, receiver, None)
            return self.meet(owner, counts, slots, getattr(receiver, method), *args, **kwargs)

        def call_method(own: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(own, method)(*args, **kwargs)

        return self.meet(owner, counts, slots, call_method, receiver, *args, **kwargs)


def is_due(wanted: int | None, index: int) -> bool:
    """Whether an edit that asks for one call, or for all, holds for this one."""
    return wanted in (index, ALL) or (wanted is None and index == 0)


def _says_in_place(callee: Any, kwargs: dict[str, Any]) -> bool:
    return getattr(callee, "inplace", False) is True or kwargs.get("inplace") is True


def _versions(values: list[Any]) -> list[int]:
    """How often each tensor was changed in place, where torch counts it."""
    if torch.compiler.is_compiling():
        return []
    return [value._version for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]


def _mapped(receive: Callable[[Any], Any], received: Any) -> Any:
    """What is received, each part passed through a function, also where the parts are in a list, tuple or dict."""
    new = receive(received)
    if new is not received:
        return new
    if type(received) in (list, tuple):
        return type(received)([_mapped(receive, one) for one in received])
    if type(received) is dict:
        return {name: _mapped(receive, one) for name, one in received.items()}
    return received
