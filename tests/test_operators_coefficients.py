"""What stands as a coefficient, and the layers that hold one."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from gradsurgery.errors import OperatorError
from gradsurgery.operators import (
    FrozenTransform,
    GradientReversal,
    MapGradient,
    ScaleGradient,
    StopGradient,
    StraightThrough,
    reverse_gradient,
    scale_gradient,
)


def test_a_factor_has_double_precision():
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    reverse_gradient(x, 0.3).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -0.3, dtype=torch.float64))


BAD = [float("nan"), float("inf"), -float("inf"), True, np.bool_(True), "0.5", None, 1j, 10**400, [0.5]]


BAD_TENSORS = [
    torch.ones(1, requires_grad=True),
    torch.ones(2),
    torch.ones(0),
    torch.tensor(1j),
    torch.ones(1, device="meta"),
]


GOOD = [(0.5, 0.5), (2, 2.0), (0, 0.0), (np.float32(0.25), 0.25), (np.int64(3), 3.0), (torch.tensor([0.5]), 0.5)]


@pytest.mark.parametrize("bad", BAD + BAD_TENSORS + [torch.tensor(True)], ids=repr)
def test_coefficients_that_are_refused(bad):
    layer, scale, x = GradientReversal(), ScaleGradient(1.0), torch.ones(1)
    for ask in (
        lambda: GradientReversal(bad),
        lambda: ScaleGradient(bad),
        lambda: reverse_gradient(x, bad),
        lambda: scale_gradient(x, bad),
        lambda: setattr(layer, "lambd", bad),
        lambda: setattr(scale, "scale", bad),
    ):
        with pytest.raises(OperatorError, match=r"(lambd|scale)="):
            ask()
    assert layer.lambd == 1.0 and scale.scale == 1.0


def test_a_negative_strength_is_refused_and_points_to_scaling():
    with pytest.raises(OperatorError, match="scale_gradient"):
        reverse_gradient(torch.ones(1), -0.5)
    assert ScaleGradient(-0.5).scale == -0.5


@pytest.mark.parametrize(("good", "number"), GOOD, ids=repr)
def test_coefficients_that_are_accepted(good, number):
    layer, scale = GradientReversal(good), ScaleGradient(good)
    assert type(layer.lambd) is float and layer.lambd == scale.scale == number
    x = torch.ones(1, requires_grad=True)
    reverse_gradient(x, good).backward()
    assert x.grad.item() == -number


def test_the_coefficient_of_the_forward_counts():
    layer, x = GradientReversal(0.5), torch.ones(1, requires_grad=True)
    y = layer(x)
    layer.lambd = 2.0
    y.backward()
    assert x.grad.item() == -0.5


def test_nothing_is_learnt_or_saved():
    layers = nn.Sequential(GradientReversal(), ScaleGradient(1), StopGradient(), StraightThrough(torch.round))
    assert not list(layers.parameters()) and not layers.state_dict()
    assert set(FrozenTransform(nn.Linear(1, 1)).state_dict()) == {"fn.weight", "fn.bias"}


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (GradientReversal(0.5), "GradientReversal(lambd=0.5)"),
        (ScaleGradient(-2), "ScaleGradient(scale=-2.0)"),
        (StopGradient(), "StopGradient()"),
        (StraightThrough(torch.round), "StraightThrough(fn=round)"),
        (FrozenTransform(nn.ReLU()), "FrozenTransform(fn=ReLU())"),
        (MapGradient(torch.neg), "MapGradient(fn=neg)"),
    ],
    ids=repr,
)
def test_layers_print_as_constructor_calls_and_survive_copies(layer, text):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    for one in [layer, *twins]:
        assert repr(one) == text
        x = torch.tensor([2.0], requires_grad=True)
        y = one(x)
        assert torch.equal(y, layer(x))
        if y.requires_grad:
            assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(layer(x), x)[0])
