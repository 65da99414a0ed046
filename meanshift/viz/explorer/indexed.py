"""The images of an index: searched by FAISS, and read from their source by split and id."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
from jaxtyping import Shaped
from torch import Tensor

from meanshift.config import SampleSpec
from meanshift.data import Source, UnreadableSample
from meanshift.data.convert import has_alpha, match_channels
from meanshift.evaluation.index import Index
from meanshift.evaluation.index_items import Item
from meanshift.evaluation.samples import extract_readable
from meanshift.viz.explorer.search import SingleImage

INDEX = "index"
"""the name of the indexed images among the sources of the page"""


class IndexedSource(Source):
    """The images of an index by row; their features are never in memory together."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.name = str(index.folder)
        self.labels = None  # those of found images are in the index
        self.classes = []
        self.splits = index.open_source()
        _ = index.context  # refuses other weights before the page is served

    @classmethod
    def open(cls, folder: Path, run: Path) -> IndexedSource:
        """Open an index; the run replaces the weights of its spec, where it has the same."""
        try:
            return cls(Index.open(folder))
        except ValueError as error:
            index = Index.open(folder, weights=str(run))
            try:
                return cls(index)
            except ValueError:
                raise error from None

    def __len__(self) -> int:
        return len(self.index)

    def title(self, index: int) -> str:
        return self.item(index).file

    def read(self, index: int) -> Shaped[Tensor, "channels *size"]:
        item = self.item(index)
        return self._split(item).read(item.id)

    def sample(self, index: int) -> Shaped[Tensor, "channels *size"]:
        item = self.item(index)
        return self._split(item).sample(item.id)

    @property
    def sample_spec(self) -> SampleSpec:
        return next(iter(self.splits.values())).sample_spec

    def fingerprint(self) -> str:
        data = json.dumps(self.index.metadata["data"])
        return hashlib.sha256(data.encode()).hexdigest()[:16]

    @functools.lru_cache(maxsize=10_000)  # noqa: B019 (lives as long as the server)
    def item(self, row: int) -> Item:
        """The name, split, id and label of an image."""
        return self.index.items.items(np.array([row]))[0]

    def search(
        self, image: Shaped[Tensor, "channels height width"], count: int
    ) -> tuple[list[int], list[float]]:
        """The images nearest to any image, nearest first, and their distances (1 - cosine)."""
        spec = self.index.context.weights.sample_spec
        if has_alpha(image) and spec is not None:
            image = match_channels(image, spec, 0)
        like = next(iter(self.splits.values()))
        query = extract_readable(self.index.context, SingleImage(image, like))
        (near,) = self.index.nearest(query, min(count, len(self)))
        distances = np.maximum(1 - near.similarities, 0)
        return near.indices.tolist(), distances.tolist()

    def _split(self, item: Item) -> Source:
        """The split of an image; one that is gone or another one there cannot be read."""
        split = self.splits.get(item.split)
        title = split.title(item.id) if split is not None and item.id < len(split) else ""
        if split is None or title.encode(errors="backslashreplace").decode() != item.file:
            reason = "the images have changed since they were indexed; index them again"
            raise UnreadableSample(item.file, reason)
        return split
