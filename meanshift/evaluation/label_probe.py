"""A linear probe on few labels: its fit, its accuracy, and what more labels would bring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from meanshift.evaluation.accuracy import Accuracy
from meanshift.evaluation.linear_probe import Standardize
from meanshift.ops.logistic_regression import LogisticRegression
from meanshift.runtime import rng

PENALTY = 1.0
"""of the weights, on standardized features"""

FOLDS = 5
MIN_LABELS = 10
"""labels from which an accuracy is estimated"""
MIN_CURVE_LABELS = 20
"""labels from which it is extrapolated"""
_FRACTIONS = (0.25, 0.5, 1.0)
"""of the labels, for the learning curve"""


@dataclass(frozen=True)
class Probe:
    """A linear classifier of features, which are scaled to unit length first."""

    weight: Float[Tensor, "classes features"]
    bias: Float[Tensor, " classes"]

    @torch.no_grad()
    def probabilities(self, features: Float[Tensor, "n features"]) -> Float[Tensor, "n classes"]:
        """The probability of each class for each row."""
        parts = [
            F.softmax(torch.addmm(self.bias, F.normalize(rows, dim=1), self.weight.T), 1)
            for rows in features.split(16_384)
        ]
        return torch.cat(parts)


def fit_probe(
    features: Float[Tensor, "n features"],
    labels: Int[Tensor, " n"],
    standardize: Standardize,
    *,
    classes: int,
    penalty: float = PENALTY,
) -> Probe:
    """Fit a probe to few rows, standardized with the statistics of many."""
    regression = LogisticRegression(standardize(features), labels, classes=classes, tolerance=1e-4)
    classifier = regression.fit(penalty)
    weight = classifier.weight * standardize.get_buffer("scale")
    return Probe(weight, classifier.bias - weight @ standardize.get_buffer("mean"))


def cross_validate(
    features: Float[Tensor, "n features"],
    labels: Int[Tensor, " n"],
    standardize: Standardize,
    *,
    classes: int,
    fraction: float = 1.0,
) -> Bool[Tensor, " n"]:
    """Whether each label is predicted by a probe that is fitted without its fold.

    With a smaller `fraction` each probe is fitted to so much of the other folds.
    """
    order = rng.permutation(0, 0, len(labels))
    rank = torch.empty_like(order)
    rank[order[labels[order].argsort(stable=True)]] = torch.arange(len(labels))
    fold_of = rank % FOLDS  # the labels of a class are divided evenly
    correct = torch.zeros(len(labels), dtype=torch.bool)
    for fold in range(FOLDS):
        held_out = fold_of == fold
        used = order[~held_out[order]]
        used = used[: math.ceil(fraction * len(used))]
        probe = fit_probe(features[used], labels[used], standardize, classes=classes)
        predicted = probe.probabilities(features[held_out]).argmax(1)
        correct[held_out] = predicted == labels[held_out]
    return correct


def held_out_accuracy(
    features: Float[Tensor, "n features"],
    labels: Int[Tensor, " n"],
    standardize: Standardize,
    *,
    classes: int,
) -> Accuracy | None:
    """The cross-validated accuracy in percent; None with too few labels to tell."""
    counted = _has_another(labels)
    if int(counted.sum()) < MIN_LABELS or len(labels[counted].unique()) < 2:
        return None
    correct = cross_validate(features, labels, standardize, classes=classes)[counted]
    return Accuracy("probe", 100 * float(correct.double().mean()), len(correct))


def accuracy_with_twice_the_labels(
    features: Float[Tensor, "n features"],
    labels: Int[Tensor, " n"],
    standardize: Standardize,
    *,
    classes: int,
) -> float | None:
    """The accuracy in percent to be expected of twice the labels; None if they do not tell.

    The cross-validated errors with a quarter, half and all of the labels must follow a power law
    that falls, each within its standard error.
    """
    counted = _has_another(labels)
    count = int(counted.sum())
    if count < MIN_CURVE_LABELS:
        return None
    errors = [
        1 - float(correct[counted].double().mean())
        for fraction in _FRACTIONS
        for correct in [
            cross_validate(features, labels, standardize, classes=classes, fraction=fraction)
        ]
    ]
    if min(errors) <= 0:
        return None
    x = torch.tensor(_FRACTIONS, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    fitted = (y.mean() + slope * (x - x.mean())).exp().tolist()
    standard_errors = [math.sqrt(error * (1 - error) / count) for error in errors]
    follows = all(
        abs(fit - error) <= standard_error
        for fit, error, standard_error in zip(fitted, errors, standard_errors, strict=True)
    )
    if slope >= 0 or not follows:
        return None
    return 100 * float(1 - fitted[-1] * 2.0**slope)


def _has_another(labels: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Whether a class has another label: the only one cannot be predicted without itself."""
    return labels.bincount()[labels] > 1
