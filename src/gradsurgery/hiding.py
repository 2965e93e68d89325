"""An operator with state is a child of the module it operates on, and is no layer of it: forwards do not meet it.

It is a child so that ``.to()``, ``.train()``, ``state_dict()``, optimizers and every tool reach it. A forward that
walks the children of its module (``for layer in self``, ``self.children()``, ``self.items()``) would run it as one more
layer.
"""

import contextlib
import dis
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ._torch import is_asked_by_distributed
from .errors import SurgeryError
from .operators.modules import refuse_unscriptable

__all__ = ["hiding", "refuse_walks"]

_WALKS = {"values", "items", "keys", "copy", "popitem", "__iter__"}


def refuse_walks(base: type[nn.Module]) -> None:
    """Refuse a class whose own code walks ``_modules``, from which nothing can be hidden.

    Raises:
        SurgeryError: naming the method.
    """
    for cls in base.__mro__:
        if cls.__module__.startswith("torch.nn.modules."):
            continue
        for name, method in vars(cls).items():
            code = getattr(method, "__code__", None)
            if isinstance(code, types.CodeType) and _walks(code):
                raise SurgeryError(
                    f"the operator would be a child of this {base.__name__}, and {cls.__name__}.{name} (line "
                    f"{code.co_firstlineno} of {code.co_filename}) walks self._modules, where it would meet it as one "
                    "more layer. Let it walk self.children(), or operate on the module that holds this one, or on its "
                    "last child."
                )


def _walks(code: types.CodeType) -> bool:
    steps = list(dis.get_instructions(code))
    for step, after in itertools.pairwise(steps):
        if step.argval == "_modules" and step.opname.startswith("LOAD_ATTR"):
            called = after.opname == "GET_ITER" or after.opname.startswith(("CALL", "PRECALL"))
            if called or (after.opname.startswith("LOAD_") and after.argval in _WALKS):
                return True
    return any(isinstance(inner, types.CodeType) and _walks(inner) for inner in code.co_consts)


def hiding(base: Any) -> dict[str, Callable[..., Any]]:
    """Methods of a generated subclass of ``base`` that leave the operators among the children out."""

    def named_children(self: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        # Those that shard the parameters of every child must not pass one by.
        hidden = frozenset() if is_asked_by_distributed() else _hidden(self)
        held = set()
        for name, module in self._modules.items():
            if module is not None and name not in hidden and module not in held:
                held.add(module)
                yield name, module

    def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        for operator in _operators(self) if recurse else ():
            operator._apply(fn)
        return base._apply(self, fn, recurse)

    def apply(self: nn.Module, fn: Any) -> nn.Module:
        for operator in _operators(self):
            operator.apply(fn)
        return base.apply(self, fn)

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        for operator in _operators(self):
            operator.train(mode)
        return base.train(self, mode)

    def __prepare_scriptable__(self: nn.Module) -> nn.Module:
        graft = self.__dict__.get("_gs_graft")
        for place in graft.places if graft is not None else ():
            if place.child is not None:
                refuse_unscriptable(place.operator(self), place.address)
        prepare = getattr(base, "__prepare_scriptable__", None)
        return self if prepare is None else prepare(self)

    body: dict[str, Callable[..., Any]] = {
        "__prepare_scriptable__": __prepare_scriptable__,
        "named_children": named_children,
        "_apply": _apply,
        "apply": apply,
        "train": train,
    }
    if not issubclass(base, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return body

    def __len__(self: nn.Module) -> int:
        return len(self._modules.keys() - _hidden(self))

    def __delitem__(self: Any, key: Any) -> None:
        with _shown_alone(self):
            base.__delitem__(self, key)

    body |= {"__len__": __len__, "__delitem__": __delitem__}
    if issubclass(base, nn.ModuleDict):
        return body | _of_a_dict()

    def __iter__(self: nn.Module) -> Iterator[Any]:
        hidden = _hidden(self)
        return iter([module for name, module in self._modules.items() if name not in hidden])

    def __getitem__(self: Any, key: Any) -> Any:
        if not isinstance(key, slice):
            return base.__getitem__(self, key)
        with _shown_alone(self):
            return base.__getitem__(self, key)

    return body | {"__iter__": __iter__, "__getitem__": __getitem__}


def _of_a_dict() -> dict[str, Callable[..., Any]]:
    def shown(self: nn.Module) -> dict[str, Any]:
        hidden = _hidden(self)
        return {name: module for name, module in self._modules.items() if name not in hidden}

    return {
        "__iter__": lambda self: iter(shown(self)),
        "__contains__": lambda self, key: key in shown(self),
        "keys": lambda self: shown(self).keys(),
        "values": lambda self: shown(self).values(),
        "items": lambda self: shown(self).items(),
    }


def _hidden(module: nn.Module) -> frozenset[str]:
    graft = module.__dict__.get("_gs_graft")
    return graft.children if graft is not None else frozenset()


def _operators(module: nn.Module) -> list[nn.Module]:
    return [found for name in _hidden(module) if (found := module._modules.get(name)) is not None]


@contextlib.contextmanager
def _shown_alone(module: nn.Module) -> Iterator[None]:
    hidden = {name: module._modules[name] for name in _hidden(module)}
    module._modules = {name: child for name, child in module._modules.items() if name not in hidden}
    try:
        yield
    finally:
        module._modules.update(hidden)
