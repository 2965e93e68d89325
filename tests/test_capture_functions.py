"""Opened forwards made of several functions: nested, checkpointed, inherited, decorated, closures."""

import functools

import pytest
import torch
import torch.nn.functional as F
from capture_helpers import Base, Straight, check, edited, grads, mark, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsurgery.capture.record import record_ops
from gradsurgery.capture.rewrite import ALL


class Inner(Base):
    def forward(self, x):
        def attend(t):
            return torch.exp(self.a(t))

        scale = lambda t: torch.sin(t) * 2  # noqa: E731
        parts = [torch.cos(row) for row in x]
        return scale(attend(torch.stack(parts))) + attend(x)


@pytest.mark.parametrize("place", [("exp", 1), "sin", ("cos", 2), ("exp", ALL)])
def test_nested_functions_and_comprehensions(place):
    def at(name, index):
        return mark if place in (name, (name, index), (name, ALL)) else (lambda value: value)

    class Reference(Base):
        def forward(self, x):
            rows = torch.stack([at("cos", k)(torch.cos(row)) for k, row in enumerate(x)])
            first = at("exp", 0)(torch.exp(self.a(rows)))
            first = at("sin", 0)(torch.sin(first)) * 2
            return first + at("exp", 1)(torch.exp(self.a(x)))

    check(Inner, Reference, [place])


class Checkpointed(Base):
    use_reentrant = False

    def _inner(self, x):
        for _ in range(2):
            x = torch.sin(self.a(x))
        return x

    def forward(self, x):
        x = torch.sin(x)
        x = checkpoint(self._inner, x, use_reentrant=self.use_reentrant)
        x = checkpoint(lambda t: torch.sin(t) + 1, x, use_reentrant=self.use_reentrant)
        return torch.sin(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("index", range(5))
def test_checkpoint(index, reentrant):
    class Reference(Base):
        def forward(self, x):
            at = [mark if k == index else (lambda value: value) for k in range(5)]
            x = at[0](torch.sin(x))
            x = at[2](torch.sin(self.a(at[1](torch.sin(self.a(x))))))
            return at[4](torch.sin(at[3](torch.sin(x)) + 1))

    check(Checkpointed, Reference, [("sin", index)], prepare=lambda m: setattr(m, "use_reentrant", reentrant))


def test_checkpoint_around():
    """A whole forward that is run again in the backward, with its own functions handed over inside it."""
    ours = Checkpointed()
    plain = grads(ours, torch.ones(4, 4))
    edited(ours, ("sin", 2))
    expected = grads(ours, torch.ones(4, 4))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ours

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    same(grads(Around(), torch.ones(4, 4)), expected)
    assert not torch.equal(plain[1], expected[1])


class Child(Straight):
    def forward(self, x):
        return super().forward(torch.sin(x)) * 2


class GrandChild(Child):
    def forward(self, x):
        return Straight.forward(self, super().forward(x))


def test_super():
    class Reference(Base):
        def forward(self, x):
            x = torch.sin(x)
            return mark(F.relu(self.a(x)) + self.b(x)) * 2

    check(Child, Reference, ["add"])


@pytest.mark.parametrize("index", [0, 1])
def test_super_and_a_base_by_name(index):
    class Reference(Base):
        def forward(self, x):
            x = torch.sin(x)
            x = F.relu(self.a(x)) + self.b(x)
            x = (mark(x) if index == 0 else x) * 2
            x = F.relu(self.a(x)) + self.b(x)
            return mark(x) if index == 1 else x

    check(GrandChild, Reference, [("add", index)])


def doubling(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs) * 2

    return wrapper


def nameless(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(Base):
    @doubling
    @nameless
    def forward(self, x):
        with torch.enable_grad():
            return self._part(torch.sin(x)) + self._part(x)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    @doubling
    def _part(self, x):
        return torch.sin(self.a(x)).float()


@pytest.mark.parametrize("place", ["add", ("sin", 0), ("sin", 2)])
def test_decorated(place):
    class Reference(Base):
        def forward(self, x):
            at = [mark if place == ("sin", k) else (lambda value: value) for k in range(3)]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                first = at[1](torch.sin(self.a(at[0](torch.sin(x))))).float() * 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                second = at[2](torch.sin(self.a(x))).float() * 2
            return (mark(first + second) if place == "add" else first + second) * 2

    check(Decorated, Reference, [place])


def test_no_grad_forward():
    class Net(Base):
        @torch.no_grad()
        def forward(self, x):
            return torch.sin(x) + 1

    net = edited(Net(), "add")
    assert not net(torch.ones(4, requires_grad=True)).requires_grad


class Mangled(Base):
    def __init__(self):
        super().__init__()
        self.__scale = 3.0

    def __part(self, x):
        return self.a(x) * self.__scale

    def forward(self, x):
        return self.__part(x) + 1


def test_name_mangled():
    class Reference(Base):
        def forward(self, x):
            return mark(self.a(x) * 3.0) + 1

    check(Mangled, Reference, ["mul"])


def make(factor):
    def double(t):
        return t * factor

    class Closure(Base):
        def forward(self, x):
            return double(self.a(x)) + factor

    return Closure


def test_closure():
    class Reference(Base):
        def forward(self, x):
            return mark(self.a(x) * 8) + 8

    check(make(8), Reference, ["mul"])


def test_patched_on_the_instance():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.forward = self.other

        def other(self, x):
            return self.a(x) * 2

    class Reference(Base):
        def forward(self, x):
            return mark(self.a(x) * 2)

    torch.manual_seed(0)
    ours = Net()
    torch.manual_seed(0)
    theirs = Reference()
    x = torch.randn(4, 4)
    assert [op.name for op in record_ops(ours, [ours], (x,), {})[0]] == ["a", "mul"]
    assert ours.forward.__func__ is Net.other
    same(grads(edited(ours, "mul"), x), grads(theirs, x))
