"""Exact top-k of inner products, in chunks."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

BLOCK = 64  # rows whose best similarity stands for them in the first pass of a search
CHUNK_BYTES = 16 * 2**20  # similarities in memory at a time; they stay near the processor


SLACK, CLOSE = 4, 4e-6
"""A product of matrices rounds as its shape wills. Similarities closer than this are compared again
in float64, with so many more than are asked for; where these do not suffice, with all rows."""


@torch.no_grad()
def exact_neighbors(
    queries: Float[Tensor, "batch dim"],
    rows: Shaped[Tensor, "size dim"],
    count: int,
    *,
    leave_out: Int[Tensor, " batch"] | None = None,
    skip: tuple[Int[Tensor, " batch"], Int[Tensor, " size"]] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    canonical: bool = False,
) -> tuple[Int[Tensor, "batch count"], Float[Tensor, "batch count"]]:
    """`nearest`, in an order that no batch, chunk, thread or process can change.

    It is that of float64's similarities rounded to float32; of equal ones the lower slot is nearer.
    Similarities are such where they decide, or all of them where they are to be `canonical`.
    """
    wide = min(count + SLACK, max(count, len(rows)))
    slots, rough = nearest_neighbors(
        queries, rows, wide, leave_out=leave_out, skip=skip, chunk_bytes=chunk_bytes
    )
    best, similarity = slots[:, :count].contiguous(), rough[:, :count].float()
    if not len(rows):
        return best, similarity
    if canonical or queries.device.type != "cpu":
        best, similarity = sort_neighbors(slots, _exact(queries, rows, slots, rough), count)
    if queries.device.type != "cpu":  # a GPU would have to wait to know which are close
        return best, similarity
    if not canonical:
        close = rough[:, :-1] - rough[:, 1:] < CLOSE  # false where there is nothing left to find
        for few in _where(close[:, :count].any(1)):
            exact = _exact(queries[few], rows, slots[few], rough[few])
            best[few], similarity[few] = sort_neighbors(slots[few], exact, count)
    tail, last = rough[:, -1], rough[:, count - 1]
    crowded = (wide < len(rows)) & (tail > -torch.inf) & (tail >= last - CLOSE)
    for few in _where(crowded):
        own = None if leave_out is None else leave_out[few]
        pair = None if skip is None else (skip[0][few], skip[1])
        told = _crowded(queries[few], rows, count, own, pair, chunk_bytes)
        best[few], similarity[few] = told
    return best, similarity


def _where(chosen: Tensor) -> list[Tensor]:
    """Some hundred at a time; none, where there is none."""
    found = chosen.nonzero()[:, 0]
    return list(found.split(256)) if len(found) else []


def _exact(queries: Tensor, rows: Tensor, slots: Tensor, rough: Tensor) -> Tensor:
    found = torch.bmm(rows[slots].double(), queries.double()[:, :, None])[:, :, 0]
    return found.float().masked_fill(rough == -torch.inf, -torch.inf)


def sort_neighbors(
    slots: Int[Tensor, "batch any"], similarity: Float[Tensor, "batch any"], count: int
) -> tuple[Int[Tensor, "batch count"], Float[Tensor, "batch count"]]:
    """The best `count`, nearest first; among equals the lower slot comes first."""
    order = slots.argsort(1)
    slots, similarity = slots.gather(1, order), similarity.gather(1, order)
    order = similarity.argsort(stable=True, dim=1, descending=True)[:, :count]
    return slots.gather(1, order), similarity.gather(1, order)


def _crowded(
    queries: Tensor,
    rows: Tensor,
    count: int,
    leave_out: Tensor | None,
    skip: tuple[Tensor, Tensor] | None,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor]:
    """All rows in float64: value and slot in one number, so that the lower slot is the larger."""
    nothing = int(_keys(torch.tensor(-torch.inf), torch.tensor(0)))
    best = torch.full((len(queries), count), nothing)
    step = max(BLOCK, chunk_bytes // (8 * (2 * len(queries) + queries.shape[1])))
    for start, stop in _chunks(len(rows), step // BLOCK * BLOCK):
        similarity = (queries.double() @ rows[start:stop].double().T).float()
        _forbid(similarity, start, leave_out, skip)
        keys = _keys(similarity, torch.arange(start, stop))
        best = torch.cat([best, keys], 1).topk(count).values
    values = (best >> 32).int()
    return _LOWEST - (best & _LOWEST), (values ^ ((values >> 31) & 0x7FFFFFFF)).view(torch.float32)


_LOWEST = 2**32 - 1


def _keys(similarity: Tensor, slots: Tensor) -> Tensor:
    bits = (similarity + 0.0).view(torch.int32)  # there are two zeros
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.long() << 32) | (_LOWEST - slots)


@torch.no_grad()
def nearest_neighbors(
    queries: Float[Tensor, "batch dim"],
    rows: Shaped[Tensor, "size dim"],
    count: int,
    *,
    leave_out: Int[Tensor, " batch"] | None = None,
    skip: tuple[Int[Tensor, " batch"], Int[Tensor, " size"]] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Int[Tensor, "batch count"], Float[Tensor, "batch count"]]:
    """The rows with the largest inner products, nearest first; of equal ones any."""
    # The whole product must stay in the precision of the rows: autocast would copy them all.
    with torch.autocast(queries.device.type, enabled=False):
        precise = torch.promote_types(rows.dtype, torch.float32)
        queries = queries.to(precise)  # rows in half precision are compared in full, by the chunk
        best = queries.new_full((len(queries), count), -torch.inf, dtype=precise)
        slots = torch.zeros_like(best, dtype=torch.int64)
        copied = 0 if rows.dtype == precise else rows.shape[1]
        room = chunk_bytes // ((max(1, len(queries)) + copied) * queries.element_size())
        chunks = _chunks(len(rows), max(BLOCK, room // BLOCK * BLOCK))
        widest = max((stop - start for start, stop in chunks), default=0)
        memory = queries.new_empty(len(queries) * widest)  # one for all: fresh pages cost time
        for start, stop in chunks:
            similarity = memory[: len(queries) * (stop - start)].view(len(queries), stop - start)
            torch.mm(queries, rows[start:stop].to(precise).T, out=similarity)
            _forbid(similarity, start, leave_out, skip)
            if start and queries.device.type == "cpu":  # a GPU would have to wait for the numbers
                found, where = _better(similarity, best[:, -1:])
            else:
                found, where = _top(similarity, min(count, stop - start))
            best, order = torch.cat([best, found], 1).topk(count)
            slots = torch.cat([slots, where + start], 1).gather(1, order)
    return slots, best


def _chunks(size: int, step: int) -> list[tuple[int, int]]:
    whole = size - size % BLOCK  # a tail that fills no block is a chunk of its own
    edges = [*range(0, whole, step), whole, size]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def _forbid(
    similarity: Tensor,
    start: int,
    leave_out: Tensor | None,
    skip: tuple[Tensor, Tensor] | None,
) -> None:
    """Give what may not be found in the chunk from `start` the similarity -inf."""
    if leave_out is not None:
        _hide(similarity, leave_out - start)
    if skip is not None:
        stop = start + similarity.shape[1]
        similarity.masked_fill_(skip[0][:, None] == skip[1][start:stop], -torch.inf)


def _hide(similarity: Tensor, slots: Tensor) -> None:
    """Hide one column a row where it lies inside this chunk, without asking the device where."""
    width = similarity.shape[1]
    inside = ((slots >= 0) & (slots < width))[:, None]
    column = slots.clamp(0, width - 1)[:, None]
    kept = similarity.gather(1, column)
    similarity.scatter_(1, column, kept.masked_fill(inside, -torch.inf))


def _better(
    similarity: Shaped[Tensor, "batch rows"], bar: Shaped[Tensor, "batch 1"]
) -> tuple[Shaped[Tensor, "batch few"], Int[Tensor, "batch few"]]:
    """The values above each query's bar, filled up with -inf: in later chunks they are few."""
    blocks = similarity.view(len(similarity), -1, min(BLOCK, similarity.shape[1]))
    query, column, values = above(blocks, blocks.amax(2), bar)
    return by_query(query, column, values, len(similarity))


def above(
    blocks: Shaped[Tensor, "batch blocks block"],
    maxima: Shaped[Tensor, "batch blocks"],
    bar: Shaped[Tensor, "batch 1"],
) -> tuple[Int[Tensor, " found"], Int[Tensor, " found"], Shaped[Tensor, " found"]]:
    """Where the values above each query's bar stand, query by query, and the values.

    Only the blocks whose maximum is above the bar are looked at.
    """
    query, at = (maxima > bar).nonzero(as_tuple=True)
    values = blocks.flatten(0, 1).index_select(0, query * blocks.shape[1] + at)
    found = (values > bar[query]).flatten().nonzero()[:, 0]
    which, column = found // blocks.shape[2], found % blocks.shape[2]
    return query[which], at[which] * blocks.shape[2] + column, values.flatten()[found]


def by_query(
    query: Int[Tensor, " found"],
    where: Int[Tensor, " found"],
    values: Shaped[Tensor, " found"],
    batch: int,
) -> tuple[Shaped[Tensor, "batch few"], Int[Tensor, "batch few"]]:
    """What was found, in order of its query, as one row a query, filled up with -inf."""
    counts = query.bincount(minlength=batch)
    place = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]
    few = values.new_full((batch, int(counts.max()) if batch else 0), -torch.inf)
    slots = torch.zeros_like(few, dtype=torch.int64)
    few[query, place], slots[query, place] = values, where
    return few, slots


def _top(
    similarity: Shaped[Tensor, "batch rows"], count: int
) -> tuple[Shaped[Tensor, "batch count"], Int[Tensor, "batch count"]]:
    """Exact top-k that sorts only the blocks that can hold a winner.

    The k best values lie in the k blocks with the best maxima, and a maximum over blocks is one
    fast pass over memory, where a top-k over all columns is several slow ones.
    """
    batch, rows = similarity.shape
    if rows % BLOCK or rows < 4 * count * BLOCK:
        return similarity.topk(count)
    blocks = similarity.view(batch, rows // BLOCK, BLOCK)
    leading = blocks.amax(2).topk(count).indices
    candidates = blocks.gather(1, leading[:, :, None].expand(-1, -1, BLOCK))
    values, where = candidates.flatten(1).topk(count)
    return values, leading.gather(1, where // BLOCK) * BLOCK + where % BLOCK
