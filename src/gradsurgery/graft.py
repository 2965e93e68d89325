"""The graft: a module keeps its identity and its state, and gets a generated subclass of its own class.

``parametrize`` and ``fully_shard`` change classes in the same way. State, children, hooks and methods are not touched,
and undoing is setting the class back. What lives on the instance is ``_gs_graft``, the places, and each of them once
more under a name that the generated code reads.

The footguns, each guarded below:

* Code shared, coefficients not: one class per (class, places) serves every instance, so a generated class holds no
  operator. It reads them through the instance.
* ``type(module)(...)`` and ``sequential[1:]`` must build the class that the user wrote: see
  :class:`.generated.StandIn`.
* A generated class cannot be imported by name, so pickle and deepcopy go through :func:`.generated.regrafted`.
* Classes that torch puts on top of the user's (parametrized, FSDP2) stay on top: tools that take them off again look
  for what lies directly beneath.
* A ``forward`` patched on the instance shadows the class: it is taken off the instance while the graft is there.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import nn

from .capture import sealed
from .errors import SurgeryError
from .generated import base_of, body_of, dressed, layers, stack, veiled
from .methods import Patch, stand_ins
from .place import Graft, Place

__all__ = ["graft_of", "regraft", "user_class", "without"]


def graft_of(module: nn.Module) -> Graft | None:
    """The places of a module that is operated on, or None."""
    return module.__dict__.get("_gs_graft")


def user_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote, beneath every class that was generated for this instance."""
    return base_of(layers(type(module))[1])


def regraft(module: nn.Module, places: Iterable[Place]) -> None:
    """Give a module exactly these places; none at all is the exact undo.

    Raises:
        SurgeryError: where another tool has patched ``forward`` on top of the graft, or the class cannot be extended.
    """
    old = graft_of(module)
    if old is None:
        graft = Graft(places, type(module), module.__dict__.get("forward"))
    else:
        _refuse_wrapped(module)
        graft = Graft(places, old.before, old.patched)
    if graft.places:
        _dress(module, graft)
    elif old is not None:
        _undress(module, old)
    for name in [name for name in module.__dict__ if name.startswith("_gs_")]:
        del module.__dict__[name]
    if graft.places:
        module.__dict__["_gs_graft"] = graft
        module.__dict__.update(stand_ins(graft))


class without:  # noqa: N801 - a context manager, used like a function
    """Context manager: these modules run as if they had never been operated on, and then as before."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [module for module in modules if _is_dressed(module)]

    def __enter__(self) -> None:
        for module in self._modules:
            _refuse_wrapped(module)
        for module in self._modules:
            graft = module.__dict__["_gs_graft"]
            _undress(module, graft)
            if graft.children:
                overlays, core = layers(type(module))
                object.__setattr__(module, "__class__", stack(overlays, core, veiled(core)))
            module.__dict__.update(dict.fromkeys(_COPIES, _refuse_copy))

    def __exit__(self, *exception: object) -> None:
        for module in self._modules:
            for name in _COPIES:
                module.__dict__.pop(name, None)
            graft = graft_of(module)
            if graft is not None:
                _dress(module, graft)


_COPIES = ("__copy__", "__deepcopy__", "__reduce_ex__")


def _refuse_copy(*args: Any) -> NoReturn:
    raise SurgeryError(
        "a copy was asked for of a module whose operators are switched off; it would list them and never run them. "
        "Copy outside of gs.disabled, or take them out of the copy's original first with gs.remove."
    )


def _refuse_wrapped(module: nn.Module) -> None:
    if "forward" in module.__dict__ and _is_dressed(module):
        raise SurgeryError(
            f"another tool has wrapped the forward of this {user_class(module).__name__} since it was operated on, and "
            "holds on to the operated one. Take that wrapper off first, then operate again, disable or remove."
        )


def _dress(module: nn.Module, graft: Graft) -> None:
    forms = tuple(place.form(module) for place in graft.places)
    cls = dressed(type(module), forms, _patch_of(module, graft.patched))
    module.__dict__.pop("forward", None)
    object.__setattr__(module, "__class__", cls)


def _undress(module: nn.Module, graft: Graft) -> None:
    overlays, core = layers(type(module))
    before_overlays, before_core = layers(graft.before)
    unchanged = base_of(core) is before_core and list(map(body_of, overlays)) == list(map(body_of, before_overlays))
    object.__setattr__(module, "__class__", graft.before if unchanged else stack(overlays, core, base_of(core)))
    if graft.patched is not None:
        module.__dict__["forward"] = graft.patched


def _is_dressed(module: nn.Module) -> bool:
    core = layers(type(module))[1].__dict__
    return "_gs_base" in core and "_gs_veiled" not in core


def _patch_of(module: nn.Module, patched: Callable[..., Any] | None) -> Patch:
    if patched is None:
        return None
    name = getattr(patched, "__name__", "forward")
    is_method = getattr(patched, "__self__", None) is module and name != "forward"
    if is_method and getattr(user_class(module), name, None) is patched.__func__:  # type: ignore[attr-defined]
        return name
    return sealed.signature(patched)
