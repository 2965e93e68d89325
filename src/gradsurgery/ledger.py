"""What was inserted where, as the model itself remembers it: an operator that another tool has lost is noticed.

A tool that replaces a module (``SyncBatchNorm.convert_sync_batchnorm``, a quantiser, ``reset_classifier``) drops the
operator with it, and nothing about the new module tells. The model that was operated on keeps the list, as one
attribute outside of ``state_dict`` that copies and pickles carry; places that were removed on purpose are marked.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn
from torch.fx import GraphModule

from .graft import graft_of
from .graph_module import node_places
from .place import Place, Target
from .tree import Tree
from .wrappers import child, children, walk

__all__ = ["forget", "lost_places", "record"]

LEDGER = "_gradsurgery_ledger"

Entry = tuple[str, Place, str]
"""The path of the module that was operated on, the place, and the class of the operator."""


def record(root: nn.Module, done: Iterable[tuple[Target, Place]]) -> None:
    """Remember new places of a model; what was lost at the same places has been made good."""
    entries = _entries(root)
    for target, place in done:
        module, path = target.module, _path_of(root, target)
        key = (place.inner, place.where)
        entries.append((path, place, _operator(module, place)))
        same = [entry for entry in entries if entry[0] == path and (entry[1].inner, entry[1].where) == key]
        surplus = same[: max(0, len(same) - list(_live(module)).count(key))]
        entries = [entry for entry in entries if entry not in surplus]
    _write(root, entries)


def _path_of(root: nn.Module, target: Target) -> str:
    """The path of the module that was operated on, which a Sequential hands the place down to, without a search."""
    names = target.path.split(".") if target.path else []
    if target.inner:
        names = names[: len(names) - len(target.inner.split("."))]
    module = Tree(root).at(".".join(names))
    for _ in range(target.hops):
        assert module is not None
        names.append(children(module)[-1 if target.where.kind == "output" else 0])
        module = child(module, names[-1])
    return ".".join(names)


def forget(root: nn.Module, lost: Iterable[Place] = ()) -> None:
    """Drop what was removed on purpose, and these places that are lost."""
    lost = list(lost)
    for _, module in walk(root):
        if LEDGER in module.__dict__:
            _write(module, [entry for entry in _entries(module) if entry[1] not in lost])


def lost_places(root: nn.Module) -> Iterator[tuple[str, Place, str]]:
    """The places whose operator is there no longer: the path that was named, the place, the class of the operator."""
    for prefix, holder in walk(root):
        if LEDGER not in holder.__dict__:
            continue
        there: dict[str, Counter[object]] = {}
        found = dict(walk(holder))
        for path, place, operator in _entries(holder):
            if path not in there:
                there[path] = Counter(_live(found.get(path)))
            key = (place.inner, place.where)
            there[path][key] -= 1
            if there[path][key] < 0:
                names = [*prefix.split("."), *path.split("."), *place.inner.split(".")]
                names = [name for name in names if name]
                yield ".".join(names[: len(names) - place.hops]), place, operator


def _entries(module: nn.Module) -> list[Entry]:
    return [entry for entry in module.__dict__.get(LEDGER, ()) if not entry[1].withdrawn]


def _write(module: nn.Module, entries: list[Entry]) -> None:
    # A new tuple each time: shallow copies of the module keep theirs.
    module.__dict__.pop(LEDGER, None)
    if entries:
        module.__dict__[LEDGER] = tuple(entries)


def _live(module: nn.Module | None) -> Iterator[object]:
    if module is None:
        return
    graft = graft_of(module)
    places = list(graft.places) if graft is not None else []
    if isinstance(module, GraphModule):
        places += [held.place for held in node_places(module)]
    for place in places:
        yield place.inner, place.where


def _operator(module: nn.Module, place: Place) -> str:
    held = place._operator
    return type(held if held is not None else place.operator(module)).__name__
