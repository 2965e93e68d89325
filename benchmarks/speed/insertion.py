"""Insertion against the two extractors that make the same place reachable by tracing: torchvision's and timm's."""

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


def insertion(model: nn.Module, at: Any, each: int = 20) -> float:
    """CPU seconds of one insertion, the mean of several, each undone outside of the timing."""
    taken = 0.0
    for _ in range(each):
        taken += seconds(lambda: gs.insert_grl(model, at))
        gs.remove(model)
    return taken / each


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


def models(names: Iterable[str] = PLACES, rounds: int = 3) -> Iterator[dict[str, Any]]:
    """A row for each model and peer: how many times quicker, how many times less memory, whether a tensor was touched."""
    for name in names:
        at = PLACES.get(name, "layer3")
        with torch.device("meta"):
            model = timm.create_model(name)
        before = storage(model)
        peers: dict[str, Callable[[], object]] = {
            "torchvision": lambda model=model, at=at: by_torchvision(model, {at: "out"}),
            "timm": lambda model=model, at=at: by_timm(model, {at: "out"}),
        }
        insertion(model, at)
        times: Times = {key: [] for key in ("gradsurgery", *peers)}
        for _ in range(rounds):
            times["gradsurgery"].append(insertion(model, at))
            for peer, extract in peers.items():
                times[peer].append(seconds(extract))
        ours = memory(lambda model=model, at=at: gs.insert_grl(model, at))
        untouched = storage(model) == before
        gs.remove(model)
        for peer, extract in peers.items():
            yield {
                "table": "insertion",
                "row": f"{name}, `{at}`",
                "against": peer,
                **ratio(times, peer, "gradsurgery"),
                "memory": memory(extract) / ours,
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


def growth(rounds: int = 5, units: int = 333) -> Iterator[dict[str, Any]]:
    """How insertion grows with the places and with the modules, and 100 places by one glob against one extractor."""
    net, large = network(1, 10, 100, units - 111), network(1, 10, 100, 10 * units - 111)
    acts: dict[str, Callable[[], float]] = {
        "extractor": lambda: seconds(lambda: by_torchvision(net, {"0.0.fc": "out"})),
        "1": lambda: insertion(net, "0.*.fc"),
        "10": lambda: insertion(net, "1.*.fc"),
        "100": lambda: insertion(net, "2.*.fc", 5),
        "list of 10": lambda: insertion(net, [f"1.{k}.fc" for k in range(10)]),
        "list of 100": lambda: insertion(net, [f"2.{k}.fc" for k in range(100)], 5),
        "path": lambda: insertion(net, "0.0.fc"),
        "path in large": lambda: insertion(large, "0.0.fc"),
        "1 in large": lambda: insertion(large, "0.*.fc", 5),
    }
    times: Times = {name: [] for name in acts}
    for act in acts.values():
        act()
    for _ in range(rounds):
        for name, act in acts.items():
            times[name].append(act())
    count = len(list(net.modules()))
    rows = [
        (f"100 places by one glob, {count:,} modules", "one torchvision extractor there", "extractor", "100"),
        ("100 places by a list", "10 places by a list", "list of 100", "list of 10"),
        (f"100 places by one glob, {count:,} modules", "10 places by one", "100", "10"),
        (f"10 places by one glob, {count:,} modules", "1 place by one", "10", "1"),
        (f"one path in {len(list(large.modules())):,} modules", f"in {count:,}", "path in large", "path"),
        (f"one glob in {len(list(large.modules())):,} modules", f"in {count:,}", "1 in large", "1"),
    ]
    for row, against, of, to in rows:
        target = {"target": QUICKER_BY_GLOB} if of == "extractor" else {}
        yield {"table": "growth", "row": row, "against": against, **ratio(times, of, to), **target}
