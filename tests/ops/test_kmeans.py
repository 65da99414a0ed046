"""k-means against scikit-learn, its restarts, and degenerate data."""

import math

import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch.nn import functional as F

from meanshift.ops.kmeans import kmeans, kmeans_plusplus, spherical_kmeans
from meanshift.runtime import rng
from tests.support.forked import in_processes


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


def test_spherical_kmeans_follows_a_naive_version():
    rows = F.normalize(torch.randn(50, 4, generator=torch.Generator().manual_seed(3)).double())
    centers = [rows[int(i)] for i in rng.choice(8, 50, 6, rng.SAMPLE)]
    for _ in range(5):
        nearest = [max(range(6), key=lambda k: float(row @ centers[k])) for row in rows]
        for k in range(6):
            members = [row for row, near in zip(rows, nearest, strict=True) if near == k]
            if members:
                mean = sum(members) / len(members)
                centers[k] = mean / mean.norm()
    labels = [max(range(6), key=lambda k: float(row @ centers[k])) for row in rows]
    found, found_centers = spherical_kmeans(rows, 6, iterations=5, seed=8, chunk=16)
    assert found.tolist() == labels
    torch.testing.assert_close(found_centers, torch.stack(centers))


def test_an_empty_cluster_of_spherical_kmeans_keeps_its_center():
    rows = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), dim=1)
    labels, centers = spherical_kmeans(rows, 3)
    assert len(labels.unique()) == 2
    torch.testing.assert_close(centers.norm(dim=1), torch.ones(3))
    with pytest.raises(ValueError, match="got 4 clusters for 3 images"):
        spherical_kmeans(rows, 4)


def test_spherical_kmeans_in_two_processes_finds_the_clusters_of_one():
    rows = F.normalize(torch.randn(51, 4, generator=torch.Generator().manual_seed(3)).double())
    alone, centers = spherical_kmeans(rows, 6)
    for labels, found in in_processes(2, lambda: spherical_kmeans(rows, 6)):
        assert torch.equal(labels, alone)
        torch.testing.assert_close(found, centers)
