"""The opened capture: the source of a forward with operators written into it, and everything else as it was.

Nothing is traced and nothing replayed. Only the expression that an address names is edited, so control flow, modes,
optional arguments, context managers and side effects stay the user's own live code, and an edit can never go stale.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CaptureError
from .anatomy import Anatomy, anatomy
from .edit import Counting, Editor, inner_key
from .flow import Site, count
from .meeting import ALL, Slot
from .runtime import Plan
from .source import passes_on, rebuild, recompile
from .unit import Unit

__all__ = ["ALL", "EdgeEdit", "OpEdit", "rewrite"]


@dataclass(frozen=True)
class OpEdit:
    """One place in a forward, and the method of the instance that its value passes through.

    A method has to hand back as it is what holds no tensor: the one ``x + y`` of a forward is edited without a look at
    its type, so that the code stays one that TorchScript compiles.
    """

    name: str
    index: int | None  # which call of the name; None: the name alone, which must run once in a forward; ALL: every call
    method: str


@dataclass(frozen=True)
class EdgeEdit:
    """What one op, or child call, receives from another: the value goes to all others as it was.

    Which of the arguments of the consumer is the value is told by identity as the forward runs, so the value may take
    any way through names, tuples and helper functions; a new value that was computed from it is another edge.
    """

    producer: tuple[str, int | None]
    consumer: tuple[str, int | None]
    method: str


@dataclass
class Orders:
    """What is to be done at each site: ``plain`` methods to call, or ``slots`` of names to count.

    ``consumers`` are those of the slots whose name takes in the value of an edge.
    """

    plain: dict[tuple[Unit, int], list[str]] = field(default_factory=dict)
    slots: dict[tuple[Unit, int], list[int]] = field(default_factory=dict)
    consumers: dict[tuple[Unit, int], list[int]] = field(default_factory=dict)
    plan: Any = None

    def nodes(self, unit: Unit) -> set[int]:
        return {node for place in (self.plain, self.slots) for u, node in place if u is unit}


def rewrite(
    cls: type, edits: tuple[OpEdit | EdgeEdit, ...], forward: Callable[..., Any] | None = None
) -> dict[str, Callable[..., Any]]:
    """The functions that a subclass of ``cls`` needs for the values of some ops to pass through its methods.

    Args:
        cls: the class whose forward holds the ops.
        edits: the places; two at the same one act in this order.
        forward: the function that runs in place of ``cls.forward``, ``self`` first, where an instance has been patched.

    Raises:
        CaptureError: where the source cannot be had, or an op is written so that its value cannot be replaced.
    """
    return _rewritten(anatomy(cls, forward), edits)


@functools.lru_cache(maxsize=4096)
def _rewritten(body: Anatomy, edits: tuple[OpEdit | EdgeEdit, ...]) -> dict[str, Callable[..., Any]]:
    return write(body, _orders(body, edits))


def _orders(body: Anatomy, edits: tuple[OpEdit | EdgeEdit, ...]) -> Orders:
    """Decide for every name whether its calls can be told apart in the source, or have to be counted."""
    orders = Orders()
    slots: list[Slot] = []
    edges = [edit for edit in edits if isinstance(edit, EdgeEdit)]
    ends = {name for edge in edges for name, _ in (edge.producer, edge.consumer)}
    ops = [edit for edit in edits if isinstance(edit, OpEdit)]
    for name in dict.fromkeys((*(edit.name for edit in ops), *ends)):
        wanted = [edit for edit in ops if edit.name == name]
        sites = [(u, s) for u in body.units.values() for s in u.sites.values() if s.is_named(name) != "no"]
        if not sites:
            raise CaptureError(
                f"asked for '{name}' of {body.cls.__qualname__}; its forward ({body.root.where}) has no "
                "such op. List what it has with `gradsurgery.sites`."
            )
        told = [_told(body, sites, name, edit) for edit in wanted]
        if name not in ends and all(found is not None for found in told):
            for edit, found in zip(wanted, told, strict=True):
                for place in found or ():
                    orders.plain.setdefault(place, []).append(edit.method)
        else:
            taken = tuple((k, edge.consumer[1]) for k, edge in enumerate(edges) if edge.consumer[0] == name)
            kept = tuple((k, edge.producer[1]) for k, edge in enumerate(edges) if edge.producer[0] == name)
            for unit, site in sites:
                orders.slots.setdefault((unit, site.node), []).append(len(slots))
                if taken:
                    orders.consumers.setdefault((unit, site.node), []).append(len(slots))
            slots.append(Slot(name, tuple((edit.index, edit.method) for edit in wanted), kept, taken))
    described = tuple((_described(edge), edge.method) for edge in edges)
    orders.plan = Plan(body.cls.__qualname__, tuple(slots), described)
    return orders


def _described(edge: EdgeEdit) -> str:
    ends = (name if index is None else f"{name}@{index}" for name, index in (edge.producer, edge.consumer))
    return " -> ".join(ends)


def _told(body: Anatomy, sites: list[tuple[Unit, Site]], name: str, edit: OpEdit) -> list[tuple[Unit, int]] | None:
    """The sites of one edit where the source alone tells them, else None."""
    if any(site.is_named(name) == "maybe" for _, site in sites):
        return None
    if edit.index == ALL:
        return [(unit, site.node) for unit, site in sites]

    def weight(site: Site) -> tuple[float, float]:
        if site.is_named(name) == "no":
            return 0, 0
        return (1 if site.sure or len(sites) == 1 else 0), 1

    counted = count(body.root, weight)
    index = edit.index or 0
    hit = [(u, s) for u, s in sites if s in counted.before and counted.before[s][0] <= index <= counted.before[s][1]]
    exact = all(counted.before[s] == (index, index) and weight(s) == (1, 1) for _, s in hit)
    runs = counted.total[0] > index and (edit.index is not None or counted.total == (1, 1))
    return [(u, s.node) for u, s in hit] if hit and exact and runs and not counted.loose else None


def write(body: Anatomy, orders: Orders) -> dict[str, Callable[..., Any]]:
    """Compile every function of a forward that an order stands in, or that calls one that does."""
    units = list(body.units.values())
    touched = _upstream(units, {unit for unit in units if orders.nodes(unit)})
    counted = _upstream(units, {unit for unit, _ in orders.slots})
    entered = {reach.unit for unit in units for reach in unit.reaches.values()}  # the root too, where it calls itself
    namespace: dict[str, Callable[..., Any]] = {}
    for unit in units:
        if unit not in touched:
            continue
        if unit.names.rebinds_self():
            raise CaptureError(
                f"asked for an op inside {unit.title}; it binds the name '{unit.names.self_name}' to something else. "
                "Operate on a child, or on the output."
            )
        if unit not in counted or unit.public:
            outer: Counting = "outer" if unit in counted else "none"
            namespace[unit.key] = _function(unit, orders, touched, counted, outer)
        if unit in counted & entered:
            namespace[inner_key(unit)] = _function(unit, orders, touched, counted, "inner")
    return namespace


def _upstream(units: list[Unit], some: set[Unit]) -> set[Unit]:
    """Some units, and all that reach them."""
    found = set(some)
    while more := {u for u in units if u not in found and any(r.unit in found for r in u.reaches.values())}:
        found |= more
    return found


def _function(
    unit: Unit, orders: Orders, touched: set[Unit], counted: set[Unit], counting: Counting
) -> Callable[..., Any]:
    key = inner_key(unit) if counting == "inner" else unit.key
    if counting == "inner":
        refusing = [wrapper for wrapper in unit.wrappers if not passes_on(wrapper, False)]
        if refusing:
            raise CaptureError(
                f"asked for an op inside {unit.title} that has to be counted as it runs; its decorator takes no "
                "further keyword, so the counter cannot be passed. "
                "Operate on a child, or on the output."
            )
    editor = Editor(unit, orders, touched, counted, counting)
    tree = editor.edit(copy.deepcopy(unit.parsed.tree), key)
    function = recompile(unit.parsed, tree, editor.provided)
    return rebuild(unit.wrappers, unit.parsed.function, function)
