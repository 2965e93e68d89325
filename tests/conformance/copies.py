"""Copies of a model: traces, pickles, files, averages."""

import copy
import io
import pickle

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.optim.swa_utils import AveragedModel

from .nets import Patient
from .outcome import NotApplicableError, Outcome, step
from .tools import tool

COPIES = "Copies and traces"


@tool(COPIES, "eager")
def plain(patient: Patient, x: Tensor) -> Outcome:
    return step(patient.operated(), x)


@tool(COPIES, "eval mode")
def evaluated(patient: Patient, x: Tensor) -> Outcome:
    return step(patient.operated().eval(), x)


@tool(COPIES, "fx.symbolic_trace")
def traced(patient: Patient, x: Tensor) -> Outcome:
    return step(symbolic_trace(patient.operated()), x)


@tool(COPIES, "fx.symbolic_trace twice")
def traced_twice(patient: Patient, x: Tensor) -> Outcome:
    return step(symbolic_trace(symbolic_trace(patient.operated())), x)


@tool(COPIES, "GraphModule pickled")
def graph_module_pickled(patient: Patient, x: Tensor) -> Outcome:
    return step(pickle.loads(pickle.dumps(symbolic_trace(patient.operated()))), x)


@tool(COPIES, "GraphModule deepcopied")
def graph_module_copied(patient: Patient, x: Tensor) -> Outcome:
    return step(copy.deepcopy(symbolic_trace(patient.operated())), x)


@tool(COPIES, "copy.copy")
def shallow(patient: Patient, x: Tensor) -> Outcome:
    return step(copy.copy(patient.operated()), x)


@tool(COPIES, "copy.deepcopy")
def deep(patient: Patient, x: Tensor) -> Outcome:
    return step(copy.deepcopy(copy.deepcopy(patient.operated())), x)


@tool(COPIES, "pickle")
def pickled(patient: Patient, x: Tensor) -> Outcome:
    return step(pickle.loads(pickle.dumps(patient.operated())), x)


def _through_file(what: object, weights_only: bool) -> object:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


@tool(COPIES, "torch.save of the module")
def saved_whole(patient: Patient, x: Tensor) -> Outcome:
    model = _through_file(patient.operated(), weights_only=False)
    assert isinstance(model, nn.Module)
    return step(model, x)


def _emptied(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@tool(COPIES, "state_dict, weights_only")
def saved_state(patient: Patient, x: Tensor) -> Outcome:
    state = _through_file(patient.operated().state_dict(), weights_only=True)
    model = _emptied(patient.operated())
    model.load_state_dict(state)  # type: ignore[arg-type]
    return step(model, x)


@tool(COPIES, "load_state_dict(assign=True)")
def assigned(patient: Patient, x: Tensor) -> Outcome:
    model = _emptied(patient.operated())
    model.load_state_dict(patient.operated().state_dict(), assign=True)
    return step(model, x)


@tool(COPIES, "state_dict of the untouched model")
def plain_state(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    own = set(model.state_dict()) - set(patient.bare().state_dict())
    if own:
        raise NotApplicableError("the transform has state of its own, which the untouched model lacks")
    _emptied(model).load_state_dict(patient.bare().state_dict(), strict=True)
    return step(model, x)


@tool(COPIES, "timm ModelEmaV3")
def ema(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    average = ModelEmaV3(model, decay=0.5)
    average.update(model, step=1)
    return step(average.module.requires_grad_(), x)


@tool(COPIES, "AveragedModel")
def averaged(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    average = AveragedModel(model)
    average.update_parameters(model)
    average.update_parameters(model)
    return step(average, x)


@tool(COPIES, "shared twin (inplace=False)")
def twin(patient: Patient, x: Tensor) -> Outcome:
    if patient.is_layer:
        raise NotApplicableError("a layer is not inserted")
    import gradsurgery as gs

    model = gs.insert_scale_gradient(patient.operated(), "head", 1.0, inplace=False)
    return step(model, x)


@tool(COPIES, "make_fx before dispatch")
def proxied(patient: Patient, x: Tensor) -> Outcome:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = patient.operated()
    names = dict(model.named_parameters())

    def run(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,))

    graph = make_fx(run, pre_dispatch=True)(names, x)
    return step(lambda x: graph(names, x), x, model)


@tool(COPIES, "to another dtype and back")
def moved(patient: Patient, x: Tensor) -> Outcome:
    return step(patient.operated().double().half().float(), x)


@tool(COPIES, "to_empty from meta, then loaded")
def emptied(patient: Patient, x: Tensor) -> Outcome:
    state = patient.operated().state_dict()
    model = patient.operated().to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    return step(model, x)
