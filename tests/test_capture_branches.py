"""Opened forwards with branches, modes, flags, optional arguments, contexts and data that decide."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from capture_helpers import Base, Straight, check, edited, mark

from gradsurgery.capture.record import list_ops
from gradsurgery.capture.rewrite import ALL
from gradsurgery.errors import CaptureError


class StraightRef(Base):
    def forward(self, x):
        return mark(F.relu(self.a(x)) + self.b(x))


def test_straight():
    ours, _ = check(Straight, StraightRef, ["add"])
    assert "_gs_count" not in inspect.getsource(type(ours).forward)
    assert "self._gs_0(F.relu(self.a(x)) + self.b(x))" in inspect.getsource(type(ours).forward)


class Modes(Base):
    def forward(self, x):
        x = self.a(x)
        if self.training:
            x = F.relu(x)
            x = F.dropout(x, 0.5)
        else:
            x = F.gelu(x)
        return self.b(F.relu(x))


class ModesRef(Base):
    def forward(self, x):
        x = self.a(x)
        if self.training:
            x = F.relu(x)
            x = F.dropout(x, 0.5)
            return self.b(mark(F.relu(x)))
        return self.b(F.relu(F.gelu(x)))


def test_mode_dependent():
    ours, theirs = check(Modes, ModesRef, [("relu", 1)])
    assert [(op.name, op.index) for op in list_ops(ours)].count(("relu", 1)) == 1
    with pytest.raises(CaptureError, match="relu@1.*in eval mode.*ran 1 times"):
        ours.eval()(torch.randn(4, 4))
    with torch.no_grad():
        x = torch.randn(4, 4)
        assert torch.equal(ours(x), theirs.eval()(x))
    assert [op.name for op in list_ops(ours)] == ["a", "gelu", "relu", "b"]


def test_mode_dependent_first():
    """The first relu is another expression in each mode."""

    class Reference(Base):
        def forward(self, x):
            return self.b(F.relu(F.dropout(mark(F.relu(self.a(x))), 0.5)))

    check(Modes, Reference, [("relu", 0)])

    class InEval(ModesRef):
        def forward(self, x):
            return self.b(mark(F.relu(F.gelu(self.a(x)))))

    check(Modes, InEval, [("relu", 0)], prepare=lambda module: module.eval())


class Flag(Base):
    def forward(self, x):
        if self.flag:
            x = torch.tanh(x)
        x = self.a(x)
        return torch.tanh(x) + torch.tanh(self.b(x))


@pytest.mark.parametrize("flag", [False, True])
def test_flag_dependent(flag):
    class Reference(Base):
        def forward(self, x):
            n = 0
            if self.flag:
                x, n = torch.tanh(x), 1
            x = self.a(x)
            first, second = torch.tanh(x), torch.tanh(self.b(x))
            return (mark(first) if n == 1 else first) + (mark(second) if n == 0 else second)

    check(Flag, Reference, [("tanh", 1)], prepare=lambda module: setattr(module, "flag", flag))


def test_flag_flips_live():
    ours = edited(Flag(), ("tanh", 2))
    with pytest.raises(CaptureError, match="tanh@2"):
        ours(torch.randn(4, 4))
    ours.flag = True
    ours(torch.randn(4, 4))


class Shapes(Base):
    def forward(self, x):
        n = x.shape[0] + 1
        for _ in range(n + 1 - x.shape[0]):
            x = self.a(x) + n
        return x


def test_shape_dependent():
    class Reference(Base):
        def forward(self, x):
            x = self.a(x) + 5
            return mark(self.a(x) + 5)

    check(Shapes, Reference, [("add", 1)])


def test_all_calls():
    class Reference(Base):
        def forward(self, x):
            return mark(self.a(mark(self.a(x) + 5)) + 5)

    check(Shapes, Reference, [("add", ALL)])


class Data(Base):
    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            return torch.sigmoid(x)
        return torch.sigmoid(-x) * 2


@pytest.mark.parametrize("sign", [-1, 1])
def test_data_dependent(sign):
    class Reference(Base):
        def forward(self, x):
            x = self.a(x)
            return mark(torch.sigmoid(x)) if x.sum() > 0 else mark(torch.sigmoid(-x)) * 2

    def prepare(module):
        with torch.no_grad():
            module.a.bias += 50 * sign

    ours, _ = check(Data, Reference, ["sigmoid"], prepare=prepare)
    assert "_gs_count" not in inspect.getsource(type(ours).forward)


class OptionalArguments(Base):
    def forward(self, x, mask=None, *, scale=1, **extra):
        x = self.a(x)
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return torch.exp(x * scale + extra.get("shift", 0))


@pytest.mark.parametrize("kwargs", [{}, {"mask": torch.eye(4).bool()}, {"scale": 2, "shift": 1.0}])
def test_optional_arguments(kwargs):
    class Reference(Base):
        def forward(self, x, mask=None, *, scale=1, **extra):
            x = self.a(x)
            if mask is not None:
                x = x.masked_fill(mask, 0.0)
            return torch.exp(mark(x * scale) + extra.get("shift", 0))

    check(OptionalArguments, Reference, ["mul"], **kwargs)


class Contexts(Base):
    def forward(self, x):
        with torch.no_grad():
            offset = torch.relu(x) + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.a(x) + self.b(x)
        return x.float() + offset


def test_context_managers():
    class Reference(Base):
        def forward(self, x):
            with torch.no_grad():
                offset = torch.relu(x) + 1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = mark(self.a(x) + self.b(x))
            return x.float() + offset

    check(Contexts, Reference, [("add", 1)])
