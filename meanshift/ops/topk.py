"""Exact nearest neighbors by inner product, in chunks of bounded memory."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from meanshift.ops import search_kernel
from meanshift.ops.inner_products import inner_products

BLOCK = 64
"""rows that are represented by their largest similarity in the first pass of a top-k"""

CHUNK_BYTES = 16 * 2**20
"""size of the similarities in memory at a time; small enough to stay in the processor's cache"""

EXTRA_CANDIDATES = 4
"""neighbors beyond k that are compared again in float64"""

TOLERANCE = 4e-6
"""similarities that are closer than this are compared again in float64: the rounding of a matrix
product depends on the shapes of the matrices"""

_INDEX_MASK = 2**32 - 1

_RESCORE_BYTES = 8 * 2**20
"""size of the candidates in float64 at a time; small enough to stay in the processor's cache"""


@torch.no_grad()
def deterministic_neighbors(
    queries: Float[Tensor, "batch dim"],
    rows: Shaped[Tensor, "size dim"],
    k: int,
    *,
    exclude: Int[Tensor, " batch"] | None = None,
    exclude_ids: tuple[Int[Tensor, " batch"], Int[Tensor, " size"]] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    exact_similarities: bool = False,
) -> tuple[Int[Tensor, "batch k"], Float[Tensor, "batch k"]]:
    """Return `nearest_neighbors` in an order that no batch, chunk, thread or process changes.

    The order is that of float64 similarities rounded to float32; among equal ones the lower index
    comes first. Similarities are computed in float64 where they decide the order, or everywhere
    with `exact_similarities`.
    """
    wide_k = min(k + EXTRA_CANDIDATES, max(k, len(rows)))
    candidates, rough = nearest_neighbors(
        queries, rows, wide_k, exclude=exclude, exclude_ids=exclude_ids, chunk_bytes=chunk_bytes
    )
    indices = candidates[:, :k].contiguous()
    similarities = rough[:, :k].float()
    if not len(rows):
        return indices, similarities
    on_cpu = queries.device.type == "cpu"
    if exact_similarities or not on_cpu:
        rescored = _rescore(queries, rows, candidates, rough)
        indices, similarities = stable_topk(candidates, rescored, k)
    if not on_cpu:  # a GPU would have to wait for the number of close similarities
        return indices, similarities
    if not exact_similarities:
        close = rough[:, :-1] - rough[:, 1:] < TOLERANCE  # false where both are -inf
        for some in _chosen_parts(close[:, :k].any(1)):
            rescored = _rescore(queries[some], rows, candidates[some], rough[some])
            indices[some], similarities[some] = stable_topk(candidates[some], rescored, k)
    # Where even the last candidate is close to the k-th one, compare all rows.
    last = rough[:, -1]
    undecided = (wide_k < len(rows)) & (last > -torch.inf) & (last >= rough[:, k - 1] - TOLERANCE)
    for some in _chosen_parts(undecided):
        indices[some], similarities[some] = _exhaustive_topk(
            queries[some],
            rows,
            k,
            exclude=None if exclude is None else exclude[some],
            exclude_ids=None if exclude_ids is None else (exclude_ids[0][some], exclude_ids[1]),
            chunk_bytes=chunk_bytes,
        )
    return indices, similarities


@torch.no_grad()
def nearest_neighbors(
    queries: Float[Tensor, "batch dim"],
    rows: Shaped[Tensor, "size dim"],
    k: int,
    *,
    exclude: Int[Tensor, " batch"] | None = None,
    exclude_ids: tuple[Int[Tensor, " batch"], Int[Tensor, " size"]] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Int[Tensor, "batch k"], Float[Tensor, "batch k"]]:
    """Return the rows with the largest inner products, nearest first: (indices, similarities).

    `exclude` is one row per query that is not a neighbor (its own), `exclude_ids` an id per query
    and the ids of the rows: rows of the query's id are not neighbors. Where fewer than k rows are
    left, the similarity is -inf. The order of equal similarities is undefined.
    """
    if search_kernel.can_search(queries, rows, k):
        found = search_kernel.nearest_rows(
            queries, rows, k, exclude=exclude, exclude_ids=exclude_ids
        )
        if found is not None:
            return found
    # The whole product must stay in the precision of the rows: autocast would copy all of them.
    with torch.autocast(queries.device.type, enabled=False):
        precision = torch.promote_types(rows.dtype, torch.float32)
        queries = queries.to(precision)  # rows of half precision are converted chunk by chunk
        best = queries.new_full((len(queries), k), -torch.inf, dtype=precision)
        indices = torch.zeros_like(best, dtype=torch.int64)
        converted = 0 if rows.dtype == precision else rows.shape[1]
        chunk_rows = chunk_bytes // ((max(1, len(queries)) + converted) * queries.element_size())
        for start, stop in _chunk_bounds(len(rows), max(BLOCK, chunk_rows // BLOCK * BLOCK)):
            similarity = inner_products(queries, rows[start:stop].to(precision))
            _mask_excluded(similarity, start, exclude, exclude_ids)
            if start and queries.device.type == "cpu":  # a GPU would have to wait for the counts
                values, columns = _above_threshold(similarity, best[:, -1:])
            else:
                values, columns = _block_topk(similarity, min(k, stop - start))
            del similarity  # before the next chunk, which takes its memory
            best, order = torch.cat([best, values], 1).topk(k)
            indices = torch.cat([indices, columns + start], 1).gather(1, order)
    return indices, best


def stable_topk(
    indices: Int[Tensor, "batch candidates"],
    similarities: Float[Tensor, "batch candidates"],
    k: int,
) -> tuple[Int[Tensor, "batch k"], Float[Tensor, "batch k"]]:
    """Return the best k candidates, nearest first; among equal ones the lower index comes first."""
    order = indices.argsort(1)
    indices, similarities = indices.gather(1, order), similarities.gather(1, order)
    order = similarities.argsort(stable=True, dim=1, descending=True)[:, :k]
    return indices.gather(1, order), similarities.gather(1, order)


def _chosen_parts(mask: Tensor) -> list[Tensor]:
    """The indices of the chosen queries in parts, so that memory is bounded."""
    chosen = mask.nonzero()[:, 0]
    return list(chosen.split(256)) if len(chosen) else []


def _rescore(queries: Tensor, rows: Tensor, indices: Tensor, rough: Tensor) -> Tensor:
    """Similarities of candidates in float64, rounded to float32; -inf stays -inf."""
    part = max(1, _RESCORE_BYTES // (8 * max(1, indices.shape[1] * rows.shape[1])))
    exact = [
        torch.bmm(rows[some].double(), query.double()[:, :, None])[:, :, 0].float()
        for query, some in zip(queries.split(part), indices.split(part), strict=True)
    ]
    return torch.cat(exact).masked_fill_(rough == -torch.inf, -torch.inf)


def _exhaustive_topk(
    queries: Tensor,
    rows: Tensor,
    k: int,
    *,
    exclude: Tensor | None,
    exclude_ids: tuple[Tensor, Tensor] | None,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor]:
    """The best k of all rows in float64; among equal ones the lower index comes first."""
    lowest = int(_pack(torch.tensor(-torch.inf), torch.tensor(0)))
    best = torch.full((len(queries), k), lowest)
    chunk_rows = max(BLOCK, chunk_bytes // (8 * (2 * len(queries) + queries.shape[1])))
    for start, stop in _chunk_bounds(len(rows), chunk_rows // BLOCK * BLOCK):
        similarity = (queries.double() @ rows[start:stop].double().T).float()
        _mask_excluded(similarity, start, exclude, exclude_ids)
        packed = _pack(similarity, torch.arange(start, stop))
        best = torch.cat([best, packed], 1).topk(k).values
    return _unpack(best)


def _pack(similarity: Tensor, indices: Tensor) -> Tensor:
    """One integer per pair that is larger for a larger similarity, then for a lower index."""
    bits = (similarity + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return (ordered.long() << 32) | (_INDEX_MASK - indices)


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and similarities of packed pairs."""
    ordered = (packed >> 32).int()
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return _INDEX_MASK - (packed & _INDEX_MASK), bits.view(torch.float32)


def _chunk_bounds(size: int, chunk_rows: int) -> list[tuple[int, int]]:
    """The bounds of chunks of whole blocks; an incomplete last block is a chunk of its own."""
    whole = size - size % BLOCK
    edges = [*range(0, whole, chunk_rows), whole, size]
    return [(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]


def _mask_excluded(
    similarity: Tensor,
    start: int,
    exclude: Tensor | None,
    exclude_ids: tuple[Tensor, Tensor] | None,
) -> None:
    """Set excluded similarities of the chunk that begins at row `start` to -inf, in place."""
    if exclude is not None:
        _mask_columns(similarity, exclude - start)
    if exclude_ids is not None:
        query_ids, row_ids = exclude_ids
        stop = start + similarity.shape[1]
        similarity.masked_fill_(query_ids[:, None] == row_ids[start:stop], -torch.inf)


def _mask_columns(similarity: Tensor, columns: Tensor) -> None:
    """Set one column per row to -inf if the chunk has it, without waiting for the device."""
    width = similarity.shape[1]
    inside = ((columns >= 0) & (columns < width))[:, None]
    column = columns.clamp(0, width - 1)[:, None]
    values = similarity.gather(1, column)
    similarity.scatter_(1, column, values.masked_fill(inside, -torch.inf))


def _above_threshold(
    similarity: Shaped[Tensor, "batch rows"], threshold: Shaped[Tensor, "batch 1"]
) -> tuple[Shaped[Tensor, "batch most"], Int[Tensor, "batch most"]]:
    """Return all values above each query's threshold and their columns, padded with -inf.

    In later chunks these are few. Only blocks whose maximum is above the threshold are read. A NaN
    counts as the largest value, as in `topk`, so that it is not overlooked.
    """
    batch, rows = similarity.shape
    block_size = min(BLOCK, rows)
    block_count = rows // block_size
    blocks = similarity.view(batch, block_count, block_size)
    query, block = (~(blocks.amax(2) <= threshold)).nonzero(as_tuple=True)
    values = blocks.flatten(0, 1).index_select(0, query * block_count + block)
    found = (~(values <= threshold[query])).flatten().nonzero()[:, 0]
    values = values.flatten()[found]
    query, block = query[found // block_size], block[found // block_size]
    column = block * block_size + found % block_size
    # The values of a query, which follow one another, become one padded row.
    counts = query.bincount(minlength=batch)
    position = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]
    padded = values.new_full((batch, int(counts.max()) if batch else 0), -torch.inf)
    columns = torch.zeros_like(padded, dtype=torch.int64)
    padded[query, position] = values
    columns[query, position] = column
    return padded, columns


def _block_topk(
    similarity: Shaped[Tensor, "batch rows"], k: int
) -> tuple[Shaped[Tensor, "batch k"], Int[Tensor, "batch k"]]:
    """Return an exact top-k that sorts only blocks that can contain one of the k best values.

    The k best values are in the k blocks with the largest maxima, and a maximum over blocks is one
    fast pass over memory, where a top-k over all columns is several slow ones.
    """
    batch, rows = similarity.shape
    if rows % BLOCK or rows < 4 * k * BLOCK:
        return similarity.topk(k)
    blocks = similarity.view(batch, rows // BLOCK, BLOCK)
    leading = blocks.amax(2).topk(k).indices
    candidates = blocks.gather(1, leading[:, :, None].expand(-1, -1, BLOCK))
    values, positions = candidates.flatten(1).topk(k)
    return values, leading.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
