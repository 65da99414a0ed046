"""Run tables: ratios on the screen, and in a file with the description of the machine."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import Row, format_rows
from meanshift.runtime.device import pick_precision
from meanshift.runtime.files import write_text
from meanshift.runtime.run_directory import environment


def run_tables(
    names: Sequence[str],
    *,
    rounds: int,
    out: Path,
    photos: Path | None = None,
    features: Path | None = None,
) -> list[Row]:
    """Measure, print each row when it is measured, and write all rows to `out`/bench.json."""
    options: dict[str, dict[str, Any]] = {
        "growth": {"out": out},
        "decoding": {"photos": photos},
        "evaluation": {"features_file": features},
    }
    rows: list[Row] = []
    print(format_rows([]), flush=True)
    for name in names:
        table = importlib.import_module(f"benchmarks.{name}")
        for row in table.rows(rounds, **options.get(name, {})):
            rows.append(row)
            print(format_rows([row]).partition("\n")[2], flush=True)
    about = environment()
    about["machine"] |= {
        "memory": _memory(),
        "threads": torch.get_num_threads(),
        "native precision": str(pick_precision("auto", torch.device("cpu"))),
    }
    contents = {"rounds": rounds, "rows": [row.to_dict() for row in rows], **about}
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "bench.json", json.dumps(contents, indent=2) + "\n")
    print(f"\nwritten to {out / 'bench.json'}")
    return rows


def _memory() -> str:
    file = Path("/proc/meminfo")
    return file.read_text().partition("\n")[0].partition(":")[2].strip() if file.exists() else ""
