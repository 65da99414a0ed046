"""Clusters against labels: the metrics of scikit-learn, and an exhaustive matching."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from meanshift.evaluation import cluster, knn
from meanshift.evaluation.context import EvaluationContext
from tests.support.colors import make_weights
from tests.support.packages import hide_packages


def test_clusters_are_compared_with_labels_as_scikit_learn_does():
    random = np.random.default_rng(0)
    labels, assigned = random.integers(0, 5, 300), random.integers(0, 7, 300)
    assigned[:150] = labels[:150]
    metrics = cluster.agreement(torch.from_numpy(assigned), torch.from_numpy(labels))
    assert metrics["NMI"] == pytest.approx(100 * normalized_mutual_info_score(labels, assigned))
    assert metrics["ARI"] == pytest.approx(100 * adjusted_rand_score(labels, assigned))


def test_the_best_matching_is_that_of_an_exhaustive_search():
    random = np.random.default_rng(1)
    labels, assigned = random.integers(0, 4, 60), random.integers(0, 4, 60)
    best = max(
        np.mean(np.array(renamed)[assigned] == labels)
        for renamed in itertools.permutations(range(4))
    )
    metrics = cluster.agreement(torch.from_numpy(assigned), torch.from_numpy(labels))
    assert metrics["Hungarian accuracy"] == pytest.approx(100 * best)


def test_the_clusters_are_stored_for_the_figure(make_context):
    context = make_context()
    path = context.save(cluster.evaluate(context))
    with np.load(path.with_suffix(".npz")) as arrays:
        clusters, titles = arrays["clusters"], arrays["titles"]
    assert clusters.shape == (600,) and titles.tolist() == [f"#{i}" for i in range(600)]
    for label in range(6):
        assert len(set(clusters[context.train.labels.numpy() == label])) == 1


def test_unlabeled_images_can_be_clustered_and_nothing_else(tmp_path, make_images, monkeypatch):
    hide_packages(monkeypatch, "sklearn", "scipy")  # only labels need them
    flat = make_images(tmp_path / "flat", {"": 12}, size=(16, 16))
    context = EvaluationContext(make_weights(tmp_path / "out"), str(flat))
    result = cluster.evaluate(context, clusters=3)
    assert set(result.metrics) == {"mean squared distance", "empty clusters"}
    assert context.card()["sizes"] == {"train": 12}
    with pytest.raises(ValueError, match="--clusters N"):
        cluster.evaluate(context)
    with pytest.raises(ValueError, match=r"has no labels .*--labels FILE"):
        knn.evaluate(context)


def test_without_scikit_learn_the_error_names_the_extra(make_context, monkeypatch):
    hide_packages(monkeypatch, "sklearn")
    with pytest.raises(ValueError, match=r"need scikit-learn; type: pip install .*\[report\]"):
        cluster.evaluate(make_context())
