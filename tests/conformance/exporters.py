"""torch.export and the two ONNX exporters."""

import io
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from .compilers import through_sizes
from .nets import Patient
from .outcome import NotApplicableError, NotRunError, Outcome, step
from .tools import Handwritten, tool

EXPORT = "torch.export"
ONNX = "ONNX"


def _program(patient: Patient, x: Tensor, strict: bool = False, dynamic: bool = False) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("batch", min=2)},) if dynamic else None
    return torch.export.export(patient.operated(), (x,), dynamic_shapes=shapes, strict=strict)


@tool(EXPORT, "export", cost="dear")
def loose(patient: Patient, x: Tensor) -> Outcome:
    return step(_program(patient, x).module(), x)


@tool(EXPORT, "export, strict", cost="dear")
def strict(patient: Patient, x: Tensor) -> Outcome:
    return step(_program(patient, x, strict=True).module(), x)


@tool(EXPORT, "export, dynamic batch", cost="dear")
def dynamic(patient: Patient, x: Tensor) -> Outcome:
    model = _program(patient, x, dynamic=True).module()
    return through_sizes(model, model, patient, x)


@tool(EXPORT, "export, trained", right=None, cost="dear")
def trained(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated().double()
    x = x.double()
    if not isinstance(patient, Handwritten):
        model = torch.export.export(model, (x,)).module()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    # One step: the products of a second one have more bits than a double, and are rounded in the order of a graph.
    step(model, x)
    optimizer.step()
    return step(model, x)


@tool(EXPORT, "export, saved and loaded", cost="dear")
def saved(patient: Patient, x: Tensor) -> Outcome:
    buffer = io.BytesIO()
    torch.export.save(_program(patient, x), buffer)
    buffer.seek(0)
    return step(torch.export.load(buffer).module(), x)


@tool(EXPORT, "export, run_decompositions", cost="dear")
def decomposed(patient: Patient, x: Tensor) -> Outcome:
    return step(_program(patient, x).run_decompositions().module(), x)


@tool(EXPORT, "export, unflatten", cost="dear")
def unflattened(patient: Patient, x: Tensor) -> Outcome:
    if patient.place == "GraphModule":
        raise NotApplicableError("torch cannot unflatten the program of an untouched GraphModule either")
    return step(torch.export.unflatten(_program(patient, x)), x)


@tool(EXPORT, "export, then compile", cost="dear")
def compiled(patient: Patient, x: Tensor) -> Outcome:
    torch._dynamo.reset()
    model: Any = _program(patient, x).module()
    return step(torch.compile(model, backend="aot_eager", fullgraph=True), x, model)


def _onnx(patient: Patient, x: Tensor, dynamo: bool) -> Outcome:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise NotRunError(f"{error.name} is not installed") from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    found: list[tuple[list[str], Tensor]] = []
    keeps = patient.operator in ("GradientReversal", "ScaleGradient", "StopGradient", "MapGradient")
    models = [patient.operated(), patient.bare() if keeps else patient.by_hand()]
    for model in models:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            torch.onnx.export(model.eval(), (x,), path, dynamo=dynamo, verbose=False)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            nodes = [node.op_type for node in onnx.load(path).graph.node if node.op_type != "Constant"]
            found.append((nodes, torch.from_numpy(out)))
    (nodes, out), (untouched, _) = found
    if keeps:
        assert nodes == untouched, f"nodes {nodes}, and {untouched} without the operator"
    return {"output": out}


def _forward(patient: Patient, x: Tensor) -> Outcome:
    return {"output": patient.by_hand()(x).detach()}


@tool(ONNX, "onnx, dynamo", right=_forward, cost="slow")
def onnx_dynamo(patient: Patient, x: Tensor) -> Outcome:
    return _onnx(patient, x, dynamo=True)


@tool(ONNX, "onnx, TorchScript exporter", right=_forward, cost="dear")
def onnx_legacy(patient: Patient, x: Tensor) -> Outcome:
    return _onnx(patient, x, dynamo=False)
