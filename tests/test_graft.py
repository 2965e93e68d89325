"""The graft on classes of every kind, its copies, and other tools that change a module's class or forward."""

import abc
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import Net, assert_untouched, chain, factors, seeded, snapshot, step
from torch import Tensor, nn

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
MIDDLE = {"0": -0.5, "2": 1.0}


class Meta(type):
    made = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        Meta.made += 1
        return super().__call__(*args, **kwargs)


class WithMeta(nn.Tanh, metaclass=Meta):
    pass


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class Concrete(Abstract):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Registered(nn.Tanh):
    registry: dict[str, type] = {}  # noqa: RUF012

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Registered.registry[cls.__name__] = cls


class Leaf(Registered):
    pass


class NeedsOption(nn.Tanh):
    def __init_subclass__(cls, *, option: int, **rest: Any) -> None:
        super().__init_subclass__(**rest)


class GivesOption(NeedsOption, option=3):
    pass


class Slotted(nn.Tanh):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.extra = 3


class Locked(nn.Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["locked"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("locked"):
            raise AttributeError(f"{name} is locked")
        super().__setattr__(name, value)


class Forwarding(nn.Module):
    """Answers for anything, by asking the module inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Agreeable(nn.Tanh):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name.startswith("_") else None


class Equal(nn.Tanh):
    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0


class NewNeedsArguments(nn.Tanh):
    def __new__(cls, kind: str) -> "NewNeedsArguments":
        return super().__new__(cls)

    def __init__(self, kind: str) -> None:
        super().__init__()

    def __getnewargs__(self) -> tuple[str]:
        return ("kind",)


class Getstate(nn.Tanh):
    def __init__(self) -> None:
        super().__init__()
        self.cache = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.cache = threading.Lock()


class OwnState(nn.Tanh):
    """Saves what it needs to make itself anew, and nothing else."""

    def __getstate__(self) -> dict[str, Any]:
        return {"made": "anew"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()


class Reduce(nn.Tanh):
    def __reduce__(self) -> Any:
        return Reduce, ()


class ReduceWithState(nn.Tanh):
    def __reduce__(self) -> Any:
        return ReduceWithState, (), self.__dict__


class Deepcopy(nn.Tanh):
    def __deepcopy__(self, memo: dict[int, Any]) -> "Deepcopy":
        memo[id(self)] = again = type(self)()
        return again


class DeepcopyOfDict(nn.Tanh):
    def __deepcopy__(self, memo: dict[int, Any]) -> "DeepcopyOfDict":
        again = type(self).__new__(type(self))
        memo[id(self)] = again
        again.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return again


class OwnCopy(nn.Tanh):
    def __copy__(self) -> "OwnCopy":
        return OwnCopy()


KINDS: list[Callable[[], nn.Module]] = [
    WithMeta, Concrete, Leaf, GivesOption, Slotted, Locked, Forwarding, Agreeable, Equal,
    lambda: NewNeedsArguments("kind"), Getstate, OwnState, Reduce, ReduceWithState, Deepcopy, DeepcopyOfDict, OwnCopy,
]  # fmt: skip


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def pickled_as_of_old(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model, protocol=0))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replica(model: nn.Module) -> nn.Module:
    """As nn.DataParallel copies a model for another device."""
    again = model._replicate_for_data_parallel()
    del again.__dict__["_is_replica"]  # its only use is a warning
    again._modules = {name: replica(child) for name, child in model._modules.items()}
    again._parameters = dict(model._parameters)
    again._buffers = dict(model._buffers)
    return again


def by_copy(model: nn.Module) -> nn.Module:
    again = copy.copy(model)
    again._modules = {name: copy.copy(child) for name, child in model._modules.items()}
    return again


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "pickle, protocol 0": pickled_as_of_old,
    "torch.save": saved,
    "replica": replica,
    "copy": by_copy,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("with_state", [False, True], ids=["coefficient", "child"])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_kind_of_class(make: Callable[[], nn.Module], how: str, with_state: bool) -> None:
    if how == "replica" and isinstance(make(), Locked | NewNeedsArguments):
        return  # torch itself cannot
    plain, model = chain(make()), chain(make())
    before, registry = snapshot(model), dict(Registered.registry)
    gs.insert_grl(model, "1", 0.5)
    if with_state:
        gs.insert(model, "1", nn.Identity())
    assert Registered.registry == registry
    assert isinstance(model[1], type(plain[1]))
    assert factors(plain, model, X) == MIDDLE
    made = Meta.made
    again = COPIES[how](model)
    assert Meta.made == made  # a copy is not built
    assert factors(plain, again, X) == MIDDLE
    assert [type(o.operator) for o in gs.operations(again)] == [gs.GradientReversal, nn.Identity][: 1 + with_state]
    if how not in ("copy", "replica"):
        gs.operations(again)[0].operator.lambd = 4.0
        assert factors(plain, again, X) == {"0": -4.0, "2": 1.0}
        assert factors(plain, model, X) == MIDDLE
        gs.remove(again)
        assert type(again[1]) is type(plain[1])
        assert factors(plain, again, X) == {"0": 1.0, "2": 1.0}
    assert factors(plain, model, X) == MIDDLE
    model.zero_grad()
    gs.remove(model)
    assert_untouched(before, model)


def test_calling_the_type_builds_the_plain_class() -> None:
    model = gs.insert_grl(seeded(), ["", "stem", "blocks.0"])
    for module, cls in ((model, Net), (model.stem, nn.Linear)):
        assert type(module) is not cls
        built = type(module)() if module is model else type(module)(2, 3)
        assert type(built) is cls
        assert "_gs_graft" not in built.__dict__
    assert isinstance(model.stem, type(nn.Linear(1, 1)))


def test_one_class_serves_all_instances_with_coefficients_of_their_own() -> None:
    model, plain = seeded(), seeded()
    gs.insert_grl(model, "blocks.0", 0.5)
    gs.insert_grl(model, "blocks.1", 4.0)
    first, second = model.blocks
    assert type(first) is type(second)
    assert factors(plain, model, X)["blocks.0.fc"] == 2.0
    assert factors(plain, model, X)["blocks.1.fc"] == -4.0
    gs.insert_grl(model, "blocks.1", 4.0)
    assert type(first) is not type(second)
    gs.insert_grl(model, "blocks.0", 2.0)
    assert type(first) is type(second)


def test_nothing_holds_on_to_an_instance() -> None:
    model = gs.insert_transform(gs.insert_grl(seeded(), ["", "stem"]), "stem", nn.Identity())
    step(model, X)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_pickle_is_read_in_a_process_that_starts_anew(tmp_path: Any) -> None:
    model = gs.insert_grl(chain(nn.Tanh()), "1", 0.5)
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; m = torch.load(sys.argv[1], weights_only=False); x = torch.ones(1, 3);"
        "m(x).sum().backward(); print(m[0].weight.grad.sum().item())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True, check=True
    ).stdout
    plain = chain(nn.Tanh())
    plain(torch.ones(1, 3)).sum().backward()
    assert float(out) == plain[0].weight.grad.mul(-0.5).sum().item()
