"""Edges and counted ops where a value is changed in place, given twice, or stands for a tensor only while traced."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurgery as gs

FACTOR = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.blocks = nn.ModuleList([self.a, self.b, self.a])


class ChangedByAdding(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += self.b(x)
        return self.c(h)


class ChangedThroughAView(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, 0].mul_(self.b(x)[:, 0])
        return self.c(h)


@pytest.mark.parametrize("make", [ChangedByAdding, ChangedThroughAView])
def test_a_value_that_is_changed_on_its_way_is_another_one(make: type[Net]) -> None:
    net, x = make(), torch.randn(2, 3)
    plain = net(x).detach()
    gs.insert_grl(net, "a -> c")
    with pytest.raises(gs.CaptureError, match="changed in place since"):
        net(x)
    with torch.no_grad():
        assert torch.equal(net(x), plain)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="between the two the value is changed in place"):
        compiled(x)


def test_the_changed_value_is_what_the_op_that_changed_it_makes() -> None:
    class Reference(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h += self.b(x)
            return self.c(gs.scale_gradient(h, FACTOR))

    net, x = ChangedByAdding(), torch.randn(2, 3)
    gs.insert_scale_gradient(net, ":add -> c", FACTOR)
    assert_same(net, Reference(), x)
    assert_same(torch.compile(net, backend="aot_eager"), Reference(), x)


class GivenTwice(Net):
    """What the consumer receives is one tensor, and it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.stem = nn.Linear(3, 4)

    on = staticmethod(lambda value: value)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        k = self.on(h)
        return self.attention(k, k, k)[0] + h


def test_a_value_given_to_one_consumer_three_times_stays_one() -> None:
    net, reference, x = GivenTwice(), GivenTwice(), torch.randn(2, 5, 3)
    seen: list[bool] = []
    net.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0] is args[1] and args[1] is args[2]))
    reference.on = lambda value: gs.scale_gradient(value, FACTOR)  # type: ignore[method-assign]
    gs.insert_scale_gradient(net, "stem -> attention", FACTOR)
    assert_same(net, reference, x)
    assert seen == [True]


def test_a_name_of_ones_own_for_slice() -> None:
    class Sliced(Net):
        def forward(self, x: Tensor) -> Tensor:
            slice = 2  # noqa: A001
            return self.c(self.a(x))[:, 0:slice]

    class Reference(Net):
        def forward(self, x: Tensor) -> Tensor:
            return gs.scale_gradient(self.c(self.a(x)), FACTOR)[:, :2]

    net = Sliced()
    gs.insert_scale_gradient(net, "c -> :getitem", FACTOR)
    assert_same(net, Reference(), torch.randn(2, 3))


class Walked(Net):
    """Counted as it runs: which child a round calls, only the run knows."""

    at: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            x = block(x)
            if (self.at, k) in HITS:
                x = gs.scale_gradient(x, FACTOR)
        return x


class Edge(Net):
    at: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(gs.scale_gradient(h, FACTOR) if self.at else h) * (h.size(0) + h.size(1)) + h


HITS = {(":blocks.1", 1), (":blocks.0@*", 0), (":blocks.0@*", 2), (":blocks.0@1", 2)}


@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
@pytest.mark.parametrize(
    ("make", "at"), [*((Walked, at) for at in (":blocks.1", ":blocks.0@*", ":blocks.0@1")), (Edge, "a -> c")]
)
def test_a_trace_keeps_what_is_counted(make: type[Walked | Edge], at: str, grad: bool) -> None:
    """In ``torch.fx`` no value is a tensor: an operator that waits for one would be lost without a word."""
    net, reference = make(), make()
    reference.at = at
    gs.insert_scale_gradient(net, at, FACTOR)
    with torch.set_grad_enabled(grad):
        traced = torch.fx.symbolic_trace(net)
    assert_same(net, reference, torch.randn(2, 3), call=traced)


def assert_same(net: nn.Module, reference: nn.Module, x: Tensor, call: Any = None) -> None:
    """The outputs and the gradients of every parameter and of the input; ``call`` runs in the place of ``net``."""
    results = []
    for one, run in ((net, call or net), (reference, reference)):
        given = x.clone().requires_grad_()
        out = run(given)
        named = dict(one.named_parameters())
        loss = (out.square() * torch.arange(1, out.numel() + 1).reshape(out.shape)).sum()
        grads = torch.autograd.grad(loss, [given, *named.values()], allow_unused=True)
        results.append([out.detach(), *grads])
    for got, wanted in zip(*results, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or torch.equal(got, wanted)
