"""Exact k-NN over a mapped file: time and memory by rows, extrapolated to 10 million."""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.table import Row, cpu_seconds, timed
from benchmarks.worker import Worker
from meanshift.evaluation.knn import neighbors

ROWS = (125_000, 250_000, 500_000, 1_000_000)
QUERIES, WIDTH, K = 1_000, 512, 20
EXTRAPOLATED = 10_000_000
MEMORY = 24 * 10**9
"""bytes that a machine has for 10 million rows"""
_GENERATED = 50_000  # rows at a time


def rows(rounds: int) -> Iterator[Row]:
    """The rows of the table; the file has 2 GB."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "features.npy"
        write_features(file)
        worker = Worker(measure_searches, file, max(1, rounds - 1))
        seconds, memory = worker.next()
        worker.close()
    exponent = slope(ROWS, seconds)
    name = f"{K}-NN, {QUERIES:,} queries, mapped rows of {WIDTH}"
    yield Row(
        f"{name}: exponent of CPU time by rows",
        (exponent,),
        1.05,
        at_most=True,
        note=f"{ROWS[0]:,} to {ROWS[-1]:,} rows, one thread; {EXTRAPOLATED:,} rows take "
        f"{(EXTRAPOLATED / ROWS[-1]) ** exponent:.1f} times as long as {ROWS[-1]:,}",
    )
    for count, used in ((ROWS[0], memory[0]), (ROWS[-1], memory[-1])):
        title = f"{name}: memory of {count:,} beside the file / 1 GB"
        yield Row(title, (used / 1e9,), 1.0, at_most=True)
    growth = max(0.0, (memory[-1] - memory[0]) / (ROWS[-1] - ROWS[0]))
    extra = memory[-1] + growth * (EXTRAPOLATED - ROWS[-1])
    for title, used in (
        ("memory beside the file", extra),
        ("the same with the whole file in memory", extra + 4 * WIDTH * EXTRAPOLATED),
    ):
        yield Row(
            f"{name}: {EXTRAPOLATED:,}, {title} / 24 GB",
            (used / MEMORY,),
            1.0,
            at_most=True,
            note="extrapolated",
        )


def write_features(file: Path) -> None:
    """Write random rows in overlapping classes, a part at a time."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(100, WIDTH, generator=generator)
    mapped = np.lib.format.open_memmap(file, "w+", np.float32, (ROWS[-1], WIDTH))
    for start in range(0, ROWS[-1], _GENERATED):
        count = min(_GENERATED, ROWS[-1] - start)
        classes = torch.randint(100, (count,), generator=generator)
        noise = torch.randn(count, WIDTH, generator=generator)
        mapped[start : start + count] = (centers[classes] + noise).numpy()
    mapped.flush()


def measure_searches(file: Path, rounds: int) -> Iterator[tuple[list[float], list[int]]]:
    """CPU seconds and bytes of memory of a search in the first rows, for each number of rows.

    Pages of the file are not counted: the system takes them back when it needs memory.
    """
    torch.set_num_threads(1)
    features = torch.from_numpy(np.lib.format.open_memmap(file, mode="c"))
    queries = F.normalize(torch.randn(QUERIES, WIDTH), dim=1)
    _search(features[: ROWS[0]], queries)  # the first search allocates memory
    yield [], []
    seconds: list[float] = []
    memory: list[int] = []
    for count in ROWS:
        times = []
        with PeakMemory() as peak:
            for _ in range(rounds):
                measure = timed(lambda n=count: _search(features[:n], queries), cpu_seconds)  # type: ignore[misc]
                times.append(measure())
        seconds.append(min(times))
        memory.append(peak.bytes)
    yield seconds, memory


def _search(features: torch.Tensor, queries: torch.Tensor) -> None:
    for _ in neighbors(features, queries, K, exact_similarities=False):
        pass


def slope(counts: tuple[int, ...], seconds: list[float]) -> float:
    """The exponent of a power law through the points, by least squares."""
    x = np.log(counts)
    y = [math.log(each) for each in seconds]
    return float(np.polyfit(x, y, 1)[0])


class PeakMemory:
    """The highest memory of this process that is no page of a file, read every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Memory of this process beside mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
