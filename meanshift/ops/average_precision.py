"""Average precision of detections, by the rules of VOC 2007 or of COCO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_DETECTIONS = 100
"""detections of one class in one image that COCO counts"""


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections in one image: boxes are (x0, y0, x1, y1), labels are class numbers."""

    boxes: Float[Tensor, "n 4"]
    scores: Float[Tensor, " n"]
    labels: Int[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The objects in one image; detecting a difficult one or missing it does not count."""

    boxes: Float[Tensor, "n 4"]
    labels: Int[Tensor, " n"]
    difficult: Bool[Tensor, " n"]


@dataclass(frozen=True)
class AveragePrecision:
    """Average precision in percent, means over classes: over IoU .5 to .95, at .5 and at .75.

    `by_class` is at .5 and is nan for a class without objects, which the means leave out.
    """

    ap: float
    ap50: float
    ap75: float
    by_class: list[float]


def average_precision(
    detections: Sequence[Detections],
    ground_truth: Sequence[GroundTruth],
    *,
    classes: int,
    rule: Literal["voc07", "coco"],
) -> AveragePrecision:
    """Compute the mean precision over recalls, classes and IoU thresholds.

    `voc07` is the rule of the 2007 devkit (11 recalls), `coco` that of pycocotools (101 recalls, at
    most 100 detections per class and image), for which a difficult object is an ignored one. Equal
    scores are in the order of images, then of detections.
    """
    _check(detections, ground_truth, classes)
    # As the reference programs write them: an IoU may be exactly on a threshold.
    voc = rule == "voc07"
    thresholds = np.arange(50, 100, 5) / 100 if voc else np.linspace(0.5, 0.95, 10)
    recalls = np.arange(11) * 0.1 if voc else np.linspace(0, 1, 101)
    images = [
        _evaluate_image(image, truth, thresholds, rule=rule)
        for image, truth in zip(detections, ground_truth, strict=True)
    ]
    scores = np.concatenate([image.scores for image in images])
    labels = np.concatenate([image.labels for image in images])
    true_positives = np.concatenate([image.true_positives for image in images], axis=1)
    false_positives = np.concatenate([image.false_positives for image in images], axis=1)
    counted = torch.cat([truth.labels[~truth.difficult] for truth in ground_truth])
    table = np.full((classes, len(thresholds)), np.nan)
    for label, count in enumerate(counted.bincount(minlength=classes).tolist()):
        if count:
            order = (labels == label).nonzero()[0]
            order = order[(-scores[order]).argsort(kind="stable")]
            table[label] = 100 * _mean_precision(
                true_positives[:, order], false_positives[:, order], count, recalls
            )
    means = table[~np.isnan(table[:, 0])].mean(0)
    return AveragePrecision(
        ap=float(means.mean()),
        ap50=float(means[0]),
        ap75=float(means[5]),
        by_class=table[:, 0].tolist(),
    )


def match_detections(
    detections: Detections,
    ground_truth: GroundTruth,
    *,
    threshold: float = 0.5,
    min_score: float = 0.5,
) -> tuple[Int[Tensor, " n"], Int[Tensor, " m"]]:
    """Return (the object of each detection, the detection of each object); -1 is none.

    Detections of at least `min_score` are matched by COCO's rule at one IoU threshold.
    """
    chosen = (detections.scores >= min_score).nonzero()[:, 0]
    chosen = chosen[detections.scores[chosen].argsort(descending=True, stable=True)]
    iou = _class_iou(detections, ground_truth)[chosen.numpy()]
    matches = _match_coco(iou, ground_truth.difficult.numpy(), np.array([threshold]))[0]
    object_of_detection = torch.full((len(detections.labels),), -1)
    object_of_detection[chosen] = torch.from_numpy(matches)
    matched = (object_of_detection >= 0).nonzero()[:, 0]
    detection_of_object = torch.full((len(ground_truth.labels),), -1)
    detection_of_object[object_of_detection[matched]] = matched
    return object_of_detection, detection_of_object


@dataclass(frozen=True, eq=False)
class _ImageResult:
    """The counted detections of one image, best score first."""

    scores: Float[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    true_positives: Bool[np.ndarray, "t n"]
    """for each threshold; a match with a difficult object is neither true nor false positive"""
    false_positives: Bool[np.ndarray, "t n"]


def _evaluate_image(
    detections: Detections, ground_truth: GroundTruth, thresholds: np.ndarray, *, rule: str
) -> _ImageResult:
    order = detections.scores.argsort(descending=True, stable=True)
    if rule == "coco" and len(order) > MAX_DETECTIONS:
        same_class = detections.labels[order, None] == detections.labels[order]
        order = order[same_class.tril(-1).sum(1) < MAX_DETECTIONS]
    difficult = ground_truth.difficult.numpy()
    iou = _class_iou(detections, ground_truth)[order.numpy()]
    matches = (_match_voc if rule == "voc07" else _match_coco)(iou, difficult, thresholds)
    # The match -1 (none) reads the appended value.
    matched_difficult = np.append(difficult, False)[matches]
    return _ImageResult(
        scores=detections.scores[order].double().numpy(),
        labels=detections.labels[order].numpy(),
        true_positives=(matches >= 0) & ~matched_difficult,
        false_positives=matches < 0,
    )


def _class_iou(detections: Detections, ground_truth: GroundTruth) -> Float[np.ndarray, "n m"]:
    """IoU in float64, as in the reference programs; -1 where the classes differ."""
    from torchvision.ops import box_iou  # slow to import

    iou = box_iou(detections.boxes.double(), ground_truth.boxes.double()).nan_to_num(0.0)
    iou[detections.labels[:, None] != ground_truth.labels] = -1.0
    return np.asarray(iou)


def _match_voc(
    iou: Float[np.ndarray, "n m"],
    difficult: Bool[np.ndarray, " m"],
    thresholds: Float[np.ndarray, " t"],
) -> Int[np.ndarray, "t n"]:
    """Return the object of each detection, best score first; -1 is none.

    A detection is matched with the object of the largest IoU, unless an earlier detection was.
    Difficult objects can be matched any number of times.
    """
    if not iou.size:
        return np.full((len(thresholds), len(iou)), -1)
    best_iou = iou.max(1)
    best_object = iou.argmax(1)
    overlaps = best_iou > thresholds[:, None]
    candidates = overlaps[:, :, None] & (best_object[:, None] == np.arange(iou.shape[1]))
    first = (candidates & (candidates.cumsum(1) == 1)).any(2)
    return np.where(first | (overlaps & difficult[best_object]), best_object, -1)


def _match_coco(
    iou: Float[np.ndarray, "n m"],
    difficult: Bool[np.ndarray, " m"],
    thresholds: Float[np.ndarray, " t"],
) -> Int[np.ndarray, "t n"]:
    """Return the object of each detection, best score first; -1 is none.

    A detection is matched with the free object of the largest IoU, the last of equal ones; with a
    difficult object only if there is no other.
    """
    matches = np.full((len(thresholds), len(iou)), -1)
    overlapping = (iou >= thresholds.min()).any(1).nonzero()[0]  # others match at no threshold
    easy = np.broadcast_to(~difficult, (len(overlapping), len(difficult)))
    # Ranks of the objects for each detection: the highest is preferred, 0 is below the threshold.
    ranks = np.lexsort((iou[overlapping], easy)).argsort(1) + 1
    ranks = ranks[:, None] * (iou[overlapping, None] >= thresholds[:, None])
    free = np.ones(ranks.shape[1:], dtype=bool)
    every_threshold = np.arange(len(thresholds))
    for detection, own_ranks in zip(overlapping, ranks, strict=True):
        available = own_ranks * free
        preferred = available.argmax(1)
        matched = available[every_threshold, preferred] > 0
        matches[matched, detection] = preferred[matched]
        free[matched, preferred[matched]] = False
    return matches


def _mean_precision(
    true_positives: Bool[np.ndarray, "t n"],
    false_positives: Bool[np.ndarray, "t n"],
    count: int,
    recalls: Float[np.ndarray, " r"],
) -> Float[np.ndarray, " t"]:
    """The mean over `recalls` of the best precision at that recall or a higher one."""
    hits = true_positives.cumsum(1)
    precision = hits / np.maximum(hits + false_positives.cumsum(1), 1)
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    envelope = np.pad(envelope, ((0, 0), (0, 1)))  # 0 beyond the last recall
    positions = [(row / count).searchsorted(recalls) for row in hits]
    return np.asarray(np.take_along_axis(envelope, np.stack(positions), axis=1).mean(1))


def _check(
    detections: Sequence[Detections], ground_truth: Sequence[GroundTruth], classes: int
) -> None:
    if len(detections) != len(ground_truth) or not detections:
        raise ValueError(
            f"got detections of {len(detections)} images and the objects of {len(ground_truth)}; "
            f"need as many"
        )
    for index, (image, truth) in enumerate(zip(detections, ground_truth, strict=True)):
        labels = torch.cat([image.labels, truth.labels])
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(
                f"image {index}: labels {int(labels.min())} to {int(labels.max())}; need 0 to "
                f"{classes - 1}, as there are {classes} classes"
            )
        if not (image.scores.isfinite().all() and image.boxes.isfinite().all()):
            raise ValueError(
                f"image {index}: a detection's score or box is not finite; the detector has "
                f"diverged: train it with a lower learning rate"
            )
    if all(bool(truth.difficult.all()) for truth in ground_truth):
        raise ValueError(
            f"{len(ground_truth)} images with nothing but difficult objects; need others"
        )
