"""One forward and backward of a subject, and what it left."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._reference import INPUT, Met, Value, is_real, leaves, mapped, objective, same_bits, seed_all
from .building import Inputs

Branch = Callable[[], Any]


@dataclasses.dataclass
class Left:
    """The output of a forward, and the gradients that its backward left."""

    output: Any
    gradients: dict[str, Value]

    def differing(self, other: "Left") -> list[str]:
        """The names whose gradients are not the same to the last bit."""
        if self.gradients.keys() != other.gradients.keys():
            return ["<the names of the parameters>"]
        return [name for name, value in self.gradients.items() if not same_bits(value, other.gradients[name])]

    def reached(self) -> set[str]:
        """The names that got a gradient."""
        return {name for name, value in self.gradients.items() if value is not None}


class Buffers:
    """The buffers of a model as they were, to be put back before every run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept = {name: value.detach().clone() for name, value in model.named_buffers()}

    def restore(self) -> None:
        for name, value in self.model.named_buffers():
            kept = self.kept.get(name)
            if kept is not None and kept.shape == value.shape and value.device.type != "meta":
                value.data.copy_(kept)


class Runner:
    """Runs one model again and again from the same state."""

    def __init__(self, model: nn.Module, train: Inputs, evaluate: Inputs, input_gradient: bool, device: str) -> None:
        self.model, self.buffers, self.device = model, Buffers(model), device
        self.inputs = {True: train, False: evaluate}
        self.input_gradient = input_gradient
        self.wanted: list[Tensor] = []

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a training forward, as ``example=`` takes them."""
        self.prepare(True)
        return self.inputs[True](self.device)

    def prepare(self, training: bool) -> None:
        self.buffers.restore()
        self.model.train()
        self.model.train(training)  # by way of train(): some models cache attention biases in eval
        self.model.zero_grad(set_to_none=True)
        seed_all(3)

    def forward(self, training: bool = True) -> Any:
        """The output of the model, its floating inputs wanting a gradient in training."""
        self.prepare(training)
        args, kwargs = self.inputs[training](self.device)
        self.wanted = []
        if training and self.input_gradient:
            first = mapped(self._leaf, args[:1]) if args else ()
            args, kwargs = (*first, *args[1:]), mapped(self._leaf, kwargs)
        return self.model(*args, **kwargs)

    def _leaf(self, value: Tensor) -> Tensor:
        self.wanted.append(value.requires_grad_())
        return value.clone()  # some models write to what they are given

    def backward(self, output: Any, keep: bool = False) -> Left:
        """The gradients of a loss in which every element of the output counts differently."""
        for leaf in [*self.model.parameters(), *self.wanted]:
            leaf.grad = None
        loss = meta_objective(output) if self.device == "meta" else objective(output)
        loss.backward(retain_graph=keep)
        gradients: dict[str, Value] = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        gradients |= {f"{INPUT}{k}": leaf.grad for k, leaf in enumerate(self.wanted)}
        for leaf in self.model.parameters():
            leaf.grad = None
        return Left(mapped(Tensor.detach, output), gradients)

    def step(self) -> Left:
        return self.backward(self.forward())

    @torch.no_grad()
    def evaluated(self) -> Any:
        return self.forward(training=False)


def meta_objective(output: Any) -> Tensor:
    """A loss of every part of an output that has no values."""
    parts = [leaf.abs().sum() for leaf in leaves(output) if is_real(leaf) and leaf.requires_grad]
    return torch.stack([part.float() for part in parts]).sum()


# --- which modules run, and where a gradient goes -------------------------------------------------------------------


@dataclasses.dataclass
class Ended:
    """A module that ran: what it returned the first time, and whether a gradient came back to it."""

    value: Any
    versions: list[int]
    calls: int = 1
    reached: bool = False

    def changed(self) -> bool:
        """Whether somebody wrote to the value after the module had returned it."""
        return [leaf._version for leaf in leaves(self.value)] != self.versions


class Watch:
    """Notes, during one forward and backward, which modules end in which order and which get a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.ended: dict[str, Ended] = {}
        self.classes: dict[type, str] = {}
        self.model = model
        self.handles = [
            module.register_forward_hook(self._note(name), always_call=False)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def _note(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            self.classes.setdefault(type(module), name)
            if name in self.ended:
                self.ended[name].calls += 1
                return
            real = list(leaves(output))
            ended = self.ended[name] = Ended(output, [leaf._version for leaf in real])
            for leaf in real:
                if is_real(leaf) and leaf.requires_grad:
                    leaf.register_hook(lambda _gradient: setattr(ended, "reached", True))

        return hook

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def places(self) -> list[str]:
        """Modules below the root whose output gets a gradient, in the order in which they end; one for each place."""
        found: dict[str, str] = {}
        place = Met(self.model)
        for name, ended in self.ended.items():
            if name and ended.reached:
                found.setdefault(place(name), name)
        return list(found.values())

    def forget(self) -> None:
        """Let go of the values."""
        for ended in self.ended.values():
            ended.value = None
