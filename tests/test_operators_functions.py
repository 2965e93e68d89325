"""The operators that call a function: straight through, frozen, detached and mapped."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gradsurgery.errors import OperatorError
from gradsurgery.operators import (
    DetachedTransform,
    FrozenTransform,
    MapGradient,
    StraightThrough,
    detached_transform,
    frozen_transform,
    map_gradient,
    straight_through,
)
from gradsurgery.operators.frozen import modules_of


def leaf(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


# --- straight through


def test_straight_through_has_the_very_bits_of_fn():
    odd = torch.tensor([float("inf"), float("nan"), -0.0, 1e-42, 0.1])
    x = leaf(1.0, 2.0, 3.0, 4.0, 5.0)
    y = straight_through(x, lambda v: odd)
    assert torch.equal(y.detach().view(torch.int32), odd.view(torch.int32)) and y.data_ptr() != odd.data_ptr()
    y.backward(odd)
    assert torch.equal(x.grad.view(torch.int32), odd.view(torch.int32))


def test_straight_through_keeps_the_strides_of_fn():
    x = torch.ones(2, 3, requires_grad=True)
    assert straight_through(x, lambda v: v.t().contiguous().t()).stride() == (1, 2)


@pytest.mark.parametrize("fn", [torch.sign, lambda v: v.round().long(), lambda v: v > 0, lambda v: v.double()])
def test_straight_through_casts_to_the_dtype_of_x(fn):
    x = leaf(0.6, 1.0)
    y = straight_through(x, fn)
    assert y.dtype == torch.float32 and torch.equal(y, fn(x).float())
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_fn_may_work_in_place():
    for operate, factor in ((straight_through, 1.0), (detached_transform, 0.0)):
        x = leaf(-1.0, 2.0)
        h = x * 1
        kept = h * h
        y = operate(h, torch.relu_)
        assert torch.equal(y, torch.tensor([0.0, 2.0])) and torch.equal(h, x)
        (kept.sum() + y.sum()).backward()
        assert torch.equal(x.grad, 2 * x.detach() + factor)


def test_the_own_parameters_of_fn_get_no_gradient_and_its_codebook_is_not_exposed():
    x, code = leaf(0.8), nn.Parameter(torch.ones(1))
    y = straight_through(x, lambda v: code)
    y.mul_(3)
    y.backward()
    assert code.grad is None and code.item() == 1.0 and x.grad.item() == 3.0


@pytest.mark.parametrize("fn", [lambda v: v[:1], lambda v: v.sum(), lambda v: v[None], lambda v: (v,), lambda v: None])
def test_a_fn_that_changes_the_shape_is_refused_by_name(fn):
    with pytest.raises(OperatorError, match=r"<lambda>.*|\(2,\)"):
        straight_through(leaf(1.0, 2.0), fn)
    y = map_gradient(leaf(1.0, 2.0), fn)
    with pytest.raises(OperatorError, match=r"map_gradient.*\(2,\).*<lambda>"):
        y.sum().backward()


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(OperatorError, match="complex64"):
        straight_through(leaf(1.0), lambda v: v + 1j)
    with pytest.raises(OperatorError, match="meta"):
        straight_through(leaf(1.0), lambda v: v.to("meta"))


@pytest.mark.parametrize("layer", [StraightThrough, FrozenTransform, DetachedTransform, MapGradient])
@pytest.mark.parametrize("fn", [3, None, nn.ReLU, torch.ones(1)], ids=["int", "None", "class", "tensor"])
def test_what_cannot_be_called_is_refused_at_once(layer, fn):
    with pytest.raises(OperatorError, match=layer.__name__):
        layer(fn)


# --- frozen


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))

    def encode(self, x):
        return self.a(x)


def closing_over(module):
    return lambda x: module(x) * 2


MODELS = {
    "linear": lambda: nn.Linear(2, 3),
    "tied": Tied,
    "parametrised": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "method": lambda: Tied().encode,
    "partial": lambda: functools.partial(nn.Linear(2, 2)),
    "partial argument": lambda: functools.partial(lambda module, x: module(x), nn.Linear(2, 2)),
    "closure": lambda: closing_over(Tied()),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_frozen_lets_the_gradient_pass_and_keeps_it_from_the_parameters(make):
    fn = make()
    x = torch.randn(3, 2, requires_grad=True)
    expected = fn(x)
    y = frozen_transform(x, fn)
    assert torch.equal(y, expected)
    (g,) = torch.autograd.grad(expected.sum(), x)
    parameters = [p for held in modules_of(fn) for p in held.parameters()]
    assert parameters and all(p.requires_grad for p in parameters)
    y.sum().backward()
    assert torch.equal(x.grad, g) and all(p.grad is None for p in parameters)


def test_other_uses_of_frozen_parameters_keep_their_gradients():
    layer, x = nn.Linear(1, 1, bias=False), leaf(2.0)
    (layer(x) + frozen_transform(x, layer) * 10).backward()
    assert layer.weight.grad.item() == 2.0


def test_frozen_batch_norm_keeps_its_statistics():
    layer = FrozenTransform(nn.BatchNorm1d(1))
    layer(torch.tensor([[0.0], [10.0]], requires_grad=True))
    assert layer.fn.num_batches_tracked == 0 and layer.fn.running_mean.item() == 0.0
    layer.eval()
    assert not layer.fn.training and layer(torch.zeros(1, 1)).shape == (1, 1)


def test_frozen_keeps_no_buffers_where_nothing_needs_a_gradient():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = frozen_transform(torch.ones(3, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert not saved and not y.requires_grad


def test_frozen_differentiates_twice(scripting):
    layer, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(1, 2, requires_grad=True)
    for value in (layer(x), frozen_transform(x, layer)):
        (g,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (g**2).sum().backward()
    first, second = (
        torch.func.hessian(lambda v: layer(v).sum())(x),
        torch.func.hessian(lambda v: frozen_transform(v, layer).sum())(x),
    )
    assert torch.equal(first, second)


def test_frozen_refuses_parameters_that_it_cannot_reach():
    w = nn.Parameter(torch.ones(1))
    with pytest.raises(OperatorError, match=r"parameter of shape \(1,\)"):
        frozen_transform(leaf(1.0), lambda x: x * w)
    assert frozen_transform(leaf(1.0), lambda x: x * w.detach()).requires_grad


def test_frozen_refuses_a_scripted_module_whose_parameters_it_cannot_replace(scripting):
    scripted = torch.jit.script(nn.Linear(1, 1))
    with pytest.raises(OperatorError, match="scripted module.*weight"):
        frozen_transform(leaf(1.0), scripted)
    for p in scripted.parameters():
        p.requires_grad_(False)
    assert frozen_transform(leaf(1.0), scripted).requires_grad


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def inner(self, x):
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_frozen_refuses_checkpointing_inside_and_works_inside_checkpointing(reentrant):
    # Square on purpose: the recomputation saves other tensors of the same shape, and torch itself does not notice.
    model, x = Checkpointed(reentrant), torch.randn(4, 4, requires_grad=True)
    with pytest.raises(OperatorError, match="checkpointing inside fn"):
        frozen_transform(x, model)
    plain = torch.autograd.grad(model.inner(x).sum(), x)[0]
    checkpoint(lambda v: frozen_transform(v, model.inner), x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, plain) and model.a.weight.grad is None


def test_detached_passes_nothing():
    layer, x = nn.Linear(2, 3), torch.ones(1, 2, requires_grad=True)
    y = detached_transform(x, layer)
    assert torch.equal(y, layer(x)) and not y.requires_grad
    w = nn.Parameter(torch.ones(1))
    assert not detached_transform(x, lambda v: w).requires_grad
    assert not any(part.requires_grad for part in detached_transform(x, lambda v: (v, w)))


# --- mapped


def test_map_gradient_owns_what_it_works_on():
    x = leaf(1.0, 2.0)
    h = x * 1
    (map_gradient(h, lambda g: g.zero_()) + h).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_a_second_backward_differentiates_through_fn():
    x = leaf(3.0, dtype=torch.float64)
    (g,) = torch.autograd.grad(map_gradient(x, lambda g: g**2) ** 2, x, create_graph=True)
    assert g.item() == 36.0  # (2 x)^2
    (second,) = torch.autograd.grad(g, x)
    assert second.item() == (8 * 3.0) ** 2  # the derivative 8 x of (2 y)^2, which itself comes back through the node
