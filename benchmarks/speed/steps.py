"""A training step with an operator in the middle, and an opened forward, against the untouched model."""

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gradsurgery as gs

from .timing import in_turns, memory, ratio

MIDDLE = {"resnet50": "layer3", "vit_small_patch16_224": "blocks.5"}
UNTOUCHED, AGAIN, REVERSED, STOPPED = "untouched", "another untouched copy", "gradient reversal", "stop-gradient"


def step(model: nn.Module, run: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """One step of plain SGD; ``run`` is what is called, the model itself or what was compiled of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def act() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(images), labels).backward()
        optimizer.step()

    return act


def operated(plain: nn.Module, at: str) -> dict[str, nn.Module]:
    """The model four times, with the same weights."""
    kinds = {
        UNTOUCHED: plain,
        AGAIN: copy.deepcopy(plain),
        REVERSED: gs.insert_grl(copy.deepcopy(plain), at),
        STOPPED: gs.insert_stop_gradient(copy.deepcopy(plain), at),
    }
    for model in kinds.values():
        model.train()
    return kinds


def flops(act: Callable[[], object]) -> int:
    """Floating-point operations of an act, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        act()
    return counter.get_total_flops()


def training(
    names: dict[str, str] = MIDDLE, compiled: bool = False, rounds: int = 24, batch: int = 2, size: int = 224
) -> Iterator[dict[str, Any]]:
    """A row for each model and operator: time and memory against the untouched step, and what arithmetic predicts."""
    for name, at in names.items():
        torch.manual_seed(0)
        torch.compiler.reset()
        kinds = operated(timm.create_model(name), at)
        images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
        eager = {kind: step(model, model, images, labels) for kind, model in kinds.items()}
        counted = {kind: flops(act) for kind, act in eager.items()}
        acts = eager
        if compiled:
            del kinds[AGAIN]
            acts = {k: step(m, torch.compile(m, dynamic=False), images, labels) for k, m in kinds.items()}
        times = in_turns(acts, rounds, warm=2)
        held = {kind: memory(act)[0] for kind, act in acts.items()}
        for kind in [kind for kind in acts if kind != UNTOUCHED]:
            yield {
                "row": f"{name}, `{at}`",
                "operator": kind,
                "mode": "compiled" if compiled else "eager",
                **ratio(times, kind, UNTOUCHED),
                "memory": held[kind] / held[UNTOUCHED],
                "arithmetic": counted[kind] / counted[UNTOUCHED],
            }
        del kinds, eager, acts
        gc.collect()


OPENED = {
    "resnet18": ("layer3.0:add", 64),
    "vit_tiny_patch16_224": ("blocks.6:add@0", 224),
    "convnext_atto": ("stages.2.blocks.1:add", 64),
}


def opened(names: dict[str, tuple[str, int]] = OPENED, rounds: int = 40) -> Iterator[dict[str, Any]]:
    """A row for each model: a forward without gradients whose source was opened at an op, against the untouched one."""
    for name, (at, size) in names.items():
        plain = timm.create_model(name).eval()
        images = torch.randn(1, 3, size, size)
        model = gs.insert_grl(copy.deepcopy(plain), at, example=images)
        whole = {UNTOUCHED: plain, AGAIN: copy.deepcopy(plain), "opened": model}
        with torch.no_grad():
            times = in_turns({kind: functools.partial(each, images) for kind, each in whole.items()}, rounds, warm=3)
        for kind in (AGAIN, "opened"):
            shown = f"opened at `{at}`" if kind == "opened" else kind
            yield {"row": name, "operator": shown, **ratio(times, kind, UNTOUCHED)}
