"""The operators in the hands of the tools that look at single ops."""

import collections
import io
import pickle
import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from gradsurgery.errors import OperatorError
from gradsurgery.operators import (
    DetachedTransform,
    FrozenTransform,
    GradientReversal,
    MapGradient,
    ScaleGradient,
    StopGradient,
    StraightThrough,
    detached_transform,
    frozen_transform,
    map_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("scripting")]


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


class Round(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x)


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


# --- TorchScript


def torchscriptable(make):
    layer = make()
    return net(layer.requires_grad_(False) if isinstance(layer, FrozenTransform) else layer)


@each_layer
def test_script(make, output, gradients):
    scripted = torch.jit.script(torchscriptable(make))
    check(scripted, scripted, output, gradients)


@each_layer
def test_trace(make, output, gradients):
    traced = torch.jit.trace(torchscriptable(make), torch.ones(1, 1))
    check(traced, traced, output, gradients)
    assert traced(torch.ones(5, 1)).shape == (5, 1)


@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_saved_file_loads_without_this_package(tmp_path, how):
    model = net(nn.Sequential(GradientReversal(0.5), ScaleGradient(1), StraightThrough(Round())))
    path = tmp_path / "model.pt"
    converted = torch.jit.script(model) if how == "script" else torch.jit.trace(model, torch.ones(1, 1))
    converted.save(path)
    program = f"""
import sys, torch
model = torch.jit.load({str(path)!r})
for _ in range(3):
    model.zero_grad()
    out = model(torch.ones(1, 1))
    out.sum().backward()
assert 'gradsurgery' not in sys.modules
print(out.item(), *[p.grad.item() for p in model.parameters()])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["6.0", "-1.5", "2.0"]


def test_the_strength_of_a_scripted_layer_can_be_set_and_is_checked():
    scripted = torch.jit.script(net(GradientReversal(0.5)))
    scripted.op.lambd = 2.0
    check(scripted, scripted, 6.0, [-6.0, 2.0])
    scripted.op.lambd = -2.0
    with pytest.raises(torch.jit.Error, match="lambd"):
        scripted(torch.ones(1, 1))


def calls_functions(x: Tensor) -> Tensor:
    return reverse_gradient(x, 0.5) + scale_gradient(x, 4.0) + stop_gradient(x)


def test_functions_inside_a_scripted_function():
    scripted = torch.jit.script(calls_functions)
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        scripted(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 3.5))


@pytest.mark.parametrize("layer", [MapGradient(torch.neg), FrozenTransform(nn.Linear(1, 1))], ids=repr)
def test_script_refuses_what_it_would_get_wrong(layer):
    with pytest.raises(OperatorError, match="torch.jit.script"):
        torch.jit.script(net(layer))


def test_a_scripted_fn_that_changes_the_shape_is_refused():
    with pytest.raises(torch.jit.Error, match="shape"):
        torch.jit.script(StraightThrough(nn.Flatten(0)))(torch.ones(2, 2))


@pytest.mark.parametrize("layer", [MapGradient(torch.neg), FrozenTransform(nn.Linear(1, 1))], ids=repr)
def test_trace_refuses_what_it_would_get_wrong(layer):
    with pytest.raises(OperatorError, match="torch.jit.trace"):
        torch.jit.trace(net(layer), torch.ones(1, 1))


def test_a_traced_fn_that_changes_the_shape_is_refused():
    with pytest.raises(OperatorError, match="shape"):
        torch.jit.trace(StraightThrough(lambda v: v[:1]), torch.ones(2, 2))


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
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.vmap(f)(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_function_transforms_refuse_map_gradient(transform):
    with pytest.raises(OperatorError, match="map_gradient"):
        transform(lambda x: map_gradient(x, torch.neg).sum(), torch.ones(2))


# --- ONNX


@pytest.mark.parametrize("make", [lambda: GradientReversal(0.5), StopGradient], ids=["reverse", "stop"])
@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_has_no_node_for_an_operator(make, dynamo, tmp_path):
    onnx = pytest.importorskip("onnx")
    counts = []
    for layer in (make(), nn.Identity()):
        path = tmp_path / "model.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own
            torch.onnx.export(net(layer).eval(), (torch.ones(1, 1),), path, dynamo=dynamo, verbose=False)
        counts.append([node.op_type for node in onnx.load(path).graph.node if node.op_type != "Constant"])
    assert counts[0] == counts[1]
