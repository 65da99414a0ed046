"""Tiny runs of every method: colored images of three classes, and the settings to train on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meanshift.config import Config
from meanshift.config.recipes import recipe
from meanshift.models.weights import export, load_weights
from meanshift.training.loop import pretrain


def write_images(folder: Path) -> Path:
    """48 images of 16x16 pixels, each mostly red, green or blue."""
    rng = np.random.default_rng(0)
    labels = np.arange(48) % 3
    pixels = rng.integers(0, 60, (48, 16, 16, 3))
    pixels[np.arange(48), :, :, labels] += 180
    path = folder / "images.npz"
    np.savez(path, x_train=pixels.astype(np.uint8), y_train=labels)
    return path


def train_teacher(source: Path, folder: Path) -> Path:
    """Weights for CompRess."""
    run = pretrain(configure("byol-asym", source, epochs=1), folder / "run")
    return export(load_weights(run), folder / "teacher.safetensors")


def configure(name: str, source: Path, teacher: Path | None = None, epochs: int = 3) -> Config:
    """Settings of a run of 12 steps in 3 epochs."""
    settings = {
        "data.source": str(source), "data.image_size": 16, "data.validation": "none",
        "encoder.name": "conv3", "encoder.stem": "imagenet", "encoder.width": 0.125,
        "train.batch_size": 12, "train.epochs": epochs, "train.device": "cpu",
        "train.precision": "float32", "train.snapshots": 2, "train.snapshot_images": 12,
        "train.save_every": 0.5, "train.log_every": 1, "train.monitor_every": 0,
        "method.name": name, "encoder.batch_groups": 2 if name in ("moco", "co2") else 1,
    }  # fmt: skip
    config = recipe("cifar10-r18").with_overrides(settings)
    more = {"method.bank_size": 24, "method.queue_size": 0, "method.positives": 4}
    more |= {"method.small_crops": 2, "method.negatives": 16, "method.background": 16}
    if name == "compress":
        more["method.teacher"] = str(teacher)
    known = config.to_dict()["method"]
    return config.with_overrides(
        {path: value for path, value in more.items() if path.partition(".")[2] in known}
    )
