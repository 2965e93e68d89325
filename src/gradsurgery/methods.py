"""The methods of a generated class: what a place's value passes through, and the forward that is kept."""

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Dict, Optional, Tuple  # noqa: UP035 - the forms that TorchScript reads

import torch
from torch import Tensor, nn

from . import operators
from .capture import sealed
from .capture.code import compile_function
from .capture.versions import note_version, refuse_other_version, version
from .errors import OperatorError
from .operators.moved import hands_on
from .operators.values import tensors_in
from .place import Form, Graft, operator_name
from .shown import show_short_way
from .tap import Tap, TapPlace, add_heads, arm

__all__ = [
    "Patch",
    "as_method",
    "count_changes",
    "head_methods",
    "is_plain",
    "method",
    "methods",
    "patched_forward",
    "refuse_changes",
    "renamed",
    "stand_ins",
]

Patch = str | inspect.Signature | None
"""A forward patched on the instance: the method of its class that it is, or else the signature it shows."""


def method(k: int) -> str:
    """The name of the method that the value of place ``k`` passes through."""
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
        return module.__dict__["_gs_graft"].places[self.k].live()


def stand_ins(graft: Graft) -> dict[str, Any]:
    """What the generated methods read of a module's ``__dict__``.

    Each place by a name of its own, and the operator that it holds by another, since Dynamo guards every object on the
    way to what it reads; for TorchScript, the names of the coefficients and room for the taps.
    """
    plain = {k: operator for k, place in enumerate(graft.places) if (operator := place.live()) is not None}
    names = [f"_gs_{k}_{_SCRIPTED[type(o)][0]}" for k, o in plain.items() if _SCRIPTED.get(type(o), ("",))[0]]
    taps = [place.tap.name for place in graft.places if isinstance(place, TapPlace)]
    empty = torch.jit.Attribute(None, Optional[Tensor])  # noqa: UP045 - TorchScript reads this form
    places = {f"{method(k)}_place": place for k, place in enumerate(graft.places)}
    held = {operator_name(k): operator for k, operator in plain.items()}
    return {**places, **held, **dict.fromkeys(names, 0.0), **{f"_gs_tap_{name}": empty for name in taps}}


_SCRIPTED: dict[type[nn.Module], tuple[str, str]] = {
    operators.GradientReversal: ("lambd", "reverse_gradient(x, self.{0})"),
    operators.ScaleGradient: ("scale", "scale_gradient(x, self.{0})"),
    operators.StopGradient: ("", "stop_gradient(x)"),
    Tap: ("", "x"),
}
"""The coefficient of each operator that is no child of its module, and what TorchScript compiles in its place."""


def is_plain(operator: nn.Module) -> bool:
    """Whether an operator is a coefficient at most, so that it need not be a child of the module it operates on."""
    return type(operator) in _SCRIPTED


def methods(k: int, form: Form, received: tuple[str, ...] | None) -> dict[str, Any]:
    """The method that a place's value passes through, in Python and as TorchScript compiles it.

    ``received`` names the positional parameters where the graph passes on all that the module receives.
    """
    scripted, body = _scripted(k, form)
    keep = f"        self._gs_tap_{form.head} = x.clone()\n" if form.head else ""
    run = "run(self, x)"
    is_single = not form.where.element and hands_on(form.operator)
    if form.where.kind == "input" and received is not None:
        run = f"run_received(self, x, {received!r})"
    elif form.where.kind == "output" and is_single:
        run = "run_last(self, x)"
    source = (
        f"def {method(k)}(self, x: Tensor) -> Tensor:\n"
        f"    if torch.jit.is_scripting():\n"
        f"{keep}"
        f"        return {scripted}\n"
        f"    else:\n"
        f"        return self.{method(k)}_place.{run}\n"
    )
    body[method(k)] = _compiled(source, method(k))
    if form.where.kind in ("output", "op", "edge") and is_single:
        body |= show_short_way(body[method(k)], k, form.operator)
    return body | (_taking(form.head) if form.head else {})


def _scripted(k: int, form: Form) -> tuple[str, dict[str, Any]]:
    """What TorchScript compiles for the value ``x`` at a place, and the attributes that this reads."""
    if form.child is not None and form.where.kind != "head":
        return f"self.{form.child}(x)", {}
    coefficient, expression = _SCRIPTED.get(
        form.operator, ("", f"no_form_in_torchscript_for_{form.operator.__name__}(x)")
    )
    name = f"_gs_{k}_{coefficient}"
    return expression.format(name), {name: _Live(k, coefficient)} if coefficient else {}


_NAMES = {"torch": torch, "Tensor": Tensor, "Dict": Dict, "Tuple": Tuple, "arm": arm, "add_heads": add_heads}  # noqa: UP006


def _compiled(source: str, name: str) -> Any:
    # Without the module's __name__: Dynamo of torch 2.13 would look for torch and Tensor in that module.
    public = {key: value for key, value in vars(operators).items() if key != "__name__"}
    return compile_function(source, name, {**_NAMES, **public})


def _taking(head: str) -> dict[str, Any]:
    """How the root takes the value of a tap in TorchScript."""
    name = f"_gs_take_{head}"
    source = (
        f"def {name}(self) -> Tensor:\n"
        f"    x = self._gs_tap_{head}\n"
        f"    self._gs_tap_{head} = None\n"
        f"    if x is None:\n"
        f"        raise RuntimeError('nothing passed the place of the head {head}')\n"
        f"    return x\n"
    )
    return {name: _compiled(source, name)}


def head_methods(forms: Sequence[Form]) -> dict[str, Any]:
    """The methods around the forward of a root with heads."""
    body: dict[str, Any] = {}
    made = ""
    for k, form in enumerate(forms):
        if form.where.kind == "head":
            scripted, reads = _scripted(k, form)
            body |= reads
            module = "self"
            for name in form.tap:
                module = f"getattr({module}, {name!r})"
            # A head that runs in training only gives the forward two types, of which TorchScript knows one.
            taken = f"{module}._gs_take_{form.head}()" if form.tap else "no_form_in_torchscript_for_training_only()"
            made += f"        x = {taken}\n        made[{form.head!r}] = self.{form.child}({scripted})\n"
    arming = f"def {sealed.ARM}(self) -> None:\n    if not torch.jit.is_scripting():\n        arm(self)\n"
    adding = (
        f"def {sealed.ADD_HEADS}(self, value: Tensor) -> Tuple[Tensor, Dict[str, Tensor]]:\n"
        f"    if torch.jit.is_scripting():\n"
        f"        made: Dict[str, Tensor] = {{}}\n"
        f"{made}"
        f"        return value, made\n"
        f"    else:\n"
        f"        return add_heads(self, value)\n"
    )
    return body | {sealed.ARM: _compiled(arming, sealed.ARM), sealed.ADD_HEADS: _compiled(adding, sealed.ADD_HEADS)}


def count_changes(self, received: Tensor, given: Tensor) -> int:  # type: ignore[no-untyped-def]
    """Before the kept forward, where what it is ``given`` was operated on and that is what it has ``received``."""
    if torch.jit.is_scripting():
        return 0
    else:  # TorchScript leaves the other branch out only of an if that has one
        return sum(map(_noted, _copies(received, given)))


def refuse_changes(self, received: Tensor, given: Tensor, before: int) -> int:  # type: ignore[no-untyped-def]
    """After it: a forward that works in place would have changed the operated copy alone."""
    if torch.jit.is_scripting():
        return 0
    else:
        return _refuse_changes(self, received, given, before)


def _copies(received: Any, given: Any) -> list[Tensor]:
    """The tensors that an operator put in the place of others; without gradients it makes no copies."""
    if not torch.is_grad_enabled():
        return []
    originals, now = _tensors(given), _tensors(received)
    return [tensor for tensor in now if not any(tensor is one for one in originals)]


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if isinstance(tensor, Tensor)]


def _noted(tensor: Tensor) -> int:
    note_version(tensor, "received")
    return version(tensor)


def _refuse_changes(module: nn.Module, received: Any, given: Any, before: int) -> int:
    message = (
        f"the input of this {type(module).__name__} was to be operated on, but it changes what it receives in "
        "place: it would change the operated copy, and not the value that its caller may still read. Operate on "
        "the output of the module that makes the value, or make this one work out of place (inplace=False)."
    )
    copies = _copies(received, given)
    for tensor in copies:
        refuse_other_version(tensor, "received", message)
    if sum(map(version, copies)) != before:
        raise OperatorError(message)
    return before


def as_method(base: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a class as a function of the module, also where it is a static method or no function at all."""
    held = inspect.getattr_static(base, "forward")
    if hasattr(type(held), "__get__") and not isinstance(held, staticmethod | classmethod):
        return base.forward
    bound: Any = base.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    forward.__doc__ = bound.__doc__
    forward.__signature__ = _with_self(sealed.signature(bound))  # type: ignore[attr-defined]
    return forward


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def patched_forward(base: type[nn.Module], patch: Patch) -> Callable[..., Any] | None:
    """The forward that an instance was patched with, as a function of the module."""
    if patch is None:
        return None
    if isinstance(patch, str):
        return getattr(base, patch)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_gs_graft"].patched(*args, **kwargs)

    forward.__signature__ = _with_self(patch)  # type: ignore[attr-defined]
    return forward


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function under another name: TorchScript compiles a method under its function's ``__name__``."""
    if not isinstance(function, types.FunctionType):
        return function
    again = types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    again.__kwdefaults__ = function.__kwdefaults__
    again.__annotations__ = function.__annotations__
    again.__dict__.update(function.__dict__)
    again.__qualname__ = function.__qualname__
    return again
