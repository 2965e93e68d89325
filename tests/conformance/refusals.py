"""The cells that are refused, each with its reason. What is refused and not here is a failure, and the reverse too."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from .nets import OPERATORS, PLACES
from .tools import Cell


@dataclass(frozen=True)
class Refusal:
    """Cells that are refused, and how.

    Attributes:
        tools: a pattern for the whole name of the tool.
        reason: as the page says it.
        message: a pattern that the error must contain.
        operators: all of them by default.
        places: likewise.
    """

    tools: str
    reason: str
    message: str
    operators: Collection[str] = tuple(OPERATORS)
    places: Collection[str] = tuple(PLACES)

    def covers(self, cell: Cell) -> bool:
        return bool(
            re.fullmatch(self.tools, cell.tool) and cell.operator in self.operators and cell.place in self.places
        )


REFUSALS = [
    Refusal(
        r"(script|trace), loaded without this package",
        "The graph holds the function of the gradient by its name, in an op that this package brings.",
        "the other process could not run the file",
        ["MapGradient"],
    ),
    Refusal(
        r"export, run_decompositions",
        "Decomposed graphs are for inference: torch makes nothing of a detach there, and an error of the write that "
        "every operator keeps beside it. Train the program before decomposing it.",
        "derivative for aten::copy is not implemented",
        [operator for operator in OPERATORS if operator != "MapGradient"],
    ),
    Refusal(
        r"func\.(jvp|jacfwd|hessian|linearize)|forward-mode AD",
        "A function of the gradient says nothing of tangents that are pushed forward.",
        "OperatorError: map_gradient",
        ["MapGradient"],
    ),
    Refusal(
        r"script of a trace of fx",
        "A graph of fx calls the operator as a function, whose fn TorchScript cannot compile.",
        "Unknown type constructor Callable",
        ["StraightThrough", "FrozenTransform", "DetachedTransform"],
        ["plain module", "root", "op", "GraphModule", "layer"],
    ),
    Refusal(
        r"script of a trace of fx",
        "As for a script: TorchScript cannot keep gradients from parameters.",
        "OperatorError: torch.jit.script was asked for",
        ["FrozenTransform"],
        ["Sequential", "leaf", "input side"],
    ),
    Refusal(
        r"compile of func\.grad",
        "Dynamo of this release inlines the Function under a transform and would drop its backward.",
        "map_gradient|OperatorError",
        ["MapGradient"],
    ),
    Refusal(
        r"script|script, (?!coefficient).*",
        "The parameters of fn require grad, and TorchScript cannot keep gradients from them: "
        "call fn.requires_grad_(False) before scripting.",
        "OperatorError: torch.jit.script was asked for FrozenTransform",
        ["FrozenTransform"],
    ),
    Refusal(
        r"DataParallel replicas, imitated",
        "A replica holds copies that autograd knows in place of its parameters, and frozen_transform refuses whatever "
        "gradient it cannot keep from them; use DistributedDataParallel.",
        "OperatorError: frozen_transform",
        ["FrozenTransform"],
        [place for place in PLACES if place != "GraphModule"],
    ),
    Refusal(
        r"nested, strided",
        "An autograd.Function asks for the shape of the older nested tensor, which has none; use layout=torch.jagged.",
        "NestedTensorImpl doesn't support sizes",
        ["MapGradient"],
    ),
    Refusal(
        r"checkpoint around, reentrant",
        "Torch refuses a reentrant checkpoint whose output needs no gradient, by hand as well.",
        "none of output has requires_grad=True",
        ["StopGradient", "DetachedTransform"],
        ["root"],
    ),
    Refusal(
        r"DTensor, tensor parallel",
        "parallelize_module partitions every child of the layer in its plan as it does the layer, the operator among "
        "them; name the module around it in the plan, or the place behind it.",
        "has no attribute 'weight'",
        ["StraightThrough", "FrozenTransform", "DetachedTransform", "MapGradient"],
        ["Sequential"],
    ),
    Refusal(
        r"DTensor, tensor parallel",
        "Likewise, with the parameters of the operator's own function.",
        "parameter name can",
        ["StraightThrough", "FrozenTransform", "DetachedTransform"],
        ["input side"],
    ),
]


def refusal_of(cell: Cell) -> Refusal | None:
    """The entry that covers a cell."""
    return next((one for one in REFUSALS if one.covers(cell)), None)
