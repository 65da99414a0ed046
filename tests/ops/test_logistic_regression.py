"""Logistic regression: the optimum of scikit-learn, at every penalty, from any start."""

import itertools
import re

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from benchmarks.transfer import bench_transfer
from meanshift.ops.logistic_regression import PENALTIES, Problem


def blobs(images, width, classes, *, apart=1.0, seed=0):
    """Features like a network's: not negative, correlated, in classes that overlap."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    hidden = apart * torch.randn(classes, 8, generator=generator)[labels]
    hidden += torch.randn(images, 8, generator=generator)
    mixed = hidden @ torch.randn(8, width, generator=generator)
    return (mixed + torch.randn(images, width, generator=generator)).relu(), labels


def loss_of(features, labels, weight, bias, penalty):
    """The definition, in float64, with nothing of ours."""
    scores = features.double() @ weight.double().T + bias.double()
    fit = F.cross_entropy(scores, labels, reduction="sum")
    return float(fit + penalty / 2 * weight.double().square().sum())


def test_the_penalties_are_the_papers():
    assert len(PENALTIES) == 45
    assert PENALTIES[0] == pytest.approx(1e5) and PENALTIES[-1] == pytest.approx(1e-6)
    ratios = [one / other for one, other in itertools.pairwise(PENALTIES)]
    assert max(ratios) == pytest.approx(min(ratios)) and min(ratios) > 1


@pytest.mark.parametrize(("images", "width"), [(300, 40), (60, 90)], ids=["tall", "wide"])
@pytest.mark.parametrize("penalty", [1e3, 1.0, 1e-2])
def test_the_optimum_is_scikit_learns(images, width, penalty):
    features, labels = blobs(images, width, 5)
    theirs = LogisticRegression(C=1 / penalty, tol=1e-12, max_iter=20_000)
    theirs.fit(features.double().numpy(), labels.numpy())
    weight, bias = torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_)
    best = loss_of(features, labels, weight, bias, penalty)
    ours = Problem(features, labels, classes=5).fit(penalty)
    assert ours.converged
    own = loss_of(features, labels, ours.weight, ours.bias, penalty)
    assert own == pytest.approx(best, rel=1e-4)
    assert own == pytest.approx(ours.loss, rel=1e-4)  # what it says of itself is true
    assert torch.equal(ours(features), torch.from_numpy(theirs.predict(features.double().numpy())))


def test_real_features_are_fitted_as_scikit_learn_fits_them():
    """8 x 8 images of digits, whose pixels are far from independent."""
    pixels, labels = (torch.from_numpy(held) for held in load_digits(return_X_y=True))
    features = pixels.float() / 16
    for layer in Problem(features, labels, classes=10).path():
        if layer.penalty in PENALTIES[12:40:9]:
            theirs = LogisticRegression(C=1 / layer.penalty, tol=1e-9, max_iter=20_000)
            theirs.fit(features.double().numpy(), labels.numpy())
            held = (torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_))
            best = loss_of(features, labels, *held, layer.penalty)
            own = loss_of(features, labels, layer.weight, layer.bias, layer.penalty)
            assert own == pytest.approx(best, rel=1e-4), layer.penalty


def test_every_layer_of_the_path_is_an_optimum():
    features, labels = blobs(200, 30, 4)
    exact = Problem(features.double(), labels, classes=4, tolerance=1e-10)
    path = list(Problem(features, labels, classes=4).path())
    assert [layer.penalty for layer in path] == list(PENALTIES)
    assert all(layer.converged for layer in path)
    for layer, best in zip(path, exact.path(), strict=True):
        own = loss_of(features, labels, layer.weight, layer.bias, layer.penalty)
        assert own == pytest.approx(best.loss, rel=1e-4)
        assert layer.loss == pytest.approx(own, rel=1e-4)


def test_separable_classes_are_followed_to_the_weakest_penalty():
    """Where float32 would round the loss away: a few millionths for each image."""
    features, labels = blobs(120, 200, 3, apart=4.0)
    last = list(Problem(features, labels, classes=3).path())[-1]
    assert last.converged and last.loss < 1e-3
    best = list(Problem(features.double(), labels, classes=3, tolerance=1e-12).path())[-1].loss
    own = loss_of(features, labels, last.weight, last.bias, last.penalty)
    assert own == pytest.approx(best, rel=1e-4)


def test_a_start_elsewhere_changes_only_the_way():
    features, labels = blobs(200, 30, 4)
    more, more_labels = blobs(260, 30, 4)
    near = Problem(features, labels, classes=4).fit(0.1)
    problem = Problem(more, more_labels, classes=4)
    assert problem.fit(0.1, near=near).loss == pytest.approx(problem.fit(0.1).loss, rel=1e-5)


def test_where_features_lie_does_not_matter_but_their_scale_does():
    features, labels = blobs(200, 30, 4)
    base = Problem(features, labels, classes=4).fit(1.0).loss
    moved = Problem(features + 100, labels, classes=4).fit(1.0)
    assert moved.loss == pytest.approx(base, rel=1e-3)  # the bias is not penalized
    assert Problem(3 * features, labels, classes=4).fit(1.0).loss < 0.9 * base


@pytest.mark.parametrize("width", [3, 300])
def test_features_that_say_nothing_give_the_classes_shares(width):
    labels = torch.tensor([0] * 30 + [1] * 10)
    layer = Problem(torch.ones(40, width), labels, classes=2).fit(1.0)
    chance = layer.bias.add(layer.weight.sum(1)).softmax(0)
    assert chance.tolist() == pytest.approx([0.75, 0.25], abs=1e-3)


def test_a_class_without_images_is_never_predicted():
    features, labels = blobs(90, 20, 3)
    layer = Problem(features, labels, classes=5).fit(1.0)
    assert set(layer(features).tolist()) <= {0, 1, 2}


def test_the_same_bits_again():
    features, labels = blobs(100, 20, 3)
    some = PENALTIES[::9]
    one, other = (list(Problem(features, labels, classes=3).path(some)) for _ in range(2))
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(one, other, strict=True))


def test_the_bench_tells_both_times_and_whose_loss_is_lower():
    told = bench_transfer(rounds=1, images=60, width=12, classes=3)
    assert "60 x 12 features, 3 classes, 45 penalties from 100000 to 1e-06" in told
    assert re.search(r"scikit-learn's fits / our path +\d", told)
    least, above = re.search(
        r"our loss / theirs at the same penalty +(\S+) to 1 \+ (\S+)", told
    ).groups()
    assert float(least) < 1 and float(above) < 1e-4
    with pytest.raises(ValueError, match="--rounds: got 0"):
        bench_transfer(rounds=0)
