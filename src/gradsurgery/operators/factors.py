"""The operators that multiply the gradient, as layers: put them into a Sequential, or let the surgery insert them."""

from typing import Any

from torch import Tensor

from .._torch import shown_to_dynamo
from .coefficient import checked_factor, checked_lambd
from .functions import reverse_gradient, scale_gradient, stop_gradient
from .short import ShortInGraphs, short_way

__all__ = ["GradientReversal", "ScaleGradient", "StopGradient"]


class GradientReversal(ShortInGraphs):
    """A layer that passes its input on and multiplies the gradient that comes back by ``-lambd``.

    See ``reverse_gradient`` for what it is for, what it accepts and where it comes from. ``lambd`` may be set at any
    time, is checked at once, and counts for the backward of the forwards that follow. It is a plain float: no
    parameter, no buffer, nothing in ``state_dict``.

    >>> critic = nn.Sequential(GradientReversal(lambd=0.5), nn.Linear(8, 2))
    >>> critic[0].lambd = 1.0

    Args:
        lambd: the strength, a finite number >= 0.

    Raises:
        OperatorError: ``lambd`` is something else, here or when it is set.
    """

    lambd: float  # declared, and no property, so that TorchScript has it as an attribute that can be set

    def __init__(self, lambd: float = 1.0) -> None:
        super().__init__()
        self.lambd = lambd

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "lambd":
            value = checked_lambd(value, "GradientReversal")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return reverse_gradient(x, self.lambd)

    _carrier = "x * -operator.lambd"
    shown_to_dynamo(forward, short_way(_carrier, "reverse_gradient(x, self.lambd)"))

    def extra_repr(self) -> str:
        return f"lambd={self.lambd}"


class ScaleGradient(ShortInGraphs):
    """A layer that passes its input on and multiplies the gradient that comes back by ``scale``.

    See ``scale_gradient``. ``scale`` may be set at any time, like the ``lambd`` of ``GradientReversal``.

    >>> head = nn.Sequential(ScaleGradient(scale=0.1), nn.Linear(8, 2))

    Args:
        scale: the factor, any finite real number.

    Raises:
        OperatorError: ``scale`` is something else, here or when it is set.
    """

    scale: float

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "scale":
            value = checked_factor(value, "ScaleGradient")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return scale_gradient(x, self.scale)

    _carrier = "x * operator.scale"
    shown_to_dynamo(forward, short_way(_carrier, "scale_gradient(x, self.scale)"))

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class StopGradient(ShortInGraphs):
    """A layer that passes its input on without its history: upstream gets no gradient through it.

    See ``stop_gradient``.

    >>> probe = nn.Sequential(StopGradient(), nn.Linear(8, 2))
    """

    def forward(self, x: Tensor) -> Tensor:
        return stop_gradient(x)

    _carrier = "x.detach().clone()"
    shown_to_dynamo(forward, short_way(_carrier, "stop_gradient(x)"))
