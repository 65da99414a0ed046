"""Exact search by rounded rows: products of bytes make a shortlist, which is compared in float32.

Let c be the mean row, z = q - c and y = x - c, so that q'x = q'c + c'y + z'y. With z^ and y^, which
are z and y rounded to whole multiples of a scale, by Cauchy-Schwarz

    z'y  =  z^'y^ + (z - z^)'y^ + z'(y - y^)  <=  z^'y^ + |z - z^||y^| + |z||y - y^| .

The product of whole numbers is exact, and on processors without wider units for bytes still nearly
twice as fast as one of float32. What float32 rounds elsewhere in these lines, in the product that
the bound is compared with included, is below (16 d + 256) 2^-24 M for d dimensions, with M the
square of the greatest length: each of the four sums of d terms is wrong by at most d 2^-24 times
the lengths of what it multiplies, which are at most twice the greatest.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.ops.topk import BLOCK, CHUNK_BYTES, above, by_query, nearest

_WORTH = 2**34  # multiplications below which nothing is gained
_PAYS = 0.4  # of the plain product: what comparing the list may cost to be less in all
_TOGETHER = 512  # queries: their bounds are in memory, four bytes a row
_SLICE = 1024  # rows that are rounded at a time: their float32 forms are in memory together
_LEVELS, _COARSE = 127, 63  # of rows and of queries: a pair of products still fits into 16 bits


class Shortlist:
    """Rows with their rounded forms, ready for searches of many queries; on the CPU, in float32.

    >>> search = Shortlist.of(rows, queries, 28)  # None where the plain search is to be used
    >>> slots, similarity = search.nearest(queries, 28)
    """

    def __init__(self, rows: Float[Tensor, "size dim"], *, chunk_bytes: int) -> None:
        self.rows, self.center, self.chunk_bytes = rows, rows.mean(0), chunk_bytes
        self.rounded = _Rounded(rows, self.center)
        self.longest = float(rows.norm(dim=1).max())
        self.pays = True  # until a list was too long: where rows crowd, the bounds hardly tell them

    @classmethod
    def of(
        cls,
        rows: Float[Tensor, "size dim"],
        queries: Sequence[Float[Tensor, "_ dim"]],
        count: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Shortlist | None:
        """None where the plain search is as fast, or the only one that there is."""
        on_cpu = rows.device.type == "cpu" and all(
            held.dtype == torch.float32 for held in (rows, *queries)
        )
        small = sum(map(len, queries)) * rows.numel() < _WORTH or len(rows) < 4 * count * BLOCK
        if not on_cpu or small or not multiplies_bytes():
            return None
        if not all(held.sum().isfinite() for held in (rows, *queries)):
            return None
        return cls(rows, chunk_bytes=chunk_bytes)

    @torch.no_grad()
    def nearest(
        self, queries: Float[Tensor, "batch dim"], count: int
    ) -> tuple[Int[Tensor, "batch count"], Float[Tensor, "batch count"]]:
        """What `search.nearest` finds; only the order of sums may round differently."""
        found = list[tuple[Tensor, Tensor]]()
        while self.pays and len(queries):
            found.append(self._nearest(queries[:_TOGETHER], count))
            queries = queries[_TOGETHER:]
        if len(queries):
            found.append(nearest(queries, self.rows, count, chunk_bytes=self.chunk_bytes))
        slots, best = (torch.cat(parts) for parts in zip(*found, strict=True))
        return slots, best

    def _nearest(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        asked = _Asked(queries, self.center, self.longest)
        blocks = self.rounded.bound(asked).unflatten(1, (-1, BLOCK))
        maxima = blocks.amax(2)
        # The most promising rows, compared exactly, set a bar that their bounds exceed as well.
        leading = maxima.topk(count).indices
        promising = blocks.gather(1, leading[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
        where = promising.topk(count).indices
        where = leading.gather(1, where // BLOCK) * BLOCK + where % BLOCK
        everyone = torch.arange(len(queries)).repeat_interleave(count)
        exact = self._compared(queries, everyone, where.flatten()).view(-1, count)
        bar = exact.amin(1, keepdim=True) - asked.along
        query, slots, _ = above(blocks, maxima, bar)
        cost = len(query) * _of_a_pair(queries.shape[1]) / blocks.numel()
        self.pays = cost < _PAYS
        fewest = int(query.bincount(minlength=len(queries)).min())
        if cost > 1 or fewest < count:  # the latter where all is so small that nothing is above
            return nearest(queries, self.rows, count, chunk_bytes=self.chunk_bytes)
        found = by_query(query, slots, self._compared(queries, query, slots), len(queries))
        best, order = found[0].topk(count)
        return found[1].gather(1, order), best

    def _compared(self, queries: Tensor, query: Tensor, slots: Tensor) -> Tensor:
        """The products of pairs that stand in order of their queries; no row is copied."""
        ends = torch.cat([query.new_zeros(1), query.bincount(minlength=len(queries)).cumsum(0)])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse", UserWarning)  # which torch calls young
            pairs = torch.sparse_csr_tensor(
                ends, slots, torch.zeros(len(slots)), (len(queries), len(self.rows)),
                check_invariants=False,
            )  # fmt: skip
        exact: Tensor = torch.sparse.sampled_addmm(pairs, queries, self.rows.T, beta=0.0).values()
        return exact


class _Asked:
    """Queries less the center as whole numbers from 1 to 127, and how far off those are at most."""

    def __init__(
        self, queries: Float[Tensor, "batch dim"], center: Float[Tensor, " dim"], longest: float
    ) -> None:
        z = queries - center
        self.along, self.longest = (queries @ center)[:, None], float(z.norm(dim=1).max())
        longest = max(longest, float(queries.norm(dim=1).max()))
        self.slack = (16 * queries.shape[1] + 256) * 2**-24 * longest**2
        self.scale = float(z.abs().max()) / _COARSE or 1.0
        whole = (z / self.scale).round_()
        self.error = float((z - whole * self.scale).norm(dim=1).max())
        self.whole = whole.add_(_COARSE + 1).to(torch.uint8)


class _Rounded:
    """Some of the rows as bytes, packed for products, with what bounds need to know of them.

    The last block is filled up with rows that are far from every query.
    """

    def __init__(self, rows: Float[Tensor, "some dim"], center: Float[Tensor, " dim"]) -> None:
        size, count = len(rows), -(-len(rows) // BLOCK) * BLOCK
        whole = torch.zeros(count, rows.shape[1], dtype=torch.int8)
        self.scale, self.zero = torch.ones(count), torch.zeros(count, dtype=torch.int32)
        self.length, self.error = torch.empty(size), torch.empty(size)
        self.offset = torch.full((count,), -torch.inf)
        for start in range(0, size, _SLICE):  # a few copies in float32 of a slice, never of all
            part = slice(start, min(start + _SLICE, size))
            y = rows[part] - center
            scale = y.abs().amax(1, keepdim=True).div_(_LEVELS)
            scale = torch.where(scale > 0, scale, 1.0)
            near = (y / scale).round_().clamp_(-_LEVELS, _LEVELS)
            whole[part], self.scale[part], self.offset[part] = near, scale[:, 0], y @ center
            near *= scale
            self.length[part], self.error[part] = near.norm(dim=1), y.sub_(near).norm(dim=1)
        self.packed = torch.ops.onednn.qlinear_prepack(whole, None)

    def bound(self, asked: _Asked) -> Float[Tensor, "batch some"]:
        """Never below the inner products, less that of each query with the center."""
        offset = self.offset.clone()
        offset[: len(self.length)] += (
            asked.error * self.length + asked.longest * self.error + asked.slack
        )
        bound: Tensor = torch.ops.onednn.qlinear_pointwise(
            asked.whole, asked.scale, _COARSE + 1, self.packed, self.scale, self.zero, offset,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return bound


@functools.cache
def multiplies_bytes() -> bool:
    """Whether torch has its product of bytes here, and it does not overflow on the largest."""
    try:
        one = _Rounded(torch.tensor([[-1.0] * 64, [1.0] * 64]), torch.zeros(64))
        asked = _Asked(torch.ones(1, 64), torch.zeros(64), 8.0)
        bound = one.bound(asked)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool(torch.allclose(bound[:, :2], torch.tensor([[-64.0, 64.0]]), atol=0.1))


def _of_a_pair(dim: int) -> float:
    """What finding and comparing a pair costs, in pairs of a product of matrices."""
    return 12_000 / dim + 4
