"""The dataset of the tests of reproductions."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """200 red, green and blue images to train on and 60 to evaluate on."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in {"train": 200, "test": 60}.items():
        labels = np.arange(count) % 3
        pixels = rng.integers(0, 60, (count, 16, 16, 3))
        pixels[np.arange(count), :, :, labels] += 180
        arrays |= {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels}
    path = tmp_path_factory.mktemp("dataset") / "a <i>name with markup.npz"
    np.savez(path, **arrays)
    return path
