"""Search and loss alone, by the size of the bank, against the baseline and the bare product."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import baseline
from benchmarks.memory import reset_peak, resident
from benchmarks.table import Row, alternate, installed, ratios, timed
from benchmarks.worker import Worker
from meanshift.methods import MeanShift
from meanshift.methods.memory_bank import MemoryBank
from meanshift.ops.topk import CHUNK_BYTES, nearest_neighbors
from meanshift.runtime.malloc import keep_memory

QUERIES, DIM, K = 256, 512, 5
PAPER_BANK, LARGE_BANK = 128_000, 1_024_000


def rows(rounds: int) -> Iterator[Row]:
    names = ["ours", "baseline", *(["lightly"] if installed("lightly") else [])]
    workers = {name: Worker(search_and_loss, name, PAPER_BANK) for name in names}
    seconds = alternate({name: each.seconds for name, each in workers.items()}, 2 * rounds)
    for worker in workers.values():
        worker.close()
    title = f"search and loss, {QUERIES} queries, {PAPER_BANK:,} x {DIM}"
    ours = seconds["ours"]
    yield Row(f"{title}: / the baseline", ratios(seconds["baseline"], ours), 3.0)
    if "lightly" in seconds:
        yield Row(f"{title}: / lightly's (nearest only)", ratios(seconds["lightly"], ours))
    yield from _large_rows(rounds)


def _large_rows(rounds: int) -> Iterator[Row]:
    worker = Worker(large_bank, LARGE_BANK)
    measured = [worker.next() for _ in range(rounds)]
    worker.close()
    title = f"search, {QUERIES} queries, {LARGE_BANK:,} x {DIM}"
    yield Row(
        f"{title}: / the bare product",
        tuple(each["search"] / each["product"] for each in measured),
        1.15,
        at_most=True,
    )
    yield Row(
        f"{title}: extra memory / 300 MB",
        (max(each["extra"] for each in measured) / 300e6,),
        1.0,
        at_most=True,
    )
    yield Row(
        f"{title}: bfloat16 rows / float32 rows",
        tuple(each["bfloat16"] / each["search"] for each in measured),
    )
    yield Row(f"{title}: fraction of neighbors that bfloat16 changes", (measured[0]["changed"],))


def search_and_loss(name: str, size: int) -> Iterator[float]:
    """Seconds from two embeddings to the gradient of the online one."""
    u = embeddings(QUERIES, 1)
    v = embeddings(QUERIES, 2)
    labels = torch.zeros(QUERIES, dtype=torch.int64)
    if name == "ours":
        keep_memory()
        ours = MeanShift(nn.Identity(), DIM, k=K, bank_size=size)

        def loss(query: Tensor) -> Tensor:
            return ours.compare(query, u, ids=labels, labels=labels).loss

    elif name == "baseline":
        theirs = baseline.MeanShift(nn.Identity(), DIM, k=K, bank_size=size, momentum=0.99)

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

    measure = timed(work)
    yield 0.0
    while True:
        yield measure()


@torch.no_grad()
def large_bank(size: int) -> Iterator[dict[str, float]]:
    """The search of a bank as large as a dataset, beside the product that no search can avoid."""
    keep_memory()
    queries = embeddings(QUERIES, 1)
    bank = MemoryBank(size, DIM)
    for start in range(0, size, 64_000):
        bank.enqueue(embeddings(min(64_000, size - start), 3 + start))
    bfloat16_rows = bank.rows.bfloat16()
    chunk = CHUNK_BYTES // (QUERIES * 4)
    out = torch.empty(QUERIES, chunk)

    def product() -> None:
        for part in bank.rows.split(chunk):
            torch.mm(queries, part.T, out=out[:, : len(part)] if len(part) < chunk else out)

    reset_peak()
    before = resident("VmHWM")
    slots, _ = bank.search(queries, K - 1)
    extra = resident("VmHWM") - before
    bfloat16_slots, _ = nearest_neighbors(queries, bfloat16_rows, K - 1)
    found_again = (slots[:, :, None] == bfloat16_slots[:, None]).any(2)
    changed = 1 - float(found_again.double().mean())
    product()
    yield {}
    contenders = {
        "product": timed(product),
        "search": timed(lambda: bank.search(queries, K - 1)),
        "bfloat16": timed(lambda: nearest_neighbors(queries, bfloat16_rows, K - 1)),
    }
    while True:
        seconds = {name: measure() for name, measure in contenders.items()}
        yield seconds | {"extra": extra, "changed": changed}


def embeddings(count: int, seed: int) -> Tensor:
    """Unit rows around a thousand centers, as a target encoder's are around its classes."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(1000, DIM, generator=torch.Generator().manual_seed(0))
    nearby = centers[torch.randint(1000, (count,), generator=generator)]
    return F.normalize(nearby + torch.randn(count, DIM, generator=generator), dim=1)
