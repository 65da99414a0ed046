"""What the page shows of a run: its images, map, colors and neighbors. No HTTP here."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from meanshift.data import Source, Subset, UnreadableSample
from meanshift.ops.topk import nearest_neighbors
from meanshift.runtime import rng
from meanshift.viz import analysis
from meanshift.viz.explorer.background import BackgroundTasks, Pending, ProgressCallback
from meanshift.viz.explorer.indexed import INDEX, IndexedSource
from meanshift.viz.explorer.labeling import Labeling
from meanshift.viz.explorer.landmarks import place_others
from meanshift.viz.explorer.live import LiveRun, to_json_number
from meanshift.viz.explorer.metadata import Metadata, categories, scale
from meanshift.viz.explorer.search import NoLabels, Searcher, histogram
from meanshift.viz.explorer.thumbnails import SHEET_SIDE, Thumbnails, encode_sheet
from meanshift.viz.run_reader import MissingData, Run, Snapshot
from meanshift.viz.tsne import EpochMap, principal_maps, tsne_maps

NEIGHBORS = 10
MAX_POINTS = 50_000
LANDMARKS = 5000
"""images that t-SNE embeds; the others are placed by their nearest among them"""
_COPY_DISTANCE = 1e-3
"""between the features of copies, which round differently in another batch"""
_TITLES = {
    INDEX: "indexed images",
    "train": "all training images",
    "validation": "validation images",
}


class Explorer:
    """A run and its images, as far as they are still there."""

    def __init__(
        self, run: Run, *, metadata: Path | None = None, indexed: IndexedSource | None = None
    ) -> None:
        self.run = run
        self.live = LiveRun(run)
        self.thumbnails = Thumbnails(run.to_rgb)
        self.sources: dict[str, Source] = {}
        self.missing = ""
        """why there are no images; the map and the curves are shown without them"""
        try:
            self.sources["train"] = run.source
            if run.validation is not None:
                self.sources["validation"] = run.validation
        except MissingData as error:
            self.missing = str(error)
        self.indexed = indexed
        """images that are searched over an index, as they may be too many for memory"""
        self.cache_key = self._cache_key()
        self._metadata_file = metadata
        self.metadata: Metadata | None = None
        if metadata is not None:
            train = self._source("train")
            titles = [train.title(index) for index in range(len(train))]
            self.metadata = Metadata.read(metadata, titles)
        self.searcher = Searcher(run, self.sources)
        self._map_tasks = BackgroundTasks(keep=1, patience=0.0)
        self._maps: list[EpochMap] = []
        self._mapped: tuple[Snapshot, ...] = ()
        self._map_errors: dict[tuple[Snapshot, ...], str] = {}

    def _cache_key(self) -> str:
        """A part of the images' addresses that changes with the run and with the images."""
        sources = [*self.sources.values(), *([self.indexed] if self.indexed else [])]
        wholes = [s.source if isinstance(s, Subset) else s for s in sources]
        unique = {id(source): source for source in wholes}.values()
        parts = [self.run.identity, *(source.content_fingerprint() for source in unique)]
        parts += map(str, self.run.bands)
        return hashlib.sha256(os.fsencode(" ".join(parts))).hexdigest()[:12]

    def close(self) -> None:
        """Stop the background tasks."""
        self._map_tasks.stop()
        self.searcher.tasks.stop()

    def current(self) -> Explorer:
        """This explorer, or a new one if another run was started in the same folder."""
        run = Run(self.run.folder, data=self.run.data, bands=self.run.bands)
        if run.identity == self.run.identity:
            return self
        self.close()
        return Explorer(run, metadata=self._metadata_file, indexed=self.indexed)

    # The run and its images

    def state(self) -> dict[str, Any]:
        """The run as it is now."""
        return {
            **self.live.state(),
            "sources": [_summary(name, source) for name, source in self.sources.items()],
            "index": None if self.indexed is None else _summary(INDEX, self.indexed),
            "colorings": self._colorings(),
            "missing": self.missing,
            "cache_key": self.cache_key,
            "snapshot_keys": self._snapshot_keys(),
        }

    def _colorings(self) -> list[tuple[str, str]]:
        """What the map can be colored by: the value that `colors` takes, and its name."""
        colorings = [("cluster", "cluster")]
        if self._is_labeled():
            colorings[:0] = [("label", "label"), ("purity", f"purity of the {NEIGHBORS} nearest")]
        if not self.missing and self.labeling.log.path.exists():
            colorings += [("given", "given label"), ("predicted", "prediction")]
        columns = [] if self.metadata is None else self.metadata.columns
        return [*colorings, *((f"={column}", column) for column in columns)]

    def _snapshot_keys(self) -> dict[int, str]:
        """For each snapshot a text that changes if it is taken again, or of other images."""
        try:
            indices = self._indices().numpy().tobytes()
        except MissingData:  # there is none, or it cannot be read
            indices = b""
        keys = {}
        for epoch in self.run.snapshot_epochs:
            stamp = repr(self.run.snapshot_stamp(epoch)).encode()
            keys[epoch] = hashlib.sha256(stamp + indices).hexdigest()[:12]
        return keys

    def images(self) -> dict[str, Any]:
        """The snapshot images, which are the same at every epoch."""
        indices = self._indices().tolist()
        labels = self._labels()
        return {
            "indices": indices,
            "titles": [self._title("train", index) for index in indices],
            "labels": None if labels is None else labels.tolist(),
            "classes": [] if labels is None else self.run.source.classes,
            "typical": self._typical_row(),
        }

    def _typical_row(self) -> int:
        """The image nearest to the center of the largest class, or cluster without labels."""
        snapshot = self._newest()
        groups = self._labels()
        if groups is None:
            _, groups = self._clusters(snapshot)
        members = (groups == groups[groups >= 0].mode().values).nonzero()[:, 0]
        features = snapshot.features[members]
        return int(members[(features @ features.mean(0)).argmax()])

    def thumbnail(self, name: str, index: int, side: int) -> tuple[bytes, str]:
        """An encoded image inside a square, and its media type; may raise `UnreadableSample`."""
        return self.thumbnails.get(name, self._source_with(name, index), index, side)

    def sheet(self, rows: Sequence[int]) -> bytes:
        """Thumbnails of some snapshot images in one JPEG; gray where one cannot be read."""
        indices = self._indices()
        self._source("train")
        if not rows or max(rows) >= len(indices):
            raise MissingData(f"rows: need rows of the map, from 0 to {len(indices) - 1}")
        tiles = []
        for index in indices[list(rows)].tolist():
            with self.thumbnails.decoding:
                tiles.append(self.run.thumbnail(index, SHEET_SIDE))
        return encode_sheet(tiles)

    def _source(self, name: str) -> Source:
        if name == INDEX and self.indexed is not None:
            return self.indexed
        if self.missing:
            raise MissingData(self.missing)
        if name not in self.sources:
            known = ", ".join(["snapshot", *self.sources])
            raise MissingData(f"got the images {name!r}, need one of {known}")
        return self.sources[name]

    def _source_with(self, name: str, index: int) -> Source:
        source = self._source(name)
        if not 0 <= index < len(source):
            raise MissingData(f"got image {index}, need 0 to {len(source) - 1}")
        return source

    def _newest(self) -> Snapshot:
        return self.run.snapshot(analysis.select_epochs(self.run)[-1])

    def _indices(self) -> Int[Tensor, " n"]:
        return self._newest().indices

    def _labels(self) -> Int[Tensor, " n"] | None:
        return None if self.missing else self.run.labels

    def _is_labeled(self) -> bool:
        try:
            return self._labels() is not None
        except MissingData:  # a snapshot that cannot be read
            return False

    def _title(self, name: str, index: int) -> str:
        return self.sources[name].title(index) if name in self.sources else f"#{index}"

    def _describe(self, name: str, index: int) -> dict[str, Any]:
        """What the page needs to show an image."""
        if name == INDEX and self.indexed is not None:
            item = self.indexed.item(index)
            shown = {"title": item.file, "label": item.label}
            return {"source": name, "index": index, "row": None, **shown}
        name = "train" if name == "snapshot" else name
        source = self.sources.get(name)
        label = None
        if source is not None and source.labels is not None and source.labels[index] >= 0:
            label = source.classes[int(source.labels[index])]
        return {
            "source": name,
            "index": index,
            "row": self._row_of(self._newest()).get(index) if name == "train" else None,
            "title": self._title(name, index),
            "label": label,
        }

    @functools.lru_cache(maxsize=1)  # noqa: B019 (lives as long as the server)
    def _row_of(self, snapshot: Snapshot) -> dict[int, int]:
        return {index: row for row, index in enumerate(snapshot.indices.tolist())}

    # Labels

    @functools.cached_property
    def labeling(self) -> Labeling:
        """The labels that a person gives to training images."""
        return Labeling(self.run, self._source("train"), self.searcher)

    def labeled_images(
        self, kind: str, *, name: str, index: int, label: str, indices: Sequence[int] = ()
    ) -> list[dict[str, Any]]:
        """Images to label, each with its predicted class; `selected` are those with `indices`."""
        if kind != "selected":
            indices = self.labeling.find(kind, name=name, index=index, label=label)
        for one in indices:
            self._source_with("train", one)
        images = [self._describe("train", one) for one in indices]
        predictions = self.labeling.predictions(name, indices)
        return [image | other for image, other in zip(images, predictions, strict=True)]

    # The map

    def map(self, *, have: str = "") -> dict[str, Any]:
        """The t-SNE maps, or the principal components until these are there; never waits.

        The points are left out if the page has them already: `have` is the version it shows.
        """
        snapshots = tuple(map(self.run.snapshot, analysis.select_epochs(self.run)))
        progress = None
        try:
            if snapshots not in self._map_errors:
                self._maps = self._map_tasks.get(
                    snapshots,
                    "map",
                    lambda report: self._tsne_maps(len(snapshots), report),
                )
                self._mapped = snapshots
        except Pending as pending:
            progress = {"done": pending.done, "total": len(snapshots)}
        except (ValueError, RuntimeError, OSError) as error:  # too few images, disk full
            self._map_errors[snapshots] = str(error)  # it would fail again at each request
        if not set(self._mapped) <= set(snapshots):  # one of them was taken again
            self._maps = []
        kind = "t-SNE" if self._maps else "principal components"
        maps = self._maps or self._principal_maps(snapshots)
        digest = hashlib.sha256(kind.encode())
        for one in maps:
            digest.update(one.epoch.to_bytes(4) + one.rows.numpy().tobytes())
            digest.update(one.points.numpy().tobytes())
        version = digest.hexdigest()[:12]
        answer: dict[str, Any] = {
            "version": version,
            "kind": kind,
            "progress": progress,
            "note": self._map_errors.get(snapshots, ""),
            "placed": max(0, len(maps[-1].rows) - LANDMARKS),
        }
        if version != have:
            answer["rows"] = maps[-1].rows.tolist()
            answer["points"] = {
                one.epoch: [round(value, 4) for value in one.points.flatten().tolist()]
                for one in maps
            }
        return answer

    def _tsne_maps(self, epochs: int, report: ProgressCallback) -> list[EpochMap]:
        embedded = tsne_maps(self.run, max_points=LANDMARKS, progress=report)
        rows = rng.choice(0, len(self._indices()), MAX_POINTS, rng.SAMPLE)
        return place_others(self.run, embedded, rows, lambda: report(epochs, epochs))

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _principal_maps(self, snapshots: tuple[Snapshot, ...]) -> list[EpochMap]:
        try:
            return principal_maps(self.run, max_points=LANDMARKS)
        except RuntimeError:
            epochs = ", ".join(str(snapshot.epoch) for snapshot in snapshots)
            raise MissingData(
                f"{self.run.folder}: the features after epochs {epochs} are not all numbers: the "
                f"run diverged; try a lower --optim.lr"
            ) from None

    def colors(self, by: str, *, epoch: int) -> dict[str, Any]:
        """A value for each snapshot image: label, cluster, purity, or a column as =NAME."""
        if by in ("given", "predicted"):
            self._source("train")
            return self.labeling.colors(by)
        if by == "cluster":
            names, assigned = self._clusters(self._newest())
            return categories([names[cluster] for cluster in assigned.tolist()], order=names)
        if by.startswith("=") and self.metadata is not None:
            return self.metadata.colors(by[1:], self._indices().tolist())
        if by not in ("label", "purity"):
            raise ValueError(f"by: got {by!r}, need label, cluster, purity or a column as =NAME")
        labels = self._labels()
        if labels is None:
            raise MissingData(self.missing or f"{self.run.folder}: no labels, so no colors by {by}")
        if by == "label":
            classes = self.run.source.classes
            known = [classes[label] if label >= 0 else None for label in labels.tolist()]
            return categories(known, order=classes)
        rows, _ = self.searcher.neighbors("snapshot", epoch)
        purity = analysis.same_label(labels, rows).float().mean(1).tolist()
        values = [
            to_json_number(value) if label >= 0 else None
            for value, label in zip(purity, labels.tolist(), strict=True)
        ]
        return {**scale(values), "low": 0.0, "high": 1.0}

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _clusters(self, snapshot: Snapshot) -> tuple[list[str], Tensor]:
        count = 10 if self._labels() is None else min(20, len(self.run.source.classes))
        features = snapshot.features
        some = rng.choice(0, len(features), LANDMARKS, rng.SAMPLE)
        names, assigned = analysis.cluster_features(features[some], count)
        if len(some) < len(features):
            members = torch.nn.functional.one_hot(assigned, len(names)).float()
            centers = torch.nn.functional.normalize(members.T @ features[some], dim=1)
            assigned = (features @ centers.T).argmax(1)
        return names, assigned

    # Neighbors

    def point(self, row: int) -> dict[str, Any]:
        """A snapshot image with its neighbors at each snapshot, and which of them were kept."""
        indices = self._indices()
        labels = self._labels()
        if not 0 <= row < len(indices):
            raise MissingData(f"got image {row} of the map, need 0 to {len(indices) - 1}")
        snapshots = []
        previous = set[int]()
        for epoch in self.run.snapshot_epochs:
            features = self.run.snapshot(epoch).features
            nearest = nearest_neighbors(
                features[row : row + 1],
                features,
                min(NEIGHBORS, len(features) - 1),
                exclude=torch.tensor([row]),
            )
            rows, similarities = (values[0].tolist() for values in nearest)
            same_label = None
            if labels is not None and labels[row] >= 0:
                same_label = (labels[rows] == labels[row]).tolist()
            snapshots.append(
                {
                    "epoch": epoch,
                    "rows": rows,
                    "distances": [to_json_number(max(1 - value, 0.0)) for value in similarities],
                    "kept": [other in previous for other in rows],
                    "same_label": same_label,
                }
            )
            previous = set(rows)
        image = self._describe("train", int(indices[row]))
        metadata = {} if self.metadata is None else self.metadata.row(image["index"])
        return {**image, "metadata": metadata, "snapshots": snapshots}

    def read_image(self, name: str, index: int) -> Shaped[Tensor, "channels height width"]:
        """An image of a source, to search with; may raise `UnreadableSample`."""
        source = self._source_with(name, index)
        with self.thumbnails.decoding:
            return source.read(index)

    def prepare(self, name: str, *, epoch: int) -> None:
        """Compute the features that a search needs; raises `Pending` meanwhile."""
        self._check_searchable(name)
        if name != INDEX:
            self.searcher.features(name, epoch)

    def search(
        self,
        image: Shaped[Tensor, "channels height width"],
        *,
        name: str,
        epoch: int,
        count: int = 24,
    ) -> list[dict[str, Any]]:
        """The images nearest to any image, with their distances."""
        self._check_searchable(name)
        if name == INDEX and self.indexed is not None:
            indices, distances = self.indexed.search(image, count)
        else:
            indices, distances = self.searcher.search(image, name=name, epoch=epoch, count=count)
        return [
            {**self._describe(name, index), "distance": to_json_number(distance)}
            for index, distance in zip(indices, distances, strict=True)
        ]

    def rank(
        self, order: str, *, name: str, epoch: int, start: int = 0, count: int = 60
    ) -> dict[str, Any]:
        """One page of the outliers, of likely duplicates or of doubtful labels, clearest first."""
        self._check_searchable(name)
        if name == INDEX:
            raise MissingData("the images of an index can only be searched; choose other images")
        try:
            ranking = self.searcher.rank(order, name=name, epoch=epoch)
        except NoLabels as error:
            return {"total": 0, "items": [], "note": str(error)}
        answer: dict[str, Any] = {"total": len(ranking.indices), "items": []}
        if order == "duplicates":
            answer["histogram"] = histogram(ranking.distances)
        for position in range(start, min(start + count, len(ranking.indices))):
            index, nearest = ranking.indices[position], ranking.nearest[position]
            item = self._describe(name, index) | {
                "score": to_json_number(ranking.scores[position]),
                "nearest": self._describe(name, nearest),
                "distance": to_json_number(ranking.distances[position]),
            }
            if order == "duplicates":
                item["exact"] = self._is_copy(name, index, nearest, ranking.distances[position])
            if ranking.suggested is not None:
                source = self.sources[item["source"]]
                item["suggested"] = source.classes[ranking.suggested[position]]
            answer["items"].append(item)
        return answer

    def _is_copy(self, name: str, index: int, other: int, distance: float) -> bool:
        """Whether two images have the same pixels; those with other features are not read."""
        if self.missing or distance > _COPY_DISTANCE:
            return False
        source = self._source("train" if name == "snapshot" else name)
        with self.thumbnails.decoding:
            try:
                return torch.equal(source.sample(index), source.sample(other))
            except UnreadableSample:
                return False

    def _check_searchable(self, name: str) -> None:
        if name != "snapshot":
            self._source(name)


def _summary(name: str, source: Source) -> dict[str, Any]:
    """What the page needs to offer a source."""
    return {"name": name, "title": _TITLES[name], "count": len(source)}
