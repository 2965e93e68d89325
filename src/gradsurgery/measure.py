"""One forward and one backward of a model that leave no trace: what came out, and what reached each parameter."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import quiet_accumulation, without_wrappers
from .capture.preserve import preserved
from .errors import CaptureError, OperatorError, SurgeryError
from .legacy import cure_of
from .operators.formula import private_copy
from .operators.values import map_tensors, tensors_in
from .wrappers import walk

__all__ = ["Bench", "Gradients", "Loss", "Step", "strided"]

Loss = Callable[[Any], Tensor]

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Step:
    """What one forward and one backward gave.

    Attributes:
        outputs: every tensor of the output, or None where its type cannot be looked into.
        loss: the value of the loss.
        gradients: of each parameter by name; None where none arrived.
    """

    outputs: list[Tensor] | None
    loss: float
    gradients: Gradients


class Bench:
    """A model under one loss on fixed inputs, to be measured again and again from the same state.

    Random streams, buffers, attributes and every ``.grad`` are as before after each step, also where it raises.

    Args:
        root: the bare model.
        args: the positional arguments of the forward.
        kwargs: the keyword arguments.
        loss: of the output; None is :func:`projection`.
    """

    def __init__(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss | None) -> None:
        self.root = root
        self._arguments = (args, kwargs)
        self._loss = loss
        self.parameters = {without_wrappers(name): p for name, p in self.root.named_parameters()}
        self.order: dict[int, int] = {}
        self.steps = 0
        lazy = [name for name, p in self.parameters.items() if nn.parameter.is_lazy(p)]
        if lazy:
            raise CaptureError(
                f"the gradients of a model were to be measured, but its parameters {', '.join(lazy[:3])} are still to "
                "be made by a first forward. Run the model once."
            )

    def step(self, share: float = 1.0, then: Callable[[], None] | None = None) -> Step:
        """One forward and the backward of ``share`` times the loss, after which ``then`` may go on with backward."""
        with (
            torch.inference_mode(False),
            preserved(self.root),
            self._watched(),
            quiet_accumulation(self.parameters.values()),
            _uncompiled(),
            torch.enable_grad(),
        ):
            args, kwargs = _fresh(self._arguments)
            output = self._forward(args, kwargs)
            loss, outputs = self._loss_of(output)
            with _set_aside([*self.parameters.values(), *_leaves(loss)]):
                self._backward(loss, share)
                if then is not None:
                    then()
                gradients = {name: _whole(p.grad) for name, p in self.parameters.items()}
        self.steps += 1
        return Step(outputs, float(loss.detach()), gradients)

    def outputs(self) -> list[Tensor] | None:
        """Every tensor of the output of one forward without gradients, or None where it cannot be looked into."""
        with preserved(self.root), _uncompiled(), torch.no_grad():
            args, kwargs = _fresh(self._arguments)
            tensors = _tensors(self._forward(args, kwargs))
            return None if tensors is None else [tensor.clone() for tensor in tensors]

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.root(*args, **kwargs)
        except SurgeryError:
            raise
        except Exception as error:
            raise CaptureError(
                f"in the forward that was to be measured the model raised {type(error).__name__}: {error}. "
                + cure_of(error, "Give inputs that the model takes as it is now (shape, dtype, device).")
            ) from error

    def _backward(self, loss: Tensor, share: float) -> None:
        if not loss.requires_grad:
            return
        try:
            # The graph is kept: the loss may hang on tensors that its caller still needs.
            loss.backward(torch.full_like(loss, share), retain_graph=True)
        except SurgeryError:
            raise
        except Exception as error:
            raise CaptureError(
                f"in the backward that was to be measured the model raised {type(error).__name__}: {error}. "
                "Check that model and loss train without this package; gs.disabled(model) shows it."
            ) from error

    def _loss_of(self, output: Any) -> tuple[Tensor, list[Tensor] | None]:
        tensors = _tensors(output)
        outputs = None if tensors is None else [tensor.detach().clone() for tensor in tensors]
        if self._loss is None:
            return projection(output, tensors), outputs
        try:
            loss = self._loss(output)
        except SurgeryError:
            raise
        except Exception as error:
            raise OperatorError(
                f"loss was asked for the loss of the output and raised {type(error).__name__}: {error}. The output is "
                f"{_described(output)}. Give a function of exactly that."
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise OperatorError(
                f"loss was asked for a scalar and returned {_described(loss)}. Let it reduce to one real "
                "floating-point number, with .mean() or .sum()."
            )
        return loss, outputs

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Note, in the first step, in which order the modules run."""
        if self.order:
            yield
            return

        def note(module: nn.Module, args: Any) -> None:
            self.order.setdefault(id(module), len(self.order))

        scripted = torch.jit.ScriptModule
        modules = {id(m): m for _, m in walk(self.root) if not isinstance(m, scripted)}
        handles = [module.register_forward_pre_hook(note) for module in modules.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def projection(output: Any, tensors: list[Tensor] | None) -> Tensor:
    """The loss where none is given: a fixed random weight for every element of the output, summed.

    Raises:
        OperatorError: where the output holds no floating-point tensor.
    """
    learnt = [t for t in tensors or () if t.is_floating_point() or t.is_complex()]
    if not learnt:
        raise OperatorError(
            f"no loss was given, and the output is {_described(output)}, in which no floating-point tensor was found "
            "to make one of. Give loss=, a function of the output that returns a scalar."
        )
    generator = torch.Generator().manual_seed(0)
    parts = []
    for given in learnt:
        tensor = strided(given)
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        real = real if real.dtype == torch.float64 else real.float()
        weights = torch.randn(real.shape, generator=generator).to(real)
        parts.append((real * weights).sum().to(learnt[0].device) / max(real.numel(), 1) ** 0.5)
    return torch.stack([part.double() for part in parts]).sum() if len(parts) > 1 else parts[0]


def _tensors(value: Any) -> list[Tensor] | None:
    try:
        with torch.no_grad():
            return tensors_in(value)
    except OperatorError:
        return None


def _fresh(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a copy of every tensor, for a forward that works in place; histories stay outside."""

    def copy(tensor: Any) -> Any:
        new = private_copy(tensor)
        return new.requires_grad_() if tensor.requires_grad else new

    with torch.no_grad():
        return map_tensors(copy, arguments)


@contextlib.contextmanager
def _set_aside(leaves: list[Tensor]) -> Iterator[None]:
    """Give leaves an empty ``.grad``, and then the one that they had."""
    held = [(leaf, leaf.grad) for leaf in {id(leaf): leaf for leaf in leaves}.values()]
    try:
        for leaf, _ in held:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in held:
            leaf.grad = gradient


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaves that a loss hangs on, those outside of the model included."""
    if loss.is_leaf and loss.requires_grad:
        yield loss
    waiting, seen = [loss.grad_fn], {loss.grad_fn, None}
    while waiting:
        node: Any = waiting.pop()
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        following = {after for after, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        waiting.extend(following)


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    # Where the compiler was never imported nothing is compiled, and importing it costs seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _whole(gradient: Tensor | None) -> Tensor | None:
    """A gradient as one dense tensor, whichever way it is kept."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    if hasattr(gradient, "full_tensor"):  # of FSDP2
        gradient = gradient.full_tensor()
    return strided(gradient)


def strided(tensor: Tensor) -> Tensor:
    """The elements of a tensor of any layout in one that has strides."""
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
