"""Whole models as TorchScript: a slice of ``benchmarks/scripted``, a published file, a process without this package."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.scripted import FORMS, SMALL, measured
from script_helpers import by_hand, hooked, saved
from torch import nn

import gradsurgery as gs

pytestmark = pytest.mark.usefixtures("scripting")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of a vit, which looks at sizes
def test_timm(name: str, form: str) -> None:
    found = measured(name, form)
    assert not found.faults
    assert found.compared


def test_the_file_that_silero_vad_ships() -> None:
    silero = pytest.importorskip("silero_vad", reason="silero-vad ships a ScriptModule; it is no dependency")
    file = Path(silero.__file__).parent / "data" / "silero_vad.jit"
    speech = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))

    def run(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        model.reset_states()
        for p in model.parameters():
            p.requires_grad_(True)
            p.grad = None
        out = model(speech, 16000)
        out.sum().backward()
        return out.detach(), {name: p.grad for name, p in model.named_parameters()}

    at = "_model.encoder.1"
    plain, operated = torch.jit.load(file), torch.jit.load(file)
    gs.insert_grl(operated, at, 0.5)
    assert [site.address for site in gs.sites(plain, "_model.encoder.*")] == [f"_model.encoder.{k}" for k in range(4)]
    due, gradients = run(plain)
    below = [name for name in gradients if name.startswith(("_model.encoder.0.", "_model.encoder.1."))]
    assert below
    for model in (operated, saved(operated)):
        for _ in range(4):
            out, there = run(model)
            assert torch.equal(out, due)
            for name, gradient in gradients.items():
                if gradient is None:
                    assert there[name] is None
                else:
                    assert torch.equal(there[name], gradient * (-0.5 if name in below else 1.0)), name
    gs.remove(operated)
    assert operated.code == plain.code


def test_a_process_without_this_package_trains_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1))
    model = torch.jit.script(eager)
    gs.insert_grl(model, "0", 0.5)
    gs.insert_stop_gradient(model, "0", side="input")
    gs.insert_transform(model, "2", torch.round)
    path = tmp_path / "model.pt"
    model.save(path)
    program = f"""
import sys, torch
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gradsurgery":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
torch.set_num_threads(1)
model = torch.jit.load({str(path)!r})
for _ in range(5):
    model.zero_grad()
    out = model(torch.ones(2, 3))
    out.sum().backward()
torch.save([out.detach(), *[p.grad for p in model.parameters()]], {str(tmp_path / "out")!r})
"""
    subprocess.run([sys.executable, "-W", "ignore", "-I", "-c", program], capture_output=True, text=True, check=True)
    other = hooked(eager, ["2"], operate=lambda y: by_hand(y, 1.0, torch.round))
    other = hooked(other, ["0"])
    (due,), gradients = step_of_sum(other)
    out, *there = torch.load(tmp_path / "out")
    assert torch.equal(out, due)
    assert all(torch.equal(g, h) for g, h in zip(gradients, there, strict=True))


def step_of_sum(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    out = model(torch.ones(2, 3))
    out.sum().backward()
    return [out.detach()], [p.grad for p in model.parameters()]
