"""The ops of a forward, taken down as it runs.

The recorder stands at the very sites at which an edit counts, so that ``relu@1`` means the same call to both.
"""

import collections
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .._torch import is_overlay
from ..errors import CaptureError
from .anatomy import Anatomy, anatomy
from .flow import Site
from .rewrite import Orders, write
from .runtime import holds_tensor, name_of, shown_as


@dataclass(frozen=True)
class Op:
    """One op, or one call of a child, in a forward."""

    name: str
    index: int  # which call of that name, in order of execution
    source: str
    text: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    kind: Literal["op", "child"]
    certain: bool = True  # False: listed from the source alone, which does not tell whether the index is the right one


Event = tuple[Site, str, Any, Any]


class Recorder:
    """Stands where :class:`.runtime.Plan` does in an edited forward, and only takes down what passes."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.calls: dict[int, list[list[Event]]] = {}

    def begin(self, whole: bool) -> list[Event]:
        return []

    def step(self, owner: nn.Module, events: list[Event], slot: int, value: Any) -> Any:
        self.note(events, self.sites[slot], self.sites[slot].name, value)
        return value

    drop = step

    def call(
        self, owner: nn.Module, events: list[Event], slots: tuple[int, ...], site: Site, *call: Any, **kwargs: Any
    ) -> Any:
        callee, *args = call
        value = callee(*args, **kwargs)
        self.note(events, site, name_of(owner, callee, site), value)
        return value

    call_dropped = call

    def note(self, events: list[Event], site: Site, name: str | None, value: Any) -> None:
        if name is not None and holds_tensor(value):
            is_tensor = isinstance(value, torch.Tensor)
            events.append((site, name, *((tuple(value.shape), value.dtype) if is_tensor else (None, None))))

    def end(self, owner: nn.Module, events: list[Event], whole: bool, value: Any = None) -> Any:
        if whole:
            self.calls.setdefault(id(owner), []).append(events)
        return value

    def close(self, events: list[Event]) -> None:
        """Nothing is checked at the end of a call."""

    def carry(self, function: Callable[..., Any], events: list[Event]) -> Callable[..., Any]:
        return shown_as(function, functools.partial(function, _gs_count=events))

    def carried(self, events: list[Event]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: functools.wraps(function)(self.carry(function, events))


def numbered(events: Iterable[Event], uncertain: Collection[Site] = ()) -> list[Op]:
    """Ops from what was taken down, each with its index among those of its name.

    After an op of which it is not certain whether it runs, no index of that name is.
    """
    doubtful: set[str] = set()
    ran: collections.Counter[str] = collections.Counter()
    ops = []
    for site, name, shape, dtype in events:
        if site in uncertain:
            doubtful.add(name)
        ops.append(Op(name, ran[name], site.source, site.text, shape, dtype, site.kind, name not in doubtful))
        ran[name] += 1
    return ops


def attach(module: nn.Module) -> Recorder:
    """Let a module record; what this changes is for the caller to put back."""
    body = anatomy(user_class(module), patched_forward(module))
    check_instance(module, body)
    recorder, namespace = _recording(body)
    module.__dict__.pop("forward", None)
    cls: Any = type(module)
    # Under its own name in full: transformers looks up by it which outputs a model records.
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    object.__setattr__(module, "__class__", type(cls)(cls.__name__, (cls,), {**namespace, **named}))
    return recorder


@functools.lru_cache(maxsize=1024)
def _recording(body: Anatomy) -> tuple[Recorder, dict[str, Callable[..., Any]]]:
    orders, sites = Orders(), list[Site]()
    for unit in () if body.root.names.rebinds_self() else body.units.values():
        for site in unit.sites.values():
            orders.slots[unit, site.node] = [len(sites)]
            sites.append(site)
    orders.plan = recorder = Recorder(sites)
    return recorder, write(body, orders)


def check_instance(module: nn.Module, body: Anatomy) -> None:
    """Refuse a module that shadows a function of its forward: what the class says is not what runs."""
    patched = [u.key for u in body.units.values() if u.public and u is not body.root and u.key in module.__dict__]
    if patched:
        raise CaptureError(
            f"asked for the ops of {type(module).__qualname__} ({body.root.where}); its method "
            f"'{patched[0]}' is replaced on this very instance, out of reach of an edit of the class. "
            "Take the replacement off, or operate on a child or on the output."
        )


def user_class(module: nn.Module) -> type:
    """The class that the user wrote, beneath those that were generated for this instance."""
    cls = type(module)
    while is_overlay(cls):
        cls = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
    return cls.__dict__.get("_gs_base", cls)


def patched_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The function of a forward that was patched on the instance, ``self`` first, or None."""
    patched = module.__dict__.get("forward", getattr(module.__dict__.get("_gs_graft"), "patched", None))
    if patched is None:
        return None
    if inspect.ismethod(patched) and patched.__self__ is module:
        return patched.__func__
    raise CaptureError(
        f"asked for the ops of {type(module).__qualname__}; its forward was replaced on the instance by "
        f"{getattr(patched, '__qualname__', patched)!r}, which is no method of it. Operate on its output instead."
    )
