"""One forward of every kind: edited, and against the same forward with the operator written in by hand."""

import contextlib
import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsurgery.capture.record import list_ops, record_ops
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


def scaled(value):
    """The operator of these tests: the value itself, and four times its gradient."""
    return _Scale.apply(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def edited(module, *places):
    """Swap in the class that a graft would make. A place is a name, or a name and an index."""
    places = [(place, None) if isinstance(place, str) else place for place in places]
    edits = tuple(OpEdit(name, index, f"_gs_{k}") for k, (name, index) in enumerate(places))
    cls = type(module)
    patched = module.__dict__.pop("forward", None)
    body = rewrite(cls, edits, patched and patched.__func__)
    methods = {f"_gs_{k}": lambda self, value: scaled(value) for k in range(len(places))}
    module.__class__ = type(cls.__name__, (cls,), {**body, **methods, "_gs_base": cls})
    return module


def grads(module, *args, **kwargs):
    """The value of a forward and every gradient, of the parameters and of the first argument."""
    x = args[0].clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(5)
    out = module(x, *args[1:], **kwargs)
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in module.parameters())]


def same(first, second):
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def check(cls, reference, places, *args, prepare=lambda module: module, **kwargs):
    """An edited ``cls`` does what ``reference`` does, and lists the op as the reference knows it."""
    torch.manual_seed(0)
    ours = cls()
    torch.manual_seed(0)
    theirs = reference()
    prepare(ours), prepare(theirs)
    signature = inspect.signature(type(ours).forward)
    edited(ours, *places)
    assert inspect.signature(type(ours).forward) == signature
    x = torch.randn(4, 4)
    same(grads(ours, x, *args, **kwargs), grads(theirs, x, *args, **kwargs))
    return ours, theirs


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.flag = False
        self.n = 0


def mark(value):
    return scaled(value)


class Straight(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.a(x)) + self.b(x)


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
    with pytest.raises(CaptureError, match=r"asked for .*; .*\. Operate on"):
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
