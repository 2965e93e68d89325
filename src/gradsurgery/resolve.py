"""From an address to the places of a model that it names."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule

from . import address as grammar
from .address import Address, Where
from .capture.record import Op, list_ops
from .errors import AddressError, CaptureError
from .graft import user_class, without
from .graph_module import resolve_nodes
from .place import Target
from .stacks import Stacks
from .tree import Tree, runs_never
from .wrappers import child, children, refuse_scripted

__all__ = ["At", "Ops", "ops_of_source", "resolve"]

One: TypeAlias = str | type[nn.Module] | nn.Module | re.Pattern[str] | Callable[[str, nn.Module], bool]
At: TypeAlias = One | list[Any] | tuple[Any, ...]
"""What the argument ``at`` may be."""

Ops: TypeAlias = Callable[[list[nn.Module]], list[list[Op]]]
"""The ops in the forward of each module; where an example is given, those that ran on it."""


def ops_of_source(owners: list[nn.Module]) -> list[list[Op]]:
    """The ops that can be known without running the model."""
    with without(owners):
        return [list_ops(owner) for owner in owners]


def resolve(
    root: nn.Module, at: At, side: Literal["output", "input"] = "output", ops: Ops = ops_of_source
) -> list[Target]:
    """Every place that ``at`` names, each once, in the order of the model.

    Args:
        root: the bare model.
        at: an address, a module type, a module of the model, a compiled pattern that matches a whole module path, a
            predicate of path and module, or a list of any of these.
        side: which side of a module a bare module path means.
        ops: how to list the ops in a module's forward.

    Raises:
        AddressError: where something in ``at`` names no place.
        CaptureError: where the ops of a forward cannot be listed.
    """
    tree = Tree(root)
    targets = [target for one in _each(at) for target in _resolve_one(tree, one, side, ops)]
    return list({target.key: target for target in reversed(targets)}.values())[::-1]


def _each(at: At) -> Iterator[One]:
    if isinstance(at, list | tuple):
        if not at:
            raise AddressError("an empty list of places was given. Name at least one.")
        for one in at:
            yield from _each(one)
    else:
        yield at


def _resolve_one(tree: Tree, at: One, side: Literal["output", "input"], ops: Ops) -> list[Target]:
    if isinstance(tree.root, GraphModule):
        return _resolve_in_graph(tree.root, at, side)
    if isinstance(at, str):
        return _resolve_address(tree, grammar.parse(at, side), side, ops)
    if isinstance(at, nn.Module):
        found, asked = [(path, m) for path, m in tree.all if m is at], f"a {type(at).__name__} object"
        if not found:
            raise AddressError(
                f"{asked} was given as the place, but it is no part of this model. Give one of its own modules, or an "
                "address: gs.sites(model) lists them."
            )
        if reason := tree.runs_never(found[0][0], at):
            raise AddressError(f"{asked} ({found[0][0]!r}) was given as the place, but {reason}.")
    elif isinstance(at, type) and issubclass(at, nn.Module):
        found, asked = tree.that_run(lambda path, m: isinstance(m, at)), f"the type {at.__name__}"
    elif isinstance(at, re.Pattern):
        found = tree.that_run(lambda path, m: at.fullmatch(path) is not None)
        asked = f"the pattern {at.pattern!r}, matched against whole paths,"
    elif callable(at) and not isinstance(at, type):
        found, asked = tree.that_run(at), "the predicate"
    else:
        raise _no_place(at)
    if not found:
        raise AddressError(f"{asked} matches no module that runs here. {tree.types()}")
    return [target for path, module in found for target in _boundaries(tree, path, module, Where(side))]


def _no_place(at: object) -> AddressError:
    return AddressError(
        f"{at!r} was given as the place, a {type(at).__name__}. Give an address such as 'layer3', a module type, a "
        "module of the model, a re.Pattern, a predicate (name, module) -> bool, or a list of these."
    )


def _resolve_address(tree: Tree, asked: Address, side: Literal["output", "input"], ops: Ops) -> list[Target]:
    owners: list[tuple[str, nn.Module]]
    if asked.is_glob:
        owners = tree.that_run(lambda path, m: grammar.matches(asked.path, path))
        if not owners:
            raise AddressError(f"no module that runs matches {asked.path!r}; {tree.near(asked.path)}")
    else:
        if inside := tree.graph_above(asked.path):
            prefix, graph = inside
            inner = asked.path.removeprefix(prefix).removeprefix(".")
            return resolve_nodes(graph, dataclasses.replace(asked, path=inner), prefix)
        module = tree.at(asked.path)
        if module is None:
            return _node_name(tree, asked, side, ops)
        if reason := tree.runs_never(asked.path, module):
            raise AddressError(
                f"{str(asked)!r} names a module that never runs: {reason}. Name a module that is called: "
                "gs.sites(model) lists them."
            )
        if asked.where.kind == "edge":
            there = ops([module])[0]
            for name, call in (asked.where.source, (asked.where.op, asked.where.call)):
                _ops_of(asked.path, module, Address(asked.path, Where("op", (), name, call)), there, must=True)
            return [Target(module, asked.path, asked.where)]
        if asked.where.kind != "op":  # in no graph, as was found above
            return [_boundary(tree, asked.path, module, asked.where)]
        owners = [(asked.path, module)]
    if asked.where.kind != "op":
        return [target for path, module in owners for target in _boundaries(tree, path, module, asked.where)]
    listed = zip(owners, ops([module for _, module in owners]), strict=True)
    found = [t for (path, m), there in listed for t in _ops_of(path, m, asked, there, must=not asked.is_glob)]
    if not found:
        raise AddressError(f"none of the {len(owners)} modules that match {asked.path!r} has an op {asked.where.op!r}.")
    return found


def _resolve_in_graph(root: GraphModule, at: One, side: Literal["output", "input"]) -> list[Target]:
    if isinstance(at, str):
        return resolve_nodes(root, grammar.parse(at, side))
    stacks, held = Stacks(root.graph), dict(root.named_modules())
    called = [(path, held[path]) for path in stacks.calls if path in held]
    if isinstance(at, nn.Module):
        paths, asked = [path for path, module in called if module is at], f"a {type(at).__name__} object"
    elif isinstance(at, type):
        paths, asked = (
            [path for path in stacks.calls if stacks.is_a(path, held.get(path), at)],
            f"the type {at.__name__}",
        )
    elif isinstance(at, re.Pattern):
        paths, asked = [path for path in stacks.calls if at.fullmatch(path)], f"the pattern {at.pattern!r}"
    elif callable(at):
        paths, asked = [path for path, module in called if at(path, module)], "the predicate"
    else:
        raise _no_place(at)
    paths = [path for path in paths if stacks.passes_on(path)]
    if not paths:
        raise AddressError(f"{asked} matches nothing that this graph calls. gs.sites(model) lists every address.")
    return [target for path in paths for target in resolve_nodes(root, Address(path, Where(side)))]


def _ops_of(path: str, owner: nn.Module, asked: Address, there: list[Op], must: bool) -> list[Target]:
    """The ops of one owner that an address names; with ``must``, none is an error."""
    name, call = asked.where.op, asked.where.call
    if grammar.is_glob(name):
        names = [op.name for op in there if grammar.matches(name.replace(".", "\0"), op.name.replace(".", "\0"))]
        calls = [dataclasses.replace(asked.where, op=n, call=grammar.ALL_CALLS) for n in dict.fromkeys(names)]
        if calls or not must:
            return [Target(owner, path, where) for where in calls]
    same = [op for op in there if op.name == name]
    if not same and not must:
        return []
    owner_name = f"{path or 'the root'} ({user_class(owner).__name__})"
    if not same:
        listed = ", ".join(repr(f"{path}:{n}") for n in dict.fromkeys(op.name for op in there))
        raise AddressError(
            f"{str(asked)!r} names the op {name!r}, which the forward of {owner_name} does not have"
            + (
                f" as it runs now. Its ops: {listed}. Where a mode or an argument decides, give example=..."
                if listed
                else ": it has no op at all, or it did not run on the example. gs.sites(model, example=...) tells."
            )
        )
    calls_there = "; ".join(f"{path}:{op.name}@{op.index} at {op.source}: {op.text}" for op in same)
    if call is None and len(same) > 1:
        raise AddressError(
            f"{str(asked)!r} names the op {name!r}, which {owner_name} calls {len(same)} times: {calls_there}. "
            f"Say which one, or '{path}:{name}@*' for all of them."
        )
    if call is not None and call != grammar.ALL_CALLS and call >= len(same):
        raise AddressError(
            f"{str(asked)!r} names call {call} of {name!r}, but {owner_name} calls it {len(same)} "
            f"time{'s' if len(same) > 1 else ''}, counted from 0: {calls_there}."
        )
    if call is not None and call != grammar.ALL_CALLS and not all(op.certain for op in same):
        raise CaptureError(
            f"{str(asked)!r} names call {call} of {name!r}, but which of its calls run in {owner_name}, and in which "
            f"order, cannot be told without running it: {calls_there}. Pass example=... with inputs of the model, name "
            f"all of them with '{path}:{name}@*', or operate on the output of a module."
        )
    return [Target(owner, path, asked.where)]


def _node_name(tree: Tree, asked: Address, side: str, ops: Ops) -> list[Target]:
    """An address that torchvision's feature extraction would print: ``layer1.0.relu_1`` is ``layer1.0:relu@1``."""
    owner_path, _, node = asked.path.rpartition(".")
    owner = tree.at(owner_path)
    if owner is not None and asked.where.kind == "output":
        name, _, counter = node.rpartition("_")
        there = _try_ops(ops, owner)
        for op, call in ((node, 0), (name, int(counter) if counter.isdigit() else -1)):
            if 0 <= call < there.count(op):
                where = Where("op", asked.where.element, op, call if there.count(op) > 1 else None)
                return [Target(owner, owner_path, where)]
    raise AddressError(f"the model has no module {asked.path!r}; {tree.near(asked.path)}")


def _try_ops(ops: Ops, owner: nn.Module) -> list[str]:
    try:
        return [op.name for op in ops([owner])[0]]
    except CaptureError:
        return []


def _boundaries(tree: Tree, path: str, module: nn.Module, where: Where) -> list[Target]:
    """The place at a module's boundary, or those in the graph that the module is a part of."""
    if tree.has_graphs and (inside := tree.graph_above(path)):
        prefix, graph = inside
        inner = path.removeprefix(prefix).removeprefix(".")
        return resolve_nodes(graph, Address(inner, where), prefix)
    return [_boundary(tree, path, module, where)]


def _boundary(tree: Tree, path: str, module: nn.Module, where: Where) -> Target:
    """The place at a module's boundary, handed down by every ``nn.Sequential`` to the child that is there."""
    hops, last = 0, where.kind == "output"
    while _is_plain_sequential(module):
        inner = child(module, children(module)[-1 if last else 0])
        if (
            inner is None
            or isinstance(inner, torch.jit.ScriptModule)
            or runs_never(module, inner)
            or tree.is_shared(inner)
        ):
            break
        module, hops = inner, hops + 1
    refuse_scripted(module, path)
    return Target(module, path, where, hops)


def _is_plain_sequential(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Sequential)
        and len(children(module)) > 0
        and user_class(module).forward is nn.Sequential.forward
        and "forward" not in module.__dict__
    )
