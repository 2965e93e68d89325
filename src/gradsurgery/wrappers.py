"""Objects that wrap a model: seen through where the model inside can be operated on live, refused where it cannot."""

from typing import Any

import torch
from torch import nn

from ._torch import is_fsdp2, wrapped_attribute
from .errors import SurgeryError

__all__ = ["HOLDER", "bare", "child", "children", "owns_parameters", "refuse_compiled", "refuse_scripted", "walk"]

HOLDER = "gradsurgery"
"""The child of a ``GraphModule`` that holds the operators of its graph."""


def bare(model: Any) -> nn.Module:
    """The model that the user wrote, inside ``torch.compile``, DDP and activation-checkpoint wrappers.

    Raises:
        SurgeryError: where ``model`` is no module, or a wrapper whose inside must be operated on before it is made.
    """
    _refuse(model)
    while (attribute := wrapped_attribute(model)) is not None:
        model = getattr(model, attribute)
        _refuse(model)
    return model


def refuse_scripted(module: nn.Module | None, path: str) -> None:
    """Refuse a part of a model that TorchScript has compiled.

    Raises:
        SurgeryError: where ``module`` is a ``ScriptModule``.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise SurgeryError(
            f"{path!r} is, or is inside of, a TorchScript module, which is operated on by itself: give that module as "
            "the model, with the address of the place in it."
        )


def refuse_compiled(root: nn.Module, asked: str, instead: str) -> None:
    """Refuse what cannot be done with a model that TorchScript has compiled.

    Raises:
        SurgeryError: where ``root`` is a ``ScriptModule``.
    """
    if isinstance(root, torch.jit.ScriptModule):
        raise SurgeryError(f"{asked} was asked for of a ScriptModule, whose forward is compiled. {instead}")


def owns_parameters(model: nn.Module) -> str | None:
    """The name of a wrapper that has taken in the set of parameters and would not notice a new one."""
    module: nn.Module = model
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return "DistributedDataParallel"
        if (attribute := wrapped_attribute(module)) is None:
            break
        module = getattr(module, attribute)
    return "fully_shard (FSDP2)" if any(is_fsdp2(child) for child in module.modules()) else None


def walk(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under every name it has, wrappers left out of the names, in registration order.

    ``nn.Module.named_modules`` would show a compiled child as ``layer3._orig_mod``; here it is ``layer3``.
    """
    found: list[tuple[str, nn.Module]] = []
    _walk("", root, set(), found)
    return found


def child(module: nn.Module, name: str) -> nn.Module | None:
    """The child of that name as the user knows it, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    found = module._modules.get(name)
    while found is not None and (attribute := wrapped_attribute(found)) is not None:
        found = getattr(found, attribute)
    return found


def children(module: nn.Module) -> list[str]:
    """The names of the children as the user knows them: without the operators."""
    hidden = _operators_of(module)
    return [name for name in module._modules if name not in hidden] if hidden else list(module._modules)


def _walk(path: str, module: nn.Module, above: set[int], found: list[tuple[str, nn.Module]]) -> None:
    found.append((path, module))
    if isinstance(module, torch.jit.ScriptModule):
        return
    above.add(id(module))
    prefix = f"{path}." if path else ""
    for name in children(module):
        inner = child(module, name)
        if inner is not None and id(inner) not in above:
            _walk(prefix + name, inner, above, found)
    above.remove(id(module))


def _operators_of(module: nn.Module) -> frozenset[str]:
    graft = module.__dict__.get("_gs_graft")
    names = graft.operators if graft is not None else frozenset()
    return names | {HOLDER} if isinstance(module, torch.fx.GraphModule) else names


def _refuse(model: Any) -> None:
    if isinstance(model, nn.DataParallel):
        raise SurgeryError(
            "the model is wrapped in nn.DataParallel, which copies it anew for every forward. "
            "Operate on model.module before wrapping, or use DistributedDataParallel, which is operated on live."
        )
    if type(model).__name__ == "FullyShardedDataParallel":
        raise SurgeryError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which has replaced its parameters. "
            "Operate on the bare model before wrapping it, or use torch.distributed.fsdp.fully_shard (FSDP2), "
            "which is operated on live."
        )
    if isinstance(model, torch.export.ExportedProgram):
        raise SurgeryError("the model is an ExportedProgram, which is no module. Operate on program.module().")
    if not isinstance(model, nn.Module):
        raise SurgeryError(
            f"the model is {_described(model)}. Give an nn.Module, a torch.fx.GraphModule, a torch.jit.ScriptModule, "
            "or one of these compiled or wrapped in DistributedDataParallel or fully_shard."
        )


def _described(model: Any) -> str:
    if isinstance(model, type):
        return f"the class {model.__name__}, not an instance of it"
    if isinstance(model, dict):
        return "a dict (a state_dict has no forward; build the model and load it)"
    return f"of type {type(model).__name__}, not an nn.Module"
