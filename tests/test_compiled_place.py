"""An operator at the output of a module in compiled code: straight by the formula, and otherwise as everywhere."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

import gradsurgery as gs
from gradsurgery._torch import constant_to_dynamo
from gradsurgery.operators.moved import is_unpatched
from gradsurgery.operators.short import ShortInGraphs
from gradsurgery.place import Place

FACTORS = {
    "reverse": (gs.GradientReversal(), -1.0),
    "scale": (gs.ScaleGradient(0.25), 0.25),
    "stop": (gs.StopGradient(), 0.0),
}
each_operator = pytest.mark.parametrize(("operator", "factor"), FACTORS.values(), ids=FACTORS)


@pytest.fixture(autouse=True)
def _new_compiler() -> None:
    torch.compiler.reset()


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * 2


def network(operator: nn.Module) -> nn.Sequential:
    return gs.insert(nn.Sequential(Doubles(), nn.ReLU(inplace=True)), "0", copy.deepcopy(operator))


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="aot_eager", fullgraph=True)


def gradient(call: Any, net: nn.Sequential) -> Tensor:
    net.zero_grad()
    (call(torch.ones(3)) * torch.tensor([1.0, 1.0, 5.0]) + net[0].weight * 8).sum().backward()
    return net[0].weight.grad


@each_operator
def test_gradient_beside_an_in_place_neighbour(operator: nn.Module, factor: float) -> None:
    net = network(operator)
    call = compiled(net)
    assert torch.equal(call(torch.ones(3)), torch.tensor([2.0, 0.0, 6.0]))
    wanted = 8 + factor * torch.tensor([2.0, 0.0, 10.0])
    assert torch.equal(gradient(call, net), wanted)
    assert torch.equal(gradient(net, net), wanted)


@each_operator
def test_a_forward_that_is_patched_on_the_operator_is_called(operator: nn.Module, factor: float) -> None:
    net = network(operator)
    call = compiled(net)
    gradient(call, net)
    gs.operations(net)[0].operator.forward = lambda x: x * 4  # type: ignore[method-assign]
    assert torch.equal(call(torch.ones(3)), torch.tensor([8.0, 0.0, 24.0]))
    assert torch.equal(gradient(call, net), 8 + 4 * torch.tensor([2.0, 0.0, 10.0]))


@each_operator
def test_an_operator_that_was_put_in_its_place_is_called(operator: nn.Module, factor: float) -> None:
    net = network(operator)
    call = compiled(net)
    gradient(call, net)
    net[0]._gs_graft.places[0].put(net[0], nn.Hardtanh(-1.0, 5.0))
    assert torch.equal(call(torch.ones(3)), torch.tensor([2.0, 0.0, 5.0]))


@each_operator
@pytest.mark.parametrize(("other", "to"), FACTORS.values(), ids=FACTORS)
def test_an_operator_at_two_places_is_replaced_at_one(
    operator: nn.Module, factor: float, other: nn.Module, to: float
) -> None:
    shared = copy.deepcopy(operator)
    net = gs.insert(gs.insert(Adds(), "", shared), ":relu", shared)
    call = compiled(net)
    for inner in (factor, to):
        net.zero_grad()
        (call(torch.ones(3)) + net.weight).sum().backward()
        assert torch.equal(net.weight.grad, 1 + factor * torch.tensor([inner + 1, 1.0, inner + 1]))
        net._gs_graft.places[1].put(net, copy.deepcopy(other))


def test_a_class_whose_forward_was_patched_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gs.ScaleGradient, "forward", lambda self, x: x * 4)
    assert not is_unpatched(gs.ScaleGradient)
    net = network(gs.ScaleGradient(0.25))
    assert torch.equal(compiled(net)(torch.ones(3)), torch.tensor([8.0, 0.0, 24.0]))


def test_a_forward_that_was_replaced_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(gs.GradientReversal())
    monkeypatch.setattr(Doubles, "forward", lambda self, x: x)
    with pytest.raises(Exception, match="was replaced since"):
        torch.compile(net, backend="aot_eager")(torch.ones(3))


def test_a_value_without_gradients_is_refused() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.long()

    with pytest.raises(Exception, match="no floating-point or complex tensor"):
        torch.compile(gs.insert_grl(Counts(), ""), backend="aot_eager")(torch.ones(3))


COPIES = {
    "itself": lambda net: net,
    "copy.deepcopy": copy.deepcopy,
    "copy.copy of the module": lambda net: nn.Sequential(copy.copy(net[0]), net[1]),
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "moved": lambda net: gs.insert_grl(gs.remove(net, "0"), "0"),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_new_strength_counts(copied: Any) -> None:
    net = copied(network(gs.GradientReversal()))
    call = compiled(net)
    for lambd in (1.0, 0.5, 0.25, 0.0, 2.0):
        gs.operations(net)[0].operator.lambd = lambd
        assert torch.equal(gradient(call, net), 8 - lambd * torch.tensor([2.0, 0.0, 10.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_the_negation_is_a_product_with_minus_one(dtype: torch.dtype) -> None:
    g = torch.tensor([0.0, -0.0, 1.5, -3.0, 65504.0, 1e-7], dtype=torch.float64).to(dtype)
    x = torch.ones(6, dtype=dtype, requires_grad=True)
    for fn in (gs.reverse_gradient, gs.insert_grl(nn.Sequential(nn.Identity()), "")):
        (got,) = torch.autograd.grad(fn(x * 1), x, g)
        wanted = g * -1.0
        assert torch.equal(got, wanted)
        if not dtype.is_complex:  # where the product adds zeros of either sign
            assert torch.equal(got.signbit(), wanted.signbit())


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * x
        return torch.relu(y) + y


PLACES = {"output": "", "op": ":relu", "edge": ":relu->add"}


def recorded(net: nn.Module) -> list[list[tuple[str, str, str]]]:
    """The nodes of the forward and of the backward graph that a compiler is given, each with what it reads."""
    graphs: list[list[tuple[str, str, str]]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([(node.op, str(node.target), str(node.args)) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    torch.compiler.reset()
    call = torch.compile(net, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    (call(torch.ones(3)) + net.weight).sum().backward()
    return graphs


@constant_to_dynamo
def nothing_is_short(self: nn.Module, *plain: Any) -> bool:
    return False


nothing_is_short.__name__ = "_is_short"  # by which Dynamo looks for it


@each_operator
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_short_way_records_the_graph_of_the_long_one(
    operator: nn.Module, factor: float, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = gs.insert(Adds(), place, copy.deepcopy(operator))
    long_way, refuses = Place.run, lambda self, module, value: pytest.fail("the long way was taken")
    monkeypatch.setattr(Place, "run", refuses)
    short = recorded(net)
    monkeypatch.setattr(Place, "run", long_way)
    monkeypatch.setattr(ShortInGraphs, "_is_short", nothing_is_short)
    assert short == recorded(net)
    assert sum(map(len, short)) > 4


class Layered(nn.Module):
    """A layer that its author wrote into the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.layer(self.weight * x))


@each_operator
def test_the_short_way_of_a_layer_records_the_graph_of_the_long_one(
    operator: nn.Module, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = recorded(Layered(operator))
    with monkeypatch.context() as patch:
        patch.setattr(ShortInGraphs, "_is_short", nothing_is_short)
        assert short == recorded(Layered(operator))
    net = Layered(operator)
    (compiled(net)(torch.ones(3)) + net.weight * 4).sum().backward()
    assert torch.equal(net.weight.grad, 4 + factor * torch.tensor([1.0, 0.0, 1.0]))


@each_operator
@pytest.mark.parametrize("value", [(torch.ones(2), torch.ones(2)), {"a": torch.ones(2)}, torch.arange(2)])
def test_a_layer_takes_in_compiled_code_what_it_takes_in_eager(operator: nn.Module, factor: float, value: Any) -> None:
    call = torch.compile(operator, backend="aot_eager", fullgraph=True)
    got, wanted = call(value), operator(value)
    assert type(got) is type(wanted)
    for one, other in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        assert torch.equal(one, other)


@each_operator
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_gradient_at_every_kind_of_place(operator: nn.Module, factor: float, place: str) -> None:
    net = gs.insert(Adds(), place, copy.deepcopy(operator))
    opened = torch.tensor([1.0, 0.0, 1.0])  # through the rectifier
    wanted = {"": factor * (opened + 1), ":relu": factor * opened + 1, ":relu->add": factor * opened + 1}[place]
    for call in (net, compiled(net)):
        net.zero_grad()
        assert torch.equal(call(torch.ones(3)), torch.tensor([2.0, -2.0, 6.0]))
        (call(torch.ones(3)) + net.weight * 4).sum().backward()
        assert torch.equal(net.weight.grad, wanted + 4)


@pytest.mark.parametrize("value", [torch.arange(3), torch.ones(3, dtype=torch.complex64), torch.ones(3).half()])
def test_other_dtypes_go_the_way_of_eager(value: Tensor) -> None:
    class Passes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net = gs.insert_grl(Passes(), ":mul")
    if not (value.is_floating_point() or value.is_complex()):
        with pytest.raises(Exception, match="no floating-point or complex tensor"):
            compiled(net)(value)
        return
    got, wanted = value.clone().requires_grad_(), value.clone().requires_grad_()
    compiled(net)(got).abs().sum().backward()
    net(wanted).abs().sum().backward()
    assert torch.equal(got.grad, wanted.grad)
    assert (got.grad.real < 0).all()


@pytest.mark.parametrize("shape", [(4, 1, 3), (3, 5), (1, 1)])
def test_strides_that_a_product_would_not_keep(shape: tuple[int, ...]) -> None:
    class Expands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape[-1]))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).expand(shape)

    net = gs.insert_grl(Expands(), "")
    x = torch.randn(shape[-1])
    factors = torch.randn(shape)
    (compiled(net)(x) * factors).sum().backward()
    assert torch.allclose(net.weight.grad, -(factors.sum(tuple(range(len(shape) - 1))) * x))
    plain = Expands()
    (plain(x) * factors).sum().backward()
    assert torch.equal(net.weight.grad, -plain.weight.grad)


def test_compiled_code_asks_for_few_objects(caplog: pytest.LogCaptureFixture) -> None:
    """The mark by which Dynamo takes the short way has a private name: if it goes, these grow to dozens."""
    counted = {}
    nets = {
        "plain": Doubles(),
        "operated": gs.insert_grl(Doubles(), ""),
        "no layer": Layered(nn.Identity()),
        "layer": Layered(gs.GradientReversal()),
    }
    for name, net in nets.items():
        torch.compiler.reset()
        torch._logging.set_logs(guards=True)
        try:
            caplog.clear()
            torch.compile(net, backend="aot_eager", fullgraph=True)(torch.ones(3))
        finally:
            torch._logging.set_logs()
        objects = set(re.findall(r"GuardManager: source=(.*?), accessed_by", caplog.text))
        counted[name] = (len(objects), len(set(re.findall(r"\+- [A-Z_]+: .*", caplog.text))))
    assert counted["plain"] >= (5, 15)
    for operated, untouched in (("operated", "plain"), ("layer", "no layer")):
        objects, guards = (one - other for one, other in zip(counted[operated], counted[untouched], strict=True))
        assert objects <= 4
        assert guards <= 6
