"""Object detection in VOC's layout: Faster R-CNN trained from the weights, average precision."""

from __future__ import annotations

import math
import re
import statistics
import warnings
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from meanshift.data.voc import AnnotatedImage, DetectionDataset
from meanshift.evaluation.context import EncoderContext, Result
from meanshift.evaluation.detection.model import DetectionSettings, build_detector
from meanshift.evaluation.detection.train import Learned, detect, learn, refuse_many
from meanshift.ops.average_precision import Detections, GroundTruth, average_precision
from meanshift.runtime import distributed, rng
from meanshift.viz import detections

PAPER: dict[str, tuple[float, float, float]] = {  # ResNet-50, 07+12 trainval, 07 test, 5 runs
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
"""AP, AP50 and AP75 of the paper's table."""


def evaluate(
    judged: EncoderContext, train: DetectionDataset, test: DetectionDataset, *, recipe: DetectionSettings, seeds: int = 1
) -> Result:
    """AP, AP50 and AP75 by VOC's metric of 2007 and by COCO's, the mean over seeds.

    Killed and called again with the same arguments it goes on from the last checkpoint. Several
    processes share each batch and the test images; all return the same result.
    """
    if seeds < 1:
        raise ValueError(f"detect: got {seeds} seeds, need 1 or more")
    if recipe.batch_size < distributed.world_size():
        raise ValueError(
            f"detect: {distributed.world_size()} processes share batches of {recipe.batch_size} "
            f"images; need one each: start fewer, or say --batch-size"
        )
    own = range(judged.seed, judged.seed + seeds)
    trials = [_trial(judged, train, test, recipe, seed) for seed in own]
    figures: dict[str, float] = {}
    for name in trials[0].figures:
        values = [trial.figures[name] for trial in trials]
        figures[name] = statistics.fmean(values)
        if seeds > 1:
            figures[f"{name} deviation"] = statistics.stdev(values)
    settings = {
        **asdict(recipe),
        "short sides in training": recipe.sizes,
        "proposals": recipe.proposals,
        "seeds": list(own),
        "by seed": {name: [t.figures[name] for t in trials] for name in trials[0].figures},
        "AP50 by class": [
            {
                c: None if math.isnan(ap) else ap
                for c, ap in zip(test.classes, t.by_class, strict=True)
            }
            for t in trials
        ],
        "loss": [trial.told.losses for trial in trials],
        "processes": [trial.told.processes for trial in trials],
        "batch norm": "synchronized" if distributed.world_size() > 1 else "one process",
    }
    unreadable = {title for trial in trials for title in (*trial.told.bad, *trial.lost)}
    card = {
        "data": f"{train.folder_name}: {train.name}, judged on {test.name}",
        "root": str(train.root.absolute()),
        "split": "images as listed; difficult objects are trained on and not judged",
        "sizes": {"train": len(train), "test": len(test)},
        "objects": {"train": _objects(train), "test": _objects(test)},
        "classes": test.classes,
        "images": {"train": train.fingerprint(), "test": test.fingerprint()},
        "unreadable": len(unreadable),
        "image_size": recipe.size,
        "resize": f"short side {recipe.size}, long side at most {round(1333 * recipe.size / 800)}",
    }
    words = [f"detect{recipe.tag}", train.folder_name, *(test.classes if test.classes_chosen else [])]
    words += [f"{seeds}-seeds"] if seeds > 1 else []
    words += [] if judged.precision == torch.float32 else [str(judged.precision)[6:]]
    name = re.sub(r"[^\w.-]+", "-", "-".join(words))[:120]
    image, text = (None, "") if distributed.rank() else _image(test, trials[0].founds)
    return Result(name, figures, settings, image=image, text=text, card=card)


@dataclass(frozen=True)
class _Trial:
    figures: dict[str, float]
    by_class: list[float]
    founds: dict[int, Detections]
    told: Learned
    lost: dict[str, str]


def _trial(
    judged: EncoderContext, train: DetectionDataset, test: DetectionDataset, recipe: DetectionSettings, seed: int
) -> _Trial:
    """One detector from its first iteration to its figures."""
    detector = build_detector(
        judged.backbone, len(train.classes), recipe=recipe, seed=seed, precision=judged.precision
    )
    detector.to(judged.device)
    told = learn(judged, detector, train, recipe, seed)
    founds, lost = detect(judged, detector, test, f"detect, seed {seed}")
    refuse_many(lost, test)
    if bad := told.bad | lost:
        title, why = next(iter(bad.items()))
        warnings.warn(
            f"{len(bad)} images cannot be read and are left out, the first is {title} ({why})",
            stacklevel=2,
        )
    seen = sorted(founds)
    truths = [_truth(test.images[index]) for index in seen]
    figures, by_class = dict[str, float](), list[float]()
    rules: dict[Literal["coco", "voc07"], str] = {"coco": " (COCO)", "voc07": ""}
    for rule, suffix in rules.items():
        found = average_precision(
            [founds[index] for index in seen], truths, classes=len(test.classes), rule=rule
        )
        named = {"AP": found.ap, "AP50": found.ap50, "AP75": found.ap75}
        figures = {f"{name}{suffix}": value for name, value in named.items()} | figures
        by_class = found.by_class
    return _Trial(figures, by_class, founds, told, lost)


def _image(test: DetectionDataset, founds: dict[int, Detections]) -> tuple[Any, str]:
    """Some of the test photographs, with what was found in them."""
    seen = sorted(founds)
    shown = [seen[index] for index in rng.choice(0, len(seen), detections.MOST, rng.PROBE).tolist()]
    truths, found = [_truth(test.images[i]) for i in shown], [founds[i] for i in shown]
    titles = [test.images[index].title for index in shown]
    images = [test.read(index) for index in shown]
    figure = detections.draw(images, truths, found, classes=test.classes, titles=titles)
    return figure, detections.count(truths, found)


def _truth(image: AnnotatedImage) -> GroundTruth:
    return GroundTruth(image.boxes, image.labels, image.difficult)


def _objects(images: DetectionDataset) -> int:
    return sum(len(image.labels) for image in images.images)


def beside() -> dict[str, dict[str, float]]:
    """The paper's rows."""
    return {
        title: dict(zip(("AP", "AP50", "AP75"), row, strict=True)) for title, row in PAPER.items()
    }
