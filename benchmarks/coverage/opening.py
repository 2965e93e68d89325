"""Opened forwards: one random op in each class of modules that no earlier model had."""

import random
from collections import Counter
from typing import Any

from torch import nn

import gradsurgery as gs
from gradsurgery.capture.record import Op, record_ops

from .._operated import Anatomy, anatomy
from .._reference import same_output
from ..opened import keep
from .checks import Plain, compared, is_rounding, traces
from .runs import Runner


class Keeping(nn.Module):
    """An operator that changes nothing: the value in memory of its own, the gradient as it comes, strides and all."""

    def forward(self, value: Any) -> Any:
        return keep(value)


def kind(cls: type) -> str:
    """The name of a class of modules, over all libraries."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _drawn(cls: type, ops: list[Op], every: list[Op]) -> tuple[Op, str]:
    op = random.Random(kind(cls)).choice(ops)
    alone = Counter(op.name for op in every)[op.name] == 1
    return op, op.name if alone else f"{op.name}@{op.index}"


def opened(runner: Runner, known: Plain, done: set[str]) -> dict[str, str]:
    """By class: ``right``, ``rounding``, ``no op``, ``meta``, ``refused: ...`` or ``wrong: ...``."""
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
            ops = _listed(runner, path)
            if isinstance(ops, str):
                found[kind(cls)] = ops
            else:
                listed[cls] = ops
    work: dict[type, tuple[str, Op]] = {}
    for cls, every in listed.items():
        ops = [op for op in every if op.dtype is None or op.dtype.is_floating_point]
        if not ops:
            found[kind(cls)] = "no op"
            continue
        op, name = _drawn(cls, ops, every)
        work[cls] = (f"{new[cls]}:{name}", op)
    before, right = anatomy(model), "right" if runner.device != "meta" else "meta"
    refusals = _inserted(runner, [at for at, _ in work.values()])
    together = _faults(runner, known, before)
    for cls, (at, op) in work.items():
        fault = refusals.get(at, "")
        if not fault and together:  # each alone, to see whose it is
            fault = _inserted(runner, [at]).get(at) or _faults(runner, known, before)
        if fault == "rounding":
            found[kind(cls)] = fault
            continue
        found[kind(cls)] = f"{fault} [{at}, {op.source}: {op.text}]" if fault else right
    return found


def _listed(runner: Runner, path: str) -> list[Op] | str:
    """The ops of one forward, or the refusal."""
    try:
        return record_ops(runner.model, [runner.model.get_submodule(path)], *runner.example())[0]
    except gs.SurgeryError as error:
        return f"refused: {error}"


def _inserted(runner: Runner, places: list[str]) -> dict[str, str]:
    """Put a counting operator at each of these ops; those that are refused, with the reason."""
    runner.prepare(True)
    refusals = {}
    for at in places:
        # Where the source does not tell which call it is, or whether it runs, an example does; and a class that walks
        # its children takes no operator among them, but one that is only a factor.
        example = runner.example()
        ways = [] if "@" in at else [(None, Keeping())]
        for given, operator in [*ways, (example, Keeping()), (example, gs.ScaleGradient(1.0))]:
            try:
                gs.insert(runner.model, at, operator, example=given)
                break
            except gs.SurgeryError as error:
                refusal = f"refused: {error}"
        else:
            refusals[at] = refusal
    return refusals


def _faults(runner: Runner, known: Plain, before: Anatomy) -> str:
    """What the operators that are there break, every one of which has to be passed; they are taken away again."""
    if not gs.operations(runner.model):
        return ""
    try:
        left = runner.step()
        faults = compared(left, known.left, known.left.output, runner.device != "meta")
        if len(faults) == 1 and runner.device != "meta" and same_output(left.output, known.left.output):
            faults = ["rounding"] if is_rounding(left, known.left) else faults
        faults += [f"{row.address} never ran" for row in gs.operations(runner.model) if not row.runs]
    except gs.SurgeryError as error:
        return f"refused: {error}"
    except Exception as error:  # the untouched model runs
        return f"wrong: {type(error).__name__}: {error}"
    finally:
        gs.remove(runner.model)
    faults += traces(before, anatomy(runner.model))
    if faults == ["rounding"]:
        return "rounding"
    return f"wrong: {'; '.join(faults)}" if faults else ""
