"""Tensor parallel in two processes, and the replicas of DataParallel."""

from typing import Any

import torch
from torch import Tensor, nn

from .distributed import DISTRIBUTED, WRAPPED, not_root, pair
from .nets import Patient
from .outcome import NotApplicableError, Outcome, step
from .tools import tool

# --- tensor parallel: rows of one weight over two processes ----------------------------------------------------------


def wide(weight: float) -> nn.Module:
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.5], [0.0, 1.0]]) * weight)
    return layer


def _tensor_parallel(patient: Patient, x: Tensor) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    not_root(patient)
    if patient.place == "GraphModule":
        raise NotApplicableError("the plan addresses modules that a trace has dissolved")
    model = patient.of(wide).operated()
    plan = {"seq.0": ColwiseParallel(), "seq.1": RowwiseParallel(), "head": ColwiseParallel(use_local_output=True)}
    plan["head"] = ColwiseParallel(output_layouts=_replicated())
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return step(model, torch.tensor([[1.0, -0.5], [0.5, 1.0]]))


def _replicated() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _same_on_both(patient: Patient, x: Tensor) -> Outcome:
    found = step(patient.of(wide).by_hand(), torch.tensor([[1.0, -0.5], [0.5, 1.0]]))
    return {"rank 0": found, "rank 1": found}


WRAPPED["DTensor, tensor parallel"] = _tensor_parallel
tool(DISTRIBUTED, "DTensor, tensor parallel", right=_same_on_both, cost="dear")(
    lambda patient, x: pair.run("DTensor, tensor parallel", patient)
)


# --- replicas of DataParallel, which torch makes on devices that a CPU machine lacks ---------------------------------


def _replica(model: nn.Module) -> nn.Module:
    """As ``torch.nn.parallel.replicate``: shallow copies, whose parameters are copies that autograd knows."""
    made = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in made.items():
        replica._former_parameters = {}  # type: ignore[assignment]
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else made[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                copied = parameter * 1
                replica.__dict__[name] = copied
                replica._former_parameters[name] = copied  # type: ignore[index]
    return made[model]


@tool(DISTRIBUTED, "DataParallel replicas, imitated")
def replicas(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()

    def run(x: Tensor) -> Tensor:
        return torch.cat([_replica(model)(part) for part in x.split(1)])

    return step(run, x, model)
