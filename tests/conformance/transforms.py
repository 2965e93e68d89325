"""torch.func, forward-mode AD and derivatives of higher order."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from .nets import Patient
from .outcome import NotApplicableError, Outcome, plain_name
from .tools import Handwritten, tool

FUNC = "torch.func and higher orders"


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def _loss(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda parameters, x: functional_call(model, parameters, (x,)).square().sum()


def _named(grads: dict[str, Tensor], **more: Tensor) -> Outcome:
    return {**{plain_name(name): g for name, g in grads.items()}, **more}


@tool(FUNC, "functional_call", right=None)
def called(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    parameters = {name: p.requires_grad_() for name, p in _parameters(model).items()}
    loss = _loss(model)(parameters, x)
    if loss.requires_grad:
        loss.backward()
    return _named({name: p.grad for name, p in parameters.items()}, loss=loss.detach())  # type: ignore[misc]


@tool(FUNC, "func.grad", right=None)
def grad(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    grads, dx = torch.func.grad(_loss(model), argnums=(0, 1))(_parameters(model), x)
    return _named(grads, x=dx)


@tool(FUNC, "func.vmap, then backward", right=None)
def vmap(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    x = x.clone().requires_grad_()
    out = torch.func.vmap(model)(x[:, None])
    if out.requires_grad:
        out.square().sum().backward()
    return _named({name: p.grad for name, p in model.named_parameters()}, x=x.grad, output=out.detach())


@tool(FUNC, "func.vmap of grad", right=None)
def vmap_grad(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    grads, dx = torch.func.vmap(torch.func.grad(_loss(model), argnums=(0, 1)), in_dims=(None, 0))(
        _parameters(model), x[:, None]
    )
    return _named(grads, x=dx)


@tool(FUNC, "func.vjp", right=None)
def vjp(patient: Patient, x: Tensor) -> Outcome:
    out, pull = torch.func.vjp(patient.operated(), x)
    return {"output": out, "x": pull(torch.tensor([[2.0], [1.0]]))[0]}


@tool(FUNC, "func.jvp", right=None)
def jvp(patient: Patient, x: Tensor) -> Outcome:
    out, tangent = torch.func.jvp(patient.operated(), (x,), (torch.tensor([[2.0], [1.0]]),))
    return {"output": out, "tangent": tangent}


@tool(FUNC, "func.jacrev", right=None)
def jacrev(patient: Patient, x: Tensor) -> Outcome:
    return {"jacobian": torch.func.jacrev(patient.operated())(x)}


@tool(FUNC, "func.jacfwd", right=None)
def jacfwd(patient: Patient, x: Tensor) -> Outcome:
    return {"jacobian": torch.func.jacfwd(patient.operated())(x)}


@tool(FUNC, "func.hessian", right=None)
def hessian(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    return {"hessian": torch.func.hessian(lambda x: model(x).square().sum())(x)}


@tool(FUNC, "func.linearize", right=None)
def linearize(patient: Patient, x: Tensor) -> Outcome:
    out, push = torch.func.linearize(patient.operated(), x)
    return {"output": out, "tangent": push(torch.tensor([[2.0], [1.0]]))}


@tool(FUNC, "forward-mode AD", right=None)
def forward_mode(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.tensor([[2.0], [1.0]])))
        primal, tangent = forward_ad.unpack_dual(out)
    return {"output": primal.detach(), "tangent": torch.zeros_like(primal) if tangent is None else tangent.detach()}


def _orders(model: nn.Module, x: Tensor, order: int) -> Outcome:
    leaves: dict[str, Tensor] = {"x": x.clone().requires_grad_(), **dict(model.named_parameters())}
    value: Tensor = model(leaves["x"]).square().sum()
    found: dict[str, Any] = {}
    for k in range(order):
        if not value.requires_grad:
            raise NotApplicableError("nothing differentiable is left of this order")
        grads = torch.autograd.grad(value, list(leaves.values()), create_graph=True, allow_unused=True)
        found[str(k)] = _named(dict(zip(leaves, grads, strict=True)))  # type: ignore[arg-type]
        value = sum(g.square().sum() for g in grads if g is not None)  # type: ignore[assignment]
    own = [name for name in found["0"] if name.endswith(("fn.weight",))]
    for order_found in found.values():
        for name in own:
            assert order_found.pop(name) is None
    return found


@tool(FUNC, "double backward", right=None)
def double(patient: Patient, x: Tensor) -> Outcome:
    return _orders(patient.operated(), x, 2)


@tool(FUNC, "triple backward", right=None)
def triple(patient: Patient, x: Tensor) -> Outcome:
    # Small enough that the third order is still exact.
    return _orders(patient.operated().double(), x.double() / 16, 3)


@tool(FUNC, "gradgradcheck", right=None)
def gradgradcheck(patient: Patient, x: Tensor) -> Outcome:
    if isinstance(patient, Handwritten):
        return {"consistent": True}
    model = patient.operated().double().requires_grad_(False)
    x = x.double().requires_grad_()
    if not model(x).requires_grad:
        raise NotApplicableError("nothing is differentiable")
    return {"consistent": torch.autograd.gradgradcheck(model, (x,))}


@tool(FUNC, "is_grads_batched", right=None)
def batched(patient: Patient, x: Tensor) -> Outcome:
    model = patient.operated()
    leaves = {"x": x.clone().requires_grad_(), **{n: p for n, p in model.named_parameters() if "fn." not in n}}
    out = model(leaves["x"])
    if not out.requires_grad:
        raise NotApplicableError("nothing is differentiable")
    vectors = torch.tensor([[[1.0], [0.0]], [[0.5], [2.0]]])
    grads = torch.autograd.grad(out, list(leaves.values()), vectors, is_grads_batched=True, allow_unused=True)
    return _named(dict(zip(leaves, grads, strict=True)))  # type: ignore[arg-type]
