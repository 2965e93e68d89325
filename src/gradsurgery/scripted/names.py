"""From an address to the places of a ScriptModule that it names."""

import dataclasses
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

from torch import nn
from torch.jit import ScriptModule

from .. import address as grammar
from .._torchscript import (
    graph_of_method,
    has_compiled_value,
    inlined_graph_of,
    is_written,
    methods_of,
    names_of_arguments,
)
from ..address import Address, Where
from ..errors import AddressError, CaptureError, OperatorError, SurgeryError, closest
from ..place import Target
from .calls import Calls
from .values import argument_of, check_value, passes, type_of_output

__all__ = ["Names", "resolve_compiled"]

Side = Literal["output", "input"]


def resolve_compiled(root: ScriptModule, at: Any, side: Side = "output") -> list[Target]:
    """Every place that ``at`` names, each once, in the order of the model; ``inner`` is the path of its module.

    Raises:
        AddressError: where something in ``at`` names no place.
        CaptureError: where the place cannot be reached in compiled code.
        OperatorError: where no gradient passes there.
        SurgeryError: where the module was frozen.
    """
    names = Names(root)
    names.refuse_frozen()
    found = [target for one in _each(at) for target in names.targets(one, side)]
    order = {path: k for k, path in enumerate(names.calls.modules)}
    unique: dict[tuple[str, Where], Target] = {}
    for target in found:
        unique.setdefault((target.inner, target.where), target)
    return sorted(unique.values(), key=lambda target: order[target.inner])


def _each(at: Any) -> list[Any]:
    if not isinstance(at, list | tuple):
        return [at]
    if not at:
        raise AddressError("an empty list of places was given. Name at least one.")
    return [one for part in at for one in _each(part)]


class Names:
    """The modules of a ScriptModule, as an address finds them."""

    def __init__(self, root: ScriptModule) -> None:
        self.root = root
        self.calls = Calls(root)

    @cached_property
    def runs(self) -> dict[str, ScriptModule]:
        """The modules that compiled code calls, and whose value has a gradient."""
        return {path: module for path, module in self.calls.modules.items() if self.why_not(path) is None}

    def refuse_frozen(self) -> None:
        """Refuse what ``torch.jit.freeze`` has made.

        Raises:
            SurgeryError: saying so.
        """
        if len(self.calls.modules) == 1 and not has_compiled_value(self.root, "training"):
            raise SurgeryError(
                "the ScriptModule is frozen: torch.jit.freeze (which optimize_for_inference calls) has dissolved its "
                "submodules and turned its parameters into constants, so there is no place left and nothing to train. "
                "Operate on it before it is frozen."
            )

    def methods(self, path: str) -> list[str]:
        """The methods in which a module's forward was compiled: a trace has one for each call of the module.

        Raises:
            CaptureError: where a method may be one of these or may not.
        """
        module, called = self.calls.modules[path], self.calls.made.get(path, {})
        forwards = [name for name in methods_of(module) if name == "forward" or name.startswith("forward__")]
        if is_scripted(module, forwards):
            return forwards  # several where the class has overloads, as nn.LSTM
        more = [name for name in methods_of(module) if re.fullmatch(r"forward\d+", name) and name in called]
        kinds = {name: _kinds(graph_of_method(module, name)) for name in ("forward", *more)}
        if len({tuple(one) for one in kinds.values()}) > 1 or any(len(called.get(name, ())) > 1 for name in more):
            raise CaptureError(
                f"{path!r} was asked for, whose class has the methods {', '.join(kinds)}. It cannot be told whether "
                "these are calls of one forward, which a trace numbers like this, or methods of their own. "
                "Operate on the nn.Module that it was made from, then script or trace that."
            )
        return list(kinds)

    def why_not(self, path: str) -> str | None:
        """Why a module is no place, if it is none."""
        module = self.calls.modules[path]
        forwards = [name for name in methods_of(module) if name == "forward" or name.startswith("forward__")]
        if not forwards:
            return "it has no forward that was compiled: its children are called one by one, or its weights are read"
        if not any(name in self.calls.made.get(path, {}) for name in forwards):
            return (
                "no compiled method calls it: its code was inlined into its caller, or its caller reads its weights or "
                "walks its children, or it is a second name of a module that is called by its first"
            )
        if all(passes(type_of_output(module, name)) for name in forwards):
            return "it returns no tensor (a trace leaves out what a module passes on unchanged, such as nn.Identity)"
        return None

    def targets(self, at: Any, side: Side) -> list[Target]:
        """The places that one entry names."""
        if isinstance(at, str):
            return self._of_address(grammar.parse(at, side))
        return [self._target(path, Where(side)) for path in self._matching(at)]

    def _of_address(self, asked: Address) -> list[Target]:
        if asked.where.kind in ("op", "edge"):
            raise CaptureError(
                f"{str(asked)!r} was asked for, and an op inside of a forward that TorchScript has compiled has no "
                "name. Name a module, or operate on the nn.Module that it was made from, then script or trace that."
            )
        if asked.is_glob:
            found = [path for path in self.runs if grammar.matches(asked.path, path)]
            if not found:
                raise AddressError(f"no module that runs matches {asked.path!r}; {self.near(asked.path)}")
            return [self._target(path, asked.where) for path in found]
        if asked.path not in self.calls.modules:
            raise AddressError(f"the model has no module {asked.path!r}; {self.near(asked.path)}")
        return [self._target(asked.path, asked.where)]

    def near(self, asked: str) -> str:
        """The paths closest to one that is not there, for a message."""
        return closest(asked, (path for path in self.runs if path)) + ". gs.sites(model) lists every address."

    def _matching(self, at: Any) -> list[str]:
        keep: Callable[[str, ScriptModule], bool]
        if isinstance(at, nn.Module):
            found = [path for path, module in self.calls.modules.items() if module is at]
            if not found:
                raise AddressError(
                    f"a {type(at).__name__} object was given as the place, but it is no part of this ScriptModule. "
                    "Give one of its own modules, or an address: gs.sites(model) lists them."
                )
            return found
        if isinstance(at, type) and issubclass(at, nn.Module):
            # All that is left of a class in compiled code is its name.
            keep, asked = (lambda _, module: module.original_name == at.__name__), f"the type {at.__name__}"
        elif isinstance(at, re.Pattern):
            keep, asked = (lambda path, _: at.fullmatch(path) is not None), f"the pattern {at.pattern!r}"
        elif callable(at) and not isinstance(at, type):
            keep, asked = at, "the predicate"
        else:
            raise AddressError(
                f"{at!r} was given as the place, a {type(at).__name__}. Give an address such as 'layer3', a module "
                "type, a module of the model, a re.Pattern, a predicate (name, module) -> bool, or a list of these."
            )
        found = [path for path, module in self.runs.items() if keep(path, module)]
        if not found:
            kinds = list(dict.fromkeys(module.original_name for module in self.runs.values()))
            raise AddressError(
                f"{asked} matches no module that runs here. In TorchScript a module is known by the name of its class "
                f"alone, module.original_name; there are {', '.join(kinds[:12])}{', ...' * (len(kinds) > 12)}."
            )
        return found

    def _target(self, path: str, where: Where) -> Target:
        """The place at a module's boundary, handed down by every ``nn.Sequential`` to the child that is there."""
        inner, hops = path, 0
        while (below := self._child_of_sequential(inner, where)) is not None:
            inner, hops = below, hops + 1
        module = self.calls.modules[inner]
        if reason := self.why_not(inner):
            raise AddressError(
                f"{where.text(path)!r} names a module of this ScriptModule that cannot be operated on: {reason}. "
                "Name a module that is called: gs.sites(model) lists them."
            )
        for method in self.methods(inner):
            self._check(path, inner, module, method, where)
        if where.element and where.kind == "input":
            position = argument_of(module, self.methods(inner)[0], where.element[0], where.text(path))
            where = dataclasses.replace(where, element=(position, *where.element[1:]))
        return Target(module, path, where, hops, inner)

    def _child_of_sequential(self, path: str, where: Where) -> str | None:
        module = self.calls.modules[path]
        if module.original_name != "Sequential" or not _is_torchs(module, "container"):
            return None
        below = [other for other in self.calls.modules if other.rpartition(".")[0] == path and other != path]
        chosen = below[-1 if where.kind == "output" else 0] if below else None
        if chosen is None or self.why_not(chosen) is not None or len(self.calls.made[chosen].get("forward", ())) > 1:
            return None
        return chosen

    def _check(self, path: str, inner: str, module: ScriptModule, method: str, where: Where) -> None:
        address = where.text(path)
        if self._is_lifted(inner, module, method, where):
            raise CaptureError(
                f"{address!r} was asked for in a trace, or in code that cannot be told from one. Several values "
                f"{'leave' if where.kind == 'output' else 'enter'} that module, and a trace does not say which of them "
                "the module was given or has returned. Operate on the nn.Module that was traced, then trace it; or on "
                "a module that one value passes."
            )
        if where.kind == "output":
            check_value(type_of_output(module, method), where.element, address)
        else:
            self._check_received(module, method, where, address)
        graph = inlined_graph_of(module, method)
        received = list(graph.inputs())[1:]
        changes = [value for value in received if not passes(value.type()) and is_written(graph, value)]
        if changes and where.kind == "input":
            raise SurgeryError(
                f"side='input' was asked for {path!r}, which works in place on what it receives, or may do so: its "
                "caller would no longer see the change. Operate on the output of the module before it."
            )
        if changes and not all(self.calls.made[inner].get(method, [True])):
            raise OperatorError(
                f"{address!r} was to be operated on, but nobody reads what it returns: it works in place, and the "
                "gradient comes through the tensor that it changed, past the operator. Operate on the module before it."
            )

    def _check_received(self, module: ScriptModule, method: str, where: Where, address: str) -> None:
        kinds = [value.type() for value in graph_of_method(module, method).inputs()][1:]
        if where.element:
            position = argument_of(module, method, where.element[0], address)
            check_value(kinds[position], where.element[1:], address)
            return
        for kind in [kind for kind in kinds if not passes(kind)]:
            check_value(kind, (), address)
        if all(passes(kind) for kind in kinds):
            raise OperatorError(
                f"{address!r} was to be operated on, but its arguments hold no floating-point or complex tensor, and "
                "so have no gradient. Choose a place that does."
            )

    def _is_lifted(self, inner: str, module: ScriptModule, method: str, where: Where) -> bool:
        """Whether a trace may have made several values of one, or left some out."""
        if not inner or is_scripted(module, [method]):
            return False
        if where.kind == "output":
            return bool(type_of_output(module, method).kind() == "TupleType")
        return len(names_of_arguments(module, method)) != 1


def is_scripted(module: ScriptModule, methods: list[str]) -> bool:
    """Whether methods were certainly compiled from source, not traced.

    TorchScript remembers, in a file too, where in the original source a node comes from. A trace knows the line, and
    gives 0 for the column, where no expression of a method begins.
    """
    columns = [int(column) for name in methods for column in _COLUMN.findall(str(graph_of_method(module, name)))]
    return bool(columns) and all(columns)


_COLUMN = re.compile(r"# .+:[1-9]\d*:(\d+)$", re.MULTILINE)


def _is_torchs(module: ScriptModule, file: str) -> bool:
    return f"torch.nn.modules.{file}." in str(module._c.qualified_name)


def _kinds(graph: Any) -> list[str]:
    return sorted(node.kind() for node in graph.nodes() if node.kind() not in ("prim::Constant", "prim::GetAttr"))
