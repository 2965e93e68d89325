"""The lines of a run as they are kept in the repository, and ``docs/coverage.md`` as it is made from them."""

import collections
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LIBRARIES = {
    "timm": "timm",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "smp": "segmentation_models_pytorch",
}

HEAD = """# Coverage: every model of four libraries

Written by `python -m benchmarks.coverage --page` from `benchmarks/coverage.jsonl`; do not edit.

Each model is built with random weights and held to three promises:

* **Boundaries.** Reversals at the module that ends first, in the middle and last, all at once, each of another
  strength (0.5, 0.25, 2). The forward, and the gradient of every parameter and of the input, against hooks written by
  hand at the same modules. The class, the `state_dict` keys, the names and the identity of every parameter stay; undo
  leaves no trace.
* **Opened.** In each class of modules that no earlier model has shown, one random op gets an operator that changes
  nothing: the forward and every gradient of the whole model against the untouched model's.
* **Head.** A head behind a reversal at the middle module: what it makes, its own gradient, the reversed gradient of the
  branch and the plain gradient of the main path, against a head cut in by hand.
"""

HOW = """
## How it was measured

* **Numeric**: in training mode with a batch of two under one seed, one thread, on the CPU; every comparison is of every
  bit. Drop-out and stochastic depth are on. On the smallest model of each family the forward in evaluation is compared,
  too. The input is the smallest of a few sizes that the model takes in training mode.
* **Meta**: above the size given, on the meta device, which has shapes and no values: the addresses resolve, the forward
  has the shapes of before, the backward reaches the same parameters; class, keys, names and undo are as promised. No
  value is compared there, and such a model counts in no numeric figure.
* **Up to rounding**: the value of the op has several readers, and the gradients of those behind the operator are added
  up before the others'. The forward is bit-identical, and every gradient within 1e-5 of its norm, or within 1e-9 of the
  largest in the model where it is zero but for rounding.
* Weights are noise, repeated from one block: to draw them anew would take longer than the check.
* **Not run** is never counted as right: a model that does not build here, takes longer or more memory than the limit,
  ends its process, or does not repeat its own gradients.
"""


def versions() -> dict[str, str]:
    """What a run was made with."""
    import platform

    import segmentation_models_pytorch
    import timm
    import torch
    import torchvision
    import transformers

    modules = (torch, timm, torchvision, transformers, segmentation_models_pytorch)
    return {"python": platform.python_version()} | {module.__name__: module.__version__ for module in modules}


def committed(lines: Iterable[dict[str, Any]], numeric: float, every: dict[str, str]) -> str:
    """One short line a model; the first line says what was to be measured, and with which versions.

    What is right is left out, and of the classes that opened only the number is kept. ``every`` has the family of each
    model that there is.
    """
    total = collections.Counter(_library(key) for key in every)
    families = collections.Counter(library for library, _ in {(_library(key), family) for key, family in every.items()})
    first = {"versions": versions(), "numeric up to": numeric, "of": dict(total), "families": dict(families)}
    kept = [json.dumps(first)]
    for line in sorted((line for line in lines if line["key"] in every), key=lambda line: line["key"]):
        short = {"key": line["key"], "family": every[line["key"]]}
        if "not run" in line:
            kept.append(json.dumps(short | {"not run": line["not run"]}))
            continue
        short |= {"kind": line["kind"], "input": line["input"], "params": line["params"]}
        short |= {name: line[name] for name in ("boundaries", "head") if line[name]}
        short |= {"eval": True} if line.get("eval") else {}
        short |= {"finite": False} if line.get("finite") is False else {}
        found = collections.Counter(verdict.partition(":")[0] for verdict in line["opened"].values())
        short |= {"opened": dict(found)} if found else {}
        faults = {cls: verdict for cls, verdict in line["opened"].items() if ":" in verdict}
        short |= {"opened faults": faults} if faults else {}
        kept.append(json.dumps(short))
    return "\n".join(kept) + "\n"


def _library(key: str) -> str:
    return key.partition("/")[0]


def _ratio(right: int, tried: int) -> str:
    return f"{right} of {tried} ({right / tried:.2%})" if tried else "0"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _row(library: str, lines: list[dict[str, Any]], of: int, families: int) -> str:
    ran = [line for line in lines if "not run" not in line]
    numeric, meta = ([line for line in ran if line["kind"] == kind] for kind in ("numeric", "meta"))
    found: collections.Counter[str] = collections.Counter()
    for line in ran:
        found.update(line.get("opened", {}))
    reached = found["right"] + found["rounding"]
    tried = reached + found["wrong"] + found["refused"]
    cells = [
        library,
        of,
        f"{len({(_library(line['key']), line['family']) for line in numeric})} of {families}",
        len(numeric),
        len(meta),
        len(lines) - len(ran),
        of - len(lines),
        _ratio(sum("boundaries" not in line for line in numeric), len(numeric)),
        _ratio(sum("head" not in line for line in numeric), len(numeric)),
        _ratio(reached, tried),
        found["rounding"],
        sum("boundaries" not in line and "head" not in line for line in meta),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def page(path: Path) -> str:
    """The page from the lines at ``path``."""
    first, *lines = map(json.loads, path.read_text().splitlines())
    by_library = {key: [line for line in lines if line["key"].startswith(f"{key}/")] for key in LIBRARIES}
    titles = (
        "",
        "models",
        "families with a numeric run",
        "numeric",
        "meta",
        "not run",
        "not reached",
        "boundaries",
        "head",
        "classes opened",
        "of these up to rounding",
        "meta as promised",
    )
    text = [HEAD, "With " + ", ".join(f"{name} {version}" for name, version in first["versions"].items()) + ".", ""]
    text += ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    text += [
        _row(LIBRARIES[key], found, first["of"].get(key, 0), first["families"].get(key, 0))
        for key, found in by_library.items()
    ]
    text.append(_row("all", lines, sum(first["of"].values()), sum(first["families"].values())))
    text += [
        "",
        "Figures are over the numeric runs; a class that was opened on the meta device is in none of them.",
    ]
    text.append(
        f"Numeric up to {first['numeric up to'] / 1e6:g} million parameters. *Not reached*: the run was stopped before."
    )
    ran = [line for line in lines if "not run" not in line]
    infinite = [line["key"] for line in ran if line.get("finite") is False]
    text += ["", "## What was wrong or refused", ""]
    faults = [
        (line["key"], name, fault) for line in ran for name in ("boundaries", "head") for fault in line.get(name, [])
    ]
    faults += [(line["key"], cls, verdict) for line in ran for cls, verdict in line.get("opened faults", {}).items()]
    if faults:
        text += ["| model | where | what |", "|---|---|---|"]
        text += [f"| {key} | {where} | {_cell(fault)} |" for key, where, fault in faults]
    else:
        text.append("Nothing.")
    text += ["", "## What was not run", ""]
    reasons = [(line["key"], line["not run"]) for line in lines if "not run" in line]
    text += ["| model | why |", "|---|---|"] if reasons else ["Nothing."]
    text += [f"| {key} | {_cell(reason)} |" for key, reason in reasons]
    if infinite:
        text += ["", f"Not all finite with these weights, so that bits of NaN are compared: {', '.join(infinite)}."]
    return "\n".join(text) + "\n" + HOW


def failing(line: dict[str, Any]) -> list[str]:
    """What is wrong with a line of a run, in a few words each."""
    wrong = [*line.get("boundaries", []), *line.get("head", [])]
    wrong += [f"{cls}: {found}" for cls, found in line.get("opened", {}).items() if ":" in found]
    return wrong + ([f"not run: {line['not run']}"] if "not run" in line else [])
