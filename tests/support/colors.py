"""Images of six colors, and an encoder that sees them: what evaluation protocols are tested on."""

import numpy as np
import torch
from torch import nn

from meanshift.models.weights import Weights

COLORS = np.array(
    [
        [200, 40, 40],
        [40, 200, 40],
        [40, 40, 200],
        [190, 190, 30],
        [190, 30, 190],
        [30, 190, 190],
    ]
)


def write_colors(path, *, shuffled=False, train=600, test=300, seed=0):
    """Write images of six colors with a little noise: any crop of one shows its class."""
    rng = np.random.default_rng(seed)

    def split(count):
        labels = np.arange(count) % 6
        pixels = COLORS[labels][:, None, None] + rng.normal(0, 12, (count, 12, 12, 3))
        labels = rng.permutation(labels) if shuffled else labels
        return np.clip(pixels, 0, 255).astype(np.uint8), labels

    x_train, y_train = split(train)
    x_test, y_test = split(test)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return str(path)


class MeanColor(nn.Module):
    """The mean color of an image and its square: separates the classes, whatever the crop."""

    def forward(self, images):
        mean = images.mean((2, 3))
        return torch.cat([mean, mean.square()], 1)


def make_weights(output_dir, backbone=None):
    """Weights that come from no file, for images of 12 pixels."""
    return Weights("made", backbone or MeanColor(), "made in a test", 12, output_dir)
