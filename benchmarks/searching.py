"""Search and loss alone, by the size of the bank, against the baseline and the bare product."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import authors
from benchmarks.apart import Apart
from benchmarks.memory import reset_peak, resident
from benchmarks.table import Row, by_turns, installed, over, timed
from meanshift.methods import MeanShift
from meanshift.methods.memory_bank import MemoryBank
from meanshift.ops.topk import CHUNK_BYTES, nearest_neighbors
from meanshift.runtime.malloc import keep_memory

QUERIES, DIM, K = 256, 512, 5
MIDDLE, LARGE = 128_000, 1_024_000


def rows(rounds: int) -> Iterator[Row]:
    names = ["ours", "authors", *(["lightly"] if installed("lightly") else [])]
    contenders = {name: Apart(search_and_loss, name, MIDDLE) for name in names}
    took = by_turns({name: one.lap for name, one in contenders.items()}, 2 * rounds)
    for one in contenders.values():
        one.end()
    what = f"search and loss, {QUERIES} queries, {MIDDLE:,} x {DIM}"
    yield Row(f"{what}: / the baseline", over(took["authors"], took["ours"]), 3.0)
    if "lightly" in took:
        yield Row(f"{what}: / lightly's (nearest only)", over(took["lightly"], took["ours"]))
    large = Apart(large_bank, LARGE)
    told = [large.ask() for _ in range(rounds)]
    large.end()
    what = f"search, {QUERIES} queries, {LARGE:,} x {DIM}"
    yield Row(f"{what}: / the bare product", tuple(t["search"] / t["bare"] for t in told), 1.15,
              at_most=True)  # fmt: skip
    yield Row(f"{what}: extra memory / 300 MB", (max(t["extra"] for t in told) / 300e6,), 1.0,
              at_most=True)  # fmt: skip
    yield Row(f"{what}: bfloat16 rows / float32 rows", tuple(t["half"] / t["search"] for t in told))
    yield Row(f"{what}: share of neighbors that bfloat16 changes", (told[0]["changed"],))


def search_and_loss(name: str, size: int) -> Iterator[float]:
    """Seconds from two embeddings to the gradient of the online one."""
    u, v = (embeddings(QUERIES, seed) for seed in (1, 2))
    labels = torch.zeros(QUERIES, dtype=torch.int64)
    if name == "ours":
        keep_memory()
        ours = MeanShift(nn.Identity(), DIM, k=K, bank_size=size)

        def loss(query: Tensor) -> Tensor:
            return ours.compare(query, u, ids=labels, labels=labels).loss

    elif name == "authors":
        theirs = authors.MeanShift(nn.Identity(), DIM, k=K, bank_size=size, momentum=0.99)

        def loss(query: Tensor) -> Tensor:
            return theirs.compare(query, u, labels)

    else:
        from lightly.models.modules import NNMemoryBankModule

        bank = NNMemoryBankModule(size=(size, DIM))

        def loss(query: Tensor) -> Tensor:
            near: Tensor = bank(u, update=True)
            return (2 - 2 * (query * near).sum(1)).mean()

    def work() -> None:
        query = v.clone().requires_grad_()
        loss(query).backward()

    lap = timed(work)
    yield 0.0
    while True:
        yield lap()


@torch.no_grad()
def large_bank(size: int) -> Iterator[dict[str, float]]:
    """The search of a bank as large as a dataset, beside the product that no search can avoid."""
    keep_memory()
    queries, bank = embeddings(QUERIES, 1), MemoryBank(size, DIM)
    for start in range(0, size, 64_000):
        bank.enqueue(embeddings(min(64_000, size - start), 3 + start))
    half = bank.rows.bfloat16()
    step = CHUNK_BYTES // (QUERIES * 4)
    out = torch.empty(QUERIES, step)

    def bare() -> None:
        for part in bank.rows.split(step):
            torch.mm(queries, part.T, out=out[:, : len(part)] if len(part) < step else out)

    reset_peak()
    before = resident("VmHWM")
    slots, _ = bank.search(queries, K - 1)
    extra = resident("VmHWM") - before
    halves, _ = nearest_neighbors(queries, half, K - 1)
    changed = 1 - float((slots[:, :, None] == halves[:, None]).any(2).double().mean())
    bare()
    yield {}
    while True:
        laps = {
            "bare": timed(bare), "search": timed(lambda: bank.search(queries, K - 1)),
            "half": timed(lambda: nearest_neighbors(queries, half, K - 1)),
        }  # fmt: skip
        yield {name: lap() for name, lap in laps.items()} | {"extra": extra, "changed": changed}


def embeddings(count: int, seed: int) -> Tensor:
    """Unit rows around a thousand centers, as a target encoder's are around its classes."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(1000, DIM, generator=torch.Generator().manual_seed(0))
    near = centers[torch.randint(1000, (count,), generator=generator)]
    return F.normalize(near + torch.randn(count, DIM, generator=generator), dim=1)
