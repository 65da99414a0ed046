"""The probe on few labels against scikit-learn, its accuracy and its extrapolation."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from meanshift.evaluation import label_probe
from meanshift.evaluation.label_probe import (
    accuracy_with_twice_the_labels,
    cross_validate,
    fit_probe,
    held_out_accuracy,
)
from meanshift.evaluation.linear_probe import Standardize


def samples(count, *, classes=3, noise=1.0, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    features = 2 * torch.eye(dim)[labels] + noise * torch.randn(count, dim, generator=generator)
    return features, labels, Standardize(features)


@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_it_is_scikit_learns_logistic_regression_of_standardized_features(penalty):
    features, labels, standardize = samples(60)
    probe = fit_probe(features, labels, standardize, classes=3, penalty=penalty)
    rows = standardize(features).numpy()
    reference = LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=5000).fit(rows, labels)
    expected = torch.tensor(reference.predict_proba(rows)).double()
    found = probe.probabilities(7 * features)  # the length of a row does not count
    assert torch.allclose(found.double(), expected, atol=0.01)


def test_each_label_is_predicted_by_a_probe_that_has_not_seen_its_fold(monkeypatch):
    features, labels, standardize = samples(23)
    seen = []
    fit = label_probe.fit_probe

    def spy(rows, numbers, *arguments, **options):
        seen.append({tuple(row) for row in rows.tolist()})
        return fit(rows, numbers, *arguments, **options)

    monkeypatch.setattr(label_probe, "fit_probe", spy)
    correct = cross_validate(features, labels, standardize, classes=3)
    assert len(seen) == 5
    left_out = [[i for i in range(23) if tuple(features[i].tolist()) not in one] for one in seen]
    assert sorted(i for fold in left_out for i in fold) == list(range(23))
    for one, fold in zip(seen, left_out, strict=True):
        assert len(one) + len(fold) == 23 and len(fold) in (4, 5)
        counts = torch.bincount(labels[fold], minlength=3)
        assert counts.max() - counts.min() <= 1  # classes are divided evenly
        used = [i for i in range(23) if i not in fold]
        probe = fit(features[used], labels[used], standardize, classes=3)
        predicted = probe.probabilities(features[fold]).argmax(1)
        assert torch.equal(correct[fold], predicted == labels[fold])
    cross_validate(features, labels, standardize, classes=3, fraction=0.5)
    assert {len(one) for one in seen[5:]} == {9, 10}


def test_noise_is_at_chance_and_clean_labels_are_right():
    features, labels, standardize = samples(90, noise=0.1)
    assert held_out_accuracy(features, labels, standardize, classes=3).value == 100
    shuffled = labels[torch.randperm(90, generator=torch.Generator().manual_seed(1))]
    accuracy = held_out_accuracy(features, shuffled, standardize, classes=3)
    assert 15 < accuracy.value < 52 and accuracy.images == 90
    low, high = accuracy.interval
    assert low < accuracy.value < high


def test_the_only_label_of_a_class_is_not_counted():
    labels = torch.tensor([0] * 6 + [1] * 6 + [2])
    features = torch.eye(8)[labels] + 0.01 * samples(13, dim=8)[0]
    accuracy = held_out_accuracy(features, labels, Standardize(features), classes=3)
    assert (accuracy.value, accuracy.images) == (100, 12)


@pytest.mark.parametrize(
    "labels",
    [[0, 1] * 4, [0] * 11 + [1], [0] * 12, [*range(10), 0, 1, 2, 3]],
    ids=["few", "one of a class", "one class", "most alone"],
)
def test_too_few_labels_have_no_accuracy(labels):
    features = torch.randn(len(labels), 4)
    numbers = torch.tensor(labels)
    found = held_out_accuracy(features, numbers, Standardize(features), classes=10)
    assert found is None


def errors_are(monkeypatch, errors):
    """Cross-validation gives these errors of 1,000 labels, by the fraction of them."""

    def cross_validated(*_, fraction, **__):
        return torch.arange(1000) >= 1000 * errors[fraction]

    monkeypatch.setattr(label_probe, "cross_validate", cross_validated)
    features, labels, standardize = samples(1000)
    return accuracy_with_twice_the_labels(features, labels, standardize, classes=3)


def test_a_power_law_is_extrapolated_and_nothing_else(monkeypatch):
    law = errors_are(monkeypatch, {0.25: 0.4, 0.5: 0.2, 1.0: 0.1})
    assert law == pytest.approx(95)
    assert errors_are(monkeypatch, {0.25: 0.4, 0.5: 0.1, 1.0: 0.1}) is None  # no power law
    assert errors_are(monkeypatch, {0.25: 0.1, 0.5: 0.2, 1.0: 0.4}) is None  # it rises
    assert errors_are(monkeypatch, {0.25: 0.2, 0.5: 0.1, 1.0: 0.0}) is None  # nothing to gain
    features, labels, standardize = samples(19)
    assert accuracy_with_twice_the_labels(features, labels, standardize, classes=3) is None


def test_the_extrapolation_is_near_what_twice_the_labels_give():
    features, labels, standardize = samples(4300, noise=1.2, dim=48)
    given = slice(0, 150)
    expected = accuracy_with_twice_the_labels(
        features[given], labels[given], standardize, classes=3
    )
    probe = fit_probe(features[:300], labels[:300], standardize, classes=3)
    truth = 100 * (probe.probabilities(features[300:]).argmax(1) == labels[300:]).float().mean()
    assert expected == pytest.approx(float(truth), abs=6)
    assert F.one_hot(labels).sum(0).min() > 1000
