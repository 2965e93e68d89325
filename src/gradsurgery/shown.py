"""What Dynamo is shown in the place of the method of a place: the short way of its operator."""

from typing import Any

from torch import nn

from ._torch import constant_to_dynamo, shown_to_dynamo
from .operators.moved import is_unpatched
from .operators.short import short_way
from .passed_by import is_as_written
from .place import operator_name

__all__ = ["show_short_way"]


def show_short_way(method: Any, k: int, operator: Any) -> dict[str, Any]:
    """Let Dynamo trace the short way of the operator at place ``k``, and return the method that this way asks.

    Args:
        method: that of the generated class which the value passes through.
        k: the place.
        operator: the type of the operator, one of those that have a short way.
    """
    name, asked = method.__name__, f"{method.__name__}_is_short"

    # Once for each compilation: Dynamo does not ask again what the methods of a class are, so neither need this.
    @constant_to_dynamo
    def is_short(self: nn.Module, *plain: Any) -> bool:
        held = self.__dict__[operator_name(k)]  # another may stand in its place for a while
        return type(held) is operator and is_unpatched(operator) and is_as_written(self) and held._is_short(*plain)

    is_short.__name__ = asked  # by which Dynamo looks for it
    shown = short_way(
        operator._carrier, f"self.{name}_place.run(self, x)", name, f"self.{operator_name(k)}", f"self.{asked}"
    )
    shown_to_dynamo(method, shown)
    return {asked: is_short}
