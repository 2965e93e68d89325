"""DDP, FSDP2 and tensor parallel in two processes, and the replicas of DataParallel."""

import atexit
import importlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsurgery as gs

from .nets import PLACES, Patient
from .outcome import NotApplicableError, Outcome, assert_right, step, whole
from .tools import tool

DISTRIBUTED = "Distributed"


# --- two processes that stay, and run one cell after another ---------------------------------------------------------


class Pair:
    """Two processes; both run a function on a patient, each with its own row of the batch."""

    def __init__(self) -> None:
        self.pipes: list[Any] = []

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn = torch.multiprocessing.get_context("spawn")
        for rank in range(2):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, port, there), daemon=True)
            process.start()
            atexit.register(process.kill)
            self.pipes.append(here)

    def run(self, what: str, patient: Patient) -> Outcome:
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            pipe.send((what, patient.operator, patient.place))
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(120):
                raise RuntimeError("one of the two processes gave no answer")
            answers.append(pipe.recv())
        for kind, value in answers:
            if kind == "not applicable":
                raise NotApplicableError(value)
            if kind == "wrong":
                raise AssertionError(value)
            if kind == "error":
                raise RuntimeError(value)
        return {f"rank {rank}": value for rank, (_, value) in enumerate(answers)}


pair = Pair()


def _serve(rank: int, port: int, pipe: Any) -> None:
    import warnings

    warnings.simplefilter("ignore")
    importlib.import_module(f"{__package__}.parallel")  # it registers what runs here too
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    while True:
        try:
            what, operator, place = pipe.recv()
        except EOFError:
            return
        torch._dynamo.reset()
        try:
            found = WRAPPED[what](Patient(operator, place), _row(rank))
            answer = ("found", {name: _plain(value) for name, value in found.items()})
        except NotApplicableError as reason:
            answer = ("not applicable", str(reason))
        except AssertionError as error:
            answer = ("wrong", str(error))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        pipe.send(answer)
        dist.barrier()


def _plain(value: Any) -> Any:
    return value.clone() if isinstance(value := whole(value), Tensor) else value


def _row(rank: int) -> Tensor:
    return torch.tensor([[1.0], [-0.5]])[rank : rank + 1]


def _mean(patient: Patient, x: Tensor) -> Outcome:
    """Two steps by hand, the gradients of the parameters averaged."""
    found = [step(patient.by_hand(), _row(rank)) for rank in range(2)]
    mean = {
        name: None if one is None else (one + found[1][name]) / 2
        for name, one in found[0].items()
        if name not in ("output", "x")
    }
    return {f"rank {rank}": {"output": one["output"], "x": one["x"], **mean} for rank, one in enumerate(found)}


WRAPPED: dict[str, Callable[[Patient, Tensor], Outcome]] = {}


def wrapped(name: str, cost: str = "cheap") -> Callable[[Callable[[Patient, Tensor], Outcome]], None]:
    def register(run: Callable[[Patient, Tensor], Outcome]) -> None:
        WRAPPED[name] = run
        tool(DISTRIBUTED, name, right=_mean, cost=cost)(lambda patient, x: pair.run(name, patient))

    return register


# --- the wrappers ----------------------------------------------------------------------------------------------------


def _ddp(model: nn.Module, **options: Any) -> nn.Module:
    if not any(p.requires_grad for p in model.parameters()):
        raise NotApplicableError("nothing is trained")
    return DistributedDataParallel(model, **options)


def _sharded(model: nn.Module) -> nn.Module:
    if not isinstance(model, torch.fx.GraphModule):  # a trace has dissolved the children, whose forwards never run
        for child in (model.enc, model.plain, model.head):
            fully_shard(child)  # type: ignore[arg-type]
    return fully_shard(model)


def not_root(patient: Patient) -> None:
    if patient.place == "root" and patient.operator in ("StopGradient", "DetachedTransform"):
        raise NotApplicableError("the output of the model has no gradient to begin with")


@wrapped("DDP, unused parameters found")
def ddp(patient: Patient, x: Tensor) -> Outcome:
    not_root(patient)
    model = _ddp(patient.operated(), find_unused_parameters=True)
    step(model, x)
    return step(model, x)


@wrapped("DDP")
def ddp_plain(patient: Patient, x: Tensor) -> Outcome:
    if patient.operator in ("StopGradient", "StraightThrough", "FrozenTransform", "DetachedTransform"):
        raise NotApplicableError("some parameters get no gradient, for which DDP asks for find_unused_parameters=True")
    model = _ddp(patient.operated())
    step(model, x)
    return step(model, x)


@wrapped("DDP, static_graph")
def ddp_static(patient: Patient, x: Tensor) -> Outcome:
    not_root(patient)
    model = _ddp(patient.operated(), static_graph=True)
    step(model, x)
    return step(model, x)


@wrapped("DDP, gradient as bucket view")
def ddp_view(patient: Patient, x: Tensor) -> Outcome:
    not_root(patient)
    model = _ddp(patient.operated(), find_unused_parameters=True, gradient_as_bucket_view=True)
    return step(model, x)


def _between(wrap: Callable[[nn.Module], Any], patient: Patient, x: Tensor) -> Outcome:
    """Wrap, step, operate, step, remove, step, operate, step."""
    if patient.is_layer:
        raise NotApplicableError("a layer is not inserted")
    if patient.operator in ("StraightThrough", "FrozenTransform", "DetachedTransform"):
        with pytest.raises(gs.SurgeryError, match="before wrapping"):
            patient.operate(wrap(patient.bare()))
        patient = _Stateless(patient.operator, patient.place)
    not_root(patient)
    model = wrap(patient.bare())
    untouched = step(model, x)
    for _ in range(2):
        patient.operate(model)
        found = step(model, x)
        gs.remove(model)
        assert_right(step(model, x), untouched)
    return found


class _Stateless(Patient):
    """The transforms with their factor as a number, which a wrapper has no part in."""

    def operate(self, model: nn.Module) -> nn.Module:
        _, address, side = PLACES[self.place]
        backward = {"StraightThrough": "straight_through", "FrozenTransform": "frozen", "DetachedTransform": "none"}
        return gs.insert_transform(model, address, _halved, backward[self.operator], side=side)  # type: ignore[arg-type]


def _halved(x: Tensor) -> Tensor:
    return x * x * 0.5


@wrapped("DDP, operated between steps")
def ddp_between(patient: Patient, x: Tensor) -> Outcome:
    return _between(lambda model: _ddp(model, find_unused_parameters=True), patient, x)


@wrapped("DDP compiled, aot_eager", cost="dear")
def ddp_compiled(patient: Patient, x: Tensor) -> Outcome:
    not_root(patient)
    model = _ddp(patient.operated(), find_unused_parameters=True)
    return step(torch.compile(model, backend="aot_eager"), x, model)


@wrapped("FSDP2, operated before")
def fsdp_before(patient: Patient, x: Tensor) -> Outcome:
    not_root(patient)
    return step(_sharded(patient.operated()), x)


@wrapped("FSDP2, operated between steps")
def fsdp_between(patient: Patient, x: Tensor) -> Outcome:
    return _between(_sharded, patient, x)


@wrapped("FSDP2 compiled, aot_eager", cost="dear")
def fsdp_compiled(patient: Patient, x: Tensor) -> Outcome:
    not_root(patient)
    model = fully_shard(patient.operated())
    return step(torch.compile(model, backend="aot_eager"), x, model)


@wrapped("FSDP2, operated after compile", cost="dear")
def fsdp_live(patient: Patient, x: Tensor) -> Outcome:
    return _between(lambda model: torch.compile(fully_shard(model), backend="aot_eager"), patient, x)
