"""What a model is handed to, and what hangs on it: every gradient as with the operator written into the source."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import gradsurgery as gs

FACTOR = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) + h


class Scaled(nn.Linear):
    """The child as it would be with the operator in its source."""

    def forward(self, x: Tensor) -> Tensor:
        return gs.scale_gradient(super().forward(x), FACTOR)


def gradients(run: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    given = x.clone().requires_grad_()
    out = run(given)
    (out.square() * torch.arange(1, out.numel() + 1).reshape(out.shape)).sum().backward()
    grads = [given.grad, *(p.grad for p in net.parameters())]
    return [out.detach(), *(grad.clone() for grad in grads if grad is not None)]


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, out: out * 2),
    "forward with kwargs": lambda m: m.register_forward_hook(
        lambda m, args, kwargs, out: out * 2, with_kwargs=True, always_call=True
    ),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "backward": lambda m: m.register_full_backward_hook(lambda m, received, sent: (received[0] * 2,)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, sent: (sent[0] * 2,)),
    "weight norm": lambda m: parametrizations.weight_norm(m),
    "pruned": lambda m: prune.l1_unstructured(m, "weight", 0.3),
}


@pytest.mark.parametrize("first", ["hook", "surgery"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_stands_where_it_stood(kind: str, first: str) -> None:
    net, by_hand, x = Net(), Net(), torch.randn(2, 3)
    by_hand.a.__class__ = Scaled
    HOOKS[kind](by_hand.a)
    steps = [lambda: HOOKS[kind](net.a), lambda: gs.insert_scale_gradient(net, "a", FACTOR)]
    for step in steps if first == "hook" else steps[::-1]:
        step()
    wanted = gradients(by_hand, by_hand, x)
    assert all(map(torch.equal, gradients(net, net, x), wanted))


class Rounds(Net):
    """A checkpointed function made anew in each round, with an op that is counted."""

    reentrant = False
    at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for k in range(3):
            x = checkpoint(lambda t, k=k: self.on(k, self.a(t) * 2), x, use_reentrant=self.reentrant)
        return x

    def on(self, k: int, value: Tensor) -> Tensor:
        return gs.scale_gradient(value, FACTOR) if k == self.at else value


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("k", range(3))
def test_a_counted_op_in_a_checkpoint_made_anew(k: int, reentrant: bool) -> None:
    net, by_hand, x = Rounds(), Rounds(), torch.randn(2, 3)
    net.reentrant = by_hand.reentrant = reentrant
    by_hand.at = k
    gs.insert_scale_gradient(net, f":mul@{k}", FACTOR, example=x)
    wanted = gradients(by_hand, by_hand, x)
    assert all(map(torch.equal, gradients(net, net, x), wanted))


def test_operators_come_and_go_under_one_compilation() -> None:
    """A class, a coefficient, a closure: each is a guard, so no compiled code outlives what it was compiled for."""
    net, x = Net(), torch.randn(2, 3)
    plain = copy.deepcopy(net)
    compiled = torch.compile(net, backend="aot_eager")
    untouched = gradients(plain, plain, x)
    for factor in (2.0, 0.5):
        for operator in (
            gs.ScaleGradient(factor),
            gs.MapGradient(lambda g, factor=factor: g * factor),
            gs.GradientReversal(factor),
        ):
            gs.insert(net, "a", operator)
            sign = -1 if isinstance(operator, gs.GradientReversal) else 1
            got = gradients(compiled, net, x)
            assert torch.equal(got[0], untouched[0])
            for k, scale in enumerate([sign * factor] * 3 + [1, 1], 1):
                assert torch.equal(got[k], untouched[k] * scale), (operator, k)
            gs.remove(net)
    assert all(map(torch.equal, gradients(compiled, net, x), untouched))


def test_a_gradient_penalty_differentiates_through_the_operator() -> None:
    net, by_hand = Net(), Net()
    by_hand.a.__class__ = Scaled
    gs.insert_scale_gradient(net, "a", FACTOR)
    seconds = []
    for one in (net, by_hand):
        torch.manual_seed(1)
        x = torch.randn(2, 3, requires_grad=True)
        (first,) = torch.autograd.grad(one(x).sigmoid().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad((first.norm() - 1) ** 2, [x, *one.parameters()], allow_unused=True))
    for got, wanted in zip(*seconds, strict=True):
        assert (got is None and wanted is None) or torch.equal(got, wanted)
