"""The promises that one model is held to: boundaries, a head, opened forwards. Empty lists are passes."""

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import gradsurgery as gs

from .._operated import anatomy
from .._reference import Met, is_real, leaves, met, same_bits, same_output, scaled
from .runs import Left, Runner, Watch

STRENGTHS = (0.5, 0.25, 2.0)
"""Of the reversals at the first, middle and last place: powers of two, all different, so that none hides another."""

HEAD = "gs_coverage"

ROUNDING = 1e-5
"""Of the norm of a gradient in single precision: what is put down to the order of additions."""

ZERO = 1e-9
"""Of the largest norm of any gradient of the model: what counts as none."""


class Reading(nn.Module):
    """A head with a parameter, for a value of any form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, value: Any) -> Tensor:
        parts = [leaf.abs().square().mean().float() for leaf in leaves(value) if is_real(leaf)]
        return torch.stack(parts) * self.weight


@dataclasses.dataclass
class Plain:
    """What the untouched model does."""

    left: Left
    evaluated: Any
    head: Left | None
    head_at: str
    places: list[str]
    ran: dict[type, str]


def plain(runner: Runner, head: Reading, evaluate: bool) -> Plain:
    """One forward and backward of the untouched model, and the gradients of a head cut in by hand at the middle."""
    watch = Watch(runner.model)
    try:
        output = runner.forward()
    finally:
        watch.close()
    left = runner.backward(output, keep=True)
    places = watch.places()
    place = Met(runner.model)
    once = [name for name in places if watch.ended[place(name)].calls == 1]
    middle = len(places) // 2
    at = min(once, key=lambda name: abs(places.index(name) - middle), default="")
    by_hand = None
    if at:
        ended = watch.ended[place(at)]
        with contextlib.suppress(RuntimeError):  # some functions of autograd let go of what they saved
            if not ended.changed():
                by_hand = _head_by_hand(runner, output, ended.value, head)
        watch.forget()
        if by_hand is None:  # or somebody writes to that value later, and the head wants it as it was returned
            by_hand = _head_by_copy(runner, at, head)
    evaluated = runner.evaluated() if evaluate else None
    return Plain(left, evaluated, by_hand, at, places, watch.classes)


def _head_by_hand(runner: Runner, output: Any, value: Any, head: Reading) -> Left:
    head.zero_grad(set_to_none=True)
    made = head(scaled(value, -STRENGTHS[0]))
    left = runner.backward((output, {HEAD: made}))
    left.gradients[f"{HEAD}.weight"] = head.weight.grad
    head.weight.grad = None
    return left


def _head_by_copy(runner: Runner, at: str, head: Reading) -> Left:
    kept: list[Any] = []
    place = runner.model.get_submodule(met(runner.model, at))
    handle = place.register_forward_hook(lambda _module, _args, value: kept.append(scaled(value, -STRENGTHS[0])))
    try:
        output = runner.forward()
    finally:
        handle.remove()
    head.zero_grad(set_to_none=True)
    left = runner.backward((output, {HEAD: head(kept[0])}))
    left.gradients[f"{HEAD}.weight"] = head.weight.grad
    head.weight.grad = None
    return left


def chosen(places: list[str]) -> list[str]:
    """The first, the middle and the last."""
    picked = [places[0], places[len(places) // 2], places[-1]] if places else []
    return list(dict.fromkeys(picked))


def referenced(runner: Runner, places: list[str]) -> Left:
    """The gradients with reversals hooked in by hand at all the places."""
    handles = []
    for path, strength in zip(places, STRENGTHS, strict=False):
        place = runner.model.get_submodule(met(runner.model, path))
        hook = lambda _module, _args, output, factor=-strength: scaled(output, factor)  # noqa: E731
        handles.append(place.register_forward_hook(hook))
    try:
        return runner.step()
    finally:
        for handle in handles:
            handle.remove()


def _named(kind: str, faults: list[str]) -> list[str]:
    return [f"{kind}: {len(faults)}, {faults[:3]}"] if faults else []


def compared(got: Left, right: Left, output: Any, numeric: bool) -> list[str]:
    """Forward and gradients against what they have to be; on meta, shapes and which parameters are reached."""
    if not numeric:
        shapes = [[(leaf.shape, leaf.dtype) for leaf in leaves(value)] for value in (got.output, output)]
        faults = [] if shapes[0] == shapes[1] else ["forward: other shapes"]
        return faults + ([] if got.reached() == right.reached() else ["backward: reaches other parameters"])
    faults = [] if same_output(got.output, output) else ["forward differs"]
    return faults + _named("gradients differ", got.differing(right))


def is_rounding(got: Left, right: Left) -> bool:
    """Whether gradients differ by no more than additions in another order make of them.

    Where a value has several readers, an operator on the way to some adds up their gradients before the others'.
    """
    largest = max(float(value.norm()) for value in right.gradients.values() if isinstance(value, Tensor))
    for name in got.differing(right):
        one, other = got.gradients.get(name), right.gradients.get(name)
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
            return False
        # Some gradients are zero but for rounding: that of the bias of an attention's keys, whatever the model.
        if not float((one - other).norm()) <= ROUNDING * float(other.norm()) + ZERO * largest:
            return False
    return True


def identity(model: nn.Module) -> list[Any]:
    """What has to stay as it is when a model is operated on."""
    return [
        list(model.state_dict()),
        [(name, id(value)) for name, value in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
        [(name, type(module).__name__) for name, module in model.named_modules()],
    ]


def traces(before: Any, after: Any) -> list[str]:
    """What an undone operation left behind; the model may hold caches of its own."""
    wrong = [name for name in before if after[name][0] is not before[name][0] or after[name][2] != before[name][2]]
    wrong += [name for name in before if any("gs" in key.lower().strip("_").split("_") for key in after[name][1])]
    return _named("undo leaves a trace", wrong)


def boundaries(runner: Runner, known: Plain, places: list[str]) -> list[str]:
    """Reversals at the first, middle and last place that ends, all at once and each of its own strength."""
    model, numeric = runner.model, runner.device != "meta"
    if not places:
        return ["no module's output gets a gradient"]
    right = referenced(runner, places) if numeric else known.left
    faults = []
    if numeric and not right.differing(known.left):
        faults.append("vacuous: the reference changes no gradient")
    before, stays = anatomy(model), identity(model)
    for again in (False, True):
        for path, strength in zip(places, STRENGTHS, strict=False):
            if gs.insert_grl(model, path, strength) is not model:
                faults.append("insertion returned another object")
        if identity(model) != stays or not all(
            isinstance(model.get_submodule(name), before[name][0]) for name in before
        ):
            faults.append("identity: keys, parameters, names or classes differ")
        if len(gs.operations(model)) < len(places):
            faults.append("operations() lacks rows")
        if not again:
            gs.remove(model)
            if anatomy(model) != before:
                faults.append("insertion and removal leave a trace")
    faults += compared(runner.step(), right, known.left.output, numeric)
    idle = [row.address for row in gs.operations(model) if not row.runs]
    faults += _named("never ran", idle)
    if known.evaluated is not None and not same_output(runner.evaluated(), known.evaluated):
        faults.append("eval: forward differs")
    gs.remove(model)
    return faults + traces(before, anatomy(model))


def _sends_back(known: Plain) -> bool:
    assert known.head is not None
    return any(not same_bits(value, known.head.gradients[name]) for name, value in known.left.gradients.items())


def headed(runner: Runner, known: Plain, head: Reading) -> list[str]:
    """A head behind a reversal at the middle place: the branch reversed, the main path plain."""
    model, numeric = runner.model, runner.device != "meta"
    assert known.head is not None
    before = anatomy(model)
    keys = list(model.state_dict())
    gs.attach_head(model, known.head_at, head, name=HEAD, operator=gs.GradientReversal(STRENGTHS[0]))
    faults = [] if list(model.state_dict()) == [*keys, f"{HEAD}.weight"] else ["state_dict keys"]
    faults += compared(runner.step(), known.head, known.head.output, numeric)
    if numeric and not _sends_back(known):
        faults.append("vacuous: the head sends no gradient back")
    gs.remove(model)
    return faults + traces(before, anatomy(model))
