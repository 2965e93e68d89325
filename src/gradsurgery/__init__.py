"""Operate on the gradient of an existing network: reverse, scale, stop or bypass it at a named place.

    import timm, gradsurgery as gs

    model = timm.create_model("resnet50")
    gs.insert_grl(model, "layer3")      # everything up to and including layer3 now climbs the loss

Everything else about the model stays as it was: class, methods, hooks, parameters, ``state_dict`` keys, the forward.
"""

from .audit import audit
from .convert import to_exported, to_onnx, to_torchscript
from .errors import AddressError, CaptureError, OperatorError, SurgeryError, VerificationError
from .heads import DomainHead, attach_head
from .operators import (
    DetachedTransform,
    FrozenTransform,
    GradientReversal,
    MapGradient,
    ScaleGradient,
    StopGradient,
    StraightThrough,
    detached_transform,
    frozen_transform,
    map_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)
from .recipe import apply, recipe
from .report import Audit
from .review import disabled, graph, operations, remove, sites
from .schedule import GRLScheduler
from .surgery import insert, insert_grl, insert_scale_gradient, insert_stop_gradient, insert_transform
from .tables import Operation, Site
from .verify import verify

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "Audit",
    "CaptureError",
    "DetachedTransform",
    "DomainHead",
    "FrozenTransform",
    "GRLScheduler",
    "GradientReversal",
    "MapGradient",
    "Operation",
    "OperatorError",
    "ScaleGradient",
    "Site",
    "StopGradient",
    "StraightThrough",
    "SurgeryError",
    "VerificationError",
    "__version__",
    "apply",
    "attach_head",
    "audit",
    "detached_transform",
    "disabled",
    "frozen_transform",
    "graph",
    "insert",
    "insert_grl",
    "insert_scale_gradient",
    "insert_stop_gradient",
    "insert_transform",
    "map_gradient",
    "operations",
    "recipe",
    "remove",
    "reverse_gradient",
    "scale_gradient",
    "sites",
    "stop_gradient",
    "straight_through",
    "to_exported",
    "to_onnx",
    "to_torchscript",
    "verify",
]
