"""What the trackers of a run contain, read by the libraries themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meanshift.config import Config
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.trackers import Trackers
from meanshift.training.trackers.base import scalars
from tests.support.processes import read_lines

Value = tuple[str, int, float]
"""name, step and value of a metric"""


def start(
    run: Path, name: str, *, warn: Callable[[str, str], None] | None = None, **settings: Any
) -> Trackers:
    """Trackers of an existing run directory; a failure is an error."""

    def fail(_: str, message: str) -> None:
        raise AssertionError(message)

    config = Config().with_overrides({"train.trackers": name, **settings})
    directory = RunDirectory(run)
    directory.begin(config, extra={})
    opened = Trackers(config, directory)
    opened.start(warn or fail)
    return opened


def line(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "epoch": 1, "loss": loss}


def expected_values(run: Path) -> list[Value]:
    """Every value of metrics.jsonl."""
    return sorted(
        (name, line["step"], float(value))
        for line in read_lines(run)
        for name, value in scalars(line).items()
    )


def tensorboard_values(run: Path) -> list[Value]:
    """All scalars of all event files, also those that TensorBoard would hide."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    return sorted(
        (value.tag, event.step, float(make_ndarray(value.tensor)))
        for path in (run / "tensorboard").iterdir()
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "scalars"
    )


def single_precision(values: list[Value]) -> list[Value]:
    """Values as TensorBoard stores them."""
    return sorted((name, step, float(np.float32(value))) for name, step, value in values)


def wandb_records(run: Path) -> Iterator[dict[str, Any]]:
    """The records of all offline runs of a run directory, which `wandb sync` would send."""
    for path in sorted((run / "wandb").glob("*run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        process = subprocess.run(
            command, cwd=run.parent, capture_output=True, text=True, check=True
        )
        for line in process.stdout.splitlines():
            yield json.loads(line)


def wandb_values(run: Path) -> list[Value]:
    rows = [record["history"] for record in wandb_records(run) if record["type"] == "history"]
    return sorted(
        (name, row["step"].get("num", 0), float(value))
        for row in rows
        for name, value in row["item"].items()
        if not name.startswith("_")
    )


def row_values(rows: list[dict[str, Any]]) -> list[Value]:
    """The values of the rows that a server of Weights & Biases has received."""
    return sorted(
        (name, row["_step"], float(value))
        for row in rows
        for name, value in row.items()
        if not name.startswith("_")
    )


def mlflow_runs(run: Path, uri: str = "") -> tuple[Any, list[Any]]:
    """A client of the store of a run directory, and all runs in it."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri or f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    experiments = client.search_experiments()
    return client, list(client.search_runs([each.experiment_id for each in experiments]))


def mlflow_values(run: Path) -> list[Value]:
    client, runs = mlflow_runs(run)
    return sorted(
        (name, metric.step, metric.value)
        for each in runs
        for name in each.data.metrics
        for metric in client.get_metric_history(each.info.run_id, name)
    )
