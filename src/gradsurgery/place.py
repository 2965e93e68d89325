"""A place that is operated on: which value of which module, the live operator, and how often it ran."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from .address import Element, Where
from .capture.runtime import holds_tensor
from .elements import replace_element
from .errors import OperatorError
from .operators.moved import moved
from .operators.values import map_tensors
from .passed_by import refuse_dropped, refuse_other_forward

__all__ = ["Form", "Graft", "Place", "Target", "operator_name"]


def operator_name(k: int) -> str:
    """The name in a module's ``__dict__`` of the operator at place ``k``, where it is no child of the module."""
    return f"_gs_{k}_operator"


@dataclass(frozen=True)
class Target:
    """One place of one model: the module to operate on, and where inside it.

    ``path`` is the module that was named. It is ``hops`` names shorter than the path of ``module`` where an
    ``nn.Sequential`` was named: callers that walk one instead of calling it are common (timm's ``checkpoint_seq``,
    ``forward_intermediates``), so the place is its last child's output, or its first child's input.
    ``inner`` is the path inside a ``GraphModule``.
    """

    module: nn.Module
    path: str
    where: Where
    hops: int = 0
    inner: str = ""

    @property
    def key(self) -> tuple[int, str, Where]:
        """The same for two targets that are one place."""
        return id(self.module), self.inner, self.where

    @property
    def address(self) -> str:
        """The address of this place."""
        return self.where.text(self.path)


class Form(NamedTuple):
    """What the code of a generated class depends on, for one place.

    ``head`` says which head the value leaves for; ``tap`` is where a head takes it: the attributes that lead there.
    """

    where: Where
    child: str | None
    operator: type[nn.Module]
    head: str = ""
    tap: tuple[str, ...] = ()


class Place:
    """One operator at one place of one module.

    An operator with parameters, buffers or children of its own is a child of the module, so that ``.to()``,
    ``.train()`` and ``state_dict()`` reach it; any other is held here alone and leaves no trace in the module tree.

    Args:
        where: the place inside the module.
        operator: the operator itself, or None where it is the child ``child``.
        child: the name of that child.
        hops: how many ``nn.Sequential`` lie between the module that was named and the one that was operated on.
        inner: the module path inside a ``GraphModule``.
    """

    def __init__(
        self, where: Where, operator: nn.Module | None, child: str | None = None, hops: int = 0, inner: str = ""
    ) -> None:
        self.where = where
        self.inner = inner
        self.child = child
        self.hops = hops
        self.runs = 0
        self.withdrawn = False  # taken away on purpose, not lost
        self.address: str | None = None  # where it was inserted, for a message
        self._operator = operator

    def operator(self, module: nn.Module) -> nn.Module:
        """The live operator; ``module`` is the one that is operated on."""
        if self.child is None:
            assert self._operator is not None
            return self._operator
        return module._modules[self.child]  # type: ignore[return-value]  # a tool may have replaced it: take what runs

    def put(self, module: nn.Module, operator: nn.Module) -> None:
        """Put another operator in the place of the one that is there."""
        if self.child is not None:
            module._modules[self.child] = operator
            return
        self._operator = operator
        graft = module.__dict__.get("_gs_graft")
        if graft is not None and self in graft.places:  # and not at a node of a GraphModule
            module.__dict__[operator_name(graft.places.index(self))] = operator  # Dynamo is shown this one

    def form(self, module: nn.Module) -> Form:
        """What the code of a generated class depends on."""
        return Form(self.where, self.child, type(self.operator(module)))

    def live(self) -> nn.Module | None:
        """The operator whose coefficient the module's code reads, where it is no child of the module."""
        return self._operator

    def held(self) -> list[nn.Module]:
        """The modules that only this place holds."""
        return [self._operator] if self._operator is not None else []

    def again(self, copied: Callable[[Any], Any]) -> "Place":
        """The same place for another model, not yet run; ``copied`` gives what stands there for what is held here."""
        return Place(self.where, copied(self._operator), self.child, self.hops, self.inner)

    def run(self, module: nn.Module, value: Any) -> Any:
        """Operate on every floating tensor of a value, or of the element of it that the place names."""
        if self.where.kind in ("op", "edge") and not holds_tensor(value):
            return value  # the same expression on plain numbers, as in H + 1, is not the op that was named
        result = self._operated(module, value)
        if self.where.kind == "output" and getattr(module, "inplace", False) is True:
            result = refuse_dropped(module, value, result)
        self._count()
        return result

    def run_last(self, module: nn.Module, value: Any) -> Any:
        """The same for a value that its forward has just returned, in its own memory where nobody else can read it.

        To be called by the method of a generated class alone: the references to ``value`` are counted.
        """
        # Ours are four: the variable of the generated forward, that of its method, this one, and the argument here.
        if not is_compiling() and sys.getrefcount(value) == 4:
            result = moved(self.operator(module), value)
            if result is not None:
                refuse_other_forward(module)
                self.runs += 1
                return result
        return self.run(module, value)

    def _operated(self, module: nn.Module, value: Any) -> Any:
        call, element = self._call(module), self.where.element
        if isinstance(value, Tensor) and not element and (value.is_floating_point() or value.is_complex()):
            return call(value)
        if element:
            return replace_element(value, element, lambda part: self._each(module, call, part))
        return self._each(module, call, value)

    def run_received(
        self, module: nn.Module, received: tuple[tuple[Any, ...], dict[str, Any]], names: tuple[str, ...]
    ) -> Any:
        """Operate on what a module receives: every floating tensor, or the argument that the place names.

        ``names`` are those of the parameters that may be given by position.
        """
        call = self._call(module)
        if not self.where.element:
            result = self._each(module, call, received)
            self._count()
            return result
        key, rest = self.where.element[0], self.where.element[1:]
        args, kwargs = received
        if isinstance(key, str) and key not in kwargs and key in names and names.index(key) < len(args):
            key = names.index(key)
        elif isinstance(key, int) and len(args) <= key < len(names) and names[key] in kwargs:
            key = names[key]
        path: Element = (0 if isinstance(key, int) else 1, key, *rest)
        result = replace_element(received, path, lambda part: self._each(module, call, part))
        self._count()
        return result

    def _count(self) -> None:
        if not is_compiling():
            self.runs += 1

    def _call(self, module: nn.Module) -> Callable[[Any], Any]:
        refuse_other_forward(module)
        operator = self.operator(module)
        # forward, not __call__: a tracer would look for an operator that is no child of anything.
        return operator.forward if self.child is None else operator

    def _each(self, module: nn.Module, call: Callable[[Any], Any], value: Any) -> Any:
        operated = 0

        def one(tensor: Any) -> Any:
            nonlocal operated
            if isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            operated += 1
            return call(tensor)

        result = map_tensors(one, value)
        if not operated:
            raise OperatorError(self._nothing_floating(module, value))
        return result

    def _nothing_floating(self, module: nn.Module, value: Any) -> str:
        what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
        return (
            f"the {self.where.kind} {self.where.text('')!r} of this {type(module).__name__} was to be operated on, but "
            f"it is {what}, which holds no floating-point or complex tensor and so has no gradient. "
            "Choose a place that does."
        )


class Graft:
    """The places of one module, and what it takes to undo them. Never changed: an edit makes a new one.

    That it is replaced, not changed, keeps shallow copies of the module (``copy.copy``, data-parallel replicas) right.

    Args:
        places: in the order of insertion.
        before: the class of the module before it was first operated on.
        patched: the ``forward`` that stood in the instance's own ``__dict__``, if one did.
    """

    def __init__(self, places: Iterable[Place], before: type, patched: Callable[..., Any] | None) -> None:
        self.places = tuple(places)
        self.before = before
        self.patched = patched

    @property
    def children(self) -> frozenset[str]:
        """The names of the children that are operators or heads: the forward of the module does not meet them."""
        return frozenset(place.child for place in self.places if place.child is not None)

    @property
    def operators(self) -> frozenset[str]:
        """The names of the children that are operators: no part of the model, as its user sees it."""
        return frozenset(p.child for p in self.places if p.child is not None and p.where.kind != "head")
