"""The examples that train, each in its quick setting: they run, and what they rest on holds."""

import pytest
import torch

import _digits


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
