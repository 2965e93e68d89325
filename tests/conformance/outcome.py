"""What a tool gives back, and the one comparison of it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Outcome = dict[str, Any]
"""The output and every gradient by name. A gradient of None is none at all, which zeros are not."""

NAMES = ("enc.weight", "plain.fc.weight", "seq.0.weight", "seq.1.weight", "head.weight")


class NotApplicableError(Exception):
    """There is nothing here that could be right or wrong."""


class NotRunError(Exception):
    """This machine lacks what the cell needs."""


def rows() -> Tensor:
    return torch.tensor([[1.0], [-0.5]])


def loss_of(out: Tensor) -> Tensor:
    if out.is_complex():
        return out.real.square().sum() + 2 * out.imag.square().sum()
    return out.square().sum()


def step(
    run: Callable[..., Tensor], x: Tensor, model: nn.Module | None = None, loss: Callable[[Tensor], Tensor] = loss_of
) -> Outcome:
    """One training step: the output, the gradient of the input and those of the parameters."""
    model = run if model is None else model  # type: ignore[assignment]
    assert model is not None
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    out = run(x)
    if out.requires_grad:
        loss(out).backward()
    return {"output": out.detach(), "x": x.grad, **gradients(model)}


def gradients(model: nn.Module) -> Outcome:
    """By the name that a parameter has in the bare net."""
    return {plain_name(name): p.grad for name, p in model.named_parameters()}


def plain_name(name: str) -> str:
    for prefix in ("_checkpoint_wrapped_module.", "_orig_mod.", "module.", "model."):
        name = name.replace(prefix, "")
    return name


def whole(value: Any) -> Any:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach() if isinstance(value, Tensor) else value


def assert_right(found: Outcome, right: Outcome) -> None:
    """Equal bit for bit; a parameter that only the operated model has is one of a transform, and gets no gradient."""
    for name, value in right.items():
        assert name in found, f"{name} is missing: {list(found)}"
        about = name.startswith("about ") and value is not None
        equal = torch.allclose(found[name], value) if about else same(found[name], value)
        assert equal, f"{name} is {found[name]}, and {value} is right"
    for name in found.keys() - right.keys():
        assert found[name] is None or not found[name].any(), f"{name} of the transform got {found[name]}"


def same(found: Any, right: Any) -> bool:
    if isinstance(right, Mapping):
        return all(same(found[key], value) for key, value in right.items())
    if not isinstance(right, Tensor):
        return bool(found == right)
    found, right = whole(found), whole(right)
    if not isinstance(found, Tensor) or found.dtype != right.dtype:
        return False
    if right.is_nested:
        return same(found.values(), right.values())
    if right.layout is not torch.strided or found.layout is not torch.strided:
        found, right = found.to_dense(), right.to_dense()
    return torch.equal(found, right)
