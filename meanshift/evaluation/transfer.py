"""Linear transfer: logistic regression on frozen features, the penalty chosen on validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from meanshift.data.bad_files import MAX_BAD_FRACTION, refuse_too_many
from meanshift.data.transfer_datasets import NAMES, Metric, Task
from meanshift.evaluation.context import EncoderContext, FeatureSet, source_identity
from meanshift.evaluation.result import Result
from meanshift.ops.logistic_regression import PENALTIES, LinearClassifier, LogisticRegression
from meanshift.runtime.progress import progress

# fmt: off
PAPER: dict[str, tuple[float, ...]] = {  # ResNet-50 at 224, in the order of `NAMES`
    "Supervised (Grill et al.)":       (72.3, 93.6, 78.3, 61.9, 66.7, 61.0, 74.9, 91.5, 94.5, 94.7),
    "SimCLR, 1000 (Grill et al.)":     (72.8, 90.5, 74.4, 60.6, 49.3, 49.8, 75.7, 84.6, 89.3, 92.6),
    "MoCo v2, 800":                    (72.5, 92.2, 74.6, 59.6, 50.5, 53.2, 74.4, 84.6, 90.0, 90.5),
    "BYOL, 1000 (Grill et al.)":       (75.3, 91.3, 78.4, 62.2, 67.8, 60.6, 75.5, 90.4, 94.2, 96.1),
    "BYOL, 1000 (the MSF paper)":      (75.4, 92.7, 78.1, 62.1, 67.1, 62.0, 76.8, 89.8, 92.2, 95.5),
    "BYOL-asym, 200":                  (70.2, 91.5, 74.2, 59.0, 54.0, 52.1, 73.4, 86.2, 90.4, 92.1),
    "MoCo v2, 200":                    (70.4, 91.0, 73.5, 57.5, 47.7, 51.2, 73.9, 81.3, 88.7, 91.1),
    "MSF, 200":                        (70.7, 92.0, 76.1, 59.0, 60.9, 53.5, 72.1, 89.2, 92.1, 92.4),
    "MSF w/s, 200":                    (71.2, 92.6, 76.3, 59.2, 55.6, 53.7, 73.2, 88.7, 92.7, 92.0),
    "MSF w/s, 200, bank 128K":         (72.3, 92.7, 76.3, 60.2, 59.4, 56.3, 71.7, 89.8, 90.9, 93.7),
}
# fmt: on


def evaluate(context: EncoderContext, task: Task) -> Result:
    """The paper's metric of one dataset; the test images are used once, at the end."""
    size = context.image_size
    resize = context.resize or size
    sources = {"train": task.train, "val": task.val, "test": task.test}
    train, val, test = context.features_of_parts(*sources.values(), resize=resize, bicubic=True)
    sizes = {name: len(part.source) for name, part in zip(sources, (train, val, test), strict=True)}
    unreadable = {name: len(source) - sizes[name] for name, source in sources.items()}
    for name, source in sources.items():
        refuse_too_many(
            unreadable[name],
            len(source),
            max_fraction=MAX_BAD_FRACTION,
            name=f"{task.name}, {name}",
            advice="download them again, or leave the dataset out (--only)",
        )
    # The layer has an output for each class that occurs in training; others are never predicted.
    classes, numbers = torch.cat([train.labels, val.labels]).unique(return_inverse=True)
    best, accuracies = _choose_penalty(context, task, train, val, classes)
    features = torch.cat([train.features, val.features]).to(context.device)
    layer = LogisticRegression(features, numbers, classes=len(classes)).fit(
        best.penalty, start=best
    )
    predicted = classes[layer(test.features)]
    other: Metric = "top-1" if task.metric == "mean per class" else "mean per class"
    settings = {
        "classifier": "multinomial logistic regression, L-BFGS, refit on train + validation",
        "penalties": f"{len(PENALTIES)} from {PENALTIES[0]:g} to {PENALTIES[-1]:g}, chosen on "
        "validation; 1 / C of scikit-learn",
        "penalty": best.penalty,
        "validation": max(accuracies),
        "validation by penalty": accuracies,
        "converged": layer.converged,
        other: accuracy(predicted, test.labels, other),
        "loss": layer.loss,
    }
    card = {
        "data": task.title,
        "split": task.split,
        "sizes": sizes,
        "unreadable": sum(unreadable.values()),
        "resize": f"short side {resize}, bicubic; images of {size} as they are",
    }
    metrics: dict[str, float] = {task.metric: accuracy(predicted, test.labels, task.metric)}
    options = {"data": source_identity(task.spec)} if task.spec else {}
    return Result(f"transfer-{task.name}", metrics, settings, card=card, options=options)


def _choose_penalty(
    context: EncoderContext,
    task: Task,
    train: FeatureSet,
    val: FeatureSet,
    classes: Int[Tensor, " classes"],
) -> tuple[LinearClassifier, list[float]]:
    """The layer that is best on validation, of equal ones the strongest penalty; all accuracies."""
    rows = train.features.to(context.device)
    numbers = torch.searchsorted(classes, train.labels)
    best: LinearClassifier | None = None
    accuracies: list[float] = []
    with progress(f"{task.name}: penalties", len(PENALTIES)) as bar:
        for layer in LogisticRegression(rows, numbers, classes=len(classes)).path():
            predicted = classes[layer(val.features)]
            accuracies.append(accuracy(predicted, val.labels, task.metric))
            if best is None or accuracies[-1] > max(accuracies[:-1]):
                best = layer
            bar.set_postfix({"validation": f"{max(accuracies):.2f}"}, refresh=False)
            bar.update()
    assert best is not None
    return best, accuracies


def accuracy(predicted: Int[Tensor, " n"], truth: Int[Tensor, " n"], metric: Metric) -> float:
    """In percent: the fraction of correct images, or the mean of the fractions of all classes."""
    correct = (predicted == truth).double()
    if metric == "top-1":
        return 100 * float(correct.mean())
    classes, which = truth.unique(return_inverse=True)
    hits = torch.zeros(len(classes), dtype=torch.float64).index_add_(0, which, correct)
    return 100 * float((hits / which.bincount()).mean())


def summarize(results: Mapping[str, Result]) -> Result:
    """One metric per dataset, and their mean."""
    metrics = {name: next(iter(result.metrics.values())) for name, result in results.items()}
    metrics["mean"] = sum(metrics.values()) / len(metrics)
    settings: dict[str, Any] = {
        "metrics": {name: next(iter(result.metrics)) for name, result in results.items()},
        "penalties": {name: result.settings["penalty"] for name, result in results.items()},
    }
    all_ten = list(results) == list(NAMES)
    card = {
        "data": "the ten datasets" if all_ten else ", ".join(results),
        "resize": "see datasets",
        "datasets": {name: result.card for name, result in results.items()},
    }
    words = list(results) if len(results) <= 4 else [str(len(results))]
    name = "transfer" if all_ten else "transfer-of-" + "-".join(words)
    options: dict[str, Any] = {}
    if added := [result.options["data"] for result in results.values() if result.options]:
        options["data"] = added
    if not all_ten and len(results) > 4:  # the name has only their number
        options["datasets"] = list(results)
    return Result(name, metrics, settings, card=card, options=options)


def paper_rows(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The paper's rows for these datasets, with a mean where it reports all of them."""
    rows = {}
    for title, values in PAPER.items():
        metrics = {name: value for name, value in zip(NAMES, values, strict=True) if name in names}
        if len(metrics) == len(names):  # a mean over other datasets would mislead
            metrics["mean"] = sum(metrics.values()) / len(metrics)
        if metrics:
            rows[title] = metrics
    return rows
