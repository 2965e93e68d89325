"""What counts as an op, what is refused, and what is shared."""

import pytest
import torch
from capture_helpers import Base, Straight, check, edited, mark
from torch import nn

from gradsurgery.capture.record import list_ops, record_ops
from gradsurgery.capture.rewrite import OpEdit, rewrite
from gradsurgery.errors import CaptureError


def test_numbers_do_not_count():
    class Net(Base):
        def forward(self, x, k):
            j = k + 1
            return (self.a(x) + j) * (k + 2)

    class Reference(Base):
        def forward(self, x, k):
            return mark(self.a(x) + (k + 1)) * (k + 2)

    ours, _ = check(Net, Reference, ["add"], 3)
    ops = record_ops(ours, [ours], (torch.randn(4, 4), 3), {})[0]
    assert [op.name for op in ops] == ["a", "add", "mul"]


def test_method_called_directly():
    class Net(Base):
        def features(self, x):
            for _ in range(2):
                x = torch.sin(x)
            return x

        def forward(self, x):
            return self.features(torch.sin(x))

    net = edited(Net(), ("sin", 1))
    net(torch.ones(2))
    with pytest.raises(CaptureError, match="called directly"):
        net.features(torch.ones(2))


def _generator():
    class Net(nn.Module):
        def forward(self, x):
            yield x * 2

    return Net()


def _coroutine():
    class Net(nn.Module):
        async def forward(self, x):
            return x * 2

    return Net()


def _executed():
    space = {"nn": nn}
    exec("class Net(nn.Module):\n    def forward(self, x):\n        return x * 2", space)
    return space["Net"]()


def _lambda():
    return type("Net", (nn.Module,), {"forward": lambda self, x: x * 2})()


@pytest.mark.parametrize("make", [_generator, _coroutine, _executed, _lambda, nn.ModuleList])
def test_refused(make):
    with pytest.raises(CaptureError, match=r"asked for .*; .*\. Operate (on|at)"):
        list_ops(make())
    with pytest.raises(CaptureError, match="asked for"):
        edited(make(), "mul")


def test_source_that_is_not_the_code(tmp_path, monkeypatch):
    import importlib
    import linecache

    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_later.py"
    text = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    file.write_text(text)
    net = importlib.import_module("edited_later").Net()
    file.write_text(text.replace("x * 2", "x * 3"))
    linecache.checkcache(str(file))
    with pytest.raises(CaptureError, match="not the code that runs"):
        edited(net, "mul")


def test_one_code_for_one_class_and_edit():
    edits = (OpEdit("add", None, "_gs_0"),)
    assert rewrite(Straight, edits) is rewrite(Straight, edits)


def test_method_replaced_on_the_class_since():
    class Net(Base):
        def part(self, x):
            return x * 2

        def forward(self, x):
            return self.part(x)

    edits = (OpEdit("mul", None, "_gs_0"),)
    rewrite(Net, edits)
    Net.part = lambda self, x: x
    with pytest.raises(CaptureError, match="no such op"):
        rewrite(Net, edits)


def test_an_index_that_the_source_does_not_tell():
    class Net(Base):
        def forward(self, x):
            x = torch.sin(self.a(x))
            if x.sum() > 0:
                x = torch.sin(x)
                x = torch.tanh(x)
            return torch.sin(x)

    found = [(op.name, op.index, op.certain) for op in list_ops(Net())]
    assert found == [
        ("a", 0, True),
        ("sin", 0, True),
        ("sum", 0, True),
        ("sin", 1, False),
        ("tanh", 0, False),
        ("sin", 2, False),
    ]
