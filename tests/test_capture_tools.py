"""What other tools make of an edited forward: Dynamo, TorchScript, fx, tracebacks, threads."""

import inspect
import threading
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsurgery as gs
from gradsurgery.capture.rewrite import ALL, OpEdit, rewrite
from gradsurgery.errors import CaptureError

pytestmark = pytest.mark.filterwarnings(
    "error", "ignore:`torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning"
)


def edited(module, name, index=None):
    """The operator of these tests doubles the value, so that it shows in the forward too."""
    cls = type(module)
    body = rewrite(cls, (OpEdit(name, index, "_gs_0"),))
    module.__class__ = type(cls.__name__, (cls,), {**body, "_gs_0": _gs_0})
    return module


def _gs_0(self, value: Tensor) -> Tensor:
    return value * 2.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, flip: bool = False) -> Tensor:
        """Adds."""
        x = self.a(x)
        if self.training:
            x = F.relu(x)
        return F.relu(torch.sin(x) + 1.0)


class Looped(Net):
    def forward(self, x):
        for k in range(3):
            x = torch.sin(self.part(x)) + k
        return x

    def part(self, x):
        def inner(t):
            return torch.sin(t)

        return self.a(inner(x))


@pytest.mark.parametrize(
    ("cls", "name", "index"),
    [(Net, "add", None), (Net, "relu", 0), (Looped, "sin", 3), (Looped, "a", 1), (Looped, "sin", ALL)],
)
def test_dynamo(cls, name, index):
    torch.manual_seed(0)
    net = edited(cls(), name, index)
    x = torch.randn(3, 4)
    eager = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    traced = torch.autograd.grad(compiled(x).sum(), list(net.parameters()))
    assert all(map(torch.equal, eager, traced))
    assert torch.equal(compiled(x), net(x))


def test_dynamo_children_known_at_run_time():
    class Walk(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    net = edited(Walk(), "layers.1", 0)
    x = torch.randn(3, 4)
    by_hand = net.layers[2](net.layers[1](net.layers[0](x)) * 2)
    assert torch.equal(net(x), by_hand)
    assert torch.equal(torch.compile(net, fullgraph=True, backend="aot_eager")(x), by_hand)


def test_torchscript_keeps_both_modes():
    net = edited(Net(), "add")
    scripted = torch.jit.script(net)
    assert "_gs_0" in scripted.code
    x = torch.randn(3, 4)
    for training in (True, False):
        net.train(training), scripted.train(training)
        assert torch.equal(scripted(x), net(x))
    assert not torch.equal(net.train()(x), net.eval()(x))


def test_torchscript_of_a_helper_and_a_method():
    class Parts(Net):
        def forward(self, x: Tensor) -> Tensor:
            return shifted(self.part(x))

        def part(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    for name in ("sin", "cos"):
        net = edited(Parts(), name)
        x = torch.randn(3, 4)
        assert torch.equal(torch.jit.script(net)(x), net(x))
        assert not torch.equal(net(x), Parts()(x))


def shifted(x: Tensor) -> Tensor:
    return torch.cos(x) + 1


def test_torchscript_refuses_what_is_counted():
    with pytest.raises(Exception, match="_gs"):
        torch.jit.script(edited(Looped(), "sin", 1))


def test_fx():
    net = edited(Net(), "add")
    x = torch.randn(3, 4)
    assert torch.equal(torch.fx.symbolic_trace(net)(x), net(x))


def test_export():
    net = edited(Looped(), "sin", 1)
    x = torch.randn(3, 4)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net(x))


def test_source_signature_and_traceback():
    forward = type(edited(Net(), "add")).forward
    assert inspect.signature(forward) == inspect.signature(Net.forward)
    assert forward.__doc__ == "Adds." and forward.__annotations__ == Net.forward.__annotations__
    assert forward.__qualname__ == Net.forward.__qualname__
    net = edited(Net(), "add")
    with pytest.raises(RuntimeError) as raised:
        net(torch.randn(2, 3))
    assert any(frame.line == "x = self.a(x)" for frame in traceback.extract_tb(raised.tb))


def test_threads_do_not_count_for_each_other():
    net = edited(Looped(), "sin", 3)
    x = torch.randn(3, 4)
    expected, wrong = net(x), []

    def work():
        wrong.extend(1 for _ in range(50) if not torch.equal(net(x), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_a_counted_place_is_refused_by_name_in_torchscript():
    class Looped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = torch.relu(x)
            return x

    model, x = gs.insert_grl(nn.Sequential(Looped()), "0:relu@1", example=torch.ones(2)), torch.ones(2)
    with pytest.raises(CaptureError, match="relu@1.*trace"):
        torch.jit.script(model)
    assert torch.equal(model(x), x)  # and nothing was lost by asking
    gs.remove(model)
    assert type(model[0]) is Looped
