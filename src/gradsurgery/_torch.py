"""Every private name of torch that the package uses, each behind one small function.

A name that is missing in another version of torch gets the safe answer, which each function states.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils import checkpoint

__all__ = [
    "archive_reader",
    "constant_to_dynamo",
    "in_backward",
    "is_asked_by_distributed",
    "is_checkpointed",
    "is_forward",
    "is_fsdp2",
    "is_held_once",
    "is_in_reverse",
    "is_observed",
    "is_overlay",
    "is_recorded_transform",
    "is_transformed",
    "pytree_node",
    "quiet_accumulation",
    "read_program",
    "replaced_parameters",
    "saved_tensors_hooks",
    "shown_to_dynamo",
    "without_wrappers",
    "wrapped_attribute",
]

Function = TypeVar("Function", bound=Callable[..., Any])

# What an eager operator asks at every call, looked up once and without the wrappers that some have for TorchScript: on
# a tiny tensor the asking is most of what an operator costs. Each has the safe answer where the name is missing.
_is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)
_are_transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_use_count: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda x: 0)
_count_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
try:
    # The key, since counting the modes that it stands for takes longer than all the other checks.
    _is_pre_dispatched = partial(torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch)
except AttributeError:
    _is_pre_dispatched = partial(bool, True)


def archive_reader(content: Any) -> Any:
    """The reader of export archives that torch itself uses; without one it is None, and nobody can look inside."""
    try:
        from torch.export.pt2_archive import PT2ArchiveReader
    except ImportError:
        return None
    return PT2ArchiveReader(content)


def constant_to_dynamo(fn: Function) -> Function:
    """Mark a function whose result Dynamo may take for a constant, as ``torch.compiler.assume_constant_result`` does.

    That imports the whole compiler, which costs seconds and needs numpy. Where the mark has another name, Dynamo traces
    the function, or refuses the graph.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def shown_to_dynamo(fn: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Let Dynamo trace another function in the place of a method, as for what ``torch.jit.script`` has compiled.

    Where the mark has another name, it traces the method itself.
    """
    fn._torchdynamo_inline = other  # type: ignore[attr-defined]


def read_program(content: Any) -> Any:
    """The program in an export archive that has been looked into, or None where there is no such reader.

    ``torch.export.load`` would go on to an older format, and unpickle, where this one raises.
    """
    try:
        from torch.export.pt2_archive._package import load_pt2
    except ImportError:
        return None
    return load_pt2(content).exported_programs.get("model")


def is_observed() -> bool:
    """Whether something looks at the single ops: a compiler, an exporter, a tracer, a function transform or forward AD.

    The safe answer is yes: the aten formula is right everywhere, only slower.
    """
    # An exporter says that it compiles, too.
    return is_compiling() or _is_tracing() or _are_transforms_active() or is_forward() or _is_proxied()


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or a level of forward AD is active; the safe answer is yes."""
    return _are_transforms_active() or is_forward()


def is_forward() -> bool:
    """Whether a level of forward AD is active, of its own or for ``torch.func.jvp``; the safe answer is yes."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_in_reverse() -> bool:
    """Whether every active transform differentiates in reverse or maps over a batch, and nothing records single ops.

    The safe answer is no.
    """
    if torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing() or _is_proxied():
        return False
    if is_forward():
        return False
    try:
        from torch._C import _functorch

        stack = _functorch.get_interpreter_stack() or []
        return all(level.key() in (_functorch.TransformType.Grad, _functorch.TransformType.Vmap) for level in stack)
    except (AttributeError, ImportError):
        return False


def is_recorded_transform() -> bool:
    """Whether ``make_fx`` records a transform or forward AD op by op, as ``torch.func.linearize`` has it do.

    The safe answer is no.
    """
    if torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing():
        return False
    return is_transformed() and _is_proxied()


def _is_proxied() -> bool:
    """Whether ``make_fx`` records; other dispatch modes (a flop counter, selective checkpointing) see no difference."""
    if _count_modes() == 0 and not _is_pre_dispatched():
        return False
    try:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
    except ImportError:
        return True
    return get_proxy_mode() is not None


def is_held_once(x: Tensor) -> bool:
    """Whether nothing but its Python object holds this tensor: no view has it for a base, no graph has saved it.

    The safe answer is no.
    """
    return _use_count(x) == 1


def pytree_node(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The children of a registered pytree node and how to build it from others; None when its type is not registered.

    None is the safe answer: a type that nobody can look into is refused when it holds tensors.
    """
    try:
        from torch.utils._pytree import SUPPORTED_NODES
    except ImportError:
        return None
    node = SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda others: node.unflatten_fn(others, context)


def replaced_parameters(module: nn.Module, tensors: dict[str, Tensor]) -> contextlib.AbstractContextManager[Any] | None:
    """Context manager in which a module has these tensors for parameters, also while ``torch.jit.trace`` records.

    None is the safe answer: ``torch.func.functional_call``, which is public, does not run under a trace.
    """
    try:
        from torch.nn.utils.stateless import _reparametrize_module
    except ImportError:
        return None
    return _reparametrize_module(module, tensors, tie_weights=True)


def saved_tensors_hooks() -> Any:
    """The pair of hooks that autograd now packs saved tensors with, or None."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False)
    except (AttributeError, TypeError):
        return None


def is_checkpointed(node: Any, outer: Any) -> bool:
    """Whether activation checkpointing will compute ``node`` again in backward, other than by the hooks ``outer``.

    There is no safe answer where the marks are missing; it is then no, and nothing else in torch can tell.
    """
    if "CheckpointFunction" in type(node).__name__:
        return True
    holder = getattr(checkpoint, "_Holder", ())
    for name in _saved_names(node.__class__):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            if isinstance(getattr(one, "data", None), holder) and (outer is None or one.unpack_hook is not outer[1]):
                return True
    return False


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


_WRAPPERS = {"OptimizedModule": "_orig_mod", "CheckpointWrapper": "_checkpoint_wrapped_module"}


def wrapped_attribute(module: object) -> str | None:
    """The attribute under which a wrapper holds the module that it wraps, or None for a module that is no wrapper."""
    cls: Any = type(module)
    return _wrapping_attribute(cls)


@lru_cache(maxsize=1024)  # asked for every module of a model
def _wrapping_attribute(cls: type[Any]) -> str | None:
    if issubclass(cls, nn.parallel.DistributedDataParallel):
        return "module"
    # By name, since importing the compiler costs a second and nothing is compiled where it was never imported.
    for base in cls.__mro__:
        if (attribute := _WRAPPERS.get(base.__name__)) is not None and base.__module__.startswith("torch."):
            return attribute
    return None


def without_wrappers(name: str) -> str:
    """The name of a parameter without the attributes of wrappers that lie on the way."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS.values())


def in_backward() -> bool:
    """Whether a backward is running on this thread; the safe answer is no: a recomputation then counts as a call."""
    graph_task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return graph_task is not None and graph_task() != -1


@contextlib.contextmanager
def quiet_accumulation(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context manager in which no hook runs when a gradient has arrived: an optimizer may be stepping there.

    Where torch has no such hooks under this name they run, which is what they do in any backward.
    """
    held = [(hooks, dict(hooks)) for leaf in leaves if (hooks := getattr(leaf, "_post_accumulate_grad_hooks", None))]
    try:
        for hooks, _ in held:
            hooks.clear()
        yield
    finally:
        for hooks, kept in held:
            hooks.update(kept)


def is_asked_by_distributed() -> bool:
    """Whether the caller of the generator that asks, or the one before, is code of ``torch.distributed``.

    ``fully_shard`` finds the modules whose parameters it takes in by their ``children()``; nothing else tells.
    """
    if torch.compiler.is_compiling():
        return False
    frame = sys._getframe(2)
    callers = [frame] if frame.f_back is None else [frame, frame.f_back]
    return any(caller.f_globals.get("__name__", "").startswith("torch.distributed.") for caller in callers)


def is_fsdp2(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to this very module; the safe answer is no."""
    return any(_is_fsdp_module(base) for base in type(module).__mro__)


def is_overlay(cls: type) -> bool:
    """Whether torch made this class for instances it changed (``parametrize``, ``fully_shard``), over the user's."""
    if cls.__name__.startswith("Parametrized") and cls.__module__ == "torch.nn.utils.parametrize":
        return True
    return any(_is_fsdp_module(base) for base in cls.__bases__)


def _is_fsdp_module(cls: type) -> bool:
    # By name, since importing it imports torch.distributed, which not every build of torch has.
    return cls.__name__ == "FSDPModule" and cls.__module__.startswith("torch.")
