"""The picture of dann_digits.py: the two domains, the target accuracy by seed, the features in two ways of training."""

from pathlib import Path

import numpy as np
from torch import Tensor


def draw(
    path: Path,
    digits: dict[str, Tensor],
    accuracies: dict[str, dict[str, list[float]]],
    features: dict[str, list[Tensor]],
    labels: list[Tensor],
) -> None:
    """Save the picture.

    Args:
        path: where to, a PNG.
        digits: by domain, images of shape (10, H, W), one of each digit.
        accuracies: by network and way of training, one fraction for each seed.
        features: by way of training, those of source and of target, each of shape (N, C); two ways.
        labels: the digits that the features of source and of target belong to, each of shape (N,).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from sklearn.manifold import TSNE

    figure = plt.figure(figsize=(12, 4.2), layout="constrained")
    mosaic = [["digits", *features], ["dots", *features]]
    axes = figure.subplot_mosaic(mosaic, height_ratios=[1, 3], width_ratios=[1.3, 1, 1])
    strips = [np.concatenate(list(images.numpy()), 1) for images in digits.values()]
    axes["digits"].imshow(np.concatenate(strips), cmap="gray_r")
    axes["digits"].set_xticks([])
    height = len(strips[0])
    axes["digits"].set_yticks([height * (row + 0.5) for row in range(len(strips))], list(digits))

    dots = axes["dots"]
    for row, (network, ways) in enumerate(accuracies.items()):
        values = np.array(list(ways.values())) * 100
        places = np.arange(len(ways)) + 0.24 * row - 0.12
        lines = dots.plot(places, values, marker="os"[row], color=f"C{row}", alpha=0.5, linewidth=0.8)
        lines[0].set_label(network)
        dots.hlines(values.mean(1), places - 0.1, places + 0.1, color="black", zorder=3)
        dots.set_xticks(range(len(ways)), [way.replace(" ", "\n", 1) for way in ways], fontsize=8)
    dots.set_ylabel("target accuracy, %\n(a line for each seed, bars: means)", fontsize=8)
    dots.legend(fontsize=8, loc="upper left")
    dots.grid(axis="y", alpha=0.3)

    for way, both in features.items():
        points = TSNE(init="pca", random_state=0, perplexity=20).fit_transform(np.concatenate(both))
        halves = np.split(points, [len(both[0])])
        for half, shown, marker in zip(halves, labels, "o+", strict=True):
            axes[way].scatter(*half.T, c=shown.numpy(), cmap="tab10", marker=marker, s=16, linewidths=0.9)
        axes[way].set_title(f"{way}: features of {' (o) and '.join(digits)} (+),\ncoloured by digit", fontsize=9)
        axes[way].set_axis_off()
    figure.savefig(path, dpi=90)
    plt.close(figure)
