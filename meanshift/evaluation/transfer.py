"""Linear transfer: logistic regression on frozen features, the penalty chosen on validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from meanshift.data.transfer_datasets import NAMES, Measure, Task
from meanshift.evaluation.context import EncoderContext, FeatureSet, Result
from meanshift.ops.logistic_regression import PENALTIES, Layer, Problem
from meanshift.runtime.progress import progress

# fmt: off
PAPER: dict[str, tuple[float, ...]] = {  # ResNet-50 at 224, in the order of `NAMES`
    "Supervised (Grill et al.)":       (72.3, 93.6, 78.3, 61.9, 66.7, 61.0, 74.9, 91.5, 94.5, 94.7),
    "SimCLR, 1000 (Grill et al.)":     (72.8, 90.5, 74.4, 60.6, 49.3, 49.8, 75.7, 84.6, 89.3, 92.6),
    "MoCo v2, 800":                    (72.5, 92.2, 74.6, 59.6, 50.5, 53.2, 74.4, 84.6, 90.0, 90.5),
    "BYOL, 1000 (Grill et al.)":       (75.3, 91.3, 78.4, 62.2, 67.8, 60.6, 75.5, 90.4, 94.2, 96.1),
    "BYOL, 1000, judged by the paper": (75.4, 92.7, 78.1, 62.1, 67.1, 62.0, 76.8, 89.8, 92.2, 95.5),
    "BYOL-asym, 200":                  (70.2, 91.5, 74.2, 59.0, 54.0, 52.1, 73.4, 86.2, 90.4, 92.1),
    "MoCo v2, 200":                    (70.4, 91.0, 73.5, 57.5, 47.7, 51.2, 73.9, 81.3, 88.7, 91.1),
    "MSF, 200":                        (70.7, 92.0, 76.1, 59.0, 60.9, 53.5, 72.1, 89.2, 92.1, 92.4),
    "MSF w/s, 200":                    (71.2, 92.6, 76.3, 59.2, 55.6, 53.7, 73.2, 88.7, 92.7, 92.0),
    "MSF w/s, 200, bank 128K":         (72.3, 92.7, 76.3, 60.2, 59.4, 56.3, 71.7, 89.8, 90.9, 93.7),
}
# fmt: on


BAD_SHARE = 0.01  # of a part's images that may be unreadable


def evaluate(judged: EncoderContext, task: Task) -> Result:
    """The paper's figure of one dataset; the test images are looked at once, at the end."""
    size = judged.image_size
    train, val, test = judged.parts(
        task.train, task.val, task.test, resize=judged.resize or size, bicubic=True
    )
    parts = {"train": (task.train, train), "val": (task.val, val), "test": (task.test, test)}
    _refuse_many(
        task, {name: (len(whole), len(part.source)) for name, (whole, part) in parts.items()}
    )
    # The layer's outputs are the classes that there are, in a row; others are never guessed.
    classes, numbers = torch.cat([train.labels, val.labels]).unique(return_inverse=True)
    best, found = _choose(judged, task, train, val, classes)
    both = torch.cat([train.features, val.features]).to(judged.device)
    layer = Problem(both, numbers, classes=len(classes)).fit(best.penalty, near=best)
    guessed = classes[layer(test.features)]
    other: Measure = "top-1" if task.measure == "mean per class" else "mean per class"
    settings = {
        "classifier": "multinomial logistic regression, L-BFGS, refit on train + validation",
        "penalties": f"{len(PENALTIES)} from {PENALTIES[0]:g} to {PENALTIES[-1]:g}, chosen on "
        "validation; 1 / C of scikit-learn",
        "penalty": best.penalty,
        "validation": max(found),
        "validation by penalty": found,
        "converged": layer.converged,
        other: accuracy(guessed, test.labels, other),
        "loss": layer.loss,
    }
    card = {
        "data": task.title,
        "split": task.split,
        "sizes": {name: len(part.source) for name, (_, part) in parts.items()},
        "unreadable": sum(len(whole) - len(part.source) for whole, part in parts.values()),
        "resize": f"short side {judged.resize or size}, bicubic; images of {size} as they are",
    }
    figures: dict[str, float] = {task.measure: accuracy(guessed, test.labels, task.measure)}
    return Result(f"transfer-{task.name}", figures, settings, card=card)


def _choose(
    judged: EncoderContext,
    task: Task,
    train: FeatureSet,
    val: FeatureSet,
    classes: Int[Tensor, " classes"],
) -> tuple[Layer, list[float]]:
    """The layer that does best on validation, of equals the strongest penalty; all accuracies."""
    rows, best, found = train.features.to(judged.device), None, list[float]()
    numbers = torch.searchsorted(classes, train.labels)
    path = Problem(rows, numbers, classes=len(classes)).path()
    with progress(f"{task.name}: penalties", len(PENALTIES)) as bar:
        for layer in path:
            found.append(accuracy(classes[layer(val.features)], val.labels, task.measure))
            if best is None or found[-1] > max(found[:-1]):
                best = layer
            bar.set_postfix({"validation": f"{max(found):.2f}"}, refresh=False)
            bar.update()
    assert best is not None
    return best, found


def _refuse_many(task: Task, sizes: Mapping[str, tuple[int, int]]) -> None:
    """A few images that cannot be read are counted; many would make another task of it."""
    for name, (whole, read) in sizes.items():
        if whole - read > BAD_SHARE * whole:
            raise ValueError(
                f"{task.name}: {whole - read} of {whole} images of {name} cannot be read; at "
                f"most {BAD_SHARE:.0%} may: get them anew, or leave the dataset out (--only)"
            )


def accuracy(guessed: Int[Tensor, " n"], truth: Int[Tensor, " n"], measure: Measure) -> float:
    """In percent: the share of images that are right, or the mean of the classes' shares."""
    right = (guessed == truth).double()
    if measure == "top-1":
        return 100 * float(right.mean())
    classes, which = truth.unique(return_inverse=True)
    hits = torch.zeros(len(classes), dtype=torch.float64).index_add_(0, which, right)
    return 100 * float((hits / which.bincount()).mean())


def together(results: Mapping[str, Result]) -> Result:
    """One figure a dataset, and their mean."""
    figures = {name: next(iter(result.figures.values())) for name, result in results.items()}
    settings: dict[str, Any] = {
        "measures": {name: next(iter(result.figures)) for name, result in results.items()},
        "penalties": {name: result.settings["penalty"] for name, result in results.items()},
    }
    mean = {"mean": sum(figures.values()) / len(figures)}
    whole = list(results) == list(NAMES)
    data = "the ten datasets" if whole else ", ".join(results)
    told = ("data", "split", "sizes", "unreadable", "resize")
    cards = {name: {key: result.card[key] for key in told} for name, result in results.items()}
    card = {"data": data, "resize": "see datasets", "datasets": cards}
    some = list(results) if len(results) <= 4 else [str(len(results))]
    name = "transfer" if whole else "transfer-of-" + "-".join(some)
    return Result(name, figures | mean, settings, card=card)


def beside(names: list[str]) -> dict[str, dict[str, float]]:
    """The paper's rows for these datasets, with their mean where it has them all."""
    rows = {}
    for title, values in PAPER.items():
        figures = {name: value for name, value in zip(NAMES, values, strict=True) if name in names}
        mean = {"mean": sum(figures.values()) / len(figures)} if len(figures) == len(names) else {}
        if figures:  # a mean over other datasets would mislead
            rows[title] = figures | mean
    return rows
