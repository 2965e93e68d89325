"""One place of one network, operated on by the package and held against the hand-written reference.

``check`` answers with one line per broken promise; an empty list is a pass.
"""

import copy
from collections.abc import Callable

from torch import nn

import gradsurgery as gs

from ._reference import Call, Step, hooked, met, same_output, step

LAMBD = 0.5

Anatomy = dict[str, tuple[type, tuple[str, ...], int]]
"""Per module: its class, the names in its ``__dict__`` and its number of hooks."""

Steps = dict[bool, Step]
"""The step of a network by mode: True is train."""


def both_modes(model: nn.Module, call: Call) -> Steps:
    """What a network does in eval and then in train, its gradients as digests."""
    return {training: step(model, call, training).digested() for training in (False, True)}


def untouched(pristine: nn.Module, call: Call) -> Steps:
    """What a network does before anybody touches it."""
    return both_modes(copy.deepcopy(pristine), call)


def _named(kind: str, faults: list[str]) -> list[str]:
    return [f"{kind}: {len(faults)} of them, {faults[:3]}"] if faults else []


def _mode_faults(mode: str, got: Step, right: Step, plain: Step) -> list[str]:
    faults = [] if same_output(right.output, plain.output) else [f"{mode}: the reference moved the forward"]
    if right.gradient_faults(plain) == []:
        faults.append(f"{mode}: vacuous, the reference changes no gradient")
    if not same_output(got.output, plain.output):
        faults.append(f"{mode}: forward differs")
    faults += _named(f"{mode}: gradients differ", got.gradient_faults(right))
    return faults + _named(f"{mode}: buffers differ", got.buffer_faults(plain))


def _undo_faults(subject: nn.Module, before: Anatomy) -> list[str]:
    after = anatomy(subject)
    return _named("undo leaves a trace", [name for name in before if after.get(name) != before[name]])


def check(
    pristine: nn.Module,
    path: str,
    call: Call,
    plain: Steps,
    insert: Callable[[nn.Module, str], object] | None = None,
) -> list[str]:
    """The promises broken by a reversal of strength 0.5 at ``path`` of a copy of ``pristine``."""
    insert = insert or (lambda model, at: gs.insert_grl(model, at, lambd=LAMBD))
    right = both_modes(hooked(copy.deepcopy(pristine), path), call)
    subject = copy.deepcopy(pristine)
    before, storage = anatomy(subject), [(id(p), p.data_ptr()) for p in subject.parameters()]
    faults: list[str] = []
    insert(subject, path)
    gs.remove(subject)
    faults += _undo_faults(subject, before)

    if insert(subject, path) is not subject:
        faults.append("insertion returned another object")
    faults += identity_faults(pristine, subject)
    if storage != [(id(p), p.data_ptr()) for p in subject.parameters()]:
        faults.append("a parameter was copied")
    there = anatomy(subject)
    operated = [name for name in before if name not in there or there[name][0] is not before[name][0]]
    if any(met(pristine, name) != met(pristine, path) for name in operated):
        faults.append(f"classes changed at {operated[:4]}")
    if not gs.operations(subject):
        faults.append("operations() is empty after an insertion")
    for training, got in both_modes(subject, call).items():
        faults += _mode_faults("train" if training else "eval", got, right[training], plain[training])

    gs.remove(subject)
    if gs.operations(subject):
        faults.append("operations() is not empty after remove")
    faults += _undo_traces(subject, pristine, before)
    return faults + _undone_runs(subject, pristine, call, plain)


def _undo_traces(subject: nn.Module, pristine: nn.Module, before: Anatomy) -> list[str]:
    """After steps a network may hold caches of its own, so only class, hooks and new names of ours are traces."""
    after = anatomy(subject)
    wrong = [name for name in before if after[name][0] is not before[name][0] or after[name][2] != before[name][2]]
    wrong += [
        f"{name}: {key}"
        for name, (_, keys, _) in after.items()
        for key in keys
        if key not in before[name][1] and "gs" in key.lower().strip("_").split("_")
    ]
    return _named("undo leaves a trace after steps", wrong)


def _undone_runs(subject: nn.Module, pristine: nn.Module, call: Call, plain: Steps) -> list[str]:
    subject.load_state_dict(pristine.state_dict(), strict=True)
    for name, buffer in pristine.named_buffers():  # the non-persistent ones too, but for those made anew by a forward
        mine = subject.get_buffer(name)
        if mine.shape == buffer.shape:
            mine.data.copy_(buffer)
    faults = []
    for training, got in both_modes(subject, call).items():
        mode = "train" if training else "eval"
        if not same_output(got.output, plain[training].output):
            faults.append(f"undone, {mode}: forward differs")
        faults += _named(f"undone, {mode}: gradients differ", got.gradient_faults(plain[training]))
    return faults


def anatomy(model: nn.Module) -> Anatomy:
    """Per module: its class, the names in its ``__dict__`` and its number of hooks. Undo gives back exactly this."""
    return {
        name: (
            type(module),
            tuple(module.__dict__),
            sum(
                len(value)
                for key, value in vars(module).items()
                if key.endswith("_hooks") and hasattr(value, "__len__")
            ),
        )
        for name, module in model.named_modules(remove_duplicate=False)
    }


def identity_faults(before: nn.Module, after: nn.Module) -> list[str]:
    """What a user would notice about ``after``, an operated copy of the class and contents of ``before``."""
    faults = []
    if list(before.state_dict()) != list(after.state_dict()):
        faults.append("state_dict keys")
    for kind in ("named_parameters", "named_buffers", "named_modules"):
        names = [[name for name, _ in getattr(model, kind)()] for model in (before, after)]
        faults += [kind] if names[0] != names[1] else []
    if repr(before) != repr(after):
        faults.append("repr")
    for (name, one), (_, other) in zip(before.named_modules(), after.named_modules(), strict=False):
        kind = type(one)
        faults += [] if isinstance(other, kind) else [f"isinstance of {name!r}"]
        shown = [(cls.__name__, cls.__qualname__, cls.__module__) for cls in (type(other), kind)]
        faults += [f"class name of {name!r}"] if shown[0] != shown[1] else []
        faults += [f"methods {lost[:3]} of {name!r}"] if (lost := _lost_methods(kind, type(other))) else []
    for model in (after, before):
        source = before if model is after else after
        try:
            result = model.load_state_dict(source.state_dict(), strict=True)
            faults += ["strict load"] if result.missing_keys or result.unexpected_keys else []
        except RuntimeError as error:
            faults.append(f"strict load: {str(error)[:80]}")
    return faults


def _lost_methods(kind: type, operated: type) -> list[str]:
    """The methods of a class, ``forward`` left out, that another does not have as they are."""

    def function(cls: type, name: str) -> object:
        found = getattr(cls, name, None)
        return getattr(found, "__func__", found)  # a class method is bound anew each time

    methods = [name for name in dir(kind) if name != "forward" and not name.startswith("__")]
    return [name for name in methods if function(kind, name) is not function(operated, name)]
