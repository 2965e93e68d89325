"""One model, whole: built, fed, operated on in every way, and one line about it."""

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import torch

import gradsurgery as gs

from .._reference import is_real, leaves
from .building import Subject, Trial, liven, quickly
from .checks import Plain, Reading, boundaries, chosen, headed, plain
from .opening import opened
from .runs import Runner

Line = dict[str, Any]


def said(error: BaseException, length: int = 200) -> str:
    """An error in one short line."""
    said = re.sub(r"\S*/site-packages/", "", f"{type(error).__name__}: {error}")  # where packages lie is of one machine
    return re.sub(r"\s+", " ", said)[:length]


def _begun(trial: Trial, device: str, head: Reading, evaluate: bool) -> tuple[Runner, Plain]:
    if device == "meta":
        with torch.device("meta"):
            model = trial.build()
    else:
        with quickly():
            model = trial.build()
        liven(model)
    runner = Runner(model, trial.train, trial.eval, trial.input_gradient, device)
    return runner, plain(runner, head, evaluate)


def shown(line: Line) -> set[str]:
    """The classes that were opened with values, which no later model need show again."""
    return {cls for cls, found in line.get("opened", {}).items() if found != "meta"}


def counted(subject: Subject) -> int:
    """How many parameters a model has, by building it on the meta device; 0 where it cannot be built there."""
    *_, last = subject.trials()
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in last.build().parameters())
    except Exception:  # some models compute with their weights while they are built
        return 0


def measure(subject: Subject, numeric: float, done: set[str], evaluate: bool = True, size: int = 0) -> Line:
    """The line of one model: with values up to ``numeric`` parameters, above them on the meta device, without.

    ``done`` are the classes opened before, ``evaluate`` adds the forward in evaluation, and ``size`` is the number of
    parameters where it is known.
    """
    start = time.process_time()
    device = "meta" if numeric < float("inf") and (size or counted(subject)) > numeric else "cpu"
    line: Line = {"key": subject.key, "group": subject.group, "kind": "numeric" if device == "cpu" else "meta"}
    refused: list[str] = []
    for trial in subject.trials():
        head = Reading().to(device)
        try:
            runner, known = _begun(trial, device, head, evaluate and device == "cpu")
            break
        except Exception as error:  # whatever a model raises for a size that it cannot take
            refused.append(f"{trial.said}: {said(error)}")
            gc.collect()
    else:
        return line | {
            "not run": refused[-1] if refused else "no trial",
            "seconds": round(time.process_time() - start, 1),
        }
    places = chosen(known.places)
    if evaluate and device == "cpu":
        line["eval"] = True
    line |= {
        "input": trial.said,
        "params": sum(p.numel() for p in runner.model.parameters()),
        "of": len(known.places),
        "places": places,
        "head at": known.head_at,
    }
    if device == "cpu" and not all(bool(leaf.isfinite().all()) for leaf in leaves(known.left.output) if is_real(leaf)):
        line["finite"] = False
    line["boundaries"] = _tried(runner, lambda: boundaries(runner, known, places))
    line["head"] = _tried(runner, lambda: headed(runner, known, head)) if known.head else ["no place runs once"]
    line["opened"] = opened(runner, known, done)
    wrong = line["boundaries"] or line["head"] or any(found.startswith("wrong") for found in line["opened"].values())
    if wrong and device == "cpu" and (moved := runner.step().differing(known.left)):
        line["not run"] = f"the untouched model does not repeat itself: {len(moved)} gradients, {moved[:2]}"
    return line | {"seconds": round(time.process_time() - start, 1)}


def _tried(runner: Runner, check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except Exception as error:
        return [said(error, 400)]
    finally:
        if gs.operations(runner.model):
            gs.remove(runner.model)
