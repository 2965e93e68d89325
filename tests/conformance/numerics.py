"""Dtypes, layouts and sizes, and the modes without gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from .nets import Factor, Patient, conv
from .outcome import Outcome, step
from .tools import tool

NUMERICS = "Numerics and modes"


def _autocast(dtype: torch.dtype) -> Callable[[Patient, Tensor], Outcome]:
    def run(patient: Patient, x: Tensor) -> Outcome:
        model = patient.operated()
        x = x / 16  # within the range of float16, also squared

        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                out: Tensor = model(x)
            assert out.dtype == dtype
            return out

        return step(forward, x, model)

    return run


tool(NUMERICS, "autocast bfloat16", right=None)(_autocast(torch.bfloat16))
tool(NUMERICS, "autocast float16", right=None)(_autocast(torch.float16))


def _as(dtype: torch.dtype) -> Callable[[Patient, Tensor], Outcome]:
    return lambda patient, x: step(patient.operated().to(dtype), x.to(dtype) / 16)


for _dtype in (torch.float64, torch.float16, torch.bfloat16):
    tool(NUMERICS, str(_dtype).removeprefix("torch."), right=None)(_as(_dtype))


@tool(NUMERICS, "complex64", right=None)
def complex64(patient: Patient, x: Tensor) -> Outcome:
    model = patient.of(Factor).operated().to(torch.complex64)
    return step(model, torch.complex(x, x.flip(0)))


@tool(NUMERICS, "channels_last", right=None)
def channels_last(patient: Patient, x: Tensor) -> Outcome:
    model = patient.of(conv).operated().to(memory_format=torch.channels_last)
    x = torch.arange(16.0).view(2, 2, 2, 2).sub(4).div(4).to(memory_format=torch.channels_last)
    found = step(model, x)
    assert found["output"].is_contiguous(memory_format=torch.channels_last)
    return found


@tool(NUMERICS, "zero-size", right=None)
def zero_size(patient: Patient, x: Tensor) -> Outcome:
    return step(patient.operated(), x[:0])


@tool(NUMERICS, "0-dim", right=None)
def zero_dim(patient: Patient, x: Tensor) -> Outcome:
    return step(patient.of(Factor).operated(), torch.tensor(0.5))


@tool(NUMERICS, "0-dim bfloat16", right=None)
def zero_dim_bfloat16(patient: Patient, x: Tensor) -> Outcome:
    return step(patient.of(Factor).operated().bfloat16(), torch.tensor(0.5, dtype=torch.bfloat16))


@tool(NUMERICS, "nested, jagged", right=None)
def jagged(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()

    def run(x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(x, offsets=torch.tensor([0, 1, 2]))
        out: Tensor = model(nested)
        assert out.is_nested
        return out.values()

    return step(run, x, model)


@tool(NUMERICS, "nested, strided", right=None)
def nested(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()

    def run(x: Tensor) -> Tensor:
        out: Tensor = model(torch.nested.as_nested_tensor([x[:1], x], layout=torch.strided))
        assert out.is_nested
        return torch.nested.to_padded_tensor(out, 0.0)

    return step(run, x, model)


@tool(NUMERICS, "sparse COO", right=None)
def sparse(patient: Patient, x: Tensor) -> Outcome:
    # The layers of the net scale by a number: a gradient with respect to a dense factor is more than torch has.
    model = patient.of(_Constant).operated()

    def run(x: Tensor) -> Tensor:
        out: Tensor = model(x.to_sparse())
        assert out.is_sparse
        return out.to_dense()

    return step(run, x, model)


class _Constant(torch.nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.factor = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@tool(NUMERICS, "inference_mode, then a step")
def inference(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    with torch.inference_mode():
        out = model(x)
    found = step(model, x)
    assert torch.equal(out, found["output"])
    return found


@tool(NUMERICS, "no_grad, then a step")
def no_grad(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    with torch.no_grad():
        out = model(x)
    found = step(model, x)
    assert torch.equal(out, found["output"])
    assert not out.requires_grad
    return found


@tool(NUMERICS, "default device and dtype modes")
def modes(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    with torch.device("cpu"):
        return step(model, x)


@tool(NUMERICS, "anomaly detection")
def anomaly(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    with torch.autograd.set_detect_anomaly(True):
        return step(model, x)


@tool(NUMERICS, "flop counter and dispatch modes")
def dispatch(patient: Patient, x: Tensor) -> Outcome:
    from torch.utils.flop_counter import FlopCounterMode

    model = patient.operated()
    with FlopCounterMode(display=False):
        return step(model, x)
