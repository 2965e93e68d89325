"""Insertion against the two extractors that make the same place reachable by tracing: torchvision's and timm's."""

import copy
import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import timm
import torch
from timm.layers import create_feature_extractor as by_timm
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor as by_torchvision

import gradsurgery as gs

from .timing import Times, ratio, seconds

PLACES = {
    "resnet50": "layer3",
    "vit_large_patch16_224": "blocks.12",
    "swinv2_base_window8_256": "layers.2",
    "convnext_xxlarge": "stages.2",
}
QUICKER_BY_PATH, QUICKER_BY_GLOB = 1000.0, 100.0


class Insertions:
    """One insertion into each of several copies of a model, timed together and then undone."""

    def __init__(self, model: nn.Module, copies: int = 10) -> None:
        self.models = [model, *(copy.deepcopy(model) for _ in range(copies - 1))]

    def seconds(self, at: Any) -> float:
        """CPU seconds of one insertion."""

        def insert() -> None:
            for model in self.models:
                gs.insert_grl(model, at)

        taken = seconds(insert) / len(self.models)
        for model in self.models:
            gs.remove(model)
        return taken


def storage(model: nn.Module) -> list[tuple[int, int]]:
    """The identity of every parameter and buffer and its version: a copy or a change would show."""
    return [(id(value), value._version) for value in (*model.parameters(), *model.buffers())]


def memory(act: Callable[[], object]) -> int:
    """The most bytes of Python objects during an act, above those before it."""
    tracemalloc.start()
    kept = act()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return most


def models(names: Iterable[str] = PLACES, rounds: int = 2) -> Iterator[dict[str, Any]]:
    """A row for each model and peer: how many times quicker, how much less memory, whether a tensor was touched."""
    for name in names:
        at = PLACES.get(name, "layer3")
        with torch.device("meta"):
            model = timm.create_model(name)
        before = storage(model)
        peers: dict[str, Callable[[], object]] = {
            "torchvision": lambda model=model, at=at: by_torchvision(model, {at: "out"}),
            "timm": lambda model=model, at=at: by_timm(model, {at: "out"}),
        }
        ours = Insertions(model)
        ours.seconds(at)
        times: Times = {key: [] for key in ("gradsurgery", *peers)}
        for _ in range(rounds):
            for peer, extract in peers.items():
                times[peer].append(seconds(extract))
            gc.collect()  # what they leave behind is not ours to clear away
            ours.seconds(at)  # what was built just now has pushed everything else out of the processor's caches
            times["gradsurgery"].append(ours.seconds(at))
        little = memory(lambda model=model, at=at: gs.insert_grl(model, at))
        untouched = storage(model) == before
        gs.remove(model)
        for peer, extract in peers.items():
            yield {
                "row": f"{name}, `{at}`",
                "against": peer,
                **ratio(times, peer, "gradsurgery"),
                "memory": memory(extract) / little,
                "untouched": untouched,
                "target": QUICKER_BY_PATH,
            }


class Unit(nn.Module):
    """Three modules: itself, a layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(2, 2), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.fc(x))


def network(*sizes: int) -> nn.Sequential:
    """Groups of residual units, one after the other: ``"0.*.fc"`` names one place in each unit of the first."""
    return nn.Sequential(*[nn.Sequential(*[Unit() for _ in range(size)]) for size in sizes])


def growth(rounds: int = 4, units: int = 333, larger: int = 10) -> Iterator[dict[str, Any]]:
    """How insertion grows with the places and with the modules, and 100 places by one glob against one extractor."""
    net, large = network(1, 10, 100, units - 111), network(1, 10, 100, larger * units - 111)
    usual, few, huge = Insertions(net), Insertions(net, 2), Insertions(large, 2)
    acts: dict[str, Callable[[], float]] = {
        "extractor": lambda: seconds(lambda: by_torchvision(net, {"0.0.fc": "out"})),
        "1": lambda: usual.seconds("0.*.fc"),
        "10": lambda: usual.seconds("1.*.fc"),
        "100": lambda: few.seconds("2.*.fc"),
        "list of 10": lambda: usual.seconds([f"1.{k}.fc" for k in range(10)]),
        "list of 100": lambda: few.seconds([f"2.{k}.fc" for k in range(100)]),
        "path": lambda: few.seconds("0.0.fc"),
        "glob": lambda: few.seconds("0.*.fc"),
        "path in large": lambda: huge.seconds("0.0.fc"),
        "glob in large": lambda: huge.seconds("0.*.fc"),
    }
    times: Times = {name: [] for name in acts}
    for act in acts.values():
        act()
    for _ in range(rounds):
        for name, act in acts.items():
            gc.collect()  # what the one leaves behind is not for the next to clear away
            times[name].append(act())
    count = len(list(net.modules()))
    rows = [
        (f"100 places by one glob, {count:,} modules", "one torchvision extractor there", "extractor", "100"),
        ("100 places by a list", "10 places by a list", "list of 100", "list of 10"),
        (f"100 places by one glob, {count:,} modules", "10 places by one", "100", "10"),
        (f"10 places by one glob, {count:,} modules", "1 place by one", "10", "1"),
        (f"one path in {len(list(large.modules())):,} modules", f"in {count:,}", "path in large", "path"),
        (f"one glob in {len(list(large.modules())):,} modules", f"in {count:,}", "glob in large", "glob"),
    ]
    for row, against, of, to in rows:
        target = {"target": QUICKER_BY_GLOB} if of == "extractor" else {}
        yield {"row": row, "against": against, **ratio(times, of, to), **target}
