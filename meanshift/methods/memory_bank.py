"""The ring of past target embeddings with their ids and labels, whole in each process or sharded.

Sharded, each of W processes keeps 1/W of the slots. Every process looks for every query in its own
slots, sends what it found back to where the query came from, and there the finds are merged. What
is found does not depend on W: see `search.settled`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from meanshift.ops.topk import CHUNK_BYTES, exact_neighbors, sort_neighbors
from meanshift.runtime import distributed


class MemoryBank(nn.Module):
    """A first-in-first-out memory of `size` unit rows; any batch size goes, the ring wraps.

    It begins, as in the authors' program, with random unit rows of id and label -1. In several
    processes every call is one of all of them together, each with a batch of its own.

    >>> bank = MemoryBank(1024, 64)
    >>> slots = bank.enqueue(embeddings, ids=ids, labels=labels)
    >>> slots, similarity = bank.search(embeddings, 4, leave_out=slots)
    >>> rows, ids, labels = bank.look_up(slots)
    """

    SPLIT = ("rows", "ids", "labels")
    """buffers of which a sharded bank has only its own slots"""

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
        self.size, self.sharded = size, sharded and distributed.world_size() > 1
        if self.sharded and size < distributed.world_size():
            raise ValueError(
                f"a bank of {size} rows for {distributed.world_size()} processes; need a row each: "
                f"raise method.bank_size, or keep it whole with method.bank_layout replicated"
            )
        self.first, self.last = distributed.shard_range(size) if self.sharded else (0, size)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.empty(self.last - self.first, dim, dtype=dtype)
        for start in range(0, size, 65_536):  # in parts, so that no second bank is ever in memory
            fresh = torch.randn(min(65_536, size - start), dim, generator=generator)
            fresh = nn.functional.normalize(fresh, dim=1).to(dtype)
            self._overlay(rows, fresh, start)
        self.register_buffer("rows", rows)
        self.register_buffer("ids", torch.full((len(rows),), -1))
        self.register_buffer("labels", torch.full((len(rows),), -1))
        self.written = (
            0  # rows ever enqueued; a plain number, so that reading it never waits for a GPU
        )
        self.chunk_bytes = chunk_bytes

    @property
    def filled(self) -> int:
        """Rows that hold an embedding rather than a random start; they are the first ones."""
        return min(self.written, self.size)

    @torch.no_grad()
    def enqueue(
        self,
        embeddings: Float[Tensor, "batch dim"],
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> Int[Tensor, " batch"]:
        """Write a batch over the oldest rows and return the slots it took."""
        counts = distributed.all_lengths(len(embeddings))
        count, before = sum(counts), sum(counts[: distributed.rank()])
        if count > self.size:
            raise ValueError(
                f"a batch of {count} embeddings does not fit a bank of {self.size} rows; "
                f"raise the bank's size to {count} or more, or lower the batch size"
            )
        unknown = self.ids.new_full((len(embeddings),), -1)
        about = torch.stack([unknown if t is None else t.to(unknown) for t in (ids, labels)], 1)
        rows = distributed.all_gather_rows(embeddings.to(self.rows.dtype), counts)
        about = distributed.all_gather_rows(about, counts)
        slots = (torch.arange(count, device=self.rows.device) + self.written) % self.size
        own: slice | Tensor = slice(None)
        if self.sharded:  # which are ours is known without asking the device
            mine = (torch.arange(count) + self.written) % self.size
            kept = ((mine >= self.first) & (mine < self.last)).nonzero()[:, 0]
            own = kept.to(self.rows.device, non_blocking=True)
        at = slots[own] - self.first
        self.rows[at], self.ids[at], self.labels[at] = rows[own], about[own, 0], about[own, 1]
        self.written += count
        return slots[before : before + len(embeddings)]

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
        searched = self.filled if filled_only else self.size
        counts = distributed.all_lengths(len(queries)) if self.sharded else []
        if self.sharded:  # every query goes round
            queries = distributed.all_gather_rows(queries, counts)
            leave_out, skip_ids = (
                t if t is None else distributed.all_gather_rows(t, counts)
                for t in (leave_out, skip_ids)
            )
        held = max(0, min(searched, self.last) - self.first)
        slots, similarity = exact_neighbors(
            queries,
            self.rows[:held],
            count,
            leave_out=None if leave_out is None else leave_out - self.first,
            skip=None if skip_ids is None else (skip_ids, self.ids[:held]),
            chunk_bytes=self.chunk_bytes,
            canonical=self.sharded,  # to be compared with what others found
        )
        if not self.sharded:
            return slots, similarity
        return self._merged(slots + self.first, similarity, counts)

    def _merged(
        self, slots: Tensor, similarity: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """What all shards found for the queries of this process, as one search would have."""
        own, world = counts[distributed.rank()], len(counts)
        found = [
            distributed.all_to_all(held, counts, [own] * world).view(world, own, held.shape[1])
            for held in (slots, similarity)
        ]
        slots, similarity = (held.transpose(0, 1).flatten(1) for held in found)
        return sort_neighbors(slots, similarity, slots.shape[1] // world)

    @torch.no_grad()
    def neighbors(
        self,
        queries: Float[Tensor, "batch dim"],
        count: int,
        *,
        leave_out: Int[Tensor, " batch"] | None = None,
        skip_ids: Int[Tensor, " batch"] | None = None,
        filled_only: bool = False,
    ) -> tuple[
        Float[Tensor, "batch count dim"], Int[Tensor, "batch count"], Int[Tensor, "batch count"]
    ]:
        """The rows that `search` finds with their ids and labels, in the queries' data type.

        Where fewer rows are eligible, the query itself replaces them, with id and label -1.
        """
        slots, similarity = self.search(
            queries, count, leave_out=leave_out, skip_ids=skip_ids, filled_only=filled_only
        )
        missing = similarity == -torch.inf
        rows, ids, labels = self.look_up(slots)
        rows = torch.where(missing[:, :, None], queries[:, None], rows.to(queries.dtype))
        return rows, ids.masked_fill(missing, -1), labels.masked_fill(missing, -1)

    @torch.no_grad()
    def look_up(
        self, slots: Int[Tensor, "batch count"]
    ) -> tuple[
        Shaped[Tensor, "batch count dim"], Int[Tensor, "batch count"], Int[Tensor, "batch count"]
    ]:
        """The rows in these slots with their ids and labels, from whichever process holds them."""
        if not self.sharded:
            return self.rows[slots], self.ids[slots], self.labels[slots]
        world, asked = distributed.world_size(), slots.flatten()
        ends = torch.tensor([self.size * (r + 1) // world for r in range(world)])
        owner = torch.bucketize(asked, ends.to(asked.device), right=True)
        order = owner.argsort(stable=True)
        out = [int(n) for n in owner.bincount(minlength=world).tolist()]  # here a GPU is waited for
        come = distributed.all_to_all_counts(out)
        wanted = distributed.all_to_all(asked[order], out, come) - self.first
        back = order.argsort()
        rows, ids, labels = (
            distributed.all_to_all(held[wanted], come, out)[back]
            for held in (self.rows, self.ids, self.labels)
        )
        shape = slots.shape
        return rows.view(*shape, self.rows.shape[1]), ids.view(shape), labels.view(shape)

    def part(self) -> dict[str, Tensor | int]:
        """The slots of this process as plain values, to be saved."""
        return {"first": self.first, "rows": self.rows, "ids": self.ids, "labels": self.labels}

    def put(self, part: dict[str, Tensor | int]) -> None:
        """Take over what a part holds of the slots of this process."""
        first = part["first"]
        assert isinstance(first, int)
        for name in ("rows", "ids", "labels"):
            other = part[name]
            assert isinstance(other, Tensor)
            self._overlay(getattr(self, name), other, first)

    def _overlay(self, own: Tensor, other: Tensor, start: int) -> None:
        """Copy from rows whose first is slot `start` those that are this process's."""
        low, high = max(start, self.first), min(start + len(other), self.last)
        if low < high:
            own[low - self.first : high - self.first] = other[low - start : high - start].to(own)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("rows", "ids", "labels"):  # of a whole bank a shard takes its own
            held = state.get(prefix + name)
            if held is not None and len(held) == self.size:
                state[prefix + name] = held[self.first : self.last]
        super()._load_from_state_dict(state, prefix, *rest)

    def get_extra_state(self) -> dict[str, int]:
        return {"written": self.written}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.written = state["written"]
