"""Time until --help is printed, until an image is embedded, and until the demo has taken a step."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row, alternate, cpu_seconds, ratios, timed

HELP_SECONDS = 0.5
EMBED_SECONDS = 3.0
FIRST_STEP_SECONDS = 10.0
"""what a user should wait at most"""

_EMBED = """
import numpy
import meanshift
meanshift.load("meanshift:cifar10-small").embed(numpy.zeros((32, 32, 3), numpy.uint8))
"""

_PROGRAM = [sys.executable, "-m", "meanshift"]


def rows(rounds: int) -> Iterator[Row]:
    seconds = alternate(
        {
            "help": timed(lambda: _run([*_PROGRAM, "--help"])),
            "python": timed(lambda: _run([sys.executable, "-c", "pass"])),
        },
        3 * rounds,
    )
    of_limit = tuple(each / HELP_SECONDS for each in seconds["help"])
    yield Row("start: --help / half a second", of_limit, 1.0, at_most=True)
    yield Row("start: --help / python -c pass", ratios(seconds["help"], seconds["python"]))
    embed = [sys.executable, "-c", _EMBED]
    seconds = alternate(
        {
            "elapsed": timed(lambda: _run(embed)),
            "CPU": timed(lambda: _run(embed), clock=cpu_seconds),
        },
        rounds,
    )
    for clock, measured in seconds.items():
        of_limit = tuple(each / EMBED_SECONDS for each in measured)
        title = f"start: import, load, embed an image / three seconds ({clock} time)"
        yield Row(title, of_limit, 1.0, at_most=True)
    first = tuple(_first_step() / FIRST_STEP_SECONDS for _ in range(max(1, rounds - 1)))
    yield Row("start: first training step of the demo / ten seconds", first, 1.0, at_most=True)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _first_step() -> float:
    """Seconds from the command to the record of its first step, after monitor and snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "demo" / "metrics.jsonl"
        start = time.perf_counter()
        demo = subprocess.Popen(
            [*_PROGRAM, "demo", "--out", str(metrics.parent), "--train.log_every", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (metrics.exists() and '"kind": "train"' in metrics.read_text()):
                if demo.poll() is not None:
                    raise RuntimeError(f"the demo ended with {demo.returncode} before its step")
                time.sleep(0.01)
            return time.perf_counter() - start
        finally:
            demo.kill()
            demo.wait()
