"""Vector indexes of FAISS: which one fits a number of rows and a memory, its training and recall.

Rows and queries have unit length, so the inner product is the cosine.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float, Int

KINDS = ("flat", "ivf-sq8", "ivf-pq")
"""exact; inverted lists of 8 bits a dimension; inverted lists of a product quantizer"""
FLAT_ROWS = 100_000
"""up to this many rows every one is compared"""
TRAIN_ROWS = 131_072
"""rows that centroids and quantizers are trained on at most"""
TRAIN_BYTES = 256 * 2**20
"""size of these rows at most"""
TARGET_RECALL = 0.95
"""recall up to which the number of searched lists is raised"""

_ROWS_PER_CENTROID = 39  # below, FAISS warns that the centroids are not reliable
_GROWTH = 1.5  # of the memory of a list that is filled: its capacity grows in steps
_ID_BYTES = 8
_PQ_ROWS_PER_CENTROID = 64  # instead of 256: training is four times as fast, the recall the same
_PQ_ITERATIONS = 10
_MAX_CODE = 256  # bytes of a code of the product quantizer; the time to train grows with it
_LEAST_GAIN = 0.002  # of the recall, for which twice as many lists are searched


@dataclass(frozen=True)
class Layout:
    """The kind of an index and its size."""

    kind: str
    factory: str
    """what FAISS calls it"""
    lists: int
    """inverted lists; 0 where every row is compared"""
    nbytes: int
    """memory that building takes at most, estimated"""

    def as_dict(self) -> dict[str, Any]:
        """Its values by name, for JSON."""
        return asdict(self)


def choose_layout(rows: int, dim: int, *, memory: float, kind: str = "auto") -> Layout:
    """The most precise index of so many rows that fits into `memory` bytes.

    Few rows are compared exactly. More of them are assigned to inverted lists, of which a search
    reads some, and are stored with 8 bits a dimension, or else as codes of a product quantizer.
    """
    if kind not in ("auto", *KINDS):
        raise ValueError(f"--kind: got {kind!r}, need one of auto, {', '.join(KINDS)}")
    if rows < 1:
        raise ValueError(f"index: got {rows} rows, need at least one")
    layouts = [layout for layout in _layouts(rows, dim) if kind in ("auto", layout.kind)]
    if kind == "auto" and rows > FLAT_ROWS:
        layouts = [layout for layout in layouts if layout.kind != "flat"]
    for layout in layouts:
        if layout.nbytes <= memory:
            return layout
    smallest = min(layout.nbytes for layout in layouts)
    raise ValueError(
        f"--memory: got {memory / 1e9:.3g} GB, and {rows:,} rows of {dim} dimensions need "
        f"{smallest / 1e9:.3g} GB{'' if kind == 'auto' else f' as {kind}'}; type --memory "
        f"{math.ceil(smallest / 1e8) / 10:g}"
        + ("" if kind in ("auto", "ivf-pq") else ", or leave --kind out")
    )


def _layouts(rows: int, dim: int) -> list[Layout]:
    """All layouts, the most precise first."""
    lists = list_count(rows, dim)
    trained = 4 * dim * (2 * train_rows(rows, dim) + lists)
    codes = [m for m in range(max(1, min(dim // 4, _MAX_CODE)), 0, -1) if dim % m == 0]

    def inverted(kind: str, code: str, code_bytes: int) -> Layout:
        stored = int(_GROWTH * rows * (code_bytes + _ID_BYTES))
        return Layout(kind, f"IVF{lists},{code}", lists, stored + trained)

    return [
        Layout("flat", "Flat", 0, int(_GROWTH * rows * dim * 4)),
        inverted("ivf-sq8", "SQ8", dim),
        *(inverted("ivf-pq", f"PQ{m}", m) for m in codes),
    ]


def train_rows(rows: int, dim: int) -> int:
    """How many rows an index is trained on."""
    return min(rows, TRAIN_ROWS, max(1, TRAIN_BYTES // (4 * dim)))


def list_count(rows: int, dim: int) -> int:
    """The number of inverted lists: a power of two near 4 sqrt(rows) that can be trained."""
    most = min(4 * math.sqrt(rows), train_rows(rows, dim) / _ROWS_PER_CENTROID)
    return int(2 ** math.floor(math.log2(max(1.0, most))))


def write(index: Any, file: BinaryIO) -> None:
    """Write an index to an open file."""
    faiss = _library()
    faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def read(path: Path) -> Any:
    """Read what `write` has written."""
    return _library().read_index(str(path))


def _library() -> Any:
    """FAISS, whose own annotations lack much of what it has."""
    return importlib.import_module("faiss")


def train(layout: Layout, rows: Float[np.ndarray, "n dim"]) -> Any:
    """An index without rows; its centroids and quantizers are fitted to these rows."""
    faiss = _library()
    dim = rows.shape[1]
    index = faiss.index_factory(dim, layout.factory, faiss.METRIC_INNER_PRODUCT)
    if layout.kind == "ivf-pq":
        if len(rows) < 2**8:
            raise ValueError(
                f"ivf-pq: got {len(rows)} rows, need 256 or more to train a product quantizer; "
                f"leave --kind out"
            )
        index.pq.cp.max_points_per_centroid = _PQ_ROWS_PER_CENTROID
        index.pq.cp.niter = _PQ_ITERATIONS
        index.pq.cp.min_points_per_centroid = 1
    if layout.lists:
        index.cp.min_points_per_centroid = 1
    index.train(rows)
    return index


def search(
    index: Any, queries: Float[np.ndarray, "m dim"], k: int, *, nprobe: int
) -> Int[np.ndarray, "m k"]:
    """The rows most similar to each query, as the index finds them; -1 where there are fewer."""
    faiss = _library()
    is_inverted = isinstance(index, faiss.IndexIVF)
    parameters = faiss.SearchParametersIVF(nprobe=nprobe) if is_inverted else None
    _, rows = index.search(queries, k, params=parameters)
    found: np.ndarray = rows
    return found


def recall(
    found: Int[np.ndarray, "m candidates"],
    exact: Int[np.ndarray, "m k"],
) -> float:
    """The fraction of the exact neighbors that are among the rows that were found."""
    return float((found[:, :, None] == exact[:, None, :]).any(1).mean())


def choose_nprobe(
    index: Any,
    queries: Float[np.ndarray, "m dim"],
    exact: Int[np.ndarray, "m k"],
    *,
    lists: int,
    candidates: int,
) -> int:
    """The least number of lists with which a search reaches `TARGET_RECALL`.

    Where no number does, since the codes are too coarse, that from which more lists change little.
    """
    previous = -1.0
    nprobe = 1
    while True:
        reached = recall(search(index, queries, candidates, nprobe=nprobe), exact)
        if reached >= TARGET_RECALL or 2 * nprobe > lists:
            return nprobe
        if reached - previous < _LEAST_GAIN:
            return nprobe // 2
        previous = reached
        nprobe *= 2
