"""The ops of a forward, listed: from one run on an example, or without one.

Both go by the very sites and counters that an edit goes by, so that ``relu@1`` means the same call to all of them.
"""

import ast
import collections
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .._torch import is_overlay
from ..errors import CaptureError
from .anatomy import Anatomy, Unit, anatomy
from .flow import Site, count, in_order
from .preserve import preserved
from .rewrite import Orders, write
from .runtime import holds_tensor, name_of
from .source import accepts

__all__ = ["Op", "list_ops", "record_ops"]


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


Event = tuple[Site, str, Any, Any]


class _Recorder:
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
        if name is not None and _counts(value):
            is_tensor = isinstance(value, torch.Tensor)
            events.append((site, name, *((tuple(value.shape), value.dtype) if is_tensor else (None, None))))

    def end(self, owner: nn.Module, events: list[Event], whole: bool, value: Any = None) -> Any:
        if whole:
            self.calls.setdefault(id(owner), []).append(events)
        return value

    def close(self, events: list[Event]) -> None:
        """Nothing is checked at the end of a call."""

    def carry(self, function: Callable[..., Any], events: list[Event]) -> Callable[..., Any]:
        return functools.partial(function, _gs_count=events)

    def carried(self, events: list[Event]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: functools.wraps(function)(self.carry(function, events))


def record_ops(
    root: nn.Module, owners: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, list[Op]]:
    """Run a model once on an example, without gradients, and list the ops in the forwards of some of its modules.

    Everything that the run changes is put back: see :func:`.preserve.preserved`. A module that does not run has an
    empty list; of one that runs several times the first run counts.

    Raises:
        CaptureError: where a forward cannot be opened, or the model itself fails on the example.
    """
    found: dict[int, _Recorder] = {}
    with preserved(root), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for k, owner in enumerate(owners):
            found[k] = _attach(owner)
        try:
            root(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"asked for the ops of a run on the example; during that run the model raised "
                f"{type(error).__name__}: {error}. Give an example that the model takes as it is now (shape, dtype, device)."
            ) from error
        finally:
            calls = {k: recorder.calls.pop(id(owners[k]), []) for k, recorder in found.items()}
    return {k: _ops(runs[0]) if runs else [] for k, runs in calls.items()}


def list_ops(module: nn.Module) -> list[Op]:
    """The ops in the forward of a module, without an example.

    A forward without branches and loops is listed as it is written. Of any other, a trace by torch.fx with every child
    a leaf tells in which order the ops run in the present mode; where that fails too, the list is that of the source:
    every branch, one round of every loop, and every ``x + y`` that is not known to add numbers.

    Raises:
        CaptureError: where the forward cannot be opened.
    """
    body = anatomy(_user_class(module), _patched(module))
    _check_instance(module, body)
    written = [(site, site.name, None, None) for site in in_order(body.root)]
    if not _is_straight(body):
        traced = _traced(module)
        if traced is not None:
            return _ops(traced)
    return _ops(event for event in written if event[1] is not None)  # type: ignore[misc]


def _is_straight(body: Anatomy) -> bool:
    """Whether every site runs once, in the order in which it is written."""
    sites = in_order(body.root)
    if len(set(sites)) < len(sites) or not all(site.sure and site.name is not None for site in sites):
        return False
    counted = count(body.root, lambda site: (1, 1))
    return not counted.loose and all(counted.before.get(site) == (k, k) for k, site in enumerate(sites))


def _traced(module: nn.Module) -> list[Event] | None:
    with preserved(module):
        recorder = _attach(module)
        try:
            # As in a call that gives no optional argument.
            defaults = {
                parameter.name: parameter.default
                for parameter in inspect.signature(module.forward).parameters.values()
                if parameter.default is not parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY
            }
            _Leaves().trace(module, concrete_args=defaults)
        except Exception:  # whatever a forward raises when it is given proxies
            return None
        finally:
            runs = recorder.calls.pop(id(module), [])
    return runs[0] if runs else None


class _Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _counts(value: Any) -> bool:
    if isinstance(value, torch.fx.Proxy):
        return not _is_number(value.node)
    if isinstance(value, tuple | list):
        return any(_counts(item) for item in value)
    if isinstance(value, dict):
        return any(_counts(item) for item in value.values())
    return holds_tensor(value)


_NUMBER_OPS = ("size", "dim", "numel", "stride", "item", "tolist", "ndimension", "storage_offset")


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a traced value is a number: a shape, or what was computed from numbers alone."""
    if node.op == "call_method":
        return node.target in _NUMBER_OPS
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if name == "getattr":
        return node.args[1] in ("shape", "ndim", "dtype", "device", "is_cuda", "layout")
    # Only what Python's operators make of numbers are numbers: ``torch.zeros(h, w)`` is made of them too.
    inputs = node.all_input_nodes
    module = getattr(node.target, "__module__", "")
    return module in ("_operator", "math", "builtins") and bool(inputs) and all(map(_is_number, inputs))


def _ops(events: Iterable[Event]) -> list[Op]:
    ran: collections.Counter[str] = collections.Counter()
    ops = []
    for site, name, shape, dtype in events:
        ops.append(Op(name, ran[name], site.source, site.text, shape, dtype, site.kind))
        ran[name] += 1
    return ops


def _attach(module: nn.Module) -> _Recorder:
    """Let a module record; what this changes is for the caller to put back."""
    body = anatomy(_user_class(module), _patched(module))
    _check_instance(module, body)
    recorder, namespace = _recording(body)
    module.__dict__.pop("forward", None)
    cls = type(module)
    object.__setattr__(module, "__class__", type(cls)(cls.__name__, (cls,), dict(namespace)))
    return recorder


@functools.lru_cache(maxsize=1024)
def _recording(body: Anatomy) -> tuple[_Recorder, dict[str, Callable[..., Any]]]:
    orders, sites = Orders(), []
    closed = _closed(body)
    for unit in body.units.values():
        for site in () if unit in closed else unit.sites.values():
            orders.slots[unit, site.node] = [len(sites)]
            sites.append(site)
    orders.plan = recorder = _Recorder(sites)
    namespace = write(body, orders)
    # Even a forward with nothing in it tells that it ran.
    return recorder, namespace


def _closed(body: Anatomy) -> set[Unit]:
    """The functions that no counter can be passed to, and those that only they may lead to."""
    closed = {
        unit
        for unit in body.units.values()
        if unit.names.rebinds_self()
        or (unit is not body.root and not all(accepts(wrapper, "_gs_count") for wrapper in unit.wrappers))
    }
    while more := {reach.unit for unit in closed for reach in unit.reaches.values()} - closed:
        closed |= more
    return closed


def _check_instance(module: nn.Module, body: Anatomy) -> None:
    patched = [u.key for u in body.units.values() if u.public and u is not body.root and u.key in module.__dict__]
    if patched:
        raise CaptureError(
            f"asked for the ops of {type(module).__qualname__} ({body.root.parsed.where(ast.Pass())}); its method "
            f"'{patched[0]}' is replaced on this very instance, out of reach of an edit of the class. "
            "Take the replacement off, or operate on a child or on the output."
        )


def _user_class(module: nn.Module) -> type:
    """The class that the user wrote, beneath those that were generated for this instance."""
    cls = type(module)
    while is_overlay(cls):
        cls = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
    return cls.__dict__.get("_gs_base", cls)  # type: ignore[no-any-return]


def _patched(module: nn.Module) -> Callable[..., Any] | None:
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
