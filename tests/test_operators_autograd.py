"""The operators among the rest of autograd: higher orders, checkpointing, other kinds of tensors."""

import pytest
import torch
from operator_table import OPERATORS, each_operator
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradgradcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gradsurgery.errors import OperatorError
from gradsurgery.operators import (
    detached_transform,
    frozen_transform,
    map_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)


def test_no_gradient_stays_none_on_its_way_up():
    class Swallow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    for operate in (
        lambda x: reverse_gradient(x),
        lambda x: map_gradient(x, lambda g: g + 1),
        lambda x: straight_through(x, torch.round),
    ):
        w = torch.ones(2, requires_grad=True)
        Swallow.apply(operate(w)).sum().backward()
        assert w.grad is None


@pytest.mark.parametrize(
    "operate", [o[1] for o in OPERATORS if o[2] is not None], ids=[o[0] for o in OPERATORS if o[2] is not None]
)
def test_higher_orders(operate):
    factor = next(o[2] for o in OPERATORS if o[1] is operate)
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    y, expected = operate(x), 1.0
    # each backward passes the node once more: y^4 has derivatives 4 f y^3, 12 f^2 y^2, 24 f^3 y
    value = (y**4).sum()
    for power, count in ((3, 4), (2, 12), (1, 24)):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        expected = count * factor ** (4 - power)
        assert torch.equal(value, expected * x.detach() ** power)


def test_gradgradcheck():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    identity = scale_gradient(x, 1.0)
    assert gradgradcheck(lambda v: scale_gradient(v, 1.0) ** 3, (x,)) and torch.equal(identity, x)


def test_batched_gradients_and_saved_tensor_hooks():
    x, saved = torch.ones(3, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = reverse_gradient(x, 0.5)
        z = straight_through(y, torch.round)
    assert not saved
    (g,) = torch.autograd.grad(z, x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(g, -0.5 * torch.eye(3))


@each_operator
@pytest.mark.parametrize("mode", ["reentrant", "plain", "selective"])
def test_checkpointing(operate, factor, mode):
    w = torch.tensor([1.0, 2.0], requires_grad=True)

    def body(v):
        return operate(v * 2) * v

    def save_all():
        return create_selective_checkpoint_contexts(lambda *a, **k: CheckpointPolicy.MUST_SAVE)

    options = {"reentrant": {"use_reentrant": True}, "plain": {"use_reentrant": False}}
    y = checkpoint(body, w, **options.get(mode, {"use_reentrant": False, "context_fn": save_all}))
    y.sum().backward()
    assert torch.equal(w.grad, 2 * w.detach() + 2 * w.detach() * (factor or 0.0))


@pytest.mark.parametrize(
    ("layout", "make"),
    [
        ("sparse", lambda: torch.eye(3).to_sparse()),
        ("jagged", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
    ],
)
@pytest.mark.parametrize(("operate", "factor"), [o[1:] for o in OPERATORS[:4]], ids=[o[0] for o in OPERATORS[:4]])
def test_other_layouts(layout, make, operate, factor):
    x = make().requires_grad_()
    y = operate(x)
    assert y.layout == x.layout and y.requires_grad
    if layout == "sparse":
        assert torch.equal(y.to_dense(), x.to_dense())
        torch.sparse.sum(y).backward()
        assert torch.equal(x.grad.to_dense(), torch.eye(3) * factor)
    else:
        assert torch.equal(y.values(), x.values())
        y.values().sum().backward()
        assert torch.equal(x.grad.values(), torch.full((5,), factor))


@each_operator
def test_meta_and_autocast(operate, factor):
    x = torch.ones(2, 3, device="meta", requires_grad=True)
    y = operate(x)
    assert y.is_meta and y.shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        w = torch.ones(1, 1, requires_grad=True)
        h = nn.functional.linear(torch.ones(1, 1), w)
        y = operate(h)
        assert y.dtype == h.dtype == torch.bfloat16
        if factor is not None:
            y.sum().backward()
            assert w.grad.dtype == torch.float32 and w.grad.item() == factor


class Plain(Tensor):
    pass


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is reverse_gradient:
            return "seen"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensor_subclasses():
    x = torch.ones(2).as_subclass(Plain).requires_grad_()
    y = reverse_gradient(x, 0.5)
    assert type(y) is Plain
    y.sum().backward()
    assert torch.equal(x.grad.as_subclass(Tensor), torch.full((2,), -0.5))
    loud = torch.ones(2).as_subclass(Loud)
    assert reverse_gradient(loud) == "seen" and reverse_gradient([loud, 1]) == ["seen", 1]
    assert type(reverse_gradient(nn.Parameter(torch.ones(2)))) is Tensor


def test_a_default_device_mode():
    x = torch.ones(2, requires_grad=True)
    with torch.device("meta"):
        y, three = reverse_gradient((x, 3), 0.5)
    y.sum().backward()
    assert y.device.type == "cpu" and three == 3 and torch.equal(x.grad, torch.full((2,), -0.5))


def test_forward_mode(scripting):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.tensor([2.0]), torch.tensor([3.0]))
        assert forward_ad.unpack_dual(reverse_gradient(x, 0.5)).tangent.item() == -1.5
        assert forward_ad.unpack_dual(straight_through(x, torch.round)).tangent.item() == 3.0
        assert forward_ad.unpack_dual(stop_gradient(x)).tangent is None
        assert forward_ad.unpack_dual(frozen_transform(x, torch.exp)).tangent is not None
        assert forward_ad.unpack_dual(detached_transform(x, torch.exp)).tangent is None
        with pytest.raises(OperatorError, match="map_gradient"):
            map_gradient(x, torch.neg)
