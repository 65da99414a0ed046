"""The ranks of an encoder's features and embeddings, from a run and from weights of others."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meanshift.evaluation import rank
from meanshift.evaluation.context import EvaluationContext
from tests.support.colors import make_weights


def test_ranks_are_of_views_of_training_images(make_context, monkeypatch):
    monkeypatch.setattr(rank, "LIDAR_VIEWS", 4)
    result = rank.evaluate(make_context())
    agreement = {"neighbor stability", "view retrieval"}
    assert set(result.metrics) == {"effective rank", "RankMe", "LiDAR", *agreement}
    assert result.settings["RankMe images"] == result.settings["LiDAR images"] == 600
    assert 1 <= result.metrics["LiDAR"] <= result.settings["most"]["features"]
    assert result.metrics == rank.evaluate(make_context()).metrics


def test_the_agreement_of_views_counts_common_neighbors_and_own_views():
    torch.manual_seed(0)
    one = F.normalize(torch.randn(40, 8), dim=1)
    same = rank.view_agreement(one, 3 * one)
    assert same == {"neighbor stability": 1.0, "view retrieval": 100.0}
    other = F.normalize(one + torch.randn(40, 8) / 3, dim=1)
    measured = rank.view_agreement(one, other)
    near_one = _nearest_others(one)
    near_other = _nearest_others(other)
    common = [len(a & b) / 10 for a, b in zip(near_one, near_other, strict=True)]
    assert measured["neighbor stability"] == pytest.approx(sum(common) / 40)
    found = (one @ other.T).argmax(1) == torch.arange(40)
    assert measured["view retrieval"] == pytest.approx(100 * found.float().mean().item())
    assert 0 < measured["neighbor stability"] < 1
    assert rank.view_agreement(one, other * torch.nan)["view retrieval"] == 0


def _nearest_others(features):
    similarities = features @ features.T
    similarities.fill_diagonal_(-2)
    return [set(row.topk(10).indices.tolist()) for row in similarities]


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
