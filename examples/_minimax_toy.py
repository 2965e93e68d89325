"""A negated loss against a reversal: one encoder and one domain head, trained both ways on the same points."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import gradsurgery as gs
from _report import BLUE, GREY, ORANGE, figure, progress, save


class Curves(NamedTuple):
    """The two losses at each step."""

    task: list[float]
    domain: list[float]


def minimax(how: str, steps: int) -> Curves:
    """Train an encoder against a domain head, on points whose one side is the class and whose other is the domain."""
    torch.manual_seed(0)
    n = 256
    domains, classes = torch.arange(n) % 2, torch.arange(n) // 2 % 2
    x = 0.5 * torch.randn(n, 2) + torch.stack([2.0 * classes - 1, 2.0 * domains - 1], 1)
    net = nn.ModuleDict({"encoder": nn.Linear(2, 2), "task": nn.Linear(2, 1), "domain": nn.Linear(2, 1)})
    if how == "reversal":
        gs.insert_grl(net, "domain", side="input")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    curves = Curves([], [])
    for _ in progress(range(steps), how):
        h = net["encoder"](x)
        task = nn.functional.binary_cross_entropy_with_logits(net["task"](h)[:, 0], classes.float())
        domain = nn.functional.binary_cross_entropy_with_logits(net["domain"](h)[:, 0], domains.float())
        optimizer.zero_grad()
        (task + domain if how == "reversal" else task - domain).backward()
        optimizer.step()
        curves.task.append(task.item())
        curves.domain.append(domain.item())
    return curves


def draw(reversed_: Curves, negated: Curves, path: Path) -> None:
    """The domain loss and the task loss of both, on a logarithmic scale."""
    shown, (domain, task) = figure(8, 3.2, columns=2)
    for axes, name in ((domain, "domain"), (task, "task")):
        for curves, colour, label in ((negated, ORANGE, "task - domain"), (reversed_, BLUE, "reversal")):
            values = getattr(curves, name)
            alive = [value if math.isfinite(value) else math.nan for value in values]
            axes.plot(alive, color=colour, label=label, linewidth=1.8)
        axes.set(yscale="log", xlabel="step", ylim=(1e-2, 1e6), xlim=(0, len(reversed_.task)))
        axes.set_title(f"{name} loss", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    domain.axhline(math.log(2), color=GREY, linewidth=0.8, linestyle="--")
    domain.annotate(
        "ln 2: the head knows nothing",
        (1, math.log(2)),
        xycoords=("axes fraction", "data"),
        xytext=(0, -12),
        textcoords="offset points",
        ha="right",
        color=GREY,
        fontsize=9,
    )
    domain.legend(frameon=False, fontsize=9)
    save(shown, path)
