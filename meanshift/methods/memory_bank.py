"""A ring buffer of past target embeddings with their ids and labels, replicated or sharded.

In a sharded bank each of W processes stores 1/W of the slots. Every process searches all queries in
its own slots and sends the neighbors back to the process of the query, which merges them. The
result does not depend on W: see `ops.topk.deterministic_neighbors`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from meanshift.methods.finite import require_finite
from meanshift.ops.topk import CHUNK_BYTES, deterministic_neighbors, stable_topk
from meanshift.runtime import distributed

_INITIAL_CHUNK = 65_536  # random rows that are generated at a time


class MemoryBank(nn.Module):
    """A first-in-first-out memory of `size` unit rows, for batches of any size.

    As in the authors' program, it is initialized with random unit rows of id and label -1. With
    several processes, all of them call each method together, each with a batch of its own.

    Args:
        size: rows.
        dim: values of a row.
        dtype: type of the values.
        seed: of the initial rows.
        sharded: with several processes, store a part of the rows in each.
        chunk_bytes: memory that a search may use beside the bank.

    >>> bank = MemoryBank(1024, 64)
    >>> slots = bank.enqueue(embeddings, ids=ids, labels=labels)
    >>> slots, similarities = bank.search(embeddings, 4, exclude_slots=slots)
    >>> rows, ids, labels = bank.lookup(slots)
    """

    SHARDED_BUFFERS = ("rows", "ids", "labels")
    """buffers of which a process of a sharded bank has only its own slots"""

    rows: Shaped[Tensor, "slots dim"]
    ids: Int[Tensor, " slots"]
    labels: Int[Tensor, " slots"]

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        sharded: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(f"a bank of {size} rows of {dim} values; need at least 1 of each")
        self.size = size
        self.sharded = sharded and distributed.world_size() > 1
        self.chunk_bytes = chunk_bytes
        if self.sharded and size < distributed.world_size():
            raise ValueError(
                f"a bank of {size} rows for {distributed.world_size()} processes; need a row each: "
                f"raise --method.bank_size, or use --method.bank_layout replicated"
            )
        self.first, self.last = distributed.shard_range(size) if self.sharded else (0, size)
        rows = torch.empty(self.last - self.first, dim, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        # In chunks, so that a shard never needs the memory of the whole bank.
        for start in range(0, size, _INITIAL_CHUNK):
            random = torch.randn(min(_INITIAL_CHUNK, size - start), dim, generator=generator)
            random = nn.functional.normalize(random, dim=1).to(dtype)
            self._copy_own_slots(rows, random, start)
        self.register_buffer("rows", rows)
        self.register_buffer("ids", torch.full((len(rows),), -1))
        self.register_buffer("labels", torch.full((len(rows),), -1))
        # Rows that were ever enqueued; a plain number, so that reading it never waits for a GPU.
        self.written = 0

    @property
    def filled(self) -> int:
        """The number of rows that are embeddings, not initial random rows; they come first."""
        return min(self.written, self.size)

    @torch.no_grad()
    def enqueue(
        self,
        embeddings: Float[Tensor, "batch dim"],
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> Int[Tensor, " batch"]:
        """Overwrite the oldest rows with a batch and return its slots."""
        require_finite(embeddings, "the embeddings for the bank")
        counts = distributed.all_lengths(len(embeddings))
        total = sum(counts)
        if total > self.size:
            raise ValueError(
                f"a batch of {total} embeddings does not fit a bank of {self.size} rows; "
                f"raise the bank's size to {total} or more, or lower the batch size"
            )
        unknown = self.ids.new_full((len(embeddings),), -1)
        own_ids = unknown if ids is None else ids.to(unknown)
        own_labels = unknown if labels is None else labels.to(unknown)
        rows = distributed.all_gather_rows(embeddings.to(self.rows.dtype), counts)
        metadata = distributed.all_gather_rows(torch.stack([own_ids, own_labels], 1), counts)
        slots = (torch.arange(total, device=self.rows.device) + self.written) % self.size
        stored: slice | Tensor = slice(None)
        if self.sharded:  # computed on the CPU, so that nothing waits for a GPU
            all_slots = (torch.arange(total) + self.written) % self.size
            inside = (all_slots >= self.first) & (all_slots < self.last)
            stored = inside.nonzero()[:, 0].to(self.rows.device, non_blocking=True)
        own_slots = slots[stored] - self.first
        self.rows[own_slots] = rows[stored]
        self.ids[own_slots] = metadata[stored, 0]
        self.labels[own_slots] = metadata[stored, 1]
        self.written += total
        start = sum(counts[: distributed.rank()])
        return slots[start : start + len(embeddings)]

    @torch.no_grad()
    def search(
        self,
        queries: Float[Tensor, "batch dim"],
        count: int,
        *,
        exclude_slots: Int[Tensor, " batch"] | None = None,
        exclude_ids: Int[Tensor, " batch"] | None = None,
        filled_only: bool = False,
    ) -> tuple[Int[Tensor, "batch count"], Float[Tensor, "batch count"]]:
        """Return the `count` rows most similar to each query, nearest first: (slots, similarities).

        `exclude_slots` is one slot per query that is not a neighbor (its own), `exclude_ids` one id
        per query whose rows are not neighbors. Where fewer rows are left, the similarity is -inf.

        The search is exact and reads the bank once, in chunks: it needs `chunk_bytes` of memory
        whatever the size of the bank, and autograd does not see it.
        """
        searched = self.filled if filled_only else self.size
        own_count = max(0, min(searched, self.last) - self.first)
        counts: list[int] = []
        if self.sharded:  # every process searches all queries
            counts = distributed.all_lengths(len(queries))
            queries = distributed.all_gather_rows(queries, counts)
            if exclude_slots is not None:
                exclude_slots = distributed.all_gather_rows(exclude_slots, counts)
            if exclude_ids is not None:
                exclude_ids = distributed.all_gather_rows(exclude_ids, counts)
        slots, similarities = deterministic_neighbors(
            queries,
            self.rows[:own_count],
            count,
            exclude=None if exclude_slots is None else exclude_slots - self.first,
            exclude_ids=None if exclude_ids is None else (exclude_ids, self.ids[:own_count]),
            chunk_bytes=self.chunk_bytes,
            exact_similarities=self.sharded,  # they are compared with those of other processes
        )
        if not self.sharded:
            return slots, similarities
        return self._merge_shards(slots + self.first, similarities, counts)

    def _merge_shards(
        self, slots: Tensor, similarities: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Merge the neighbors that all shards found for the queries of this process."""
        world = len(counts)
        own_queries = counts[distributed.rank()]

        def exchange(values: Tensor) -> Tensor:
            received = distributed.all_to_all(values, counts, [own_queries] * world)
            by_shard = received.view(world, own_queries, values.shape[1])
            return by_shard.transpose(0, 1).flatten(1)

        return stable_topk(exchange(slots), exchange(similarities), slots.shape[1])

    @torch.no_grad()
    def neighbors(
        self,
        queries: Float[Tensor, "batch dim"],
        count: int,
        *,
        exclude_slots: Int[Tensor, " batch"] | None = None,
        exclude_ids: Int[Tensor, " batch"] | None = None,
        filled_only: bool = False,
    ) -> tuple[
        Float[Tensor, "batch count dim"], Int[Tensor, "batch count"], Int[Tensor, "batch count"]
    ]:
        """Return the rows that `search` finds, their ids and labels, in the queries' data type.

        Where fewer rows are left, the query itself replaces them, with id and label -1.
        """
        slots, similarities = self.search(
            queries,
            count,
            exclude_slots=exclude_slots,
            exclude_ids=exclude_ids,
            filled_only=filled_only,
        )
        missing = similarities == -torch.inf
        rows, ids, labels = self.lookup(slots)
        rows = torch.where(missing[:, :, None], queries[:, None], rows.to(queries.dtype))
        return rows, ids.masked_fill(missing, -1), labels.masked_fill(missing, -1)

    @torch.no_grad()
    def lookup(
        self, slots: Int[Tensor, "batch count"]
    ) -> tuple[
        Shaped[Tensor, "batch count dim"], Int[Tensor, "batch count"], Int[Tensor, "batch count"]
    ]:
        """Return the rows in these slots, their ids and labels, whichever process stores them."""
        if not self.sharded:
            return self.rows[slots], self.ids[slots], self.labels[slots]
        world = distributed.world_size()
        requested = slots.flatten()
        shard_ends = torch.tensor([self.size * (r + 1) // world for r in range(world)])
        owner = torch.bucketize(requested, shard_ends.to(requested.device), right=True)
        order = owner.argsort(stable=True)
        # Here the CPU waits for a GPU.
        request_counts = [int(n) for n in owner.bincount(minlength=world).tolist()]
        reply_counts = distributed.all_to_all_counts(request_counts)
        received = distributed.all_to_all(requested[order], request_counts, reply_counts)
        own_slots = received - self.first
        inverse = order.argsort()

        def fetch(buffer: Tensor) -> Tensor:
            replies = distributed.all_to_all(buffer[own_slots], reply_counts, request_counts)
            return replies[inverse].view(*slots.shape, *buffer.shape[1:])

        return fetch(self.rows), fetch(self.ids), fetch(self.labels)

    def shard_state(self) -> dict[str, Tensor | int]:
        """Return the slots of this process, to be saved."""
        return {"first": self.first, "rows": self.rows, "ids": self.ids, "labels": self.labels}

    def load_shard_state(self, state: dict[str, Tensor | int]) -> None:
        """Copy the slots of this process from the `shard_state` of any process."""
        first = state["first"]
        assert isinstance(first, int)
        for name in self.SHARDED_BUFFERS:
            buffer = state[name]
            assert isinstance(buffer, Tensor)
            self._copy_own_slots(getattr(self, name), buffer, first)

    def _copy_own_slots(self, own: Tensor, other: Tensor, start: int) -> None:
        """Copy the slots of this process from rows whose first slot is `start`."""
        low, high = max(start, self.first), min(start + len(other), self.last)
        if low < high:
            own[low - self.first : high - self.first] = other[low - start : high - start].to(own)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in self.SHARDED_BUFFERS:  # a shard takes its slots of a whole bank
            buffer = state.get(prefix + name)
            if buffer is not None and len(buffer) == self.size:
                state[prefix + name] = buffer[self.first : self.last]
        super()._load_from_state_dict(state, prefix, *rest)

    def get_extra_state(self) -> dict[str, int]:
        return {"written": self.written}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.written = state["written"]


def build_bank(k: int, size: int, dim: int, **options: Any) -> MemoryBank | None:
    """The bank for a search of k-1 neighbors; None for k=1, which needs no bank."""
    if k < 1 or (k > 1 and k > size):
        raise ValueError(
            f"k={k} with a bank of {size} rows; need 1 <= k <= bank_size: "
            f"raise bank_size or lower k (k=1 is BYOL and needs no bank)"
        )
    return MemoryBank(size, dim, **options) if k > 1 else None
