"""Inputs from public bug reports, with their right values: the gradient node itself.

The net of most: ``lin([[2.]]) -> lin([[3.]])`` without bias, input 1, loss = output. Its plain weight gradients are
[3, 2]; with a reversal of strength 0.5 between the two [-1.5, 2]; with a stop-gradient there [None, 2].
"""

import io
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsurgery as gs

ONE = torch.ones(1, 1)


def linear(weight: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def net(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(2.0), *between, linear(3.0))


def gradients(model: nn.Module, *inputs: Tensor) -> list[float | None]:
    """The gradient of every one-element parameter after one step on the sum of the output."""
    model.zero_grad()
    model(*(inputs or (ONE,))).sum().backward()
    return [None if parameter.grad is None else parameter.grad.item() for parameter in model.parameters()]


class NoOp(nn.Module):
    """A hand-written reversal whose author named a method ``backward``; autograd never calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def backward(self, gradient: Tensor) -> Tensor:
        return -gradient


# --- A. the gradient node itself --------------------------------------------------------------------------------------


def test_b01_a_module_with_a_method_called_backward() -> None:
    assert gradients(net(NoOp())) == [3.0, 2.0]
    assert gradients(gs.insert_grl(net(NoOp()), "1", lambd=0.5)) == [-1.5, 2.0]
    assert gradients(net(gs.GradientReversal(0.5))) == [-1.5, 2.0]


class Legacy(torch.autograd.Function):
    """A reversal from the time before static methods, which torch raises on."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    def backward(self, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


def test_b02_an_old_style_function_stays_loud_and_is_not_needed() -> None:
    class Model(nn.Module):
        def __init__(self, reverse: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.first, self.reverse, self.last = linear(2.0), reverse, linear(3.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.reverse(self.first(x)))

    operated = gs.insert_grl(Model(lambda x: Legacy()(x)), "first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a Function should not be instantiated
        for model in (Model(lambda x: Legacy()(x)), operated):
            with pytest.raises(RuntimeError, match="Legacy autograd function"):
                model(ONE)
        # What measures or tries the model names the class, which torch does not.
        with pytest.raises(gs.CaptureError, match=r"test_cases\.Legacy, .*reverse_gradient"):
            gs.audit(operated, ONE)
        with pytest.raises(gs.CaptureError, match=r"test_cases\.Legacy, .*reverse_gradient"):
            gs.insert_grl(Model(Legacy()), ":last", example=ONE)
    assert gradients(Model(lambda x: gs.reverse_gradient(x, 0.5))) == [-1.5, 2.0]
    assert gradients(gs.insert_grl(Model(lambda x: x), "first", lambd=0.5)) == [-1.5, 2.0]


def test_b03_b04_the_function_on_a_fresh_tensor_and_on_its_input() -> None:
    x = torch.ones(2, requires_grad=True)
    gs.reverse_gradient(x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-2.0, -2.0]
    x.grad = None
    gs.reverse_gradient(x, 0.5).sum().backward()
    assert x.grad.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("lambd", [1.0, 0.5])
def test_b06_an_inplace_activation_after_the_place(lambd: float) -> None:
    model = net(nn.ReLU(inplace=True))
    assert gradients(model) == [3.0, 2.0]
    gs.insert_grl(model, "0", lambd=lambd)
    assert model(ONE).item() == 6.0
    assert gradients(model) == [-3.0 * lambd, 2.0]


def test_b07_a_head_whose_input_needs_no_gradient() -> None:
    model = nn.Sequential(OrderedDict(head=linear(2.0)))
    assert gradients(gs.insert_grl(model, "head", side="input")) == [1.0]


class Domains(nn.Module):
    """One encoder shared by a task head and a domain head; the loss is the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.task, self.domain = linear(2.0), linear(3.0), linear(5.0)

    def forward(self, x: Tensor) -> Tensor:
        features = self.enc(x)
        return self.task(features) + self.domain(features)


def test_b09_the_head_still_descends_its_own_loss() -> None:
    assert gradients(gs.insert_grl(Domains(), "domain", lambd=0.5, side="input")) == [0.5, 2.0, 2.0]


def test_b10_a_negative_strength_is_refused_wherever_it_is_given() -> None:
    schedule = 2 / (1 + math.exp(10 * 0.5)) - 1  # gamma given as -10
    model = net()
    with pytest.raises(gs.OperatorError, match="lambd"):
        gs.insert_grl(model, "0", lambd=schedule)
    assert gradients(model) == [3.0, 2.0]
    gs.insert_grl(model, "0", lambd=-schedule)
    with pytest.raises(gs.OperatorError, match="lambd"):
        gs.operations(model)[0].operator.lambd = schedule
    assert gradients(model)[0] == pytest.approx(3 * -0.986614, abs=1e-5)


def test_b12_the_strength_is_no_parameter() -> None:
    model = gs.insert_grl(net(), "0", lambd=0.5)
    assert len(list(model.parameters())) == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    gradients(model)
    optimizer.step()
    assert gs.operations(model)[0].operator.lambd == 0.5
    with pytest.raises(gs.OperatorError):
        gs.insert_grl(net(), "0", lambd=nn.Parameter(torch.tensor(0.5)))  # type: ignore[arg-type]


class Codes(nn.Module):
    """The nearest of two codes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([[0.0], [1.0]]))

    def forward(self, z: Tensor) -> Tensor:
        return self.table[(z - self.table.T).abs().argmin(dim=1)]


def test_b15_a_codebook_loss_beside_a_straight_through_output() -> None:
    codes, z = Codes(), torch.tensor([[0.8]], requires_grad=True)
    decoded = gs.straight_through(z, codes)
    assert decoded.item() == 1.0
    (codes(z) - z.detach()).square().sum().backward()
    assert codes.table.grad is not None
    assert codes.table.grad.flatten().tolist() == pytest.approx([0.0, 0.4])
    assert z.grad is None
    codes.table.grad = None
    decoded.sum().backward()
    assert z.grad is not None
    assert z.grad.item() == 1.0
    assert codes.table.grad is None


@pytest.mark.usefixtures("scripting")  # forward mode AD uses TorchScript
def test_b17_functional_transforms() -> None:
    def square(x: Tensor) -> Tensor:
        return gs.reverse_gradient(x).pow(2).sum()

    x = torch.tensor([1.0, 2.0])
    assert torch.func.grad(square)(x).tolist() == [-2.0, -4.0]
    assert torch.func.vmap(torch.func.grad(square))(torch.stack([x, x])).tolist() == [[-2.0, -4.0]] * 2
    _, tangent = torch.func.jvp(lambda x: gs.reverse_gradient(x, 0.5), (x,), (torch.ones(2),))
    assert tangent.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_b19_one_tensor_used_twice_under_compile(backend: str) -> None:
    @torch.compile(backend=backend, fullgraph=True)
    def twice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = (gs.reverse_gradient(x) + gs.reverse_gradient(x)).sum()
        return total, total.detach(), gs.stop_gradient(x)

    x = torch.ones(2, requires_grad=True)
    total, detached, stopped = twice(x)
    total.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-2.0, -2.0]
    assert (total.requires_grad, detached.requires_grad, stopped.requires_grad) == (True, False, False)


def test_b20_twelve_strengths_in_at_most_two_compilations() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    model = gs.insert_grl(net(), "0")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for tenths in range(1, 13):
        gs.operations(model)[0].operator.lambd = tenths / 8
        assert gradients(compiled) == [-3 * tenths / 8, 2.0]
    assert counter.frame_count <= 2


def _script(model: nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.script(model)


def _trace(model: nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.trace(model, ONE)


@pytest.mark.filterwarnings("ignore")  # TorchScript announces its own deprecation
@pytest.mark.parametrize("convert", [_script, _trace])
def test_b21_torchscript_with_save_and_load(convert: Callable[[nn.Module], torch.jit.ScriptModule]) -> None:
    model = gs.insert_grl(net(), "0", lambd=0.5)
    for lambd, right in ((0.5, [-1.5, 2.0]), (2.0, [-6.0, 2.0])):
        gs.operations(model)[0].operator.lambd = lambd
        buffer = io.BytesIO()
        torch.jit.save(convert(model), buffer)
        buffer.seek(0)
        loaded = torch.jit.load(buffer)
        assert loaded(ONE).item() == 6.0
        assert gradients(loaded) == right


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_b23_onnx_gets_no_node_of_ours() -> None:
    pytest.importorskip("onnxscript")
    program = torch.onnx.export(gs.insert_grl(net(), "0").eval(), (ONE,), dynamo=True)
    assert program is not None
    assert [node.op_type for node in program.model.graph] == ["Gemm", "Gemm"]


def test_a_functional_relu_that_writes_in_place() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = linear(2.0), linear(3.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(self.first(x), inplace=True))

    for at in ("first", ":relu"):
        assert gradients(gs.insert_grl(Functional(), at, lambd=0.5)) == [-1.5, 2.0]
