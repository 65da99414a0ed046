"""How soon the front door answers, and the first step of the demo is done."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row, by_turns, timed

HELP, FIRST_STEP = 0.5, 10.0
"""seconds that a user should wait at the most"""


def rows(rounds: int) -> Iterator[Row]:
    command = [sys.executable, "-m", "meanshift"]
    took = by_turns({"help": timed(lambda: _quietly([*command, "--help"])),
                     "python": timed(lambda: _quietly([sys.executable, "-c", "pass"]))},
                    3 * rounds)  # fmt: skip
    limit = tuple(seconds / HELP for seconds in took["help"])
    yield Row("start: --help / half a second", limit, 1.0, at_most=True)
    over_python = tuple(a / b for a, b in zip(took["help"], took["python"], strict=True))
    yield Row("start: --help / python -c pass", over_python)
    first = tuple(_first_step(command) / FIRST_STEP for _ in range(max(1, rounds - 1)))
    yield Row("start: the demo's first training step / ten seconds", first, 1.0, at_most=True)


def _quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _first_step(command: list[str]) -> float:
    """Seconds from the command to the record of its first step, monitor and snapshot before it."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "demo" / "metrics.jsonl"
        begun = time.perf_counter()
        demo = subprocess.Popen(
            [*command, "demo", "--out", str(metrics.parent), "--train.log_every", "1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while not (metrics.exists() and '"kind": "train"' in metrics.read_text()):
                if demo.poll() is not None:
                    raise RuntimeError(f"the demo ended with {demo.returncode} before its step")
                time.sleep(0.01)
            return time.perf_counter() - begun
        finally:
            demo.kill()
            demo.wait()
