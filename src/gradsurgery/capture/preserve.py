"""Running a model without leaving a trace: what a forward can change is put back as it was."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def preserved(root: nn.Module) -> Iterator[None]:
    """Context manager: classes, attributes, buffers, frozen parameters and random states are as before at the end.

    What is put back by value are tensors that no optimizer trains (running statistics, codebooks, caches), and the
    contents of plain lists, dicts and sets. A forward that writes to a parameter under training is not undone.
    """
    modules = list(root.modules())
    classes = [type(module) for module in modules]
    contents = [_Contents(module.__dict__) for module in modules]
    tensors = [(tensor, tensor.detach().clone()) for tensor in _state(modules)]
    streams = _random_states()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in tensors:
                if not torch.equal(tensor.detach(), value):
                    tensor.detach().copy_(value)
        for module, cls, content in zip(modules, classes, contents, strict=True):
            content.restore()
            object.__setattr__(module, "__class__", cls)
        _restore_random_states(streams)


class _Contents:
    """The contents of a container and of the containers in it."""

    def __init__(self, container: Any, seen: set[int] | None = None) -> None:
        seen = set() if seen is None else seen
        seen.add(id(container))
        self.container = container
        self.items = dict(container) if isinstance(container, dict) else list(container)
        values: Iterable[Any] = self.items.values() if isinstance(self.items, dict) else self.items
        inner = [value for value in values if isinstance(value, dict | list | set) and id(value) not in seen]
        self.inner = [_Contents(value, seen) for value in inner]

    def restore(self) -> None:
        now = self.container.items() if isinstance(self.container, dict) else self.container
        before = self.items.items() if isinstance(self.items, dict) else self.items
        if len(now) != len(before) or any(not _is_same(a, b) for a, b in zip(now, before, strict=True)):
            self.container.clear()
            getattr(self.container, "extend" if isinstance(self.container, list) else "update")(self.items)
        for content in self.inner:
            content.restore()


def _is_same(a: Any, b: Any) -> bool:
    return (a[0] is b[0] and a[1] is b[1]) if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == 2 else a is b


def _state(modules: list[nn.Module]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        plain = [v for v in module.__dict__.values() if isinstance(v, torch.Tensor)]
        frozen = [p for p in module._parameters.values() if p is not None and not p.requires_grad]
        for tensor in (*plain, *frozen, *(b for b in module._buffers.values() if b is not None)):
            if not tensor.is_meta and not nn.parameter.is_lazy(tensor):
                found[id(tensor)] = tensor
    return list(found.values())


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state() if numpy else None


def _restore_random_states(states: tuple[Any, ...]) -> None:
    cpu, cuda, python, numpy = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
