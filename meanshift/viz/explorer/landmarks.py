"""Maps of more images than t-SNE embeds in a minute: the others are placed among its points."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.ops.topk import nearest_neighbors
from meanshift.viz.run_reader import Run
from meanshift.viz.tsne import EpochMap

_CHUNK = 2048
_DIMENSIONS = 64
"""principal directions in which neighbors are searched: a tenth of the time, the same places"""
_NEAREST = 5
_TEMPERATURE = 0.02
"""low: an image between two groups belongs to the nearer one, not to the gap"""


def place_others(
    run: Run, landmarks: list[EpochMap], rows: Int[Tensor, " n"], progress: Callable[[], None]
) -> list[EpochMap]:
    """The maps with further rows, each at the weighted mean of its nearest landmarks.

    `progress` is called before each map; what it raises ends the computation.
    """
    known = landmarks[0].rows
    others = rows[~torch.isin(rows, known)]
    if not len(others):
        return landmarks
    every = torch.cat([known, others])
    order = every.argsort()
    maps = []
    for epoch_map in landmarks:
        progress()
        features = run.snapshot(epoch_map.epoch).features
        placed = _place(features[others], features[known], epoch_map.points)
        points = torch.cat([epoch_map.points, placed])
        maps.append(EpochMap(epoch_map.epoch, every[order], points[order]))
    return maps


def _place(
    features: Float[Tensor, "n features"],
    landmarks: Float[Tensor, "m features"],
    points: Float[Tensor, "m 2"],
) -> Float[Tensor, "n 2"]:
    _, directions = torch.linalg.eigh(landmarks.T @ landmarks)  # in rising order
    features = features @ directions[:, -_DIMENSIONS:]
    landmarks = landmarks @ directions[:, -_DIMENSIONS:]
    placed = []
    for queries in features.split(_CHUNK):
        nearest, similarities = nearest_neighbors(queries, landmarks, min(_NEAREST, len(landmarks)))
        weights = (similarities / _TEMPERATURE).softmax(1)
        placed.append((points[nearest] * weights[..., None]).sum(1))
    return torch.cat(placed)
