"""Search large collections: a FAISS index of the embeddings of a source, with names and labels.

An index is a folder: `index.faiss`, `items/*.parquet` (name, id, split, label and embedding of each
image) and `index.json`, which is written last and has the size and checksum of every other file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from meanshift.data import Source, UnreadableSample, open_source
from meanshift.data.file_access import is_remote
from meanshift.data.folder import FolderSource
from meanshift.data.open import SourceSpec, source_name
from meanshift.evaluation.context import EncoderContext, source_identity
from meanshift.evaluation.embed import EmbeddedSplit
from meanshift.evaluation.index_items import PART_IMAGES, Item, Items, Part, read_part, write_part
from meanshift.evaluation.samples import Neighbors, Sample, embed_samples, path_of
from meanshift.models.features import feature_batches, warn_unreadable
from meanshift.models.weights import Weights, load_weights
from meanshift.ops import vector_index
from meanshift.ops.topk import nearest_neighbors, stable_topk
from meanshift.ops.vector_index import Layout
from meanshift.runtime import checksum, rng
from meanshift.runtime.checksum import DamagedFile
from meanshift.runtime.extras import require
from meanshift.runtime.files import atomic_writer, exclusive_lock
from meanshift.runtime.progress import progress
from meanshift.runtime.run_directory import environment
from meanshift.transforms.eval import TRANSFORM_VERSION

FORMAT = 1
"""version of the folder"""
MEMORY_GB = 4.0
"""memory that an index may take, beside torch and the network"""
RECALL_K = 10
"""neighbors of which the recall is the fraction that a search finds"""
RECALL_QUERIES = 400
"""images whose exact neighbors are searched to measure the recall"""
RERANKED = 4
"""candidates for each neighbor, which are compared again by their exact embeddings"""

_QUERIES = 256
"""queries that are searched together"""
_METADATA = "index.json"
_UNFINISHED = "unfinished.json"
"""what a build was started with; deleted when the index is complete"""
_FAISS = "index.faiss"
_ITEMS = "items"


class Index:
    """The embeddings of a source, searched by FAISS.

    >>> index = Index.build("runs/photos", "photos/", "photos.index")
    >>> index = Index.open("photos.index")
    >>> near = index.search("a.jpg", k=5)[0]
    >>> near.paths, near.similarities
    """

    def __init__(
        self, folder: Path, metadata: Mapping[str, Any], *, weights: str = "", device: str = "auto"
    ) -> None:
        self.folder = folder
        self.metadata = metadata
        parts = [Part(**part) for part in metadata["parts"]]
        self.items = Items(folder / _ITEMS, parts, metadata["dim"])
        self._weights = weights
        self._device = device

    @classmethod
    def build(
        cls,
        weights: Weights | Path | str,
        source: SourceSpec | Path,
        out: Path | str,
        *,
        memory: float = MEMORY_GB,
        kind: str = "auto",
        labels: Path | None = None,
        image_size: int = 0,
        resize: int = 0,
        workers: int = 0,
        device: str = "auto",
        precision: str = "float32",
    ) -> Index:
        """Embed all images of a source and index them; continue a build that was stopped.

        `memory` (GB) and the number of images choose the kind: flat, ivf-sq8 or ivf-pq. Unreadable
        images are left out, with a warning. A folder with an index of the same weights and images
        is opened; another one is refused.
        """
        _require_libraries()
        out = Path(out)
        given = weights if isinstance(weights, Weights) else load_weights(weights)
        spec = str(source) if isinstance(source, Path) else source
        context = EncoderContext(
            given,
            image_size=image_size,
            resize=resize,
            workers=workers,
            device=device,
            precision=precision,
            output_dir=out,
        )
        splits = open_source(spec, labels=labels)
        identity = _identity(context, splits)
        _check_folder(out, identity, kind)
        out.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(out / ".lock", "is building this index", "another --out"):
            if not (out / _METADATA).exists():
                checksum.write_json(out / _UNFINISHED, identity, indent=2)
                parts = _embed_parts(context, splits, out / _ITEMS)
                about = {
                    **identity,
                    "spec": _absolute_spec(given.spec),
                    "title": given.title,
                    "source": source_identity(spec) if isinstance(spec, str) else source_name(spec),
                    "labels": None if labels is None else str(labels.resolve()),
                    "roots": _roots(splits),
                }
                write_index(out, parts, about, memory=memory, kind=kind)
        return cls.open(out, weights=given.spec, device=device)

    @classmethod
    def open(cls, folder: Path | str, *, weights: str = "", device: str = "auto") -> Index:
        """Open an index; `weights` replaces those of its spec, if they were moved.

        Damaged or missing files raise a ValueError that names them.
        """
        folder = Path(folder)
        index = cls(folder, _read_metadata(folder), weights=weights, device=device)
        path = folder / _FAISS
        if not path.is_file():
            raise DamagedFile(path, "the file is missing")
        index.items.check_sizes()
        return index

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Index({str(self.folder)!r}: {self.describe()})"

    def describe(self) -> str:
        """Its size, its kind and its recall in a line."""
        layout = self.layout
        searched = "exact" if not layout.lists else f"{self.nprobe} of {layout.lists} lists"
        return (
            f"{len(self):,} x {self.items.dim}, {layout.kind} ({layout.factory}, {searched}), "
            f"recall@{self.metadata['recall_k']} {self.recall:.3f}"
        )

    @property
    def layout(self) -> Layout:
        """The kind of the index."""
        return Layout(**self.metadata["layout"])

    @property
    def recall(self) -> float:
        """The fraction of the 10 exact nearest neighbors that a search finds, measured."""
        return float(self.metadata["recall"])

    @property
    def nprobe(self) -> int:
        """Inverted lists that a search reads unless told otherwise."""
        return int(self.metadata["nprobe"])

    @functools.cached_property
    def context(self) -> EncoderContext:
        """The encoder with the preprocessing of the index; refuses other weights."""
        spec = self._weights or self.metadata["spec"]
        give = "give those of the index with --weights RUN_OR_WEIGHTS"
        again = f"meanshift index {spec} {self.metadata['source']} --out NEW"
        try:
            weights = load_weights(spec)
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.folder}: no weights to embed with ({error}); {give}") from None
        context = EncoderContext(
            weights,
            image_size=self.metadata["image_size"],
            resize=self.metadata["resize"],
            device=self._device,
            precision=self.metadata["precision"],
            output_dir=self.folder,
        )
        if context.fingerprint != self.metadata["weights"]:
            raise ValueError(
                f"{spec}: has other weights than {self.folder} was made with "
                f"({self.metadata['title']}); {give}, or make another index: {again}"
            )
        return context

    @functools.cached_property
    def _faiss(self) -> Any:
        _require_libraries()
        path = self.folder / _FAISS
        if checksum.compute(path) != self.metadata["faiss_crc32"]:
            raise DamagedFile(path, "its bytes differ from its checksum")
        return vector_index.read(path)

    def search(
        self,
        samples: Sample | Iterable[Sample] | Dataset[Any] | Source,
        k: int = RECALL_K,
        *,
        nprobe: int = 0,
    ) -> list[Neighbors]:
        """The `k` images nearest to each sample, a result for each; samples as for `Model.embed`.

        `nprobe` is the number of inverted lists that are read: more find more and take longer.

        >>> Index.open("photos.index").search(["a.jpg", "b.jpg"], k=3)[1].labels
        """
        return self.nearest(embed_samples(self.context, samples), k, nprobe=nprobe)

    def search_source(
        self,
        source: Source,
        k: int = RECALL_K,
        *,
        nprobe: int = 0,
        bad: dict[int, UnreadableSample],
    ) -> Iterator[tuple[str, Neighbors]]:
        """The path of each readable image of a source, and the images nearest to it.

        Unreadable ones are added to `bad`.
        """
        context = self.context
        batches = feature_batches(
            context.backbone,
            context.adapted(source),
            image_size=context.image_size,
            resize=context.resize,
            device=context.device,
            precision=context.precision,
            bad=bad,
        )
        first = 0
        for rows in batches:
            images = [first + i for i in range(len(rows)) if first + i not in bad]
            readable = rows[[image - first for image in images]]
            first += len(rows)
            found = self.nearest(readable, k, nprobe=nprobe) if images else []
            yield from zip((path_of(source, i) for i in images), found, strict=True)

    def nearest(
        self, embeddings: Float[Tensor, "m dim"], k: int = RECALL_K, *, nprobe: int = 0
    ) -> list[Neighbors]:
        """The `k` images nearest to each embedding; their similarities are exact."""
        self._check_query(embeddings, k, nprobe)
        queries = F.normalize(embeddings.float(), dim=1)
        results = []
        for part in queries.split(_QUERIES):
            rows, similarities = self._rerank(part, k, nprobe)
            found = rows[similarities > -torch.inf].unique().numpy()
            items = dict(zip(found.tolist(), self.items.items(found), strict=True))
            for near, values in zip(rows, similarities, strict=True):
                near, values = near[values > -torch.inf], values[values > -torch.inf]
                named = [items[row] for row in near.tolist()]
                results.append(
                    Neighbors(
                        near.numpy(),
                        values.numpy(),
                        [self.path(item) for item in named],
                        [item.label for item in named],
                    )
                )
        return results

    def path(self, item: Item) -> str:
        """The file of an image, or its title where it has none."""
        root = self.metadata["roots"].get(item.split, "")
        if is_remote(root):
            return f"{root}/{item.file}"
        return str(Path(root, item.file)) if root else item.file

    def open_source(self) -> Mapping[str, Source]:
        """The splits of the source, to read its images."""
        labels = self.metadata["labels"]
        return open_source(self.metadata["source"], labels=None if labels is None else Path(labels))

    def _check_query(self, embeddings: Tensor, k: int, nprobe: int) -> None:
        if embeddings.ndim != 2 or embeddings.shape[1] != self.items.dim:
            raise ValueError(
                f"{self.folder}: got embeddings of shape {tuple(embeddings.shape)}, need "
                f"(n, {self.items.dim})"
            )
        if not 1 <= k <= len(self):
            raise ValueError(f"k: got {k}, need 1 to {len(self)}, the images of {self.folder}")
        lists = self.layout.lists
        if nprobe < 0 or (nprobe and not lists) or nprobe > max(1, lists):
            need = f"1 to {lists}" if lists else "none: this index compares all images"
            raise ValueError(f"nprobe: got {nprobe}, need {need}")

    def candidates(
        self, queries: Float[Tensor, "m dim"], k: int, *, nprobe: int = 0
    ) -> Int[np.ndarray, "m candidates"]:
        """What FAISS finds for queries of unit length: more rows than k, or -1."""
        count = min(len(self), _candidates(self.layout, k))
        return vector_index.search(
            self._faiss, queries.numpy(), count, nprobe=nprobe or self.nprobe
        )

    def _rerank(
        self, queries: Float[Tensor, "m dim"], k: int, nprobe: int
    ) -> tuple[Int[Tensor, "m k"], Float[Tensor, "m k"]]:
        """The best of the candidates by their exact similarity; -inf where there are fewer."""
        found = self.candidates(queries, k, nprobe=nprobe)
        rows = np.unique(found)
        rows = rows[rows >= 0]
        embeddings = F.normalize(torch.from_numpy(self.items.embeddings(rows)), dim=1)
        candidates = torch.from_numpy(found)
        place = torch.searchsorted(torch.from_numpy(rows), candidates.clamp(min=0))
        exact = torch.einsum("md,mcd->mc", queries.double(), embeddings[place].double()).float()
        return stable_topk(candidates, exact.masked_fill(candidates < 0, -torch.inf), k)


def write_index(
    out: Path, parts: list[Part], about: Mapping[str, Any], *, memory: float, kind: str = "auto"
) -> None:
    """Build the FAISS index of the parts in `out/items`, measure its recall, and complete `out`."""
    dim = _dimensions(out / _ITEMS / parts[0].name)
    items = Items(out / _ITEMS, parts, dim)
    layout = vector_index.choose_layout(len(items), dim, memory=memory * 1e9, kind=kind)
    sample = _Sample.of(items, layout)
    index = vector_index.train(layout, sample.train.numpy())
    exact = _add(index, items, sample)
    measured = _measure(index, layout, sample, exact)
    with atomic_writer(out / _FAISS) as file:
        vector_index.write(index, file)
    values = {
        **about,
        "metric": "cosine",
        "dim": dim,
        "rows": len(items),
        "layout": layout.as_dict(),
        **measured,
        "unreadable": sum(len(part.bad) for part in parts),
        "faiss_crc32": checksum.compute(out / _FAISS),
        "parts": [_without_bad(part) for part in parts],
        "versions": environment()["versions"]
        | {name: packages.version(name) for name in ("faiss-cpu", "pyarrow")},
        "date": environment()["date"],
    }
    checksum.write_json(out / _METADATA, values, indent=1)
    (out / _UNFINISHED).unlink(missing_ok=True)


def _without_bad(part: Part) -> dict[str, Any]:
    """A part for the metadata: the unreadable images are named in the part itself."""
    values = asdict(part)
    del values["bad"]
    return values


@dataclass(frozen=True)
class _Sample:
    """Random rows of unit length: some to train on, and others as queries."""

    train: Float[Tensor, "n dim"]
    queries: Float[Tensor, "m dim"]
    query_rows: Int[Tensor, " m"]

    @classmethod
    def of(cls, items: Items, layout: Layout) -> _Sample:
        """Queries are held out of the training wherever there are enough rows for both."""
        count = vector_index.train_rows(len(items), items.dim) if layout.lists else 1
        some = rng.choice(0, len(items), count + RECALL_QUERIES, rng.SAMPLE)
        mixed = some[rng.permutation(0, 0, len(some))]
        query_rows = mixed[:RECALL_QUERIES].sort().values
        train_rows = mixed[-min(count, len(mixed)) :].sort().values
        train = list[Tensor]()
        queries = list[Tensor]()
        with progress("sample", len(items), unit="row") as bar:
            for first, chunk in items.chunks():
                values = torch.from_numpy(chunk)
                for chosen, taken in ((train_rows, train), (query_rows, queries)):
                    inside = chosen[(chosen >= first) & (chosen < first + len(chunk))] - first
                    taken.append(F.normalize(values[inside], dim=1))
                bar.update(len(chunk))
        return cls(torch.cat(train), torch.cat(queries), query_rows)


def _add(index: Any, items: Items, sample: _Sample) -> Int[Tensor, "m k"]:
    """Add all rows to the index; return the exact neighbors of the queries, without themselves."""
    k = min(RECALL_K, len(items) - 1)
    best: tuple[Tensor, Tensor] | None = None
    with progress("index", len(items), unit="row") as bar:
        for first, chunk in items.chunks():
            rows = F.normalize(torch.from_numpy(chunk), dim=1)
            if not bool(rows.isfinite().all()):
                raise ValueError(
                    f"{items.folder}: some embeddings are not finite numbers; the weights may "
                    f"have diverged: try others"
                )
            index.add(rows.numpy())
            own = sample.query_rows - first
            found, similarity = nearest_neighbors(
                sample.queries, rows, min(k, len(rows)), exclude=own
            )
            found = found + first
            if best is not None:
                found = torch.cat([best[0], found], 1)
                similarity = torch.cat([best[1], similarity], 1)
            best = stable_topk(found, similarity, min(k, found.shape[1]))
            bar.update(len(chunk))
    assert best is not None
    return best[0]


def _measure(
    index: Any, layout: Layout, sample: _Sample, exact: Int[Tensor, "m k"]
) -> dict[str, Any]:
    """Choose how many lists a search reads on one half of the queries; the recall on the other."""
    k = exact.shape[1]
    count = _candidates(layout, k) + 1  # a query is a row of the index, and finds itself
    queries, truth = sample.queries.numpy(), exact.numpy()
    half = math.ceil(len(queries) / 2)
    nprobe = 0
    if layout.lists:
        nprobe = vector_index.choose_nprobe(
            index, queries[:half], truth[:half], lists=layout.lists, candidates=count
        )
    tested = slice(half if half < len(queries) else 0, None)
    found = vector_index.search(index, queries[tested], count, nprobe=nprobe or 1)
    return {
        "nprobe": nprobe,
        "recall": vector_index.recall(found, truth[tested]) if k else 1.0,
        "recall_k": k,
        "recall_queries": len(queries[tested]),
    }


def _candidates(layout: Layout, k: int) -> int:
    """Rows that are compared by their exact embeddings to find k."""
    return RERANKED * k if layout.lists else k + RERANKED


def _embed_parts(context: EncoderContext, splits: Mapping[str, Source], folder: Path) -> list[Part]:
    """Write the embeddings of all splits, part by part; parts that are there are not written."""
    folder.mkdir(exist_ok=True)
    parts = list[Part]()
    bad: dict[int, UnreadableSample] = {}
    total = sum(map(len, splits.values()))
    with progress("embeddings", total, unit="img") as bar:
        for name, split in splits.items():
            bad = {}
            for start in range(0, len(split), PART_IMAGES):
                path = folder / f"part-{len(parts):05d}.parquet"
                images = torch.arange(start, min(start + PART_IMAGES, len(split)))
                if not path.exists():
                    _embed_part(context, name, split, images, path)
                bar.update(len(images))
                parts.append(read_part(path))
                bad |= parts[-1].bad
            if bad:
                warn_unreadable(split, bad, "are left out")
    if not sum(part.rows for part in parts):
        reasons = [f", the last is {error.title} ({error.reason})" for error in bad.values()]
        raise ValueError(f"none of the {total} images can be read{''.join(reasons[-1:])}")
    return parts


def _embed_part(
    context: EncoderContext, name: str, split: Source, images: Int[Tensor, " n"], path: Path
) -> None:
    bad: dict[int, UnreadableSample] = {}
    batches = feature_batches(
        context.backbone,
        context.adapted(split).subset(images),
        image_size=context.image_size,
        resize=context.resize,
        device=context.device,
        precision=context.precision,
        workers=context.workers,
        bad=bad,
    )
    with contextlib.closing(batches):
        rows = torch.cat(list(batches))
    readable = torch.ones(len(images), dtype=torch.bool)
    readable[list(bad)] = False
    bad_images = {int(images[index]): error for index, error in bad.items()}
    write_part(path, EmbeddedSplit(name, split, rows[readable], images[readable]), bad_images)


def _dimensions(path: Path) -> int:
    from pyarrow import parquet

    return int(parquet.read_schema(path).field("embedding").type.list_size)


def _identity(context: EncoderContext, splits: Mapping[str, Source]) -> dict[str, Any]:
    """What an index is made of: two with the same values have the same embeddings."""
    return {
        "format": FORMAT,
        "weights": context.fingerprint,
        "image_size": context.image_size,
        "resize": context.resize,
        "precision": str(context.precision).removeprefix("torch."),
        "transform": TRANSFORM_VERSION,
        "data": {name: split.content_fingerprint() for name, split in splits.items()},
    }


_WORDS = {"weights": "weights", "data": "images", "format": "format"}


def _check_folder(out: Path, identity: Mapping[str, Any], kind: str) -> None:
    """Refuse a folder of another index or of other files; write nothing."""
    if kind not in ("auto", *vector_index.KINDS):
        raise ValueError(f"--kind: got {kind!r}, need auto, {', '.join(vector_index.KINDS)}")
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out}: is a file; choose another --out")
    started = next((out / n for n in (_METADATA, _UNFINISHED) if (out / n).exists()), None)
    if started is None:
        if any(not path.name.startswith(".") for path in out.iterdir()):
            raise ValueError(f"{out}: contains files but no index; choose another --out")
        return
    found = checksum.read_json(started)
    differing = [_WORDS.get(name, name) for name in identity if found.get(name) != identity[name]]
    if "layout" in found and kind not in ("auto", found["layout"]["kind"]):
        differing.append("kind")
    if differing:
        raise ValueError(
            f"{out}: contains an index with other {', '.join(differing)}; choose another --out, "
            f"or delete it"
        )


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / _METADATA
    make = f"meanshift index RUN SOURCE --out {folder}"
    if not path.is_file():
        if (folder / _UNFINISHED).is_file():
            raise ValueError(f"{folder}: this index is not finished; finish it with: {make}")
        raise ValueError(f"{folder}: no index there (no {_METADATA}); make one with: {make}")
    try:
        values = checksum.read_json(path)
    except json.JSONDecodeError as error:
        raise DamagedFile(path, str(error)) from None
    if values.get("format") != FORMAT:
        raise ValueError(
            f"{path}: has format {values.get('format')}, and this version reads {FORMAT}; make "
            f"the index again: {make}"
        )
    return values


def _require_libraries() -> None:
    require("faiss", extra="faiss,parquet", what="indexes")
    require("pyarrow", extra="faiss,parquet", what="indexes")


def _roots(splits: Mapping[str, Source]) -> dict[str, str]:
    """The folder of each split, where its images are files."""
    return {
        name: str(split.root.resolve() if isinstance(split.root, Path) else split.root)
        for name, split in splits.items()
        if isinstance(split, FolderSource)
    }


def _absolute_spec(spec: str) -> str:
    """A spec of weights that means the same in another working directory."""
    prefix, colon, path = spec.partition(":")
    if colon and prefix in ("untrained", "random"):
        return f"{prefix}:{os.path.abspath(path)}"  # noqa: PTH100
    return os.path.abspath(spec) if Path(spec).exists() else spec  # noqa: PTH100
