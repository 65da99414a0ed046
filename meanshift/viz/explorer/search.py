"""Search by image; outliers, duplicates and doubtful labels of the snapshot or a whole source."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as TF

from meanshift.data import Source, UnreadableSample
from meanshift.data.convert import has_alpha, mark_alpha, match_channels
from meanshift.data.decode import read_image
from meanshift.evaluation.knn import CHUNK, neighbors
from meanshift.models.feature_cache import cached_features
from meanshift.models.features import extract_features
from meanshift.models.weights import fingerprint, load_snapshot, writable_dir
from meanshift.ops.image import cut_to_aspect
from meanshift.runtime.device import pick_device
from meanshift.viz.explorer.background import BackgroundTasks, ProgressCallback
from meanshift.viz.run_reader import MissingData, Run, Snapshot

NEIGHBORS = 10
"""neighbors to which an outlier is far"""
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""formats of uploads; none whose decoder runs other programs"""


ORDERS = ("outliers", "duplicates", "labels")
_BINS = 80
_TEMPERATURE = 0.07
"""of the votes of neighbors: exp(similarity / temperature)"""


@dataclass(frozen=True)
class Ranking:
    """Images by index in their source, each with a score and its nearest other."""

    indices: list[int]
    scores: list[float]
    nearest: list[int]
    distances: list[float]
    suggested: list[int] | None = None
    """the label that most of the neighbors have"""


class NoLabels(MissingData):
    """Labels are to be compared, and there are none."""


class Searcher:
    """Neighbors of any image after any epoch, in the snapshot images or in a whole source."""

    def __init__(self, run: Run, sources: dict[str, Source]) -> None:
        self.run = run
        self.sources = sources
        self.tasks = BackgroundTasks()
        self._device = pick_device("auto")

    def features(
        self, name: str, epoch: int
    ) -> tuple[Float[Tensor, "n features"], Int[Tensor, " n"]]:
        """Features after an epoch and the indices of their images; `Pending` while computed."""
        snapshot = self.run.snapshot(epoch)  # raises if there is none after this epoch
        if name == "snapshot":
            return snapshot.features, snapshot.indices
        source = self.sources[name]

        def compute(progress: ProgressCallback) -> tuple[Tensor, Tensor]:
            backbone = self._backbone(snapshot)
            return cached_features(
                backbone,
                _ReportingSource(source, progress),
                weights=fingerprint(backbone),
                folder=writable_dir(self.run.folder) / "features",
                image_size=self.run.config.data.image_size,
                device=self._device,
            )

        title = f"Features of {len(source):,} images after epoch {epoch}"
        result: tuple[Tensor, Tensor] = self.tasks.get(("features", name, snapshot), title, compute)
        return result

    def search(
        self, image: Shaped[Tensor, "channels height width"], *, name: str, epoch: int, count: int
    ) -> tuple[list[int], list[float]]:
        """The images nearest to any image, nearest first, and their distances (1 - cosine)."""
        features, indices = self.features(name, epoch)
        spec = self.run.config.data.sample_spec
        if has_alpha(image):
            image = match_channels(image, spec, 0)
        query = extract_features(
            self._backbone(self.run.snapshot(epoch)),
            SingleImage(image, self.sources.get("train")).adapted(spec, self.run.name),
            image_size=self.run.config.data.image_size,
            device=self._device,
        )
        ((rows, similarity),) = neighbors(features, query, min(count, len(features)))
        return indices[rows[0]].tolist(), _distance(similarity[0]).tolist()

    def neighbors(self, name: str, epoch: int) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        """The nearest others of each image and their similarities; `Pending` while computed."""
        features, _ = self.features(name, epoch)
        if len(features) < 2:
            raise MissingData(f"got {len(features)} images, need 2 or more to compare")
        title = f"Neighbors of {len(features):,} images after epoch {epoch}"
        result: tuple[Tensor, Tensor] = self.tasks.get(
            ("neighbors", name, self.run.snapshot(epoch)),
            title,
            lambda progress: _all_neighbors(features, progress),
        )
        return result

    def rank(self, order: str, *, name: str, epoch: int) -> Ranking:
        """All images, the farthest from their neighbors first, or pairs, the nearest first, or
        images with another label than most of their neighbors, the clearest first."""
        if order not in ORDERS:
            raise ValueError(f"order: got {order!r}, need {', '.join(ORDERS[:-1])} or {ORDERS[-1]}")
        _, indices = self.features(name, epoch)
        nearest, similarity = self.neighbors(name, epoch)
        distances = _distance(similarity)
        image = torch.arange(len(nearest))
        other = nearest[:, 0]
        if order == "outliers":
            score = distances.mean(1)
            ranked = score.argsort(descending=True, stable=True)
        elif order == "duplicates":  # each pair once, the later image as the copy of the earlier
            other, image = torch.stack([image, other]).sort(0).values
            score = distances[:, 0]
            ranked = score.argsort(stable=True)
            ranked = ranked[_first_of_each((other * len(nearest) + image)[ranked])]
        else:
            labels = self.labels(name)[indices]
            suggested, score = _vote(labels, nearest, similarity)
            differs = (labels >= 0) & (suggested != labels) & (score > 0.5)
            ranked = score.masked_fill(~differs, 0).argsort(descending=True, stable=True)
            ranked = ranked[: int(differs.sum())]
        return Ranking(
            indices=indices[image[ranked]].tolist(),
            scores=score[ranked].tolist(),
            nearest=indices[other[ranked]].tolist(),
            distances=distances[ranked, 0].tolist(),
            suggested=suggested[ranked].tolist() if order == "labels" else None,
        )

    def labels(self, name: str) -> Int[Tensor, " n"]:
        """The labels of all images of a source (-1: none)."""
        source = self.sources.get("train" if name == "snapshot" else name)
        if source is None or source.labels is None or not bool((source.labels >= 0).any()):
            raise NoLabels("These images have no labels that could be compared.")
        return source.labels

    @functools.lru_cache(maxsize=3)  # noqa: B019 (lives as long as the server)
    def _backbone(self, snapshot: Snapshot) -> nn.Module:
        try:
            backbone = load_snapshot(self.run.folder, snapshot.epoch).backbone
        except ValueError:
            raise MissingData(
                f"{self.run.snapshot_path(snapshot.epoch)}: its weights are not those of a "
                f"{self.run.config.encoder.name}, since the method {self.run.method} has an "
                f"encoder of its own; only the snapshot images can be compared"
            ) from None
        return backbone.to(self._device)


def decode_upload(content: bytes) -> Shaped[Tensor, "channels height width"]:
    """Decode an uploaded image; refuse other files, torn ones and those that fill the memory."""
    try:
        image = read_image(io.BytesIO(content), title="upload", formats=_FORMATS)
    except UnreadableSample as error:
        reason = error.reason
        if "cannot identify" in reason:
            reason = "no image was recognized"
        raise ValueError(
            f"the image cannot be read: {reason}; need a whole {', '.join(_FORMATS)} file"
        ) from None
    # Only the middle of a strip is used, and enlarging a long one would fill the memory.
    height, width = image.shape[1:]
    longest = 4 * min(height, width)
    if max(height, width) > longest:
        cropped = TF.center_crop(image, [min(height, longest), min(width, longest)])
        image = mark_alpha(cropped) if has_alpha(image) else cropped
    return image


def _all_neighbors(features: Tensor, progress: ProgressCallback) -> tuple[Tensor, Tensor]:
    """The nearest others of each row, and their similarities."""
    count = min(NEIGHBORS, len(features) - 1)
    all_rows = []
    all_similarities = []
    for start in range(0, len(features), CHUNK):
        progress(start, len(features))
        queries = features[start : start + CHUNK]
        ((rows, similarity),) = neighbors(features, queries, count + 1)
        itself = rows == torch.arange(start, start + len(rows))[:, None]
        itself[~itself.any(1), -1] = True  # an image has more copies than neighbors are searched
        all_rows.append(rows[~itself].view(-1, count))
        all_similarities.append(similarity[~itself].view(-1, count))
    return torch.cat(all_rows), torch.cat(all_similarities)


def _vote(
    labels: Int[Tensor, " n"], nearest: Int[Tensor, "n k"], similarity: Float[Tensor, "n k"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """The label of most neighbors of each image, and its share of their weighted votes."""
    voted = labels[nearest]
    weights = ((similarity - similarity[:, :1]) / _TEMPERATURE).exp().masked_fill(voted < 0, 0)
    same = (voted[:, :, None] == voted[:, None, :]).float()
    votes = (same * weights[:, None, :]).sum(2)  # for the label of each neighbor
    best, position = (votes / weights.sum(1, keepdim=True).clamp(min=1e-12)).max(1)
    return voted.gather(1, position[:, None])[:, 0], best


def histogram(distances: Sequence[float]) -> dict[str, Any]:
    """How many pairs there are by distance, and a threshold below which they are unusually near.

    The bins grow with the square of the distance, since copies differ by very little. The
    threshold is three standard deviations below the usual log distance, by median and MAD.
    """
    values = torch.tensor(distances, dtype=torch.float64)
    high = max(float(values.max()), 1e-6)
    edges = high * torch.linspace(0, 1, _BINS + 1, dtype=torch.float64) ** 2
    below = torch.searchsorted(values, edges[1:], right=True)  # rising, as the ranking is
    logs = values.clamp(min=1e-7).log()
    spread = 1.4826 * (logs - logs.median()).abs().median()
    threshold = float((logs.median() - 3 * spread).exp())
    position = int(torch.searchsorted(edges[1:], threshold))
    return {"edges": edges[1:].tolist(), "below": below.tolist(), "start": min(position, _BINS - 1)}


def _distance(similarity: Tensor) -> Tensor:
    return (1 - similarity).clamp(min=0)


def _first_of_each(keys: Int[Tensor, " n"]) -> Int[Tensor, " distinct"]:
    """The position at which each value occurs first, in rising order."""
    _, number = keys.unique(return_inverse=True)
    first = torch.full((int(number.max()) + 1,), len(keys))
    first.scatter_reduce_(0, number, torch.arange(len(keys)), "amin")
    return first.sort().values


class _ReportingSource(Source):
    """A source that reports how many of its images were read."""

    def __init__(self, source: Source, progress: ProgressCallback) -> None:
        self.name = source.name
        self.labels = source.labels
        self.classes = source.classes
        self.sample_spec = source.sample_spec
        self._source = source
        self._progress = progress
        self._read = 0

    def __len__(self) -> int:
        return len(self._source)

    def title(self, index: int) -> str:
        return self._source.title(index)

    def content_fingerprint(self) -> str:
        return self._source.content_fingerprint()

    def fingerprint(self) -> str:
        return self._source.fingerprint()

    @property
    def uniform(self) -> bool:
        return self._source.uniform

    def prefetch(self, indices: Sequence[int]) -> None:
        self._source.prefetch(indices)

    def read(self, index: int) -> Shaped[Tensor, "channels height width"]:
        self._count(1)
        return self._source.read(index)

    def read_batch(self, indices: Int[Tensor, " batch"]) -> Shaped[Tensor, "batch h w channels"]:
        self._count(len(indices))
        return self._source.read_batch(indices)

    def _count(self, images: int) -> None:
        self._progress(self._read, len(self))
        self._read += images


class SingleImage(Source):
    """One image, transformed like the images of another source."""

    def __init__(self, image: Shaped[Tensor, "channels height width"], like: Source | None) -> None:
        self.name = "upload"
        self.labels = None
        self.classes = []
        self._uniform = like is not None and like.uniform
        if like is not None and like.uniform:  # all images have one size, so this one too
            size = like.read_batch(torch.tensor([0])).shape[1:3]
            image = cut_to_aspect(image, 16)
            scale = max(size[0] / image.shape[1], size[1] / image.shape[2])
            if scale != 1:
                resized = [max(size[i], round(image.shape[i + 1] * scale)) for i in (0, 1)]
                image = TF.resize(image, resized, antialias=True)
            image = TF.center_crop(image, list(size))
        self._image = image

    def __len__(self) -> int:
        return 1

    def title(self, index: int) -> str:  # noqa: ARG002
        return self.name

    @property
    def uniform(self) -> bool:
        return self._uniform

    def read(self, index: int) -> Shaped[Tensor, "channels height width"]:  # noqa: ARG002
        return self._image

    def read_batch(self, indices: Int[Tensor, " batch"]) -> Shaped[Tensor, "batch h w channels"]:
        return self._image.permute(1, 2, 0)[None].expand(len(indices), -1, -1, -1)
