"""Exact search that multiplies only the leading axes and looks closely where a bound allows more.

With a matrix V of a few columns whose singular values are at most 1, P = I - VV' has no negative
eigenvalue, so by Cauchy-Schwarz q'Px <= |q|_P |x|_P where |q|_P^2 = q'Pq = |q|^2 - |V'q|^2, and

    q'x  =  (V'q)'(V'x) + q'Px  <=  (V'q)'(V'x) + |q|_P |x|_P :

the product of rows of m + 1 numbers is never below the true one. V' q and |q|_P are computed in
float64 and rounded once to float32 (a relative 2^-24 each); a sum of n float32 products is wrong by
at most n 2^-24 times the lengths, in whatever order it is added. So the bound of m + 1 numbers and
the product of d numbers that it is compared with are wrong by less than c |q||x| together, with
c = (m + d + 16) 2^-24. With |q|_P^2 + c |q|^2 instead of |q|_P^2 the bound holds for what float32
makes of it, since sqrt(a^2 + b^2) sqrt(e^2 + f^2) >= ae + bf.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.bank import BLOCK, above, by_query, nearest, product

_SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)  # of the axes, as a trial chooses from them
_SAMPLE, _ASKED = 4096, 64  # rows and queries of the trial
_SEEN = 3  # pairs are compared against bars that are still rising: so many for one of the trial
_PAYS = 0.7  # of the plain product's cost, as estimated; above it the rest eats the gain
_WORTH = 256  # queries x rows / dimensions^2 from which on a trial is a small part of the work


class Pruned:
    """Rows with their short forms, ready for searches of many queries; on the CPU, in float32.

    >>> search = Pruned.of(rows, queries, 28)  # None where the plain search is as fast
    >>> slots, similarity = search.nearest(queries, 28)
    """

    def __init__(
        self,
        rows: Float[Tensor, "size dim"],
        axes: Float[Tensor, "dim axes"],
        *,
        chunk_bytes: int,
    ) -> None:
        self.rows, self.axes, self.chunk_bytes = rows, contraction(axes), chunk_bytes
        self.short = shortened(rows, self.axes)

    @classmethod
    def of(
        cls,
        rows: Float[Tensor, "size dim"],
        queries: Sequence[Float[Tensor, "_ dim"]],
        count: int,
        *,
        chunk_bytes: int,
    ) -> Pruned | None:
        """Choose the number of axes by a trial; None where they would save too little."""
        asked = sum(map(len, queries))
        if rows.device.type != "cpu" or rows.dtype != torch.float32 or count >= len(rows):
            return None
        if asked * len(rows) < _WORTH * rows.shape[1] ** 2:
            return None
        few = torch.cat([part[:: -(-asked // _ASKED)] for part in queries])
        axes = leading_axes(rows, few, count, asked=asked)
        return None if axes is None else cls(rows, axes, chunk_bytes=chunk_bytes)

    @torch.no_grad()
    def nearest(
        self, queries: Float[Tensor, "batch dim"], count: int
    ) -> tuple[Int[Tensor, "batch count"], Float[Tensor, "batch count"]]:
        """What `bank.nearest` finds; only the order of sums may round differently."""
        batch, size = len(queries), len(self.rows)
        short = shortened(queries, self.axes)
        parts = -(-size // max(BLOCK, self.chunk_bytes // (4 * max(1, batch))))
        memory = queries.new_empty(batch, -(-size // (parts * BLOCK)) * BLOCK)
        best = queries.new_full((batch, count), -torch.inf)
        slots = torch.zeros_like(best, dtype=torch.int64)
        for start in range(parts):  # every so manieth row: rows in order of class cannot mislead
            rows = self.rows[start::parts]
            bound, seen = memory[:, : len(rows)], None
            memory[:, len(rows) :] = -torch.inf
            product(short, self.short[start::parts], bound)
            if not start:  # the most promising set the first bars
                seen = bound.topk(min(count, len(rows))).indices
                query = torch.arange(batch).repeat_interleave(seen.shape[1])
                exact = self._compared(queries, query, seen.flatten() * parts)
                best, slots = _merged(best, slots, query, seen.flatten() * parts, exact)
                bound.scatter_(1, seen, -torch.inf)
            query, column, _ = above(memory, best[:, -1:])
            if len(query) * _of_a_pair(queries.shape[1]) < bound.numel():
                exact = self._compared(queries, query, column * parts + start)
            else:
                product(queries, rows, bound)
                if seen is not None:
                    bound.scatter_(1, seen, -torch.inf)
                query, column, exact = above(memory, best[:, -1:])
            best, slots = _merged(best, slots, query, column * parts + start, exact)
        return slots, best

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


def _merged(
    best: Tensor, slots: Tensor, query: Tensor, where: Tensor, exact: Tensor
) -> tuple[Tensor, Tensor]:
    found, places = by_query(query, where, exact, len(best))
    best, order = torch.cat([best, found], 1).topk(best.shape[1])
    return best, torch.cat([slots, places], 1).gather(1, order)


def _of_a_pair(dim: int) -> float:
    """What finding, gathering and comparing a pair costs, in pairs of a product of matrices."""
    return 12_000 / dim + 4


def contraction(axes: Float[Tensor, "dim axes"]) -> Float[Tensor, "dim axes"]:
    """Nearly orthonormal columns in float64, made so small that no singular value is above 1."""
    axes = axes.double()
    excess = (axes.T @ axes - torch.eye(axes.shape[1], dtype=axes.dtype)).norm()
    small: Tensor = axes / (1 + excess + 1e-12)
    return small


def shortened(
    rows: Float[Tensor, "size dim"], axes: Float[Tensor, "dim axes"]
) -> Float[Tensor, "size short"]:
    """The rows along the axes, and what is left of their lengths (see the head of this file)."""
    dim, count = axes.shape
    short = rows.new_empty(len(rows), count + 1)
    for part, out in zip(rows.split(4096), short.split(4096), strict=True):
        precise = part.double()
        along = precise @ axes
        length = torch.linalg.vector_norm(precise, dim=1).square()
        left = (length - torch.linalg.vector_norm(along, dim=1).square()).clamp(min=0)
        out[:, :count] = along
        rounding = (count + dim + 16) * 2**-24 * length + 1e-35  # the last against underflow
        out[:, count] = (left + rounding).sqrt()
    return short


def leading_axes(
    rows: Float[Tensor, "size dim"], queries: Float[Tensor, "few dim"], count: int, *, asked: int
) -> Float[Tensor, "dim axes"] | None:
    """The principal axes of the rows, as many as cost least by a trial of a few queries, or None.

    The costs are shares of the plain product's.
    """
    size, dim = rows.shape
    sample = rows[:: -(-size // _SAMPLE)]
    moment = sample.T @ sample
    if not rows.sum().isfinite():
        return None
    axes = torch.linalg.eigh(moment)[1].flip(1)
    bars = nearest(queries, rows, count)[1][:, -1:]
    sample, queries = sample @ axes, queries @ axes
    cheapest, chosen = _PAYS, 0
    for share in _SHARES:
        m = max(1, round(share * dim / 8) * 8 - 1)  # 8 numbers with the one for what is left
        left = [part[:, m:].norm(dim=1, keepdim=True) for part in (queries, sample)]
        bound = queries[:, :m] @ sample[:, :m].T + left[0] @ left[1].T
        pairs = float((bound > bars).double().mean())
        cost = (m + 1) / dim + 2 * m * (1 / asked + 1 / size) + _SEEN * _of_a_pair(dim) * pairs
        if cost < cheapest:
            cheapest, chosen = cost, m
    return axes[:, :chosen] if chosen else None
