"""What passes a place of a ScriptModule: nested values, elements, arguments, several returns, other dtypes."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple  # noqa: UP035 - the forms that TorchScript reads

import pytest
import torch
from script_helpers import by_hand, hooked, same, saved, whole
from torch import Tensor, nn

import gradsurgery as gs

pytestmark = pytest.mark.usefixtures("scripting")


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)


class InTuple(Parts):
    def forward(self, x: Tensor) -> Tuple[Tensor, int, Tuple[Tensor, Tensor]]:  # noqa: UP006
        return self.a(x), 3, (self.b(x), x.argmax(1))


class InNamedTuple(Parts):
    def forward(self, x: Tensor) -> Pair:
        return Pair(self.a(x), self.b(x))


class InList(Parts):
    def forward(self, x: Tensor) -> List[Tensor]:  # noqa: UP006
        return [self.a(x), self.b(x), x.argmax(1)]


class InDict(Parts):
    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        return {"a": self.a(x), "b": self.b(x)}


class Maybe(Parts):
    def forward(self, x: Tensor) -> Tuple[Optional[Tensor], Optional[Tensor]]:  # noqa: UP006, UP045
        return self.a(x) if x.ndim == 2 else None, None


class Returns(Parts):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return self.b(x)
        if x.ndim == 4:
            return x
        return self.a(x)


class Root(nn.Module):
    """``before`` has to differ by what passes ``m``, of which there are two of one type."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.before, self.m, self.n = nn.Linear(3, 3), make(), make()
        whole(self)

    def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
        x = self.before(x)
        return self.m(x), self.n(x)


X = torch.randint(-2, 3, (4, 3), generator=torch.Generator().manual_seed(1)).float()


def first(y: Any) -> Any:
    return (by_hand(y[0]), *y[1:])


def inner(y: Any) -> Any:
    return y[0], y[1], (by_hand(y[2][0]), y[2][1])


VALUES: list[tuple[Any, str, Any]] = [
    (InTuple, "m", by_hand),
    (InTuple, "m[0]", first),
    (InTuple, "m[-1]", inner),
    (InTuple, "m[2][0]", inner),
    (InNamedTuple, "m", by_hand),
    (InNamedTuple, "m[1]", lambda y: Pair(y.left, by_hand(y.right))),
    (InList, "m", by_hand),
    (InDict, "m", by_hand),
    (Maybe, "m", lambda y: (by_hand(y[0]), None)),
    (Maybe, "m[0]", lambda y: (by_hand(y[0]), None)),
    (Returns, "m", by_hand),
    (lambda: nn.Sequential(Returns(), nn.Sequential()), "m", by_hand),
    (lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Sequential(Returns(), nn.Identity())), "m", by_hand),
]


@pytest.mark.parametrize(("make", "at", "operate"), VALUES, ids=[f"{k} {v[1]}" for k, v in enumerate(VALUES)])
@pytest.mark.parametrize("file", [False, True], ids=["memory", "file"])
def test_nested_values(make: Any, at: str, operate: Any, file: bool) -> None:
    eager = Root(make)
    model = torch.jit.script(eager)
    plain = model.m.code
    if file:
        model = saved(model)
    gs.insert_grl(model, at, 0.5)
    other = hooked(eager, ["m"], operate=operate)
    same(model, other, X)
    same(saved(model), other, X)
    gs.insert_grl(model, at, 0.5)
    gs.remove(model, at)
    same(model, eager, X)
    if not file:
        assert model.m.code == plain


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(
        self,
        x: Tensor,
        memory: Optional[Tensor] = None,  # noqa: UP045
        scale: float = 2.0,
        pair: Optional[Tuple[Tensor, Tensor]] = None,  # noqa: UP006, UP045
    ) -> Tensor:
        y = self.fc(x) * scale
        if memory is not None:
            y = y + memory
        return y


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.m, self.n = nn.Linear(3, 3), Takes(), Takes()
        whole(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.m(x, memory=x * 2) + self.n(x, scale=1.0) + self.m(x, x * 4, 0.5)


RECEIVED: list[tuple[str, list[int]]] = [("m[0]", [0]), ("m['x']", [0]), ("m['memory']", [1]), ("m[1]", [1])]


@pytest.mark.parametrize(("at", "which"), RECEIVED)
def test_one_argument(at: str, which: list[int]) -> None:
    eager = Gives()
    model = gs.insert_grl(torch.jit.script(eager), at, 0.5, side="input")
    other = Gives()

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        args = tuple(by_hand(one) if k in which else one for k, one in enumerate(args))
        return args, {name: by_hand(one) if 1 in which and name == "memory" else one for name, one in kwargs.items()}

    other.m.register_forward_pre_hook(before, with_kwargs=True)
    same(model, other, X)
    gs.insert_grl(model, at, 0.5, side="input")
    assert len(gs.operations(model)) == 2
    gs.remove(model, "m" + at[1:])
    same(model, eager, X)


def test_every_argument_needs_types_that_can_be_reached() -> None:
    model = torch.jit.script(Gives())
    with pytest.raises(gs.CaptureError, match="'m' was asked for, whose value has the type Optional"):
        gs.insert_grl(model, "m", side="input")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("convert", [torch.jit.script, lambda m: torch.jit.trace(m, X.to(m.weight.dtype))])
def test_dtypes(dtype: torch.dtype, convert: Any) -> None:
    torch.manual_seed(0)
    eager = nn.Linear(3, 3, dtype=dtype)
    model = gs.insert_grl(convert(eager), "", 0.5)
    same(model, hooked(eager, [""], operate=lambda y: _by_hand_complex(y)), X.to(dtype))


def _by_hand_complex(y: Tensor) -> Tensor:
    z = y.clone()
    z.register_hook(lambda g: g * -0.5)
    return z


def test_values_without_a_gradient() -> None:
    class Index(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1)

    model = gs.insert_grl(torch.jit.script(nn.Sequential(nn.Linear(3, 3), Index())), "1")
    with pytest.raises(torch.jit.Error, match="holds no floating-point or complex tensor"):
        model(X)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    model = gs.insert_grl(torch.jit.script(frozen), "")
    for _ in range(3):
        assert torch.equal(model(X), frozen(X)) and not model(X).requires_grad
        with torch.no_grad():
            assert torch.equal(model(X), frozen(X))


def test_strides_of_a_value_are_kept() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(0, 1)

    model = gs.insert_stop_gradient(torch.jit.script(nn.Sequential(nn.Linear(3, 3), Turned())), "1")
    for _ in range(5):
        assert model(X).stride() == (1, 3)
