"""The types of compiled values: where a tensor is in them, and which of them an address names."""

import re
from typing import Any

from torch.jit import ScriptModule

from .._torchscript import graph_of_method, names_of_arguments
from ..address import Element
from ..errors import CaptureError, OperatorError

__all__ = ["argument_of", "check_value", "index_in", "method_for", "passes", "type_of_output"]

_METHODS = {"Tensor": "forward", "Optional[Tensor]": "optional", "List[Tensor]": "list", "Dict[str, Tensor]": "dict"}
_SCALARS = {"int", "float", "bool", "str", "complex", "number", "Device", "device", "NoneType", "None"}
_PLAIN = _SCALARS | {"Optional", "List", "Dict"}


def type_of_output(module: ScriptModule, method: str) -> Any:
    """The type of what a method returns; its graph has one value there, however many returns its source has."""
    return graph_of_method(module, method).return_node().inputsAt(0).type()


def method_for(kind: Any) -> str | None:
    """The method of a :class:`gradsurgery.scripted.place.ScriptPlace` that takes a value of this type."""
    return _METHODS.get(str(kind.annotation_str))


def passes(kind: Any) -> bool:
    """Whether values of this type hold no tensor."""
    if kind.kind() == "TupleType":
        return all(passes(part) for part in kind.elements())
    return set(re.findall(r"\w+", str(kind.annotation_str))) <= _PLAIN


def check_value(kind: Any, element: Element, address: str) -> None:
    """Refuse a value that cannot be operated on.

    Raises:
        OperatorError: where it holds no tensor, or has no such element.
        CaptureError: where its tensors are out of reach for compiled code.
    """
    if element:
        position = index_in(kind, element[0], address)
        check_value(kind.elements()[position], element[1:], address)
    elif passes(kind):
        raise OperatorError(
            f"{address!r} was to be operated on, but it is of the type {kind.annotation_str}, which holds no "
            "floating-point or complex tensor and so has no gradient. Choose a place that does."
        )
    else:
        _check_reach(kind, address)


def _check_reach(kind: Any, address: str) -> None:
    if kind.kind() == "TupleType":
        for part in kind.elements():
            _check_reach(part, address)
    elif method_for(kind) is None and not passes(kind):
        raise CaptureError(
            f"{address!r} was asked for, whose value has the type {kind.annotation_str} in TorchScript. A compiled "
            "operator reaches tensors in tuples, and in an Optional, a List and a Dict[str, ...] of tensors. Name one "
            "element of a tuple that is one of these, or operate on the nn.Module that this was made from."
        )


def index_in(kind: Any, key: int | str, address: str) -> int:
    """The position that a key names in a tuple.

    Raises:
        OperatorError: where there is none.
    """
    if kind.kind() != "TupleType":
        raise OperatorError(
            f"the element [{key!r}] was to be operated on at {address!r}, but the value has the type "
            f"{kind.annotation_str} there. In TorchScript the elements that can be chosen are those of a tuple; leave "
            "the brackets off for the whole value."
        )
    count = len(kind.elements())
    if not isinstance(key, int) or not -count <= key < count:
        raise OperatorError(
            f"the element [{key!r}] was to be operated on at {address!r}, but the tuple there has "
            f"{', '.join(f'[{k}]' for k in range(count)) or 'no elements at all'}."
        )
    return key % count


def argument_of(module: ScriptModule, method: str, key: int | str, address: str) -> int:
    """The position of the argument that a key names.

    Raises:
        OperatorError: where there is none.
    """
    names = names_of_arguments(module, method)
    if key in names:
        return names.index(str(key))
    if isinstance(key, int) and -len(names) <= key < len(names):
        return key % len(names)
    raise OperatorError(
        f"the element [{key!r}] was to be operated on at {address!r}, but the arguments there are "
        f"{', '.join(f'[{k}] or [{name!r}]' for k, name in enumerate(names)) or 'none at all'}."
    )
