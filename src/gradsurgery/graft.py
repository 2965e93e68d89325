"""The graft: a module keeps its identity and its state, and gets a generated subclass of its own class.

``parametrize`` and ``fully_shard`` change classes in the same way. State, children, hooks and methods are not touched,
and undoing is setting the class back. What lives on the instance is one attribute, ``_gs_graft``: the places.

The footguns, each guarded below:

* Code shared, coefficients not: one class per (class, places) serves every instance, so a generated class holds no
  operator. It reads them through the instance.
* ``type(module)(...)`` and ``sequential[1:]`` must build the class that the user wrote: see :class:`_StandIn`.
* A generated class cannot be imported by name, so pickle and deepcopy go through :func:`_regraft`.
* Classes that torch puts on top of the user's (parametrized, FSDP2) stay on top: tools that take them off again look
  for what lies directly beneath.
* A ``forward`` patched on the instance shadows the class: it is taken off the instance while the graft is there.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import operators
from ._torch import is_overlay
from .address import Where
from .capture import sealed
from .capture.code import compile_function
from .capture.rewrite import OpEdit, rewrite
from .errors import SurgeryError
from .place import Graft, Place

__all__ = ["graft_of", "is_plain", "regraft", "user_class", "without"]

Form = tuple[Where, str | None, type[nn.Module]]
"""What the code of a generated class depends on, for one place: where, the child's name, the operator's class."""

Patch = str | inspect.Signature | None
"""A forward patched on the instance: the method of its class that it is, or else the signature it shows."""


def graft_of(module: nn.Module) -> Graft | None:
    """The places of a module that is operated on, or None."""
    return module.__dict__.get("_gs_graft")


def user_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote, beneath every class that was generated for this instance."""
    return _base(_layers(type(module))[1])


def regraft(module: nn.Module, places: Iterable[Place]) -> None:
    """Give a module exactly these places; none at all is the exact undo.

    Raises:
        SurgeryError: where another tool has patched ``forward`` on top of the graft, or the class cannot be extended.
    """
    old = graft_of(module)
    if old is None:
        graft = Graft(places, type(module), module.__dict__.get("forward"))
    elif "forward" in module.__dict__ and _is_dressed(module):
        raise SurgeryError(
            f"another tool has wrapped the forward of this {user_class(module).__name__} since it was operated on, and "
            "holds on to the operated one. Take that wrapper off first, then operate again or remove."
        )
    else:
        graft = Graft(places, old.before, old.patched)
    if graft.places:
        _dress(module, graft)
    elif old is not None:
        _undress(module, old)
    for name in [name for name in module.__dict__ if name.startswith("_gs_")]:
        del module.__dict__[name]
    if graft.places:
        module.__dict__["_gs_graft"] = graft
        module.__dict__.update(dict.fromkeys(_live_names(graft), 0.0))


class without:  # noqa: N801 - a context manager, used like a function
    """Context manager: these modules run as if they had never been operated on, and then as before."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [module for module in modules if _is_dressed(module)]

    def __enter__(self) -> None:
        for module in self._modules:
            _undress(module, module.__dict__["_gs_graft"])

    def __exit__(self, *exception: object) -> None:
        for module in self._modules:
            graft = graft_of(module)
            if graft is not None:
                _dress(module, graft)


def _dress(module: nn.Module, graft: Graft) -> None:
    forms = tuple((place.where, place.child, type(place.operator(module))) for place in graft.places)
    dressed = _dressed(type(module), forms, _patch_of(module, graft.patched))
    module.__dict__.pop("forward", None)
    object.__setattr__(module, "__class__", dressed)


def _undress(module: nn.Module, graft: Graft) -> None:
    overlays, core = _layers(type(module))
    before_overlays, before_core = _layers(graft.before)
    unchanged = _base(core) is before_core and list(map(_body, overlays)) == list(map(_body, before_overlays))
    object.__setattr__(module, "__class__", graft.before if unchanged else _stack(overlays, core, _base(core)))
    if graft.patched is not None:
        module.__dict__["forward"] = graft.patched


def _is_dressed(module: nn.Module) -> bool:
    return "_gs_base" in _layers(type(module))[1].__dict__


def _layers(cls: type) -> tuple[list[type], type]:
    """The overlays that torch put on a class, topmost first, and what lies beneath them."""
    overlays = []
    while is_overlay(cls):
        overlays.append(cls)
        cls = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
    return overlays, cls


def _base(core: type) -> type[nn.Module]:
    """The class that a generated class stands in for; any other class stands for itself."""
    return core.__dict__.get("_gs_base", core)


def _stack(overlays: Sequence[type], old: type, new: type) -> type:
    """The same overlays over another class."""
    for overlay in reversed(overlays):
        bases = tuple(new if base is old else base for base in overlay.__bases__)
        old, new = overlay, type(new)(overlay.__name__, bases, _body(overlay))
    return new


def _body(cls: type) -> dict[str, Any]:
    return {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}


def _dressed(cls: type, forms: tuple[Form, ...], patch: Patch) -> type:
    overlays, core = _layers(cls)
    base: Any = _base(core)
    try:
        generated = generated_class(base, forms, patch)
    except TypeError:  # a default in the patched signature cannot be hashed, and so not be cached
        generated = generated_class.__wrapped__(base, forms, patch)
    return _stack(overlays, core, generated)


def _patch_of(module: nn.Module, patched: Callable[..., Any] | None) -> Patch:
    if patched is None:
        return None
    name = getattr(patched, "__name__", "forward")
    is_method = getattr(patched, "__self__", None) is module and name != "forward"
    if is_method and getattr(user_class(module), name, None) is patched.__func__:  # type: ignore[attr-defined]
        return name
    return inspect.signature(patched)


class _StandIn(type):
    """Metaclass of the generated classes: calling one builds the class that it stands in for.

    ``sequential[1:]`` and many conversions call ``type(module)(...)``; what they build was never operated on.
    ``cls.__new__(cls)``, which copies use, still makes an instance of the generated class.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._gs_base(*args, **kwargs)  # type: ignore[attr-defined]


@functools.cache
def _stand_in(metaclass: Any) -> type:
    return _StandIn if metaclass is type else type("StandIn", (_StandIn, metaclass), {})


@functools.cache
def generated_class(base: Any, forms: tuple[Form, ...], patch: Patch = None) -> type[nn.Module]:
    """The subclass of ``base`` whose forward runs through the places; one for all instances with the same places."""
    patched = _patched_forward(base, patch)
    edits = tuple(
        OpEdit(where.op, where.call, _method(k)) for k, (where, _, _) in enumerate(forms) if where.kind == "op"
    )
    body: dict[str, Any] = rewrite(base, edits, patched) if edits else {}
    forward = body.get("forward") or patched or base.forward
    inputs = [_method(k) for k, (where, _, _) in enumerate(forms) if where.kind == "input"]
    outputs = [_method(k) for k, (where, _, _) in enumerate(forms) if where.kind == "output"]
    if inputs or outputs:
        graph = sealed.seal(forward, inputs, outputs)
        body = {**body, sealed.KEPT: _renamed(forward, sealed.KEPT), "forward": sealed.define(graph, forward)}
        body["_gs_graph"] = graph
    elif patched is not None and not edits:
        body["forward"] = patched
    whole = bool(inputs) and not sealed.is_mirrored(body["_gs_graph"])
    for k, form in enumerate(forms):
        body.update(_methods(k, form, whole))
    if any(child for _, child, _ in forms) and issubclass(base, nn.Sequential | nn.ModuleList):
        body.update(_container(base))
    cls: type[nn.Module]

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = super(cls, self).__reduce_ex__(protocol)
        make, args = reduced[:2]
        make, *args = [base if value is type(self) else value for value in (make, *args)]
        return (_regraft, (forms, patch, make, tuple(args)), *reduced[2:])

    body |= {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "_gs_base": base,
    }
    try:
        metaclass: Any = type(base)
        cls = _stand_in(metaclass)(base.__name__, (base,), body)
    except TypeError as error:
        raise SurgeryError(
            f"the class {base.__qualname__} cannot be extended ({error}), so its instances cannot be operated on. "
            "Operate on the module that holds it, or on a child."
        ) from error
    return cls


def _regraft(forms: tuple[Form, ...], patch: Patch, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = make(*args)
    object.__setattr__(module, "__class__", _dressed(type(module), forms, patch))
    return module


def _method(k: int) -> str:
    return f"_gs_{k}"


class _Live:
    """The coefficient of the operator at one place, read through the module: TorchScript takes it as the module's own.

    TorchScript finds attributes in the instance's ``__dict__`` and reads them with ``getattr``, which asks a descriptor
    that has ``__set__`` first. So a stand-in in the ``__dict__`` gives the name, and this gives the live value. Not a
    ``property``, which TorchScript would try to compile.
    """

    def __init__(self, k: int, coefficient: str) -> None:
        self.k, self.coefficient = k, coefficient

    def __get__(self, module: nn.Module | None, cls: type) -> Any:
        return self if module is None else getattr(self._operator(module), self.coefficient)

    def __set__(self, module: nn.Module, value: float) -> None:
        setattr(self._operator(module), self.coefficient, value)

    def _operator(self, module: nn.Module) -> nn.Module:
        return module.__dict__["_gs_graft"].places[self.k].operator(module)


def _live_names(graft: Graft) -> list[str]:
    plain = [(k, place._operator) for k, place in enumerate(graft.places) if place._operator is not None]
    return [f"_gs_{k}_{name}" for k, operator in plain if (name := _SCRIPTED[type(operator)][0])]


_SCRIPTED: dict[type[nn.Module], tuple[str, str]] = {
    operators.GradientReversal: ("lambd", "reverse_gradient(x, self.{0})"),
    operators.ScaleGradient: ("scale", "scale_gradient(x, self.{0})"),
    operators.StopGradient: ("", "stop_gradient(x)"),
}
"""The coefficient of each operator that is no child of its module, and what TorchScript compiles in its place."""


def is_plain(operator: nn.Module) -> bool:
    """Whether an operator is a coefficient at most, so that it need not be a child of the module it operates on."""
    return type(operator) in _SCRIPTED


def _methods(k: int, form: Form, whole: bool) -> dict[str, Any]:
    """The method that a place's value passes through, in Python and as TorchScript compiles it."""
    where, child, operator = form
    body: dict[str, Any] = {}
    if child is not None:
        scripted = f"self.{child}(x)"
    else:
        coefficient, scripted = _SCRIPTED[operator]
        scripted = scripted.format(f"_gs_{k}_{coefficient}")
        if coefficient:
            body[f"_gs_{k}_{coefficient}"] = _Live(k, coefficient)
    run = "run_received" if where.kind == "input" and whole else "run"
    source = (
        f"def {_method(k)}(self, x: Tensor) -> Tensor:\n"
        f"    if torch.jit.is_scripting():\n"
        f"        return {scripted}\n"
        f"    else:\n"
        f"        return self._gs_graft.places[{k}].{run}(self, x)\n"
    )
    # Without the module's __name__: Dynamo of torch 2.13 would look for torch and Tensor in that module.
    names = {"torch": torch, "Tensor": Tensor, **{n: v for n, v in vars(operators).items() if n != "__name__"}}
    body[_method(k)] = compile_function(source, _method(k), names)
    return body


def _container(base: type[nn.Module]) -> dict[str, Any]:
    """A container's length and iteration without the operators that are its children."""

    def __iter__(self: nn.Module) -> Any:
        hidden = self.__dict__["_gs_graft"].children
        return iter([module for name, module in self._modules.items() if name not in hidden])

    def __len__(self: nn.Module) -> int:
        return len(self._modules) - len(self.__dict__["_gs_graft"].children)

    return {"__iter__": __iter__, "__len__": __len__}


def _patched_forward(base: type[nn.Module], patch: Patch) -> Callable[..., Any] | None:
    if patch is None:
        return None
    if isinstance(patch, str):
        return getattr(base, patch)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_gs_graft"].patched(*args, **kwargs)

    forward.__signature__ = patch.replace(  # type: ignore[attr-defined]
        parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *patch.parameters.values()]
    )
    return forward


def _renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function under another name: TorchScript compiles a method under its function's ``__name__``."""
    if not isinstance(function, types.FunctionType):
        return function
    copy = types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__dict__.update(function.__dict__)
    copy.__qualname__ = function.__qualname__
    return copy
