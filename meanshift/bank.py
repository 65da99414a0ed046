"""The ring of past target embeddings with their ids and labels: enqueue, exact top-k in chunks."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

BLOCK = 64  # rows whose best similarity stands for them in the first pass of a search
CHUNK_BYTES = 16 * 2**20  # similarities in memory at a time; they stay near the processor


class MemoryBank(nn.Module):
    """A first-in-first-out memory of `size` unit rows; any batch size goes, the ring wraps.

    It begins, as in the authors' program, with random unit rows of id and label -1.

    >>> bank = MemoryBank(1024, 64)
    >>> slots = bank.enqueue(embeddings, ids=ids, labels=labels)
    >>> slots, similarity = bank.search(embeddings, 4, leave_out=slots)
    """

    rows: Shaped[Tensor, "size dim"]
    ids: Int[Tensor, " size"]
    labels: Int[Tensor, " size"]

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(f"a bank of {size} rows of {dim} values; need at least 1 of each")
        generator = torch.Generator().manual_seed(seed)
        rows = torch.empty(size, dim, dtype=dtype)
        for part in rows.split(65_536):  # in parts, so that no second bank is ever in memory
            fresh = torch.randn(part.shape, generator=generator)
            part.copy_(nn.functional.normalize(fresh, dim=1))
        self.register_buffer("rows", rows)
        self.register_buffer("ids", torch.full((size,), -1))
        self.register_buffer("labels", torch.full((size,), -1))
        self.written = (
            0  # rows ever enqueued; a plain number, so that reading it never waits for a GPU
        )
        self.chunk_bytes = chunk_bytes

    @property
    def filled(self) -> int:
        """Rows that hold an embedding rather than a random start; they are the first ones."""
        return min(self.written, len(self.rows))

    @torch.no_grad()
    def enqueue(
        self,
        embeddings: Float[Tensor, "batch dim"],
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> Int[Tensor, " batch"]:
        """Write a batch over the oldest rows and return the slots it took."""
        count, size = len(embeddings), len(self.rows)
        if count > size:
            raise ValueError(
                f"a batch of {count} embeddings does not fit a bank of {size} rows; "
                f"raise the bank's size to {count} or more, or lower the batch size"
            )
        slots = (torch.arange(count, device=self.rows.device) + self.written) % size
        self.rows[slots] = embeddings.to(self.rows.dtype)
        self.ids[slots] = -1 if ids is None else ids
        self.labels[slots] = -1 if labels is None else labels
        self.written += count
        return slots

    @torch.no_grad()
    def search(
        self,
        queries: Float[Tensor, "batch dim"],
        count: int,
        *,
        leave_out: Int[Tensor, " batch"] | None = None,
        skip_ids: Int[Tensor, " batch"] | None = None,
        filled_only: bool = False,
    ) -> tuple[Int[Tensor, "batch count"], Float[Tensor, "batch count"]]:
        """The `count` rows most similar to each query, nearest first, as (slots, similarities).

        `leave_out` is one slot a query that may not be found (its own), `skip_ids` an id whose rows
        may not. Where fewer rows are eligible the similarity of the surplus is -inf.

        Exact. The bank is read once and in chunks: the extra memory is `chunk_bytes`, whatever the
        size of the bank, and autograd sees none of it.
        """
        searched = self.filled if filled_only else len(self.rows)
        return nearest(
            queries,
            self.rows[:searched],
            count,
            leave_out=leave_out,
            skip=None if skip_ids is None else (skip_ids, self.ids[:searched]),
            chunk_bytes=self.chunk_bytes,
        )

    def get_extra_state(self) -> dict[str, int]:
        return {"written": self.written}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.written = state["written"]


@torch.no_grad()
def nearest(
    queries: Float[Tensor, "batch dim"],
    rows: Shaped[Tensor, "size dim"],
    count: int,
    *,
    leave_out: Int[Tensor, " batch"] | None = None,
    skip: tuple[Int[Tensor, " batch"], Int[Tensor, " size"]] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Int[Tensor, "batch count"], Float[Tensor, "batch count"]]:
    """The rows with the largest inner products, nearest first; see `MemoryBank.search`."""
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
            if leave_out is not None:
                _hide(similarity, leave_out - start)
            if skip is not None:
                similarity.masked_fill_(skip[0][:, None] == skip[1][start:stop], -torch.inf)
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
