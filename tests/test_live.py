"""Models in use: compiled, wrapped and sharded ones are operated on between two steps; others are refused."""

import copy
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_helpers import Net, chain, factors, seeded, step
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsurgery as gs

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
# Torch's own, where it wraps, shards or compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(FSDP|fully_shard|ShardedTensor|c10d|reduce_scatter|all_gather).*"),
    pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo reads it
]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    torch._dynamo.reset()


BEFORE = {"stem": 1.0, "blocks.0.fc": 1.0, "blocks.0.norm": 1.0, "blocks.1.fc": 1.0, "blocks.1.norm": 1.0, "head": 1.0}


def expected(factor: float, up_to: str) -> dict[str, float]:
    order = list(BEFORE)
    return {name: factor if order.index(name) <= order.index(up_to) else 1.0 for name in order}


def live(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Two steps around each act: surgery, a new coefficient, undo, and again."""
    plain, model = wrap(seeded()), wrap(seeded())
    names = [n for n, _ in model.named_parameters()]
    assert factors(plain, model, X) == expected(1.0, "stem")
    for _ in range(2):
        assert gs.insert_grl(model, "blocks", 0.5) is model
        assert factors(plain, model, X) == expected(-0.5, "blocks.1.norm")
        gs.operations(model)[0].operator.lambd = 2.0
        assert factors(plain, model, X) == expected(-2.0, "blocks.1.norm")
        gs.insert_scale_gradient(model, "head", 4, side="input")
        assert factors(plain, model, X) == expected(-8.0, "blocks.1.norm")
        with gs.disabled(model):
            assert factors(plain, model, X) == expected(1.0, "stem")
        assert [o.address for o in gs.operations(model)] == ["blocks", "head"]
        gs.remove(model, "head")
        assert factors(plain, model, X) == expected(-2.0, "blocks.1.norm")
        gs.insert_stop_gradient(model, "stem")
        assert factors(plain, model, X)["stem"] is None
        gs.remove(model)
        assert factors(plain, model, X) == expected(1.0, "stem")
    assert [n for n, _ in model.named_parameters()] == names
    assert [s.address for s in gs.sites(model)] == [s.address for s in gs.sites(seeded())]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compiled_child(model: Any) -> nn.Module:
    model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
    return model


def compiled_child_in_place(model: Any) -> nn.Module:
    model.blocks.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
        compiled_in_place,
        compiled_child,
        compiled_child_in_place,
    ],
    ids=["compile", "model.compile", "a compiled child", "a child compiled in place"],
)
def test_compiled(wrap: Callable[[nn.Module], nn.Module]) -> None:
    live(wrap)


@pytest.mark.parametrize(
    "at",
    ["stem", "blocks.0", "", pytest.param("head", id="its input")],
)
def test_operated_first_and_compiled_then(at: str) -> None:
    side = "input" if at == "head" else "output"
    plain, model = seeded(), gs.insert_grl(seeded(), at, 0.5, side=side)
    assert factors(plain, torch.compile(model, backend="aot_eager", fullgraph=True), X) == factors(plain, model, X)


def test_a_new_coefficient_compiles_once_more_at_most() -> None:
    compiles = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal compiles
        compiles += 1
        return graph

    plain = seeded()
    model = torch.compile(gs.insert_grl(seeded(), "blocks", 0.5), backend=backend, fullgraph=True)
    for lambd in (0.5, 1.0, 2.0, 4.0, 8.0, 0.25):
        gs.operations(model)[0].operator.lambd = lambd
        assert factors(plain, model, X) == expected(-lambd, "blocks.1.norm")
    assert compiles <= 2


def test_an_operator_with_state_in_a_compiled_model() -> None:
    class OwnLoop(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    plain, model = seeded(lambda: OwnLoop(*chain(nn.Tanh()))), seeded(lambda: OwnLoop(*chain(nn.Tanh())))
    gs.insert_transform(plain, "", lambda v: v * 2)
    model = torch.compile(model, backend="aot_eager", fullgraph=True)
    model(X)
    gs.insert_transform(model, "", lambda v: v * 2)
    y0, g0 = step(plain, X)
    y1, g1 = step(model, X)
    assert torch.equal(y0[0], y1[0])
    assert all(torch.equal(g0[n], g1[n]) for n in g0)


# --- wrapped and sharded ---------------------------------------------------------------------------------------------


def sharded(model: Any) -> nn.Module:
    for part in (model.stem, *model.blocks, model.head):
        fully_shard(part)
    return fully_shard(model)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)  # a stop-gradient leaves some unused


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": ddp,
    "FSDP2": sharded,
    "compiled DDP": lambda m: torch.compile(ddp(m), backend="aot_eager"),
    "DDP of compiled": lambda m: ddp(torch.compile(m, backend="aot_eager")),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped(name: str) -> None:
    live(WRAPPED[name])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPED)
def test_operated_first_and_wrapped_then(name: str) -> None:
    plain, model = seeded(), WRAPPED[name](gs.insert_grl(seeded(), "blocks", 0.5))
    assert factors(plain, model, X) == expected(-0.5, "blocks.1.norm")
    gs.operations(model)[0].operator.lambd = 2.0
    assert factors(plain, model, X) == expected(-2.0, "blocks.1.norm")
    gs.remove(model)
    assert factors(plain, model, X) == expected(1.0, "stem")
    gs.insert_grl(model, "stem", 0.5)
    assert factors(plain, model, X) == expected(-0.5, "stem")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPED)
def test_a_transform_with_parameters_is_refused_where_a_wrapper_owns_them(name: str) -> None:
    model = WRAPPED[name](seeded())
    types = [type(module) for module in model.modules()]
    for operator in (gs.FrozenTransform(nn.Linear(4, 4)), nn.BatchNorm1d(4, affine=False)):
        with pytest.raises(gs.SurgeryError, match=r"parameters or buffers.*before wrapping"):
            gs.insert(model, "blocks", operator)
    assert [type(module) for module in model.modules()] == types
    gs.insert_transform(model, "blocks", lambda v: v * 1)  # without state it is welcome
    assert factors(WRAPPED[name](seeded()), model, X) == expected(1.0, "stem")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPED)
def test_a_twin_of_a_wrapped_model_is_refused(name: str) -> None:
    with pytest.raises(gs.SurgeryError, match="inplace=False"):
        gs.insert_grl(WRAPPED[name](seeded()), "stem", inplace=False)


def two(rank: int, store: str) -> None:
    """One of two processes, each with its own half of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    for wrap in (DistributedDataParallel, sharded):
        plain, model = wrap(seeded()), wrap(seeded())
        for _ in range(2):
            gs.insert_grl(model, "blocks", 0.5)
            assert factors(plain, model, x) == expected(-0.5, "blocks.1.norm")
            gs.operations(model)[0].operator.lambd = 2.0
            assert factors(plain, model, x) == expected(-2.0, "blocks.1.norm")
            gs.remove(model)
            assert factors(plain, model, x) == expected(1.0, "stem")
        del plain, model
    dist.barrier()
    time.sleep(0.5)  # the other one may still be reading
    # All is checked. Ending the interpreter in the ordinary way lets gloo's threads abort it now and then.
    os._exit(0)


def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(two, (str(tmp_path / "store"),), nprocs=2)


# --- refused ---------------------------------------------------------------------------------------------------------


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], list[str]]] = {
    "DataParallel": (nn.DataParallel, ["DataParallel", "model.module", "before wrapping"]),
    "FSDP1": (fsdp1, ["FSDP1", "before wrapping", "fully_shard"]),
    "ExportedProgram": (lambda m: torch.export.export(m, (X,)), ["ExportedProgram", "program.module()"]),
}


@pytest.mark.usefixtures("alone", "scripting")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, words = REFUSED[name]
    model = make(seeded(Net))
    for call in (lambda m: gs.insert_grl(m, "stem"), gs.operations, gs.sites, gs.remove):
        with pytest.raises(gs.SurgeryError) as caught:
            call(model)
        assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.usefixtures("alone", "scripting")
def test_a_script_in_ddp_is_operated_on_through_the_wrapper() -> None:
    plain, model = (DistributedDataParallel(torch.jit.script(seeded(Net))) for _ in range(2))
    assert gs.insert_grl(model, "stem", 0.5) is model
    for factor in (-0.5, 1.0):
        for net in (plain, model):
            net.zero_grad()
            net(X).square().sum().backward()
        for (name, right), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(found.grad, (factor if "stem" in name else 1.0) * right.grad), name
        if factor != 1.0:
            gs.remove(model)


def test_replicas_of_data_parallel_share_no_graft_with_a_later_edit() -> None:
    model = gs.insert_grl(seeded(), "stem", 0.5)
    replicated = model.stem._replicate_for_data_parallel()
    gs.remove(model)
    assert [p.operator.lambd for p in [copy.copy(o) for o in gs.operations(nn.Sequential(replicated))]] == [0.5]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("at", ["stem", "blocks", "blocks.0", ""])
def test_fully_shard_takes_in_the_parameters_of_an_operator(at: str) -> None:
    def operated() -> nn.Module:
        width = 2 if at == "" else 4
        torch.manual_seed(0)
        own = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        return gs.insert(gs.insert_transform(seeded(), at, nn.Linear(width, width), "frozen"), at, own)

    plain, model = operated(), sharded(operated())
    named = dict(model.named_parameters())
    assert len(named) == len(list(plain.parameters()))
    assert {type(p).__name__ for p in named.values()} == {"DTensor"}
    y0, g0 = step(plain, X)
    y1, g1 = step(model, X)
    assert torch.equal(y0[0], y1[0])
    assert sum(g is None for g in g0.values()) == 2  # those of the frozen transform
    for name, grad in g0.items():
        assert (g1[name] is None) if grad is None else torch.equal(g1[name], grad), name
