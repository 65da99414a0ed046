"""An index of many synthetic rows: the memory that building and searching take, and its recall.

The rows are a mixture of 20,000 clusters around 200 centers. Within a cluster they vary in 12 of 64
sets of directions, and all have noise in every dimension, so that the neighbors of a row are in
several clusters. Rows are generated in parts and never are in memory together. Ratios are those of
processor time, which other programs on the same cores change little.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from benchmarks.worker import Worker
from meanshift.data import Source
from meanshift.evaluation.embed import EmbeddedSplit
from meanshift.evaluation.index import RECALL_K, Index, write_index
from meanshift.evaluation.index_items import PART_IMAGES, Items, Part, read_part, write_part
from meanshift.ops.topk import nearest_neighbors, stable_topk
from meanshift.ops.vector_index import recall
from meanshift.runtime.progress import progress

QUERIES = 200
CENTERS, CLUSTERS, BASES, RANK = 200, 20_000, 64, 12
MEMORY_GB = 8.0


class _Rows(Source):
    """Names of synthetic rows."""

    def __init__(self, size: int) -> None:
        self.name = "synthetic rows"
        self.size = size
        self.labels = None
        self.classes = []

    def __len__(self) -> int:
        return self.size

    def title(self, index: int) -> str:
        return f"#{index}"

    def read(self, index: int) -> Shaped[Tensor, "channels *size"]:
        raise TypeError(f"#{index}: synthetic rows have no images")


class Mixture:
    """The distribution of the rows; the same seed gives the same rows."""

    def __init__(self, dim: int) -> None:
        rng = np.random.default_rng(0)
        centers = rng.standard_normal((CENTERS, dim), np.float32)
        offsets = rng.standard_normal((CLUSTERS, dim), np.float32)
        self.clusters = centers[rng.integers(0, CENTERS, CLUSTERS)] + 0.7 * offsets
        self.bases = rng.standard_normal((BASES, RANK, dim), np.float32) / RANK**0.5

    def rows(self, count: int, seed: int) -> Tensor:
        """Some rows of unit length."""
        rng = np.random.default_rng((1, seed))
        cluster = rng.integers(0, CLUSTERS, count)
        rows = self.clusters[cluster]
        rows += 0.4 * rng.standard_normal(rows.shape, np.float32)
        inside = 0.8 * rng.standard_normal((count, RANK), np.float32)
        order = np.argsort(cluster % BASES, kind="stable")
        bounds = np.searchsorted((cluster % BASES)[order], np.arange(BASES + 1))
        for basis in range(BASES):
            members = order[bounds[basis] : bounds[basis + 1]]
            rows[members] += inside[members] @ self.bases[basis]
        return torch.nn.functional.normalize(torch.from_numpy(rows), dim=1)


def measure_index(
    rows: int, dim: int, out: Path, *, memory: float, kind: str, keep: bool = False
) -> str:
    """Build an index of synthetic rows in a process, search it in another one; a report."""
    if rows < 2 or dim < 2:
        raise ValueError(f"index: got {rows} rows of {dim} dimensions, need 2 or more of each")
    if out.exists():
        raise ValueError(f"{out}: is there already; choose another --out")
    built = _in_process(_build, rows, dim, out, memory, kind)
    found = _in_process(_search, rows, dim, out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    described = Index.open(out).describe()
    if not keep:
        shutil.rmtree(out)
    peak = max(built["peak"], found["peak"])
    return "\n".join(
        [
            f"  {described} of its own rows",
            f"  peak memory of building     {built['peak'] / 1e9:.2f} GB "
            f"({built['peak'] / 1e9 / MEMORY_GB:.2f} of {MEMORY_GB:g} GB)",
            f"  peak memory of searching    {found['peak'] / 1e9:.2f} GB",
            f"  FAISS file, all files       {built['faiss'] / 1e9:.2f} GB, {size / 1e9:.2f} GB",
            f"  recall@{RECALL_K} of {QUERIES} new rows   {found['recall']:.3f}, "
            f"{found['raw']:.3f} without exact comparison of the candidates",
            f"  exact search / FAISS        {found['exact'] / found['faiss']:.1f}x in processor "
            f"time",
            f"  exact search / whole search {found['exact'] / found['search']:.1f}x, with names "
            f"and exact similarities; {found['single']:.1f}x of one query",
            f"  {'within' if peak <= MEMORY_GB * 1e9 else 'MORE than'} {MEMORY_GB:g} GB",
        ]
    )


def _in_process(work: Any, *arguments: Any) -> Any:
    worker = Worker(work, *arguments)
    try:
        return worker.next()
    finally:
        worker.close()


def _peak() -> int:
    """The largest memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _build(rows: int, dim: int, out: Path, memory: float, kind: str) -> Iterator[Any]:
    yield None
    mixture = Mixture(dim)
    source = _Rows(rows)
    (out / "items").mkdir(parents=True)
    parts = list[Part]()
    with progress("rows", rows, unit="row") as bar:
        for start in range(0, rows, PART_IMAGES):
            ids = torch.arange(start, min(start + PART_IMAGES, rows))
            split = EmbeddedSplit("train", source, mixture.rows(len(ids), start), ids)
            path = out / "items" / f"part-{len(parts):05d}.parquet"
            write_part(path, split, {})
            parts.append(read_part(path))
            bar.update(len(ids))
    about = {
        "format": 1, "weights": "", "spec": "", "title": source.name, "source": source.name,
        "labels": None, "roots": {}, "image_size": 0, "resize": 0, "precision": "float32",
    }  # fmt: skip
    write_index(out, parts, about, memory=memory, kind=kind)
    yield {"peak": _peak(), "faiss": (out / "index.faiss").stat().st_size}


def _search(rows: int, dim: int, out: Path) -> Iterator[Any]:
    yield None
    index = Index.open(out)
    queries = Mixture(dim).rows(QUERIES, rows + 1)
    index.nearest(queries[:1], 1)  # reads the file
    exact, exact_seconds = _exact(index.items, queries, RECALL_K)
    start = time.process_time()
    raw = index.candidates(queries, RECALL_K)
    faiss_seconds = time.process_time() - start
    start = time.process_time()
    found = index.nearest(queries, RECALL_K)
    search_seconds = time.process_time() - start
    single_exact, single_search = _single(index, queries)
    neighbors = np.stack([near.indices for near in found])
    yield {
        "recall": recall(neighbors, exact.numpy()),
        "raw": recall(raw[:, :RECALL_K], exact.numpy()),
        "exact": exact_seconds,
        "faiss": faiss_seconds,
        "search": search_seconds,
        "single": single_exact / single_search,
        "peak": _peak(),
    }


def _single(index: Index, queries: Tensor, count: int = 5) -> tuple[float, float]:
    """Median seconds of an exact and of a whole search for one query alone."""
    exact = [_exact(index.items, query[None], RECALL_K)[1] for query in queries[:count]]
    search = []
    for query in queries[:count]:
        start = time.process_time()
        index.nearest(query[None], RECALL_K)
        search.append(time.process_time() - start)
    return statistics.median(exact), statistics.median(search)


def _exact(items: Items, queries: Tensor, k: int) -> tuple[Tensor, float]:
    """The nearest of all rows, and the seconds of the comparison without reading the files."""
    best = (torch.empty(len(queries), 0, dtype=torch.int64), torch.empty(len(queries), 0))
    seconds = 0.0
    for first, chunk in items.chunks():
        start = time.process_time()
        rows, similarities = nearest_neighbors(queries, torch.from_numpy(chunk), min(k, len(chunk)))
        merged = torch.cat([best[0], rows + first], 1), torch.cat([best[1], similarities], 1)
        best = stable_topk(*merged, k)
        seconds += time.process_time() - start
    return best[0], seconds
