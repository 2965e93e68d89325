"""Forwards that would pass an operator by, or change the operated copy alone: each is refused, none is silent."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurgery as gs

FACTOR = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.act = nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.act(h) + h * 2


class Dropped(Net):
    """The value of the in-place module is read by its old name alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.act(h)
        return self.b(h)


class Taken(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.act(h)
        return self.b(h)


class ByHand(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(gs.scale_gradient(self.act(self.a(x)), FACTOR))


OPERATORS = {
    "scale": lambda: gs.ScaleGradient(FACTOR),
    "stop": gs.StopGradient,
    "straight through": lambda: gs.StraightThrough(torch.round),
    "map": lambda: gs.MapGradient(torch.neg),
}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_an_in_place_module_whose_value_is_dropped(operator: str, reentrant: bool | None) -> None:
    net, x = Dropped(), torch.randn(2, 3, requires_grad=True)
    gs.insert(net, "act", OPERATORS[operator]())
    out = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
    with pytest.raises(gs.OperatorError, match="nobody reads what it returns"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_an_in_place_module_whose_value_is_taken(reentrant: bool | None) -> None:
    net, by_hand, x = Taken(), ByHand(), torch.randn(2, 3)
    gs.insert_scale_gradient(net, "act", FACTOR)
    grads = []
    for one in (net, by_hand):
        given = x.clone().requires_grad_()
        out = one(given) if reentrant is None else checkpoint(one, given, use_reentrant=reentrant)
        out.square().sum().backward(retain_graph=reentrant is None)
        if reentrant is None:
            out.sum().backward()
        grads.append([given.grad, *(p.grad for p in one.parameters())])
    assert all(torch.equal(got, wanted) for got, wanted in zip(*grads, strict=True))


def test_a_value_that_no_loss_reads_is_no_fault() -> None:
    net = Dropped()
    gs.insert_grl(net, "act")
    net(torch.randn(2, 3))
    with torch.no_grad():
        net(torch.randn(2, 3))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_input_that_is_changed_in_place(operator: str, compiled: bool) -> None:
    net, x = Net(), torch.randn(2, 3)
    gs.insert(net, "act", OPERATORS[operator](), side="input")
    run = torch.compile(net, backend="aot_eager") if compiled else net
    with pytest.raises(Exception, match="changes what it receives in\\s+place"):
        run(x)
    net.act.inplace = False
    run(x).sum().backward()


def test_an_argument_that_is_not_operated_on_may_be_changed_in_place() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            counts += 1
            return x * counts

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.adds = Adds()

        def forward(self, x: Tensor) -> Tensor:
            counts = torch.zeros(3)
            return self.b(self.adds(self.a(x), counts) + counts)

    net, plain, x = Counting(), Counting(), torch.randn(2, 3)
    gs.insert_scale_gradient(net, "adds[0]", FACTOR, side="input")
    assert torch.equal(net(x), plain(x))


@pytest.mark.parametrize("at", ["a", ""])
def test_a_forward_that_is_replaced_on_the_class_afterwards(at: str) -> None:
    class Layer(nn.Linear):
        pass

    class Of(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    net = Of()
    net.a = Layer(3, 3)
    gs.insert_scale_gradient(net, at, FACTOR)
    cls = Layer if at else Of
    cls.forward = lambda self, x: x * 3  # type: ignore[method-assign]
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(gs.SurgeryError, match="was replaced since"):
        net(x)
    gs.remove(net)
    gs.insert_scale_gradient(net, at, FACTOR)
    assert torch.equal(net(x), x * 3)
    (grad,) = torch.autograd.grad(net(x).sum(), x)
    assert torch.equal(grad, torch.full((2, 3), 3 * FACTOR))


def test_a_method_that_is_replaced_on_the_class_afterwards() -> None:
    class Joins(Net):
        def join(self, h: Tensor, x: Tensor) -> Tensor:
            return h + x

        def forward(self, x: Tensor) -> Tensor:
            return self.join(self.a(x), x)

    net, x = Joins(), torch.randn(2, 3)
    gs.insert_grl(net, ":add")
    net(x)
    Joins.join = lambda self, h, x: h + x * 3  # type: ignore[method-assign]
    with pytest.raises(gs.SurgeryError, match="join was replaced since"):
        net(x)


ENCODER_PLACES = ["layers.0.linear1", "layers.0.self_attn", "layers.1.norm2", "layers.0:linear1"]


@pytest.mark.parametrize("at", ENCODER_PLACES)
def test_a_transform_inside_a_layer_that_calls_no_child_in_evaluation(at: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    with pytest.raises(gs.SurgeryError, match="set_fastpath_enabled"):
        gs.insert_transform(model, at, torch.round)
    assert not gs.operations(model)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        gs.insert_transform(model, at, torch.round)
        with torch.no_grad():
            evaluated = model(x)
        assert torch.equal(evaluated, model(x.requires_grad_()))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("at", ["layers.0", "layers.1"])
def test_a_transform_of_such_a_layer_runs_in_evaluation(at: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    gs.insert_transform(model, at, torch.round)
    with torch.no_grad():
        model(x)
    assert gs.operations(model)[0].runs == 1
    gs.insert_grl(model, "layers.0.linear1")  # the values stay: nothing is lost where no gradient flows
