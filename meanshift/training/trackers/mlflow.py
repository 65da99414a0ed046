"""MLflow: a SQLite store in RUN/mlflow, unless MLFLOW_TRACKING_URI names another one."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from meanshift.config.parsing import setting_text
from meanshift.runtime.extras import require
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training.trackers.base import Line, Tracker, scalars

_ID_TAG = "meanshift.id"
_METRICS_PER_BATCH = 1000  # MLflow takes no more in one call
_PARAMS_PER_BATCH = 100


class MLflow(Tracker):
    """One run, found by a tag with the id of the run.

    A store cannot take a metric back: lines wait for the checkpoint that contains them, and steps
    that the store already has are not sent again.
    """

    def __init__(self, run_directory: RunDirectory) -> None:
        super().__init__(run_directory)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at import
        for module in ("mlflow", "sqlalchemy", "alembic"):
            require(module, extra="mlflow", what="MLflow runs (train.trackers mlflow)")
        self.pending: list[Any] = []
        self.steps: dict[str, set[int]] = {}
        """steps that the store has, by the name of the metric"""

    def start(self, lines: Sequence[Line]) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # a new store
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None
        if not uri:
            folder = (self.run_directory.folder / "mlflow").resolve()
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{folder / 'mlflow.db'}"
            artifacts = str(folder / "artifacts")
        self.client = MlflowClient(tracking_uri=uri)
        run = self._find_or_create_run(artifacts)
        self.run_id = run.info.run_id
        self._describe(run.data.params)
        for name in run.data.metrics:
            history = self.client.get_metric_history(self.run_id, name)
            self.steps[name] = {metric.step for metric in history}
        for line in lines:
            self.log(line)
        self.saved()

    def log(self, line: Line) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        for name, value in scalars(line).items():
            steps = self.steps.setdefault(name, set())
            if line["step"] not in steps:
                steps.add(line["step"])
                self.pending.append(Metric(name, float(value), now, line["step"]))

    def saved(self) -> None:
        for start in range(0, len(self.pending), _METRICS_PER_BATCH):
            batch = self.pending[start : start + _METRICS_PER_BATCH]
            self.client.log_batch(self.run_id, metrics=batch)
        self.pending.clear()

    def close(self, *, finished: bool) -> None:
        self.saved()
        self.client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")

    def _find_or_create_run(self, artifacts: str | None) -> Any:
        """The run with our id; its experiment is created where the store has none."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "meanshift"
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = self.client.create_experiment(name, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        found = self.client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{self.id}'")
        if found:
            self.client.update_run(found[0].info.run_id, status="RUNNING")
            return found[0]
        return self.client.create_run(
            experiment_id, tags={_ID_TAG: self.id}, run_name=self.folder_name
        )

    def _describe(self, known: dict[str, str]) -> None:
        """Settings as params, which MLflow never changes: one that has changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        settings = {
            f"{group}.{name}": setting_text(value)
            for group, values in self.run_directory.config.to_dict().items()
            for name, value in values.items()
        }
        params = [Param(name, value) for name, value in settings.items() if name not in known]
        for start in range(0, len(params), _PARAMS_PER_BATCH):
            self.client.log_batch(self.run_id, params=params[start : start + _PARAMS_PER_BATCH])
        changed = {
            name: settings[name]
            for name in known.keys() & settings.keys()
            if settings[name] != known[name]
        }
        facts = {
            f"environment.{name}": json.dumps(value) for name, value in self.environment.items()
        }
        tags = [RunTag(name, value) for name, value in {**changed, **facts}.items()]
        self.client.log_batch(self.run_id, tags=tags)
