"""examples/quickstart.py: it passes on the library, and it fails where the library would be wrong."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import gradsurgery as gs

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "quickstart.py"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--model", "resnet18", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_main_job_passes_without_a_word_on_stderr() -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "As promised" in done.stdout
    assert (ROOT / "README.md").read_text().split("```text\n")[1].split("```")[0] in done.stdout


@pytest.mark.parametrize("arguments", [(), ("--at", "layer3.0.bn1", "--lambd", "0.3"), ("--lambd", "0")])
def test_passes_elsewhere(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, *arguments)


def do_nothing(model: nn.Module, at: str, lambd: float) -> nn.Module:
    return model


def reverse_one_stage_too_early(model: nn.Module, at: str, lambd: float) -> nn.Module:
    return insert_grl(model, "layer2", lambd)


def reverse_and_add_a_key(model: nn.Module, at: str, lambd: float) -> nn.Module:
    model.register_buffer("extra", None)
    model.extra = model.fc.bias.detach()
    return insert_grl(model, at, lambd)


insert_grl = gs.insert_grl


@pytest.mark.parametrize("wrong", [do_nothing, reverse_one_stage_too_early, reverse_and_add_a_key])
def test_fails_where_the_library_is_wrong(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gs, "insert_grl", wrong)
    monkeypatch.setattr(gs, "remove", remove_if_any)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch)
    assert stop.value.code == 1


remove = gs.remove


def remove_if_any(model: nn.Module) -> None:
    if gs.operations(model):
        remove(model)


def test_fails_where_undo_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gs, "remove", lambda model: model)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch)
    assert stop.value.code == 1


def test_unknown_place_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "--at", "layer33")
    assert stop.value.code == 2
    assert "layer3" in capsys.readouterr().err
