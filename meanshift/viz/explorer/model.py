"""What the page asks about a run: its images, map, colors and neighbors. No HTTP here."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from meanshift.data import Source
from meanshift.evaluation.cluster import groups
from meanshift.viz.explorer.live import Live, number
from meanshift.viz.explorer.metadata import Metadata, categories, scale
from meanshift.viz.explorer.search import Searcher
from meanshift.viz.explorer.thumbnails import Thumbnails
from meanshift.viz.explorer.work import Pending, Work
from meanshift.viz.run_reader import MissingData, Run
from meanshift.viz.tsne import EpochMap, draw_maps, flat_maps

NEAR = 10  # neighbors that are shown
MOST = 5000  # points on the map
_TITLES = {"train": "all training images", "held": "held-out images"}


class Explorer:
    """A run and its images, as far as they are still there."""

    def __init__(self, run: Run, *, metadata: Path | None = None) -> None:
        self._metadata_file = metadata
        self.run, self.live, self.thumbnails = run, Live(run), Thumbnails()
        self.sources: dict[str, Source] = {}
        self.lacking = ""
        try:
            self.sources["train"] = run.source
            if run.held_out is not None:
                self.sources["held"] = run.held_out
        except MissingData as error:  # the map and the curves can still be looked at
            self.lacking = str(error)
        wholes = {id(w): w for s in self.sources.values() for w in [getattr(s, "whole", s)]}
        marks = " ".join([run.identity, *(whole.contents() for whole in wholes.values())])
        self.mark = hashlib.sha256(os.fsencode(marks)).hexdigest()[:12]
        self.metadata = None
        if metadata is not None:
            self._source("train")  # says what is missing
            titles = [run.source.title(index) for index in range(len(run.source))]
            self.metadata = Metadata.read(metadata, titles)
        self.searcher = Searcher(run, self.sources)
        self._maps, self._drawn = Work(keep=1, patience=0.0), list[EpochMap]()
        self._undrawn: dict[tuple[int, ...], str] = {}

    def close(self) -> None:
        """End the work that is under way, as soon as it can."""
        self._maps.stop()
        self.searcher.work.stop()

    def current(self) -> Explorer:
        """This, or where the run was begun again in its folder, another that knows the new one."""
        if Run(self.run.folder, data=self.run.data).identity == self.run.identity:
            return self
        self.close()
        return Explorer(Run(self.run.folder, data=self.run.data), metadata=self._metadata_file)

    # What there is

    def state(self) -> dict[str, Any]:
        """The run as it is now."""
        return {
            **self.live.state(),
            "parts": [
                {"name": name, "title": _TITLES[name], "count": len(source)}
                for name, source in self.sources.items()
            ],
            "labeled": self._labeled(),
            "columns": [] if self.metadata is None else self.metadata.columns,
            "lacking": self.lacking,
            "mark": self.mark,
        }

    def probe(self) -> dict[str, Any]:
        """The images of the map, the same at every epoch."""
        indices, labels = self._indices().tolist(), self._labels()
        return {
            "indices": indices,
            "titles": [self._title("train", index) for index in indices],
            "labels": None if labels is None else labels.tolist(),
            "classes": [] if labels is None else self.run.source.classes,
        }

    def thumbnail(self, part: str, index: int, side: int) -> tuple[bytes, str]:
        """An image inside a square, encoded, and its media type; may be `Unreadable`."""
        return self.thumbnails.of(part, self._having(part, index), index, side)

    def _source(self, part: str) -> Source:
        if self.lacking:
            raise MissingData(self.lacking)
        if part not in self.sources:
            known = ", ".join(["probe", *self.sources])
            raise MissingData(f"got the images {part!r}, need one of {known}")
        return self.sources[part]

    def _having(self, part: str, index: int) -> Source:
        source = self._source(part)
        if not 0 <= index < len(source):
            raise MissingData(f"got image {index}, need 0 to {len(source) - 1}")
        return source

    def _indices(self) -> Int[Tensor, " n"]:
        return self.run.moment(self.run.some_epochs()[-1]).indices

    def _labels(self) -> Int[Tensor, " n"] | None:
        return None if self.lacking else self.run.labels

    def _labeled(self) -> bool:
        try:
            return self._labels() is not None
        except MissingData:  # a snapshot that cannot be read
            return False

    def _title(self, part: str, index: int) -> str:
        return self.sources[part].title(index) if part in self.sources else f"#{index}"

    def _image(self, part: str, index: int) -> dict[str, Any]:
        part = "train" if part == "probe" else part
        source, label = self.sources.get(part), -1
        if source is not None and source.labels is not None:
            label = int(source.labels[index])
        return {
            "part": part,
            "index": index,
            "row": self._row_of().get(index) if part == "train" else None,
            "title": self._title(part, index),
            "label": source.classes[label] if source is not None and label >= 0 else None,
        }

    @functools.lru_cache(maxsize=1)  # noqa: B019 (lives as long as the server)
    def _row_of(self) -> dict[int, int]:
        return {index: row for row, index in enumerate(self._indices().tolist())}

    # The map

    def map(self, *, have: str = "") -> dict[str, Any]:
        """t-SNE where it is drawn already, until then the principal directions; never waits.

        The points are left out where the page has them: `have` is the version that it shows.
        """
        epochs, doing = tuple(self.run.some_epochs()), None
        try:
            if epochs not in self._undrawn:
                self._drawn = self._maps.ask(
                    epochs, "map", lambda told: draw_maps(self.run, most=MOST, told=told)
                )
        except Pending as pending:
            doing = {"done": pending.done, "total": len(epochs)}
        except (ValueError, RuntimeError, OSError) as error:  # too few images, no room on disk
            self._undrawn[epochs] = str(error)  # it would fail again at each look
        kind = "t-SNE" if self._drawn else "principal directions"
        maps = self._drawn or self._flat(epochs)
        version = hashlib.sha256(f"{kind} {[m.epoch for m in maps]}".encode()).hexdigest()[:12]
        told: dict[str, Any] = {"version": version, "kind": kind, "doing": doing}
        told["note"] = self._undrawn.get(epochs, "")
        if version != have:
            told["rows"] = maps[-1].rows.tolist()
            told["points"] = {m.epoch: [round(x, 4) for x in m.points.flatten().tolist()]
                              for m in maps}  # fmt: skip
        return told

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _flat(self, epochs: tuple[int, ...]) -> list[EpochMap]:
        try:
            return flat_maps(self.run, most=MOST)
        except RuntimeError:
            raise MissingData(
                f"{self.run.folder}: the features after epochs {', '.join(map(str, epochs))} are "
                f"not all numbers: the run diverged; try a lower --optim.lr"
            ) from None

    def colors(self, by: str, *, epoch: int) -> dict[str, Any]:
        """A value for each image of the probe: label, cluster, purity, or a column as =NAME."""
        indices, labels = self._indices().tolist(), self._labels()
        if by == "cluster":
            names, assigned = self._clusters(self.run.epochs[-1])
            return categories([names[c] for c in assigned.tolist()], order=names)
        if by.startswith("=") and self.metadata is not None:
            return self.metadata.colors(by[1:], indices)
        if by not in ("label", "purity"):
            raise ValueError(f"by: got {by!r}, need label, cluster, purity or a column as =NAME")
        if labels is None:
            raise MissingData(self.lacking or f"{self.run.folder}: no labels, so no colors by {by}")
        if by == "label":
            classes = self.run.source.classes
            named = [classes[label] if label >= 0 else None for label in labels.tolist()]
            return categories(named, order=classes)
        pure = (labels[self._near(epoch)[0]] == labels[:, None]).float().mean(1)
        known = [
            number(p) if label >= 0 else None
            for p, label in zip(pure.tolist(), labels, strict=True)
        ]
        return {**scale(known), "low": 0.0, "high": 1.0}

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _clusters(self, epoch: int) -> tuple[list[str], Tensor]:
        count = 10 if self._labels() is None else min(20, len(self.run.source.classes))
        return groups(self.run.moment(epoch).features, count)

    # Neighbors

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _near(self, epoch: int) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        return self.run.neighbors(epoch, NEAR)

    def point(self, row: int) -> dict[str, Any]:
        """An image of the probe: its neighbors at each snapshot, and which of them stayed."""
        indices, labels = self._indices(), self._labels()
        if not 0 <= row < len(indices):
            raise MissingData(f"got image {row} of the map, need 0 to {len(indices) - 1}")
        moments, before = [], set[int]()
        for epoch in self.run.epochs:
            near, similarity = (told[row].tolist() for told in self._near(epoch))
            same = None
            if labels is not None and labels[row] >= 0:
                same = (labels[near] == labels[row]).tolist()
            moments.append(
                {
                    "epoch": epoch,
                    "rows": near,
                    "distances": [number(max(1 - s, 0.0)) for s in similarity],
                    "stayed": [other in before for other in near],
                    "same": same,
                }
            )
            before = set(near)
        image = self._image("train", int(indices[row]))
        more = {} if self.metadata is None else self.metadata.row(image["index"])
        return {**image, "metadata": more, "moments": moments}

    def image(self, part: str, index: int) -> UInt8[Tensor, "channels height width"]:
        """An image of a source, to search with; may be `Unreadable`."""
        source = self._having(part, index)
        with self.thumbnails.decoding:
            return source.read(index)

    def prepare(self, part: str, *, epoch: int) -> None:
        """Have the features that a search needs; raises `Pending` while they are made."""
        self._searchable(part)
        self.searcher.features(part, epoch)

    def search(
        self, image: UInt8[Tensor, "3 height width"], *, part: str, epoch: int, count: int = 24
    ) -> list[dict[str, Any]]:
        """The images nearest to any image, with their distances."""
        self._searchable(part)
        found = self.searcher.search(image, part=part, epoch=epoch, count=count)
        return [{**self._image(part, i), "distance": number(d)}
                for i, d in zip(*found, strict=True)]  # fmt: skip

    def clean(
        self, order: str, *, part: str, epoch: int, start: int = 0, count: int = 60
    ) -> dict[str, Any]:
        """Outliers or pairs of likely duplicates, the most striking first, a page of them."""
        self._searchable(part)
        found, page = (
            self.searcher.clean(order, part=part, epoch=epoch),
            slice(start, start + count),
        )
        each = zip(found.indices[page], found.scores[page], found.nearest[page],
                   found.distances[page], strict=True)  # fmt: skip
        return {
            "total": len(found.indices),
            "items": [
                {
                    **self._image(part, index),
                    "score": number(score),
                    "nearest": self._image(part, other),
                    "distance": number(distance),
                }
                for index, score, other, distance in each
            ],
        }

    def _searchable(self, part: str) -> None:
        if part != "probe":
            self._source(part)
