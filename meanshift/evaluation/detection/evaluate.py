"""Object detection in VOC's layout: Faster R-CNN trained from the weights, average precision."""

from __future__ import annotations

import math
import re
import statistics
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from meanshift.data.loader import iterate
from meanshift.data.voc import AnnotatedImage, DetectionDataset
from meanshift.evaluation.context import EncoderContext
from meanshift.evaluation.detection.batches import DecodedBatches, check_unreadable
from meanshift.evaluation.detection.model import build_detector
from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.evaluation.detection.train import TrainingLog, train_detector
from meanshift.evaluation.result import Result
from meanshift.models.view_whitening import without_whitening
from meanshift.ops.average_precision import Detections, GroundTruth, average_precision
from meanshift.runtime import distributed, rng
from meanshift.runtime.progress import progress

PAPER: dict[str, tuple[float, float, float]] = {
    "Supervised": (53.5, 81.3, 58.8),
    "From scratch": (33.8, 60.2, 33.1),
    "SimCLR, 200, symmetric": (55.5, 81.8, 61.4),
    "MoCo v2, 200, symmetric": (57.0, 82.3, 63.3),
    "BYOL, 200, symmetric": (55.3, 81.4, 61.1),
    "SwAV, 200, symmetric": (55.4, 81.5, 61.4),
    "SimSiam, 200, symmetric": (57.0, 82.4, 63.7),
    "MoCo v2, 800": (57.4, 82.5, 64.0),
    "InvP, 800": (56.2, 81.8, 61.5),
    "MoCo v2, 200": (57.0, 82.4, 63.6),
    "CO2, 200": (57.2, 82.7, 64.1),
    "BYOL-asym, 200": (56.8, 81.9, 63.5),
    "MSF, 200": (56.7, 82.2, 63.4),
    "MSF w/s, 200": (56.6, 82.2, 63.1),
}
"""AP, AP50 and AP75 of the paper's table: ResNet-50, VOC 07+12 trainval, 07 test, 5 runs"""

STORED_IMAGES = 24
"""test images whose objects and detections are stored with a result, to be drawn"""


@dataclass(frozen=True)
class Trial:
    """The outcome of one seed."""

    metrics: dict[str, float]
    ap50_by_class: list[float]
    detections: dict[int, Detections]
    """by index of the test image; unreadable images have none"""
    log: TrainingLog
    unreadable: dict[str, str]
    """title of a test image: why it could not be read"""


def evaluate(
    context: EncoderContext,
    train: DetectionDataset,
    test: DetectionDataset,
    *,
    settings: DetectionSettings,
    seeds: int = 1,
) -> Result:
    """AP, AP50 and AP75 by the rules of VOC 2007 and of COCO, the mean over seeds.

    After a kill, the same call continues from the newest checkpoint. Several processes share each
    batch and the test images; all of them return the same result.
    """
    if seeds < 1:
        raise ValueError(f"detect: got {seeds} seeds, need 1 or more")
    samples = context.weights.sample_spec
    if samples is not None and not samples.is_rgb:
        raise ValueError(
            f"detect: {context.weights.spec} takes {samples.describe()}; need weights for RGB"
        )
    if settings.batch_size < distributed.world_size():
        raise ValueError(
            f"detect: {distributed.world_size()} processes share batches of {settings.batch_size} "
            f"images; need one each: start fewer, or give a larger --batch-size"
        )
    trials = {
        seed: run_trial(context, train, test, settings, seed)
        for seed in range(context.seed, context.seed + seeds)
    }
    first = trials[context.seed]
    by_seed = {name: [trial.metrics[name] for trial in trials.values()] for name in first.metrics}
    return Result(
        _result_name(train, test, settings, seeds),
        _summarize(by_seed),
        _details(test, settings, trials, by_seed),
        arrays=_arrays(test, first.detections),
        card=_card(train, test, settings, list(trials.values())),
        options={"root": [str(train.root.expanduser().resolve()), *test.classes]},
    )


def run_trial(
    context: EncoderContext,
    train: DetectionDataset,
    test: DetectionDataset,
    settings: DetectionSettings,
    seed: int,
) -> Trial:
    """Train a detector and compute its metrics."""
    detector = build_detector(
        without_whitening(context.backbone),
        len(train.classes),
        settings=settings,
        seed=seed,
        precision=context.precision,
    )
    detector.to(context.device)
    log = train_detector(context, detector, train, settings, seed)
    detections, unreadable = run_detector(context, detector, test, f"detect, seed {seed}")
    check_unreadable(unreadable, test)
    if bad := log.unreadable | unreadable:
        title, reason = next(iter(bad.items()))
        warnings.warn(
            f"{len(bad)} images cannot be read and are left out, the first is {title} ({reason})",
            stacklevel=2,
        )
    indices = sorted(detections)
    found = [detections[index] for index in indices]
    truths = [_ground_truth(test.images[index]) for index in indices]
    metrics: dict[str, float] = {}
    ap50_by_class: list[float] = []
    rules: dict[Literal["voc07", "coco"], str] = {"voc07": "", "coco": " (COCO)"}
    for rule, suffix in rules.items():
        precision = average_precision(found, truths, classes=len(test.classes), rule=rule)
        metrics[f"AP{suffix}"] = precision.ap
        metrics[f"AP50{suffix}"] = precision.ap50
        metrics[f"AP75{suffix}"] = precision.ap75
        if rule == "voc07":
            ap50_by_class = precision.by_class
    return Trial(metrics, ap50_by_class, detections, log, unreadable)


@torch.no_grad()
def run_detector(
    context: EncoderContext, detector: nn.Module, test: DetectionDataset, title: str
) -> tuple[dict[int, Detections], dict[str, str]]:
    """The detections by image, and the reasons of unreadable images by title.

    Of several processes each runs on a part of the images, and each returns all detections.
    """
    rank, world = distributed.rank(), distributed.world_size()
    detector.eval()
    own: list[tuple[int, Detections]] = []
    unreadable: list[tuple[str, str]] = []
    batches = [[index] for index in range(rank, len(test), world)]
    samples = iterate(DecodedBatches(test), batches, workers=context.workers)
    with closing(samples), progress(title, len(batches), shown=rank == 0) as bar:
        for [(image, index, errors)] in samples:
            bar.update()
            if errors:  # the image is a replacement, which is for training only
                unreadable.append((errors[0].title, errors[0].reason))
                continue
            output = detector([image.to(context.device).float().div_(255)])[0]
            boxes = output["boxes"].float().cpu()
            scores = output["scores"].float().cpu()
            own.append((index, Detections(boxes, scores, output["labels"].cpu() - 1)))
    detections = dict(distributed.all_gather_list(own))
    return detections, dict(distributed.all_gather_list(unreadable))


def paper_rows() -> dict[str, dict[str, float]]:
    """The rows of the paper's table."""
    return {
        title: dict(zip(("AP", "AP50", "AP75"), row, strict=True)) for title, row in PAPER.items()
    }


def _result_name(
    train: DetectionDataset, test: DetectionDataset, settings: DetectionSettings, seeds: int
) -> str:
    """A name that tells settings, data, chosen classes and number of seeds."""
    words = [f"detect{settings.tag}", train.folder_name]
    if test.classes_chosen:
        words += test.classes
    if seeds > 1:
        words.append(f"{seeds}-seeds")
    return re.sub(r"[^\w.-]+", "-", "-".join(words))[:120]


def _summarize(by_seed: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean over seeds, and the std where there are several."""
    metrics: dict[str, float] = {}
    for name, values in by_seed.items():
        metrics[name] = statistics.fmean(values)
        if len(values) > 1:
            metrics[f"{name} std"] = statistics.stdev(values)
    return metrics


def _details(
    test: DetectionDataset,
    settings: DetectionSettings,
    trials: Mapping[int, Trial],
    by_seed: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """The settings of a result: those of training, and what each seed gave."""
    by_class = []
    for trial in trials.values():
        pairs = zip(test.classes, trial.ap50_by_class, strict=True)
        by_class.append({name: None if math.isnan(ap) else ap for name, ap in pairs})
    logs = [trial.log for trial in trials.values()]
    return {
        **asdict(settings),
        "short sides in training": settings.train_sizes,
        "proposals": settings.proposals,
        "seeds": list(trials),
        "by seed": dict(by_seed),
        "AP50 by class": by_class,
        "loss": [log.losses for log in logs],
        "processes": [log.processes for log in logs],
        "batch norm": "synchronized" if distributed.world_size() > 1 else "one process",
    }


def _card(
    train: DetectionDataset,
    test: DetectionDataset,
    settings: DetectionSettings,
    trials: Sequence[Trial],
) -> dict[str, Any]:
    """The entries of a card about the images."""
    unreadable = {title for trial in trials for title in (*trial.log.unreadable, *trial.unreadable)}
    return {
        "data": f"{train.folder_name}: {train.name}, evaluated on {test.name}",
        "root": str(train.root.absolute()),
        "split": "images as listed; difficult objects are trained on and not evaluated",
        "sizes": {"train": len(train), "test": len(test)},
        "objects": {"train": _count_objects(train), "test": _count_objects(test)},
        "classes": test.classes,
        "images": {"train": train.fingerprint(), "test": test.fingerprint()},
        "unreadable": len(unreadable),
        "image_size": settings.size,
        "resize": f"short side {settings.size}, long side at most {settings.max_size}",
    }


def _arrays(test: DetectionDataset, detections: Mapping[int, Detections]) -> dict[str, Any]:
    """The objects and detections of some test images, one image after the other, to be drawn."""
    readable = sorted(detections)
    chosen = rng.choice(0, len(readable), STORED_IMAGES, rng.SAMPLE)
    images = [test.images[readable[index]] for index in chosen.tolist()]
    found = [detections[readable[index]] for index in chosen.tolist()]
    return {
        "titles": np.array([image.title for image in images]),
        "files": np.array([str(image.file.absolute()) for image in images]),
        "classes": np.array(test.classes),
        "truth_counts": np.array([len(image.labels) for image in images]),
        "truth_boxes": torch.cat([image.boxes for image in images]).numpy(),
        "truth_labels": torch.cat([image.labels for image in images]).numpy(),
        "truth_difficult": torch.cat([image.difficult for image in images]).numpy(),
        "detection_counts": np.array([len(one.labels) for one in found]),
        "detection_boxes": torch.cat([one.boxes for one in found]).numpy(),
        "detection_scores": torch.cat([one.scores for one in found]).numpy(),
        "detection_labels": torch.cat([one.labels for one in found]).numpy(),
    }


def _ground_truth(image: AnnotatedImage) -> GroundTruth:
    return GroundTruth(image.boxes, image.labels, image.difficult)


def _count_objects(dataset: DetectionDataset) -> int:
    return sum(len(image.labels) for image in dataset.images)
