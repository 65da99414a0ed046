"""The compiled search for nearest rows on a CPU with AVX2 or AVX-512 (`search_kernel.c`).

`ops.topk` has the same search by torch's operators, which is the reference: the kernel finds the
same rows, with similarities that may differ by the rounding of float32.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.runtime.c_library import CLibrary, address, compute_in_threads, load

_SOURCE = Path(__file__).with_name("search_kernel.c")
_DONE, _NO_MEMORY, _NOT_A_NUMBER = range(3)  # what the search returns, as in the source
_GROUP = 64
"""queries that a thread searches together"""

MIN_QUERIES = 32
"""a search of fewer queries is faster by torch, since the kernel compares rows with whole groups"""

ROUND_FIRST = True
"""whether a processor with products of bfloat16 compares rounded values first; no result depends
on it"""


def library() -> CLibrary | None:
    """The compiled library; None without such a processor or a compiler, or switched off."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    return load(_SOURCE)


def can_search(queries: Tensor, rows: Tensor, k: int) -> bool:
    """Whether `nearest_rows` can search these rows, and is faster than torch's operators."""
    return (
        len(queries) >= MIN_QUERIES
        and k > 0
        and queries.shape[1] == rows.shape[1] > 0
        and all(
            tensor.device.type == "cpu" and tensor.dtype == torch.float32
            for tensor in (queries, rows)
        )
        and rows.is_contiguous()
        and library() is not None
    )


def nearest_rows(
    queries: Float[Tensor, "batch dim"],
    rows: Float[Tensor, "size dim"],
    k: int,
    *,
    exclude: Int[Tensor, " batch"] | None = None,
    exclude_ids: tuple[Int[Tensor, " batch"], Int[Tensor, " size"]] | None = None,
) -> tuple[Int[Tensor, "batch k"], Float[Tensor, "batch k"]] | None:
    """Return the same as `ops.topk.nearest_neighbors`, or None where a similarity is NaN."""
    loaded = library()
    assert loaded is not None
    count = len(queries)
    query_ids, row_ids = exclude_ids if exclude_ids is not None else (None, None)
    queries = queries.contiguous()
    exclude, query_ids, row_ids = (
        None if indices is None else indices.to(torch.int64).contiguous()
        for indices in (exclude, query_ids, row_ids)
    )
    similarities = queries.new_full((count, k), -torch.inf)
    neighbors = torch.zeros(count, k, dtype=torch.int64)

    def compute(first: int, last: int) -> int:
        limits = map(ctypes.c_long, (first * _GROUP, min(last * _GROUP, count)))
        status: int = loaded.functions.nearest_rows(
            address(queries),
            *limits,
            address(rows),
            *map(ctypes.c_long, rows.shape),
            *map(address, (exclude, query_ids, row_ids)),
            ctypes.c_long(k),
            ctypes.c_long(ROUND_FIRST),
            address(similarities),
            address(neighbors),
        )
        return status

    groups = -(-count // _GROUP)
    found = compute_in_threads(compute, groups, torch.get_num_threads())
    if _NO_MEMORY in found:
        raise MemoryError(f"a search of {count:,} queries does not fit into the memory")
    return None if _NOT_A_NUMBER in found else (neighbors, similarities)
