"""What an edited forward calls where the value of an edge arrives: which argument it is, is told by identity."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import CaptureError
from .versions import note_version, refuse_other_version, version

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
        received: list[Any] = []
        copies: list[Any] = []

        def receive(value: Any) -> Any:
            for one, copy in zip(received, copies, strict=True):
                if value is one:  # a consumer may be given one value twice, and look whether it is one
                    return copy
            new = value
            for edge in due:
                if self._is_kept(counts, edge, value):
                    counts[len(self.slots) + len(self.edges) + edge] += 1
                    new = getattr(owner, self.edges[edge][1])(new)
            if new is not value:
                received.append(value)
                copies.append(new)
            return new

        args, kwargs = _mapped(receive, args), _mapped(receive, kwargs)
        versions, changed = [version(copy) for copy in copies], self._changed(due[0])
        for copy in copies:
            note_version(copy, changed)
        value = callee(*args, **kwargs)
        for copy in copies:
            refuse_other_version(copy, changed, changed)
        if copies and (_says_in_place(callee, kwargs) or versions != [version(copy) for copy in copies]):
            raise CaptureError(changed)
        return value

    def keep(self, counts: list[Any], edge: int, value: Any) -> None:
        """Remember a value, and its elements, as what an edge comes from."""
        for one in (value, *_parts(value)):
            counts[len(self.slots) + edge].append((one, version(one)))
            note_version(one, f"edge {edge}")

    def _is_kept(self, counts: list[Any], edge: int, value: Any) -> bool:
        """Whether a value is what an edge comes from: the very one, and not changed in place since."""
        if any(value is one and version(value) == before for one, before in counts[len(self.slots) + edge]):
            asked = f"asked for the edge '{self.edges[edge][0]}' of {self.forward} in compiled code; "
            refuse_other_version(
                value,
                f"edge {edge}",
                asked + "between the two the value is changed in place, so the second receives another one.",
                asked + "between the two the graph breaks, so whether the value is changed in place cannot be told. "
                "Take the graph break out, or operate on the output of the first.",
            )
            return True
        return False

    def meet_augmented(
        self, owner: nn.Module, counts: list[Any], slots: tuple[int, ...], changed: Any, received: Any
    ) -> Any:
        """The right side of ``x += y``: ``x`` is changed in place, so no edge may lead to it."""
        for edge in (edge for k in slots for edge, wanted in self.slots[k].takes if is_due(wanted, counts[k])):
            if any(changed is one for one, _ in counts[len(self.slots) + edge]):
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


def _parts(value: Any) -> list[Any]:
    """The elements of a value that a consumer may be given one by one."""
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, tuple | list) else []


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
