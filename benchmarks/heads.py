"""A second head at two places of the smallest model of every timm family, gradient checkpointing off and on.

    python -m benchmarks.heads                       # all families, going on where the last run stopped
    python -m benchmarks.heads --families resnet vit

Behind a reversal, against a head cut in by hand: the value is taken by a forward hook written here and fed to the same
head at the end. The output, what the head makes, and the gradient of every parameter, of the input and of the head are
compared bit for bit, in training mode under one seed. With checkpointing on the model computes the place twice.
One JSON line per family goes to ``out/heads.jsonl``; the last line printed is the figure.
"""

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from rich.progress import track
from torch import Tensor, nn

import gradsurgery as gs

from ._reference import Met, leaves, scaled
from .boundaries import SMALLEST
from .coverage.building import liven, quickly
from .coverage.checks import Reading, compared
from .coverage.runs import Ended, Left, Runner, Watch
from .coverage.vision import timm_trials
from .opened import SHALLOWER

LAMBD = 0.5
NAME = "domain"


def set_checkpointing(model: nn.Module, on: bool) -> bool:
    """Whether the model has checkpointing at all."""
    try:
        model.set_grad_checkpointing(on)  # type: ignore[operator]
    except (AttributeError, AssertionError, NotImplementedError):
        return False
    return True


def head_for(value: Any) -> nn.Module:
    """A domain head, its lazy layer made; for a value that it does not take, a head for values of any form."""
    if isinstance(value, Tensor):
        head = gs.DomainHead(hidden=16)
        try:
            with torch.no_grad():
                head(value.detach())
            return head
        except gs.OperatorError:  # neither tokens nor a map, or a map whose layout cannot be told
            pass
    return Reading()


def by_hand(runner: Runner, path: str, head: nn.Module) -> Left:
    """The step with the head cut in by hand."""
    kept: list[tuple[Ended, Any]] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        if not kept:  # not when a checkpoint computes it again
            kept.append((Ended(output, [leaf._version for leaf in leaves(output)]), scaled(output, 1.0)))

    handle = runner.model.get_submodule(path).register_forward_hook(keep)
    try:
        output = runner.forward()
        head.zero_grad(set_to_none=True)
        ended, early = kept[0]
        value = early if ended.changed() else ended.value  # what the model writes to later is taken before that
        left = runner.backward((output, {NAME: head(scaled(value, -LAMBD))}))
    finally:
        handle.remove()
    left.gradients |= {f"{NAME}.{name}": parameter.grad for name, parameter in head.named_parameters()}
    head.zero_grad(set_to_none=True)
    return left


def values_at(runner: Runner) -> dict[str, Any]:
    """Two places that run once and get a gradient, in the middle and late, with what they return."""
    watch = Watch(runner.model)
    try:
        output = runner.forward()
    finally:
        watch.close()
    runner.backward(output)
    place = Met(runner.model)
    once = [path for path in watch.places() if watch.ended[place(path)].calls == 1]
    return {path: watch.ended[place(path)].value for path in (once[len(once) // 2], once[len(once) * 4 // 5])}


def faults(runner: Runner, path: str, head: nn.Module) -> list[str]:
    """The promises that a head at the place breaks."""
    model = runner.model
    right = by_hand(runner, Met(model)(path), head)
    keys = list(model.state_dict())
    gs.attach_head(model, path, head, name=NAME, operator=gs.GradientReversal(LAMBD))
    try:
        found = compared(runner.step(), right, right.output, numeric=True)
        if list(model.state_dict())[: len(keys)] != keys:
            found.append("state_dict keys")
    finally:
        gs.remove(model)
    return found


def measured(family: str, name: str) -> dict[str, Any]:
    """The line of one family."""
    start = time.process_time()
    refused = "no trial"
    for trial in timm_trials(name, **SHALLOWER.get(name, {})):
        try:
            with quickly():
                model = trial.build()
            runner = Runner(liven(model), trial.train, trial.eval, True, "cpu")
            values = values_at(runner)
            break
        except Exception as error:  # whatever a model raises for a size that it cannot take
            refused = f"{type(error).__name__}: {error}"
    else:
        return {"family": family, "model": name, "not run": refused}
    line: dict[str, Any] = {"family": family, "model": name, "input": trial.said, "places": {}}
    line["checkpointing"] = set_checkpointing(model, True)
    set_checkpointing(model, False)
    for path, value in values.items():
        head = head_for(value)
        found = {"head": type(head).__name__}
        for on in (False, True) if line["checkpointing"] else (False,):
            set_checkpointing(model, on)
            try:
                found["on" if on else "off"] = faults(runner, path, copy.deepcopy(head))
            except Exception as error:
                found["on" if on else "off"] = [f"{type(error).__name__}: {error}"]
        set_checkpointing(model, False)
        line["places"][path] = found
    return line | {"seconds": round(time.process_time() - start, 1)}


def figure(lines: list[dict[str, Any]]) -> str:
    """The figure of a run."""
    said = []
    for mode in ("off", "on"):
        tried = [found[mode] for line in lines for found in line.get("places", {}).values() if mode in found]
        said.append(f"checkpointing {mode}: {sum(not found for found in tried)} of {len(tried)} places exact")
    without = sum(not line.get("checkpointing", True) for line in lines)
    return f"{len(lines)} families; {'; '.join(said)}; {without} models have no checkpointing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", help="only these families")
    parser.add_argument("--out", type=Path, default=Path("out/heads.jsonl"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    smallest: dict[str, str] = json.loads(SMALLEST.read_text())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    texts = options.out.read_text().splitlines() if options.out.exists() else []
    lines = {line["family"]: line for line in map(json.loads, texts)}
    wanted = [family for family in options.families or smallest if family not in lines]
    for family in track(wanted, "families"):
        lines[family] = measured(family, smallest[family])
        gc.collect()  # a model and what watched it hold each other
        with options.out.open("a") as file:
            file.write(json.dumps(lines[family]) + "\n")
    chosen = [line for family, line in lines.items() if not options.families or family in options.families]
    for line in chosen:
        for path, found in line.get("places", {}).items():
            for mode in ("off", "on"):
                if found.get(mode):
                    print(f"{line['model']} at {path!r}, checkpointing {mode}: {found[mode]}")
        if "not run" in line:
            print(f"{line['model']} was not run: {line['not run']}")
    print(f"timm {timm.__version__}, torch {torch.__version__}: {figure(chosen)}")
    return (
        1
        if any(
            "not run" in line or any(f.get("off") or f.get("on") for f in line["places"].values()) for line in chosen
        )
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
