"""A folder of images, and a run that was trained on it."""

import pytest

from tests.support.commands import TINY


@pytest.fixture
def photos(tmp_path, make_images):
    """Two classes, with images to train on and others to evaluate on."""
    counts = {"train/a": 6, "train/b": 6, "val/a": 2, "val/b": 2}
    return make_images(tmp_path / "photos", counts, size=(20, 24))


@pytest.fixture
def trained(call, photos, tmp_path):
    """A finished run on `photos`."""
    code, _, err = call("pretrain", "small", "--data", photos, "--out", tmp_path / "run", *TINY)
    assert code == 0, err
    return tmp_path / "run"
