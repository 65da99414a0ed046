"""Finished runs without their weights, as small files that can be committed to a repository.

A file contains what tables, figures and claims need of a run: settings, metrics by epoch, results
with their cards, and the environment. A reproduction in another folder, or on another machine,
restores them as run directories without checkpoints and does not train them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meanshift.config.recipes import command_for
from meanshift.reproduce.jobs import ARCHIVED, Job
from meanshift.runtime.files import write_text
from meanshift.viz.run_reader import is_number

_ENVIRONMENT = (
    "date python versions commit device precision threads processes source images steps start"
).split()
_CARD = "protocol settings train test fingerprint encoder date versions".split()


def store(job: Job, archive: Path) -> Path | None:
    """Write the file of a run that is trained and evaluated; None if it is not.

    A file that is there already is replaced, since a study may have added results.
    """
    run = job.run
    if run is None or not job.trained or any(job.commands()):
        return None
    path = archive / f"{job.folder.name}.json"
    if job.archived and path.is_file():
        stored = json.loads(path.read_text())
        if stored["results"].keys() >= run.results.keys():  # nothing was added here
            return None
    environment = run.environment
    machine = environment.get("machine", {})
    content = {
        "title": job.title,
        "command": command_for(job.config, f"runs/{job.folder.name}"),
        "config": json.loads(run.directory.config.to_json()),
        "environment": {
            **{name: environment[name] for name in _ENVIRONMENT if name in environment},
            "machine": {name: machine[name] for name in ("cpu", "cores") if name in machine},
        },
        "metrics": _round(by_epoch(run.lines("metrics.jsonl"))),
        "warnings": run.warnings,
        "results": {
            name: {
                "metrics": _round([result["metrics"]])[0],
                "card": {
                    key: _without_parents(result["card"][key], job.folder)
                    for key in _CARD
                    if key in result["card"]
                },
            }
            for name, result in run.results.items()
        },
    }
    archive.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")
    return path


def by_epoch(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records of metrics.jsonl, those of training steps as one for each epoch.

    It contains the means over the steps of the epoch; `cpu_seconds` is their sum.
    """
    merged: list[dict[str, Any]] = []
    previous = 0
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    epoch: dict[str, Any] | None = None
    for record in records:
        if record["kind"] != "train":
            merged.append(dict(record))
            continue
        if epoch is None or epoch["epoch"] != record["epoch"]:
            epoch, sums, counts = {}, {}, {}
            merged.append(epoch)
        steps = record["step"] - previous
        previous = record["step"]
        epoch.update(record)
        for name, value in record.items():
            if name in ("step", "epoch") or not is_number(value):
                continue
            weight = 1 if name == "cpu_seconds" else steps
            sums[name] = sums.get(name, 0.0) + weight * value
            counts[name] = 1 if name == "cpu_seconds" else counts.get(name, 0) + steps
        epoch.update({name: total / counts[name] for name, total in sums.items() if counts[name]})
    return merged


def restore(archive: Path, out: Path) -> list[Path]:
    """Make a run directory in `out/runs` for each file.

    A run that was trained there is left alone; one that was restored is written again, since its
    file may have further results by now.
    """
    restored = []
    for path in sorted(archive.glob("*.json")):
        folder = out / "runs" / path.stem
        is_restored = (folder / ARCHIVED).exists() and not (folder / "checkpoints").exists()
        if (folder / "config.json").exists() and not is_restored:
            continue
        try:
            content = json.loads(path.read_text())
            files = {
                "environment.json": json.dumps(content["environment"]),
                "metrics.jsonl": _lines(content["metrics"]),
                "warnings.jsonl": _lines(content["warnings"]),
                **{
                    f"results/{name}.json": json.dumps(result)
                    for name, result in content["results"].items()
                },
                ARCHIVED: json.dumps({"file": path.name, "command": content["command"]}),
                "config.json": json.dumps(content["config"]),  # last: it makes the folder a run
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: not the archive of a run ({error!r}); move it away, and the same command "
                f"trains the run again"
            ) from None
        (folder / "results").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
        restored.append(folder)
    return restored


def _without_parents(value: Any, folder: Path) -> Any:
    """A text with the folder of a run as `runs/NAME`, wherever it is on this machine."""
    if not isinstance(value, str):
        return value
    return value.replace(str(folder), f"runs/{folder.name}")


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _round(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Six digits of each number."""
    return [
        {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in record.items()
        }
        for record in records
    ]


def folder_name(scale: str, source: str) -> str:
    """The name of the archive of a scale and its images: `cpu-cifar10`."""
    return re.sub(r"[^a-z0-9]+", "-", f"{scale}-{Path(source).stem}".lower()).strip("-")
