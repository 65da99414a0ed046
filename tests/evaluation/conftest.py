"""Fixtures of the evaluation tests."""

import pytest
import torch

from meanshift import config
from meanshift.evaluation.context import EvaluationContext
from meanshift.models.encoder import build_backbone
from tests.support.colors import make_weights, write_colors


@pytest.fixture
def make_context(tmp_path):
    """make_context(backbone=None, **options of write_colors) -> EvaluationContext on six colors."""

    def make(backbone=None, **options):
        data = write_colors(tmp_path / "colors.npz", **options)
        return EvaluationContext(make_weights(tmp_path / "out", backbone), data)

    return make


@pytest.fixture
def resnet():
    torch.manual_seed(0)
    backbone, _ = build_backbone(config.Encoder(name="resnet10", stem="small", width=0.125))
    return backbone


@pytest.fixture
def photos(tmp_path, make_images):
    """A folder with two splits of two classes, 8 images each."""
    counts = {f"{split}/{name}": 8 for split in ("train", "val") for name in "ab"}
    return make_images(tmp_path / "photos", counts, size=(16, 16))
