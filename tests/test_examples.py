"""The examples that train, each in its quick setting: they run, and what they rest on holds."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import _digits
import _minimax_toy
import gradsurgery as gs
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
