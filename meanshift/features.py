"""Frozen features of a source: extracted once, kept in a mapped file, nothing of the model changed.

A file of features is named by the weights, the pictures and how they were prepared, so that none of
the three can change and meet it.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as TF

from meanshift.data import Source, Unreadable
from meanshift.data.loader import leave_signals_to_the_run
from meanshift.encoder import memory_format
from meanshift.journal import whole_file, write_atomically
from meanshift.machine import autocast
from meanshift.pixels import normalise
from meanshift.progress import progress

PREPARED = 1  # raised whenever `prepare` changes, so that older files are not met again


def extract(
    network: nn.Module,
    source: Source,
    *,
    image_size: int,
    resize: int = 0,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    batch_size: int = 256,
    workers: int = 0,
    bad: dict[int, Unreadable] | None = None,
) -> Float[Tensor, "n features"]:
    """The network's output for every picture of a source, in order, in float32 on the CPU.

    Unreadable pictures count as grey ones, with a warning, or are put into `bad`.
    """
    skipped: dict[int, Unreadable] = {} if bad is None else bad
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
    features = torch.cat(list(parts))
    if skipped and bad is None:
        _warn(source, skipped, "count as grey ones")
    return features


def stored(
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

    `weights` is the fingerprint of the network. The rows are mapped, not read: a million pictures
    need not fit into memory. Unreadable pictures have no row and are named in a warning.
    """
    if not len(source):
        raise ValueError(f"{source.name}: no pictures")
    if _as_they_are(source, image_size):  # then these change nothing, and the file is shared
        resize, bicubic = 0, False
    key = {
        "weights": weights,
        "pictures": source.contents(),
        "image_size": image_size,
        "resize": resize,
        "precision": str(precision),
        "prepared": PREPARED,
    } | ({"bicubic": True} if bicubic else {})
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path, beside = folder / f"{name}.npy", folder / f"{name}.json"
    known = _opened(path, beside, len(source))
    if known is None:
        folder.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        bad: dict[int, Unreadable] = {}
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
        told = {**key, "source": source.name}
        try:
            with closing(rows):  # also when it fails: the network gets its modes back
                _write(path, rows, bad)
            told["bad"] = {index: [error.title, error.why] for index, error in bad.items()}
            write_atomically(beside, json.dumps(told, indent=2) + "\n")
        except OSError as error:
            raise OSError(
                f"{path}: the features could not be written ({error}); make room, or choose "
                f"another place with --out, and type the command again"
            ) from error
        known = _opened(path, beside, len(source))
        assert known is not None
    features, bad = known
    if bad:
        _warn(source, bad, "are left out")
    return features, _kept(len(source), bad)


@contextmanager
def judged(network: nn.Module) -> Iterator[nn.Module]:
    """A network in eval mode for a while; each of its parts gets its own mode back."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield network
    finally:
        for module, training in modes.items():
            module.training = training


def prepare(
    source: Source,
    indices: Int[Tensor, " batch"],
    image_size: int,
    resize: int = 0,
    bad: dict[int, Unreadable] | None = None,
    bicubic: bool = False,
) -> UInt8[Tensor, "batch channels _ _"]:
    """Pictures as they are judged: small ones of one size as they are, others cut from the centre.

    The short side is resized to `resize` (0: 256/224 of `image_size`) and the centre taken: 256 and
    224 in the authors' code. Small arrays keep their own size, or are enlarged to `image_size`. An
    unreadable picture raises, or where `bad` is given it is put there and counts as a grey one.
    """
    way = TF.InterpolationMode.BICUBIC if bicubic else TF.InterpolationMode.BILINEAR
    if source.uniform:
        pictures = source.gather(indices).permute(0, 3, 1, 2)
        if max(pictures.shape[2:]) <= max(image_size, 64):
            if max(pictures.shape[2:]) < image_size:  # trained enlarged, so judged enlarged
                pictures = TF.resize(pictures, [image_size, image_size], way, antialias=True)
            return pictures
        unbound: Iterable[Tensor] = pictures.unbind(0)
    else:
        unbound = (_readable(source, index, image_size, bad) for index in indices.tolist())
    short, square = [resize or round(image_size * 256 / 224)], [image_size, image_size]
    keep = image_size <= 64  # files of small pictures are judged as arrays of them are
    return torch.stack(
        [
            one
            if keep and list(one.shape[1:]) == square
            else TF.center_crop(TF.resize(one, short, way, antialias=True), square)
            for one in unbound
        ]
    )


def _as_they_are(source: Source, image_size: int) -> bool:
    """Whether `prepare` leaves every picture of a source alone."""
    if not source.uniform:
        return False
    side = max(source.gather(torch.tensor([0])).shape[1:3])
    return image_size <= side <= max(image_size, 64)


def _stream(
    network: nn.Module,
    source: Source,
    *,
    image_size: int,
    resize: int,
    device: torch.device,
    precision: torch.dtype,
    bad: dict[int, Unreadable],
    batch_size: int = 256,
    workers: int = 0,
    bicubic: bool = False,
    shown: bool = False,
) -> Generator[Float[Tensor, "batch features"], None, None]:
    """Features batch by batch; pictures are decoded by the workers while the network computes."""
    layout = memory_format(network)
    loader = DataLoader(
        _Prepared(source, image_size, resize, batch_size, bicubic),
        batch_size=None,
        num_workers=0 if source.uniform else workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals_to_the_run,
        generator=torch.Generator(),  # its base seed must not come from the global generator
    )
    bar = progress("features", len(source), unit="pic") if shown else nullcontext()
    with judged(network), bar as moving:
        for pictures, unreadable in loader:
            bad |= unreadable
            view = normalise(pictures.to(device, non_blocking=True).float().div_(255))
            with torch.no_grad(), autocast(device, precision):
                rows = network(view.contiguous(memory_format=layout))
            yield rows.float().cpu()
            if moving is not None:
                moving.update(len(pictures))


class _Prepared(Dataset[tuple[Tensor, dict[int, Unreadable]]]):
    """Whole batches of prepared pictures, with what could not be read."""

    def __init__(
        self, source: Source, image_size: int, resize: int, batch_size: int, bicubic: bool
    ) -> None:
        self.source, self.image_size, self.resize = source, image_size, resize
        self.bicubic = bicubic
        self.batches = torch.arange(len(source)).split(batch_size)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, batch: int) -> tuple[Tensor, dict[int, Unreadable]]:
        bad: dict[int, Unreadable] = {}
        indices = self.batches[batch]
        pictures = prepare(
            self.source, indices, self.image_size, self.resize, bad, bicubic=self.bicubic
        )
        return pictures.contiguous(), bad


def _write(path: Path, rows: Iterable[Tensor], bad: dict[int, Unreadable]) -> None:
    """Rows to an .npy file, as they come; those of unreadable pictures are left out."""
    count = seen = width = 0
    with whole_file(path, shared=True) as file:
        for part in rows:
            width = part.shape[1]
            if not count and not seen:
                file.write(_header(0, width))
            gone = [index - seen for index in bad if index >= seen]
            kept = part[_kept(len(part), gone)] if gone else part
            file.write(kept.numpy().tobytes())
            count, seen = count + len(kept), seen + len(part)
        if not count:
            first = bad[min(bad)]
            raise ValueError(
                f"none of the {seen} pictures can be read, the first is {first.title} ({first.why})"
            )
        file.seek(0)
        file.write(_header(count, width))  # of the same length whatever the count


def _header(count: int, width: int) -> bytes:
    header = io.BytesIO()
    told = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(header, told)
    return header.getvalue()


def _opened(path: Path, beside: Path, size: int) -> tuple[Tensor, dict[int, Unreadable]] | None:
    """A whole file of features for so many pictures, mapped; None where there is none."""
    try:
        told = json.loads(beside.read_text())["bad"]
        rows = torch.from_numpy(np.lib.format.open_memmap(path, mode="c"))
        bad = {int(index): Unreadable(*why) for index, why in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # torn or not ours
        return None
    return (rows, bad) if len(rows) + len(bad) == size else None


def _readable(
    source: Source, index: int, image_size: int, bad: dict[int, Unreadable] | None
) -> Tensor:
    try:
        return source.read(index)
    except Unreadable as error:
        if bad is None:
            raise
        bad[index] = error
        return torch.full((3, image_size, image_size), 128, dtype=torch.uint8)


def _kept(size: int, bad: Iterable[int]) -> Int[Tensor, " kept"]:
    kept = torch.ones(size, dtype=torch.bool)
    kept[list(bad)] = False
    return kept.nonzero()[:, 0]


def _warn(source: Source, bad: dict[int, Unreadable], fate: str) -> None:
    first = next(iter(bad.values()))
    warnings.warn(
        f"{source.name}: {len(bad)} of {len(source)} pictures cannot be read and {fate}, the first "
        f"is {first.title} ({first.why})",
        stacklevel=3,
    )
