"""Every private name of TorchScript that the package uses, each behind one small function.

TorchScript has no public way to change a compiled method, so there is no safe answer where a name is missing in another
version of torch: the caller is told, and nothing is changed.
"""

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.jit import ScriptModule

from .errors import SurgeryError

__all__ = [
    "adopt",
    "compiled_type",
    "compiled_value",
    "graph_of_method",
    "has_compiled_value",
    "inlined_graph_of",
    "is_written",
    "methods_of",
    "missing_names_reported",
    "names_of_arguments",
    "owner_of",
    "register",
    "set_compiled_value",
    "tensors_of",
    "without_announcements",
    "wrap",
]


@contextlib.contextmanager
def without_announcements() -> Iterator[None]:
    """Context manager in which torch does not announce again that TorchScript is deprecated."""
    with warnings.catch_warnings():
        # Whoever scripts, traces or has a ScriptModule has been told already.
        warnings.filterwarnings("ignore", message="`torch.jit.*deprecated")
        yield


@contextlib.contextmanager
def missing_names_reported() -> Iterator[None]:
    """Context manager in which a private name that this torch does not have becomes a refusal.

    Raises:
        SurgeryError: naming it.
    """
    try:
        yield
    except AttributeError as error:
        raise SurgeryError(
            f"an operation on a TorchScript module was asked for, and torch {torch.__version__} lacks what that takes "
            f"({error}). Operate on the nn.Module that it was made from, then script or trace that."
        ) from error


def methods_of(module: ScriptModule) -> list[str]:
    """The names of the compiled methods."""
    return list(module._c._method_names())


def graph_of_method(module: ScriptModule, method: str) -> Any:
    """The graph of a compiled method, which all instances of one type share."""
    return module._c._get_method(method).graph


def inlined_graph_of(module: ScriptModule, method: str) -> Any:
    """A copy of that graph with every call inlined, and without the branches that a constant rules out."""
    graph = module._c._get_method(method).inlined_graph
    torch._C._jit_pass_constant_propagation(graph)
    return graph


def is_written(graph: Any, value: Any) -> bool:
    """Whether anything in an inlined graph may write to the memory of a value.

    Taken as frozen, the buffers of a module count as memory of their own: a BatchNorm that counts its batches writes to
    these, and not to what it receives.
    """
    return bool(graph.alias_db(True).has_writers(value))


def names_of_arguments(module: ScriptModule, method: str) -> list[str]:
    """What the arguments of a compiled method are called, without ``self``."""
    return [argument.name for argument in module._c._get_method(method).schema.arguments[1:]]


def compiled_type(module: ScriptModule) -> Any:
    """The type under which TorchScript has compiled a module."""
    return module._c._type()


def compiled_value(module: ScriptModule, name: str) -> Any:
    """An attribute as TorchScript holds it."""
    return module._c.getattr(name)


def set_compiled_value(module: ScriptModule, name: str, value: Any) -> None:
    """Set an attribute that TorchScript holds."""
    module._c.setattr(name, value)


def has_compiled_value(module: ScriptModule, name: str) -> bool:
    """Whether TorchScript holds an attribute of that name."""
    return bool(module._c.hasattr(name))


def register(module: ScriptModule, name: str, child: ScriptModule) -> None:
    """Give a module, and so the type that it shares with others, an attribute that holds another module."""
    module._c._register_attribute(name, compiled_type(child), child._c)


def tensors_of(module: ScriptModule) -> list[tuple[str, torch.Tensor]]:
    """The parameters, buffers and other tensors that one module holds itself."""
    parameters: Any = torch._C.ParameterDict(module._c)
    buffers: Any = torch._C.BufferDict(module._c)
    held = [*parameters.items(), *buffers.items()]
    return [(name, tensor) for name, tensor in held if isinstance(tensor, torch.Tensor)]


def wrap(module: ScriptModule) -> ScriptModule:
    """The same compiled module in new Python objects, which know of children that were registered since."""
    from torch.jit._recursive import wrap_cpp_module

    return wrap_cpp_module(module._c)


def adopt(module: ScriptModule, other: ScriptModule) -> None:
    """Let the Python objects of a module, and of every part that both have, stand for another compiled module.

    Python attributes and hooks stay.
    """
    # A trace, and a subclass of ScriptModule, is a shell around the object that knows the compiled module.
    module = module.__dict__.get("_actual_script_module", module)
    children = other._modules._python_modules  # type: ignore[attr-defined]
    for name, child in list(children.items()):
        there = dict(module._modules.items()).get(name)
        if isinstance(there, ScriptModule) and isinstance(child, ScriptModule):
            adopt(there, child)
            children[name] = there
    held = module.__dict__
    for name in [name for name, value in held.items() if isinstance(value, torch.ScriptMethod)]:
        del held[name]  # bound to the compiled module of before
    held.update({name: other.__dict__[name] for name in _COMPILED})


_COMPILED = ("_c", "_parameters", "_buffers", "_modules", "_concrete_type")


def owner_of(module: ScriptModule) -> tuple[str, bool]:
    """The name under which another ScriptModule holds this one, and whether one does; the safe answer is no.

    A child does not know its parent, so every parent that is alive is asked.
    """
    from torch.jit import _script

    kind: Any = getattr(_script, "OrderedModuleDict", None)
    for last in (False, True):
        for held in [held for held in gc.get_objects() if type(held) is kind]:
            names = [name for name, child in held.items() if child is module]
            if names and last:
                return names[0], True
            if names:
                gc.collect()  # a parent that is garbage holds nothing
                break
        else:
            break
    return "", False
