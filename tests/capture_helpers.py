"""What the tests of opened forwards share: an edit, its gradients, and the check against a reference."""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsurgery.capture.rewrite import OpEdit, rewrite


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
