"""k-means against scikit-learn, its restarts, and degenerate data."""

import math

import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch.nn import functional as F

from meanshift.ops.kmeans import kmeans, kmeans_plusplus
from meanshift.runtime import rng


@pytest.mark.parametrize("chunk", [64, 10_000])
def test_kmeans_agrees_with_scikit_learn_from_the_same_start(chunk):
    features = torch.randn(700, 6, generator=torch.Generator().manual_seed(0))
    unit = F.normalize(features, dim=1)
    start = kmeans_plusplus(features, 9, seed=rng.derive_seed(4, 0, rng.SAMPLE)).numpy()
    reference = KMeans(9, init=start, n_init=1, max_iter=20, tol=0).fit(unit.numpy())
    assignment, distance = kmeans(features, 9, iterations=20, seed=4, chunk=chunk)
    assert adjusted_rand_score(reference.labels_, assignment.numpy()) > 0.95
    assert distance == pytest.approx(reference.inertia_ / 700, rel=2e-3)


def test_kmeans_returns_the_best_restart_and_is_repeatable():
    features = torch.randn(300, 4, generator=torch.Generator().manual_seed(2))
    distances = [kmeans(features, 20, restarts=count)[1] for count in (1, 2, 4, 8)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > distances[-1]
    assignment, _ = kmeans(features, 12, restarts=4)
    assert torch.equal(assignment, kmeans(features, 12, restarts=4)[0])
    assert not torch.equal(assignment, kmeans(features, 12, restarts=4, seed=1)[0])


def test_identical_rows_leave_clusters_empty():
    assignment, distance = kmeans(torch.ones(20, 3), 4)
    assert len(assignment) == 20
    assert math.isfinite(distance)
    assert distance == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("clusters", [-1, 21])
def test_an_impossible_number_of_clusters_is_refused(clusters):
    with pytest.raises(ValueError, match=rf"got {clusters} clusters for 20 images"):
        kmeans(torch.ones(20, 3), clusters)
