"""Opened forwards that work in place, write attributes, and call children again and in unusual ways."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from capture_helpers import Base, check, edited, grads, mark, same, scaled
from torch import nn

from gradsurgery.capture.record import list_ops, record_ops
from gradsurgery.errors import CaptureError


class InPlace(Base):
    def forward(self, x):
        x = self.a(x)
        y = self.b(x)
        y += x
        y.mul_(2).add_(x)
        y[:, 0] += 1
        F.relu(y, inplace=True)
        return y


@pytest.mark.parametrize("place", ["mul_", "add_", "relu", ("add", 0), ("add", 1)])
def test_in_place(place):
    class Reference(Base):
        def forward(self, x):
            x = self.a(x)
            y = self.b(x)
            y += x
            y = mark(y) if place == ("add", 0) else y
            y = y.mul_(2)
            y = mark(y) if place == "mul_" else y
            y = y.add_(x)
            y = mark(y) if place == "add_" else y
            y[:, 0] += 1
            if place == ("add", 1):
                y = torch.cat([mark(y[:, :1]), y[:, 1:]], 1)
            y = F.relu(y, inplace=True)
            return mark(y) if place == "relu" else y

    check(InPlace, Reference, [place])


def test_in_place_and_read_by_its_old_name():
    class Net(Base):
        def forward(self, x):
            x = self.a(x)
            y = x.mul_(2)
            return self.b(y) + x

    class Reference(Base):
        def forward(self, x):
            x = mark(self.a(x).mul_(2))
            return self.b(x) + x

    check(Net, Reference, ["mul_"])


def test_nobody_reads_it():
    class Net(Base):
        def forward(self, x):
            F.relu(x)
            self.a(x)
            return self.b(x)

    for place in ("relu", "a"):
        with pytest.raises(CaptureError, match="nobody reads"):
            edited(Net(), place)


def test_read_by_no_name():
    class Net(Base):
        def forward(self, x):
            unused = torch.sin(x)  # noqa: F841
            return self.b(x)

    with pytest.raises(CaptureError, match="nobody reads"):
        edited(Net(), "sin")


def test_contexts_that_swallow_exceptions():
    class Net(Base):
        def forward(self, x):
            with contextlib.suppress(ValueError):
                if self.flag:
                    raise ValueError
                x = torch.sin(x)
            return torch.sin(self.a(x))

    ours = edited(Net(), ("sin", 0))
    for flag in (False, True):
        ours.flag = flag
        x = torch.randn(4, 4)
        value = ours.a(x if flag else scaled(torch.sin(x)))
        value = scaled(torch.sin(value)) if flag else torch.sin(value)
        value.square().sum().backward()
        same(grads(ours, x)[2:4], [p.grad for p in ours.a.parameters()])


def test_helper_that_changes_its_argument():
    def double(t):
        t.mul_(2)

    class Net(Base):
        def forward(self, x):
            x = self.a(x)
            double(x)
            return x

    with pytest.raises(CaptureError, match="nobody reads"):
        edited(Net(), "mul_")


class Attributes(Base):
    def forward(self, x):
        self.n += 1
        self.last = self.a(x)
        return self.last * self.n


def test_attribute_writing():
    class Reference(Base):
        def forward(self, x):
            self.n += 1
            self.last = self.a(x)
            return mark(self.last * self.n)

    ours, theirs = check(Attributes, Reference, ["mul"])
    x = torch.randn(4, 4)
    same(grads(ours, x), grads(theirs, x))
    assert ours.n == theirs.n == 2


class Reused(Base):
    def forward(self, x):
        for _ in range(2):
            x = self.a(x)
        return self.a(self.b(x))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_reused_child_and_loop(index):
    class Reference(Base):
        def forward(self, x):
            for n in range(2):
                x = self.a(x)
                x = mark(x) if n == index else x
            x = self.a(self.b(x))
            return mark(x) if index == 2 else x

    ours, _ = check(Reused, Reference, [("a", index)])
    assert sorted((op.name, op.index) for op in list_ops(ours)) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]


def test_bare_name_that_runs_twice():
    ours = edited(Reused(), "a")
    with pytest.raises(CaptureError, match="ran 3 times.*'a@0' to 'a@2'"):
        ours(torch.randn(4, 4))


class Unusual(Base):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.act = F.gelu

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = getattr(self, "a")(x)  # noqa: B009
        layer = self.layers[-1]
        fn = torch.tanh
        return fn(self.act(layer(x))) + sum(child(x) for child in self.layers)


@pytest.mark.parametrize("place", ["layers.1", "a", ("layers.2", 1), ("layers.2", 2), "act", "tanh"])
def test_unusual_calls(place):
    name, index = (place, 0) if isinstance(place, str) else place

    class Reference(Unusual):
        def forward(self, x):
            ran = {}

            def run(key, value):
                ran[key] = ran.get(key, -1) + 1
                return mark(value) if key == name and ran[key] == index else value

            for k in range(3):
                x = run(f"layers.{k}", self.layers[k](x))
            x = run("a", self.a(x))
            y = run("tanh", torch.tanh(run("act", F.gelu(run("layers.2", self.layers[-1](x))))))
            return y + sum(run(f"layers.{k}", self.layers[k](x)) for k in range(3))

    if place == "layers.1":
        place = ("layers.1", 0)
    ours, _ = check(Unusual, Reference, [place])
    ops = record_ops(ours, [ours], (torch.randn(4, 4),), {})[0]
    assert (name, index) in [(op.name, op.index) for op in ops]
