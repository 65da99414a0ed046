"""What figures and pages compute from a run: neighbors, purity, clusters, views, curves."""

from __future__ import annotations

import itertools
import re
import statistics
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.config import ViewSpec
from meanshift.ops.kmeans import kmeans
from meanshift.ops.topk import nearest_neighbors
from meanshift.transforms.replay import ReplayedViews, replay_views
from meanshift.transforms.views import view_transform
from meanshift.viz.run_reader import MissingData, Run


def select_epochs(run: Run, requested: Sequence[int] = (), *, count: int = 0) -> list[int]:
    """The requested epochs, or `count` epochs with snapshots from the first to the last (0: all).

    Raises `MissingData` if a requested epoch has no snapshot, or if there is none at all.
    """
    if requested:
        return [run.snapshot(epoch).epoch for epoch in requested]
    epochs = run.snapshot_epochs
    if not epochs:
        raise MissingData(
            f"{run.folder}: no snapshots; they are taken while training, with --train.snapshots 6"
        )
    if not count or count >= len(epochs):
        return epochs
    positions = {round(i * (len(epochs) - 1) / max(1, count - 1)) for i in range(count)}
    return [epochs[position] for position in sorted(positions)]


def neighbors(
    run: Run, epoch: int, count: int
) -> tuple[Int[Tensor, "n count"], Float[Tensor, "n count"]]:
    """The nearest other snapshot images of each one, as (rows of the snapshot, similarities)."""
    return nearest_others(run.snapshot(epoch).features, count)


def nearest_others(
    features: Float[Tensor, "n features"], count: int
) -> tuple[Int[Tensor, "n count"], Float[Tensor, "n count"]]:
    """The rows most similar to each row but itself, nearest first, and their similarities."""
    count = min(count, len(features) - 1)
    return nearest_neighbors(features, features, count, exclude=torch.arange(len(features)))


def label_purity(run: Run, epoch: int, count: int = 10) -> Float[Tensor, " n"]:
    """The fraction of each snapshot image's nearest others that have its label."""
    labels = run.labels
    if labels is None:
        raise MissingData(f"{run.folder}: no labels, so no purity")
    rows, _ = neighbors(run, epoch, count)
    return same_label(labels, rows).float().mean(1)


def same_label(labels: Int[Tensor, " n"], rows: Int[Tensor, "n count"]) -> Tensor:
    """Which rows have the label of the image that they belong to; unknown labels never match."""
    return (labels[rows] == labels[:, None]) & (labels[:, None] >= 0)


def cluster_features(
    features: Float[Tensor, "n features"], count: int = 10
) -> tuple[list[str], Int[Tensor, " n"]]:
    """Clusters by which images without labels are colored: (names, cluster of each row)."""
    count = max(1, min(count, len(features)))
    assigned, _ = kmeans(features, count, restarts=3)
    return [f"cluster {number + 1}" for number in range(count)], assigned


def cluster_result(run: Run) -> str:
    """The name of the newest result of `evaluate cluster` on the run's own images."""
    found = run.directory.results.glob("cluster*.npz")
    own = [path for path in found if re.fullmatch(r"cluster(-clusters-\d+)?", path.stem)]
    return max(own, key=lambda path: path.stat().st_mtime_ns).stem if own else "cluster"


def stored_clusters(run: Run) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """The clusters that `evaluate cluster` stored, as (cluster, index of the training image)."""
    path = run.directory.results / f"{cluster_result(run)}.npz"
    option = "" if run.source.labeled else " --clusters 10"
    command = f"type: meanshift evaluate cluster {run.folder}{option}"
    _check_cluster_data(run)
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            assigned = torch.from_numpy(arrays["clusters"])
            titles = arrays["titles"].tolist()
    except FileNotFoundError:
        raise MissingData(f"{run.folder}: not clustered yet; {command}") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise MissingData(f"{path}: cannot be read ({error}); {command}") from None
    index_of = {run.source.title(index): index for index in range(len(run.source))}
    if not all(title in index_of for title in titles):
        raise MissingData(f"{path}: of other images than the run's; {command}")
    return assigned, torch.tensor([index_of[title] for title in titles])


def _check_cluster_data(run: Run) -> None:
    """Refuse clusters of other data; arrays have only numbers as titles, which always fit."""
    result = run.results.get("cluster", {"card": {}, "metrics": {}})
    data = result["card"].get("data")
    own = run.config.data.source
    known = {_absolute(own), _absolute(run.directory.config.data.source)}
    if data is not None and _absolute(data) not in known:
        raise MissingData(
            f"{run.folder}: its clusters are of {data}, not of {own}; "
            f"type: meanshift evaluate cluster {run.folder}"
        )
    own_labels = result["card"].get("labels", "the source's own") == "the source's own"
    if "NMI" in result["metrics"] and own_labels and not run.source.labeled:
        raise MissingData(
            f"{run.folder}: its clusters are of labeled images that it was not trained on; need "
            f"clusters of its own images: meanshift evaluate cluster {run.folder} --clusters 10"
        )


def _absolute(source: str) -> Path:
    return Path(source).expanduser().absolute()


# Views


def view_title(view: ViewSpec) -> str:
    """The name of a view and its strength: weak is crop and flip only."""
    return f"{view.name} ({'strong' if view.is_strong else 'weak'})"


def replay(
    run: Run, ids: Int[Tensor, " n"], *, epoch: int, keep_images: bool = False
) -> ReplayedViews:
    """The views of training images exactly as an epoch (counted from 0) gave them."""
    config = run.config
    transform = view_transform(
        run.views,
        run.source,
        seed=config.train.seed,
        size=config.data.image_size,
        module=config.views.module,
    )
    return replay_views(run.source, ids, transform, epoch=epoch, keep_images=keep_images)


# Curves

_NO_METRICS = {"step", "epoch", "seconds", "cpu_seconds"}
"""numbers of a log line that are its time, not a metric"""


def metric_series(run: Run) -> dict[str, tuple[list[float], list[float]]]:
    """Each metric of a run as (epochs, values)."""
    return {name: curve for name, curve in run.all_series().items() if name not in _NO_METRICS}


def smooth_curve(
    x: Sequence[float], y: Sequence[float], *, window: float = 0.1, points: int = 20
) -> list[float]:
    """The mean of the values around each one, in a window that is a part of the range of x.

    At the start, where curves are steep, the window is as short after a value as before it. A
    curve of fewer than `points` points stays as it is.
    """
    if len(x) < points:
        return list(y)
    places = np.asarray(x)
    values = np.asarray(y)
    reach = np.minimum(window / 2 * (places[-1] - places[0]), places - places[0])
    inside = abs(places - places[:, None]) <= reach[:, None]
    return [float(values[row].mean()) for row in inside]


def thin_curve(
    x: Sequence[float], y: Sequence[float], *, points: int = 400
) -> tuple[list[float], list[float]]:
    """A curve of at most `points` points, each the mean of an interval; both ends are exact."""
    if len(x) > points:
        edges = np.linspace(0, len(x), points + 1).astype(int)
        inner = [slice(start, stop) for start, stop in itertools.pairwise(edges)][1:-1]
        x = [x[0], *(statistics.fmean(x[part]) for part in inner), x[-1]]
        y = [y[0], *(statistics.fmean(y[part]) for part in inner), y[-1]]
    return [round(value, 3) for value in x], [float(f"{value:.5g}") for value in y]
