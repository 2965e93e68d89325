"""The operators as layers between two weights, and what each does to their gradients."""

import collections

import pytest
import torch
from torch import nn

from gradsurgery.operators import (
    DetachedTransform,
    FrozenTransform,
    GradientReversal,
    ScaleGradient,
    StopGradient,
    StraightThrough,
)


def net(layer, width=1):
    """2 x -> layer -> 3 x: without an operator the output for 1 is 6 and the weight gradients are 3 and 2."""
    model = nn.Sequential(
        collections.OrderedDict(
            enc=nn.Linear(width, width, bias=False), op=layer, head=nn.Linear(width, width, bias=False)
        )
    )
    model.enc.weight.data.copy_(2 * torch.eye(width))
    model.head.weight.data.copy_(3 * torch.eye(width))
    return model


def weight(value):
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(value)
    return layer


# name, the layer, the output, the gradients of enc, head and (where it has one) of the weight of fn
LAYERS = {
    "reverse": (lambda: GradientReversal(0.5), 6.0, [-1.5, 2.0]),
    "scale": (lambda: ScaleGradient(-4), 6.0, [-12.0, 2.0]),
    "stop": (lambda: StopGradient(), 6.0, [None, 2.0]),
    "straight": (lambda: StraightThrough(torch.square), 12.0, [3.0, 4.0]),
    "straight module": (lambda: StraightThrough(weight(5.0)), 30.0, [3.0, None, 10.0]),
    "frozen": (lambda: FrozenTransform(weight(5.0)), 30.0, [15.0, None, 10.0]),
    "frozen function": (lambda: FrozenTransform(torch.square), 12.0, [12.0, 4.0]),
    "detached": (lambda: DetachedTransform(weight(5.0)), 30.0, [None, None, 10.0]),
}


each_layer = pytest.mark.parametrize(("make", "output", "gradients"), LAYERS.values(), ids=LAYERS)


def check(run, model, output, gradients):
    """Run on a few inputs, so that a profiling executor gets to its optimised plan."""
    for _ in range(3):
        for p in model.parameters():
            p.grad = None
        out = run(torch.ones(1, 1))
        out.sum().backward()
        assert out.item() == output
        assert [None if p.grad is None else p.grad.item() for p in model.parameters()] == gradients
