"""Conversion: what is written computes and trains as the model does, what would not is not written."""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurgery as gs


class Net(nn.Module):
    """A convolution, a BatchNorm, a residual addition, Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.body(x)
        return self.head(self.drop(x).mean((2, 3)))


class Unscriptable(Net):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x) * sum({len(name): 2 for name in ("a",)}.values())


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def net(kind: type[Net] = Net, training: bool = False) -> Net:
    torch.manual_seed(0)
    return kind().train(training)


def operated(kind: type[Net] = Net, training: bool = False) -> Net:
    model = net(kind, training)
    gs.insert_grl(model, "body", 0.5)
    gs.insert_stop_gradient(model, "stem.0")
    return model


def gradients(model: nn.Module, x: Tensor = X) -> dict[str, Tensor | None]:
    torch.manual_seed(3)
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        there = other[name]
        assert (gradient is there) or (gradient is not None and there is not None and torch.equal(gradient, there)), (
            name
        )


@pytest.mark.usefixtures("scripting")
@pytest.mark.parametrize("training", [False, True])
def test_torchscript_trains_as_the_model_does(
    training: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = operated(training=training)
    scripted = gs.to_torchscript(model, tmp_path / "net.pt", X)
    assert capsys.readouterr().out.splitlines() == [
        f"torchscript: scripted, 0.0 MiB in {tmp_path / 'net.pt'}",
        "outputs, in each of 3 runs: exact (bit-identical)",
        "gradients of 8 parameters, in each of 3 runs: exact",
    ]
    expected = gradients(model)
    assert expected["stem.0.weight"] is None
    for made in (scripted, torch.jit.load(tmp_path / "net.pt")):
        assert_same(gradients(made), expected)


@pytest.mark.parametrize("training", [False, True])
def test_an_exported_program_trains_as_the_model_does(
    training: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = operated(training=training)
    program = gs.to_exported(model, X, tmp_path / "net.pt2")
    out = capsys.readouterr().out
    assert f"exported: in {'training' if training else 'evaluation'} mode, 0.0 MiB in" in out
    assert "outputs: exact (bit-identical)\ngradients of 8 parameters: exact\n" in out
    assert "run_decompositions loses the operators" in out
    for made in (program, torch.export.load(tmp_path / "net.pt2")):
        assert_same(gradients(made.module()), gradients(model))


def test_the_options_of_torch_export_are_passed_on() -> None:
    batch = torch.export.Dim("batch", min=2)
    module = gs.to_exported(operated(), X, dynamic_shapes=({0: batch},)).module()
    many = torch.randn(5, 3, 8, 8)
    assert_same(gradients(module, many), gradients(operated(), many))


def test_onnx_is_run_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    model = operated(training=True)
    gs.insert_transform(model, "head", torch.round)  # a value that stays, in inference too
    gs.to_onnx(model, X, tmp_path / "net.onnx")
    assert model.training
    assert len(gs.operations(model)) == 3
    out = capsys.readouterr().out
    assert f"onnx: in evaluation mode, 0.0 MiB in {tmp_path / 'net.onnx'}\noutputs: " in out
    assert f"run with onnxruntime {onnxruntime.__version__}" in out
    assert [one.name for one in tmp_path.iterdir()] == ["net.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    assert torch.equal(torch.from_numpy(y), model.eval()(X))
    assert y.any()


@pytest.mark.usefixtures("scripting")
def test_a_trace_takes_over_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = operated(Unscriptable)
    traced = gs.to_torchscript(model, tmp_path / "net.pt", X)
    out = capsys.readouterr().out
    assert out.startswith("torchscript: traced, since it cannot be scripted: ")
    assert "ignores train() and eval()" in out
    assert_same(gradients(traced), gradients(model))
    with pytest.raises(gs.SurgeryError, match="cannot compile this model: .* Give example="):
        gs.to_torchscript(model)


def test_without_an_example_nothing_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    scripted = gs.to_torchscript(operated())
    assert "outputs and gradients: not checked (no example was given)" in capsys.readouterr().out
    assert_same(gradients(scripted), gradients(operated()))
    for convert in (gs.to_exported, lambda *given: gs.to_onnx(*given, "net.onnx")):
        with pytest.raises(gs.SurgeryError, match="Give example="):
            convert(operated(), None)


def louder(model: nn.Module) -> nn.Module:
    """The model with one weight off by a thousandth."""
    with torch.no_grad():
        model.head.weight[0, 0] *= 1.001
    return model


LIES: list[tuple[str, Callable[[], nn.Module]]] = [
    ("gradients of the original. They differ in 6 parameters: stem.0.weight: some, where none was", net),
    ("outputs of the original. They are off by up to", lambda: louder(operated())),
    (
        "gradients of the original. They differ in .* body.weight: off by",
        lambda: gs.insert_stop_gradient(net(), "stem.0"),
    ),
]


@pytest.mark.parametrize(("said", "lie"), LIES)
@pytest.mark.parametrize("form", ["torchscript", "exported"])
def test_a_tool_that_lies_is_found_out_and_nothing_is_written(
    form: str, said: str, lie: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = operated(), lie()
    if form == "torchscript":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is deprecated
            made = torch.jit.script(other)
        monkeypatch.setattr(torch.jit, "script", lambda root: made)
        with pytest.raises(gs.VerificationError, match=said):
            gs.to_torchscript(model, tmp_path / "net.pt", X)
    else:
        program = torch.export.export(other, (X,))
        monkeypatch.setattr(torch.export, "export", lambda *args, **options: program)
        with pytest.raises(gs.VerificationError, match=said):
            gs.to_exported(model, X, tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_rounding_is_measured_in_the_precision_of_the_model(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    gs.insert_grl(model, "0", 0.5)
    gs.to_onnx(model, torch.randn(8, 64, dtype=dtype), tmp_path / "net.onnx")
    assert "outputs: within rounding (" in capsys.readouterr().out  # onnxruntime adds in another order


def test_a_wrong_onnx_file_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = torch.onnx.export

    def wrong(root: nn.Module, *rest: Any, **options: Any) -> Any:
        return export(louder(copy.deepcopy(root)), *rest, **options)

    monkeypatch.setattr(torch.onnx, "export", wrong)
    with pytest.raises(gs.VerificationError, match="off by up to .*, where one rounding of each weight makes"):
        gs.to_onnx(operated(), X, tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_for_inference_only_what_acts_on_values_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = operated(training=True)
    gs.insert_transform(model, "stem", torch.tanh)
    gs.attach_head(model, "stem", nn.Flatten(), name="aside", training_only=True)
    rows = [str(row) for row in gs.operations(model)]
    scripted = gs.to_torchscript(model, tmp_path / "net.pt", X, for_inference=True)
    out = capsys.readouterr().out
    assert out.startswith("torchscript: scripted")
    assert "gradients" not in out
    assert not scripted.training
    assert model.training
    assert [str(row) for row in gs.operations(model)] == rows
    assert torch.equal(scripted(X), model.eval()(X))
    assert "aten::tanh" in str(scripted.inlined_graph)
    for inference in (False, True):  # how a reversal is written in TorchScript
        made = gs.to_torchscript(gs.insert_grl(net(), "body"), example=X, for_inference=inference)
        assert ("aten::copy_" in str(made.inlined_graph)) is not inference
    program = gs.to_exported(gs.insert_grl(net(), "body"), X, for_inference=True)
    assert "detach" not in str(program.graph)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def test_a_parameter_of_two_names_is_one() -> None:
    """What torch.export.load returns has two in its place, which share memory and not their gradient."""
    model, x = gs.insert_grl(Tied(), "a", 0.5), torch.randn(2, 4)
    made = gs.to_torchscript(model, example=x)
    assert_same(gradients(made, x), gradients(model, x))
    with pytest.raises(
        gs.VerificationError, match=r"a.weight: one parameter has become 2, a.weight and b.weight, which"
    ):
        gs.to_exported(model, x)
    gs.to_exported(model, x, for_inference=True)


def test_heads_are_converted_too() -> None:
    def with_head() -> nn.Module:
        model = net()
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        # Two gradients meet there, whose sum is the same in either order; of three it would not be.
        return gs.attach_head(model, "body", head, operator=gs.GradientReversal(0.5), name="domain")

    def loss(model: nn.Module) -> dict[str, Tensor | None]:
        y, heads = model(X)
        (y.sum() + heads["domain"].square().sum()).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    torch.manual_seed(7)
    model = with_head()
    for made in (gs.to_torchscript(model, example=X), gs.to_exported(model, X).module()):
        model.zero_grad()
        assert_same(loss(made), loss(model))


def test_the_model_is_left_as_it_was() -> None:
    model = operated(training=True)
    gradients(model)
    before = [(p, p.grad, p.clone()) for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    runs, stream = [row.runs for row in gs.operations(model)], torch.get_rng_state()
    gs.to_torchscript(model, example=X)
    gs.to_exported(model, X)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is g and torch.equal(p, v) for p, g, v in before)
    assert all(map(torch.equal, model.buffers(), buffers))
    assert [row.runs for row in gs.operations(model)] == runs


def test_an_operator_that_did_not_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 7:
                x = self.never(x)
            return super().forward(x)

    gs.to_torchscript(gs.insert_grl(net(Two), "never"), example=X)
    assert "'never' did not run on the example, so nothing was checked of it" in capsys.readouterr().out


def test_a_model_without_a_gradient_claims_none(capsys: pytest.CaptureFixture[str]) -> None:
    gs.to_torchscript(operated().requires_grad_(False), example=X)
    assert (
        "gradients, in each of 3 runs: not checked (no parameter gets one on this example)" in capsys.readouterr().out
    )


def test_what_no_format_holds_is_refused_with_both_reasons(tmp_path: Path) -> None:
    model = gs.insert(net(), "body", gs.MapGradient(torch.neg))
    with pytest.raises(gs.SurgeryError, match=r"neither be compiled \(.*MapGradient.*\) nor traced \(map_gradient"):
        gs.to_torchscript(model, tmp_path / "net.pt", X)
    with pytest.raises(gs.OperatorError, match="map_gradient"):
        gs.to_exported(model, X, tmp_path / "net.pt2")
    gs.to_onnx(model, X, tmp_path / "net.onnx")
    gs.to_exported(model, X, tmp_path / "net.pt2", for_inference=True)
    lost = gs.insert_grl(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1")
    with pytest.raises(gs.VerificationError, match="is lost"):
        gs.to_torchscript(nn.SyncBatchNorm.convert_sync_batchnorm(lost))


def test_wrong_inputs_are_said_to_be_wrong() -> None:
    for convert in (gs.to_torchscript, gs.to_exported):
        wrong = torch.ones(1, 9, 8, 8)
        with pytest.raises(gs.SurgeryError, match="expected input"):
            convert(operated(), example=wrong)


@pytest.mark.parametrize("convert", [gs.to_torchscript, gs.to_exported, gs.to_onnx])
def test_where_something_is_already_nothing_is_written(convert: Callable[..., Any], tmp_path: Path) -> None:
    there = tmp_path / "net.pt2"
    there.write_text("mine")
    with pytest.raises(gs.SurgeryError, match="exists already. Give another path, or force=True"):
        convert(operated(), path=there, example=X)
    assert there.read_text() == "mine"
    convert(operated(), path=there, example=X, force=True)
    assert there.stat().st_size > 1000
    assert list(tmp_path.iterdir()) == [there]
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(gs.SurgeryError, match="is a directory"):
        convert(operated(), path=tmp_path / "folder.pt2", example=X, force=True)
    with pytest.raises(gs.SurgeryError, match="there is no directory"):
        convert(operated(), path=tmp_path / "none" / "net.pt2", example=X)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with a name, nor links for everyone")
def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(gs.SurgeryError, match="is no ordinary file"):
        gs.to_torchscript(operated(), tmp_path / "pipe.pt", X, force=True)
    (tmp_path / "real.pt").write_text("mine")
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")
    gs.to_torchscript(operated(), tmp_path / "link.pt", X, force=True)
    assert (tmp_path / "link.pt").is_symlink()
    assert (tmp_path / "real.pt").read_bytes().startswith(b"PK")


def test_export_needs_its_ending(tmp_path: Path) -> None:
    with pytest.raises(gs.SurgeryError, match="ends in '.pt2'"):
        gs.to_exported(operated(), X, tmp_path / "net.pt")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(gs.SurgeryError, match=r"onnxruntime is not installed.*gradsurgery\[onnx\]"):
        gs.to_onnx(operated(), X, "net.onnx")


def test_the_file_trains_where_this_package_is_not_installed(tmp_path: Path) -> None:
    model = operated()
    gs.to_torchscript(model, tmp_path / "net.pt", X)
    torch.save((X, {name: g for name, g in gradients(model).items() if g is not None}), tmp_path / "due.pt")
    script = f"""
import sys
sys.modules["gradsurgery"] = None
import torch
torch.set_num_threads(1)
net = torch.jit.load({str(tmp_path / "net.pt")!r})
x, due = torch.load({str(tmp_path / "due.pt")!r})
net(x).square().sum().backward()
there = {{name: p.grad for name, p in net.named_parameters() if p.grad is not None}}
assert there.keys() == due.keys(), there.keys() ^ due.keys()
assert all(torch.equal(there[name], g) for name, g in due.items())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
