"""How many parameters each model has, counted on the meta device once and kept beside the run."""

import json
from pathlib import Path

import torch
from rich.progress import track

from .building import Subject


def sizes_of(found: list[Subject], kept: Path) -> dict[str, int]:
    """By key; a model that cannot be built on meta has none."""
    sizes: dict[str, int] = json.loads(kept.read_text()) if kept.exists() else {}
    unknown = [subject for subject in found if subject.key not in sizes and subject.library != "transformers"]
    for subject in track(unknown, "counting parameters") if unknown else ():
        *_, last = subject.trials()
        try:
            with torch.device("meta"):
                sizes[subject.key] = sum(p.numel() for p in last.build().parameters())
        except Exception:  # some models compute with their weights while they are built
            sizes[subject.key] = 0
    if unknown:
        kept.write_text(json.dumps(sizes))
    return sizes
