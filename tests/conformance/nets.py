"""One small net with every kind of place, operated on by the library or with the operators written into its source.

All weights, inputs and factors are small powers of two, so that every order of summation gives the same bits: what is
compared is compared with ``torch.equal``. The hand-written operators use ``detach`` alone, which every differentiating
mode of eager PyTorch honours.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradsurgery as gs

Make = Callable[[float], nn.Module]


# --- layers of the net -----------------------------------------------------------------------------------------------


def linear(weight: float) -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def conv(weight: float) -> nn.Module:
    layer = nn.Conv2d(2, 2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.5], [0.0, 1.0]]).mul(weight)[:, :, None, None])
    return layer


class Factor(nn.Module):
    """A layer for tensors of any layout and no dimensions."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


# --- what operators work with ----------------------------------------------------------------------------------------


def squared(gradient: Tensor) -> Tensor:
    """Not linear, and at the top of a module, so that a recorded graph can keep it by its name."""
    return gradient * gradient


class Weighted(nn.Module):
    """A transform with a parameter of its own, which must get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * x * self.weight[0]


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "GradientReversal": lambda: gs.GradientReversal(0.5),
    "ScaleGradient": lambda: gs.ScaleGradient(-4.0),
    "StopGradient": gs.StopGradient,
    "StraightThrough": lambda: gs.StraightThrough(Weighted()),
    "FrozenTransform": lambda: gs.FrozenTransform(Weighted()),
    "DetachedTransform": lambda: gs.DetachedTransform(Weighted()),
    "MapGradient": lambda: gs.MapGradient(squared),
}


class _SquaredGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad


def _factor(x: Tensor, factor: float) -> Tensor:
    return x * factor + (x * (1 - factor)).detach()


HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "GradientReversal": lambda x: _factor(x, -0.5),
    "ScaleGradient": lambda x: _factor(x, -4.0),
    "StopGradient": lambda x: x.detach(),
    "StraightThrough": lambda x: x + (x * x * 0.5 - x).detach(),
    "FrozenTransform": lambda x: x * x * 0.5,
    "DetachedTransform": lambda x: (x * x * 0.5).detach(),
    "MapGradient": _SquaredGradient.apply,
}


# --- the net ---------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, make: Make = linear) -> None:
        super().__init__()
        self.fc = make(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Net(nn.Module):
    """enc -> plain -> an op -> seq -> another op -> head."""

    def __init__(self, make: Make = linear) -> None:
        super().__init__()
        self.enc = make(2.0)
        self.plain = Part(make)
        self.seq = nn.Sequential(make(1.0), make(-2.0))
        self.head = make(4.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.plain(self.enc(x))
        h = h * 2
        h = self.seq(h)
        h = torch.neg(h)
        return self.head(h)


class Layered(Net):
    """The same with an operator in its source, as any other layer."""

    def __init__(self, operator: nn.Module, make: Make = linear) -> None:
        super().__init__(make)
        self.op = operator

    def forward(self, x: Tensor) -> Tensor:
        h = self.op(self.plain(self.enc(x)))
        h = h * 2
        h = self.seq(h)
        h = torch.neg(h)
        return self.head(h)


class ByHand(Net):
    """The same with the gradient written by hand at one spot."""

    def __init__(self, operator: str, spot: str, make: Make = linear) -> None:
        super().__init__(make)
        self.operator, self.spot = operator, spot

    def at(self, spot: str, x: Tensor) -> Tensor:
        return HAND[self.operator](x) if spot == self.spot else x

    def forward(self, x: Tensor) -> Tensor:
        h = self.at("enc", self.enc(x))
        h = self.at("plain", self.plain(h))
        h = self.at("mul", h * 2)
        h = self.at("seq", self.seq(h))
        h = self.at("head", torch.neg(h))
        return self.at("root", self.head(h))


# name: (spot of the hand-written operator, address, side)
PLACES = {
    "plain module": ("plain", "plain", "output"),
    "Sequential": ("seq", "seq", "output"),
    "leaf": ("enc", "enc", "output"),
    "root": ("root", "", "output"),
    "op": ("mul", ":mul", "output"),
    "input side": ("head", "head", "input"),
    "GraphModule": ("plain", "plain", "output"),
    "layer": ("plain", None, "output"),
}


class Patient:
    """What a tool is given: the net before surgery, the surgery, both in one, and the net written by hand.

    Args:
        operator: a name of ``OPERATORS``.
        place: a name of ``PLACES``.
        make: the layers of the net.
    """

    def __init__(self, operator: str, place: str, make: Make = linear) -> None:
        self.operator, self.place, self.make = operator, place, make

    def of(self, make: Make) -> "Patient":
        return Patient(self.operator, self.place, make)

    @property
    def is_layer(self) -> bool:
        return self.place == "layer"

    def bare(self) -> nn.Module:
        net = Net(self.make)
        return torch.fx.symbolic_trace(net) if self.place == "GraphModule" else net

    def operate(self, model: nn.Module) -> nn.Module:
        _, address, side = PLACES[self.place]
        assert address is not None
        operator = OPERATORS[self.operator]()
        return gs.insert(model, address, operator, side=side)  # type: ignore[arg-type]

    def operated(self) -> nn.Module:
        if self.is_layer:
            return Layered(OPERATORS[self.operator](), self.make)
        return self.operate(self.bare())

    def live(self, model: nn.Module) -> nn.Module:
        """The live operator of an operated model."""
        return model.op if self.is_layer else gs.operations(model)[0].operator  # type: ignore[return-value]

    def by_hand(self) -> nn.Module:
        return ByHand(self.operator, PLACES[self.place][0], self.make)
