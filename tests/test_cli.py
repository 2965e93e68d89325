"""The command line, end to end in a temporary directory: what it prints, writes, refuses, and with which exit code."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from typer.testing import CliRunner, Result

import gradsurgery as gs
from gradsurgery import progress
from gradsurgery.__main__ import main
from gradsurgery.cli.app import app
from gradsurgery.cli.shown import graph_lines

ROOT = Path(__file__).parents[1]

FACTORIES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.body = nn.Conv2d(width, width, 3)
        self.drop = nn.Dropout()
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head(self.drop(self.body(x)).mean((2, 3)))

class Branches(Net):
    def forward(self, x):
        if x.sum() > 0:
            return super().forward(x)
        return super().forward(-x).relu()

class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 4)

    def forward(self, ids, weights):
        return self.embed(ids) * weights

class Lies(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x):
        y = self.linear(x)
        if torch.jit.is_scripting():
            y = y * 2
        return y

class Chatty(Lies):
    def __init__(self):
        super().__init__()
        print("built")

    def forward(self, x):
        print("run")
        return self.linear(x)

class Leaves(Lies):
    def forward(self, x):
        raise SystemExit(7)

net = Net()
number = 3

def ends():
    raise SystemExit(5)

def not_a_number():
    made = Net()
    made.head.bias.data[:] = float("nan")
    return made

def breaks():
    raise RuntimeError("no data here")

def needs(width):
    return Net(width)

def text():
    return "net"
"""

SMALL = ("--input", "2x3x8x8")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory with one module of factories."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("factories", None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def done(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: str) -> Any:
    return json.loads(done(*arguments, "--json"), parse_constant=lambda name: pytest.fail(name))


def refused(*arguments: str, code: int = 1) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    if code != 2:
        assert re.fullmatch(r"error: .*\n", result.stderr), result.stderr
    return result.stderr


def test_sites_of_a_timm_model() -> None:
    model = timm.create_model("resnet18")
    assert done("sites", "resnet18", "layer3.*") == f"{gs.sites(model, 'layer3.*')}\n"
    assert [row["address"] for row in as_json("sites", "resnet18", "layer3.0:*")] == [
        site.address for site in gs.sites(model, "layer3.0:*")
    ]
    rows = as_json("sites", "factories:Net", *SMALL)
    assert {row["address"]: row["shape"] for row in rows}["stem"] == [2, 4, 6, 6]
    assert "matches no place of 'resnet18'" in refused("sites", "resnet18", "layer9.*")


def test_audit_of_operators_of_every_kind() -> None:
    found = as_json("audit", "factories:Net", "--grl", "body=0.5", "--scale", "head=0.25", "--stop", "stem", *SMALL)
    assert [one["operator"] for one in found["operators"]] == [
        "StopGradient()",
        "GradientReversal(lambd=0.5)",
        "ScaleGradient(scale=0.25)",
    ]
    rows = {row["parameter"]: row for row in found["parameters"]}
    assert rows["stem.weight"]["effect"] == "blocked"
    assert (rows["body.weight"]["factor"], rows["head.weight"]["factor"]) == (-0.125, 0.25)
    assert found["blocked"] == ["stem.weight", "stem.bias"]
    assert found["forward_identical"] is True
    text = done("audit", "factories:net", "--grl", "body", "--verify", *SMALL)
    assert "reversed" in text
    assert "g(s) = s g(1) + (1-s) g(0), s = -1" in text


def test_what_was_not_measured_is_null_in_json() -> None:
    assert as_json("audit", "factories:not_a_number", "--grl", "body", *SMALL)["loss"] is None


def test_a_picture_in_and_a_picture_out() -> None:
    from PIL import Image

    Image.new("L", (40, 30), 128).save("photo.png")
    assert as_json("sites", "factories:Net", "stem", "--image", "photo.png")[0]["shape"] == [1, 4, 222, 222]
    done("audit", "factories:Net", "--grl", "body", "--image", "photo.png", *SMALL, "--plot", "out.png")
    with Image.open("out.png") as drawn:
        assert drawn.size[0] > 100
    again = ("audit", "factories:Net", "--grl", "body", *SMALL, "--plot", "out.png")
    assert "'out.png' was to be written, and exists already" in refused(*again)
    done(*again, "--force")
    assert "could not be drawn" in refused("audit", "factories:Net", "--grl", "body", *SMALL, "--plot", "out.xyz")
    assert "cannot be read" in refused("audit", "factories:Net", "--grl", "body", "--image", "factories.py")
    assert "cannot be read" in refused("audit", "factories:Net", "--grl", "body", "--image", "none.jpg")


@pytest.mark.usefixtures("scripting")
def test_convert_to_torchscript() -> None:
    out = done("convert", "factories:Net", "--grl", "body=0.5", "--to", "torchscript", "-o", "net.pt", *SMALL)
    assert out.startswith("torchscript: scripted, 0.0 MiB in net.pt\noutputs, in each of 3 runs: exact")
    made, x = torch.jit.load("net.pt"), torch.randn(2, 3, 8, 8)
    model = gs.insert_grl(sys.modules["factories"].Net().eval(), "body", 0.5)
    model.load_state_dict(made.state_dict())
    for one in (model, made):
        one(x).square().sum().backward()
    for (name, p), (other, q) in zip(model.named_parameters(), made.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p.grad, q.grad)


@pytest.mark.usefixtures("scripting")
def test_a_script_is_operated_on_and_written_again() -> None:
    done("convert", "factories:Net", "--to", "torchscript", "-o", "net.pt", *SMALL)
    assert [row["address"] for row in as_json("sites", "net.pt", "b*")] == ["body"]
    found = as_json("audit", "net.pt", "--grl", "body=0.5", *SMALL)
    rows = {row["parameter"]: (row["effect"], row["factor"]) for row in found["parameters"]}
    assert rows["body.weight"] == rows["stem.weight"] == ("reversed", -0.5)
    assert rows["head.weight"] == ("unchanged", 1.0)
    assert found["forward_identical"] is True
    assert "verified alone" in refused("audit", "net.pt", "--grl", "body", "--verify", *SMALL)
    stopped = as_json("audit", "net.pt", "--stop", "body", *SMALL)
    assert stopped["blocked"] == ["stem.weight", "stem.bias", "body.weight", "body.bias"]
    shown = done("show", "net.pt", "--grl", "body=0.5").splitlines()
    assert [line.strip() for line in shown if "<==" in line] == [
        "body = self.body  <== output: GradientReversal(lambd=0.5)"
    ]
    out = done("convert", "net.pt", "--grl", "body=0.5", "--to", "torchscript", "-o", "operated.pt", *SMALL)
    assert "a script already" in out
    assert "gradients of 6 parameters, in each of 3 runs: exact" in out
    plain, operated, x = torch.jit.load("net.pt"), torch.jit.load("operated.pt"), torch.randn(2, 3, 8, 8)
    for one in (plain, operated):
        one(x).square().sum().backward()
    grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in operated.named_parameters():
        assert torch.equal(p.grad, grads[name] * (1.0 if name.startswith("head") else -0.5))
    again = run("audit", "operated.pt", "--scale", "stem=0.25", *SMALL, "--json")
    said = (
        "'operated.pt' came with GradientReversal(lambd=0.5) at 'body', which is measured with what was asked for here"
    )
    assert said in json.loads(again.stdout)["notes"] and said in again.stderr
    both = {row["parameter"]: row["factor"] for row in json.loads(again.stdout)["parameters"]}
    assert [both[f"{name}.weight"] for name in ("stem", "body", "head")] == [-0.125, -0.5, 1.0]
    assert "no TorchScript" in refused("convert", "net.pt", "--to", "exported", "-o", "net.pt2", *SMALL)
    assert "no such module" in refused("show", "net.pt", "tail")


def test_convert_to_the_other_formats() -> None:
    found = as_json("convert", "factories:Net", "--grl", "body", "--to", "exported", "-o", "net.pt2", *SMALL)
    assert (found["format"], found["path"]) == ("exported", "net.pt2")
    assert found["bytes"] == Path("net.pt2").stat().st_size
    assert [check["result"] for check in found["checks"]] == ["exact", "exact"]
    assert as_json("sites", "net.pt2", "body")[0]["address"] == "body"
    assert "blocked" in done("audit", "net.pt2", "--stop", "body")  # on the inputs that are in the file
    assert "whose mode was fixed" in refused("audit", "net.pt2", "--stop", "body", "--train")
    out = done("convert", "net.pt2", "--to", "onnx", "-o", "net.onnx", "--grl", "stem", "--for-inference")
    assert "run with onnxruntime" in out
    train = ("convert", "factories:Net", "--train", "--to", "exported", "-o", "train.pt2", *SMALL)
    assert done(*train).startswith("exported: in training mode")
    inference = as_json(*train[:2], *train[3:], "--for-inference", "--force")
    assert [check["what"] for check in inference["checks"]] == ["outputs"]


def test_a_trace_takes_over() -> None:
    out = done("convert", "factories:Branches", "--to", "torchscript", "-o", "net.pt", *SMALL)
    assert out.startswith("torchscript: traced, since it cannot be scripted: ")
    assert "values of the example became constants of the trace" in out


def test_a_file_that_is_there_stays() -> None:
    Path("net.pt").write_text("mine")
    command = ("convert", "factories:Net", "--to", "torchscript", "-o", "net.pt", *SMALL)
    assert "exists already" in refused(*command)
    assert Path("net.pt").read_text() == "mine"
    done(*command, "--force")
    assert Path("net.pt").read_bytes().startswith(b"PK")


def test_a_promise_that_does_not_hold_has_a_code_of_its_own() -> None:
    said = refused("convert", "factories:Lies", "--to", "torchscript", "-o", "net.pt", *SMALL, code=3)
    assert "was to give the outputs of the original" in said
    assert not Path("net.pt").exists()


class Operates(nn.Module):
    """Operators that a model has in its own code, one with a strength that it computes."""

    def forward(self, x: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
        return gs.reverse_gradient(gs.scale_gradient(x=x, scale=2.0), strength)


def test_show_marks_the_operators() -> None:
    out = done("show", "resnet18", "layer3.0", "--grl", "layer3.0:add=0.5", "--stop", "layer3.0.conv1")
    lines = out.splitlines()
    assert lines[0] == "layer3.0 (BasicBlock)"
    assert "  %conv1 = conv1(x)  <== output: StopGradient()" in lines
    assert "  %reverse_gradient = reverse_gradient(add, 0.5)  <== op: GradientReversal(lambd=0.5)" in lines
    assert sum("<==" in line for line in lines) == 2
    layers = graph_lines(gs.insert_transform(timm.create_model("resnet18"), "layer3.0:add", torch.round), "layer3.0")
    assert [line.operators for line in layers if line.operators] == [("op: StraightThrough(fn=round)",)]
    own = [line.operators for line in graph_lines(Operates(), "")]
    assert own == [(), ("op: ScaleGradient(scale=2.0)",), ("op: GradientReversal",), ()]
    whole = as_json("show", "resnet18", "--grl", "layer3")
    assert [line["text"] for line in whole if line["operators"]] == ["  %layer3 = layer3(layer2)"]
    branches = done("show", "factories:Branches", "--grl", "stem")
    assert branches.startswith("the model (Branches)\n")
    assert "no module 'layer9'" in refused("show", "resnet18", "layer9")


def test_show_without_a_trace_lists_the_ops() -> None:
    lines = done("show", "swin_tiny_patch4_window7_224", "layers.0", "--grl", "layers.0").splitlines()
    assert lines[0].startswith("layers.0 (SwinTransformerStage)")
    looped = done("show", "factories:Branches", "--grl", "body").splitlines()
    assert any(line.endswith("<== output: GradientReversal(lambd=1.0)") for line in looped)


@pytest.mark.usefixtures("scripting")
def test_show_of_a_script_marks_the_children_of_a_container() -> None:
    gs.insert_grl(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), "0").save("net.pt")
    marked = [line["text"].strip() for line in as_json("show", "net.pt") if line["operators"]]
    assert marked == ['_0 = getattr(self, "0")']


def test_show_of_a_program() -> None:
    done("convert", "factories:Net", "--to", "exported", "-o", "net.pt2", *SMALL)
    lines = done("show", "net.pt2", "body", "--scale", "stem=0.5").splitlines()
    assert lines[0] == "body (graph)"
    marked = [line for line in done("show", "net.pt2", "--scale", "stem=0.5").splitlines() if "<==" in line]
    assert len(marked) == 1
    assert marked[0].endswith("<== ScaleGradient(scale=0.5)")
    assert "no such module" in refused("show", "net.pt2", "tail")


def test_a_recipe_is_applied_first() -> None:
    body = {"at": "body", "operator": "GradientReversal", "lambd": 0.5}
    Path("recipe.json").write_text(json.dumps({"format": 1, "operations": [body]}))
    found = as_json("audit", "factories:Net", "--recipe", "recipe.json", "--scale", "body=2", *SMALL)
    assert [one["operator"] for one in found["operators"]] == [
        "GradientReversal(lambd=0.5)",
        "ScaleGradient(scale=2.0)",
    ]
    Path("recipe.json").write_text("{")
    assert "cannot be read" in refused("audit", "factories:Net", "--recipe", "recipe.json", *SMALL)
    Path("recipe.json").write_text('{"format": 1, "operations": [{"at": "x", "operator": "os.system"}]}')
    assert "operator='os.system'" in refused("audit", "factories:Net", "--recipe", "recipe.json", *SMALL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("resnet81",), "no model of timm .* closest: 'resnet18'"),
        (("none.pt",), "no file that can be read"),
        (("some/where",), "no file that can be read"),
        (("factories.py",), "begins with"),
        (("factories:nothing",), "cannot be imported"),
        (("no_such_module:net",), "cannot be imported"),
        (("factories:",), "is no package.module:factory"),
        (("os; import x:net",), "is no package.module:factory"),
        (("factories:number",), "is a int"),
        (("factories:breaks",), "raised RuntimeError: no data here"),
        (("factories:ends",), "raised SystemExit: 5"),
        (("",), "'' is no model of timm"),
        (("factories:needs",), "its signature is \\(width\\)"),
        (("factories:text",), "returned a str"),
        (("factories:net", "--pretrained"), "is no timm name"),
        (("factories:net",), "what 'factories:net' takes is not known"),
        (("factories:net", "--input", "2x3xax8"), "is no shape"),
        (("factories:net", "--input", "2x3x8x8:float99"), "is no shape"),
        (("factories:net", "--input", ""), "is no shape"),
        (("factories:net", "--input", "999999999x999999999"), "cannot be made"),
        (("factories:net", "--input", "2x5x8x8"), "Give inputs that the model takes"),
        (("resnet18", "--grl", "layer33"), "has no module 'layer33'"),
        (("factories:net", "--grl", "stem=-1"), "negative"),
        (("factories:net", "--grl", "stem=nan"), "not finite"),
    ],
)
def test_what_is_refused_is_one_line_and_code_1(arguments: tuple[str, ...], said: str) -> None:
    grl = () if "--grl" in arguments else ("--grl", "body")
    assert re.search(said, refused("audit", *arguments, *grl))


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "factories:net", "--grl", "body=a", *SMALL),
        ("audit", "factories:net", "--scale", "body", *SMALL),
        ("convert", "factories:net", "-o", "net.pt", *SMALL),
        ("convert", "factories:net", "--to", "tensorrt", "-o", "net.pt", *SMALL),
        ("audit",),
        ("operate", "factories:net"),
        ("sites", "factories:net", "--nope"),
    ],
)
def test_wrong_usage_is_code_2(arguments: tuple[str, ...]) -> None:
    refused(*arguments, code=2)


def test_an_audit_without_operators_says_how_to_give_one() -> None:
    assert "Give --grl, --scale, --stop or --recipe" in refused("audit", "factories:net", *SMALL)


def test_an_equals_sign_in_a_key_is_part_of_the_place() -> None:
    assert "the element ['a=1']" in refused("audit", "factories:net", "--grl", "head['a=1']", *SMALL)


def test_several_inputs_of_their_own_types() -> None:
    inputs = ("--input", "3x5:int64", "--input", "4")
    assert done("audit", "factories:Embeds", "--grl", "embed", *inputs).count("reversed") == 1


def test_an_error_nobody_foresaw_is_code_4_and_debug_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setattr("gradsurgery.cli.app.sites_of", fails)
    assert "unforeseen KeyError: 'gone'. --debug shows where" in refused("sites", "factories:net", code=4)
    result = run("sites", "factories:net", "--debug")
    assert result.exit_code == 4
    assert "Traceback" in result.stderr


def test_random_weights_where_the_hub_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    create_model = timm.create_model

    def offline(name: str, pretrained: bool = False) -> nn.Module:
        if pretrained:
            raise OSError("no route to the hub")
        return create_model(name)

    monkeypatch.setattr(timm, "create_model", offline)
    result = run("audit", "resnet18", "--pretrained", "--grl", "layer3", "--input", "1x3x32x32", "--json")
    assert result.exit_code == 0
    assert result.stderr == "the weights of resnet18 could not be had (OSError), so they are random\n"
    assert json.loads(result.stdout)["notes"][0].startswith("the weights of resnet18 could not be had")


def test_progress_is_shown_on_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    quick = run("sites", "factories:net")
    assert "load" not in quick.stderr
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    slow = run("convert", "factories:Net", "--to", "exported", "-o", "net.pt2", *SMALL)
    assert "convert" in slow.stderr
    assert slow.stdout.startswith("exported: ")


def test_help_and_version() -> None:
    assert done("--version").strip() == gs.__version__
    out = done("--help")
    for word in ("sites", "audit", "convert", "show", "Exit codes"):
        assert word in out
    assert "--trust" in done("convert", "--help")


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradsurgery", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(gs.__file__).parents[1]), **environment},
    )


def test_a_process_of_its_own() -> None:
    made = shell("convert", "factories:Net", "--grl", "body", "--to", "torchscript", "-o", "net.pt", *SMALL)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("torchscript: scripted")
    assert made.stderr == ""
    torch.save({"a": 1}, "weights.pt")
    wrong = shell("audit", "weights.pt", "--grl", "body")
    assert wrong.returncode == 1
    assert wrong.stdout == ""
    assert re.fullmatch(r"error: 'weights.pt' is a dict of 1 entries .*\n", wrong.stderr)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # to import it raises ModuleNotFoundError
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"the command line was asked for, and {missing} is not installed. ")
    assert '"gradsurgery[cli]"' in said


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refused("audit", "factories:not_there", "--grl", "body", "--plot", "out.png")
    assert '"gradsurgery[plot]"' in said


def test_what_a_model_prints_is_not_among_the_results() -> None:
    result = run("audit", "factories:Chatty", "--grl", "linear", "--input", "2x8", "--json")
    assert json.loads(result.stdout)["operators"][0]["address"] == "linear"
    assert "built\n" in result.stderr and "run\n" in result.stderr


@pytest.mark.parametrize(("source", "said"), [("def f(:", "SyntaxError"), ("raise SystemExit(3)", "SystemExit: 3")])
def test_a_module_that_fails_when_it_is_imported_is_refused(source: str, said: str, here: Path) -> None:
    (here / "broken.py").write_text(source)
    assert f"importing 'broken' raised {said}" in refused("sites", "broken:net")


def test_a_forward_that_ends_the_process_ends_the_command() -> None:
    assert "SystemExit: 7" in refused("audit", "factories:Leaves", "--grl", "linear", "--input", "2x8", code=4)


def test_the_entry_point_is_that_function() -> None:
    (target,) = re.findall(r'^gradsurgery = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert target == f"{main.__module__}:{main.__name__}"
