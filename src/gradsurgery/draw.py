"""The picture of an audit: the layers from input to output, which climb, which are blocked, which are untouched."""

import re
import textwrap
from pathlib import Path
from typing import Any

from .effects import Effect
from .errors import SurgeryError
from .report import Audit, Group, Inserted, grouped

__all__ = ["draw", "matplotlib_classes"]

COLOURS: dict[Effect, str] = {  # of Okabe and Ito, which people with any colour vision can tell apart
    "reversed": "#D55E00",
    "unchanged": "#0072B2",
    "scaled": "#56B4E9",
    "mixed": "",
    "added": "#009E73",
    "blocked": "#333333",
    "untouched": "#999999",
    "zero": "#999999",
}
SAID: dict[Effect, str] = {
    "reversed": "reversed: climbs the loss",
    "unchanged": "unchanged: descends it as before",
    "scaled": "scaled: descends it",
    "mixed": "mixed: several ways meet",
    "added": "added: had no gradient before",
    "blocked": "blocked: can no longer train",
    "untouched": "untouched: no gradient either way",
    "zero": "zero either way",
}
MOST, LEAST = 40, 10  # bars, if the model has as many modules
FAR = 4.0  # a bar is no longer than that; its number is right
LINE = 0.62  # the height of a label, in bars
_LINE: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (4, 2))}


def matplotlib_classes() -> tuple[Any, Any]:
    """``Figure`` and ``Patch``.

    Raises:
        SurgeryError: where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise SurgeryError(
            "plot() was asked for a picture, and matplotlib is not installed. "
            'Install it with python -m pip install "gradsurgery[plot]", or print the audit.'
        ) from error
    return Figure, Patch


def draw(audit: Audit, path: str | Path | None = None) -> Any:
    """The figure of an audit, saved where a path is given.

    Raises:
        SurgeryError: where matplotlib is not installed.
    """
    Figure, Patch = matplotlib_classes()
    groups = grouped(audit.rows, MOST, LEAST)
    climbs, descends = COLOURS["reversed"], COLOURS["unchanged"]
    reach = max([1.3, *map(_reach, groups)])
    figure = Figure(figsize=(9.5, 0.29 * len(groups) + 1.9), layout="constrained")
    axes = figure.add_subplot()
    for side, colour, word in ((-1, climbs, "climbs the loss"), (1, descends, "descends the loss")):
        axes.axvspan(0, side * reach, color=colour, alpha=0.06, linewidth=0)
        axes.text(side * reach / 2, -0.75, word, ha="center", va="bottom", color=colour, fontsize=10, fontweight="bold")
    axes.axvline(0, color="#555555", linewidth=0.8)
    for k, group in enumerate(groups):
        _bar(axes, k, group, reach)
    _operators(axes, audit, groups, reach)
    axes.set(xlim=(-reach, reach), ylim=(len(groups) - 0.4, -0.6))
    axes.set_yticks(range(len(groups)), [group.name for group in groups], fontsize=9)
    axes.set_ylabel("output  \N{LEFTWARDS ARROW}  input", fontsize=10)
    axes.set_xlabel("gradient with the operators, as a multiple of the gradient without them")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    there = {_key(group): SAID[group.row.effect] for group in groups}
    order = sorted(there, key=lambda key: (list(SAID).index(key[0]), key[1]))
    patches = [Patch(label=there[key] + key[1], **_style(*key)) for key in order]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _key(group: Group) -> tuple[Effect, str]:
    """What a group looks like: its effect, and its direction where that is not a part of the effect."""
    size, effect = _size(group), group.row.effect
    return effect, ("" if effect != "mixed" or size is None else ", and climbs" if size < 0 else ", and descends")


def _style(effect: Effect, direction: str = "") -> dict[str, Any]:
    colour = COLOURS[effect]
    if effect == "blocked":
        return {"facecolor": "#E4E4E4", "edgecolor": "#999999", "hatch": "///", "linewidth": 0.0}
    if effect in ("untouched", "zero"):
        return {"facecolor": "white", "edgecolor": colour, "linewidth": 1.0}
    if effect == "mixed":
        colour = COLOURS["reversed" if "climbs" in direction else "unchanged"]
        return {"facecolor": colour, "edgecolor": "white", "hatch": "....", "linewidth": 0.0}
    return {"facecolor": colour, "edgecolor": colour}


def _size(group: Group) -> float | None:
    """The factor of a group, or the part of its old gradient that is in the new one."""
    row, (after, before) = group.row, group.norms
    if row.effect in ("blocked", "untouched", "zero"):
        return None
    if row.factor is not None:
        return row.factor
    return group.cosine * after / before if group.cosine is not None and after and before else 1.0


def _reach(group: Group) -> float:
    """How far the axis has to go for a bar and the text beside it, which takes a part of the axis."""
    text = 0.58 if group.row.effect == "mixed" else 0.24
    return min(abs(_size(group) or 0.0), FAR) / (1 - text)


def _bar(axes: Any, k: int, group: Group, reach: float) -> None:
    effect, size = group.row.effect, _size(group)
    if effect == "blocked":
        axes.barh(k, 2 * reach, left=-reach, height=0.7, **_style(effect))
        box = {"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.15"}
        axes.text(0, k, "blocked", ha="center", va="center", fontsize=8, fontweight="bold", bbox=box)
    elif size is None:
        axes.plot(0, k, "o", markersize=6, markerfacecolor="white", markeredgecolor=COLOURS[effect])
        axes.text(0.03 * reach, k, effect, va="center", fontsize=8, color="#666666")
    else:
        shown = max(-FAR, min(FAR, size))
        axes.barh(k, shown, height=0.7, **_style(*_key(group)))
        text = "new" if effect == "added" else f"\N{MULTIPLICATION SIGN} {size:.3g}"
        text += f" (cos {group.cosine:.2f})" if effect == "mixed" and group.cosine is not None else ""
        text, right = text.replace("-", "\N{MINUS SIGN}"), shown >= 0
        axes.text(
            shown + (0.02 if right else -0.02) * reach,
            k,
            text,
            va="center",
            ha="left" if right else "right",
            fontsize=8,
        )


def _operators(axes: Any, audit: Audit, groups: list[Group], reach: float) -> None:
    """A line where each operator is, with its text to the right."""
    order = {row.parameter: k + (j + 0.5) / len(g.rows) for k, g in enumerate(groups) for j, row in enumerate(g.rows)}
    steps = {row.parameter: 0.5 / len(g.rows) for g in groups for row in g.rows}
    labels: dict[float, list[str]] = {}
    branches: set[float] = set()
    for operator in audit.operators:
        y = _position(operator, order, steps)
        text = f"{operator.address or 'the output'}: {textwrap.shorten(operator.operator, 40, placeholder=' ...')}"
        labels.setdefault(round(y, 3), []).append(text)
        if operator.side in ("head", "edge"):  # other ways pass it by
            branches.add(round(y, 3))
    below = -1.0
    for y, texts in sorted(labels.items()):
        between = abs(y - round(y)) < 1e-6 and y not in branches
        axes.plot((-reach if between else 0.98 * reach, reach), (y - 0.5, y - 0.5), color="black", **_LINE)
        middle = max(y, below + LINE * (len(texts) + 1) / 2)
        below = middle + LINE * (len(texts) - 1) / 2
        where = {"xy": (reach, y - 0.5), "xytext": (1.03 * reach, middle - 0.5), "annotation_clip": False}
        axes.annotate("\n".join(texts), va="center", fontsize=8, arrowprops={"arrowstyle": "-", "lw": 0.5}, **where)


def _position(operator: Inserted, order: dict[str, float], steps: dict[str, float]) -> float:
    path = re.split(r" -> |:|\[", operator.address)[0]
    inside = [name for name in order if not path or f"{name}.".startswith(f"{path}.")]
    if not inside:  # a module without parameters: after those that stand before it
        before = path.rpartition(".")[0]
        inside = [name for name in order if not before or name.startswith(f"{before}.")] or list(order)
    if operator.side == "input":
        first = min(inside, key=order.__getitem__)
        return order[first] - steps[first]
    final = max(inside, key=order.__getitem__)
    return order[final] + steps[final]
