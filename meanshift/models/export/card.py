"""The model card of an export, from the settings of its run and the cards of its results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meanshift.models.export.counterparts import describe, in_timm
from meanshift.models.export.job import Job
from meanshift.models.weights import fingerprint
from meanshift.runtime.run_directory import RunDirectory, environment

_TASKS = {"image": "image-feature-extraction", "signal": "feature-extraction"}
"""what the Hub calls the tasks of a backbone, by what it takes"""


def model_card(job: Job, programs: Mapping[str, str]) -> str:
    """The text of README.md: what the weights are, take, reach, come from, and how to load them."""
    config = job.weights.config
    assert config is not None
    run = job.weights.output_dir.resolve().name
    parts = [
        _front_matter(job, config.method.name, timm="timm" in programs),
        f"# {run}: {describe(job.weights)} trained by {config.method.name}",
        f"A network without a classifier, trained without labels: a sample of "
        f"{job.preprocessing['kind']} data gives {job.features} features. It was exported by "
        f"meanshift {environment()['versions']['meanshift']} from {job.weights.title} (weights "
        f"`{fingerprint(job.weights.backbone)}`).",
        _input_section(job),
        _result_section(job),
        _training_section(job),
        _loading_section(job, programs),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(job: Job, method: str, *, timm: bool) -> str:
    tags = ["meanshift", "self-supervised-learning", method, *(["timm"] if timm else [])]
    lines = [
        "---",
        f"license: {job.license}",
        f"library_name: {'timm' if timm else 'meanshift'}",
        f"pipeline_tag: {_TASKS.get(job.kind, 'feature-extraction')}",
        "tags:",
        *(f"- {json.dumps(tag)}" for tag in tags),
        "---",
    ]
    return "\n".join(lines)


def _input_section(job: Job) -> str:
    rows = [(name, value) for name, value in job.preprocessing.items() if name != "rule"]
    rule = str(job.preprocessing["rule"])
    return f"## Input\n\n{_table(('setting', 'value'), rows)}\n\n{rule[0].upper()}{rule[1:]}."


def _result_section(job: Job) -> str:
    rows = []
    commands = []
    for metrics, card in own_results(job):
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        sizes = ", ".join(f"{count} {name}" for name, count in card.get("sizes", {}).items())
        data = " ".join(filter(None, [str(card.get("data", "")), f"({sizes})" if sizes else ""]))
        settings = _short(card.get("settings", {}))
        rows.append((card.get("protocol"), values, data, card.get("split", ""), settings))
        commands.append(_command(card.get("command", [])))
    if not rows:
        return (
            "## Results\n\nThese weights have not been evaluated: "
            f"`meanshift evaluate knn {shlex.quote(str(job.weights.output_dir))}` does it."
        )
    header = ("protocol", "metrics (accuracy in percent)", "data", "split", "settings")
    unique = "\n".join(f"    {command}" for command in dict.fromkeys(commands))
    return f"## Results\n\n{_table(header, rows)}\n\nCommands:\n\n{unique}"


def own_results(job: Job) -> Iterator[tuple[dict[str, float], dict[str, Any]]]:
    """Metrics and cards of the results of exactly these weights, in the order of their names."""
    weights = fingerprint(job.weights.backbone)
    for path in sorted(RunDirectory(job.weights.output_dir).results.glob("*.json")):
        try:
            result = json.loads(path.read_bytes())
            card = result["card"]
            if card.get("weights") == weights:
                yield {name: float(value) for name, value in result["metrics"].items()}, card
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path}: no result that can be read; evaluate again, or delete it"
            ) from None


def _training_section(job: Job) -> str:
    config = job.weights.config
    assert config is not None
    rows: list[tuple[Any, ...]] = [
        ("method", config.method.name),
        ("network", describe(job.weights)),
        ("data", config.data.source),
        ("epochs", config.train.epochs),
        ("batch size", config.train.batch_size),
        ("image size", config.data.image_size),
        ("seed", config.train.seed),
    ]
    if config.encoder.weights:
        rows.append(("start", config.encoder.weights))
    history = RunDirectory(job.weights.output_dir).environment
    if history.get("images"):
        rows.append(("training samples", history["images"]))
    versions = history.get("versions", {})
    if versions:
        rows.append(("versions", ", ".join(f"{name} {versions[name]}" for name in versions)))
        rows.append(("date", history.get("date", "")))
    command = _command(history.get("command", []))
    text = f"## Training\n\n{_table(('setting', 'value'), rows)}"
    return f"{text}\n\nCommand:\n\n    {command}" if command else text


def _loading_section(job: Job, programs: Mapping[str, str]) -> str:
    parts = [
        f"## How to load\n\n`images` is a float32 array of normalized {job.input}, "
        f"`(n, {', '.join(map(str, job.shape))})`. For a repository on the Hub write its name "
        f"instead of the folder: `hf:OWNER/NAME` here, `hf-hub:OWNER/NAME` in timm."
    ]
    parts += [f"With {program}:\n\n```python\n{programs[program]}\n```" for program in programs]
    if in_timm(job.weights) is None:
        parts.append(
            f"timm does not have this network ({describe(job.weights)}); for other programs, "
            f"`meanshift export` writes ONNX."
        )
    return "\n\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _short(settings: Mapping[str, Any]) -> str:
    """Settings in one cell of a table."""
    return ", ".join(f"{name}: {value}" for name, value in settings.items())


def _command(words: Sequence[str]) -> str:
    """A command as it is typed: the program by its name, not by where it was installed."""
    if not words:
        return ""
    program = Path(words[0])
    if program.name in ("__main__.py", "meanshift"):
        return shlex.join(["meanshift", *words[1:]])
    return shlex.join(["python", program.name, *words[1:]])
