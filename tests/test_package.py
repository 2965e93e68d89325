"""What is shipped: one version, a complete public interface, types, and a core that needs torch alone."""

import importlib.metadata
import importlib.resources
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradsurgery as gs

ROOT = Path(__file__).parents[1]

PUBLIC = [
    "GradientReversal",
    "ScaleGradient",
    "StopGradient",
    "StraightThrough",
    "FrozenTransform",
    "DetachedTransform",
    "MapGradient",
    "reverse_gradient",
    "scale_gradient",
    "stop_gradient",
    "straight_through",
    "frozen_transform",
    "detached_transform",
    "map_gradient",
    "insert",
    "insert_grl",
    "insert_scale_gradient",
    "insert_stop_gradient",
    "insert_transform",
    "remove",
    "operations",
    "sites",
    "disabled",
    "graph",
    "recipe",
    "apply",
    "to_torchscript",
    "to_exported",
    "to_onnx",
    "audit",
    "verify",
    "Audit",
    "Operation",
    "Site",
    "SurgeryError",
    "AddressError",
    "CaptureError",
    "OperatorError",
    "VerificationError",
]


def test_version_has_one_source() -> None:
    assert importlib.metadata.version("gradsurgery") == gs.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", gs.__version__)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_exported_and_documented(name: str) -> None:
    assert name in gs.__all__
    assert inspect.getdoc(getattr(gs, name))


def test_all_is_complete_sorted_and_importable() -> None:
    namespace: dict[str, object] = {}
    exec("from gradsurgery import *", namespace)
    assert set(gs.__all__) <= namespace.keys()
    assert len(set(gs.__all__)) == len(gs.__all__)
    visible = {name for name, value in vars(gs).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert visible == {name for name in gs.__all__ if not name.startswith("_")}


def test_errors_are_caught_by_their_base_and_by_the_builtin() -> None:
    for error, builtin in [
        (gs.AddressError, LookupError),
        (gs.CaptureError, RuntimeError),
        (gs.OperatorError, ValueError),
        (gs.VerificationError, AssertionError),
    ]:
        assert issubclass(error, gs.SurgeryError)
        assert issubclass(error, builtin)


def test_types_are_shipped() -> None:
    assert importlib.resources.files("gradsurgery").joinpath("py.typed").is_file()


def test_core_needs_torch_alone() -> None:
    """Import and operate with every optional dependency, and numpy, made to fail on import."""
    script = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        blocked = "timm torchvision transformers numpy sklearn rich matplotlib pandas".split()
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import torch
import gradsurgery as gs

net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
gs.insert_grl(net, "0", lambd=0.5)
print(gs.operations(net), gs.sites(net), gs.verify(net, torch.ones(1, 1)))
net(torch.ones(1, 1)).sum().backward()
assert torch.equal(net[0].weight.grad, -0.5 * net[1].weight), net[0].weight.grad
gs.remove(net)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_every_error_has_its_page() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "errors").glob("*.md")}
    listed = re.findall(
        r"^\| \[`(\w+)`\]\(errors/\1\.md\)", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE
    )
    assert pages == set(listed) == {name for name in gs.__all__ if name.endswith("Error")}


def test_contributing_runs_the_commands_of_ci() -> None:
    """CONTRIBUTING's checks are those of CI, so what passes for a contributor passes there."""
    ci = (ROOT / ".ci" / "run").read_text()
    block = (ROOT / "CONTRIBUTING.md").read_text().split("```sh\n")[1].split("```")[0]
    install, check, test = (line.split("  #")[0].strip() for line in block.splitlines())
    assert install in ci
    for command in check.split(" && "):
        assert f"\n{command}\n" in ci
    assert test in (ROOT / "README.md").read_text()
