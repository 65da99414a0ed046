"""From a folder of JPEGs to two views of 224 pixels, against ImageFolder and DataLoader."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder

from benchmarks import baseline
from benchmarks.table import Row, cpu_seconds, ratios, timed
from benchmarks.worker import Worker
from meanshift.config import Config, Views
from meanshift.data import open_source
from meanshift.data.loader import batches
from meanshift.data.packed import pack
from meanshift.methods import view_specs
from meanshift.runtime.malloc import keep_memory
from meanshift.transforms.augment import MultiViewTransform

SIZE, BATCH_SIZE, WORKERS = 224, 256, 2

Seconds = tuple[float, float]
"""elapsed, and of the CPU in all processes"""


def rows(rounds: int, *, photos: Path | None = None, images: int = 1_024) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / "packed"
        if photos is None:
            photos = Path(temporary) / "photos"
            write_photographs(photos)
        pack(open_source(str(photos)), packed, name=str(photos), workers=WORKERS)
        workers = {
            "ImageFolder": Worker(image_folder_views, photos, images, WORKERS),
            "folder": Worker(our_views, photos, images, WORKERS),
            "packed": Worker(our_views, packed, images, 0),
        }
        measured: dict[str, list[Seconds]] = {name: [] for name in workers}
        for _ in range(max(2, rounds - 1)):  # alternately: a noisy machine disturbs all alike
            for name, worker in workers.items():
                measured[name].append(worker.next())
        for worker in workers.values():
            worker.close()
    title = f"{SIZE} px views of {images:,} photographs"
    for clock, kind in enumerate(("elapsed time", "CPU time of all processes")):
        seconds = {name: [both[clock] for both in each] for name, each in measured.items()}
        theirs = seconds["ImageFolder"]
        yield Row(
            f"{title}: / ImageFolder, same workers",
            ratios(theirs, seconds["folder"]),
            2.5,
            note=kind,
        )
        yield Row(
            f"{title}, packed: / ImageFolder",
            ratios(theirs, seconds["packed"]),
            4.0,
            note=f"{kind}; a packed source is read without workers",
        )


def image_folder_views(folder: Path, images: int, workers: int) -> Iterator[Seconds]:
    """Seconds of one pass with two-crop transforms in the workers."""
    dataset = ImageFolder(str(folder), baseline.TwoCrops(Views(), SIZE))
    repeated: Dataset[tuple[list[Tensor], int]] = Subset(
        dataset, [index % len(dataset) for index in range(images)]
    )

    def work() -> None:
        for _ in DataLoader(repeated, batch_size=BATCH_SIZE, shuffle=True, num_workers=workers):
            pass

    yield 0.0, 0.0
    while True:
        yield _both_clocks(work)


def our_views(folder: Path, images: int, workers: int) -> Iterator[Seconds]:
    """Seconds of one pass: crops in the workers, color operators on batches in this process."""
    keep_memory()
    source = open_source(str(folder))["train"]
    repeated = source.subset(torch.arange(images) % len(source))
    transform = MultiViewTransform(view_specs(Config()), 0, SIZE)

    def work() -> None:
        for batch in batches(
            repeated,
            transform.crop,
            batch_size=BATCH_SIZE,
            seed=0,
            start=0,
            stop=-(-images // BATCH_SIZE),
            partial=True,
            workers=workers,
        ):
            transform.finish(batch.images, batch.epoch, batch.ids)

    yield 0.0, 0.0
    while True:
        yield _both_clocks(work)


def _both_clocks(work: Callable[[], None]) -> Seconds:
    cpu_time = timed(work, cpu_seconds)
    start = time.perf_counter()
    cpu = cpu_time()
    return time.perf_counter() - start, cpu


def photographs(count: int) -> Iterator[Image.Image]:
    """Images of 224 pixels with real content: tiles of seven by seven images of the sample."""
    source = open_source("sample")["train"]
    side = 7
    for start in range(count):
        ids = torch.arange(start * side**2, (start + 1) * side**2) % len(source)
        tiles = source.read_batch(ids).unflatten(0, (side, side)).permute(0, 2, 1, 3, 4)
        yield Image.fromarray(tiles.flatten(2, 3).flatten(0, 1).contiguous().numpy())


def write_photographs(folder: Path, count: int = 512) -> None:
    """Write photographs as JPEGs into four class folders."""
    for index, image in enumerate(photographs(count)):
        class_folder = folder / f"class{index % 4}"
        class_folder.mkdir(parents=True, exist_ok=True)
        image.save(class_folder / f"{index:04}.jpg", quality=90)
