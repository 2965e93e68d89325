"""A twin: the same structure anew, over the very same parameters and buffers.

``copy.deepcopy`` would copy the tensors, and whatever a hook or an attribute happens to hold on to: a trainer, a
logger, a data set. A twin copies modules and the containers that hold them, and shares everything else.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ._torch import is_fsdp2
from .errors import SurgeryError
from .place import Graft, Place

M = TypeVar("M", bound=nn.Module)


def twin(root: M) -> tuple[M, dict[int, nn.Module]]:
    """A second model that shares every parameter and buffer of the first, and none of its module objects.

    Returns:
        The twin, and the twin of each module by the ``id`` of the module.

    Raises:
        SurgeryError: where the model is sharded, so that its state belongs to one set of modules.
    """
    if any(is_fsdp2(module) for module in root.modules()):
        raise SurgeryError(
            "inplace=False was asked for a model that fully_shard has sharded, whose modules cannot be had twice. "
            "Leave inplace=False off: gs.remove undoes exactly."
        )
    if any(_is_lazy(module) for module in root.modules()):
        raise SurgeryError(
            "inplace=False was asked for a model with a lazy module that has not run yet, whose parameters are still "
            "to be made and could be made once only. Run the model once first, or leave inplace=False off."
        )
    copies: dict[int, Any] = {}
    _register(root, copies)
    for original, copy in [pair for pair in copies.values() if pair[0] is not pair[1]]:
        copy.__dict__.update({name: _remap(value, copies) for name, value in original.__dict__.items()})
        for _name, slot in _slots(type(original)):
            with contextlib.suppress(AttributeError):  # a slot that is empty
                slot.__set__(copy, _remap(slot.__get__(original), copies))
        # It compiles the call of the original, and nn.Module leaves it out of its own copies too. A None in its place
        # would be an attribute that TorchScript cannot type.
        copy.__dict__.pop("_compiled_call_impl", None)
        if isinstance(copy, torch.fx.GraphModule):
            copy.graph = deepcopy(original.graph)  # also gives the twin a forward of its own
    return copies[id(root)][1], {key: copy for key, (_, copy) in copies.items()}


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def _slots(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                yield name, slot


def _register(module: nn.Module, copies: dict[int, Any]) -> None:
    if id(module) in copies:
        return
    # A ScriptModule is held by TorchScript, which has no shallow copy: it is shared, like a tensor.
    shared = isinstance(module, torch.jit.ScriptModule)
    copies[id(module)] = (module, module if shared else _empty(module))
    for value in () if shared else module.__dict__.values():
        _find(value, copies)


def _empty(module: nn.Module) -> nn.Module:
    """A module of the same class without any state."""
    cls = type(module)
    if isinstance(module, torch.fx.GraphModule):
        return cls.__new__(cls)  # each has a class of its own, which holds its code
    return object.__new__(cls)  # a class may have a __new__ that asks for arguments


def _find(value: Any, copies: dict[int, Any]) -> None:
    """Register the modules that a value holds, as children or in plain lists, tuples and dicts."""
    if isinstance(value, nn.Module):
        _register(value, copies)
    elif isinstance(value, Graft):
        for place in value.places:
            for held in place.held():
                _register(held, copies)
    elif isinstance(value, dict):
        for item in value.values():
            _find(item, copies)
    elif isinstance(value, list | tuple):
        for item in value:
            _find(item, copies)


def _remap(value: Any, copies: dict[int, Any]) -> Any:
    """The same value with every module of the first model replaced by its twin; anything else as it is."""
    if isinstance(value, nn.Module):
        return copies[id(value)][1] if id(value) in copies else value
    if isinstance(value, Graft):
        places = (place.again(lambda held: _remap(held, copies)) for place in value.places)
        return Graft(places, value.before, _remap(value.patched, copies))
    if isinstance(value, Place):  # of an operator in the graph of a GraphModule
        return value.again(lambda held: _remap(held, copies))
    if isinstance(value, types.MethodType) and id(value.__self__) in copies:
        return types.MethodType(value.__func__, _remap(value.__self__, copies))
    if type(value) is functools.partial:
        keywords = {name: _remap(item, copies) for name, item in value.keywords.items()}
        args = (_remap(item, copies) for item in value.args)
        bound = functools.partial(_remap(value.func, copies), *args, **keywords)
        bound.__dict__.update(value.__dict__)
        return bound
    if isinstance(value, dict):
        # A shallow copy keeps the kind (OrderedDict, defaultdict), and the twin may then be changed on its own.
        again = value.copy()
        for name, item in value.items():
            again[name] = _remap(item, copies)
        return again
    if type(value) is list or type(value) is set:
        return type(value)(_remap(item, copies) for item in value)
    if isinstance(value, tuple):
        items = [_remap(item, copies) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items) if type(value) is tuple else value
    return value
