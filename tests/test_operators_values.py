"""Nested values keep their exact type, and what cannot be looked into is refused."""

import collections
import dataclasses
import enum
import functools
import types

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradsurgery.errors import OperatorError
from gradsurgery.operators import GradientReversal, reverse_gradient, stop_gradient, straight_through

Pair = collections.namedtuple("Pair", "tensor number")


@dataclasses.dataclass
class Output:
    tensor: Tensor
    name: str = "n"
    nested: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    tensor: Tensor
    number: int = 3


@dataclasses.dataclass
class Derived:
    tensor: Tensor
    double: Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.double = self.tensor * 2


@dataclasses.dataclass
class Model(collections.OrderedDict):
    """As transformers' ModelOutput: a dict and a dataclass in one, and a registered pytree."""

    tensor: Tensor

    def __post_init__(self):
        super().__setitem__("tensor", self.tensor)


pytree.register_pytree_node(Model, lambda m: (list(m.values()), None), lambda values, _: Model(*values))


class Rows(list):
    pass


class Bag(dict):
    pass


def packed(x):
    return nn.utils.rnn.pack_sequence([x, x[:1]])


def the_tensor(value):
    if isinstance(value, Tensor):
        return value
    children = value.values() if isinstance(value, dict) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, dict):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return (
        next((found for child in children if (found := the_tensor(child)) is not None), None)
        if isinstance(value, (tuple, list, dict, collections.deque)) or dataclasses.is_dataclass(value)
        else None
    )


VALUES = {
    "tuple": lambda x: (1, x),
    "list": lambda x: ["a", [x]],
    "dict": lambda x: {"b": None, "a": x},
    "OrderedDict": lambda x: collections.OrderedDict(b=2, a=x),
    "defaultdict": lambda x: collections.defaultdict(list, a=x),
    "namedtuple": lambda x: Pair(x, 3),
    "return_types": lambda x: torch.max(x[None], 0),
    "dataclass": lambda x: Output(x, nested=(None, {"k": 1})),
    "dataclass in dataclass": lambda x: Output(None, nested=Frozen(x)),
    "frozen dataclass": Frozen,
    "dataclass with a derived field": Derived,
    "registered": Model,
    "list subclass": lambda x: Rows([x]),
    "dict subclass": lambda x: Bag(a=x),
    "deque": lambda x: collections.deque([x], maxlen=3),
    "packed sequence": packed,
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_the_type_and_the_other_leaves_are_kept(make):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    value = make(x * 1)
    out = GradientReversal(0.5)(value)
    assert type(out) is type(value) and out is not value
    before, after = the_tensor(value), the_tensor(out)
    assert torch.equal(before, after) and before is not after
    plain = torch.autograd.grad(before.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(after.sum(), x)[0], -0.5 * plain)


def test_details_of_containers():
    x = torch.ones(2, requires_grad=True)
    out = reverse_gradient(collections.defaultdict(list, b=x, a=1))
    assert out.default_factory is list and list(out) == ["b", "a"]
    assert reverse_gradient(collections.deque([x], maxlen=3)).maxlen == 3
    model = reverse_gradient(Model(x))
    assert model.tensor is model["tensor"]
    derived = Derived(x * 1)
    derived.tensor = x * 5
    assert torch.equal(reverse_gradient(derived).double, derived.double)  # __post_init__ did not run again


def test_a_tensor_that_occurs_twice_stays_one():
    x = torch.ones(2, requires_grad=True)
    first, (second, third) = reverse_gradient((x, [x, x * 1]), 0.5)
    assert first is second and first is not third
    (first + second).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -1.0))


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "s",
        (),
        [1, {"a": None}],
        {"i": torch.arange(3)},
        Color.RED,
        torch.Size([2]),
        {1, 2},
        object(),
        torch.float32,
        Pair(1, 2),
        types.SimpleNamespace(a=1),
        range(3),
        len,
    ],
    ids=repr,
)
def test_a_value_without_floating_tensors_is_returned_itself(value):
    assert reverse_gradient(value) is value
    assert stop_gradient((value, torch.Tensor))[0] is value


class Holder:
    def __init__(self, tensor):
        self.deep = {"list": [types.SimpleNamespace(tensor=tensor)]}


class Cached(Output):
    @functools.cached_property
    def probabilities(self):
        return self.tensor.softmax(0)


def cached(x):
    value = Cached(x)
    value.probabilities  # noqa: B018
    return value


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Holder, "Holder"),
        (lambda x: types.SimpleNamespace(a=x), "SimpleNamespace"),
        (lambda x: {x}, "set"),
        (lambda x: iter([x]), "iterator"),
        (lambda x: {"a": x}.values(), "dict_values"),
        (lambda x: torch.distributions.Normal(x, 1.0), "Normal"),
        (cached, "Cached"),
    ],
    ids=["object", "namespace", "set", "iterator", "view", "distribution", "cached property"],
)
def test_a_type_that_hides_tensors_is_refused_by_name(make, name):
    with pytest.raises(OperatorError, match=name):
        reverse_gradient(make(torch.ones(2, requires_grad=True)))


def test_an_object_beside_the_tensors_passes_and_is_named():
    x = torch.ones(2, requires_grad=True)
    held = Holder(x)
    with pytest.warns(UserWarning, match="Holder"):
        y, same = reverse_gradient((x, held))
    assert same is held
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), -1.0))
    with torch.no_grad():  # nothing can be wrong without gradients, so nothing is said
        assert reverse_gradient((x, held))[1] is held


def test_a_function_is_applied_to_each_floating_tensor():
    x, ids = torch.tensor([0.6], requires_grad=True), torch.arange(2)
    out = straight_through({"a": x, "ids": ids, "b": (x * 2,)}, torch.round)
    assert out["a"].item() == 1.0 and out["b"][0].item() == 1.0 and out["ids"] is ids
