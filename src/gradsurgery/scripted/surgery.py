"""Insert, remove, list and switch off: what the public calls do where the model is a ScriptModule."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.jit import ScriptModule

from .. import address as grammar
from .._torchscript import (
    adopt,
    compiled_type,
    compiled_value,
    has_compiled_value,
    missing_names_reported,
    owner_of,
    register,
    set_compiled_value,
    without_announcements,
    wrap,
)
from ..address import Where
from ..errors import CaptureError, OperatorError, SurgeryError, first_line
from ..place import Target
from ..tables import Site
from .copies import copied
from .edit import put, take_out
from .names import Names
from .place import CompiledPlace, ScriptPlace, place_at, places_in, walk_compiled

__all__ = ["insert_compiled", "remove_compiled", "sites_compiled", "switched_off_compiled"]


def insert_compiled(root: ScriptModule, batches: list[list[tuple[Target, nn.Module]]], inplace: bool) -> ScriptModule:
    """Operate on a ScriptModule; in place, its Python objects stand for the operated copy afterwards.

    Args:
        root: the ScriptModule.
        batches: in the order in which they come at a place, operators of one kind each.
        inplace: False gives the copy, and leaves ``root`` alone.

    Raises:
        OperatorError: where TorchScript cannot compile an operator.
        SurgeryError: where the module is a part of another, or cannot be copied.
    """
    with missing_names_reported():
        if inplace:
            _refuse_part(root)
        compiled = [_compiled(batch) for batch in batches]
        copy = copied(root)
        names = Names(copy)
        for batch in compiled:
            _insert(names, batch)
        return _handed_over(root, wrap(copy), inplace)


def _insert(names: Names, batch: list[tuple[Target, ScriptModule]]) -> None:
    """One slot for each type: instances of a type share their graphs, so all of them get the operator as a child."""
    modules = names.calls.modules
    groups: dict[tuple[str, Where], list[tuple[Target, ScriptModule]]] = {}
    for target, operator in batch:
        groups.setdefault((_kind(modules[target.inner]), target.where), []).append((target, operator))
    for (kind, where), group in groups.items():
        name = _free_name(modules.values())
        same = [module for module in modules.values() if _kind(module) == kind]
        idle = _scripted(ScriptPlace(group[0][1], where, 0, placed=False))
        for module in same:
            register(module, name, idle)
        for target, operator in group:
            register(modules[target.inner], name, _scripted(ScriptPlace(operator, where, target.hops, placed=True)))
        for method in names.methods(group[0][0].inner):
            put(same[0], method, name, compiled_type(idle), where)


def _kind(module: ScriptModule) -> str:
    return str(compiled_type(module).annotation_str)


def remove_compiled(root: ScriptModule, gone: list[CompiledPlace]) -> None:
    """Take operators out again, in place.

    Raises:
        SurgeryError: where the module is a part of another.
    """
    with missing_names_reported():
        _refuse_part(root)
        copy = copied(root)
        modules = dict(walk_compiled(copy))
        for place in gone:
            set_compiled_value(place_at(modules[place.path], place.name), "placed", False)
        left = {place.name for place in places_in(copy)}
        names = {place.name for place in gone} - left
        for module in modules.values():
            if any(has_compiled_value(module, name) for name in names):
                take_out(module, names)
        shared = copied(copy, without=names)
        _handed_over(root, shared, inplace=True)


@contextlib.contextmanager
def switched_off_compiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which no operator of those of these that are ScriptModules acts."""
    roots = [module for module in modules if isinstance(module, ScriptModule)]
    held = [place.held for root in roots for place in places_in(root) if compiled_value(place.held, "active")]
    try:
        for one in held:
            set_compiled_value(one, "active", False)
        yield
    finally:
        for one in held:
            set_compiled_value(one, "active", True)


def sites_compiled(root: ScriptModule, asked: grammar.Address) -> Iterator[Site]:
    """The modules of a ScriptModule that can be operated on.

    Raises:
        CaptureError: where ops are asked for.
        SurgeryError: where the module was frozen.
    """
    if asked.where.kind == "op":
        raise CaptureError(
            f"{str(asked)!r} was asked for, and ops inside of a forward that TorchScript has compiled have no names. "
            "gs.sites(model) lists the modules; model.code shows what was compiled."
        )
    names = Names(root)
    names.refuse_frozen()
    for path, module in names.runs.items():
        if grammar.matches(asked.path, path):
            yield Site(path, "module", module.original_name)


def _refuse_part(root: ScriptModule) -> None:
    name, is_part = owner_of(root)
    if is_part:
        raise SurgeryError(
            f"an operation was asked for on a ScriptModule that is the child {name!r} of another one, which has "
            "compiled it in and would go on calling it as it is. Operate on the whole, with the address of the place "
            "in it; or give inplace=False for an operated module of its own."
        )


def _handed_over(root: ScriptModule, copy: ScriptModule, inplace: bool) -> ScriptModule:
    if not inplace:
        return copy
    adopt(root, copy)
    return root


def _compiled(batch: list[tuple[Target, nn.Module]]) -> list[tuple[Target, ScriptModule]]:
    """The operators as TorchScript; one that serves several places stays one."""
    done: dict[int, ScriptModule] = {}
    for target, operator in batch:
        if id(operator) not in done:
            operator.train(getattr(target.module, "training", True))
            done[id(operator)] = _scripted(operator)
    return [(target, done[id(operator)]) for target, operator in batch]


def _scripted(module: nn.Module) -> ScriptModule:
    with without_announcements():
        try:
            return torch.jit.script(module)
        except SurgeryError:
            raise
        except Exception as error:  # of many kinds, one for each thing that TorchScript does not know
            raise OperatorError(
                f"a {type(module).__name__} was to be inserted in a ScriptModule, and TorchScript cannot compile it: "
                f"{first_line(error)} Give an operator in its language."
            ) from error


def _free_name(modules: Iterable[ScriptModule]) -> str:
    taken = list(modules)
    k = 0
    while any(has_compiled_value(module, f"gs_{k}") for module in taken):
        k += 1
    return f"gs_{k}"
