"""The operators under torch.compile and torch.export."""

import collections
import io
from dataclasses import dataclass

import pytest
import torch
from layer_table import check, each_layer, net
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from gradsurgery.operators import (
    GradientReversal,
    MapGradient,
    StraightThrough,
    map_gradient,
    reverse_gradient,
)

pytestmark = pytest.mark.usefixtures("scripting")


def reset():
    torch._dynamo.reset()


# --- eager, as the reference of the table
@each_layer
def test_eager(make, output, gradients):
    model = net(make())
    check(model, model, output, gradients)


# --- torch.compile
@each_layer
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(make, output, gradients, backend):
    reset()
    model = net(make())
    check(torch.compile(model, backend=backend, fullgraph=True), model, output, gradients)


def test_compile_with_inductor():
    reset()
    model = net(nn.Sequential(GradientReversal(0.5), StraightThrough(torch.round), nn.ReLU(inplace=True)))
    check(torch.compile(model, fullgraph=True), model, 6.0, [-1.5, 2.0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_map_gradient(backend):
    reset()
    factor = torch.tensor(-4.0)
    model = net(nn.Sequential(MapGradient(lambda g: g * factor), nn.ReLU(inplace=True)))
    check(torch.compile(model, backend=backend, fullgraph=True), model, 6.0, [-12.0, 2.0])


def test_compile_refuses_map_gradient_under_a_transform():
    reset()
    compiled = torch.compile(torch.func.grad(lambda x: map_gradient(x, torch.neg).sum()), backend="eager")
    with pytest.raises(Exception, match="map_gradient|OperatorError"):
        compiled(torch.ones(2))


@pytest.mark.parametrize("change", ["attribute", "argument"])
def test_twelve_strengths_compile_twice_at_most(change):
    reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = net(GradientReversal(0.5))
    if change == "attribute":
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    else:
        compiled = torch.compile(
            lambda x, lambd: model.head(reverse_gradient(model.enc(x), lambd)), backend=counter, fullgraph=True
        )
    for step in range(12):
        lambd = step / 8
        model.op.lambd = lambd
        model.zero_grad()
        (compiled(torch.ones(1, 1)) if change == "attribute" else compiled(torch.ones(1, 1), lambd)).backward()
        assert model.enc.weight.grad.item() == -3 * lambd and model.head.weight.grad.item() == 2.0
    assert counter.frame_count <= 2


@dataclass(frozen=True)
class Output:
    tensor: Tensor
    number: int = 3


Pair = collections.namedtuple("Pair", "tensor number")


@pytest.mark.parametrize(
    "make",
    [lambda x: (x, [x, 1]), lambda x: {"a": x}, lambda x: collections.OrderedDict(a=x), lambda x: Pair(x, 3), Output],
    ids=["tuple", "dict", "OrderedDict", "namedtuple", "dataclass"],
)
def test_compile_nested(make):
    reset()
    x = torch.ones(2, requires_grad=True)
    out = torch.compile(lambda v: reverse_gradient(make(v * 1), 0.5), backend="eager", fullgraph=True)(x)
    assert type(out) is type(make(x))
    tensor = out.tensor if isinstance(out, Output) else next(iter(out.values() if isinstance(out, dict) else out))
    tensor.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -0.5))


# --- torch.export
@each_layer
@pytest.mark.parametrize("strict", [False, True])
def test_export(make, output, gradients, strict):
    program = torch.export.export(net(make()), (torch.ones(1, 1),), strict=strict)
    model = program.module()
    check(model, model, output, gradients)


@pytest.mark.parametrize("strict", [False, True])
def test_export_saves_loads_and_takes_other_sizes(strict):
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        net(GradientReversal(0.5)), (torch.ones(4, 1),), dynamic_shapes=({0: batch},), strict=strict
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    model = torch.export.load(buffer).module()
    model(torch.ones(3, 1)).sum().backward()
    assert [p.grad.item() for p in model.parameters()] == [-4.5, 6.0]


@pytest.mark.parametrize("strict", [False, True])
def test_export_refuses_map_gradient(strict):
    with pytest.raises(Exception, match="map_gradient|OperatorError"):
        torch.export.export(net(MapGradient(torch.neg)), (torch.ones(1, 1),), strict=strict)


# --- strides under tools
LAYOUTS = {
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "channels_last": lambda: torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "size 1": lambda: torch.arange(8.0).as_strided((1, 2, 1, 4), (77, 1, 13, 2)),
    "gaps": lambda: torch.arange(24.0).view(4, 6)[:, ::2],
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("tool", ["compile", "export", "script", "make_fx"])
def test_strides_under_tools(make, tool):
    reset()
    x = make()
    layer = GradientReversal(0.5)
    run = {
        "compile": lambda: torch.compile(layer, backend="aot_eager", fullgraph=True),
        "export": lambda: torch.export.export(layer, (x,), strict=False).module(),
        "script": lambda: torch.jit.script(layer),
        "make_fx": lambda: make_fx(layer, pre_dispatch=True)(x),
    }[tool]()
    v = x.detach().requires_grad_()
    y = run(v)
    assert torch.equal(y, x) and y.stride() == x.stride()
    (g,) = torch.autograd.grad(y, v, torch.ones_like(x))
    assert torch.equal(g, torch.full_like(x, -0.5))
