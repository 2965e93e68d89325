"""Operate on every tensor of a nested value and give back a value of exactly the same type."""

import copy
import dataclasses
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from .._torch import pytree_node
from ..errors import OperatorError

__all__ = ["map_tensors", "tensors_in"]

Operate = Callable[[Any], Any]

PLAIN = (bool, int, float, complex, str, bytes, bytearray, range, type, types.FunctionType, types.ModuleType)


def map_tensors(operate: Operate, value: Any) -> Any:
    """``value`` with every tensor (and every stand-in for one, such as an fx Proxy) replaced by ``operate`` of it.

    Everything else passes by identity, also a container in which nothing changed. A tensor that occurs twice is
    operated on once and stays one tensor; two views of one memory become two tensors of their own.
    """
    done: dict[Any, Any] = {}

    def once(tensor: Any) -> Any:
        if tensor not in done:
            done[tensor] = operate(tensor)
        return done[tensor]

    return _map(once, value)


def tensors_in(value: Any) -> list[Any]:
    """Every tensor of ``value`` (and every stand-in for one), each once, in order."""
    found: list[Any] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def _map(operate: Operate, value: Any, nested: bool = False) -> Any:
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor) or has_torch_function_unary(value):
        return operate(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return _rebuilt(operate, value, value, kind)
    node = pytree_node(value)
    if node is not None:
        return _rebuilt(operate, value, *node)
    if isinstance(value, tuple):
        # A namedtuple takes its fields one by one; torch.return_types and torch.Size take one iterable.
        return _rebuilt(operate, value, value, lambda new: kind(*new) if hasattr(kind, "_fields") else kind(new))
    if isinstance(value, list):
        return _rebuilt(operate, value, value, lambda new: _refilled(value, range(len(value)), new))
    if isinstance(value, dict):
        return _rebuilt(operate, value, value.values(), lambda new: _refilled(value, value, new))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        # Slots of a dataclass are its fields; in __dict__ there may be more, such as a cached property.
        hidden = {name: held for name, held in getattr(value, "__dict__", {}).items() if name not in names}
        if hidden:
            _refuse_tensors(hidden, value)  # half of it would be operated on
        children = [getattr(value, name) for name in names]
        return _rebuilt(operate, value, children, lambda new: _with_fields(value, names, new))
    if nested:
        _name_tensors(value)
    else:
        _refuse_tensors(value, value)
    return value


def _rebuilt(operate: Operate, value: Any, children: Collection[Any], build: Callable[[list[Any]], Any]) -> Any:
    mapped = [_map(operate, child, nested=True) for child in children]
    if all(new is old for new, old in zip(mapped, children, strict=True)):
        return value
    return build(mapped)


def _refilled(value: Any, keys: Collection[Any], items: list[Any]) -> Any:
    # A copy, since a subclass may have a constructor and attributes of its own.
    new = copy.copy(value)
    for key, item in zip(keys, items, strict=True):
        new[key] = item
    return new


def _with_fields(value: Any, names: list[str], items: list[Any]) -> Any:
    # Not dataclasses.replace: it runs __init__ again and refuses fields that __init__ does not take.
    new = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(new, name, item)  # also where the class is frozen
    return new


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _refuse_tensors(held: Any, owner: Any) -> None:
    """Refuse ``owner`` when a tensor that could carry a gradient is found in what it holds."""
    hidden = _hidden_tensor(held)
    if hidden is not None:
        raise OperatorError(
            "An operator was asked to act on every tensor of a value. "
            f"There is a {type(hidden).__name__} in a {_type_name(owner)}, "
            "a type it cannot look into and build again. "
            "Pass the tensors in a tuple, list, dict or dataclass, or register the type with "
            "torch.utils._pytree.register_pytree_node."
        )


def _name_tensors(owner: Any) -> None:
    """Say so when an object beside the tensors that are operated on holds one whose gradient stays as it is.

    A warning and no error: such objects are mostly state that travels along (the key-value cache of a transformer).
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    hidden = _hidden_tensor(owner)
    if hidden is not None and getattr(hidden, "requires_grad", True):
        warnings.warn(
            f"a {_type_name(owner)} beside the tensors that are operated on may hold tensors of its own; they keep "
            "their plain gradient, since the type cannot be looked into and built again. If the loss depends on them, "
            "register the type with torch.utils._pytree.register_pytree_node.",
            stacklevel=2,
        )


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _hidden_tensor(held: Any) -> Any:
    """The first tensor, however deep, that could carry a gradient, or an iterator, which could hold one; or None."""
    seen: set[int] = set()
    waiting = [held]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or one is None or isinstance(one, PLAIN):
            continue
        seen.add(id(one))
        if isinstance(one, Iterator) or (isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex())):
            return one
        if isinstance(one, Tensor):
            continue
        if isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, Collection) and not hasattr(one, "__array__"):
            waiting.extend(one)
        waiting.extend(_attributes(one).values())
    return None
