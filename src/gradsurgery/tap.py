"""A tap: a value leaves for a head, in the forward that makes it, and passes on as it was.

The tapped place and the root share one :class:`Tap`. The root arms it before its forward and takes the value after it,
so that a forward which is run again later (activation checkpointing) or on its own leaves nothing behind. Each thread
has its own, since replicas of a model run at the same time.
"""

import threading
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .address import Where
from .capture.versions import is_changed, note_version, version
from .elements import element_of
from .errors import CaptureError, OperatorError
from .operators.formula import copied
from .operators.values import map_tensors, tensors_in
from .place import Form, Graft, Place

__all__ = ["HeadPlace", "Tap", "TapPlace", "add_heads", "arm"]


class _Kept:
    """A value as it passed, also where the model changes it in place before the head takes it.

    The value itself serves where it was not changed, so that its gradients add up in the order of a head that is
    written at the end of the forward; else a copy that was made as it passed.
    """

    def __init__(self, value: Any, key: str) -> None:
        self.passed = value
        self.key = key
        self.copy = map_tensors(_copied, value)
        self.versions = [self._noted(k, tensor) for k, tensor in enumerate(tensors_in(value))]
        self.has_gradient = torch.is_grad_enabled()

    def _noted(self, k: int, tensor: Any) -> int:
        note_version(tensor, f"{self.key} {k}")
        return version(tensor)

    def value(self) -> Any:
        for k, tensor in enumerate(tensors_in(self.passed)):
            # What a tracer has in the place of a tensor does not tell.
            if not isinstance(tensor, Tensor) or is_changed(tensor, f"{self.key} {k}", self.versions[k]):
                return self.copy
        return self.passed


def _copied(tensor: Any) -> Any:
    return copied(tensor) if isinstance(tensor, Tensor) else tensor.clone()


class Tap(nn.Module):
    """What lies between a tapped place and the root that takes the value."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__()
        self.address = address
        self.name = name
        self.key = uuid.uuid4().hex
        self._armed: dict[int, list[_Kept]] = {}

    def arm(self) -> None:
        """From now on, on this thread, values that pass are kept."""
        self._armed[_thread()] = []

    def forward(self, value: Any) -> Any:
        armed = self._armed.get(_thread())
        if armed is not None:
            armed.append(_Kept(value, self.key))
        return value

    def disarm(self) -> None:
        """Let go of what was kept: the forward raised before it was taken."""
        self._armed.pop(_thread(), None)

    def take(self) -> Any:
        """The value that passed since the tap was armed, which it no longer is.

        Raises:
            CaptureError: where none passed, or several, or one that carries no gradient.
        """
        armed = self._armed.pop(_thread(), [])
        asked = f"the head {self.name!r} takes the value at {self.address!r}"
        if not armed:
            raise CaptureError(
                f"{asked}, but nothing passed there in this forward. Attach it to a place that runs whenever the model "
                "does: gs.sites(model, example=...) lists what runs."
            )
        if len(armed) > 1:
            raise CaptureError(
                f"{asked}, but {len(armed)} values passed there in this forward. Attach it to one call, such as "
                "'block:act@0', or to a place that runs once."
            )
        kept = armed[0]
        if kept.has_gradient != torch.is_grad_enabled():
            then, now = ("on", "off") if kept.has_gradient else ("off", "on")
            raise CaptureError(
                f"{asked}, but that ran with gradients {then}, and the model with them {now}: the head would train "
                "nothing. Inside torch.no_grad() there is no gradient to take; under activation checkpointing use "
                "use_reentrant=False."
            )
        return kept.value()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_armed": {}, "key": uuid.uuid4().hex}

    def extra_repr(self) -> str:
        return f"head={self.name!r}"


def _thread() -> int:
    # Code is compiled for whichever thread runs it.
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class TapPlace(Place):
    """A place whose value leaves for a head; ``branch`` acts on the way there only."""

    def __init__(self, where: Where, tap: Tap, branch: nn.Module | None, hops: int, inner: str = "") -> None:
        super().__init__(where, tap, None, hops, inner)
        self.tap = tap
        self.branch = branch

    def operator(self, module: nn.Module) -> nn.Module:
        return self.branch if self.branch is not None else self.tap

    def form(self, module: nn.Module) -> Form:
        return Form(self.where, None, Tap, head=self.tap.name)

    def live(self) -> None:
        return None

    def held(self) -> list[nn.Module]:
        return [self.tap, *([self.branch] if self.branch is not None else [])]

    def again(self, copied: Callable[[Any], Any]) -> "TapPlace":
        return TapPlace(self.where, copied(self.tap), copied(self.branch), self.hops, self.inner)

    def run(self, module: nn.Module, value: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.runs += 1
        self.tap.forward(element_of(value, self.where.element))
        return value


class HeadPlace(Place):
    """The end of a root's forward, where one of its heads runs; the head is the child ``child``.

    ``path`` are the attributes that lead from the root to the tapped module, for TorchScript.
    """

    def __init__(
        self, name: str, tap: Tap, branch: nn.Module | None, training_only: bool, path: tuple[str, ...]
    ) -> None:
        super().__init__(Where("head", op=name), None, name)
        self.path = path
        self.tap = tap
        self.branch = branch
        self.training_only = training_only

    def form(self, module: nn.Module) -> Form:
        return Form(
            self.where,
            self.child,
            type(self.live() or self.tap),
            self.where.op,
            () if self.training_only else self.path,
        )

    def live(self) -> nn.Module | None:
        return self.branch

    def put(self, module: nn.Module, operator: nn.Module) -> None:
        self.branch = operator

    def held(self) -> list[nn.Module]:
        return [self.tap, *([self.branch] if self.branch is not None else [])]

    def again(self, copied: Callable[[Any], Any]) -> "HeadPlace":
        return HeadPlace(self.where.op, copied(self.tap), copied(self.branch), self.training_only, self.path)

    def is_on(self, module: nn.Module) -> bool:
        """Whether the head runs in the mode that the root is in."""
        return module.training or not self.training_only

    def read(self, module: nn.Module) -> Tensor:
        """What the head makes of the value that the tap kept."""
        value = self.tap.take()
        if self.branch is not None:
            value = self.branch.forward(value)
        made = self.operator(module)(value)
        if not isinstance(made, Tensor) and not hasattr(made, "__torch_function__"):
            raise OperatorError(
                f"the head {self.where.op!r} returned a {type(made).__name__}. A head returns one tensor, such as "
                "logits: put a layer behind it that does."
            )
        return made


def arm(module: nn.Module) -> None:
    """Before the forward of a root: its taps keep what passes from here on."""
    for place in _heads(module):
        if place.is_on(module):
            place.tap.arm()


def add_heads(module: nn.Module, value: Any) -> Any:
    """After the forward of a root: its output, and what each of its heads makes of the value it takes."""
    made = {place.where.op: place.read(module) for place in _heads(module) if place.is_on(module)}
    return (value, made) if made else value


def _heads(module: nn.Module) -> list[HeadPlace]:
    graft: Graft = module.__dict__["_gs_graft"]
    return [place for place in graft.places if isinstance(place, HeadPlace)]
