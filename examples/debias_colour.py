"""Take a spurious colour out of a network: a colour head behind a reversal, at the layer where the colour is.

    python examples/debias_colour.py

95 of 100 training digits have the colour of their class. A network learns that, and fails where colours are random.
With a colour head at ``conv1`` behind a reversal that layer is trained to hide the colour from the head, and what comes
after it has to look at the shape. The probe is a new network, fitted to tell the colour from the finished features.
1,000 test digits, mean and standard deviation of three seeds:

                                     digit, colours     digit,            colour, by a probe
                                     as in training     random colours    (chance 0.1)
    no head                          0.961 ± 0.010      0.566 ± 0.043     0.806 ± 0.044
    colour head, no reversal         0.964 ± 0.002      0.570 ± 0.041     0.889 ± 0.012
    colour head behind a reversal    0.886 ± 0.066      0.836 ± 0.097     0.176 ± 0.025

Most of the colour goes, not all of it. Where the head sits decides: at the last layer, where the digit gives the colour
away, the reversal did harm. What was tried is in docs/examples.md. Takes about three minutes on two cores.
"""

import argparse
import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import gradsurgery as gs
from _digits import Digits, mnist, take
from _report import BLUE, GREY, ORANGE, figure, mean_and_spread, progress, save, table

WAYS = {"plain": "no head", "head": "colour head, no reversal", "reversal": "colour head behind a reversal"}
COLOURS = 10
EPOCHS = 40
CHANCE = 1 / COLOURS
SPURIOUS = 0.95  # the share of training digits in the colour of their class


class Coloured(NamedTuple):
    """Digits in colour: images ``(N, 3, 28, 28)``, what they show, and which of the ten colours they have."""

    images: Tensor
    labels: Tensor
    colours: Tensor


def palette() -> Tensor:
    """Ten hues of one brightness (red + green + blue is 1.5), so that grey says nothing about which it was."""
    angle = torch.arange(COLOURS)[:, None] * 2 * math.pi / COLOURS
    red = torch.tensor([2.0, -1.0, -1.0]) / math.sqrt(6)
    blue = torch.tensor([0.0, 1.0, -1.0]) / math.sqrt(2)
    return 0.5 + math.sqrt(6) / 4 * (angle.cos() * red + angle.sin() * blue)


def paint(digits: Digits, spurious: float, seed: int) -> Coloured:
    """Give that share of the digits the colour of their class and the rest a random one, in changing light."""
    generator, n = torch.Generator().manual_seed(seed), len(digits.labels)
    colours = torch.randint(COLOURS, (n,), generator=generator)
    colours = torch.where(torch.rand(n, generator=generator) < spurious, digits.labels, colours)
    light = 1 - 0.5 * torch.rand(n, 1, 1, 1, generator=generator)
    images = digits.images * palette()[colours][:, :, None, None] * light
    noise = 0.05 * torch.randn(images.shape, generator=generator)
    return Coloured(images + noise, digits.labels, colours)


class Splits(NamedTuple):
    """What one seed learns from and is measured on; in the first and the last the colour goes with the digit.

    ``familiar`` holds the digits of ``test`` in the colours of the training.
    """

    training: Coloured
    validation: Coloured
    probing: Coloured
    test: Coloured
    familiar: Coloured


def splits(seed: int, per_class: int = 250) -> Splits:
    """2,500 digits to learn from, 500 to tune on, 1,000 to fit the probe on, 1,000 to report."""
    training, rest = take(mnist(), per_class, seed)
    validation, rest = take(rest, 50, seed)
    probing, test = take(rest, 100, seed)
    return Splits(
        training=paint(training, SPURIOUS, seed),
        validation=paint(validation, 0, seed + 1),
        probing=paint(probing, 0, seed + 2),
        test=paint(test, 0, seed + 3),
        familiar=paint(test, SPURIOUS, seed + 4),
    )


class Pool(nn.Module):
    """The mean and the maximum of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, 2C)``."""
        return torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)


def colour_head() -> nn.Sequential:
    """What guesses the colour: it looks at small patches before it pools, as the layers above can."""
    return nn.Sequential(
        nn.LazyConv2d(32, 3, 2, 1), nn.ReLU(), Pool(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, COLOURS)
    )


def network() -> nn.Sequential:
    """A small CNN with named layers."""

    def block(narrow: int, wide: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(narrow, wide, 3, 2, 1), nn.BatchNorm2d(wide), nn.ReLU())

    features = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU())
    return nn.Sequential(
        OrderedDict(
            conv1=block(3, 8), conv2=block(8, 16), conv3=block(16, 32), features=features, digit=nn.Linear(64, 10)
        )
    )


def train(way: str, data: Coloured, seed: int, epochs: int = EPOCHS, lambd: float = 8.0) -> nn.Module:
    """A network that tells the digits, with the colour head at ``conv1``, if the way has one."""
    torch.manual_seed(seed)
    model, batch = network(), 125
    groups = [{"params": list(model.parameters()), "lr": 2e-3}]
    if way != "plain":
        head, operator = colour_head(), gs.GradientReversal() if way == "reversal" else None
        # The one line.
        gs.attach_head(
            model, "conv1", head, name="colour", operator=operator, training_only=True, example=data.images[:1]
        )
        groups.append({"params": list(head.parameters()), "lr": 3e-3, "weight_decay": 1e-3})
    optimizer = torch.optim.Adam(groups, betas=(0.5, 0.9))
    steps = epochs * math.ceil(len(data.labels) / batch)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    ramp = gs.GRLScheduler(model, steps, max_lambd=lambd) if way == "reversal" else None
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(data.labels)).split(batch):
            output = model(data.images[index])
            logits, heads = output if way != "plain" else (output, {})
            loss = nn.functional.cross_entropy(logits, data.labels[index])
            for guess in heads.values():
                loss = loss + nn.functional.cross_entropy(guess, data.colours[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
            if ramp is not None:
                ramp.step()
    return model.eval()


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> Tensor:
    """What the last layer but one makes of the images, ``(N, 64)``."""
    seen: list[Tensor] = []
    hook = model.features.register_forward_hook(lambda _module, _args, output: seen.append(output))
    model(images)
    hook.remove()
    return seen[0]


def probe(model: nn.Module, fitted_on: Coloured, measured_on: Coloured) -> float:
    """How well a new network tells the colour from the finished features: what is still in there."""
    known, asked = features(model, fitted_on.images), features(model, measured_on.images)
    mean, spread = known.mean(0), known.std(0) + 1e-6
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, COLOURS))
    optimizer = torch.optim.Adam(head.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head((known - mean) / spread), fitted_on.colours).backward()
        optimizer.step()
    return accuracy(head((asked - mean) / spread), measured_on.colours)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share that is told right."""
    return (logits.argmax(1) == labels).float().mean().item()


class Result(NamedTuple):
    """What one network was measured to do."""

    way: str
    familiar: float
    digit: float
    colour: float


def measure(seeds: list[int], epochs: int, per_class: int) -> Iterator[Result]:
    """Train each way on each seed, and measure it on the test digits."""
    for seed in seeds:
        data = splits(seed, per_class)
        for way in WAYS:
            model = train(way, data.training, seed, epochs=epochs)
            with torch.no_grad():
                familiar, digit = (accuracy(model(d.images), d.labels) for d in (data.familiar, data.test))
            yield Result(way, familiar, digit, probe(model, data.probing, data.test))


def draw(results: list[Result], data: Coloured, path: Path) -> None:
    """Some of the training digits, and the two accuracies of each way."""
    shown, (left, right) = figure(8.2, 3.4, columns=2)
    rows = [torch.cat([data.images[data.labels == label][k] for label in range(10)], 2) for k in range(5)]
    left.imshow(torch.cat(rows, 1).clamp(0, 1).permute(1, 2, 0).numpy())
    left.set_title("training digits: the colour gives them away", loc="left", fontsize=10)
    left.axis("off")
    for k, (name, colour, label) in enumerate((("digit", BLUE, "digit"), ("colour", ORANGE, "colour, by a probe"))):
        values = [torch.tensor([getattr(r, name) for r in results if r.way == way]) for way in WAYS]
        spread = [v.std().item() if len(v) > 1 else 0.0 for v in values]
        places = [x + 0.38 * k for x in range(len(WAYS))]
        right.bar(places, [v.mean().item() for v in values], 0.36, yerr=spread, color=colour, label=label, capsize=3)
    right.axhline(CHANCE, color=GREY, linestyle="--", linewidth=0.8, label="chance")
    right.set_xticks([x + 0.19 for x in range(len(WAYS))], ["no head", "head,\nno reversal", "head behind\na reversal"])
    right.set(ylim=(0, 1.2), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    right.set_title("accuracy on test digits of random colour", loc="left", fontsize=10)
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8, loc="upper center", ncols=3)
    save(shown, path)


def main() -> None:
    """Measure over the seeds, print the table, save the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=[0, 1, 2], type=int, nargs="+", help="default: 0 1 2")
    parser.add_argument("--picture", default="out/debias_colour.png", type=Path, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, to see that it runs")
    options = parser.parse_args()
    seeds, epochs, per_class = (options.seeds[:1], 2, 50) if options.quick else (options.seeds, EPOCHS, 250)

    results = list(progress(measure(seeds, epochs, per_class), "training", total=len(seeds) * len(WAYS)))
    table(
        f"1,000 test digits, mean and spread of {len(seeds)} seeds",
        ["", "digit, colours as in training", "digit, random colours", f"colour, by a probe (chance {CHANCE:g})"],
        [
            [
                label,
                *(mean_and_spread([getattr(r, name) for r in results if r.way == way]) for name in Result._fields[1:]),
            ]
            for way, label in WAYS.items()
        ],
    )
    draw(results, splits(seeds[0]).training, options.picture)


if __name__ == "__main__":
    main()
