"""The page of performance and its picture, from the rows of a run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .peers import LAYER, LIMIT, OURS

Row = dict[str, Any]
HOW = Path(__file__).with_name("how.md")


def page(run: dict[str, Any]) -> str:
    """The text of ``docs/performance.md``: ratios only, each with its 95% interval."""
    rows: list[Row] = run["rows"]
    made = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    sections = dict(_sections(HOW.read_text()))
    processes = str(next((row["processes"] for row in rows if "processes" in row), "several"))
    text = [
        "# Performance",
        "",
        "Written by `python -m benchmarks.speed benchmarks/speed.json --page docs`; do not edit.",
        "",
        sections["Performance"].format(made=made),
        "",
        "![Left: one operator at 64 MB against the limit. Right: insertion against the extractors](performance.png)",
    ]
    for title, table in (
        ("Insertion", _insertion),
        ("Growth", _growth),
        ("One operator in eager", _operator),
        ("One operator compiled", _compiled),
        ("Is the gradient right?", _safety),
        ("A training step", _step),
        ("An opened forward", _opened),
        ("Why there is a copy, and where there is none", None),
    ):
        text += ["", f"## {title}", "", sections[title].replace("{processes}", processes)]
        if table is not None:
            text += ["", *(table(rows) or ["Not measured in this run."])]
    return "\n".join(text) + "\n"


def _sections(text: str) -> Iterable[tuple[str, str]]:
    for part in text.split("\n# ")[1:]:
        title, _, body = part.partition("\n")
        yield title.strip(), body.strip()


def _of(rows: list[Row], table: str, **fixed: str) -> list[Row]:
    return [row for row in rows if row["table"] == table and all(row.get(k) == v for k, v in fixed.items())]


def _table(head: str, lines: Iterable[str]) -> list[str]:
    lines = list(lines)
    columns = head.count("|") - 1
    return [head, "|" + "---|" * columns, *lines] if lines else []


def _span(row: Row | None) -> str:
    """The ratio and its interval in as many digits as the interval deserves."""
    if row is None:
        return ""
    if "refused" in row:
        return f"refused ({row['refused']})"
    if row["ratio"] >= 20:
        return f"{_round(row['ratio'])} ({_round(row['low'])} to {_round(row['high'])})"
    digits = 1 if row["ratio"] >= 3 else 3 if row["high"] - row["low"] < 0.02 else 2
    return f"{row['ratio']:.{digits}f} ({row['low']:.{digits}f} to {row['high']:.{digits}f})"


def _round(number: float) -> str:
    """Two significant digits."""
    digits = 10 ** max(0, len(str(int(number))) - 2)
    return f"{round(number / digits) * digits:,.0f}"


def _insertion(rows: list[Row]) -> list[str]:
    lines = (
        f"| {row['row']} | {row['against']} | {_span(row)} | {_round(row['memory'])} "
        f"| {'none' if row['untouched'] else 'SOME'} |"
        for row in _of(rows, "insertion")
    )
    return _table("| model and place | extractor | times quicker | times less memory | tensors touched |", lines)


def _growth(rows: list[Row]) -> list[str]:
    lines = []
    for row in _of(rows, "growth"):
        way = "times quicker" if "target" in row else "times the time"
        lines.append(f"| {row['row']} | {row['against']} | {_span(row)} {way} |")
    return _table("| insertion | against | ratio |", lines)


def _operator(rows: list[Row]) -> list[str]:
    found = _of(rows, "operator")
    sizes = list(dict.fromkeys(row["size"] for row in found))
    by = {(row["row"], row["size"]): row for row in found}
    lines = []
    for name in dict.fromkeys(row["row"] for row in found):
        held = next((f"{row['held']:.1f}" for size in sizes if "held" in (row := by[name, size])), "")
        lines.append(f"| {name} | " + " | ".join(_span(by.get((name, size))) for size in sizes) + f" | {held} |")
    return _table("| operator | " + " | ".join(f"time, {s}" for s in sizes) + " | activations held |", lines)


def _compiled(rows: list[Row]) -> list[str]:
    found = _of(rows, "compiled")
    sizes = list(dict.fromkeys(row["size"] for row in found))
    by = {(row["row"], row["size"]): row for row in found}
    names = dict.fromkeys(row["row"] for row in found)
    lines = (f"| {name} | " + " | ".join(_span(by.get((name, s))) for s in sizes) + " |" for name in names)
    return _table("| operator | " + " | ".join(f"time, {s}" for s in sizes) + " |", lines)


def _safety(rows: list[Row]) -> list[str]:
    lines = (f"| {row['row']} | {row['in place']} | {row['export']} |" for row in _of(rows, "safety"))
    return _table("| operator | beside an in-place neighbour | after `torch.export` |", lines)


def _step(rows: list[Row]) -> list[str]:
    lines = (
        f"| {row['row']} | {row['mode']} | {row['operator']} | {_span(row)} "
        f"| {row['arithmetic']:.2f} | {row['memory']:.2f} |"
        for row in _of(rows, "step") + _of(rows, "compiled step")
    )
    return _table("| model and place | mode | operator | time | arithmetic | peak memory |", lines)


def _opened(rows: list[Row]) -> list[str]:
    lines = (f"| {row['row']} | {row['operator']} | {_span(row)} |" for row in _of(rows, "opened"))
    return _table("| model | forward | time |", lines)


def plot(run: dict[str, Any], path: Path) -> None:
    """The two comparisons that a glance should tell, as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    large = _of(run["rows"], "operator", size="64 MB") or _of(run["rows"], "operator")
    large = sorted(large, key=lambda row: -row["ratio"])
    wrong = {r["row"] for r in _of(run["rows"], "safety") if "wrong" in (r["in place"], r["export"])}
    colours = [
        "tab:blue" if row["row"] in (OURS, LAYER) else "tab:red" if row["row"] in wrong else "tab:gray" for row in large
    ]
    spread = [
        [max(0.0, row["ratio"] - row["low"]) for row in large],
        [max(0.0, row["high"] - row["ratio"]) for row in large],
    ]
    names = [row["row"].replace("`", "") for row in large]
    left.barh(names, [row["ratio"] for row in large], xerr=spread, color=colours, ecolor="black")
    left.axvline(1.0, color="black", linestyle=":")
    left.set_xlabel(f"time against {LIMIT} (red: a wrong gradient somewhere)")
    left.set_title("one operator, forward and backward, 64 MB, eager")
    found = _of(run["rows"], "insertion")
    labels = [f"{row['row'].split(',')[0]}\n{row['against']}" for row in found]
    right.barh(labels[::-1], [row["ratio"] for row in found][::-1], color="tab:blue")
    right.axvline(1000, color="black", linestyle=":")
    right.set_xscale("log")
    right.tick_params(axis="y", labelsize=7)
    right.set_xlabel("times quicker than building the extractor")
    right.set_title("insertion at one place")
    figure.savefig(path, dpi=110)
