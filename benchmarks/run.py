"""Every table in one run: ratios on the screen, and in a file with the machine's description."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.table import Row, describe
from meanshift.runtime.device import pick_precision
from meanshift.runtime.run_directory import environment, write_text


def run(
    names: Sequence[str],
    *,
    rounds: int,
    out: Path,
    photos: Path | None = None,
    features: Path | None = None,
) -> list[Row]:
    """Measure, print each row as soon as it is known, and keep all in `out`/bench.json."""
    rows: list[Row] = []
    print(describe([]), flush=True)
    for name in names:
        given: dict[str, Path | None] = {"out": out} if name == "growth" else {}
        given |= {"folder": photos} if name == "files" else {}
        given |= {"embedded": features} if name == "judging" else {}
        for row in importlib.import_module(f"benchmarks.{name}").rows(rounds, **given):
            rows.append(row)
            print(describe([row]).partition("\n")[2], flush=True)
    about = environment()
    about["machine"] |= {
        "processor": _processor(),
        "memory": _memory(),
        "threads": torch.get_num_threads(),
        "native precision": str(pick_precision("auto", torch.device("cpu"))),
    }
    told = {"rounds": rounds, "rows": [row.to_dict() for row in rows], **about}
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "bench.json", json.dumps(told, indent=2) + "\n")
    print(f"\nkept in {out / 'bench.json'}")
    return rows


def _processor() -> str:
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def _memory() -> str:
    told = Path("/proc/meminfo")
    return told.read_text().partition("\n")[0].partition(":")[2].strip() if told.exists() else ""
