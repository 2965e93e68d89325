"""The operators on one tensor, in eager: bits, strides, gradients, in-place neighbours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_table import OPERATORS, each_operator
from torch import Tensor, nn

from gradsurgery.operators import (
    reverse_gradient,
    scale_gradient,
)


def bits(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return x.detach().resolve_neg().clone(memory_format=torch.contiguous_format).view(kinds[x.element_size()])


def awkward(dtype: torch.dtype) -> Tensor:
    small = torch.finfo(dtype).smallest_normal / 4
    values = [0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), float("nan"), small, torch.finfo(dtype).max]
    x = torch.tensor(values, dtype=dtype)
    if dtype is torch.float32:
        x = torch.cat([x, torch.tensor([0x7FC12345, -4194000], dtype=torch.int32).view(torch.float32)])
    return x


def strided(kind: str) -> Tensor:
    return {
        "0-dim": lambda: torch.tensor(1.5),
        "empty": lambda: torch.empty(0, 3),
        "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
        "channels_last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "size 1": lambda: torch.arange(8.0).as_strided((1, 2, 1, 4), (77, 1, 13, 2)),
        "gaps": lambda: torch.arange(24.0).view(4, 6)[:, ::2],
        "offset": lambda: torch.arange(24.0).view(4, 6)[1:, 2:],
        "expanded": lambda: torch.arange(3.0).view(3, 1).expand(3, 4),
        "overlapping": lambda: torch.arange(6.0).as_strided((4, 3), (1, 1)),
        "interleaved": lambda: torch.arange(12.0).as_strided((2, 3), (3, 2)),
    }[kind]()


STRIDES = [
    "0-dim",
    "empty",
    "transposed",
    "channels_last",
    "size 1",
    "gaps",
    "offset",
    "expanded",
    "overlapping",
    "interleaved",
]


@each_operator
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_value_has_the_same_bits_and_the_gradient_is_exact(operate, factor, dtype):
    x = awkward(dtype).requires_grad_()
    y = operate(x)
    assert torch.equal(bits(y), bits(x)) and y.dtype == dtype and y.data_ptr() != x.data_ptr()
    if factor is None:
        assert not y.requires_grad
        return
    g = torch.arange(1, 1 + x.numel()).to(dtype)
    y.backward(g)
    assert torch.equal(x.grad, g * factor) and x.grad.dtype == dtype


@each_operator
@pytest.mark.parametrize("kind", STRIDES)
def test_strides_are_kept(operate, factor, kind):
    x = strided(kind).requires_grad_()
    y = operate(x)
    assert torch.equal(y, x) and y.stride() == x.stride() and y.shape == x.shape


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4), st.integers(0, 3))
def test_any_strides_are_kept(geometry, offset):
    size, stride = [s for s, _ in geometry], [t for _, t in geometry]
    x = torch.arange(100.0).as_strided(size, stride, offset).requires_grad_()
    y = scale_gradient(x, 0.5)
    assert (
        torch.equal(y, x)
        and y.stride() == x.stride()
        and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    )
    (g,) = torch.autograd.grad(y, x, torch.ones(size))
    assert torch.equal(g, torch.full(size, 0.5))


@each_operator
@pytest.mark.parametrize(
    "view", [torch.conj, torch.Tensor.imag.__get__, lambda x: x.conj().imag], ids=["conj", "imag", "neg"]
)
def test_complex_and_its_lazy_views(operate, factor, view):
    x = torch.tensor([1 + 2j, float("inf") - 1j], requires_grad=True)
    v = view(x)
    y = operate(v)
    assert torch.equal(bits(y), bits(v))
    if factor is not None:
        g = torch.ones_like(v) * 2
        (got,) = torch.autograd.grad(y, v, g)
        assert torch.equal(got, g * factor)


@each_operator
def test_zero_dimensional_bfloat16_is_not_promoted(operate, factor):
    x = torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True)
    y = operate(x)
    assert y.dtype == torch.bfloat16
    if factor is not None:
        y.backward()
        assert x.grad.dtype == torch.bfloat16 and x.grad == factor


@each_operator
@pytest.mark.parametrize(
    "x", [torch.arange(3), torch.tensor([True]), torch.zeros(2, dtype=torch.int8)], ids=["i64", "bool", "i8"]
)
def test_a_tensor_without_gradients_passes_untouched(operate, factor, x):
    assert operate(x) is x


@pytest.mark.parametrize("operate", [o[1] for o in OPERATORS[:6]], ids=[o[0] for o in OPERATORS[:6]])
def test_nothing_to_do_without_grad(operate):
    x = torch.ones(3)
    assert operate(x) is x
    with torch.inference_mode():
        assert operate(x) is x


@each_operator
def test_a_value_made_without_grad_never_passes_the_plain_gradient_later(operate, factor):
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        y = operate(x)
    assert not y.requires_grad and torch.equal(y, x)


@each_operator
@pytest.mark.parametrize("change", [torch.relu_, lambda y: y.add_(1), lambda y: y[:1].mul_(3), nn.ReLU(inplace=True)])
def test_in_place_neighbours(operate, factor, change):
    w = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    h = w * 2
    kept = h * h  # saves h: a change of h behind the back of autograd would raise or be wrong
    y = operate(h)
    change(y)
    assert torch.equal(h, w.detach() * 2)
    (y.sum() + kept.sum()).backward()
    slope = torch.tensor([3.0, 1, 1]) if torch.equal(y[:1], h[:1] * 3) else torch.ones(3)
    assert torch.equal(w.grad, 8 * w.detach() + 2 * slope * (factor or 0.0))


def test_an_in_place_operation_on_the_input_afterwards():
    w = torch.ones(3, requires_grad=True)
    h = w * 2
    y = reverse_gradient(h, 0.5)
    h.mul_(5)
    (y * y).sum().backward()
    assert torch.equal(w.grad, torch.full((3,), -0.5 * 4 * 2))
