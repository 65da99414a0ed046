"""The ranks of an encoder's features and embeddings, from a run and from weights of others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meanshift.evaluation import rank
from meanshift.evaluation.context import EvaluationContext
from tests.support.colors import make_weights


def test_ranks_are_of_views_of_training_images(make_context, monkeypatch):
    monkeypatch.setattr(rank, "LIDAR_VIEWS", 4)
    result = rank.evaluate(make_context())
    assert set(result.metrics) == {"effective rank", "RankMe", "LiDAR"}
    assert result.settings["RankMe images"] == result.settings["LiDAR images"] == 600
    assert 1 <= result.metrics["LiDAR"] <= result.settings["most"]["features"]
    assert result.metrics == rank.evaluate(make_context()).metrics


def test_a_projector_has_ranks_of_its_own(make_context, monkeypatch):
    monkeypatch.setattr(rank, "LIDAR_VIEWS", 3)
    context = make_context()
    context.weights = replace(context.weights, projector=OneDirection())
    metrics = rank.evaluate(context).metrics
    assert metrics["effective rank, embeddings"] == pytest.approx(1, abs=1e-3)
    assert metrics["effective rank"] > 1.5


class OneDirection(nn.Module):
    def forward(self, features):
        return features[:, :1] * torch.tensor([1.0, 2.0, 3.0])


def test_a_constant_encoder_has_no_rank(tmp_path, photos, monkeypatch):
    class Constant(nn.Module):
        def forward(self, images):
            return torch.ones(len(images), 4)

    monkeypatch.setattr(rank, "LIDAR_VIEWS", 3)
    context = EvaluationContext(make_weights(tmp_path / "out", Constant()), str(photos))
    metrics = rank.evaluate(context).metrics
    assert metrics["effective rank"] == 0 and metrics["LiDAR"] == pytest.approx(1, abs=1e-3)
    assert metrics["RankMe"] == pytest.approx(1, abs=1e-3)
