"""Does it do what it says: what reaches each parameter of a model with its operators on and off."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._torch import without_wrappers
from .compare import SHARES, Rounding, difference
from .effects import products, rows_of
from .errors import AddressError, OperatorError
from .measure import Bench, Loss, Step
from .place import Place
from .progress import Progress
from .report import Audit, Check, Inserted
from .scripted.place import walk_compiled
from .stand_in import Counter, Held, factor_set, held_places, replaced, runs_kept, switched_off
from .tables import one_line
from .wrappers import bare, walk

__all__ = ["Measured", "audit", "measure"]


def audit(model: nn.Module, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Audit:
    """Measure what reaches each parameter with the operators on and off, and leave no trace.

        print(gs.audit(model, images, loss=lambda logits: F.cross_entropy(logits, labels)))

    For each parameter: the norm of its gradient with and without the operators, the cosine between the two, the factor
    where it is one number, and one word for the effect. Random streams, buffers such as the statistics of a BatchNorm,
    the mode, and every ``.grad`` are as before at the end. Of a compiled or wrapped model, the model inside is run.
    Heads of :func:`attach_head` run with their operators off too, so that the loss can be the same.

    Args:
        model: the operated model, also through its wrapper.
        *args: what its forward takes. It gets copies of the tensors.
        loss: a function of the output that returns a scalar; None is the sum of every floating-point tensor in the
            output under fixed random weights.
        **kwargs: what its forward takes by name.

    Raises:
        AddressError: where nothing was inserted.
        CaptureError: where the model raises.
        OperatorError: where ``loss`` raises, does not return a scalar, or depends on no parameter.
    """
    with Progress("audit", 2 + len(SHARES)) as progress:
        measured = measure(model, args, kwargs, loss, progress)
    return measured.audit()


@dataclass(frozen=True)
class Measured:
    """The steps that both an audit and a verification start from."""

    model: nn.Module
    bench: Bench
    places: list[Held]
    plain: Step
    operated: Step
    rounding: Rounding
    idle: list[Held]

    @property
    def forward_identical(self) -> bool | None:
        """Whether the bits of the output are the same; None where two equal forwards differ, or it cannot be read."""
        if self.plain.outputs is None or self.operated.outputs is None or self.rounding.forward:
            return None
        return difference(self.plain.outputs, self.operated.outputs) == 0.0

    def audit(self, checks: list[Check] | None = None) -> Audit:
        """What was measured, for people."""
        own = self._owned()
        rows = rows_of(
            self._names_in_order(own),
            self.plain.gradients,
            self.operated.gradients,
            self.rounding,
            products(factor for held in self.places if (factor := factor_set(held.operator)) is not None),
            own,
            [name for name, p in self.bench.parameters.items() if not p.requires_grad],
        )
        operators = [Inserted(h.address, h.side, one_line(h.operator)) for h in self.places]
        losses = (self.operated.loss, self.plain.loss)
        return Audit(rows, operators, self.forward_identical, losses, self._notes(), checks or [])

    def _notes(self) -> list[str]:
        notes = [f"{held} did not run in this forward, so it did nothing" for held in self.idle]
        if self.plain.outputs is None:
            notes.append("the output is of a type that cannot be looked into, so the forward was not compared")
        elif self.rounding.forward:
            notes.append(f"two equal forwards differ by up to {self.rounding.forward:.2g}, so bits cannot be compared")
        if not self.rounding.reproducible:
            notes.append(
                "half the loss does not give exactly half the gradient (several threads, or a kernel that adds in any "
                "order), so gradients are compared up to rounding only"
            )
        if any(not isinstance(held.place, Place) for held in self.places):
            notes.append("whether an operator in TorchScript or in a recorded graph has run is not counted")
        if self.model is not self.bench.root:
            notes.append("the model inside the wrapper was run; compiled or distributed code was not")
        return notes

    def _owned(self) -> list[str]:
        """The parameters that the operators have brought along."""
        there = {id(p) for _, module in walk(self.bench.root) for p in _parameters(module)}
        compiled = [m for _, m in walk(self.bench.root) if isinstance(m, torch.jit.ScriptModule)]
        there |= {id(p) for root in compiled for _, module in walk_compiled(root) for p in _parameters(module)}
        return [name for name, p in self.bench.parameters.items() if id(p) not in there]

    def _names_in_order(self, own: list[str]) -> list[str]:
        """The parameters by the order in which the modules that hold them run."""
        ran = {
            without_wrappers(path): self.bench.order[id(module)]
            for path, module in self.bench.root.named_modules(remove_duplicate=False)
            if id(module) in self.bench.order
        }

        def key(name: str) -> float:
            path = name.rpartition(".")[0]
            while path and path not in ran:
                path = path.rpartition(".")[0]
            if name in own:  # after the module that is operated on, whatever runs inside it
                inside = [k for other, k in ran.items() if not path or f"{other}.".startswith(f"{path}.")]
                return max(inside, default=0) + 0.5
            return ran.get(path, 0)

        return sorted(self.bench.parameters, key=key)


def measure(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Loss | None,
    progress: Progress,
    alone: bool = False,
) -> Measured:
    """Run a model without its operators, as often as it takes to know how it rounds, and with them.

    ``alone`` refuses operators that cannot be measured one by one later.
    """
    bench = Bench(bare(model), args, kwargs, loss)
    places = held_places(bench.root, alone)
    if not places:
        raise AddressError(
            "the effect of the operators was asked for, and nothing was inserted in this model (operators that were "
            "written into it as layers are a part of it and cannot be switched off). Insert one first, with "
            "gs.insert_grl or another; if you did, the module that held it has been replaced since."
        )

    def counted(step: Callable[[], Step]) -> Step:
        done = step()
        progress.step()
        return done

    counters = {id(held.place): Counter(held.operator) for held in places if isinstance(held.place, Place)}
    with runs_kept(bench.root):
        with switched_off(bench.root, places):
            plain = counted(bench.step)
            _refuse_untrained(bench, plain)
            shaken = [counted(lambda share=share: bench.step(share)) for share in SHARES]  # type: ignore[misc]
        with replaced(places, dict(counters)):
            operated = counted(bench.step)
    idle = [held for held in places if id(held.place) in counters and not counters[id(held.place)].log.calls]
    return Measured(model, bench, places, plain, operated, Rounding(plain, shaken), idle)


def _refuse_untrained(bench: Bench, plain: Step) -> None:
    if any(gradient is not None for gradient in plain.gradients.values()):
        return
    learning = sum(p.requires_grad for p in bench.parameters.values())
    there = (
        f"none of the {learning} parameters that require grad" if learning else "no parameter requires grad, so none"
    )
    raise OperatorError(
        f"what reaches each parameter was asked for, but the loss depends on no parameter: {there} gets a gradient, "
        "even without the operators. Give a loss of the output that was not detached, or set requires_grad."
    )


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))
