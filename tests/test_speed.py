"""benchmarks/speed: its rows run and are of what they say, and the page is what it makes of the committed rows."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.speed import compiled, insertion, operators, steps
from benchmarks.speed.__main__ import missed
from benchmarks.speed.page import page, plot
from benchmarks.speed.peers import LAYER, LIMIT, OPERATORS, OURS
from benchmarks.speed.timing import in_turns, memory, ratio

ROOT = Path(__file__).parents[1]
SMALL = {"16 elements": (16,), "64 MB": (8, 16, 16)}


def test_page_is_what_the_script_makes_of_the_committed_rows(tmp_path: Path) -> None:
    run = json.loads((ROOT / "benchmarks" / "speed.json").read_text())
    assert (ROOT / "docs" / "performance.md").read_text() == page(run)
    plot(run, tmp_path / "performance.png")
    assert (tmp_path / "performance.png").stat().st_size > 10_000


def test_acts_take_turns_and_the_ratio_is_that_of_their_medians() -> None:
    order: list[str] = []
    acts = {name: lambda name=name: order.append(name) for name in "abc"}
    times = in_turns(acts, rounds=3, warm=0)
    assert "".join(order) == "abcbcacab"
    assert {len(taken) for taken in times.values()} == {3}
    found = ratio({"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 1.0]}, "a", "b")
    assert found["ratio"] == 2.0
    assert found["low"] == 1.0
    assert found["high"] == 9.0


def test_memory_is_what_an_act_holds() -> None:
    most, held = memory(lambda: torch.ones(1000) + torch.ones(1000))
    assert held == 4000
    assert most >= 12000
    kept = [torch.ones(1000)]
    assert memory(lambda: kept.__setitem__(0, kept[0].neg())) == (4000, 0)  # what it releases was there before


def test_insertion_is_quicker_and_copies_nothing() -> None:
    rows = list(insertion.models(["resnet18"], rounds=1))
    assert [row["against"] for row in rows] == ["torchvision", "timm"]
    assert all(
        row["ratio"] > 50 and row["untouched"] for row in rows
    )  # the page has the figure; here the machine is busy
    assert [row for row in insertion.growth(rounds=1, units=112, larger=2) if row["ratio"] <= 0] == []


def test_operators_are_measured_and_told_right_from_wrong() -> None:
    rows = list(operators.eager(SMALL, rounds=2))
    assert {row["row"] for row in rows} == {OURS, *OPERATORS}
    held = {row["row"]: row["held"] for row in rows if row["size"] == "64 MB"}
    assert held[LAYER] == pytest.approx(1, abs=0.1)
    assert held[OURS] == held["tensor hook"] == pytest.approx(0, abs=0.1)  # no copy where nobody else reads the value
    safe = {row["row"]: (row["in place"], row["export"]) for row in operators.safety()}
    assert safe[OURS] == safe[LAYER] == ("right", "right")
    assert safe["tensor hook"] == ("wrong", "wrong")
    assert safe["alias, as in fairseq"][0] != "right"


def test_compiled_networks_are_measured_in_processes_of_their_own() -> None:
    names = (LIMIT, OURS, "module full-backward hook")
    rows = {row["row"]: row for row in compiled.compiled({"16 elements": (16,)}, processes=2, rounds=20, names=names)}
    assert set(rows) == {OURS, "module full-backward hook"}
    assert rows[OURS]["processes"] == 2
    assert 0.5 < rows[OURS]["low"] <= rows[OURS]["ratio"] <= rows[OURS]["high"] < 2  # the page has the figure
    assert "refused" in rows["module full-backward hook"]


def test_steps_and_opened_forwards_are_measured() -> None:
    rows = list(steps.training({"resnet18": "layer3"}, rounds=2, size=32))
    stop = next(row for row in rows if row["operator"] == steps.STOPPED)
    assert 0.3 < stop["arithmetic"] < 0.9
    assert {row["arithmetic"] for row in rows if row is not stop} == {1.0}
    assert len(list(steps.opened({"resnet18": ("layer3.0:add", 32)}, rounds=2))) == 2


def test_a_target_that_is_missed_is_told() -> None:
    rows = [
        {"ratio": 1.2, "target": 1.1},
        {"ratio": 1.0, "target": 1.1},
        {"ratio": 999.0, "target": 1000.0},
        {"ratio": 3.0},
    ]
    assert missed(rows) == [rows[0], rows[2]]
