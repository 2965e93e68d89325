"""Module boundaries of the smallest model of every timm family, each against a hand-written hook.

    python -m benchmarks.boundaries                       # all families, continuing where the last run stopped
    python -m benchmarks.boundaries --families resnet vit # some
    python -m benchmarks.boundaries --choose              # find the smallest models again

One JSON line per place goes to ``out/boundaries.jsonl``; the last line printed is the figure.
"""

import argparse
import gc
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from tqdm import tqdm

from ._operated import check, untouched
from ._reference import Call, enliven, places, seed_all, spread

SMALLEST = Path(__file__).with_name("smallest.json")
SIZES = (64, 96, 128, 160, 192, 224, 256)


def choose() -> dict[str, str]:
    """The model with the fewest parameters of each timm family, built on the meta device to count."""
    chosen = {}
    for family in tqdm(timm.list_modules(), desc="choosing"):
        counts = []
        for name in timm.list_models(module=family):
            with torch.device("meta"):
                counts.append((sum(p.numel() for p in timm.create_model(name).parameters()), name))
        chosen[family] = min(counts)[1]
    return chosen


def build(name: str, seed: int = 0) -> nn.Module:
    """The model with random weights, none of them exactly zero."""
    seed_all(seed)
    return enliven(timm.create_model(name))


def feeding(size: int, channels: int = 3, batch: int = 2) -> Call:
    """A call on one seeded image batch of this size, its gradient wanted too."""

    def call(model: nn.Module) -> tuple[Any, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(5)
        image = torch.randn(batch, channels, size, size, generator=generator).requires_grad_()
        return model(image.clone()), {"image": image}  # a clone: some models write to what they are given

    return call


def smallest_input(model: nn.Module) -> int:
    """The smallest side that the model takes in both modes and gives finite numbers for."""
    config = model.default_cfg
    usual = config["input_size"][-1]
    if config.get("fixed_input_size"):
        return int(usual)
    least = (config.get("min_input_size") or (0, 0))[-1]
    for size in [size for size in SIZES if least <= size < usual]:
        try:
            untouched(model, feeding(size))
        except Exception:  # whatever a model raises for a side that it cannot take
            continue
        return size
    return int(usual)


def family_lines(family: str, name: str, count: int) -> list[dict[str, Any]]:
    """The result of each place of one family."""
    pristine = build(name)
    size = smallest_input(pristine)
    call = feeding(size)
    candidates = places(build(name), call)
    plain = untouched(pristine, call)
    lines = []
    for path in spread(candidates, count, family):
        start = time.perf_counter()
        line = {
            "family": family,
            "model": name,
            "input": size,
            "place": path,
            "of": len(candidates),
            "module": type(pristine.get_submodule(path)).__name__,
        }
        try:
            line["faults"] = check(pristine, path, call, plain)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            line["faults"] = [f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"]
        lines.append(line | {"seconds": round(time.perf_counter() - start, 2)})
        gc.collect()
    return lines


def done(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The families already measured, with their lines; a family cut short counts as not measured."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        lines.setdefault(line["family"], []).append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", help="only these families")
    parser.add_argument("--places", type=int, default=3, help="how many boundaries of each model")
    parser.add_argument("--choose", action="store_true", help="find the smallest models again and stop")
    parser.add_argument("--out", type=Path, default=Path("out/boundaries.jsonl"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.choose:
        SMALLEST.write_text(json.dumps(choose(), indent=0) + "\n")
        return 0
    smallest = json.loads(SMALLEST.read_text())
    wanted = {family: smallest[family] for family in options.families or smallest}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    measured = done(options.out)
    with tqdm(wanted.items(), desc="families") as bar:
        for family, name in bar:
            bar.set_postfix_str(name)
            if family in measured:
                continue
            measured[family] = family_lines(family, name, options.places)
            with options.out.open("a") as file:  # one write per family: a run cut short leaves whole families
                file.write("".join(json.dumps(line) + "\n" for line in measured[family]))
            for line in measured[family]:
                if line["faults"]:
                    tqdm.write(f"{line['model']} at {line['place']!r}: {line['faults']}")
    lines = [line for family in wanted for line in measured[family]]
    exact = [family for family in wanted if not any(line["faults"] for line in measured[family])]
    right = sum(not line["faults"] for line in lines)
    print(f"{len(exact)} of {len(wanted)} families exact, {right} of {len(lines)} places")
    return 0 if len(exact) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
