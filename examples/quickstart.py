"""The main job on real input: one line reverses the gradient at a named layer, and a table shows what that did.

    python examples/quickstart.py
    python examples/quickstart.py --model vit_tiny_patch16_224 --at blocks.5 --lambd 0.5

Two photographs pass a timm backbone in training mode under one seed: untouched, with the reversal, and with the
reversal removed. Every stage's output and gradient are compared bit for bit, the gradient also with a reversal written
by hand. The exit status is 1 if anything is not as promised.
"""

import argparse
import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradsurgery as gs


@dataclass
class Step:
    """One forward and backward: what left each stage, and what reached each parameter."""

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def same_forward(self, other: "Step", stage: str) -> bool:
        """Whether the stage was called as often and returned the same bits."""
        mine, theirs = self.outputs[stage], other.outputs[stage]
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def of(self, stage: str) -> dict[str, Tensor]:
        """The gradients of the stage's parameters; the empty stage is the whole model."""
        return {name: g for name, g in self.gradients.items() if not stage or f"{name}.".startswith(f"{stage}.")}

    def same_gradients(self, other: "Step", stage: str) -> bool:
        """Whether the same parameters of the stage were reached, by the same bits."""
        mine, theirs = self.of(stage), other.of(stage)
        return mine.keys() == theirs.keys() and all(torch.equal(g, theirs[name]) for name, g in mine.items())


def hub_answers() -> bool:
    """Ask once and briefly: the hub's own client would retry for most of a minute on a machine without a network."""
    if os.environ.get("HF_HUB_OFFLINE"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(endpoint, timeout=3):
            return True
    except urllib.error.HTTPError:
        return True  # it refused, so it is there
    except (OSError, ValueError):
        return False


def backbone(name: str) -> nn.Module:
    """The timm model, pretrained where its weights can be had."""
    reachable = hub_answers()
    if not reachable:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when timm imports the client: the cache is used, the network is not
    import timm

    try:
        model = timm.create_model(name, pretrained=True)
        print(f"{name}: pretrained weights")
    except Exception as error:
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False)
        why = f"could not be loaded ({type(error).__name__})" if reachable else "are not here, nor is the hub in reach"
        print(f"{name}: random weights, since the pretrained ones {why}")
    return model.train()


def photographs(model: nn.Module) -> Tensor:
    """The two photographs that scikit-learn ships, prepared as the model's own data configuration says."""
    from PIL import Image
    from sklearn.datasets import load_sample_images
    from timm.data import create_transform, resolve_model_data_config

    prepare = create_transform(**resolve_model_data_config(model), is_training=False)
    samples = load_sample_images()
    batch = torch.stack([prepare(Image.fromarray(image)) for image in samples.images])
    names = ", ".join(Path(name).name for name in samples.filenames)
    print(f"photographs: {names} as {tuple(batch.shape)}")
    return batch


def stages(model: nn.Module, at: str, path: str = "") -> Iterator[str]:
    """The children that hold parameters, in the model's own order; a child with the place inside is split further."""
    for name, child in model.named_children():
        address = path + name
        if at.startswith(f"{address}."):
            yield from stages(child, at, f"{address}.")
        elif any(True for _ in child.parameters()):
            yield address


def step(model: nn.Module, batch: Tensor, names: list[str]) -> Step:
    """One training step's forward and backward under the seed, on the loss of telling the photographs apart."""
    seen = Step(outputs={name: [] for name in names})

    def keep(name: str, output: Any) -> None:
        # A copy, because the next layer may work in place.
        seen.outputs[name] += [value.detach().clone() for value in (output if isinstance(output, tuple) else (output,))]

    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
        for name in names
    ]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    logits = model(batch)
    nn.functional.cross_entropy(logits, torch.arange(len(batch))).backward()
    for hook in hooks:
        hook.remove()
    seen.outputs[""] = [logits.detach()]
    seen.gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return seen


class ReversalByHand(torch.autograd.Function):
    """What the library is measured against: the few lines that a paper's code has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lambd: float) -> Tensor:
        """The value, as a copy that the next layer may overwrite."""
        ctx.lambd = lambd
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, reversed."""
        return -ctx.lambd * grad, None


@contextlib.contextmanager
def reversal_by_hand(module: nn.Module, lambd: float) -> Iterator[None]:
    """The reversal as a forward hook, for as long as the block lasts."""
    hook = module.register_forward_hook(lambda _module, _args, output: ReversalByHand.apply(output, lambd))
    try:
        yield
    finally:
        hook.remove()


def factor(before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
    """The ratio of two gradients: a plain number where all elements agree on it, else about which it lies."""
    ratios = torch.cat([(after[name].double() / g.double())[g != 0] for name, g in before.items() if name in after])
    if not len(ratios):
        return "all zero"
    low, high = ratios.min().item(), ratios.max().item()
    return f"{low:+g}" if low == high else f"about {ratios.median().item():+.3g}"


def show(title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print a table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        print(f"\n{title}")
        for row in [head, ["-" * width for width in widths], *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*head, title=title, title_justify="left")
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1])
    print()
    Console().print(table)


def main() -> None:
    """Measure the three runs, print the table, and fail where a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="a timm model (default: %(default)s)")
    parser.add_argument("--at", default="layer3", help="the path of one of its modules (default: %(default)s)")
    parser.add_argument("--lambd", default=1.0, type=float, help="strength of the reversal (default: %(default)s)")
    options = parser.parse_args()
    # With several threads torch's own backward may differ from run to run in the last bit.
    torch.set_num_threads(1)

    model = backbone(options.model)
    batch = photographs(model)
    names = list(stages(model, options.at))
    classes, keys = [type(module) for module in model.modules()], list(model.state_dict())

    untouched = step(model, batch, names)
    try:
        gs.insert_grl(model, options.at, options.lambd)  # the one line
    except gs.SurgeryError as error:
        parser.error(str(error))
    kept = isinstance(model, classes[0]) and list(model.state_dict()) == keys
    operated = step(model, batch, names)
    gs.remove(model)
    restored = [type(module) for module in model.modules()] == classes and list(model.state_dict()) == keys
    undone = step(model, batch, names)
    with reversal_by_hand(model.get_submodule(options.at), options.lambd):
        by_hand = step(model, batch, names)

    def row(label: str, stage: str, run: Step, expected: Step) -> tuple[bool, list[str]]:
        forward, gradient = run.same_forward(untouched, stage), run.same_gradients(expected, stage)
        measured = factor(untouched.of(stage), run.of(stage))
        return forward and gradient, [label, *("yes" if ok else "NO" for ok in (forward, gradient)), measured]

    table = [row(name, name, operated, by_hand) for name in names]
    table.append(row("removed", "", undone, untouched))
    show(
        f'gs.insert_grl(model, "{options.at}", {options.lambd:g}) and gs.remove(model)',
        ["stage", "forward identical", "gradient as by hand", "gradient factor"],
        [cells for _, cells in table],
    )
    if not (kept and restored and all(ok for ok, _ in table)):
        print("NOT as promised" + ("" if kept and restored else ": the model's class or its state_dict keys changed"))
        raise SystemExit(1)
    print("As promised: class and state_dict keys kept, every bit of the forward and the gradient right, undo exact.")


if __name__ == "__main__":
    main()
