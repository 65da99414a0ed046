"""From a folder of JPEGs to two views of 224 pixels, against ImageFolder and DataLoader."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder

from benchmarks import authors
from benchmarks.apart import Apart
from benchmarks.table import Row, by_turns, over
from meanshift.config import Views
from meanshift.data import open_source
from meanshift.data.loader import batches
from meanshift.data.packed import pack
from meanshift.runtime.malloc import keep_memory
from meanshift.transforms.augment import TwoViews

SIZE, BATCH, WORKERS = 224, 256, 2


def rows(rounds: int, *, folder: Path | None = None, images: int = 2_048) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        photos, packed = folder or Path(temporary) / "photos", Path(temporary) / "packed"
        if folder is None:
            write_photographs(photos)
        pack(open_source(str(photos)), packed, name=str(photos), workers=WORKERS)
        contenders = {
            "theirs": Apart(their_views, photos, images, WORKERS),
            "folder": Apart(our_views, photos, images, WORKERS),
            "packed": Apart(our_views, packed, images, 0),
        }
        took = by_turns(
            {name: one.lap for name, one in contenders.items()}, max(2, rounds - 1), warm=False
        )
        for one in contenders.values():
            one.end()
    what = f"{SIZE} px views of {images:,} photographs"
    yield Row(f"{what}: / ImageFolder, same workers", over(took["theirs"], took["folder"]), 1.5)
    yield Row(f"{what}, packed: / ImageFolder", over(took["theirs"], took["packed"]), 4.0,
              note="a packed source is read without workers; ImageFolder with two")  # fmt: skip


def their_views(folder: Path, images: int, workers: int) -> Iterator[float]:
    """Seconds of one pass with two-crop transforms in the workers."""
    dataset = ImageFolder(str(folder), authors.TwoCrops(Views(), SIZE))
    repeated: Dataset[tuple[list[Tensor], int]] = Subset(
        dataset, [index % len(dataset) for index in range(images)]
    )
    yield 0.0
    while True:
        begun = time.perf_counter()
        for _ in DataLoader(repeated, batch_size=BATCH, shuffle=True, num_workers=workers):
            pass
        yield time.perf_counter() - begun


def our_views(folder: Path, images: int, workers: int) -> Iterator[float]:
    """Seconds of one pass: crops in the workers, colors and blur for parts of the batch here."""
    keep_memory()
    source = open_source(str(folder))["train"]
    repeated, two_views = (
        source.take(torch.arange(images) % len(source)),
        TwoViews(Views(), 0, SIZE),
    )
    yield 0.0
    while True:
        begun = time.perf_counter()
        for batch in batches(
            repeated, two_views.crop, batch_size=BATCH, seed=0, start=0, stop=-(-images // BATCH),
            partial=True, workers=workers,
        ):  # fmt: skip
            two_views.finish(batch.images, batch.epoch, batch.ids)
        yield time.perf_counter() - begun


def photographs(count: int) -> Iterator[Image.Image]:
    """Images of 224 pixels with real content: the shipped sample's, seven by seven."""
    source, side = open_source("sample")["train"], 7
    for start in range(count):
        ids = torch.arange(start * side**2, (start + 1) * side**2) % len(source)
        tiles = source.gather(ids).unflatten(0, (side, side)).permute(0, 2, 1, 3, 4)
        yield Image.fromarray(tiles.flatten(2, 3).flatten(0, 1).contiguous().numpy())


def write_photographs(folder: Path, count: int = 512) -> None:
    for index, image in enumerate(photographs(count)):
        place = folder / f"class{index % 4}"
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{index:04}.jpg", quality=90)
