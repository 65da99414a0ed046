"""Frozen features of a source: extracted once, kept in a mapped file, nothing of the model changed.

A file of features is named by the weights, the images and how they were prepared, so that none of
the three can change and meet it.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader

from meanshift.data import Source, UnreadableSample
from meanshift.data.loader import ignore_signals, iterate
from meanshift.models.encoder import memory_format
from meanshift.ops.image import normalize
from meanshift.runtime import distributed
from meanshift.runtime.device import autocast
from meanshift.runtime.progress import progress
from meanshift.runtime.run_directory import atomic_writer, write_text
from meanshift.transforms.eval import (
    TRANSFORM_VERSION,
    EvalDataset,
    first_index_of_rank,
    needs_no_resize,
)

BATCH = 256


def extract_features(
    network: nn.Module,
    source: Source,
    *,
    image_size: int,
    resize: int = 0,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    batch_size: int = BATCH,
    workers: int = 0,
    bad: dict[int, UnreadableSample] | None = None,
) -> Float[Tensor, "n features"]:
    """The network's output for every image of a source, in order, in float32 on the CPU.

    Several processes share the work, batch by batch, and each gets all of it. Unreadable images
    count as gray ones, with a warning, or are put into `bad`.
    """
    skipped: dict[int, UnreadableSample] = {}
    parts = _stream(
        network,
        source,
        image_size=image_size,
        resize=resize,
        device=device,
        precision=precision,
        batch_size=batch_size,
        workers=workers,
        bad=skipped,
    )
    own = list(parts)
    (width,) = distributed.all_max(own[0].shape[1] if own else 0)
    features = distributed.all_gather_rows(torch.cat([*own, torch.empty(0, width)]))
    skipped = dict(distributed.all_gather_list(list(skipped.items())))
    if bad is not None:
        bad |= skipped
    elif skipped:
        _warn(source, skipped, "count as gray ones")
    return features


def cached_features(
    network: nn.Module,
    source: Source,
    *,
    weights: str,
    folder: Path,
    image_size: int,
    resize: int = 0,
    bicubic: bool = False,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    workers: int = 0,
) -> tuple[Float[Tensor, "kept features"], Int[Tensor, " kept"]]:
    """Features from the file in `folder` that fits, or extracted into it; and whose they are.

    `weights` is the fingerprint of the network. The rows are mapped, not read: a million images
    need not fit into memory. Unreadable images have no row and are named in a warning.
    """
    if not len(source):
        raise ValueError(f"{source.name}: no images")
    if needs_no_resize(source, image_size):  # then these change nothing, and the file is shared
        resize, bicubic = 0, False
    key = {
        "weights": weights,
        "images": source.contents(),
        "image_size": image_size,
        "resize": resize,
        "precision": str(precision),
        "prepared": TRANSFORM_VERSION,
    } | ({"bicubic": True} if bicubic else {})
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path, beside = folder / f"{name}.npy", folder / f"{name}.json"
    known = _opened(path, beside, len(source))
    (missing,) = distributed.all_max(int(known is None))
    if missing:
        bad: dict[int, UnreadableSample] = {}
        rows = _stream(
            network,
            source,
            image_size=image_size,
            resize=resize,
            bicubic=bicubic,
            device=device,
            precision=precision,
            workers=workers,
            bad=bad,
            shown=True,
        )
        try:
            with closing(rows):  # also when it fails: the network gets its modes back
                seen = first_index_of_rank(len(source), BATCH)
                bad = _write(path, beside, rows, seen, bad, {**key, "source": source.name})
        except OSError as error:
            raise OSError(
                f"{path}: the features could not be written ({error}); make room, or choose "
                f"another place with --out, and type the command again"
            ) from error
        known = _opened(path, beside, len(source))
        if known is None:
            raise ValueError(f"{folder}: need a folder on a disk that all processes share (--out)")
    assert known is not None
    features, bad = known
    if bad:
        _warn(source, bad, "are left out")
    return features, _kept(len(source), bad)


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[nn.Module]:
    """A network in eval mode for a while; each of its parts gets its own mode back."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield network
    finally:
        for module, training in modes.items():
            module.training = training


def evaluation_batches(
    source: Source, *, image_size: int, device: torch.device, workers: int = 0
) -> Iterator[tuple[Int[Tensor, " batch"], Float[Tensor, "batch channels _ _"]]]:
    """All images of a source in order, in evaluation views on the device, with their indices.

    Of several processes each gets its part. Unreadable images count as gray ones.
    """
    dataset = EvalDataset(source, image_size, 0, BATCH, False)
    batches = iter(dataset.batches)
    for images, _ in iterate(_loader(dataset, source, workers, device)):
        pixels = images.to(device, non_blocking=True).float().div_(255)
        yield next(batches), normalize(pixels)


def _loader(
    dataset: EvalDataset, source: Source, workers: int, device: torch.device
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=0 if source.uniform else workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # its base seed must not come from the global generator
    )


def _stream(
    network: nn.Module,
    source: Source,
    *,
    image_size: int,
    resize: int,
    device: torch.device,
    precision: torch.dtype,
    bad: dict[int, UnreadableSample],
    batch_size: int = BATCH,
    workers: int = 0,
    bicubic: bool = False,
    shown: bool = False,
) -> Generator[Float[Tensor, "batch features"], None, None]:
    """Features batch by batch; images are decoded by the workers while the network computes."""
    layout = memory_format(network)
    prepared = EvalDataset(source, image_size, resize, batch_size, bicubic)
    loader = _loader(prepared, source, workers, device)
    own, aloud = sum(map(len, prepared.batches)), distributed.rank() == 0
    bar = progress("features", own, unit="pic", shown=aloud) if shown else nullcontext()
    with eval_mode(network), bar as moving:
        for images, unreadable in iterate(loader):
            bad |= unreadable
            view = normalize(images.to(device, non_blocking=True).float().div_(255))
            with torch.no_grad(), autocast(device, precision):
                rows = network(view.contiguous(memory_format=layout))
            yield rows.float().cpu()
            if moving is not None:
                moving.update(len(images))


def _write(
    path: Path,
    beside: Path,
    rows: Iterable[Tensor],
    seen: int,
    bad: dict[int, UnreadableSample],
    told: dict[str, Any],
) -> dict[int, UnreadableSample]:
    """Rows to an .npy file, as they come, and what they are of to another beside it.

    Those of unreadable images are left out. Of several processes each writes its rows to a file
    of its own, and the first puts them behind one another.
    """
    world, first = distributed.world_size(), distributed.rank() == 0
    parts = [path.with_name(f".{path.name}.{other}") for other in range(world)]
    with ExitStack() as whole:
        try:
            with distributed.fail_together():
                path.parent.mkdir(parents=True, exist_ok=True)
                if first:
                    beside.unlink(missing_ok=True)
                    file = whole.enter_context(atomic_writer(path, shared=True))
                    file.write(bytes(_HEADER))
                    poured = _pour(file, rows, bad, seen)
                else:
                    with parts[distributed.rank()].open("wb") as own:
                        poured = _pour(own, rows, bad, seen)
            every = distributed.all_gather_list([poured])
            bad = dict(distributed.all_gather_list(list(bad.items())))
            count = sum(number for number, _ in every)
            with distributed.fail_together():
                if not count:
                    one = bad[min(bad)]
                    raise ValueError(
                        f"none of the {len(bad)} images can be read, the first is {one.title} "
                        f"({one.why})"
                    )
                if first:
                    for part in parts[1:]:
                        with part.open("rb") as more:
                            shutil.copyfileobj(more, file)
                    file.seek(0)
                    file.write(_header(count, max(width for _, width in every)))
        finally:
            parts[distributed.rank()].unlink(missing_ok=True)
    with distributed.fail_together():
        if first:
            unread = {index: [error.title, error.why] for index, error in bad.items()}
            write_text(beside, json.dumps({**told, "bad": unread}, indent=2) + "\n")
    return bad


def _pour(
    file: BinaryIO, rows: Iterable[Tensor], bad: dict[int, UnreadableSample], seen: int
) -> tuple[int, int]:
    """Write the rows of readable images, of which `seen` is the first: how many, how wide."""
    count = width = 0
    for part in rows:
        width = part.shape[1]
        gone = [index - seen for index in bad if index >= seen]
        kept = part[_kept(len(part), gone)] if gone else part
        file.write(kept.numpy().tobytes())
        count, seen = count + len(kept), seen + len(part)
    return count, width


_HEADER = 128


def _header(count: int, width: int) -> bytes:
    header = io.BytesIO()
    told = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(header, told)
    assert len(header.getvalue()) == _HEADER
    return header.getvalue()


def _opened(
    path: Path, beside: Path, size: int
) -> tuple[Tensor, dict[int, UnreadableSample]] | None:
    """A whole file of features for so many images, mapped; None where there is none."""
    try:
        told = json.loads(beside.read_text())["bad"]
        rows = torch.from_numpy(np.lib.format.open_memmap(path, mode="c"))
        bad = {int(index): UnreadableSample(*why) for index, why in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # torn or not ours
        return None
    return (rows, bad) if len(rows) + len(bad) == size else None


def _kept(size: int, bad: Iterable[int]) -> Int[Tensor, " kept"]:
    kept = torch.ones(size, dtype=torch.bool)
    kept[list(bad)] = False
    return kept.nonzero()[:, 0]


def _warn(source: Source, bad: dict[int, UnreadableSample], fate: str) -> None:
    first = next(iter(bad.values()))
    warnings.warn(
        f"{source.name}: {len(bad)} of {len(source)} images cannot be read and {fate}, the first "
        f"is {first.title} ({first.why})",
        stacklevel=3,
    )
