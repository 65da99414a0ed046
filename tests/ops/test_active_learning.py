"""What to label next: naive versions, copies, and sets with nothing left."""

import pytest
import torch
from torch.nn import functional as F

from meanshift.ops import active_learning
from meanshift.ops.active_learning import BATCH, propose, typical_samples, uncertain_samples
from meanshift.ops.kmeans import kmeans


def blobs(sizes, *, spread=0.05, dim=12):
    """Rows around one axis each, so many of each, and the blob of each row."""
    generator = torch.Generator().manual_seed(0)
    blob = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rows = torch.eye(dim)[blob]
    return rows + spread * torch.randn(len(blob), dim, generator=generator), blob


def none_labeled(features):
    return torch.zeros(len(features), dtype=torch.bool)


def test_typical_samples_are_the_nearest_to_each_center_largest_cluster_first():
    features, _ = blobs([30, 10, 50, 20])
    assignment, _ = kmeans(features, 4, seed=0)
    unit = F.normalize(features, dim=1)
    expected = {}
    for cluster in range(4):
        members = [row for row in range(len(unit)) if assignment[row] == cluster]
        center = sum(unit[row] for row in members)
        nearest = max(members, key=lambda row: float(unit[row] @ center / center.norm()))
        expected[len(members)] = nearest
    chosen = typical_samples(features, none_labeled(features), 4, clusters=4)
    assert chosen.tolist() == [expected[size] for size in (50, 30, 20, 10)]
    assert typical_samples(features, none_labeled(features), 2, clusters=4).tolist() == [
        expected[50],
        expected[30],
    ]


def test_clusters_with_a_label_are_left_out():
    features, blob = blobs([30, 10, 50, 20])
    labeled = none_labeled(features)
    labeled[[0, 60]] = True  # of the first and the third blob
    chosen = typical_samples(features, labeled, 4, clusters=4)
    assert blob[chosen].tolist() == [3, 1]


def test_uncertain_samples_have_small_margins_and_differ():
    features, _ = blobs([20] * 4)
    probabilities = torch.full((80, 2), 0.5)
    probabilities[:, 0] += 0.001 * torch.arange(80)
    probabilities[:, 1] -= 0.001 * torch.arange(80)
    labeled = none_labeled(features)
    labeled[0] = True
    chosen = uncertain_samples(features, probabilities, labeled, 4, pool=30)
    assert chosen.tolist() == [1, 20, 40, 60]  # the least certain unlabeled one of each blob
    few = uncertain_samples(features, probabilities, labeled, 4, pool=1)
    assert sorted(few.tolist()) == [1, 2, 3, 4]  # no others are candidates


def test_a_set_of_copies_is_proposed_once_each():
    features = torch.eye(12).repeat_interleave(40, 0)  # ten copies of one image are no ten images
    chosen = propose(features, none_labeled(features), None)
    assert len(chosen) == BATCH and len(set((chosen // 40).tolist())) == BATCH


def test_typical_samples_come_first_and_uncertain_ones_when_clusters_are_small(monkeypatch):
    features, _ = blobs([100] * 12)
    probabilities = torch.full((1200, 2), 0.5)
    asked = []
    for name in ("typical_samples", "uncertain_samples"):
        monkeypatch.setattr(
            active_learning, name, lambda *_, name=name, **__: asked.append(name) or torch.arange(3)
        )
    labeled = none_labeled(features)
    for count in (0, 110, 111):
        labeled[:count] = True
        propose(features, labeled, probabilities)
    propose(features, labeled, None)  # of one class there is no probe
    assert asked == ["typical_samples"] * 2 + ["uncertain_samples", "typical_samples"]


@pytest.mark.parametrize("probabilities", [None, torch.full((300, 2), 0.5)])
def test_everything_can_be_labeled_to_the_end(probabilities):
    features, _ = blobs([25] * 12)
    labeled = none_labeled(features)
    for _ in range(300):
        chosen = propose(features, labeled, probabilities)
        if not len(chosen):
            break
        assert not labeled[chosen].any() and len(chosen.unique()) == len(chosen) <= BATCH
        labeled[chosen] = True
    assert labeled.all()


def test_unlabeled_samples_of_a_large_set_are_candidates(monkeypatch):
    monkeypatch.setattr(active_learning, "MAX_CANDIDATES", 100)
    features, _ = blobs([50] * 12)
    labeled = torch.ones(600, dtype=torch.bool)
    labeled[-3:] = False
    assert propose(features, labeled, None).tolist() == [597, 598, 599]
