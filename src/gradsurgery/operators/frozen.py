"""Call a function on a tensor so that gradients pass through it to the tensor and stop before its own parameters."""

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._torch import is_checkpointed, is_observed, replaced_parameters, saved_tensors_hooks
from ..errors import OperatorError
from .coefficient import name_of
from .formula import stopped_by_formula
from .values import map_tensors

__all__ = ["call_frozen", "modules_of"]


class _Caller(nn.Module):
    """A function and the modules it calls, as the one module that ``functional_call`` asks for."""

    def __init__(self, fn: Callable[..., Any], modules: list[nn.Module]) -> None:
        super().__init__()
        self.fn = fn
        self.called = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def modules_of(fn: Any) -> Iterator[nn.Module]:
    """The modules that ``fn`` is, is bound to, or holds in a partial or a closure."""
    if isinstance(fn, nn.Module):
        yield fn
    elif isinstance(fn, partial):
        for held in (fn.func, *fn.args, *fn.keywords.values()):
            yield from modules_of(held)
    elif isinstance(fn, types.MethodType):
        yield from modules_of(fn.__self__)
    elif isinstance(fn, types.FunctionType):
        for cell in fn.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # a variable that is assigned later
                continue
            if held is not fn:
                yield from modules_of(held)


def call_frozen(fn: Callable[..., Any], x: Tensor) -> Any:
    """``fn(x)`` on detached parameters, and on copies of the buffers, so that running statistics stay as they are."""
    if is_observed() or not torch.is_grad_enabled():
        return _called(fn, x)
    before, hooks = x.grad_fn, saved_tensors_hooks()
    y = _called(fn, x)
    map_tensors(lambda out: _refuse_leaks(fn, x, before, out, hooks), y)
    return y


def _called(fn: Callable[..., Any], x: Tensor) -> Any:
    modules = list(modules_of(fn))
    learns = any(p.requires_grad for module in modules for p in module.parameters())
    # A BatchNorm whose parameters are frozen goes on updating its statistics, which then is a surprise.
    counts = any(buffers_in_training(module) for module in modules)
    if not learns and not counts:
        return fn(x)
    caller = fn if isinstance(fn, nn.Module) else _Caller(fn, modules)
    # Each parameter once, under its first name: functional_call follows the ties.
    held = {name: _stopped(p) for name, p in caller.named_parameters()}
    if counts:
        held |= {name: buffer.clone() for name, buffer in caller.named_buffers()}
    if not torch.jit.is_tracing() and not _is_scripted(caller):
        return functional_call(caller, held, (x,))
    swapped = None if _is_scripted(caller) else replaced_parameters(caller, held)
    if swapped is None:
        what, cure = "parameters that require grad", "requires_grad_(False) on them"
        if not learns:
            what, cure = "buffers that it changes in training mode", "eval() on it"
        there = [name for name, _ in (caller.named_parameters() if learns else caller.named_buffers())]
        raise OperatorError(
            f"frozen_transform was asked for fn={name_of(fn)} as a scripted module or under torch.jit.trace. "
            f"It has {what}: {', '.join(there[:5])}; torch cannot replace them there. "
            f"Call {cure} before scripting or tracing."
        )
    with swapped:
        return fn(x)


def _is_scripted(caller: nn.Module) -> bool:
    return any(isinstance(part, torch.jit.ScriptModule) for part in caller.modules())


def buffers_in_training(fn: nn.Module) -> bool:
    """Whether a module is in training mode and has buffers that a forward may then change."""
    return any(part.training and any(True for _ in part.buffers(recurse=False)) for part in fn.modules())


def _stopped(parameter: Tensor) -> Tensor:
    if torch.compiler.is_exporting() and not torch.onnx.is_in_onnx_export():
        # run_decompositions makes nothing of a detach, in silence; of this it makes an error at the first backward.
        return stopped_by_formula(parameter)
    return parameter.detach()


def _refuse_leaks(fn: Callable[..., Any], x: Tensor, before: Any, y: Tensor, hooks: Any) -> None:
    """Refuse when a leaf other than ``x`` is reached from ``y`` without passing ``x``, now or in a recomputation."""
    seen = {before, None}
    waiting = [y.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not x:
            there = f"a parameter of shape {tuple(leaf.shape)} that fn reads past its modules"
            remedy = "Pass the module that owns it as fn, or let fn read its .detach()."
        elif is_checkpointed(node, hooks):
            there = "activation checkpointing inside fn, which would run again in backward with the parameters unfrozen"
            remedy = "Turn it off inside fn, or checkpoint around the frozen transform."
        else:
            waiting.extend(following for following, _ in node.next_functions)
            continue
        raise OperatorError(
            f"frozen_transform was asked to keep gradients from the parameters of fn={name_of(fn)}. "
            f"There is {there}. {remedy}"
        )
