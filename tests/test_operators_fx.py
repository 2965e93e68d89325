"""The operators under torch.fx and torch.func."""

import pickle

import pytest
import torch
from layer_table import LAYERS, net
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from gradsurgery.errors import OperatorError
from gradsurgery.operators import (
    MapGradient,
    StraightThrough,
    detached_transform,
    frozen_transform,
    map_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)

pytestmark = pytest.mark.usefixtures("scripting")


# --- torch.fx
@pytest.mark.parametrize("name", ["reverse", "scale", "stop", "straight module", "frozen", "detached"])
def test_fx_keeps_the_function_through_a_second_trace_and_pickling(name):
    make, output, gradients = LAYERS[name]
    graph = fx.symbolic_trace(net(make()))
    again = fx.symbolic_trace(graph)
    loaded = pickle.loads(pickle.dumps(again))
    for one in (graph, again, loaded):
        assert any(
            node.op == "call_function" and node.target.__module__.startswith("gradsurgery") for node in one.graph.nodes
        )
        by_name = dict(one.named_parameters())
        order = sorted(by_name, key=lambda n: ("enc" not in n, "op" not in n))
        for p in one.parameters():
            p.grad = None
        out = one(torch.ones(1, 1))
        out.sum().backward()
        assert out.item() == output
        assert [None if by_name[n].grad is None else by_name[n].grad.item() for n in order] == gradients


def test_fx_sees_into_nested_values_and_takes_a_traced_strength():
    def f(x, lambd):
        a, parts = reverse_gradient((x * 1, {"b": x * 2}), lambd)
        return a + parts["b"]

    graph = fx.symbolic_trace(f)
    x = torch.ones(2, requires_grad=True)
    graph(x, 0.5).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -1.5))


def test_fx_refuses_a_function_that_no_graph_can_hold():
    for layer in (StraightThrough(torch.round), MapGradient(torch.neg)):
        with pytest.raises(OperatorError, match="torch.fx"):
            fx.symbolic_trace(net(layer))


def test_make_fx_before_dispatch_keeps_the_gradient():
    graph = make_fx(lambda x: reverse_gradient(x, 0.5) * 3, pre_dispatch=True)(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    graph(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -1.5))
    with pytest.raises(OperatorError, match="map_gradient"):
        make_fx(lambda x: map_gradient(x, torch.neg))(torch.ones(2))


# --- torch.func
CUBES = {
    "reverse": (lambda x: reverse_gradient(x, 0.5), -0.5),
    "scale": (lambda x: scale_gradient(x, 4.0), 4.0),
    "straight": (lambda x: straight_through(x, lambda v: v * 1), 1.0),
    "stop": (stop_gradient, 0.0),
    "detached": (lambda x: detached_transform(x, lambda v: v * 1), 0.0),
    "frozen": (lambda x: frozen_transform(x, lambda v: v * 2) / 2, 1.0),
}


@pytest.mark.parametrize(("operate", "factor"), CUBES.values(), ids=CUBES)
def test_function_transforms(operate, factor):
    x = torch.tensor([1.0, 2.0, -3.0])

    def cube(v):
        return (operate(v) ** 3).sum()

    slope, bend = 3 * factor * x**2, 6 * factor**2 * x
    assert torch.equal(torch.func.grad(cube)(x), slope)
    assert torch.equal(torch.func.vmap(torch.func.grad(cube))(x[:, None])[:, 0], slope)
    assert torch.equal(torch.func.grad(lambda v: torch.func.vmap(cube)(v[:, None]).sum())(x), slope)
    assert torch.equal(torch.func.jvp(cube, (x,), (torch.ones(3),))[1], slope.sum())
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(jacobian(operate)(x), factor * torch.eye(3))
    assert torch.equal(torch.func.hessian(cube)(x), torch.diag(bend))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
        lambda f, x: torch.func.grad(lambda v: torch.func.jvp(f, (v,), (v,))[1])(x),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(f)(x),
    ],
    ids=["jvp", "jvp of grad", "grad of jvp", "jacfwd", "hessian"],
)
def test_function_transforms_refuse_map_gradient(transform):
    with pytest.raises(OperatorError, match="map_gradient"):
        transform(lambda x: map_gradient(x, torch.neg).sum(), torch.ones(2))


def test_reverse_function_transforms_map_the_gradient():
    def function(v):
        return map_gradient(v, lambda g: g * g).pow(2).sum()

    x = torch.tensor([1.0, 2.0, -3.0])
    squared = (2 * x) ** 2
    assert torch.equal(torch.func.grad(function)(x), squared)
    assert torch.equal(torch.func.vmap(torch.func.grad(function))(x[:, None])[:, 0], squared)
    assert torch.equal(torch.func.vjp(function, x)[1](torch.tensor(1.0))[0], squared)
    assert torch.equal(torch.func.jacrev(torch.func.grad(function))(x), torch.diag((8 * x) ** 2))  # fn, again
    v = x.clone().requires_grad_()
    torch.func.vmap(function)(v[:, None]).sum().backward()
    assert torch.equal(v.grad, squared)


def test_reverse_function_transforms_refuse_another_shape():
    with pytest.raises(OperatorError, match="keeps the shape"):
        torch.func.grad(lambda v: map_gradient(v, lambda g: g[:1]).sum())(torch.ones(2))
