"""What the tests of TorchScript patients share: models in four forms, references by hand, steps that are repeated."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from core_helpers import Net, leaves, seeded
from torch import Tensor, nn

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
STEPS = 5
"""The profiling executor compiles a graph anew after its first runs, its derivative too."""


def saved(model: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(model, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def traced(model: nn.Module, *args: Any) -> torch.jit.ScriptModule:
    return torch.jit.trace(model, args or (X,), check_trace=False)


FORMS: dict[str, Callable[..., torch.jit.ScriptModule]] = {
    "script": lambda m, *args: torch.jit.script(m),
    "script, saved": lambda m, *args: saved(torch.jit.script(m)),
    "trace": traced,
    "trace, saved": lambda m, *args: saved(traced(m, *args)),
}


class CallsBack(nn.Module):
    """A script of this calls Python, and cannot be saved."""

    @torch.jit.ignore
    def python(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.python(x)


class ByHand(torch.autograd.Function):
    """The value of ``value`` and ``factor`` times the gradient, or none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None, None


def by_hand(x: Any, factor: float | None = -0.5, fn: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    if isinstance(x, dict):
        return {key: by_hand(one, factor, fn) for key, one in x.items()}
    if isinstance(x, list | tuple):
        parts = [by_hand(one, factor, fn) for one in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    value = fn(x.detach())
    return value.clone() if factor is None else ByHand.apply(x, value, factor)


def hooked(
    model: nn.Module, paths: list[str], side: str = "output", operate: Callable[[Any], Any] = by_hand
) -> nn.Module:
    """A copy of an eager model with the operator at these places written in as hooks."""
    model = copy.deepcopy(model)
    for path in paths:
        module = model.get_submodule(path)
        if side == "output":
            module.register_forward_hook(lambda m, a, y: operate(y))
        else:
            module.register_forward_pre_hook(
                lambda m, a, k: (operate(a), {name: operate(one) for name, one in k.items()}), with_kwargs=True
            )
    return model


def step(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    out = list(leaves(model(*args, **kwargs)))
    sum((t.conj() * t).real.sum() for t in out if t.requires_grad).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return [t.detach().clone() for t in out], {name: None if g is None else g.clone() for name, g in grads.items()}


def same(model: nn.Module, other: nn.Module, *args: Any, steps: int = STEPS, **kwargs: Any) -> None:
    """Forward and every gradient of ``model`` are those of ``other``, in every step, to the last bit."""
    args = args or (X,)
    y0, g0 = step(other, *args, **kwargs)
    assert any(g is not None and g.any() for g in g0.values())
    for k in range(steps):
        y1, g1 = step(model, *args, **kwargs)
        assert len(y0) == len(y1)
        for a, b in zip(y0, y1, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride(), k
        assert g0.keys() == g1.keys()
        for name, g in g0.items():
            there = g1[name]
            assert (g is None and there is None) or (g is not None and there is not None and torch.equal(g, there)), (
                k,
                name,
            )


def whole(model: nn.Module) -> nn.Module:
    """Parameters that are small integers: no sum of theirs rounds, in whichever order the compiled code adds it up."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-2, 3, p.shape, generator=generator))
    return model


def net() -> nn.Module:
    return seeded(Net)
