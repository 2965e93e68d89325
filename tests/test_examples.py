"""The examples that train, each in its quick setting: they run, and what they rest on holds."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from torch import nn

import _digits
import _minimax_toy
import debias_colour
import gradsurgery as gs
import minimax_entropy
import quantize_ste
import source_documents


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, picture: Path, *arguments: str) -> None:
    """The script as its command line runs it; the picture must be one that a README can hold."""
    monkeypatch.setattr("sys.argv", [script.__name__, "--quick", "--picture", str(picture), *arguments])
    script.main()
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 120_000


@pytest.mark.parametrize(("load", "count"), [(_digits.mnist, 5000), (_digits.uci, 1797)])
def test_digits_have_one_form(load: object, count: int) -> None:
    images, labels = load()
    assert images.shape == (count, 1, 28, 28) and images.dtype == torch.float32
    assert labels.shape == (count,) and labels.dtype == torch.int64
    assert images.min() == 0 and images.max() == 1 and labels.unique().tolist() == list(range(10))


def test_digits_are_taken_evenly_and_once() -> None:
    digits = _digits.Digits(torch.arange(60.0), torch.arange(60) % 10)
    drawn, rest = _digits.take(digits, 2, seed=3)
    assert drawn.labels.bincount().tolist() == [2] * 10
    assert torch.cat([drawn.images, rest.images]).sort().values.equal(digits.images)
    assert torch.equal(drawn.images, _digits.take(digits, 2, seed=3)[0].images)
    assert not torch.equal(drawn.images, _digits.take(digits, 2, seed=4)[0].images)
    with pytest.raises(ValueError, match="7 of each class"):
        _digits.take(digits, 7, seed=0)


@pytest.mark.parametrize("pattern", source_documents.PATTERNS, ids=lambda pattern: pattern.__name__)
def test_pattern_of_the_source_documents_is_exact(pattern: Callable[[], Any]) -> None:
    claims = list(pattern())
    assert claims and [claim for claim in claims if not claim.exact] == []


@pytest.mark.parametrize(
    ("pattern", "broken"),
    [
        (source_documents.reversal, "insert_grl"),
        (source_documents.straight_through, "insert_transform"),
        (source_documents.frozen, "insert_transform"),
        (source_documents.cut, "insert_transform"),
        (source_documents.pitfalls, "insert_grl"),
        (source_documents.minimax_entropy, "insert_grl"),
    ],
)
def test_pattern_sees_an_insertion_that_does_nothing(
    pattern: Callable[[], Any], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gs, broken, lambda model, *_args, **_kwargs: model)
    monkeypatch.setattr(gs, "remove", lambda model: model)
    assert not all(claim.exact for claim in pattern())


def test_buffers_are_kept_by_a_layer_that_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_a_layer(model: nn.Module, at: str, fn: nn.Module, backward: str) -> nn.Module:
        return gs.insert(model, at, fn)

    monkeypatch.setattr(gs, "insert_transform", as_a_layer)
    *_, kept = source_documents.frozen()
    assert kept.got > 0


def test_minimax_toy_settles_behind_a_reversal_and_blows_up_on_a_negated_loss() -> None:
    reversed_, negated = (_minimax_toy.minimax(how, 400) for how in ("reversal", "task - domain"))
    assert abs(reversed_.domain[-1] - math.log(2)) < 0.005 and reversed_.task[-1] < 0.05
    assert reversed_.domain[0] == negated.domain[0] and not math.isfinite(negated.domain[-1])


def test_source_documents_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    run(source_documents, monkeypatch, tmp_path / "picture.png")
    assert "All 33 exact" in capsys.readouterr().out


@pytest.mark.parametrize("script", [debias_colour, minimax_entropy, quantize_ste], ids=lambda script: script.__name__)
def test_training_script_runs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, monkeypatch, tmp_path / "picture.png")
    assert "of 1 seeds" in " ".join(capsys.readouterr().out.split())


def test_colour_goes_with_the_digit_only_where_it_should() -> None:
    digits, _ = _digits.take(_digits.mnist(), 30, seed=0)
    assert torch.equal(debias_colour.paint(digits, 1, seed=0).colours, digits.labels)
    random = debias_colour.paint(digits, 0, seed=0)
    assert (random.colours == digits.labels).float().mean() < 0.2
    palette = debias_colour.palette()
    assert torch.allclose(palette.sum(1), torch.tensor(1.5)) and palette.min() >= 0 and palette.max() <= 1
    ink = digits.images.flatten(1).argmax(1)
    seen = random.images.flatten(2)[torch.arange(300), :, ink]
    named = torch.nn.functional.normalize(seen - seen.mean(1, keepdim=True)) @ (palette - 0.5).T
    assert (named.argmax(1) == random.colours).float().mean() > 0.9  # the colour can be seen


@pytest.mark.parametrize(("way", "sign"), [("head", 1), ("reversal", -1)])
def test_colour_head_pushes_the_layer_the_way_that_is_said(way: str, sign: int) -> None:
    digits, _ = _digits.take(_digits.mnist(), 5, seed=0)
    data = debias_colour.paint(digits, 0.95, seed=0)
    model = debias_colour.train(way, data, seed=0, epochs=1, lambd=1.0).train()
    if way == "reversal":
        gs.operations(model)[0].operator.lambd = 1.0
    weight, cross_entropy = model.conv1[0].weight, nn.functional.cross_entropy
    (through,) = torch.autograd.grad(cross_entropy(model(data.images)[1]["colour"], data.colours), weight)
    (plain,) = torch.autograd.grad(cross_entropy(model.colour(model.conv1(data.images)), data.colours), weight)
    assert torch.equal(through, sign * plain)


def test_splits_of_the_target_do_not_overlap() -> None:
    data = minimax_entropy.splits(0, shots=3)
    assert [len(part.labels) for part in data] == [1500, 30, 600, 200, 600]
    every = _digits.uci().images.flatten(1)
    rows = torch.cat([part.images for part in data[1:]]).flatten(1)
    twice = len(every) - len(every.unique(dim=0))  # digits that are in the collection twice
    assert len(rows) - len(rows.unique(dim=0)) <= twice


def test_entropy_falls_where_it_is_minimised() -> None:
    data = minimax_entropy.splits(0, shots=3)
    labels, minimum = (minimax_entropy.train(way, data, 0, steps=15, weight=1.0) for way in ("labels", "minimum"))
    of = [minimax_entropy.measure("", model, data.unlabelled).entropy for model in (labels, minimum)]
    assert of[1] < 0.8 * of[0]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_levels_are_as_many_as_asked(count: int) -> None:
    values = quantize_ste.Levels(count, 4.0)(torch.linspace(-2, 9, 500)).unique()
    assert torch.equal(values, torch.arange(count) * (4.0 / (count - 1)))


@pytest.mark.parametrize(("backward", "trains"), [("none", False), ("straight_through", True)])
def test_layers_below_a_rounding_train_only_straight_through(backward: str, trains: bool) -> None:
    digits, _ = _digits.take(_digits.mnist(), 10, seed=0)
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gs.insert_transform(model, "layer2", quantize_ste.Levels(3, 2.0), backward=backward)
    quantize_ste.train(model, digits, epochs=1, lr=1e-3, seed=0)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert ("conv1.0.weight" in moved) is trains and "fc.weight" in moved
    values = []
    model.layer3.register_forward_pre_hook(lambda _module, args: values.append(args[0].unique()))
    model(digits.images[:5])
    assert set(values[0].tolist()) <= {0.0, 1.0, 2.0}
