"""CPU time to the same accuracy: the recipe `cifar10-cpu` against lightly's BYOL and SimCLR.

    python -m tools.time_to_accuracy --data cifar10.npz --minutes 10 --out runs/time-to-accuracy

Each of lightly's runs takes one thread for the given minutes of CPU time, with a cosine schedule
over that time. "our encoder and optimizer" has the encoder of the recipe with random weights,
AdamW and the recipe's batch size, with lightly's losses, heads and transforms. "its settings" has
the ResNet-18, heads, transforms and SGD of lightly's CIFAR-10 benchmark. Our runs have 1, 2, 4, ...
epochs of the recipe, until one is at least as accurate as lightly's best run. CPU time includes the
start and the views, but not the evaluation. Finished rows are found in the folder and not repeated.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models import ResNetGenerator
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead, SimCLRProjectionHead
from lightly.models.utils import update_momentum
from lightly.transforms import SimCLRTransform
from PIL import Image
from torch import Tensor, nn

from meanshift.config.recipes import recipe
from meanshift.data import Source, open_source
from meanshift.evaluation.knn import knn_accuracy
from meanshift.models.encoder import build_backbone
from meanshift.models.features import extract_features
from meanshift.models.weights import load_weights
from meanshift.runtime.device import autocast, pick_precision
from meanshift.training.loop import pretrain

RECIPE = recipe("cifar10-cpu")
CPU = torch.device("cpu")
Row = dict[str, Any]


class BYOL(nn.Module):
    """BYOL of lightly's parts: symmetric loss, target updated after each step."""

    def __init__(self, backbone: nn.Module, features: int, momentum: float = 0.99) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = BYOLProjectionHead(features, 1024, 256)
        self.predictor = BYOLPredictionHead(256, 1024, 256)
        online = nn.Sequential(backbone, nn.Flatten(), self.projector)
        self.target = copy.deepcopy(online).requires_grad_(False)
        self.online = online
        self.momentum = momentum
        self.criterion = NegativeCosineSimilarity()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        predictions = [self.predictor(self.online(view)) for view in (first, second)]
        with torch.no_grad():
            targets = [self.target(view) for view in (first, second)]
        a = self.criterion(predictions[0], targets[1])
        b = self.criterion(predictions[1], targets[0])
        loss: Tensor = (a + b) / 2
        return loss

    def after_update(self) -> None:
        update_momentum(self.online, self.target, m=self.momentum)


class SimCLR(nn.Module):
    """SimCLR of lightly's parts."""

    def __init__(self, backbone: nn.Module, features: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.online = nn.Sequential(
            backbone, nn.Flatten(), SimCLRProjectionHead(features, features, 128)
        )
        self.criterion = NTXentLoss()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.online(first), self.online(second))
        return loss

    def after_update(self) -> None:
        """Nothing moves but the weights."""


METHODS: dict[str, Callable[[nn.Module, int], BYOL | SimCLR]] = {"BYOL": BYOL, "SimCLR": SimCLR}


def lightly_backbone() -> tuple[nn.Module, int]:
    """The ResNet-18 of lightly's CIFAR-10 benchmark, without its classifier."""
    resnet = ResNetGenerator("resnet-18")
    return nn.Sequential(*list(resnet.children())[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten()), 512


def shuffled_batches(source: Source, size: int) -> Iterator[list[Image.Image]]:
    """Batches of images, epoch after epoch."""
    pixels = source.read_batch(torch.arange(len(source)))
    if pixels.shape[1] == 3:
        pixels = pixels.permute(0, 2, 3, 1)
    images = [Image.fromarray(np.ascontiguousarray(each)) for each in pixels.numpy()]
    while True:
        for ids in torch.randperm(len(images)).split(size):
            if len(ids) == size:
                yield [images[i] for i in ids.tolist()]


def train_lightly(name: str, ours: bool, source: Source, seconds: float) -> tuple[Row, nn.Module]:
    """Train one of lightly's methods for some CPU seconds; return its row and its backbone."""
    torch.manual_seed(0)
    if ours:
        encoder = build_backbone(RECIPE.encoder, image_size=32)
        backbone, features = getattr(encoder[0], "network", encoder[0]), encoder[1]
        batch_size, lr = RECIPE.train.batch_size, RECIPE.optim.lr
    else:
        backbone, features = lightly_backbone()
        batch_size, lr = 128, 0.06
    method = METHODS[name](backbone, features).to(memory_format=torch.channels_last).train()
    parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if ours:
        optimizer = torch.optim.AdamW(parameters, lr, weight_decay=RECIPE.optim.weight_decay)
    else:
        optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4)
    transform = SimCLRTransform(input_size=32, cj_strength=0.5, gaussian_blur=0.0)
    precision = pick_precision("auto", CPU)
    steps = 0
    begin = time.process_time()
    for images in shuffled_batches(source, batch_size):
        elapsed = (time.process_time() - begin) / seconds
        if elapsed >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr / 2 * (1 + math.cos(math.pi * elapsed))
        pairs = zip(*(transform(image) for image in images), strict=True)
        first, second = (
            torch.stack(views).contiguous(memory_format=torch.channels_last) for views in pairs
        )
        with autocast(CPU, precision):
            loss = method(first, second)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        method.after_update()
        steps += 1
    minutes = (time.process_time() - begin) / 60
    return {"images": steps * batch_size, "minutes": minutes}, method.backbone


def accuracies(backbone: nn.Module, data: str) -> dict[str, float]:
    """1-NN and 20-NN on the test images, with all training images as references."""
    splits = open_source(data)
    train, test = splits["train"], splits.get("test") or splits["val"]
    features = [
        extract_features(backbone.eval(), source, image_size=32, device=CPU)
        for source in (train, test)
    ]
    assert train.labels is not None and test.labels is not None
    return knn_accuracy(features[0], train.labels, features[1], test.labels)


def run_lightly(name: str, ours: bool, title: str, data: str, minutes: float, out: Path) -> None:
    torch.set_num_threads(1)
    row, backbone = train_lightly(name, ours, open_source(data)["train"], 60 * minutes)
    _finish({"title": title, **row, **accuracies(backbone, data)}, out)


def run_ours(epochs: int, data: str, out: Path) -> Row:
    """The recipe with some epochs."""
    torch.set_num_threads(1)
    folder = out / f"recipe-{epochs}"
    config = RECIPE.with_overrides(
        {
            "data.source": data,
            "train.epochs": epochs,
            "train.monitor_every": 0,
            "train.snapshots": 2,
        }
    )
    begin = time.process_time()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        pretrain(config, folder)
    minutes = (time.process_time() - begin) / 60
    images = epochs * len(open_source(data)["train"])
    row = {"title": _title(epochs), "images": images, "minutes": minutes}
    return _finish({**row, **accuracies(load_weights(folder).backbone, data)}, out)


def _title(epochs: int) -> str:
    return f"recipe cifar10-cpu, {epochs} epochs"


def _path(title: str, out: Path) -> Path:
    return out / f"{''.join(letter if letter.isalnum() else '-' for letter in title)}.json"


def _finish(row: Row, out: Path) -> Row:
    _path(row["title"], out).write_text(json.dumps(row, indent=2))
    print(f"{row['title']}: 20-NN {row['20-NN']:.1f}, {row['minutes']:.2f} minutes", flush=True)
    return row


def _read(title: str, out: Path) -> Row | None:
    path = _path(title, out)
    return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="cifar10", help="CIFAR-10")
    parser.add_argument("--minutes", type=float, default=10, help="CPU minutes of lightly's [10]")
    parser.add_argument("--out", type=Path, default=Path("runs/time-to-accuracy"))
    parser.add_argument("--processes", type=int, default=2, help="runs side by side [2]")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    titles = {
        f"lightly {name}, {'our encoder and optimizer' if ours else 'its settings'}": (name, ours)
        for ours in (True, False)
        for name in METHODS
    }
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(run_lightly, *which, title, options.data, options.minutes, options.out)
            for title, which in titles.items()
            if _read(title, options.out) is None
        ]
        for each in waiting:
            each.result()
        theirs = [row for title in titles if (row := _read(title, options.out))]
        ours: list[Row] = []
        for epochs in (1, 2, 4, 8, 16):
            row = _read(_title(epochs), options.out)
            ours.append(row or pool.submit(run_ours, epochs, options.data, options.out).result())
            if ours[-1]["20-NN"] >= max(row["20-NN"] for row in theirs):
                break
    print("| | 20-NN | 1-NN | images seen | CPU minutes | our CPU time to the same 20-NN / its |")
    print("| --- |" + " --: |" * 5)
    for row in [*theirs, *ours]:
        reached = [each["minutes"] for each in ours if each["20-NN"] >= row["20-NN"]]
        ratio = f"{min(reached) / row['minutes']:.3f}" if row in theirs and reached else ""
        print(
            f"| {row['title']} | {row['20-NN']:.1f} | {row['1-NN']:.1f} | {row['images']:,} "
            f"| {row['minutes']:.2f} | {ratio} |"
        )


if __name__ == "__main__":
    main()
