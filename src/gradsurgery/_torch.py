"""Every name of torch that may go: what wraps a module, and what other tools put on its class."""

from torch import nn

_WRAPPERS = {"OptimizedModule": "_orig_mod", "CheckpointWrapper": "_checkpoint_wrapped_module"}


def wrapped_attribute(module: object) -> str | None:
    """The attribute under which a wrapper holds the module that it wraps, or None for a module that is no wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "module"
    # By name, since importing the compiler costs a second and nothing is compiled where it was never imported.
    for cls in type(module).__mro__:
        if (attribute := _WRAPPERS.get(cls.__name__)) is not None and cls.__module__.startswith("torch."):
            return attribute
    return None


def is_fsdp2(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to this very module."""
    return _is_fsdp_class(type(module))


def is_overlay(cls: type) -> bool:
    """Whether torch made this class for instances it changed (``parametrize``, ``fully_shard``), on top of the user's."""
    if cls.__name__.startswith("Parametrized") and cls.__module__ == "torch.nn.utils.parametrize":
        return True
    return _is_fsdp_class(cls) and cls.__name__.startswith("FSDP") and cls.__name__ != "FSDPModule"


def _is_fsdp_class(cls: type) -> bool:
    return any(base.__name__ == "FSDPModule" and base.__module__.startswith("torch.") for base in cls.__mro__)
