"""Six things that people want of a gradient, each with the figure it must have, and why a negated loss is no reversal.

    python examples/source_documents.py

The patterns are those that questions on gradient reversal and on "a transform without backprop" come back to: a
reversal, a transform whose backward is the identity, one whose own parameters are frozen, one that cuts, the pitfalls
of writing a reversal by hand, and minimax entropy. Every net is small enough to differentiate in the head, and every
row compares what was asked with what came out, bit for bit: 33 rows, all exact. The exit status is 1 if one is not.

The picture trains one encoder against a domain head twice, on the same points from the same start. Behind a reversal
the domain loss settles at ln 2 = 0.693, where the head knows nothing, and the task is learnt (loss 0.029). With
``task - domain`` as the loss the head is trained to be wrong as well, nothing bounds the loss, and it overflows
within 200 of the 400 steps.
"""

import argparse
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gradsurgery as gs
from _minimax_toy import draw, minimax
from _report import table


class Claim(NamedTuple):
    """A figure that was asked for, and the one that was measured."""

    pattern: str
    what: str
    asked: Any
    got: Any

    @property
    def exact(self) -> bool:
        """The same bits, the same None, or an error that says the words that were asked for."""
        if isinstance(self.asked, Tensor):
            return isinstance(self.got, Tensor) and torch.equal(self.asked, self.got)
        if isinstance(self.got, Exception):
            return self.asked in str(self.got)
        return type(self.asked) is type(self.got) and bool(self.asked == self.got)


class Polynomial(nn.Module):
    """f(x) = x^2 + x."""

    def forward(self, x: Tensor) -> Tensor:
        """The value at each element."""
        return x**2 + x


def linear(weight: float, bias: float | None = None) -> nn.Linear:
    """One number in, one out."""
    layer = nn.Linear(1, 1, bias=bias is not None)
    nn.init.constant_(layer.weight, weight)
    if bias is not None:
        nn.init.constant_(layer.bias, bias)
    return layer


def chain(*weights: float) -> nn.Sequential:
    """Linear layers of one weight each."""
    return nn.Sequential(*map(linear, weights))


def gradients(model: nn.Module, loss: Tensor) -> list[float | None]:
    """The gradient of each one-number parameter, in the model's order."""
    model.zero_grad()
    loss.backward()
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def reversal() -> Iterator[Claim]:
    """1. A reversal on f(x) = x^2 + x, with s = 6 * sum(f(x)) for x = 1 to 6."""

    def step() -> tuple[float, list[float]]:
        x = torch.arange(1.0, 7.0, requires_grad=True)
        s = 6 * model(x).sum()
        s.backward()
        return s.item(), x.grad.tolist()

    model, plain = nn.Sequential(Polynomial()), [18.0, 30.0, 42.0, 54.0, 66.0, 78.0]
    value, gradient = step()
    yield Claim("1 reversal", "s, plain", 672.0, value)
    yield Claim("1 reversal", "x.grad, plain", plain, gradient)
    gs.insert_grl(model, "0")
    value, gradient = step()
    yield Claim("1 reversal", "s, reversed", 672.0, value)
    yield Claim("1 reversal", "x.grad, reversed", [-g for g in plain], gradient)
    gs.remove(model)
    yield Claim("1 reversal", "x.grad, removed", plain, step()[1])


def squared_plus_one(h: Tensor) -> Tensor:
    """A transform whose own derivative, 2h, would show."""
    return h * h + 1


def straight_through() -> Iterator[Claim]:
    """2. A transform without backprop, as asked: its value, and the gradient as if it were not there."""
    pattern = "2 straight-through"
    by_hand, model, x = chain(2, 3), chain(2, 3), torch.ones(1, 1)
    hidden = by_hand[0](x)
    hidden.data = squared_plus_one(hidden.data)  # the line of the question
    expected = gradients(by_hand, by_hand[1](hidden).sum())
    gs.insert_transform(model, "0", squared_plus_one, backward="straight_through")
    yield Claim(pattern, "value 3 * (2^2 + 1)", 15.0, model(x).item())
    yield Claim(pattern, "gradients of both weights", [3.0, 5.0], gradients(model, model(x).sum()))
    yield Claim(pattern, "as layer.data = T(layer.data)", expected, gradients(model, model(x).sum()))


def frozen() -> Iterator[Claim]:
    """3. A transform without backprop, as answered: its own parameters frozen, the gradient flowing through it."""
    pattern, x = "3 frozen", torch.ones(1, 1)
    model, transform = chain(2, 3), linear(4, bias=1)
    gs.insert_transform(model, "0", transform, backward="frozen")
    yield Claim(pattern, "value 3 * (4 * 2 + 1)", 27.0, model(x).item())
    gradients(model, model(x).sum())
    yield Claim(pattern, "gradient below it, 3 * 4", 12.0, model[0].weight.grad.item())
    yield Claim(pattern, "gradient above it", 9.0, model[1].weight.grad.item())
    yield Claim(pattern, "transform.weight.grad", None, transform.weight.grad)
    yield Claim(pattern, "transform.bias.grad", None, transform.bias.grad)

    kept: list[Tensor] = []
    model.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
        yield Claim(pattern, "buffers kept, nothing needs a gradient", 0, len(kept))
        transform.requires_grad_(True)
        model(x)
        yield Claim(pattern, "the same, the transform unfrozen", 0, len(kept))


def cut() -> Iterator[Claim]:
    """4. A transform cut off altogether."""
    model, x = chain(2, 3), torch.ones(1, 1)
    gs.insert_transform(model, "0", squared_plus_one, backward="none")
    yield Claim("4 cut off", "value 3 * (2^2 + 1)", 15.0, model(x).item())
    yield Claim("4 cut off", "gradients of both weights", [None, 5.0], gradients(model, model(x).sum()))


class Legacy(torch.autograd.Function):
    """A reversal as it was written before torch 0.4: methods of an instance."""

    def forward(self, x: Tensor) -> Tensor:
        """The value."""
        return x.view_as(x)

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient, reversed."""
        return -grad


class OneGradientForTwo(torch.autograd.Function):
    """A reversal that takes a strength and forgets to return a gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lambd: float) -> Tensor:
        """The value."""
        ctx.lambd = lambd
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient, reversed."""
        return -ctx.lambd * grad


def call_legacy(x: Tensor) -> Tensor:
    """The instance called on a value, as such code does; torch 2.14 warns of the instance first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return Legacy()(x)


def error_of(call: Callable[[], Any]) -> Exception | None:
    """What the call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


class TwoHeads(nn.Module):
    """An encoder of weight 2 under a task head of weight 3 and a domain head of weight 5."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.task, self.domain = linear(2), linear(3), linear(5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the two heads say."""
        h = self.encoder(x)
        return self.task(h).sum(), self.domain(h).sum()


def pitfalls() -> Iterator[Claim]:
    """5. The pitfalls of reversals written by hand, and what stands in their place."""
    pattern, ones = "5 pitfalls", torch.ones(2, requires_grad=True)
    yield Claim(pattern, "by hand, methods not static", "Legacy autograd", error_of(lambda: call_legacy(ones)))
    by_hand = error_of(lambda: OneGradientForTwo.apply(ones, 0.5).sum().backward())
    yield Claim(pattern, "by hand, an argument forgotten", "incorrect number of gradients (expected 2, got 1)", by_hand)
    gs.reverse_gradient(ones, 0.5).sum().backward()
    yield Claim(pattern, "gs.reverse_gradient(x, 0.5)", [-0.5, -0.5], ones.grad.tolist())

    x = torch.ones(1, 1)
    model = chain(2, 3, 5)
    yield Claim(pattern, "three layers, plain", [15.0, 10.0, 6.0], gradients(model, model(x).sum()))
    gs.insert_grl(model, "1")
    yield Claim(
        pattern, "reversal after the second: not the third", [-15.0, -10.0, 6.0], gradients(model, model(x).sum())
    )
    gs.remove(model)
    gs.insert_grl(model, "2")
    yield Claim(pattern, "reversal at the very end: all climb", [-15.0, -10.0, -6.0], gradients(model, model(x).sum()))

    model = TwoHeads()
    task, domain = model(x)
    yield Claim(
        pattern, "task - 0.5 domain: the head is flipped", [0.5, 2.0, -1.0], gradients(model, task - 0.5 * domain)
    )
    gs.insert_grl(model, "domain", lambd=0.5, side="input")
    task, domain = model(x)
    yield Claim(pattern, "reversal 0.5: the head descends", [0.5, 2.0, 2.0], gradients(model, task + domain))


def entropy(logits: Tensor) -> Tensor:
    """The mean entropy of the predictions, in nats."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


def minimax_entropy() -> Iterator[Claim]:
    """6. Minimax entropy: one classifier, which raises the entropy that the features below it lower."""
    pattern = "6 minimax entropy"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x, labels = torch.randn(16, 4), torch.arange(16) % 3
    plain = torch.autograd.grad(entropy(model(x)), list(model.parameters()))
    label_plain = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels), list(model.parameters()))

    adversary = gs.insert_grl(model, "2", side="input", inplace=False)  # shares the weights; the model stays plain
    reversed_ = torch.autograd.grad(-entropy(adversary(x)), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    for name, asked, got in zip(names, plain, reversed_, strict=True):
        classifier = name.startswith("2.")
        role = "the classifier climbs the entropy" if classifier else "the features descend it"
        yield Claim(pattern, f"{name}: {role}", -asked if classifier else asked, got)
    label_got = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels), list(model.parameters()))
    for name, asked, got in zip(names, label_plain, label_got, strict=True):
        yield Claim(pattern, f"{name}: the labels' gradient stays plain", asked, got)


PATTERNS = (reversal, straight_through, frozen, cut, pitfalls, minimax_entropy)


def written(value: Any) -> str:
    """A value as the table shows it."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)}, norm {value.norm().item():.6f}"
    text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def main() -> None:
    """Print the table of claims, train the toy twice, and fail where a claim is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", default="out/source_documents.png", type=Path, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, to see that it runs")
    options = parser.parse_args()

    claims = [claim for pattern in PATTERNS for claim in pattern()]
    rows = [[c.pattern, c.what, written(c.asked), written(c.got), "yes" if c.exact else "NO"] for c in claims]
    table("The six patterns", ["pattern", "what", "asked", "got", "exact"], rows)

    steps = 40 if options.quick else 400
    runs = {how: minimax(how, steps) for how in ("reversal", "task - domain")}
    first = next((k for k, value in enumerate(runs["task - domain"].domain) if not math.isfinite(value)), None)
    table(
        f"One encoder against one domain head, {steps} steps",
        ["training", "domain loss at the end", "task loss at the end"],
        [[how, f"{run.domain[-1]:.4g}", f"{run.task[-1]:.4g}"] for how, run in runs.items()],
    )
    if first is not None:
        print(f"task - domain is no longer finite from step {first}.")
    draw(*runs.values(), options.picture)
    if wrong := [c for c in claims if not c.exact]:
        print(f"NOT exact: {len(wrong)} of {len(claims)}")
        raise SystemExit(1)
    print(f"All {len(claims)} exact.")


if __name__ == "__main__":
    main()
