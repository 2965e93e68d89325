"""Every model of timm, torchvision, transformers and segmentation_models_pytorch under the knife.

    python -m benchmarks.coverage                     # hours; stop it at any time, it goes on where it was
    python -m benchmarks.coverage --only timm/resnet  # keys that contain this
    python -m benchmarks.coverage --again             # what failed or was not run
    python -m benchmarks.coverage --commit --page     # benchmarks/coverage.jsonl and docs/coverage.md from the lines

Each model appends one JSON line to ``out/coverage.jsonl``. Models run in a process beside this one: a model that takes
too long or too much memory, or crashes, is recorded as not run, and the sweep goes on.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .measure import shown
from .page import committed, failing, page
from .sizes import sizes_of
from .subjects import ordered, subjects
from .worker import Worker, work

OUT = Path("out/coverage.jsonl")
COMMITTED = Path(__file__).parents[1] / "coverage.jsonl"
PAGE = Path("docs/coverage.md")
NUMERIC = 150_000_000
"""Parameters above which a model runs on the meta device, without values."""


def lines_in(path: Path) -> list[dict]:
    """The lines of a run; the last of a model counts."""
    texts = path.read_text().splitlines() if path.exists() else []
    found = {line["key"]: line for line in map(json.loads, texts)}
    return list(found.values())


def sweep(options: argparse.Namespace) -> int:
    """Measure what has no line yet."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = lines_in(options.out)
    have = {line["key"] for line in lines if not (options.again and failing(line))}
    done = {cls for line in lines if line["key"] in have for cls in shown(line)}
    found = [s for s in subjects() if not options.only or any(part in s.key for part in options.only)]
    sizes = sizes_of(found, options.out.with_name("coverage-sizes.json"))
    leading, rest = ordered(found, sizes)
    wanted = [(s, s in leading) for s in (*leading, *rest) if s.key not in have]
    worker = Worker(options.seconds, options.gigabytes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = 0
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("models", total=len(wanted))
            for subject, leads in wanted:
                bar.update(task, description=subject.key[:40])
                line = worker.measured(subject.key, options.numeric, done, leads, sizes.get(subject.key, 0))
                line["group"] = subject.group
                done |= shown(line)
                with options.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                wrong = failing(line)
                failed += bool(wrong)
                for fault in wrong:
                    bar.console.print(f"{subject.key}: {fault}", markup=False, highlight=False)
                bar.advance(task)
    finally:
        worker.close()
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", nargs="*", help="models whose key contains one of these")
    parser.add_argument("--again", action="store_true", help="measure those again that failed or were not run")
    parser.add_argument("--seconds", type=float, default=120, help="the longest that one model may take")
    parser.add_argument("--gigabytes", type=float, default=16, help="the most memory that one model may take")
    parser.add_argument("--numeric", type=float, default=NUMERIC, help="more parameters than this run without values")
    parser.add_argument("--commit", action="store_true", help="write benchmarks/coverage.jsonl from the run")
    parser.add_argument("--page", action="store_true", help="write docs/coverage.md from benchmarks/coverage.jsonl")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    if options.commit:
        every = {subject.key: subject.group for subject in subjects()}
        COMMITTED.write_text(committed(lines_in(options.out), options.numeric, every))
    if options.page:
        PAGE.write_text(page(COMMITTED))
    if options.commit or options.page:
        return 0
    return sweep(options)


if __name__ == "__main__":
    sys.exit(main())
