"""The whole demo against its training, and its start from principal components."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from benchmarks.table import Row
from meanshift.config.recipes import recipe
from meanshift.data import open_source
from meanshift.models.encoder import build_backbone
from meanshift.models.initialization import initialize_from_images

START_SECONDS = 3.0
"""CPU time that the start may take"""

_PROGRAM = """
import json, sys, time
from meanshift import cli
from meanshift.cli import demo

train, seconds = demo.train, []

def timed(*arguments):
    start = time.process_time()
    train(*arguments)
    seconds.append(time.process_time() - start)

demo.train = timed
cli.main(["demo", "--out", *sys.argv[1:]])
print(json.dumps([time.process_time(), *seconds]))
"""


def rows(rounds: int) -> Iterator[Row]:
    """CPU time of one thread, imports included; two demos, which take some minutes each.

    Without native bfloat16 the second one is emulated, which is slow: its ratio says little there.
    """
    starts = tuple(start_seconds() / START_SECONDS for _ in range(rounds))
    yield Row("demo: start from principal components / 3 CPU seconds", starts, 1.0, at_most=True)
    for precision in ("float32", "bfloat16"):
        whole, training = demo_seconds(precision)
        what = f"demo in {precision}: whole / its training (CPU time)"
        yield Row(what, (whole / training,), 1.1, at_most=True)


def start_seconds() -> float:
    """CPU seconds of the start of the demo's encoder."""
    config = recipe("demo")
    source = open_source("sample")["train"]
    network, _ = build_backbone(config.encoder, image_size=config.data.image_size)
    start = time.process_time()
    initialize_from_images(
        getattr(network, "network", network),
        source,
        image_size=config.data.image_size,
        seed=0,
        device=torch.device("cpu"),
    )
    return time.process_time() - start


def demo_seconds(precision: str) -> tuple[float, float]:
    """CPU seconds of a whole demo in a process of its own, and of its training."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, f"{folder}/demo", "--train.precision", precision],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            text=True,
        )
    whole, training = json.loads(done.stdout.splitlines()[-1])
    return whole, training
