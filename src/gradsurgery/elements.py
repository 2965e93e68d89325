"""One element of a nested value replaced, everything else and the type kept."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .address import Element
from .errors import OperatorError

__all__ = ["element_of", "replace_element"]


def element_of(value: Any, path: Element) -> Any:
    """The element of a nested value at a path; the value itself where the path is empty.

    Raises:
        OperatorError: where there is no such element.
    """
    for name in path:
        key = _key_in(value, name)
        value = getattr(value, key) if _is_plain_dataclass(value) else value[key]
    return value


def replace_element(value: Any, path: Element, operate: Callable[[Any], Any]) -> Any:
    """``value`` with ``operate`` of the element at ``path`` in the place of that element.

    Raises:
        OperatorError: where there is no such element.
    """
    key, rest = _key_in(value, path[0]), path[1:]
    part = getattr(value, key) if _is_plain_dataclass(value) else value[key]
    new = replace_element(part, rest, operate) if rest else operate(part)
    if isinstance(value, tuple):
        items = [new if index == key else item for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    # A shallow copy and one assignment: a subclass of dict or list may have a constructor of its own.
    again = copy.copy(value)
    if _is_plain_dataclass(value):
        object.__setattr__(again, key, new)  # frozen ones too
    else:
        again[key] = new
    return again


def _key_in(value: Any, key: int | str) -> Any:
    """The key as this kind of value takes it: not negative, and a name where a mapping is indexed by position."""
    names: list[Any]
    if isinstance(value, tuple | list):
        fields = getattr(value, "_fields", ())
        if key in fields:  # of a namedtuple
            key = fields.index(key)
        names = list(range(len(value)))
    elif isinstance(value, dict):
        names = list(value)
    elif _is_plain_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        kind = "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise OperatorError(
            f"the element [{key!r}] was to be operated on, but the value is {kind}, which has no elements to choose "
            "from. Elements are those of a tuple, list, dict or dataclass; leave the brackets off for the whole value."
        )
    if key in names:
        return key
    if isinstance(key, int) and -len(names) <= key < len(names):
        return names[key]
    raise OperatorError(
        f"the element [{key!r}] was to be operated on, but the {type(value).__name__} there has "
        f"{', '.join(f'[{name!r}]' for name in names) or 'no elements at all'}."
    )


def _is_plain_dataclass(value: Any) -> bool:
    # A transformers ModelOutput is a dataclass and a dict: as a dict it keeps both views of itself right.
    return dataclasses.is_dataclass(value) and not isinstance(value, dict | type)
