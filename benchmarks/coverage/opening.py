"""Opened forwards: one random op in each class of modules that no earlier model had."""

import random
from collections import Counter

from torch import Tensor, nn

import gradsurgery as gs
from gradsurgery.capture.record import Op, record_ops

from .._operated import anatomy
from .checks import Plain, compared, traces
from .runs import Runner


class Passing:
    """A function of the gradient that leaves it as it is, and counts."""

    def __init__(self) -> None:
        self.passed = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.passed += 1
        return gradient


def kind(cls: type) -> str:
    """The name of a class of modules, over all libraries."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _drawn(cls: type, ops: list[Op]) -> tuple[Op, str]:
    op = random.Random(kind(cls)).choice(ops)
    alone = Counter(op.name for op in ops)[op.name] == 1
    return op, op.name if alone else f"{op.name}@{op.index}"


def opened(runner: Runner, known: Plain, done: set[str]) -> dict[str, str]:
    """By class: ``right``, ``no op``, ``refused: ...`` or ``wrong: ...``."""
    model = runner.model
    new = {cls: path for cls, path in known.ran.items() if kind(cls) not in done and cls is not nn.Sequential}
    found: dict[str, str] = {}
    listed: dict[type, list[Op]] = {}
    try:
        owners = [model.get_submodule(path) for path in new.values()]
        recorded = record_ops(model, owners, *runner.example()) if new else {}
        listed = {cls: recorded[k] for k, cls in enumerate(new)}
    except gs.SurgeryError:  # of one class; the others can be opened
        for cls, path in new.items():
            try:
                listed[cls] = record_ops(model, [model.get_submodule(path)], *runner.example())[0]
            except gs.SurgeryError as error:
                found[kind(cls)] = f"refused: {error}"
    work = {}
    for cls, every in listed.items():
        ops = [op for op in every if op.dtype is None or op.dtype.is_floating_point]
        if not ops:
            found[kind(cls)] = "no op"
            continue
        op, name = _drawn(cls, ops)
        work[cls] = (f"{new[cls]}:{name}", op)
    # All in one run, without an example where the source tells the op; each alone where that is not right.
    together = _faults(runner, known, [at for at, _ in work.values()])
    for cls, (at, op) in work.items():
        alone = together and _faults(runner, known, [at])
        found[kind(cls)] = "; ".join(alone) if alone else "right" if runner.device != "meta" else "meta"
        if alone:
            found[kind(cls)] += f" [{at}, {op.source}: {op.text}]"
    return found


def _faults(runner: Runner, known: Plain, places: list[str]) -> list[str]:
    """What a counting operator at each of these ops breaks; every one has to be passed."""
    if not places:
        return []
    model, before = runner.model, anatomy(runner.model)
    try:
        runner.prepare(True)
        for at in places:
            example = None if "@" not in at and len(places) > 1 else runner.example()
            gs.insert(model, at, gs.MapGradient(Passing()), example=example)
        left = runner.step()
        faults = compared(left, known.left, known.left.output, runner.device != "meta")
        faults += [f"{row.address} never ran" for row in gs.operations(model) if not row.runs]
    except gs.SurgeryError as error:
        return [f"refused: {error}"]
    except Exception as error:  # the untouched model runs
        return [f"wrong: {type(error).__name__}: {error}"]
    finally:
        if gs.operations(model):
            gs.remove(model)
    faults += traces(before, anatomy(model))
    return [f"wrong: {fault}" for fault in faults]
