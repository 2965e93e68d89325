"""After the cut and before it: undo, list what is there, look at a graph, switch everything off for a while."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from . import address as grammar
from . import listing
from .address import Where
from .edit import withdraw
from .errors import AddressError, SurgeryError
from .example import Example, read_example
from .graft import without
from .graph_module import NodePlace, values_at
from .ledger import forget, lost_places
from .operate import expect_places
from .place import Place, Target
from .recorded.place import RecordedPlace, bypassed, remove_recorded
from .resolve import At, resolve
from .scripted.names import resolve_compiled
from .scripted.place import CompiledPlace
from .scripted.surgery import remove_compiled, sites_compiled, switched_off_compiled
from .tables import Operation, Site, Table
from .tap import HeadPlace, TapPlace
from .wrappers import bare, refuse_compiled

__all__ = ["disabled", "graph", "operations", "remove", "sites"]

M = TypeVar("M", bound=nn.Module)
Row = tuple[str, nn.Module, Place | CompiledPlace | RecordedPlace]


def remove(model: M, at: At | None = None) -> M:
    """Undo: give back the class, the code and the behaviour that a place, or the whole model, had before.

        gs.remove(model, "layer3")
        gs.remove(model)

    Args:
        model: the operated model, also through its wrapper.
        at: the places, as in :func:`insert`; both sides of a module. None is every place.

    Raises:
        AddressError: where nothing was inserted.
    """
    root = bare(model)
    there = list(listing.places_of(root))
    lost = [place for path, place, _ in lost_places(root) if at is None or place.where.text(path) == at]
    gone = list(there)
    if at is not None:
        with contextlib.suppress(*[AddressError] * bool(lost)):  # what is lost may have left no such place behind
            gone = []
            gone = _at(root, there, at)
    if not gone and not lost:
        inserted = ", ".join(dict.fromkeys(repr(operation.address) for operation in operations(model)))
        raise AddressError(
            f"nothing was inserted {'in this model' if at is None else f'at {at!r}'}, so nothing can be removed. "
            + (f"There are operators at {inserted}." if inserted else "gs.operations(model) lists what is there.")
        )
    taps = {place.tap for _, _, place in gone if isinstance(place, HeadPlace | TapPlace)}
    gone += [
        row for row in there if isinstance(row[2], HeadPlace | TapPlace) and row[2].tap in taps and row not in gone
    ]
    _withdraw_whole([row for row in gone if isinstance(row[2], RecordedPlace | CompiledPlace)])
    withdraw([(module, place) for _, module, place in gone if isinstance(place, Place)])
    forget(root, lost)
    return model


def operations(model: nn.Module) -> Table[Operation]:
    """What was inserted where, in the order of the model: a list that prints as a table.

        gs.operations(model)[0].operator.lambd = 0.3

    A shared module is listed under each of its names. An operator that a tool has dropped since, by replacing the
    module that it was on, is a row of its own at the end that says so, with ``lost`` set.

    Args:
        model: the operated model, also through its wrapper.
    """
    root = bare(model)
    return Table(Operation, listing.operations_of(root))


def sites(model: nn.Module, pattern: str = "**", example: Example = None) -> Table[Site]:
    """Every address of a model that can be operated on: a list that prints as a table.

        gs.sites(model)                                 # every module
        gs.sites(model, "layer3.*")                     # the children of one
        gs.sites(model, "layer3.0:*", example=x)        # the ops in its forward, with their shapes

    Args:
        model: any model that :func:`insert` takes.
        pattern: a glob over addresses.
        example: inputs to run the model on once, as in :func:`insert`; only what runs is listed then.

    Raises:
        CaptureError: where the ops of a forward cannot be listed.
    """
    root = bare(model)
    asked = grammar.parse(pattern)
    if isinstance(root, torch.jit.ScriptModule):
        if example is not None:
            refuse_compiled(
                root, "a run on an example", "Which modules its code calls is known without one: leave it off."
            )
        return Table(Site, sites_compiled(root, asked))
    if isinstance(root, torch.fx.GraphModule):
        return Table(Site, listing.graph_sites(root, asked))
    rows = listing.op_sites if asked.where.kind == "op" else listing.module_sites
    return Table(Site, rows(root, asked, read_example(example)))


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Context manager in which the model computes and differentiates as if it had never been operated on.

        with gs.disabled(model):
            plain = model(x)

    Not for models that another thread is using: what is switched is the class of the modules.

    Args:
        model: the operated model, also through its wrapper.
    """
    modules = list(bare(model).modules())
    nodes = [module for module in modules if isinstance(module, NodePlace) and module.active]
    with without(modules), switched_off_compiled(modules), bypassed(modules):
        try:
            for node in nodes:
                node.active = False
            yield
        finally:
            for node in nodes:
                node.active = True


def graph(model: nn.Module, at: At) -> torch.fx.Graph:
    """The graph of the forward that owns a place, as it stands now, to read.

        print(gs.graph(model, "layer3.0:add"))

    Args:
        model: the operated model, also through its wrapper.
        at: one place, as in :func:`insert`.

    Raises:
        AddressError: where ``at`` does not name exactly one place.
        CaptureError: where fx cannot trace the forward that owns an op.
    """
    root = bare(model)
    refuse_compiled(root, "the graph of a place", "model.layer3.graph and model.layer3.code show what was compiled.")
    targets = resolve(root, at)
    expect_places(targets, 1, at)
    return listing.graph_of(targets[0])


def _withdraw_whole(gone: list[Row]) -> None:
    """Take out what is compiled or recorded, of each module all at once."""
    for owner in {id(module): module for _, module, _ in gone}.values():
        places = [place for _, module, place in gone if module is owner]
        if isinstance(owner, torch.fx.GraphModule):
            remove_recorded(owner, [place for place in places if isinstance(place, RecordedPlace)])
        elif isinstance(owner, torch.jit.ScriptModule):
            remove_compiled(owner, [place for place in places if isinstance(place, CompiledPlace)])


def _at(root: nn.Module, there: list[Row], at: At) -> list[Row]:
    if isinstance(root, torch.jit.ScriptModule):
        return _at_compiled(root, there, at)
    exactly = [row for row in there if isinstance(row[2], RecordedPlace) and row[2].where.text(row[0]) == at]
    targets: list[Target] = []
    with contextlib.suppress(*[AddressError] * bool(exactly)):  # a graph has lost the names of what it has dissolved
        targets += resolve(root, at)
    with contextlib.suppress(AddressError):  # an op, which has no input side
        targets += resolve(root, at, "input")
    named = {_key(target.key) for target in targets}
    # A recorded operator may have been inserted under another name for the same value.
    graphs = [target for target in targets if isinstance(target.module, torch.fx.GraphModule)]
    values = {(target.where.kind, value) for target in graphs for value in values_at(target)}

    def is_named(module: nn.Module, place: Place | CompiledPlace | RecordedPlace) -> bool:
        if isinstance(place, RecordedPlace):
            return any(row[2] is place for row in exactly) or any((place.where.kind, v) in values for v in place.values)
        return isinstance(place, Place) and _key((id(module), place.inner, place.where)) in named

    return [row for row in there if is_named(row[1], row[2])]


def _at_compiled(root: torch.jit.ScriptModule, there: list[Row], at: At) -> list[Row]:
    named: set[tuple[str, Where]] = set()
    with contextlib.suppress(SurgeryError):  # what works in place has no input side
        named = {(target.inner, target.where) for target in resolve_compiled(root, at, "input")}
    with contextlib.suppress(*[SurgeryError] * bool(named)):  # and what is no tuple no element of its output
        named |= {(target.inner, target.where) for target in resolve_compiled(root, at)}
    return [row for row in there if isinstance(row[2], CompiledPlace) and (row[2].path, row[2].where) in named]


def _key(key: tuple[int, str, Where]) -> tuple[int, str, Where]:
    """An op that is called once has two addresses, with and without ``@0``."""
    where = key[2]
    return *key[:2], dataclasses.replace(where, call=where.call or 0, source=(where.source[0], where.source[1] or 0))
