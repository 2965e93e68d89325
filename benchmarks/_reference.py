"""The measure of every sweep: gradients, bits and identities, made by hand and without the package under test.

The reference of an operation is a forward hook that this file writes itself, on an independent copy of the network;
two results agree when every bit does. Bits need one thread: with two, torch's own backward differs between two runs.
"""

import copy
import dataclasses
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

torch.set_num_threads(1)

Call = Callable[[nn.Module], tuple[Any, dict[str, Tensor]]]
"""Runs a network on inputs of its own making: the output, and the input leaves whose gradient counts."""

INPUT = "<input>"


# --- values ---------------------------------------------------------------------------------------------------------


def is_real(value: Any) -> bool:
    """Whether a gradient can flow through this leaf at all."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def mapped(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``fn`` on each of its floating tensors, once on each, every container keeping its exact type."""
    done: dict[int, Tensor] = {}

    def go(value: Any) -> Any:
        if is_real(value):
            if id(value) not in done:
                done[id(value)] = fn(value)
            return done[id(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(go, value))
        if isinstance(value, (tuple, list)):
            return type(value)(map(go, value))
        if isinstance(value, MutableMapping):
            result = copy.copy(value)
            for key in list(result):
                result[key] = go(value[key])
            return result
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            result = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(result, field.name, go(getattr(value, field.name)))
            return result
        return value

    return go(value)


def leaves(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, MutableMapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))


def _bits(value: Tensor) -> Tensor:
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8)  # words compare four times as fast


Value = Tensor | bytes | None
"""A gradient or a buffer, or the digest of one."""


def digest(value: Value) -> Value:
    """Shape, dtype and every bit in a few bytes; of a large model several steps would not fit in memory."""
    if not isinstance(value, Tensor):
        return value
    return hashlib.sha1(_bits(value).numpy(), usedforsecurity=False).digest() + f"{value.dtype} {value.shape}".encode()


def same_bits(one: Value, other: Value) -> bool:
    """Equal shape, dtype and every bit; both None is equal too."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return digest(one) == digest(other)
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def same_output(one: Any, other: Any) -> bool:
    """Equal in type, structure, strides and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.stride() == other.stride() and same_bits(one, other)
    if isinstance(one, MutableMapping):
        return list(one) == list(other) and all(same_output(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same_output, one, other))
    if dataclasses.is_dataclass(one):
        return all(same_output(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return bool(one == other) or one is other


# --- the operation, by hand -----------------------------------------------------------------------------------------


def fresh(x: Tensor) -> Tensor:
    """The value of ``x`` in memory of its own, with the strides of ``x``."""
    holes = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    if holes:  # an expanded tensor cannot be written to in its own strides
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


class _Scaled(torch.autograd.Function):
    """The value of x in a fresh tensor; a gradient times ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return fresh(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def scaled(value: Any, factor: float) -> Any:
    """The hand-written operator of every reference, on each floating tensor of ``value``."""
    return mapped(lambda x: _Scaled.apply(x, factor), value)


class Met:
    """The place that every caller passes: for a plain Sequential its last child, for callers that walk it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.owners: dict[int, set[tuple[int, str]]] = {}
        for parent in model.modules():
            for name, child in parent.named_children():
                self.owners.setdefault(id(child), set()).add((id(parent), name))

    def __call__(self, path: str) -> str:
        module = self.model.get_submodule(path)
        while type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__ and len(module):
            name, child = list(module._modules.items())[-1]
            if child is None or len(self.owners[id(child)]) > 1:
                break
            path, module = f"{path}.{name}" if path else name, child
        return path


def met(model: nn.Module, path: str) -> str:
    """The place that every caller of the module at ``path`` passes."""
    return Met(model)(path)


def hooked(model: nn.Module, path: str, factor: float = -0.5) -> nn.Module:
    """``model`` with the reference operation at ``path``: one forward hook, written here."""
    place = model.get_submodule(met(model, path))
    place.register_forward_hook(lambda _module, _args, output: scaled(output, factor))
    return model


# --- one step -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """All that one forward and backward left."""

    output: Any
    gradients: dict[str, Value]
    buffers: dict[str, Value]

    def digested(self) -> "Step":
        """The same with digests in the place of gradients and buffers, which need memory no more."""
        gradients, buffers = ({k: digest(v) for k, v in kind.items()} for kind in (self.gradients, self.buffers))
        return Step(self.output, gradients, buffers)

    def gradient_faults(self, other: "Step") -> list[str]:
        """The names whose gradients differ."""
        if list(self.gradients) != list(other.gradients):
            return ["<order of named_parameters>"]
        return [name for name, value in self.gradients.items() if not same_bits(value, other.gradients[name])]

    def buffer_faults(self, other: "Step") -> list[str]:
        """The names whose buffers differ afterwards."""
        if list(self.buffers) != list(other.buffers):
            return ["<order of named_buffers>"]
        return [name for name, value in self.buffers.items() if not same_bits(value, other.buffers[name])]


def seed_all(seed: int) -> None:
    """One seed for every generator that a network may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def objective(output: Any) -> Tensor:
    """A loss in which every element of the output counts differently."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros(())
    for leaf in leaves(output):
        if is_real(leaf) and leaf.requires_grad:
            weight = torch.randn(leaf.shape, generator=generator).to(leaf.device)
            total = total + (leaf * weight.to(leaf.dtype)).sum().real.float()
    return total


def step(model: nn.Module, call: Call, training: bool, seed: int = 3) -> Step:
    """One forward and backward from cleared gradients, in the mode named and under one seed."""
    model.train()
    model.train(training)  # by way of train(): some models cache attention biases in eval, with their graph
    model.zero_grad(set_to_none=True)
    seed_all(seed)
    output, inputs = call(model)
    loss = objective(output)
    if loss.requires_grad:
        loss.backward()
    gradients: dict[str, Value] = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {f"{INPUT}{name}": leaf.grad for name, leaf in inputs.items()}
    detached = mapped(Tensor.detach, output)
    return Step(detached, gradients, {name: value.clone() for name, value in model.named_buffers()})


def enliven(model: nn.Module, seed: int = 11) -> nn.Module:
    """A little noise on every parameter, so that no zero-initialised scale hides a path from the comparison."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if is_real(parameter):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.02)
    return model


# --- places ---------------------------------------------------------------------------------------------------------


def places(model: nn.Module, call: Call) -> list[str]:
    """Paths of the modules that run and whose output gets a gradient, in the order in which they end."""
    names = {id(module): name for name, module in model.named_modules()}
    ended: dict[str, bool] = {}

    def on_end(module: nn.Module, _args: Any, output: Any) -> None:
        name = names[id(module)]
        ended.setdefault(name, False)
        for leaf in leaves(output):
            if is_real(leaf) and leaf.requires_grad:
                leaf.register_hook(lambda _gradient: ended.__setitem__(name, True))

    handles = [module.register_forward_hook(on_end) for module in model.modules()]
    step(model, call, training=False)
    for handle in handles:
        handle.remove()
    reached = [name for name, reaches in ended.items() if reaches]
    order = {name: index for index, name in enumerate(reached)}
    place = Met(model)
    walked = [name for name in names.values() if name not in order and order.get(place(name)) is not None]
    return sorted(reached + walked, key=lambda name: (order[place(name)], len(name)))


def spread(candidates: list[str], count: int, seed: str) -> list[str]:
    """``count`` places drawn under a seed, one from each of ``count`` equal parts: with 3, early, middle and late."""
    draw = random.Random(seed)
    bounds = [round(index * len(candidates) / count) for index in range(count + 1)]
    parts = [candidates[start:end] for start, end in itertools.pairwise(bounds)]
    return [draw.choice(part) for part in parts if part]
