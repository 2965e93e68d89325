"""Train through a rounding: a timm model whose features take a few values only, with and without a straight-through.

    python examples/quantize_ste.py

Rounding has no gradient, so a network cannot learn to live with one, unless the backward passes it by (Bengio et al.
2013, https://arxiv.org/abs/1308.3432). A timm resnet is trained on 1,000 MNIST digits, then every value that leaves
``layer2`` is rounded to the nearest of a few, and training goes on for a third as long: with
``backward="straight_through"``, where all layers learn, and with ``backward="none"``, where those from the stem to
``layer2`` get no gradient. Accuracy on 1,000 other digits, mean and standard deviation of three seeds:

    values a feature can take                    2               3               4
    float                                  0.935 ± 0.013
    float, trained on as long              0.944 ± 0.013
    rounded, no training                   0.131 ± 0.040   0.563 ± 0.026   0.882 ± 0.035
    rounded, trained, "none"               0.563 ± 0.008   0.898 ± 0.011   0.924 ± 0.004
    rounded, trained, "straight_through"   0.704 ± 0.014   0.920 ± 0.012   0.929 ± 0.004

The straight-through wins back most of what two and three values cost, and more than the layers above can by themselves.
With four values the layers above suffice: the two differ by no more than the spread. The place and the range that
the levels cover were chosen on another seed: later layers lose little to rounding, so there is nothing to see there.
Takes about two minutes on two cores.
"""

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import gradsurgery as gs
from _digits import Digits, mnist, take
from _report import BLUE, GREEN, GREY, ORANGE, figure, mean_and_spread, progress, save, table

LABELS = {
    "float": "float",
    "float, trained on": "float, trained on as long",
    "rounded": "rounded, no training",
    "none": 'rounded, trained, backward="none"',
    "straight_through": 'rounded, trained, "straight_through"',
}


class Levels(nn.Module):
    """Round to evenly spaced values from 0 to ``top``: what an accelerator of few bits would store."""

    def __init__(self, count: int, top: float) -> None:
        super().__init__()
        self.last, self.step = count - 1, top / (count - 1)

    def forward(self, x: Tensor) -> Tensor:
        """The nearest of the values."""
        return (x / self.step).round().clamp(0, self.last) * self.step


def top_of(model: nn.Module, at: str, images: Tensor) -> float:
    """The largest activation at the place, which the levels are to cover."""
    seen: list[Tensor] = []
    hook = model.get_submodule(at).register_forward_hook(lambda _module, _args, output: seen.append(output))
    with torch.no_grad():
        model.eval()(images)
    hook.remove()
    return seen[0].max().item()


def train(model: nn.Module, digits: Digits, epochs: int, lr: float, seed: int) -> nn.Module:
    """Adam with a cosine to zero, batches of 50 in an order that the seed fixes."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = epochs * (len(digits.labels) // 50)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(digits.labels), generator=generator).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(digits.images[index]), digits.labels[index]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of the digits that are told right."""
    return (model.eval()(digits.images).argmax(1) == digits.labels).float().mean().item()


def measure(
    at: str, levels: list[int], seed: int, epochs: int, tuning: int, per_class: int
) -> Iterator[tuple[str, int, float]]:
    """One seed: a float model, and what each way makes of it at each number of levels."""
    training, rest = take(mnist(), per_class, seed)
    test, _ = take(rest, 100, seed)
    torch.manual_seed(seed)
    model = train(timm.create_model("test_resnet", in_chans=1, num_classes=10), training, epochs, 2e-3, seed)
    yield "float", 0, accuracy(model, test)
    yield "float, trained on", 0, accuracy(train(copy.deepcopy(model), training, tuning, 1e-3, seed), test)
    top = top_of(model, at, training.images[:200])
    for count in levels:
        for backward in ("straight_through", "none"):
            rounded = copy.deepcopy(model)
            gs.insert_transform(rounded, at, Levels(count, top), backward=backward)  # the one line
            if backward == "none":
                yield "rounded", count, accuracy(rounded, test)
            yield backward, count, accuracy(train(rounded, training, tuning, 1e-3, seed), test)


def draw(results: dict[tuple[str, int], list[float]], levels: list[int], path: Path) -> None:
    """Accuracy against the number of levels, the spread as bars."""
    shown, (axes,) = figure(6.4, 3.6)
    lines = {"straight_through": BLUE, "none": ORANGE, "rounded": GREY}
    for way, colour in lines.items():
        values = torch.tensor([results[way, count] for count in levels])
        spread = values.std(1) if values.shape[1] > 1 else torch.zeros(len(levels))
        axes.errorbar(
            range(len(levels)), values.mean(1), spread, color=colour, label=LABELS[way], marker="o", capsize=3
        )
    axes.axhline(torch.tensor(results["float", 0]).mean(), color=GREEN, linestyle="--", label=LABELS["float"])
    axes.set_xticks(range(len(levels)), [str(count) for count in levels])
    axes.set(xlabel="values that each feature can take", ylabel="test accuracy", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save(shown, path)


def main() -> None:
    """Measure over the seeds, print the table, save the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", default="layer2", help="the layer whose output is rounded (default: %(default)s)")
    parser.add_argument("--levels", default=[2, 3, 4], type=int, nargs="+", help="how many values it may take")
    parser.add_argument("--seeds", default=[0, 1, 2], type=int, nargs="+", help="default: 0 1 2")
    parser.add_argument("--picture", default="out/quantize_ste.png", type=Path, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, to see that it runs")
    options = parser.parse_args()
    seeds, levels = (options.seeds[:1], options.levels[:1]) if options.quick else (options.seeds, options.levels)
    epochs, tuning, per_class = (1, 1, 10) if options.quick else (6, 2, 100)

    runs = (result for seed in seeds for result in measure(options.at, levels, seed, epochs, tuning, per_class))
    results: dict[tuple[str, int], list[float]] = {}
    for way, count, value in progress(runs, "training", total=len(seeds) * (2 + 3 * len(levels))):
        results.setdefault((way, count), []).append(value)
    table(
        f"test_resnet rounded at {options.at}: accuracy on 1,000 MNIST digits, mean and spread of {len(seeds)} seeds",
        ["", *(f"{count} levels" for count in levels)],
        [
            [label, *(mean_and_spread(results.get((way, count), results.get((way, 0)))) for count in levels)]
            for way, label in LABELS.items()
        ],
    )
    draw(results, levels, options.picture)


if __name__ == "__main__":
    main()
