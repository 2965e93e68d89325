"""What the tests of the core share: small networks, one training step, and the exact factor of every gradient."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Grads = dict[str, Tensor | None]


class Block(nn.Module):
    """A residual block with a child that is called twice."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.act(self.fc(x))) + x)


class Net(nn.Module):
    """stem -> blocks (a Sequential) -> head: parameters before and after every place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def seeded(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make()


def chain(*middle: nn.Module) -> nn.Sequential:
    """``a -> middle... -> b``, the middle at ``"1"`` and following."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), *middle, nn.Linear(3, 2))
    with torch.no_grad():  # the middle was made before the seed
        for p in model.parameters():
            if not nn.parameter.is_lazy(p):
                p.uniform_(-1, 1)
    return model


def leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from leaves(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from leaves(one)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))


def step(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[Tensor], Grads]:
    """Outputs and gradients of one step under one seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    out = list(leaves(model(*args, **kwargs)))
    sum(t.square().sum() for t in out if t.requires_grad).backward()
    return [t.detach().clone() for t in out], grads_of(model)


def grads_of(model: nn.Module) -> Grads:
    named = [(name.replace("_orig_mod.", "").removeprefix("module."), p.grad) for name, p in model.named_parameters()]
    whole = [(name, g.full_tensor() if hasattr(g, "full_tensor") else g) for name, g in named]
    return {name: None if g is None else g.clone() for name, g in whole}


def ratio(plain: Tensor | None, operated: Tensor | None) -> float | None:
    """The one factor that makes every bit of ``plain`` into ``operated``; factors in tests are powers of two."""
    if operated is None:
        return None
    assert plain is not None, "a gradient where there was none"
    assert plain.any(), "a plain gradient of zeros says nothing"
    k = int(plain.abs().argmax())
    factor = float(operated.flatten()[k] / plain.flatten()[k])
    assert torch.equal(operated, plain * factor), f"not one factor: {operated / plain}"
    return factor


def factors(plain: nn.Module, operated: nn.Module, *args: Any, **kwargs: Any) -> dict[str, float | None]:
    """The factor of each child's gradients, after a check that the forward is bit-identical."""
    y0, g0 = step(plain, *args, **kwargs)
    y1, g1 = step(operated, *args, **kwargs)
    assert len(y0) == len(y1)
    assert all(torch.equal(a, b) for a, b in zip(y0, y1, strict=True)), "the forward has changed"
    assert list(g0) == list(g1)
    found: dict[str, set[float | None]] = {}
    for name in g0:
        if g0[name] is not None:
            found.setdefault(name.rpartition(".")[0], set()).add(ratio(g0[name], g1[name]))
    assert all(len(one) == 1 for one in found.values()), found
    return {name: one.pop() for name, one in found.items()}


def snapshot(model: nn.Module) -> list[Any]:
    """Everything about a model that an exact undo gives back: classes by identity, each entry of a ``__dict__``."""
    rows: list[Any] = []
    for name, module in model.named_modules():
        held = {k: copy.copy(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()}
        rows.append((name, module, type(module), held))
    return rows


def assert_untouched(before: list[Any], model: nn.Module) -> None:
    after = snapshot(model)
    assert [row[0] for row in before] == [row[0] for row in after]
    for (name, module, cls, held), (_, module2, cls2, held2) in zip(before, after, strict=True):
        assert module is module2, name
        assert cls is cls2, name
        assert list(held) == list(held2), name
        for key, value in held.items():
            if isinstance(value, dict):
                assert list(value) == list(held2[key]), (name, key)
                assert all(value[k] is held2[key][k] for k in value), (name, key)
            else:
                assert value is held2[key] or value == held2[key], (name, key)
