"""The program as a fresh process, and the files that its runs write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TINY = (
    "--data.image_size 16 --encoder.width 0.125 --train.batch_size 4 --method.bank_size 16 "
    "--train.device cpu --train.epochs 2 --optim.warmup_epochs 0 --data.workers 0 "
    "--train.snapshots 2"
).split()
"""settings with which a recipe trains within a second on a few images"""


def run_program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m meanshift` in a process of its own."""
    command = [sys.executable, "-m", "meanshift", *arguments]
    return subprocess.run(command, text=True, check=False, stderr=subprocess.PIPE, **options)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics."""
    return [record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == kind]


def read_run(run: Path) -> dict[Path, bytes]:
    """Every file of a run but its environment, which lists each session."""
    files = [path for path in run.rglob("*") if path.is_file()]
    return {
        path.relative_to(run): path.read_bytes()
        for path in files
        if path.name != "environment.json"
    }
