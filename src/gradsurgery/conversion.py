"""A converted model held against the one that it was made from: the same outputs, the same gradients, or how far off.

Another runtime computes the same sums in another order. How much that may matter is measured on the model itself: its
parameters and inputs are moved by one rounding each, and what that changes in the output and in each gradient, 16
times, is what counts as rounding. On the timm models that this was chosen on, onnxruntime differs by 0.7 to 1.2 times.
"""

import copy
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import without_wrappers
from .compare import MARGIN, difference, gap, has, same
from .errors import VerificationError
from .example import Arguments
from .listing import places_of
from .measure import Bench, Gradients, Step
from .operators.values import map_tensors
from .place import Place
from .progress import Progress
from .stand_in import runs_kept

__all__ = ["Compared", "Conversion", "Reference", "say"]

DRAWS = 3
"""How many times the model is moved by a rounding."""


@dataclass(frozen=True)
class Compared:
    """One thing that a converted model has to share with the original, and how far that was checked.

    Attributes:
        what: was compared.
        result: ``"exact"``, ``"within rounding"`` or ``"not checked"``.
        note: the figures, or why it was not checked.
    """

    what: str
    result: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.result}" + (f" ({self.note})" if self.note else "")


@dataclass
class Conversion:
    """A converted model and what was verified of it; its text is what the conversion functions print.

    Attributes:
        format: ``"torchscript"``, ``"exported"`` or ``"onnx"``.
        how: it was made.
        converted: the model in that format.
        content: the bytes of its file.
        checks: what was compared.
        notes: what else there is to know.
        path: where it was written, if it was.
    """

    format: str
    how: str
    converted: Any
    content: bytes
    checks: list[Compared]
    notes: list[str] = field(default_factory=list)
    path: str | None = None

    def __str__(self) -> str:
        where = f", {len(self.content) / 2**20:.1f} MiB in {self.path}" if self.path else ""
        return "\n".join([f"{self.format}: {self.how}{where}", *map(str, self.checks), *self.notes])


def say(conversion: Conversion) -> None:
    """Print what was verified."""
    sys.stdout.write(f"{conversion}\n")


class Reference:
    """The model that is converted, as it computes in eager mode on the example.

    Args:
        root: the bare model. It is left as it was.
        arguments: the example.
        gradients: whether they have to be kept too.
        progress: counts the steps.
    """

    def __init__(self, root: nn.Module, arguments: Arguments, gradients: bool, progress: Progress) -> None:
        self.root, self.arguments, self.gradients, self.progress = root, arguments, gradients, progress
        places = {
            id(place): (place.where.text(path), place)
            for path, _, place in places_of(root)
            if isinstance(place, Place) and place.where.kind != "head"
        }
        before = {key: place.runs for key, (_, place) in places.items()}
        with runs_kept(root):
            self.step = self._step(Bench(root, *arguments, None))
            self.idle = [address for key, (address, place) in places.items() if place.runs == before[key]]
        self._swayed: list[Step] | None = None

    def hold(self, converted: nn.Module, runs: int = 1) -> list[Compared]:
        """Compare a converted model, in each of ``runs`` forwards, with the original.

        Raises:
            VerificationError: where they differ.
        """
        bench = Bench(converted, *self.arguments, None)
        steps = [self._step(bench) for _ in range(runs)]
        again = f", in each of {runs} runs" if runs > 1 else ""
        forward = [self.forward(step.outputs) for step in steps]
        found = [_worst(forward, again)]
        if self.gradients:
            found.append(_worst([self._backward(step.gradients) for step in steps], again))
        return found

    def forward(self, outputs: list[Tensor] | None) -> Compared:
        """Compare the outputs alone."""
        due = self.step.outputs
        if outputs is None or due is None:
            return Compared("outputs", "not checked", "they are of a type that cannot be looked into")
        apart = difference(due, outputs)
        if apart == 0.0:
            return Compared("outputs", "exact", "bit-identical")
        bound = MARGIN * max(difference(due, step.outputs or []) for step in self._sway())
        said = f"off by up to {apart:.2g}, where one rounding of each weight makes {bound / MARGIN:.2g}"
        if apart <= bound:
            return Compared("outputs", "within rounding", said)
        raise VerificationError(
            f"the converted model was to give the outputs of the original. They are {said}. Nothing was written. Where "
            "the forward depends on more than its inputs (the mode, a branch on values, a rounding that one bit turns "
            "over), convert it in that state, or with an example that is typical."
        )

    def _backward(self, gradients: Gradients) -> Compared:
        exact, rounded, wrong = 0, 0, []
        names: dict[int, list[str]] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(without_wrappers(name))
        tied = {aliases[0]: aliases for aliases in names.values()}
        for name, due in self.step.gradients.items():
            # A parameter with two names may be listed under the other one; as two parameters it would train apart.
            listed = [alias for alias in tied[name] if alias in gradients]
            if len(listed) > 1:
                wrong.append(
                    f"{name}: one parameter has become {len(listed)}, {' and '.join(listed)}, which train apart"
                )
                continue
            there = gradients[listed[0]] if listed else None
            if due is None or there is None:
                if due is not there:
                    wrong.append(f"{name}: {'none, where some was' if there is None else 'some, where none was'} due")
                exact += due is there
            elif same(due, there):
                exact += 1
            else:
                swayed = [step.gradients[name] for step in self._sway()]
                bound = MARGIN * max(gap(due, other) for other in swayed if other is not None)
                if gap(due, there) <= bound:
                    rounded += 1
                else:
                    wrong.append(f"{name}: off by up to {gap(due, there):.2g}, rounding is {bound:.2g}")
        if wrong:
            raise VerificationError(
                f"the converted model was to have the gradients of the original. They differ in {len(wrong)} "
                f"parameters: {'; '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}. Nothing was written. Operate "
                "after the conversion instead of before it, where that format can be operated on."
            )
        if not any(has(gradient) for gradient in self.step.gradients.values()):
            return Compared("gradients", "not checked", "no parameter gets one on this example")
        result = "within rounding" if rounded else "exact"
        return Compared(f"gradients of {exact + rounded} parameters", result, f"{rounded} rounded" if rounded else "")

    def _sway(self) -> list[Step]:
        """The same step of copies of the model whose parameters and inputs are moved by one rounding each."""
        if self._swayed is None:
            generator = torch.Generator().manual_seed(0)
            self._swayed = []
            for _ in range(DRAWS):
                root = copy.deepcopy(self.root)
                with torch.no_grad():
                    for parameter in root.parameters():
                        parameter.copy_(_moved(parameter, generator))
                    args, kwargs = map_tensors(lambda tensor: _moved(tensor, generator), self.arguments)
                self._swayed.append(self._step(Bench(root, args, kwargs, None)))
        return self._swayed

    def _step(self, bench: Bench) -> Step:
        step = bench.step() if self.gradients else Step(bench.outputs(), 0.0, {})
        self.progress.step()
        return step


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    # In the precision of the tensor: in that of another one, 1 + eps is 1, or the result of another type.
    signs = (torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1).to(tensor)
    return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)


def _worst(found: list[Compared], again: str) -> Compared:
    order = ("not checked", "within rounding", "exact")
    worst = min(found, key=lambda one: order.index(one.result))
    return Compared(worst.what + again, worst.result, worst.note)
