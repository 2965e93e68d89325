"""Put operators at resolved places and take them away again, all or nothing."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule

from .errors import OperatorError
from .graft import graft_of, regraft
from .graph_module import insert_node, remove_nodes
from .methods import is_plain
from .place import Place, Target

__all__ = ["Insertion", "commit", "join", "withdraw"]


@dataclass(frozen=True)
class Insertion:
    """One operator for one place."""

    target: Target
    operator: nn.Module


def commit(insertions: Sequence[Insertion]) -> list[tuple[nn.Module, Place]]:
    """Insert every operator, after those that are at its place already; where one fails, none is inserted.

    Returns:
        The module and the place of each insertion, in their order.

    Raises:
        OperatorError: where an operator contains the module that it is to operate on.
        SurgeryError: where a module cannot be operated on.
    """
    by_module: dict[int, list[int]] = {}
    for k, insertion in enumerate(insertions):
        _check(insertion)
        by_module.setdefault(id(insertion.target.module), []).append(k)
    done: dict[int, tuple[nn.Module, Place]] = {}
    try:
        for group in by_module.values():
            module = insertions[group[0]].target.module
            if isinstance(module, GraphModule):
                for k in group:
                    place = insert_node(insertions[k].target, insertions[k].operator)
                    place.address = insertions[k].target.address
                    done[k] = (module, place)
                continue
            old = _places(module)
            new: list[Place] = []
            for k in group:
                new.append(_place(module, insertions[k]))
                new[-1].address = insertions[k].target.address
                done[k] = (module, new[-1])
            regraft(module, [*old, *new])
    except BaseException:
        withdraw(done.values())
        raise
    return [done[k] for k in range(len(insertions))]


def join(module: nn.Module, place: Place) -> list[tuple[nn.Module, Place]]:
    """Give one module one more place."""
    regraft(module, [*_places(module), place])
    return [(module, place)]


def withdraw(gone: Iterable[tuple[nn.Module, Place]]) -> None:
    """Take these places away; a module that has none left is exactly what it was."""
    by_module: dict[int, tuple[nn.Module, list[Place]]] = {}
    for module, place in gone:
        place.withdrawn = True
        by_module.setdefault(id(module), (module, []))[1].append(place)
    for module, places in by_module.values():
        if isinstance(module, GraphModule):
            remove_nodes(module, places)
            continue
        there = _places(module)
        left = [place for place in there if place not in places]
        if len(left) < len(there):
            regraft(module, left)
        kept = {place.child for place in left}
        for place in places:
            if place.child is not None and place.child not in kept:
                module._modules.pop(place.child, None)


def _check(insertion: Insertion) -> None:
    if is_plain(insertion.operator):
        return
    if any(part is insertion.target.module for part in insertion.operator.modules()):
        raise OperatorError(
            f"the operator for {insertion.target.address!r} contains the very module that it was to operate on, so "
            "that one would run inside the other without end. Give an operator that stands outside of it."
        )


def _places(module: nn.Module) -> tuple[Place, ...]:
    graft = graft_of(module)
    return graft.places if graft is not None else ()


def _place(module: nn.Module, insertion: Insertion) -> Place:
    target, operator = insertion.target, insertion.operator
    if is_plain(operator):
        return Place(target.where, operator, None, target.hops)
    name = "gs_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(operator).__name__).lower()
    numbered = (f"{name}_{k}" if k else name for k in itertools.count())
    child = next(free for free in numbered if free not in module._modules)
    module._modules[child] = operator
    operator.train(module.training)
    return Place(target.where, None, child, target.hops)
