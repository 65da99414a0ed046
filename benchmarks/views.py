"""The two views of a batch against torchvision's per-image pipeline and lightly's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image

from benchmarks import authors, files
from benchmarks.apart import Apart
from benchmarks.table import Row, by_turns, installed, over, timed
from meanshift.config import Views
from meanshift.data import open_source
from meanshift.runtime.malloc import keep_memory
from meanshift.transforms.augment import TwoViews

BATCH = 256


def rows(rounds: int) -> Iterator[Row]:
    """Weak and strong by the paper's chances, blur included; one thread for everybody."""
    for size, goal in ((32, 10.0), (224, 2.0)):
        names = ["ours", "torchvision", *(["lightly"] if installed("lightly") else [])]
        contenders = {name: Apart(one_thread, name, size) for name in names}
        took = by_turns({name: one.lap for name, one in contenders.items()}, rounds, warm=False)
        for one in contenders.values():
            one.end()
        what = f"views, weak + strong, {BATCH} of {size} px"
        ratios = {name: over(laps, took["ours"]) for name, laps in took.items()}
        yield Row(f"{what}: / torchvision's transforms one by one", ratios["torchvision"], goal)
        if "lightly" in ratios:
            yield Row(f"{what}: / lightly's MoCo v2 (two strong)", ratios["lightly"])


def one_thread(name: str, size: int) -> Iterator[float]:
    """Seconds for the views of a batch; a per-image pipeline has no use for a second thread."""
    torch.set_num_threads(1)
    images = _images(size)
    whole = [Image.fromarray(one) for one in images]
    if name == "ours":
        keep_memory()
        two_views, ids, epochs = TwoViews(Views(), 0, size), torch.arange(BATCH), itertools.count()
        batch = torch.from_numpy(images)
        planes = list(batch.permute(0, 3, 1, 2))

        def work() -> object:
            epoch = next(epochs)
            held = batch if size <= 64 else two_views.crop(planes, epoch, ids)
            return two_views.finish(held, epoch, ids)

    elif name == "torchvision":
        weak, strong = authors.weak_and_strong(Views(), size)

        def work() -> object:
            return torch.stack([weak(one) for one in whole]), torch.stack(
                [strong(one) for one in whole]
            )

    else:
        from lightly.transforms import MoCoV2Transform

        both = MoCoV2Transform(input_size=size)

        def work() -> object:
            return [torch.stack(views) for views in zip(*(both(one) for one in whole), strict=True)]

    lap = timed(work)
    for _ in range(3 if name == "ours" else 1):  # what was allocated once is kept
        lap()
    yield 0.0
    while True:
        yield lap()


def _images(size: int) -> np.ndarray:
    if size == 32:
        return open_source("sample")["train"].gather(torch.arange(BATCH)).numpy()
    return np.stack([np.asarray(one) for one in files.photographs(BATCH)])
