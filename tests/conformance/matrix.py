"""All cells, the chosen slice of them, and the page."""

import importlib
import platform
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

import gradsurgery as gs

from .nets import OPERATORS, PLACES
from .refusals import REFUSALS, refusal_of
from .tools import TOOLS, Cell, Verdict

FAMILIES = (
    "copies",
    "compilers",
    "script",
    "exporters",
    "transforms",
    "numerics",
    "checkpoints",
    "distributed",
    "parallel",
    "ecosystem",
)
for _family in FAMILIES:
    importlib.import_module(f"{__package__}.{_family}")


def every_cell() -> list[Cell]:
    """The cheap ones first, then those of the slice, then the rest."""
    chosen = set(chosen_cells())
    cells = [Cell(tool, operator, place) for tool in TOOLS for operator in OPERATORS for place in PLACES]
    return sorted(cells, key=lambda cell: 0 if TOOLS[cell.tool].cost == "cheap" else 1 if cell in chosen else 2)


def chosen_cells() -> Iterator[Cell]:
    """A slice in which every tool meets several operators, and every operator every place, by turns."""
    places = list(PLACES)
    for t, (name, tool) in enumerate(TOOLS.items()):
        many = {"cheap": 7, "dear": 2, "slow": 1}[tool.cost]
        for k in range(many):
            operator = list(OPERATORS)[(t + k) % len(OPERATORS)]
            yield Cell(name, operator, places[(3 * t + k) % len(places)])


# --- the page --------------------------------------------------------------------------------------------------------

NOT_RUN = {
    "CUDA": "no GPU was at hand",
    "CUDA graphs (mode='reduce-overhead')": "no GPU was at hand",
    "float16 autocast with GradScaler on CUDA": "no GPU was at hand",
    "a coefficient changed under graph replay": "no GPU was at hand",
    "two streams": "no GPU was at hand",
}
MARKS = {"right": "✓", "refused": "r", "wrong": "WRONG", "not applicable": ".", "not run": "?"}
PACKAGES = ("timm", "onnx", "onnxruntime", "onnxscript", "torchao", "peft", "accelerate", "lightning")


def _version(package: str) -> str:
    try:
        return str(getattr(importlib.import_module(package), "__version__", "?"))
    except ImportError:
        return "not installed"


def _marks(tool: str, operator: str, verdicts: Mapping[Cell, Verdict]) -> str:
    cells = [Cell(tool, operator, place) for place in PLACES]
    kinds = [verdicts[cell].kind for cell in cells]
    refusals = [REFUSALS.index(found) + 1 if (found := refusal_of(cell)) else 0 for cell in cells]
    marks = [f"r{number}" if kind == "refused" else MARKS[kind] for kind, number in zip(kinds, refusals, strict=True)]
    said = [mark for mark in marks if mark != "."] or ["."]
    return said[0] if len(set(said)) == 1 else " ".join(marks)


def page(verdicts: Mapping[Cell, Verdict], minutes: float) -> str:
    """The matrix as Markdown."""
    count = Counter(verdict.kind for verdict in verdicts.values())
    judged = count["right"] + count["refused"] + count["wrong"]
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    lines = [
        "# The conformance matrix",
        "",
        "Every operator at every kind of place under every tool. A cell compares the output and every gradient, bit "
        "for bit, with the same net whose operator is written into its source by hand. Written by "
        "`python -m pytest tests/conformance --whole`; do not edit.",
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}, gradsurgery {gs.__version__}, {versions}; "
        f"{platform.system()} {platform.machine()}, CPU. {minutes:.0f} minutes.",
        "",
        f"**{len(verdicts)} cells: {count['right']} right, {count['refused']} refused, {count['wrong']} wrong, "
        f"{count['not applicable']} not applicable, {count['not run']} not run.** Of the {judged} cells that ran, "
        f"{count['right'] / max(judged, 1):.1%} are right.",
        "",
        "✓ right at every place that applies; r refused, with the reason below by its number; . not applicable; ? not "
        "run. Where the places differ, there is a mark for each, in this order: " + ", ".join(PLACES) + ".",
    ]
    for family in dict.fromkeys(tool.family for tool in TOOLS.values()):
        lines += ["", f"## {family}", "", "| tool | " + " | ".join(OPERATORS) + " |", "|---" * 8 + "|"]
        for name, tool in TOOLS.items():
            if tool.family == family:
                lines.append(f"| {name} | " + " | ".join(_marks(name, one, verdicts) for one in OPERATORS) + " |")
    lines += ["", "## On a GPU", "", "| tool | all operators |", "|---|---|"]
    lines += [f"| {name} | not run: {why} |" for name, why in NOT_RUN.items()]
    lines += ["", "## Why cells are refused", ""]
    lines += [f"{number}. {refusal.reason}" for number, refusal in enumerate(REFUSALS, 1)]
    missing = {f"{cell.tool}: {v.why}": None for cell, v in verdicts.items() if v.kind == "not run"}
    if missing:
        lines += ["", "## Why cells were not run", "", *[f"* {why}" for why in missing]]
    absent = {f"{cell.tool}: {v.why}.": None for cell, v in verdicts.items() if v.kind == "not applicable"}
    lines += ["", "## Why cells do not apply", "", *[f"* {why}" for why in absent]]
    return "\n".join(lines) + "\n"
