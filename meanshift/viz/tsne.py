"""Maps of the probe: t-SNE of every snapshot, each begun where the one before it ended.

So that points move and do not jump. An earlier map shapes a later one and never the reverse: no
structure of the trained network can leak into the image of the untrained one.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.runtime import rng
from meanshift.runtime.run_directory import atomic_writer
from meanshift.viz.run_reader import MissingData, Run

_DRAWN = 1  # raised when a map would come out otherwise, so that older files are not met again


@dataclass(frozen=True)
class EpochMap:
    """Where the points of the probe lie after an epoch; all maps of a run share one scale."""

    epoch: int
    rows: Int[Tensor, " n"]
    """which rows of the probe are drawn"""
    points: Float[Tensor, "n 2"]


def draw_maps(
    run: Run, *, most: int = 2000, told: Callable[[int, int], None] | None = None
) -> list[EpochMap]:
    """A map for each snapshot of a run, of `most` images at the most; kept in `RUN/maps/`."""
    epochs = run.some_epochs()
    maps = []
    for done, one in enumerate(_chain(run, epochs, most)):
        maps.append(one)
        if told is not None:
            told(done + 1, len(epochs))
    return _framed(maps)


def flat_maps(run: Run, *, most: int = 2000) -> list[EpochMap]:
    """The same, at once: each snapshot's two principal directions, turned to fit the one before."""
    maps, before = list[EpochMap](), None
    for epoch in run.some_epochs():
        features = run.moment(epoch).features
        rows = _drawn(run, most)
        points = _principal(features[rows])
        points = points / points.abs().max().clamp(min=1e-12)
        before = points if before is None else _turned(points, before)
        maps.append(EpochMap(epoch, rows, before))
    return _framed(maps)


def _framed(maps: list[EpochMap]) -> list[EpochMap]:
    """All maps in one frame: the square from -1 to 1 around all of their points."""
    every = torch.cat([one.points for one in maps])
    low, high = every.amin(0), every.amax(0)
    middle, reach = (low + high) / 2, ((high - low).max() / 2).clamp(min=1e-12)
    return [EpochMap(one.epoch, one.rows, (one.points - middle) / reach) for one in maps]


def _chain(run: Run, epochs: list[int], most: int) -> Iterator[EpochMap]:
    rows, before, key = _drawn(run, most), None, str(_DRAWN)
    if len(rows) < 5:
        raise MissingData(f"{run.folder}: a map needs 5 images or more, the probe has {len(rows)}")
    for epoch in epochs:
        features = run.moment(epoch).features[rows]
        key = hashlib.sha256(key.encode() + features.numpy().tobytes()).hexdigest()[:16]
        path = run.folder / "maps" / f"{key}.npy"
        try:
            points = torch.from_numpy(np.load(path))
        except (OSError, ValueError):
            points = _tsne(features, before)
            path.parent.mkdir(exist_ok=True)
            with atomic_writer(path, shared=True) as file:
                np.save(file, points.numpy())
        yield EpochMap(epoch, rows, points)
        before = points


def _drawn(run: Run, most: int) -> Int[Tensor, " n"]:
    size = len(run.moment(run.epochs[-1]).indices)
    return rng.choice(0, size, most, rng.PROBE)


def _tsne(features: Tensor, before: Tensor | None) -> Float[Tensor, "n 2"]:
    from sklearn.manifold import TSNE

    if before is None:  # small, as scikit-learn scales its own start
        start, pull, turns = _principal(features), 12.0, 500
        start = 1e-4 * start / start[:, 0].std().clamp(min=1e-12)
    else:  # a gentle pull: a strong one would draw every point through the middle again
        start, pull, turns = before, 2.0, 400
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of identical rows: they are drawn on one spot
        made = TSNE(
            init=start.numpy(),
            early_exaggeration=pull,
            max_iter=turns,
            perplexity=min(30.0, (len(features) - 1) / 3),
            random_state=0,
        ).fit_transform(features.numpy())
    points = torch.from_numpy(made)
    points = points - points.mean(0)
    return points if before is None else _turned(points, before)


def _principal(features: Tensor) -> Float[Tensor, "n 2"]:
    centered = features - features.mean(0)
    left, size, _ = torch.linalg.svd(centered, full_matrices=False)
    points = left[:, :2] * size[:2]
    return torch.nn.functional.pad(points, (0, 2 - points.shape[1]))


def _turned(points: Tensor, before: Tensor) -> Tensor:
    """The rotation or reflection of a map that comes nearest to the one before."""
    left, _, right = torch.linalg.svd(points.T @ before)
    return torch.mm(points, torch.mm(left, right))
