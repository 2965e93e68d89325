"""An audit as people see it: a table, a data frame, a picture, and a bar where it takes long."""

import sys
from pathlib import Path

import pytest
import torch
from core_helpers import seeded

import gradsurgery as gs
from gradsurgery import progress


def stopped() -> gs.Audit:
    model = gs.insert_grl(seeded(), "blocks.1.norm")
    return gs.audit(gs.insert_stop_gradient(model, "stem"), torch.randn(5, 3))


def test_table_with_and_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    audit = stopped()
    rich = [line.split() for line in str(audit).splitlines() if "\N{BOX DRAWINGS LIGHT HORIZONTAL}" not in line]
    monkeypatch.setitem(sys.modules, "rich", None)
    assert [line.split() for line in str(audit).splitlines()] == rich
    assert ["stem", "2", "blocked", "none"] in [[*line[:3], line[-1]] for line in rich]
    assert repr(audit) == str(audit)


def test_pandas_and_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    audit = stopped()
    pytest.importorskip("pandas")
    frame = audit.to_pandas()
    assert list(frame.parameter) == [row.parameter for row in audit.rows]
    assert frame.effect[0] == "blocked"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(gs.SurgeryError, match=r"gradsurgery\[pandas\]"):
        audit.to_pandas()


def test_picture_and_its_absence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    audit = stopped()
    pytest.importorskip("matplotlib")
    figure = audit.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 10_000
    axes = figure.axes[0]
    assert axes.get_yticklabels()[0].get_text() == "stem"
    said = [text.get_text() for text in axes.texts]
    assert "blocked" in said
    assert "stem: StopGradient()" in said
    assert "blocks.1.norm: GradientReversal(lambd=1.0)" in said
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(gs.SurgeryError, match=r"gradsurgery\[plot\]"):
        audit.plot()


def test_bar_on_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    gs.audit(gs.insert_grl(seeded(), "stem"), torch.randn(5, 3))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    gs.audit(gs.insert_grl(seeded(), "stem"), torch.randn(5, 3))
    assert "audit" in capsys.readouterr().err
