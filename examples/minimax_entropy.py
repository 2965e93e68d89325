"""Semi-supervised adaptation by minimax entropy, through one reversal and no second network.

    python examples/minimax_entropy.py

The classifier keeps one prototype a class. On unlabelled digits of the target it raises the entropy, which draws the
prototypes towards them, and the features lower it, which draws them to the prototypes (Saito et al. 2019,
https://arxiv.org/abs/1904.06487). The reversal stands in front of the classifier of a twin that shares the weights;
labelled digits go through the model itself, whose gradient is plain. MNIST to UCI with three labels a class, 600 test
digits, mean and standard deviation of three seeds:

                                 accuracy         gain, seed by seed   entropy
    source and the few labels    0.874 ± 0.011                         0.244 ± 0.015
    and entropy minimised        0.882 ± 0.022    0.008 ± 0.013        0.116 ± 0.009
    and minimax entropy          0.883 ± 0.020    0.009 ± 0.011        0.134 ± 0.010

So on this pair neither gains beyond the spread, though the entropy falls as it should: see docs/examples.md. Takes
about three minutes on two cores.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import gradsurgery as gs
from _digits import Digits, mnist, take, uci
from _report import BLUE, GREY, ORANGE, figure, mean_and_spread, progress, save, table

WAYS = {
    "labels": "source and the few labels",
    "minimum": "and entropy minimised",
    "minimax": "and minimax entropy",
}


class Cosine(nn.Module):
    """The classifier of the paper: the angle between the features and one prototype a class, over a temperature."""

    def __init__(self, features: int, classes: int, temperature: float = 0.05) -> None:
        super().__init__()
        self.prototypes = nn.Linear(features, classes, bias=False)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.prototypes(nn.functional.normalize(x)) / self.temperature


class Net(nn.Module):
    """A small CNN without batch statistics, so that what differs between the ways is the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for narrow, wide in ((1, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(narrow, wide, 3, 2, 1), nn.GroupNorm(4, wide), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 64))
        self.classifier = Cosine(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x))


def entropy(logits: Tensor) -> Tensor:
    """The mean entropy of the predictions, in nats."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


class Splits(NamedTuple):
    """What one seed learns from and is measured on; the labels of ``unlabelled`` are never looked at."""

    source: Digits
    labelled: Digits
    unlabelled: Digits
    validation: Digits
    test: Digits


def splits(seed: int, shots: int) -> Splits:
    """1,500 labelled source digits; of the target a few labelled, 600 unlabelled, 200 to tune on, 600 to report."""
    source, _ = take(mnist(), 150, seed)
    labelled, rest = take(uci(), shots, seed)
    validation, rest = take(rest, 20, seed)
    unlabelled, rest = take(rest, 60, seed)
    test, _ = take(rest, 60, seed)
    return Splits(source, labelled, unlabelled, validation, test)


def train(way: str, data: Splits, seed: int, steps: int = 500, weight: float = 0.1) -> Net:
    """Learn from the source and the few labels, and from the unlabelled digits in the way that is named."""
    torch.manual_seed(seed)
    model = Net()
    # The same weights with a reversal in front of the classifier; the model itself stays plain for the labels.
    adversary = gs.insert_grl(model, "classifier", side="input", inplace=False)  # the one line
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)

    def draw_from(digits: Digits, count: int) -> Digits:
        return digits[torch.randint(len(digits.labels), (count,), generator=generator)]

    for _ in range(steps):
        source, labelled, unlabelled = (
            draw_from(data.source, 50),
            draw_from(data.labelled, 25),
            draw_from(data.unlabelled, 50),
        )
        logits = model(torch.cat([source.images, labelled.images]))
        loss = nn.functional.cross_entropy(logits, torch.cat([source.labels, labelled.labels]))
        if way == "minimum":
            loss = loss + weight * entropy(model(unlabelled.images))
        elif way == "minimax":
            loss = loss - weight * entropy(adversary(unlabelled.images))  # the classifier climbs, the features descend
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return model


class Result(NamedTuple):
    """What one network was measured to do."""

    way: str
    accuracy: float
    entropy: float


@torch.no_grad()
def measure(way: str, model: Net, digits: Digits) -> Result:
    """Accuracy and mean entropy on the target."""
    logits = model(digits.images)
    right = (logits.argmax(1) == digits.labels).float().mean().item()
    return Result(way, right, entropy(logits).item())


def runs(seeds: list[int], shots: int, steps: int) -> Iterator[Result]:
    """Each way on each seed, measured on the test digits."""
    for seed in seeds:
        data = splits(seed, shots)
        for way in WAYS:
            yield measure(way, train(way, data, seed, steps), data.test)


def draw(results: list[Result], path: Path) -> None:
    """Accuracy and entropy of each seed, side by side."""
    shown, (left, right) = figure(8, 3, columns=2)
    for axes, name, title in (
        (left, "accuracy", "accuracy on the target"),
        (right, "entropy", "entropy there, in nats"),
    ):
        for k, (way, colour) in enumerate(zip(WAYS, (GREY, ORANGE, BLUE), strict=True)):
            values = torch.tensor([getattr(result, name) for result in results if result.way == way])
            axes.scatter([k] * len(values), values.tolist(), color=colour, s=24, alpha=0.6)
            axes.hlines(values.mean().item(), k - 0.25, k + 0.25, color=colour, linewidth=2.5)
        axes.set_xticks(range(3), ["source and\nfew labels", "entropy\nminimised", "minimax\nentropy"])
        axes.set_xlim(-0.5, 2.5)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    right.set_ylim(bottom=0)
    save(shown, path)


def main() -> None:
    """Measure over the seeds, print the table, save the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", default=3, type=int, help="labelled target digits of each class (default: 3)")
    parser.add_argument("--seeds", default=[0, 1, 2], type=int, nargs="+", help="default: 0 1 2")
    parser.add_argument("--picture", default="out/minimax_entropy.png", type=Path, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, to see that it runs")
    options = parser.parse_args()
    seeds, steps = (options.seeds[:1], 20) if options.quick else (options.seeds, 500)

    results = list(progress(runs(seeds, options.shots, steps), "training", total=len(seeds) * len(WAYS)))
    of = {way: [result for result in results if result.way == way] for way in WAYS}
    gains = {way: [r.accuracy - b.accuracy for r, b in zip(of[way], of["labels"], strict=True)] for way in WAYS}
    table(
        f"MNIST to UCI, {options.shots} labels a class, 600 test digits, mean and spread of {len(seeds)} seeds",
        ["", "accuracy", "gain, seed by seed", "entropy"],
        [
            [
                label,
                mean_and_spread([r.accuracy for r in of[way]]),
                "" if way == "labels" else mean_and_spread(gains[way]),
                mean_and_spread([r.entropy for r in of[way]]),
            ]
            for way, label in WAYS.items()
        ],
    )
    draw(results, options.picture)


if __name__ == "__main__":
    main()
