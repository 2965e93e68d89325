"""What an insertion costs, against building timm's fx extractor for the same node, and what a step costs afterwards.

    python -m benchmarks.insertion

Both halves interleave their two sides in one process, so that a busy machine slows both alike.
"""

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import timm
import torch
from timm.layers import create_feature_extractor
from torch import nn

import gradsurgery as gs

from ._reference import seed_all

AT = "blocks.12"
QUICKER, SLOWER = 1000.0, 1.02


def seconds(act: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def vit_large() -> nn.Module:
    """ViT-L/16 with unset weights: 304 million parameters, of which an insertion must copy none."""
    with torch.device("meta"):
        model = timm.create_model("vit_large_patch16_224")
    return model.to_empty(device="cpu")


def storage(model: nn.Module) -> list[tuple[int, int]]:
    """The identity and the memory of every parameter and buffer."""
    return [(id(value), value.data_ptr()) for value in (*model.parameters(), *model.buffers())]


def insertion(rounds: int = 5, each: int = 20) -> tuple[float, float, float, bool]:
    """Seconds of the first insertion, of a later one, of timm's extractor (medians); whether memory stayed put."""
    model = vit_large()
    before, inserted, extracted, stayed = storage(model), [], [], True
    for _ in range(rounds):
        for _ in range(each):
            inserted.append(seconds(lambda: gs.insert_grl(model, AT)))
            stayed &= storage(model) == before
            gs.remove(model)
        extracted.append(seconds(lambda: create_feature_extractor(model, {AT: "out"})))
    return inserted[0], statistics.median(inserted), statistics.median(extracted), stayed and storage(model) == before


def training_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """One step of plain SGD, ready to be timed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def act() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return act


def step_ratio(pairs: int = 60, batch: int = 8, size: int = 128) -> tuple[float, float, float]:
    """Median ratios of resnet18's step with a reversal at layer3, and of a second untouched copy; its seconds."""
    seed_all(0)
    plain = timm.create_model("resnet18")
    again, operated = copy.deepcopy(plain), gs.insert_grl(copy.deepcopy(plain), "layer3")
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    acts = [training_step(model, images, labels) for model in (plain, operated, again)]
    for act in acts * 3:
        act()
    times: list[list[float]] = []
    for index in range(pairs):
        order = [(index + shift) % 3 for shift in range(3)]  # each goes first, second and third equally often
        taken = {which: seconds(acts[which]) for which in order}
        times.append([taken[which] for which in range(3)])
    columns = list(zip(*times, strict=True))
    ratio = statistics.median(operated / plain for plain, operated, _ in times)
    floor = statistics.median(again / plain for plain, _, again in times)
    return ratio, floor, statistics.median(columns[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="steps of each side")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    first, later, extractor, stayed = insertion()
    quicker = extractor / later
    print(
        f"ViT-L/16 at {AT}: insertion {later * 1e6:.0f} us (the first {first * 1e3:.2f} ms), timm's fx extractor "
        f"{extractor:.2f} s, {quicker:,.0f} times quicker; no parameter or buffer copied: {'yes' if stayed else 'NO'}"
    )
    ratio, floor, usual = step_ratio(options.pairs)
    print(
        f"resnet18 step with a reversal at layer3: {ratio:.3f} of the untouched one ({usual * 1e3:.0f} ms), "
        f"where a second untouched copy takes {floor:.3f}"
    )
    return 0 if quicker >= QUICKER and stayed and ratio <= SLOWER else 1


if __name__ == "__main__":
    sys.exit(main())
