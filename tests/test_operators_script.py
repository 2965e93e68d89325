"""The operators under torch.jit and the ONNX exporters."""

import subprocess
import sys
import warnings

import pytest
import torch
from layer_table import check, each_layer, net
from torch import Tensor, nn

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
    stop_gradient,
)

pytestmark = pytest.mark.usefixtures("scripting")


class Round(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x)


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


@pytest.mark.parametrize(
    "make",
    [lambda: MapGradient(torch.neg), lambda: FrozenTransform(torch.jit.script(nn.Linear(1, 1)))],
    ids=["map", "frozen script"],
)
def test_trace_refuses_what_it_would_get_wrong(make):
    with pytest.raises(OperatorError, match="torch.jit.trace"):
        torch.jit.trace(net(make()), torch.ones(1, 1))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of BatchNorm and GRU, which look at sizes
@pytest.mark.parametrize("make", [lambda: nn.GRU(3, 3), lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))])
@pytest.mark.parametrize("whole", [True, False], ids=["module", "closure"])
def test_a_traced_frozen_transform_keeps_gradients_from_its_parameters(make, whole):
    inner = make()

    def first(x):
        out = inner(x)
        return out[0] if isinstance(out, tuple) else out

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))
            self.inner = inner
            self.op = FrozenTransform(inner if whole and not isinstance(inner, nn.GRU) else first)

        def forward(self, x):
            return self.op(x * self.weight)

    model, x = Model(), torch.randn(4, 3)
    traced = torch.jit.trace(model, x, check_trace=False)
    for _ in range(3):
        model.zero_grad()
        traced(x).square().sum().backward()
        assert model.weight.grad is not None
        assert all(p.grad is None for p in inner.parameters())
    assert all(p.requires_grad for p in inner.parameters())


def test_a_traced_fn_that_changes_the_shape_is_refused():
    with pytest.raises(OperatorError, match="shape"):
        torch.jit.trace(StraightThrough(lambda v: v[:1]), torch.ones(2, 2))


@pytest.mark.parametrize(
    "convert", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 1))], ids=["script", "trace"]
)
@pytest.mark.parametrize("make", [lambda: GradientReversal(0.5), StopGradient], ids=["reverse", "stop"])
def test_a_frozen_file_keeps_the_gradient(convert, make):
    """Freezing drops every detach of a graph, and the plain gradient is what it leaves."""
    frozen = torch.jit.freeze(convert(net(make()).eval()).eval())
    for _ in range(3):
        x = torch.ones(1, 1, requires_grad=True)
        out = frozen(x)
        assert out.item() == 6.0
        assert out.requires_grad == (make is not StopGradient)
        if out.requires_grad:
            out.backward()
            assert x.grad.item() == -3.0


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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of BatchNorm, which looks at sizes
@pytest.mark.parametrize("learns", [True, False])
def test_statistics_of_a_frozen_transform_stay_under_trace_and_are_refused_in_script(learns):
    norm = nn.BatchNorm1d(2).requires_grad_(learns)
    model, x = nn.Sequential(nn.Linear(2, 2), FrozenTransform(norm)), torch.randn(8, 2)
    right = model(x)
    traced = torch.jit.trace(model, x)
    for _ in range(3):
        assert torch.equal(traced(x), right)
    before = [torch.zeros(2), torch.ones(2), torch.tensor(0)]
    for held in (norm, traced):
        assert all(torch.equal(a, b) for a, b in zip(held.buffers(), before, strict=True))
    if not learns:
        with pytest.raises(OperatorError, match=r"fn\.eval\(\) before scripting"):
            torch.jit.script(model)
        model.eval()
        assert torch.equal(torch.jit.script(model)(x), model(x))
