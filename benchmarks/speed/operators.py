"""One operator, forward and backward, by itself: what it costs, what it holds, and whether its gradient is right.

An operator lies between a source and a sink that cost nothing: the source gives out the same activation, the sink the
same gradient. The limit has no operator: its sink multiplies the gradient once, and nothing happens in the forward.
"""

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .peers import LIMIT, OPERATORS, OURS, built
from .timing import Act, in_turns, memory, ratio

SIZES = {"16 elements": (16,), "64 MB": (16, 1024, 1024)}
NEAR = 1.1


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, activation: Tensor) -> Tensor:
        return activation.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor, multiplies: bool) -> Tensor:
        ctx.grad, ctx.multiplies = grad, multiplies
        ctx.save_for_backward(x)  # as most layers do with what they receive
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.grad * -1.0 if ctx.multiplies else ctx.grad, None, None


class Source(nn.Module):
    """Gives out an activation that is there already."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.activation = nn.Parameter(torch.ones(())), torch.ones(shape)

    def forward(self, x: Tensor) -> Tensor:
        return _Source.apply(self.weight, self.activation)


class Sink(nn.Module):
    """Gives back a gradient that is there already."""

    def __init__(self, shape: tuple[int, ...], multiplies: bool) -> None:
        super().__init__()
        self.grad, self.multiplies = torch.ones(shape), multiplies

    def forward(self, x: Tensor) -> Tensor:
        return _Sink.apply(x, self.grad, self.multiplies)


def eager(sizes: dict[str, tuple[int, ...]] = SIZES, rounds: int = 30) -> Iterator[dict[str, Any]]:
    """A row for each operator and size: time against the limit, and activations that its forward leaves in memory."""
    for size, shape in sizes.items():
        small = len(shape) == 1
        models = {name: built(name, Source(shape), Sink(shape, name == LIMIT)) for name in (LIMIT, OURS, *OPERATORS)}
        acts = {name: step(model, torch.ones(())) for name, model in models.items()}
        # Small ones in more rounds and shorter ones: what disturbs a machine lasts for a while.
        times = in_turns(acts, 8 * rounds, repeats=40, warm=40) if small else in_turns(acts, rounds, warm=2)
        activation = torch.ones(shape).nbytes
        for name in (OURS, *OPERATORS):
            row = {"row": name, "size": size, "against": LIMIT, **ratio(times, name, LIMIT)}
            if not small:
                row["held"] = memory(functools.partial(models[name], torch.ones(())))[1] / activation
            yield row | ({"target": NEAR} if name == OURS and not small else {})
        del models, acts
        gc.collect()


def step(model: Callable[[Tensor], Tensor], given: Tensor) -> Act:
    """Forward and backward."""
    return lambda: model(given).sum().backward()


class Wave(nn.Module):
    """A pointwise op with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin()


class Cosine(nn.Module):
    """A pointwise op without one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


class Rectified(nn.Module):
    """The in-place neighbour that comes after most normalisations."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class Read(nn.Module):
    """Reads a value again after its in-place neighbour has run: a skip connection past an operator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.kept = Keeps()
        self.branch = built(name, self.kept, Rectified())

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) + 3 * self.kept.last


class Keeps(nn.Module):
    """A product that its module remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.weight * x
        return self.last


def beside_in_place(name: str) -> str:
    """Whether the gradient is right where an in-place neighbour follows and somebody else reads the value."""
    model = Read(name)
    try:
        model(torch.ones(2)).sum().backward()
    except RuntimeError:
        return "refused"
    # Reversed through the rectifier, which is open for the first alone, and plain through the other reader.
    return "right" if torch.equal(model.kept.weight.grad, torch.tensor([-1.0 + 3.0, 3.0])) else "wrong"


def exported(name: str) -> str:
    """Whether the gradient is still reversed in what ``torch.export`` makes."""
    network = built(name, Wave(), Cosine())
    given = torch.ones(3)
    right = copy.deepcopy(built(LIMIT, Wave(), Cosine()))
    right(given).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(network, (given,)).module()
            program(given).sum().backward()
        except Exception:  # of many kinds
            return "refused"
    (got,) = [p.grad for p in program.parameters()]
    return "right" if got is not None and torch.equal(got, -right[0].weight.grad) else "wrong"


def safety() -> Iterator[dict[str, Any]]:
    """A row for each operator: what becomes of its gradient in two usual surroundings."""
    for name in (OURS, *OPERATORS):
        yield {"row": name, "in place": beside_in_place(name), "export": exported(name)}
