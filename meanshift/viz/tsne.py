"""Maps of the snapshot images: t-SNE of every snapshot, each started from the one before.

So points move and do not jump. Earlier maps influence later ones and never the reverse: no
structure of the trained encoder can leak into the map of the untrained one.

Figure, report and explorer show a map alike: x grows to the right and y downward, as on a screen.
The first map is rotated to fit the principal components of the whole snapshot, so the orientation
does not depend on which of its images a page shows.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.ops.tsne import tsne
from meanshift.runtime import checksum, rng
from meanshift.runtime.files import atomic_writer
from meanshift.viz.analysis import select_epochs
from meanshift.viz.run_reader import MissingData, Run

_VERSION = 4
"""raised when maps come out differently, so that files of older versions are not read"""


@dataclass(frozen=True)
class EpochMap:
    """The points of the snapshot images after an epoch; all maps of a run share one scale."""

    epoch: int
    rows: Int[Tensor, " n"]
    """rows of the snapshot that the points belong to"""
    points: Float[Tensor, "n 2"]


def tsne_maps(
    run: Run, *, max_points: int = 2000, progress: Callable[[int, int], None] | None = None
) -> list[EpochMap]:
    """A t-SNE map of each snapshot of a run, cached in `RUN/maps/`.

    `progress` is called with (maps done, maps in all).
    """
    epochs = select_epochs(run)
    maps = []
    for epoch_map in _chain(run, epochs, max_points):
        maps.append(epoch_map)
        if progress is not None:
            progress(len(maps), len(epochs))
    return _rescale(maps)


def perplexity(points: int) -> float:
    """The perplexity of a map of so many points: 30, or what few points allow."""
    return min(30.0, (points - 1) / 3)


def principal_maps(run: Run, *, max_points: int = 2000) -> list[EpochMap]:
    """A quick map of each snapshot: its two principal components, rotated to fit the one before."""
    epochs = select_epochs(run)
    rows = _rows(run, max_points)
    maps = list[EpochMap]()
    previous: Tensor | None = None
    for epoch in epochs:
        points = _principal_components(run.snapshot(epoch).features)[rows]
        points = points / points.abs().max().clamp(min=1e-12)
        previous = points if previous is None else _align(points, previous)
        maps.append(EpochMap(epoch, rows, previous))
    return _rescale(maps)


def _rescale(maps: list[EpochMap]) -> list[EpochMap]:
    """Scale all maps alike, so that all of their points fit the square from -1 to 1."""
    every = torch.cat([epoch_map.points for epoch_map in maps])
    low, high = every.amin(0), every.amax(0)
    middle = (low + high) / 2
    reach = ((high - low).max() / 2).clamp(min=1e-12)
    return [EpochMap(one.epoch, one.rows, (one.points - middle) / reach) for one in maps]


def _chain(run: Run, epochs: list[int], max_points: int) -> Iterator[EpochMap]:
    rows = _rows(run, max_points)
    if len(rows) < 5:
        raise MissingData(
            f"{run.folder}: a map needs 5 images or more, the snapshots have {len(rows)}"
        )
    previous: Tensor | None = None
    key = str(_VERSION)
    for epoch in epochs:
        features = run.snapshot(epoch).features
        content = features.numpy().tobytes() + rows.numpy().tobytes()
        key = hashlib.sha256(key.encode() + content).hexdigest()[:16]
        path = run.folder / "maps" / f"{key}.npy"
        try:
            checksum.verify(path, required=True)
            points = torch.from_numpy(np.load(path))
        except (OSError, ValueError):
            if previous is None:
                points = _first_map(features, rows)
            else:
                points = _next_map(features[rows], previous)
            with contextlib.suppress(OSError):  # read-only or full: it is computed again next time
                _save(points, path)
        yield EpochMap(epoch, rows, points)
        previous = points


def _save(points: Tensor, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with atomic_writer(path, shared=True) as file:
        np.save(file, points.numpy())
        checksum.append(file)


def _rows(run: Run, max_points: int) -> Int[Tensor, " n"]:
    size = len(run.snapshot(run.snapshot_epochs[-1]).indices)
    return rng.choice(0, size, max_points, rng.SAMPLE)


def _first_map(features: Tensor, rows: Int[Tensor, " n"]) -> Float[Tensor, "n 2"]:
    components = _principal_components(features)[rows]
    start = 1e-4 * components / components[:, 0].std().clamp(min=1e-12)  # as scikit-learn's own
    points = _tsne(features[rows], start, exaggeration=12.0, iterations=500)
    return _align(points, components)


def _next_map(features: Tensor, previous: Tensor) -> Float[Tensor, "n 2"]:
    # A strong exaggeration would pull every point through the middle again.
    return _align(_tsne(features, previous, exaggeration=2.0, iterations=400), previous)


def _tsne(
    features: Tensor, start: Tensor, *, exaggeration: float, iterations: int
) -> Float[Tensor, "n 2"]:
    points = tsne(
        features,
        start,
        perplexity=perplexity(len(features)),
        exaggeration=exaggeration,
        iterations=iterations,
    )
    return points - points.mean(0)


def _principal_components(features: Tensor) -> Float[Tensor, "n 2"]:
    """The two principal components; the largest entry of each direction is positive."""
    centered = (features - features.mean(0)).double()
    _, directions = torch.linalg.eigh(centered.T @ centered)  # in rising order
    directions = directions[:, -2:].flip(1)
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    points = (centered @ (directions * largest.sign())).float()
    return torch.nn.functional.pad(points, (0, 2 - points.shape[1]))


def _align(points: Tensor, reference: Tensor) -> Tensor:
    """The rotation or reflection of a map that is nearest to another map."""
    left, _, right = torch.linalg.svd(points.T @ reference)
    return torch.mm(points, torch.mm(left, right))
