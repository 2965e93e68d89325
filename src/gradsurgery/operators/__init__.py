"""The operators: functions and layers that keep or transform a value and change the gradient that comes back."""

from .factors import GradientReversal, ScaleGradient, StopGradient
from .functions import (
    detached_transform,
    frozen_transform,
    map_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)
from .modules import DetachedTransform, FrozenTransform, MapGradient, StraightThrough

__all__ = [
    "DetachedTransform",
    "FrozenTransform",
    "GradientReversal",
    "MapGradient",
    "ScaleGradient",
    "StopGradient",
    "StraightThrough",
    "detached_transform",
    "frozen_transform",
    "map_gradient",
    "reverse_gradient",
    "scale_gradient",
    "stop_gradient",
    "straight_through",
]
