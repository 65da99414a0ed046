"""What the page shows of a run: its images, map, colors and neighbors. No HTTP here."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int, Shaped
from torch import Tensor

from meanshift.data import Source, Subset
from meanshift.viz import analysis
from meanshift.viz.explorer.background import BackgroundTasks, Pending
from meanshift.viz.explorer.live import LiveRun, to_json_number
from meanshift.viz.explorer.metadata import Metadata, categories, scale
from meanshift.viz.explorer.search import Searcher
from meanshift.viz.explorer.thumbnails import Thumbnails
from meanshift.viz.run_reader import MissingData, Run, Snapshot
from meanshift.viz.tsne import EpochMap, principal_maps, tsne_maps

NEIGHBORS = 10
MAX_POINTS = 5000
_TITLES = {"train": "all training images", "validation": "validation images"}


class Explorer:
    """A run and its images, as far as they are still there."""

    def __init__(self, run: Run, *, metadata: Path | None = None) -> None:
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
        wholes = [s.source if isinstance(s, Subset) else s for s in self.sources.values()]
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
        return Explorer(run, metadata=self._metadata_file)

    # The run and its images

    def state(self) -> dict[str, Any]:
        """The run as it is now."""
        return {
            **self.live.state(),
            "sources": [
                {"name": name, "title": _TITLES[name], "count": len(source)}
                for name, source in self.sources.items()
            ],
            "labeled": self._is_labeled(),
            "columns": [] if self.metadata is None else self.metadata.columns,
            "missing": self.missing,
            "cache_key": self.cache_key,
            "snapshot_keys": self._snapshot_keys(),
        }

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
        }

    def thumbnail(self, name: str, index: int, side: int) -> tuple[bytes, str]:
        """An encoded image inside a square, and its media type; may raise `UnreadableSample`."""
        return self.thumbnails.get(name, self._source_with(name, index), index, side)

    def _source(self, name: str) -> Source:
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
                    lambda report: tsne_maps(self.run, max_points=MAX_POINTS, progress=report),
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
            digest.update(f"{one.epoch} {one.rows.tolist()} {one.points.tolist()}".encode())
        version = digest.hexdigest()[:12]
        answer: dict[str, Any] = {
            "version": version,
            "kind": kind,
            "progress": progress,
            "note": self._map_errors.get(snapshots, ""),
        }
        if version != have:
            answer["rows"] = maps[-1].rows.tolist()
            answer["points"] = {
                one.epoch: [round(value, 4) for value in one.points.flatten().tolist()]
                for one in maps
            }
        return answer

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _principal_maps(self, snapshots: tuple[Snapshot, ...]) -> list[EpochMap]:
        try:
            return principal_maps(self.run, max_points=MAX_POINTS)
        except RuntimeError:
            epochs = ", ".join(str(snapshot.epoch) for snapshot in snapshots)
            raise MissingData(
                f"{self.run.folder}: the features after epochs {epochs} are not all numbers: the "
                f"run diverged; try a lower --optim.lr"
            ) from None

    def colors(self, by: str, *, epoch: int) -> dict[str, Any]:
        """A value for each snapshot image: label, cluster, purity, or a column as =NAME."""
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
        rows, _ = self._neighbors(self.run.snapshot(epoch))
        purity = analysis.same_label(labels, rows).float().mean(1).tolist()
        values = [
            to_json_number(value) if label >= 0 else None
            for value, label in zip(purity, labels.tolist(), strict=True)
        ]
        return {**scale(values), "low": 0.0, "high": 1.0}

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _clusters(self, snapshot: Snapshot) -> tuple[list[str], Tensor]:
        count = 10 if self._labels() is None else min(20, len(self.run.source.classes))
        return analysis.cluster_features(snapshot.features, count)

    # Neighbors

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _neighbors(self, snapshot: Snapshot) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        return analysis.nearest_others(snapshot.features, NEIGHBORS)

    def point(self, row: int) -> dict[str, Any]:
        """A snapshot image with its neighbors at each snapshot, and which of them were kept."""
        indices = self._indices()
        labels = self._labels()
        if not 0 <= row < len(indices):
            raise MissingData(f"got image {row} of the map, need 0 to {len(indices) - 1}")
        snapshots = []
        previous = set[int]()
        for epoch in self.run.snapshot_epochs:
            all_rows, all_similarities = self._neighbors(self.run.snapshot(epoch))
            rows = all_rows[row].tolist()
            similarities = all_similarities[row].tolist()
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
        indices, distances = self.searcher.search(image, name=name, epoch=epoch, count=count)
        return [
            {**self._describe(name, index), "distance": to_json_number(distance)}
            for index, distance in zip(indices, distances, strict=True)
        ]

    def rank(
        self, order: str, *, name: str, epoch: int, start: int = 0, count: int = 60
    ) -> dict[str, Any]:
        """One page of the outliers or of the pairs of likely duplicates, most striking first."""
        self._check_searchable(name)
        ranking = self.searcher.rank(order, name=name, epoch=epoch)
        page = slice(start, start + count)
        rows = zip(
            ranking.indices[page],
            ranking.scores[page],
            ranking.nearest[page],
            ranking.distances[page],
            strict=True,
        )
        return {
            "total": len(ranking.indices),
            "items": [
                {
                    **self._describe(name, index),
                    "score": to_json_number(score),
                    "nearest": self._describe(name, nearest),
                    "distance": to_json_number(distance),
                }
                for index, score, nearest, distance in rows
            ],
        }

    def _check_searchable(self, name: str) -> None:
        if name != "snapshot":
            self._source(name)
