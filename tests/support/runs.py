"""Run directories that are written by hand, without training, and their images."""

import json

import numpy as np
import torch

from meanshift.config import MSF, Config, Data, Encoder, Train
from meanshift.models.encoder import build_backbone
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import RunDirectory

SIDE = 16
CLASSES = 3
COLORS = [(30 + 20 * (i % 10), 25 * (i // 10), 255 - 20 * (i % 7)) for i in range(60)]
"""the color of each image of `write_solid_images`"""
BASE = Config(
    data=Data(image_size=SIDE, validation="none"),
    encoder=Encoder(name="resnet10", stem="small", width=0.125),
    method=MSF(k=5, bank_size=64),
    train=Train(epochs=4, batch_size=4, device="cpu"),
)


def write_solid_images(folder):
    """60 images, each of its own color, in three classes, and the same without labels."""
    pixels = np.ones((60, SIDE, SIDE, 3), np.uint8) * np.array(COLORS, np.uint8)[:, None, None]
    np.savez(folder / "solid.npz", x_train=pixels, y_train=np.arange(60) % CLASSES)
    np.savez(folder / "unlabeled.npz", x_train=pixels)
    return folder / "solid.npz"


def write_run(folder, source, *, lines=(), warnings=(), snapshots=None, results=None, **settings):
    """Write a run directory with the settings of BASE; others are given as `method__k=10`."""
    for part in ("snapshots", "results"):
        (folder / part).mkdir(parents=True)
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    config = BASE.with_overrides({"data.source": str(source), **overrides})
    (folder / "config.json").write_text(config.to_json())
    (folder / "environment.json").write_text(json.dumps({"steps": 10 * config.train.epochs}))
    for file, records in {"metrics.jsonl": lines, "warnings.jsonl": warnings}.items():
        (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    for epoch, features in (snapshots or {}).items():
        write_snapshot(folder, epoch, features)
    for name, result in (results or {}).items():
        RunDirectory(folder).save_result(name, result)
    return folder


def write_checkpoint(folder, seed=0):
    """Write a checkpoint of random weights, with batch statistics unlike those of a new network."""
    directory = RunDirectory(folder)
    config = directory.config
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    backbone, _ = build_backbone(
        config.encoder, image_size=config.data.image_size, samples=config.data.sample_spec
    )
    state = backbone.state_dict()
    for name, value in state.items():
        if name.endswith("running_mean"):
            value.uniform_(-0.1, 0.1, generator=generator)
        elif name.endswith("running_var"):
            value.uniform_(0.5, 1.5, generator=generator)
        elif name in ("mean", "matrix"):  # of a whitened output
            value.normal_(generator=generator)
    directory.checkpoints.mkdir(exist_ok=True)
    method = {f"online.backbone.{name}": value for name, value in state.items()}
    content = {"step": 10, "config": config.to_dict(), "method": method}
    checkpoint.save(directory.checkpoints, content)
    return folder


def write_snapshot(folder, epoch, features, indices=None):
    """Write the snapshot after an epoch, of the first images or of those with these indices."""
    content = {
        "format": checkpoint.FORMAT,
        "epoch": epoch,
        "indices": torch.arange(len(features)) if indices is None else indices,
        "weights": {},
        "features": features,
    }
    checkpoint.write(folder / "snapshots" / f"epoch-{epoch:04d}.pt", content)


def random_features(seed, count=60, dim=8):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def log_lines(**metrics):
    """Log lines of four epochs of ten steps; each metric is a function of the epoch."""
    return [
        {
            "kind": "train",
            "step": 10 * epoch,
            "epoch": epoch,
            **{name: value(epoch) for name, value in metrics.items()},
        }
        for epoch in range(1, 5)
    ]


def knn_result(accuracy):
    """The result of `evaluate knn`, with this accuracy of 20-NN."""
    return {"knn": {"metrics": {"1-NN": 1.0, "20-NN": accuracy}, "card": {}}}
