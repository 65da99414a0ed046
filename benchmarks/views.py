"""The two views of a batch against per-image pipelines of torchvision and lightly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image

from benchmarks import baseline, decoding
from benchmarks.table import Row, alternate, cpu_seconds, installed, ratios, timed
from benchmarks.worker import Worker
from meanshift.config import Config, Views
from meanshift.data import open_source
from meanshift.methods import view_specs
from meanshift.runtime.malloc import keep_memory
from meanshift.transforms.augment import MultiViewTransform

BATCH_SIZE = 256


def rows(rounds: int) -> Iterator[Row]:
    """Weak and strong with the paper's probabilities, blur included; CPU time of one thread."""
    for size, goal in ((32, 10.0), (224, 6.0)):
        names = ["ours", "torchvision", *(["lightly"] if installed("lightly") else [])]
        workers = {name: Worker(one_thread, name, size) for name in names}
        contenders = {name: worker.seconds for name, worker in workers.items()}
        seconds = alternate(contenders, rounds, warm_up=False)
        for worker in workers.values():
            worker.close()
        title = f"views, weak + strong, {BATCH_SIZE} of {size} px"
        ours = seconds["ours"]
        yield Row(
            f"{title}: / torchvision's transforms one by one",
            ratios(seconds["torchvision"], ours),
            goal,
        )
        if "lightly" in seconds:
            yield Row(
                f"{title}: / lightly's MoCo v2 (two strong)", ratios(seconds["lightly"], ours)
            )


def one_thread(name: str, size: int) -> Iterator[float]:
    """CPU seconds for the views of a batch; a per-image pipeline cannot use a second thread."""
    torch.set_num_threads(1)
    pixels = _images(size)
    images = [Image.fromarray(each) for each in pixels]
    if name == "ours":
        keep_memory()
        transform = MultiViewTransform(view_specs(Config()), 0, size)
        ids = torch.arange(BATCH_SIZE)
        epochs = itertools.count()
        batch = torch.from_numpy(pixels)
        planes = list(batch.permute(0, 3, 1, 2))

        def work() -> object:
            epoch = next(epochs)
            cropped = batch if size <= 64 else transform.crop(planes, epoch, ids)
            return transform.finish(cropped, epoch, ids)

    elif name == "torchvision":
        weak, strong = baseline.weak_and_strong(Views(), size)

        def work() -> object:
            weak_views = torch.stack([weak(image) for image in images])
            strong_views = torch.stack([strong(image) for image in images])
            return weak_views, strong_views

    else:
        from lightly.transforms import MoCoV2Transform

        two_views = MoCoV2Transform(input_size=size)

        def work() -> object:
            pairs = [two_views(image) for image in images]
            return [torch.stack(views) for views in zip(*pairs, strict=True)]

    measure = timed(work, cpu_seconds)
    for _ in range(3 if name == "ours" else 1):  # until memory is allocated
        measure()
    yield 0.0
    while True:
        yield measure()


def _images(size: int) -> np.ndarray:
    if size == 32:
        return open_source("sample")["train"].read_batch(torch.arange(BATCH_SIZE)).numpy()
    return np.stack([np.asarray(image) for image in decoding.photographs(BATCH_SIZE)])
