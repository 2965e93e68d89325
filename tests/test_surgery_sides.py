"""The input side, and Sequentials as places."""

import pytest
import timm
import torch
from core_helpers import Block, chain, factors, seeded, step
from torch import Tensor, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor, n: Tensor | None = None, *, z: Tensor, flag: bool = True) -> Tensor:
        return self.w(x * y + z) if flag and n is not None else x


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor, z: Tensor, n: Tensor | None = None) -> Tensor:
        return self.w(x * y + z) if n is not None else x


class Feed(nn.Module):
    """Three branches into one consumer, with an integer tensor beside them."""

    def __init__(self, join: type[nn.Module], by_name: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.join, self.by_name = join(), by_name

    def forward(self, x: Tensor) -> Tensor:
        n, (a, b, c) = torch.ones(3, dtype=torch.long), (self.a(x), self.b(x), self.c(x))
        if self.by_name:
            return self.join(y=b, x=a, z=c, n=n)
        return self.join(a, b, n, z=c) if isinstance(self.join, Join) else self.join(a, b, c, n)


INPUTS = [
    ("join", {"a", "b", "c"}),
    ("join[0]", {"a"}),
    ("join[1]", {"b"}),
    ("join['x']", {"a"}),
    ("join['y']", {"b"}),
    ("join['z']", {"c"}),
]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("join", [Join, Positional])
@pytest.mark.parametrize(("at", "reversed_"), INPUTS)
def test_what_a_module_receives(at: str, reversed_: set[str], join: type[nn.Module], by_name: bool) -> None:
    plain, model = (seeded(lambda: Feed(join, by_name)) for _ in range(2))
    gs.insert_grl(model, at, 0.5, side="input")
    right = {name: -0.5 if name in reversed_ else 1.0 for name in "abc"}
    assert factors(plain, model, X) == right | {"join.w": 1.0}
    assert [(o.address, o.side, o.runs) for o in gs.operations(model)] == [(at, "input", 1)]


@pytest.mark.parametrize("at", ["1[0]", "1['input']", "1"])
def test_the_one_argument_by_number_and_by_name(at: str) -> None:
    plain, model = chain(nn.Tanh()), chain(nn.Tanh())
    gs.insert_grl(model, at, 0.5, side="input")
    assert factors(plain, model, X) == {"0": -0.5, "2": 1.0}


@pytest.mark.parametrize(("at", "words"), [("join[7]", "join|7"), ("join['nope']", "nope")])
def test_an_argument_that_is_not_there(at: str, words: str) -> None:
    model = Feed(Join, False)
    gs.insert_grl(model, at, side="input")
    with pytest.raises(gs.OperatorError, match=words):
        model(X)


def test_nested_arguments_and_both_sides() -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
            return pair[0] * pair[1]["k"]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.pair = nn.Linear(3, 3), nn.Linear(3, 3), Pair()

        def forward(self, x: Tensor) -> Tensor:
            return self.pair((self.a(x), {"k": self.b(x)}))

    for at, right in (
        ("pair", {"a": -0.5, "b": -0.5}),
        ("pair[0][1]['k']", {"a": 1.0, "b": -0.5}),
        ("pair['pair'][0]", {"a": -0.5, "b": 1.0}),
    ):
        plain, model = seeded(Outer), seeded(Outer)
        gs.insert_grl(model, at, 0.5, side="input")
        assert factors(plain, model, X) == right
        gs.insert_scale_gradient(model, "pair", 2)
        assert factors(plain, model, X) == {name: factor * 2 for name, factor in right.items()}
        gs.remove(model, at)
        assert [o.side for o in gs.operations(model)] == (["output"] if "[" in at else [])


def test_the_input_of_the_root() -> None:
    model = chain()
    x = X.clone().requires_grad_()
    gs.insert_grl(model, "", 0.5, side="input")
    gs.insert_stop_gradient(model, "0", side="input")
    step(model, x)
    assert x.grad is None
    gs.remove(model, "0")
    with pytest.raises(gs.AddressError):
        gs.remove(model, "")  # the Sequential's input is its first child's


# --- Sequentials -----------------------------------------------------------------------------------------------------

WALKS = {
    "called": lambda s, x: s(x),
    "walked": lambda s, x: _walk(s, x),
    "by children": lambda s, x: _walk(s.children(), x),
    "indexed": lambda s, x: s[-1](s[0](x)),
    "sliced": lambda s, x: s[1:](s[:1](x)),
    "by name": lambda s, x: s.get_submodule("1")(s._modules["0"](x)),
}


def _walk(layers: object, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Walker(nn.Module):
    def __init__(self, walk: str, layers: nn.Sequential) -> None:
        super().__init__()
        self.stem, self.layers, self.head, self.walk = nn.Linear(3, 4), layers, nn.Linear(4, 2), WALKS[walk]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.walk(self.layers, self.stem(x)))


LAYERS = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    "nested": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Sequential(Block(), nn.Linear(4, 4)))),
    "a Sequential first": lambda: nn.Sequential(
        nn.Sequential(nn.Sequential(nn.Linear(4, 4), Block())), nn.Linear(4, 4)
    ),
}


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("walk", WALKS)
def test_every_caller_of_a_sequential_meets_the_operator(walk: str, layers: str, side: str) -> None:
    plain, model = (seeded(lambda: Walker(walk, LAYERS[layers]())) for _ in range(2))
    gs.insert_grl(model, "layers", 0.5, side=side)
    got = factors(plain, model, X)
    assert got.pop("head") == 1.0
    assert got.pop("stem") == -0.5
    assert set(got.values()) == {-0.5 if side == "output" else 1.0}
    assert [o.address for o in gs.operations(model)] == ["layers"]
    gs.remove(model, "layers")
    assert factors(plain, model, X)["stem"] == 1.0


def test_a_last_child_that_serves_elsewhere_is_not_taken() -> None:
    def make() -> nn.Module:
        act = nn.Tanh()
        return nn.Sequential(nn.Linear(3, 3), act, nn.Sequential(nn.Linear(3, 3), act), nn.Linear(3, 2))

    plain, model = seeded(make), seeded(make)
    gs.insert_grl(model, "2", 0.5)
    assert factors(plain, model, X) == {"0": -0.5, "2.0": -0.5, "3": 1.0}
    assert [o.runs for o in gs.operations(model)] == [1]
    assert [o.address for o in gs.operations(model)] == ["2"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("at", ["layer3", "layer1", "layer4"])
def test_timm_resnet18(at: str, checkpointing: bool) -> None:
    plain, model = (seeded(lambda: timm.create_model("resnet18", zero_init_last=False)) for _ in range(2))
    for one in (plain, model):
        one.train().set_grad_checkpointing(checkpointing)
    gs.insert_grl(model, at, 0.5)
    got = factors(plain, model, torch.randn(2, 3, 32, 32))
    order = ["conv1", "layer1", "layer2", "layer3", "layer4", "fc"]
    for name, factor in got.items():
        top = name.partition(".")[0].replace("bn1", "conv1")
        assert factor == (-0.5 if order.index(top) <= order.index(at) else 1.0), name
    x = torch.randn(2, 3, 32, 32)
    for method in ("forward_features", "forward_intermediates"):
        losses = []
        for one in (plain, model):
            one.zero_grad()
            y = getattr(one, method)(x)
            y = y if isinstance(y, Tensor) else y[0]
            y.square().sum().backward()
            losses.append(y.detach())
        assert torch.equal(*losses)
        assert torch.equal(model.conv1.weight.grad, -0.5 * plain.conv1.weight.grad)
