"""The operators on one tensor, in eager: bits, strides, gradients, coefficients, neighbours."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradgradcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gradsurgery.errors import OperatorError
from gradsurgery.operators import (
    FrozenTransform,
    GradientReversal,
    MapGradient,
    ScaleGradient,
    StopGradient,
    StraightThrough,
    detached_transform,
    frozen_transform,
    map_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)

pytestmark = pytest.mark.filterwarnings("error")

# name, the operator on a tensor, the factor of its gradient (None: no gradient)
OPERATORS = [
    ("reverse", lambda x: reverse_gradient(x, 0.5), -0.5),
    ("scale", lambda x: scale_gradient(x, 0.25), 0.25),
    ("scale negative", lambda x: scale_gradient(x, -2), -2.0),
    ("scale zero", lambda x: scale_gradient(x, 0.0), 0.0),
    ("stop", stop_gradient, None),
    ("map", lambda x: map_gradient(x, lambda g: g * -4.0), -4.0),
    ("straight", lambda x: straight_through(x, lambda v: v), 1.0),
]
each_operator = pytest.mark.parametrize(
    ("operate", "factor"), [o[1:] for o in OPERATORS], ids=[o[0] for o in OPERATORS]
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


def test_a_factor_has_double_precision():
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    reverse_gradient(x, 0.3).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -0.3, dtype=torch.float64))


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


BAD = [float("nan"), float("inf"), -float("inf"), True, np.bool_(True), "0.5", None, 1j, 10**400, [0.5]]
BAD_TENSORS = [
    torch.ones(1, requires_grad=True),
    torch.ones(2),
    torch.ones(0),
    torch.tensor(1j),
    torch.ones(1, device="meta"),
]
GOOD = [(0.5, 0.5), (2, 2.0), (0, 0.0), (np.float32(0.25), 0.25), (np.int64(3), 3.0), (torch.tensor([0.5]), 0.5)]


@pytest.mark.parametrize("bad", BAD + BAD_TENSORS + [torch.tensor(True)], ids=repr)
def test_coefficients_that_are_refused(bad):
    layer, scale, x = GradientReversal(), ScaleGradient(1.0), torch.ones(1)
    for ask in (
        lambda: GradientReversal(bad),
        lambda: ScaleGradient(bad),
        lambda: reverse_gradient(x, bad),
        lambda: scale_gradient(x, bad),
        lambda: setattr(layer, "lambd", bad),
        lambda: setattr(scale, "scale", bad),
    ):
        with pytest.raises(OperatorError, match=r"(lambd|scale)="):
            ask()
    assert layer.lambd == 1.0 and scale.scale == 1.0


def test_a_negative_strength_is_refused_and_points_to_scaling():
    with pytest.raises(OperatorError, match="scale_gradient"):
        reverse_gradient(torch.ones(1), -0.5)
    assert ScaleGradient(-0.5).scale == -0.5


@pytest.mark.parametrize(("good", "number"), GOOD, ids=repr)
def test_coefficients_that_are_accepted(good, number):
    layer, scale = GradientReversal(good), ScaleGradient(good)
    assert type(layer.lambd) is float and layer.lambd == scale.scale == number
    x = torch.ones(1, requires_grad=True)
    reverse_gradient(x, good).backward()
    assert x.grad.item() == -number


def test_the_coefficient_of_the_forward_counts():
    layer, x = GradientReversal(0.5), torch.ones(1, requires_grad=True)
    y = layer(x)
    layer.lambd = 2.0
    y.backward()
    assert x.grad.item() == -0.5


def test_nothing_is_learnt_or_saved():
    layers = nn.Sequential(GradientReversal(), ScaleGradient(1), StopGradient(), StraightThrough(torch.round))
    assert not list(layers.parameters()) and not layers.state_dict()
    assert set(FrozenTransform(nn.Linear(1, 1)).state_dict()) == {"fn.weight", "fn.bias"}


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (GradientReversal(0.5), "GradientReversal(lambd=0.5)"),
        (ScaleGradient(-2), "ScaleGradient(scale=-2.0)"),
        (StopGradient(), "StopGradient()"),
        (StraightThrough(torch.round), "StraightThrough(fn=round)"),
        (FrozenTransform(nn.ReLU()), "FrozenTransform(fn=ReLU())"),
        (MapGradient(torch.neg), "MapGradient(fn=neg)"),
    ],
    ids=repr,
)
def test_layers_print_as_constructor_calls_and_survive_copies(layer, text):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    for one in [layer, *twins]:
        assert repr(one) == text
        x = torch.tensor([2.0], requires_grad=True)
        y = one(x)
        assert torch.equal(y, layer(x))
        if y.requires_grad:
            assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(layer(x), x)[0])


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
        assert torch.equal(x.grad.to_dense(), torch.full((3, 3), factor))
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


# torch's own first use of forward mode scripts its decompositions
@pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning")
def test_forward_mode():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.tensor([2.0]), torch.tensor([3.0]))
        assert forward_ad.unpack_dual(reverse_gradient(x, 0.5)).tangent.item() == -1.5
        assert forward_ad.unpack_dual(straight_through(x, torch.round)).tangent.item() == 3.0
        assert forward_ad.unpack_dual(stop_gradient(x)).tangent is None
        assert forward_ad.unpack_dual(frozen_transform(x, torch.exp)).tangent is not None
        assert forward_ad.unpack_dual(detached_transform(x, torch.exp)).tangent is None
        with pytest.raises(OperatorError, match="map_gradient"):
            map_gradient(x, torch.neg)
