"""Generated classes: a subclass of the user's class whose forward runs through the places, one for all instances."""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import nn

from ._torch import is_overlay
from .address import Where
from .capture import sealed
from .capture.rewrite import EdgeEdit, OpEdit, rewrite
from .errors import CaptureError, SurgeryError
from .hiding import hiding, refuse_walks
from .methods import (
    Patch,
    as_method,
    count_changes,
    head_methods,
    method,
    methods,
    patched_forward,
    refuse_changes,
    renamed,
    stand_ins,
)
from .place import Form, Graft

__all__ = ["base_of", "body_of", "dressed", "layers", "stack", "veiled"]


def layers(cls: type) -> tuple[list[type], type]:
    """The overlays that torch put on a class, topmost first, and what lies beneath them."""
    overlays = []
    while is_overlay(cls):
        overlays.append(cls)
        cls = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
    return overlays, cls


def base_of(core: type) -> type[nn.Module]:
    """The class that a generated class stands in for; any other class stands for itself."""
    return core.__dict__.get("_gs_base", core)


def stack(overlays: Sequence[type], old: type, new: type) -> type:
    """The same overlays over another class."""
    for overlay in reversed(overlays):
        bases = tuple(new if base is old else base for base in overlay.__bases__)
        old, new = overlay, type(new)(overlay.__name__, bases, body_of(overlay))
    return new


def body_of(cls: type) -> dict[str, Any]:
    """What a class defines itself, to define it again."""
    return {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}


def dressed(cls: type, forms: tuple[Form, ...], patch: Patch) -> type:
    """The class for an instance of ``cls`` with these places: generated beneath the overlays that it has."""
    overlays, core = layers(cls)
    base: Any = base_of(core)
    try:
        generated = generated_class(base, forms, patch, base.forward)
    except TypeError:  # a default in the patched signature cannot be hashed, and so not be cached
        generated = generated_class.__wrapped__(base, forms, patch, base.forward)
    return stack(overlays, core, generated)


class StandIn(type):
    """Metaclass of the generated classes: calling one builds the class that it stands in for.

    ``sequential[1:]`` and many conversions call ``type(module)(...)``; what they build was never operated on.
    ``cls.__new__(cls)``, which copies use, still makes an instance of the generated class.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._gs_base(*args, **kwargs)  # type: ignore[attr-defined]


@functools.cache
def _stand_in(metaclass: Any) -> type:
    return StandIn if metaclass is type else type("StandIn", (StandIn, metaclass), {})


@functools.cache
def generated_class(base: Any, forms: tuple[Form, ...], patch: Patch, written: Any) -> type[nn.Module]:
    """The subclass of ``base`` whose forward runs through the places; one for all instances with the same places.

    ``written`` is ``base.forward`` as it is now: it is part of the key, since people assign another to the class.
    """
    patched = patched_forward(base, patch)
    edits = tuple(_edit(form.where, method(k)) for k, form in enumerate(forms) if form.where.kind in ("op", "edge"))
    body: dict[str, Any] = dict(rewrite(base, edits, patched)) if edits else {}  # a copy: the other is cached
    copied = dict.fromkeys(["forward", *(name for name in body if not name.startswith("_gs_"))])
    functions = [(name, inspect.getattr_static(base, name, None)) for name in copied]
    kept = tuple((name, held) for name, held in functions if isinstance(held, types.FunctionType))
    forward = body.get("forward") or patched or as_method(base)
    inputs = [method(k) for k, form in enumerate(forms) if form.where.kind == "input"]
    outputs = [method(k) for k, form in enumerate(forms) if form.where.kind == "output"]
    heads = any(form.where.kind == "head" for form in forms)
    if inputs or outputs or heads:
        chosen = any(form.where.kind == "input" and form.where.element for form in forms)
        graph = sealed.seal(forward, inputs, outputs, chosen, heads)
        body = {**body, sealed.KEPT: renamed(forward, sealed.KEPT), "forward": sealed.define(graph, forward)}
        body["_gs_graph"] = graph
    elif patched is not None and not edits:
        body["forward"] = patched
    whole = bool(inputs) and not sealed.is_mirrored(body["_gs_graph"])
    for k, form in enumerate(forms):
        if form.where.kind != "head":
            body.update(methods(k, form, sealed.positional(forward) if whole else None))
    if heads:
        body |= head_methods(forms)
    if inputs:
        around: dict[str, Any] = {sealed.COUNT_CHANGES: count_changes, sealed.REFUSE_CHANGES: refuse_changes}
        body |= {name: renamed(function, name) for name, function in around.items()}
    is_counted = any("_gs" in _free_names(held) for held in body.values())
    if any(form.child for form in forms):
        refuse_walks(base)
        body.update(hiding(base))
    if is_counted:
        body["__prepare_scriptable__"] = _refuse_script
    becomes = getattr(base, "cls_to_become", None)
    if becomes is not None:  # a lazy module sets its class by itself, at its first forward
        body["cls_to_become"] = generated_class(becomes, forms, patch, becomes.forward)
    cls: type[nn.Module]

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = super(cls, self).__reduce_ex__(protocol)
        make, args, *rest = reduced
        make, *args = [base if value is type(self) else value for value in (make, *args)]
        state = (rest[0] if rest else None, _carried(self))
        return (regrafted, (forms, patch, make, tuple(args)), state, *rest[1:])

    def __setstate__(self: nn.Module, state: Any) -> None:
        written, carried = state
        if written is not None:
            super(cls, self).__setstate__(written)  # type: ignore[misc]
        _receive(self, carried)

    def copying(name: str) -> Callable[..., nn.Module]:
        def copied(self: nn.Module, *memo: Any) -> nn.Module:
            made: nn.Module = getattr(super(cls, self), name)(*memo)
            if made.__dict__.get("_gs_graft") is None:
                object.__setattr__(made, "__class__", dressed(type(made), forms, patch))
                _receive(made, copy.deepcopy(_carried(self), *memo) if memo else _carried(self))
            return made

        return copied

    body |= {name: copying(name) for name in ("__copy__", "__deepcopy__") if hasattr(base, name)}
    body |= {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "__setstate__": __setstate__,
        "_gs_base": base,
    }
    body["_gs_written"] = kept
    try:
        cls = _extended(base, body)
    except TypeError as error:
        raise SurgeryError(
            f"the class {base.__qualname__} cannot be extended ({error}), so its instances cannot be operated on. "
            "Operate on the module that holds it, or on a child."
        ) from error
    return cls


def _free_names(held: Any) -> tuple[str, ...]:
    return getattr(getattr(inspect.unwrap(held), "__code__", None), "co_freevars", ())


def _refuse_script(self: nn.Module) -> NoReturn:
    graft: Graft = self.__dict__["_gs_graft"]
    counted = ", ".join(repr(place.where.text("")) for place in graft.places if place.where.kind in ("op", "edge"))
    raise CaptureError(
        f"torch.jit.script was asked for a {type(self).__name__} that is operated on at {counted}. Which call that is "
        "can be told only as the forward runs, by counters that TorchScript has no form for. Operate on an op that "
        "stands once and outside of branches and loops, on a child, or trace the model instead."
    )


class _Quiet(nn.Module):
    """Before a class whose ``__init_subclass__`` registers, checks or asks for options: a generated class is not news.

    An ``nn.Module`` only so that instances have the same layout, without which their class could not be set.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        pass


def _extended(base: Any, body: dict[str, Any]) -> type[nn.Module]:
    metaclass: Any = type(base)
    hooks = [vars(cls)["__init_subclass__"] for cls in base.__mro__[:-1] if "__init_subclass__" in vars(cls)]
    silenced = bool(hooks) and not any(map(_makes_forwards, hooks))
    return _stand_in(metaclass)(base.__name__, (_Quiet, base) if silenced else (base,), body)


def _makes_forwards(hook: Any) -> bool:
    """Whether an ``__init_subclass__`` has to do with ``forward``, so that it must see that of the generated class too.

    The layers of transformers are wrapped so, and only the outermost wrapper does their activation checkpointing.
    """
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return code is None or "forward" in (*code.co_names, *code.co_consts)


def _carried(module: nn.Module) -> tuple[Graft, dict[str, nn.Module]]:
    """What a copy needs beside the state that the user's class chooses to keep."""
    graft: Graft = module.__dict__["_gs_graft"]
    return graft, {name: module._modules[name] for name in graft.children}  # type: ignore[misc]


def _receive(module: nn.Module, carried: tuple[Graft, dict[str, nn.Module]]) -> None:
    graft, operators = carried
    for name, operator in operators.items():
        module._modules.setdefault(name, operator)
    module.__dict__.setdefault("_gs_graft", graft)
    module.__dict__.update(stand_ins(module.__dict__["_gs_graft"]))


def _edit(where: Where, method: str) -> OpEdit | EdgeEdit:
    if where.kind == "edge":
        return EdgeEdit(where.source, (where.op, where.call), method)
    return OpEdit(where.op, where.call, method)


def regrafted(
    forms: tuple[Form, ...], patch: Patch, make: Callable[..., nn.Module], args: tuple[Any, ...]
) -> nn.Module:
    module = make(*args)
    object.__setattr__(module, "__class__", dressed(type(module), forms, patch))
    return module


@functools.cache
def veiled(base: Any) -> type[nn.Module]:
    """``base`` as it was, for a module that still has operators among its children, out of sight of its forward."""
    body = {**hiding(base), "__module__": base.__module__, "__qualname__": base.__qualname__}
    return _extended(base, {**body, "_gs_base": base, "_gs_veiled": True})
