"""Random forwards: every call of ``torch.sin`` in each, against a ``torch.sin`` that counts its own calls."""

import importlib
import random

import pytest
import torch

from gradsurgery.capture.record import record_ops
from gradsurgery.capture.rewrite import ALL, OpEdit, rewrite
from gradsurgery.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("error")


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 4


class Writer:
    """Writes a random forward, its methods and a helper."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.left = 14

    def expression(self, deep=0):
        kind = self.random.randrange(9 if deep < 2 else 3)
        inner = self.expression(deep + 1) if kind > 2 else ""
        return [
            "x",
            "torch.sin(x)",
            "torch.cos(x)",
            f"torch.sin({inner})",
            f"({inner} + torch.sin(x))",
            f"(torch.sin(x) if self.flag else {inner})",
            f"self.part({inner})",
            f"helper({inner})",
            f"sum(torch.sin(x) * k for k in range(2)) + {inner}",
        ][kind]

    def block(self, depth=0, calls=True):
        lines = []
        for _ in range(self.random.randrange(1, 4)):
            self.left -= 1
            kind = self.random.randrange(8) if depth < 2 and self.left > 0 else 0
            line = self.expression() if calls else "torch.sin(x)"
            body = ["    " + inner for inner in self.block(depth + 1, calls)] if kind > 1 else []
            if kind <= 1:
                lines.append(f"x = {line}")
            elif kind == 2:
                lines += ["if self.training:", *body, "else:", f"    x = {line}"]
            elif kind == 3:
                lines += ["if x.sum() > 0:", *body]
            elif kind == 4:
                lines += [f"for _ in range({self.random.randrange(3)}):", *body]
            elif kind == 5:
                lines += ["if self.flag:", *body, "    return x"]
            elif kind == 6:
                lines += ["try:", *body, "except ValueError:", f"    x = {line}"]
            else:
                lines += ["def inner(x):", *body, "    return x", "x = inner(x) + inner(x)"]
        return lines

    def module(self):
        def method(name, lines):
            return [f"    def {name}(self, x):", *("        " + line for line in lines), "        return x", ""]

        helper = ["def helper(x):", "    x = torch.sin(x) * 0.5", "    return torch.tanh(x)", "", ""]
        head = ["import torch", "from torch import nn", "", "", *helper, "class Net(nn.Module):", "    flag = False"]
        return "\n".join([*head, "", *method("part", self.block(1, calls=False)), *method("forward", self.block())])


def gradient(net, x):
    x = x.clone().requires_grad_()
    (net(x).cos().sum() + x.sum()).backward()
    return x.grad


@pytest.mark.parametrize("seed", range(40))
def test_random_forward(seed, tmp_path, monkeypatch):
    name = f"random_forward_{seed}"
    (tmp_path / f"{name}.py").write_text(Writer(seed).module())
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module(name).Net
    sine, ran, wanted = torch.sin, [0], [None]

    def counting(x):
        value = sine(x)
        mine = wanted[0] in (ran[0], ALL)
        ran[0] += 1
        return _Scale.apply(value) if mine else value

    for training, flag in [(True, False), (True, True), (False, False)]:
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))

        def oracle(index, training=training, flag=flag, x=x):
            net = cls().train(training)
            net.flag = flag
            ran[0], wanted[0] = 0, index
            with monkeypatch.context() as patched:
                patched.setattr(torch, "sin", counting)
                return gradient(net, x)

        oracle(None)
        times = ran[0]
        net = cls().train(training)
        net.flag = flag
        ops = record_ops(net, [net], (x,), {})[0]
        assert sum(op.name == "sin" for op in ops) == times
        for index in [ALL, None, *range(times), times]:
            try:
                net.__class__ = cls
                body = rewrite(cls, (OpEdit("sin", index, "_gs_0"),))
            except CaptureError:
                # No sin at all, or one whose value the random forward drops.
                assert times == 0 or index == ALL
                continue
            net.__class__ = type("Net", (cls,), {**body, "_gs_0": lambda self, value: _Scale.apply(value)})
            if (index is None and times != 1) or index == times:
                with pytest.raises(CaptureError, match="ran"):
                    gradient(net, x)
            else:
                assert torch.equal(gradient(net, x), oracle(0 if index is None else index)), (index, times)
