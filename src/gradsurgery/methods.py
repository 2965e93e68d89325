"""The methods of a generated class: what a place's value passes through, and the forward that is kept."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import operators
from .address import Where
from .capture import sealed
from .capture.code import compile_function
from .capture.versions import note_version, refuse_other_version, version
from .errors import OperatorError
from .operators.values import map_tensors
from .place import Graft

__all__ = [
    "Form",
    "Patch",
    "as_method",
    "count_changes",
    "is_plain",
    "live_names",
    "method",
    "methods",
    "patched_forward",
    "refuse_changes",
    "renamed",
]

Form = tuple[Where, str | None, type[nn.Module]]
"""What the code of a generated class depends on, for one place: where, the child's name, the operator's class."""

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
        return module.__dict__["_gs_graft"].places[self.k].operator(module)


def live_names(graft: Graft) -> list[str]:
    """The attributes under which TorchScript finds the coefficients of the places."""
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


def methods(k: int, form: Form, received: tuple[str, ...] | None) -> dict[str, Any]:
    """The method that a place's value passes through, in Python and as TorchScript compiles it.

    ``received`` names the positional parameters where the graph passes on all that the module receives.
    """
    where, child, operator = form
    body: dict[str, Any] = {}
    if child is not None:
        scripted = f"self.{child}(x)"
    else:
        coefficient, scripted = _SCRIPTED[operator]
        scripted = scripted.format(f"_gs_{k}_{coefficient}")
        if coefficient:
            body[f"_gs_{k}_{coefficient}"] = _Live(k, coefficient)
    run = "run(self, x)"
    if where.kind == "input" and received is not None:
        run = f"run_received(self, x, {received!r})"
    source = (
        f"def {method(k)}(self, x: Tensor) -> Tensor:\n"
        f"    if torch.jit.is_scripting():\n"
        f"        return {scripted}\n"
        f"    else:\n"
        f"        return self._gs_graft.places[{k}].{run}\n"
    )
    # Without the module's __name__: Dynamo of torch 2.13 would look for torch and Tensor in that module.
    names = {"torch": torch, "Tensor": Tensor, **{n: v for n, v in vars(operators).items() if n != "__name__"}}
    body[method(k)] = compile_function(source, method(k), names)
    return body


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
    found: list[Tensor] = []

    def note(tensor: Any) -> Any:
        if isinstance(tensor, Tensor):
            found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


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
