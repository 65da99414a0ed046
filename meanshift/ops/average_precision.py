"""How well detections match the boxes that are there: average precision by VOC's or COCO's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision.ops import box_iou

MOST = 100  # detections of one class in one image that COCO looks at


@dataclass(frozen=True, eq=False)
class Detections:
    """The detections in one image: boxes are (x0, y0, x1, y1), a label is a class's number."""

    boxes: Float[Tensor, "n 4"]
    scores: Float[Tensor, " n"]
    labels: Int[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The objects in one image; nobody is asked for the difficult ones, nor blamed for them."""

    boxes: Float[Tensor, "n 4"]
    labels: Int[Tensor, " n"]
    difficult: Bool[Tensor, " n"]


@dataclass(frozen=True)
class Precision:
    """Average precision in percent: over IoU .5 to .95, at .5 and at .75, means over classes.

    `by_class` is at .5, nan for a class that has nothing to find; the means leave it out.
    """

    ap: float
    ap50: float
    ap75: float
    by_class: list[float]


def average_precision(
    found: Sequence[Detections],
    truth: Sequence[GroundTruth],
    *,
    classes: int,
    rule: Literal["voc07", "coco"],
) -> Precision:
    """The mean precision over recalls, classes and overlaps.

    `voc07` is the devkit's of 2007 (11 recalls), `coco` is pycocotools' (101 recalls, at most 100
    detections a class and image), to which a difficult object is an ignored one. Equal scores
    stand in the order of images and then of detections.
    """
    _check(found, truth, classes)
    voc = rule == "voc07"
    # as the references write them: an overlap may lie exactly on a threshold
    thresholds = np.arange(50, 100, 5) / 100 if voc else np.linspace(0.5, 0.95, 10)
    recalls = np.arange(11) * 0.1 if voc else np.linspace(0, 1, 101)
    claim = _claim_voc if voc else _claim_coco
    scores, labels, rights, wrongs = [], [], [], []
    for one, there in zip(found, truth, strict=True):
        order = one.scores.argsort(descending=True, stable=True)
        if not voc and len(order) > MOST:
            same = one.labels[order, None] == one.labels[order]
            order = order[same.tril(-1).sum(1) < MOST]
        difficult = there.difficult.numpy()
        claimed = claim(_overlap(one, there)[order.numpy()], difficult, thresholds)
        wrongs.append(claimed < 0)
        rights.append((claimed >= 0) & ~np.append(difficult, False)[claimed])
        scores.append(one.scores[order].double().numpy())
        labels.append(one.labels[order].numpy())
    score, label = np.concatenate(scores), np.concatenate(labels)
    right, wrong = np.concatenate(rights, axis=1), np.concatenate(wrongs, axis=1)
    asked = torch.cat([there.labels[~there.difficult] for there in truth])
    table = np.full((classes, len(thresholds)), np.nan)
    for number, count in enumerate(asked.bincount(minlength=classes).tolist()):
        if count:
            mine = (label == number).nonzero()[0]
            mine = mine[(-score[mine]).argsort(kind="stable")]
            table[number] = 100 * _area(right[:, mine], wrong[:, mine], count, recalls)
    mean = table[~np.isnan(table[:, 0])].mean(0)
    return Precision(float(mean.mean()), float(mean[0]), float(mean[5]), table[:, 0].tolist())


def match(
    found: Detections, truth: GroundTruth, *, threshold: float = 0.5, score: float = 0.5
) -> tuple[Int[Tensor, " n"], Int[Tensor, " m"]]:
    """(the truth that each detection found, the detection that found each truth); -1 is none.

    By COCO's rule at one overlap, for the detections of at least this score.
    """
    shown = (found.scores >= score).nonzero()[:, 0]
    shown = shown[found.scores[shown].argsort(descending=True, stable=True)]
    overlap = _overlap(found, truth)[shown.numpy()]
    claimed = _claim_coco(overlap, truth.difficult.numpy(), np.array([threshold]))[0]
    of_found = torch.full((len(found.labels),), -1)
    of_truth = torch.full((len(truth.labels),), -1)
    of_found[shown] = torch.from_numpy(claimed)
    right = (of_found >= 0).nonzero()[:, 0]
    of_truth[of_found[right]] = right
    return of_found, of_truth


def _overlap(found: Detections, truth: GroundTruth) -> Float[np.ndarray, "n m"]:
    """IoU in double precision, as the references have it; -1 where the classes differ."""
    overlap = box_iou(found.boxes.double(), truth.boxes.double()).nan_to_num(0.0)
    overlap[found.labels[:, None] != truth.labels] = -1.0
    return np.asarray(overlap)


def _claim_voc(
    overlap: Float[np.ndarray, "n m"],
    difficult: Bool[np.ndarray, " m"],
    thresholds: Float[np.ndarray, " t"],
) -> Int[np.ndarray, "t n"]:
    """The truth that each detection gets, best score first; -1 is none.

    Each asks for the truth that it covers best, taken or not; who comes second gets none. A
    difficult one is there for all.
    """
    if not overlap.size:
        return np.full((len(thresholds), len(overlap)), -1)
    best, which = overlap.max(1), overlap.argmax(1)
    hit = best > thresholds[:, None]
    asks = hit[:, :, None] & (which[:, None] == np.arange(overlap.shape[1]))
    first = (asks & (asks.cumsum(1) == 1)).any(2)
    return np.where(first | (hit & difficult[which]), which, -1)


def _claim_coco(
    overlap: Float[np.ndarray, "n m"],
    difficult: Bool[np.ndarray, " m"],
    thresholds: Float[np.ndarray, " t"],
) -> Int[np.ndarray, "t n"]:
    """The truth that each detection gets, best score first; -1 is none.

    Each takes the one that it covers best of those still free, the last of equals; difficult ones
    only where no other will do.
    """
    claimed = np.full((len(thresholds), len(overlap)), -1)
    able = (overlap >= thresholds.min()).any(1).nonzero()[0]  # the others get none at any threshold
    easy = np.broadcast_to(~difficult, (len(able), len(difficult)))
    wish = np.lexsort((overlap[able], easy)).argsort(1) + 1  # the higher the dearer
    wish = wish[:, None] * (overlap[able, None] >= thresholds[:, None])
    free, every = np.ones(wish.shape[1:], dtype=bool), np.arange(len(thresholds))
    for index, mine in zip(able, wish, strict=True):
        left = mine * free
        which = left.argmax(1)
        gets = left[every, which] > 0
        claimed[gets, index] = which[gets]
        free[gets, which[gets]] = False
    return claimed


def _area(
    right: Bool[np.ndarray, "t n"],
    wrong: Bool[np.ndarray, "t n"],
    count: int,
    recalls: Float[np.ndarray, " r"],
) -> Float[np.ndarray, " t"]:
    """The mean over `recalls` of the best precision at that recall or a higher one."""
    hits, misses = right.cumsum(1), wrong.cumsum(1)
    precision = hits / np.maximum(hits + misses, 1)
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    envelope = np.pad(envelope, ((0, 0), (0, 1)))  # nothing beyond the last recall
    places = [(line / count).searchsorted(recalls) for line in hits]
    return np.asarray(np.take_along_axis(envelope, np.stack(places), axis=1).mean(1))


def _check(found: Sequence[Detections], truth: Sequence[GroundTruth], classes: int) -> None:
    if len(found) != len(truth) or not found:
        raise ValueError(
            f"got detections of {len(found)} images and the objects of {len(truth)}; need as many"
        )
    for index, (one, there) in enumerate(zip(found, truth, strict=True)):
        both = torch.cat([one.labels, there.labels])
        if len(both) and not 0 <= int(both.min()) <= int(both.max()) < classes:
            raise ValueError(
                f"image {index}: labels {int(both.min())} to {int(both.max())}; need 0 to "
                f"{classes - 1}, as there are {classes} classes"
            )
        if not (one.scores.isfinite().all() and one.boxes.isfinite().all()):
            raise ValueError(
                f"image {index}: a detection's score or box is not finite; the detector has "
                f"diverged: train it with a lower learning rate"
            )
    if all(bool(there.difficult.all()) for there in truth):
        raise ValueError(f"{len(truth)} images with nothing but difficult objects; need others")
