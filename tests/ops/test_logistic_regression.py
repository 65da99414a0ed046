"""Logistic regression: the optimum is scikit-learn's, at every penalty, from any start."""

import itertools

import pytest
import torch
from sklearn import linear_model
from sklearn.datasets import load_digits
from torch.nn import functional as F

from meanshift.ops.logistic_regression import PENALTIES, LogisticRegression


def blobs(images, width, classes, *, apart=1.0, seed=0):
    """Features like those of a network: not negative, correlated, with classes that overlap."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    hidden = apart * torch.randn(classes, 8, generator=generator)[labels]
    hidden += torch.randn(images, 8, generator=generator)
    mixed = hidden @ torch.randn(8, width, generator=generator)
    return (mixed + torch.randn(images, width, generator=generator)).relu(), labels


def loss_of(features, labels, weight, bias, penalty):
    """The objective by its definition, in float64."""
    scores = features.double() @ weight.double().T + bias.double()
    fit = F.cross_entropy(scores, labels, reduction="sum")
    return float(fit + penalty / 2 * weight.double().square().sum())


def test_the_penalties_are_the_papers():
    assert len(PENALTIES) == 45
    assert PENALTIES[0] == pytest.approx(1e5)
    assert PENALTIES[-1] == pytest.approx(1e-6)
    ratios = [one / other for one, other in itertools.pairwise(PENALTIES)]
    assert max(ratios) == pytest.approx(min(ratios))
    assert min(ratios) > 1


@pytest.mark.parametrize(("images", "width"), [(300, 40), (60, 90)], ids=["tall", "wide"])
@pytest.mark.parametrize("penalty", [1e3, 1.0, 1e-2])
def test_the_optimum_is_scikit_learns(images, width, penalty):
    features, labels = blobs(images, width, 5)
    theirs = linear_model.LogisticRegression(C=1 / penalty, tol=1e-12, max_iter=20_000)
    theirs.fit(features.double().numpy(), labels.numpy())
    weight, bias = torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_)
    best = loss_of(features, labels, weight, bias, penalty)
    ours = LogisticRegression(features, labels, classes=5).fit(penalty)
    assert ours.converged
    own = loss_of(features, labels, ours.weight, ours.bias, penalty)
    assert own == pytest.approx(best, rel=1e-4)
    assert own == pytest.approx(ours.loss, rel=1e-4)  # the reported loss is true
    assert torch.equal(ours(features), torch.from_numpy(theirs.predict(features.double().numpy())))


def test_real_features_are_fitted_as_scikit_learn_fits_them():
    """8 x 8 images of digits, whose pixels are far from independent."""
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    features = pixels.float() / 16
    for classifier in LogisticRegression(features, labels, classes=10).path():
        if classifier.penalty in PENALTIES[12:40:9]:
            theirs = linear_model.LogisticRegression(
                C=1 / classifier.penalty, tol=1e-9, max_iter=20_000
            )
            theirs.fit(features.double().numpy(), labels.numpy())
            weight, bias = torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_)
            best = loss_of(features, labels, weight, bias, classifier.penalty)
            own = loss_of(features, labels, classifier.weight, classifier.bias, classifier.penalty)
            assert own == pytest.approx(best, rel=1e-4), classifier.penalty


def test_every_classifier_of_the_path_is_an_optimum():
    features, labels = blobs(200, 30, 4)
    exact = LogisticRegression(features.double(), labels, classes=4, tolerance=1e-10)
    path = list(LogisticRegression(features, labels, classes=4).path())
    assert [classifier.penalty for classifier in path] == list(PENALTIES)
    assert all(classifier.converged for classifier in path)
    for classifier, best in zip(path, exact.path(), strict=True):
        own = loss_of(features, labels, classifier.weight, classifier.bias, classifier.penalty)
        assert own == pytest.approx(best.loss, rel=1e-4)
        assert classifier.loss == pytest.approx(own, rel=1e-4)


def test_separable_classes_converge_at_the_weakest_penalty():
    """Where float32 would round the loss away: a few millionths for each image."""
    features, labels = blobs(120, 200, 3, apart=4.0)
    last = list(LogisticRegression(features, labels, classes=3).path())[-1]
    assert last.converged
    assert last.loss < 1e-3
    best = list(LogisticRegression(features.double(), labels, classes=3, tolerance=1e-12).path())[
        -1
    ].loss
    own = loss_of(features, labels, last.weight, last.bias, last.penalty)
    assert own == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_the_optimum_does_not_depend_on_the_start(seed):
    features, labels = blobs(200, 30, 4, seed=seed)
    more, more_labels = blobs(260, 30, 4, seed=seed)
    near = LogisticRegression(features, labels, classes=4).fit(0.1)
    problem = LogisticRegression(more, more_labels, classes=4)
    assert problem.fit(0.1, start=near).loss == pytest.approx(problem.fit(0.1).loss, rel=1e-5)


def test_a_shift_of_the_features_does_not_matter_but_their_scale_does():
    features, labels = blobs(200, 30, 4)
    base = LogisticRegression(features, labels, classes=4).fit(1.0).loss
    moved = LogisticRegression(features + 100, labels, classes=4).fit(1.0)
    assert moved.loss == pytest.approx(base, rel=1e-3)  # the bias is not penalized
    assert LogisticRegression(3 * features, labels, classes=4).fit(1.0).loss < 0.9 * base


@pytest.mark.parametrize("width", [3, 300])
def test_constant_features_predict_the_frequencies_of_the_classes(width):
    labels = torch.tensor([0] * 30 + [1] * 10)
    classifier = LogisticRegression(torch.ones(40, width), labels, classes=2).fit(1.0)
    probabilities = classifier.bias.add(classifier.weight.sum(1)).softmax(0)
    assert probabilities.tolist() == pytest.approx([0.75, 0.25], abs=1e-3)


def test_a_class_without_images_is_never_predicted():
    features, labels = blobs(90, 20, 3)
    classifier = LogisticRegression(features, labels, classes=5).fit(1.0)
    assert set(classifier(features).tolist()) <= {0, 1, 2}


def test_the_fit_is_deterministic():
    features, labels = blobs(100, 20, 3)
    some = PENALTIES[::9]
    one, other = (
        list(LogisticRegression(features, labels, classes=3).path(some)) for _ in range(2)
    )
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(one, other, strict=True))
