"""What the package costs, side by side with its peers, in one run.

python -m benchmarks.speed benchmarks/speed.json                  # every part, about three quarters of an hour
python -m benchmarks.speed benchmarks/speed.json --parts step     # measure these parts anew, keep the others
python -m benchmarks.speed benchmarks/speed.json --page docs      # write docs/performance.md and its picture
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from . import compiled, insertion, operators, steps
from .page import page, plot
from .timing import prepare_process

PARTS: dict[str, list[Callable[[], Iterator[dict[str, Any]]]]] = {
    "insertion": [insertion.models],
    "growth": [insertion.growth],
    "operator": [operators.eager],
    "safety": [operators.safety],
    "compiled": [compiled.compiled],
    "opened": [steps.opened],
    "step": [steps.training],
    "compiled step": [lambda: steps.training(compiled=True)],
}
PACKAGES = ("torch", "torchvision", "timm", "pytorch-revgrad", "torch-gradient-reversal", "pytorch-adapt")


def versions() -> dict[str, str]:
    """Of everything that is compared."""
    installed = {name: metadata.version(name) for name in PACKAGES if any(metadata.distributions(name=name))}
    return {"Python": platform.python_version(), **installed, "device": "CPU"}


def measured(parts: list[str], kept: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """All rows after each part, those of other parts as they were."""
    rows = {part: [row for row in kept if row["table"] == part] for part in PARTS}
    for part in parts:
        rows[part] = []
        for measure in PARTS[part]:
            for row in measure():
                row["table"] = part
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows[part].append(row)
        yield [row for part in PARTS for row in rows[part]]


def missed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that fall short of their target: at least so many times quicker, or at most so many times as long."""
    return [
        row
        for row in rows
        if "target" in row and (row["ratio"] < row["target"] if row["target"] >= 100 else row["ratio"] > row["target"])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--page", type=Path, help="write the page into this folder from the rows that are there")
    options = parser.parse_args()
    run = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    if options.page:
        (options.page / "performance.md").write_text(page(run))
        plot(run, options.page / "performance.png")
        return 0
    prepare_process()
    for rows in measured(options.parts, run["rows"]):
        run = {"versions": versions(), "rows": rows}
        options.out.write_text(json.dumps(run, indent=1) + "\n")
    for row in missed(run["rows"]):
        print("short of its target:", json.dumps(row))
    return 1 if missed(run["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
