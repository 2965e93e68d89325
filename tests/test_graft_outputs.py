"""Any output keeps its exact type."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from core_helpers import leaves, seeded, step
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))

Pair = namedtuple("Pair", "a b")


class Typed(NamedTuple):
    a: Tensor
    b: Any = None


@dataclasses.dataclass
class Data:
    a: Tensor
    b: Any = None
    n: int = dataclasses.field(default=3, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: Tensor
    b: Any = None


class OwnList(list):
    def __init__(self, tag: str, items: Any) -> None:
        super().__init__(items)
        self.tag = tag


class OwnDict(dict):
    def __init__(self, tag: str, **items: Any) -> None:
        super().__init__(items)
        self.tag = tag


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "nested tuple": lambda a, b: (a, (b, ("text", None))),
    "list": lambda a, b: [a, [b], 7],
    "own list": lambda a, b: OwnList("tag", [a, b]),
    "dict": lambda a, b: {"z": a, "a": b, 3: "x"},
    "own dict": lambda a, b: OwnDict("tag", a=a, b=b),
    "OrderedDict": lambda a, b: OrderedDict(z=a, a=(b,)),
    "defaultdict": lambda a, b: defaultdict(list, a=a, b=[b]),
    "namedtuple": lambda a, b: Pair(a, b),
    "NamedTuple": lambda a, b: Typed(a, Pair(b, 1)),
    "dataclass": lambda a, b: Data(a, b),
    "frozen dataclass": lambda a, b: Frozen(a, b),
    "nested dataclass": lambda a, b: Data(a, Frozen(b, Data(a * 2))),
    "ModelOutput": lambda a, b: BaseModelOutputWithPooling(last_hidden_state=a, hidden_states=(b, a * 2)),
    "torch.return_types": lambda a, b: torch.max(a, 0),
    "beside integers": lambda a, b: (a, b.argmax(), b > 0, None, 3.0),
    "the same twice": lambda a, b: (a, a, b),
}


class Gives(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.make = nn.Linear(3, 3), nn.Linear(3, 3), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.a(x), self.b(x))


def kind(value: Any) -> Any:
    """The exact types of a value, all the way down."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    inner: Any = ()
    if isinstance(value, dict):
        inner = {key: kind(item) for key, item in value.items()}
    elif isinstance(value, tuple | list):
        inner = [kind(item) for item in value]
    elif dataclasses.is_dataclass(value):
        inner = {field.name: kind(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return type(value), getattr(value, "tag", None), getattr(value, "default_factory", None), inner


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_keep_their_exact_type(name: str) -> None:
    plain, model = (seeded(lambda: Gives(OUTPUTS[name])) for _ in range(2))
    gs.insert_grl(model, "", 0.5)
    assert kind(model(X)) == kind(plain(X))
    y0, g0 = step(plain, X)
    y1, g1 = step(model, X)
    assert all(torch.equal(a, b) for a, b in zip(y0, y1, strict=True))
    assert any(g is not None for g in g0.values())
    for n, g in g0.items():
        assert (g is None and g1[n] is None) or torch.equal(g1[n], g * -0.5), n
    assert len(list(leaves(model(X)))) == len(y0)


def test_model_output_keeps_both_views() -> None:
    model = gs.insert_grl(seeded(lambda: Gives(OUTPUTS["ModelOutput"])), "['last_hidden_state']", 0.5)
    out = model(X)
    assert out[0] is out["last_hidden_state"] is out.last_hidden_state
    out.last_hidden_state.sum().backward()
    plain = seeded(lambda: Gives(OUTPUTS["ModelOutput"]))
    plain(X).last_hidden_state.sum().backward()
    assert torch.equal(model.a.weight.grad, plain.a.weight.grad * -0.5)
