"""The page of a reproduction: tables beside the paper's, verdicts on claims, card and commands."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meanshift.config.recipes import command_for
from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.jobs import Job
from meanshift.reproduce.results import RANKED_BY, StudyResult
from meanshift.runtime.files import write_text
from meanshift.viz.report.template import render
from meanshift.viz.run_reader import Run
from meanshift.viz.style import DPI

if TYPE_CHECKING:
    from meanshift.reproduce.reproduction import Reproduction


@dataclass(frozen=True)
class Plot:
    """The image of a study, and its description."""

    path: Path
    text: str

    @property
    def url(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode()}"

    @property
    def width(self) -> int:
        """In CSS pixels, so that its text has the size of the page's text."""
        from PIL import Image

        with Image.open(self.path) as image:
            return round(image.width * 100 / DPI)


def write(
    reproduction: Reproduction,
    results: Sequence[StudyResult],
    plots: Mapping[str, Sequence[Plot]],
) -> Path:
    """Write `reproduce.html` beside the tables."""
    text = render(
        "reproduce.html",
        title=f"Mean Shift, reproduced at scale {reproduction.experiment.name}",
        summary=_summary(reproduction),
        failed=[(job.title, job.failure) for job in reproduction.jobs if job.failure],
        studies=[_study(reproduction, each, plots.get(each.name, ())) for each in results],
        card=_card(reproduction),
        runs=[_run(job) for job in reproduction.jobs],
        ranked_by=RANKED_BY,
        command=reproduction.command(),
    )
    path = reproduction.out / "reproduce.html"
    write_text(path, text)
    return path


def _summary(reproduction: Reproduction) -> str:
    experiment = reproduction.experiment
    config = experiment.config
    encoder = config.encoder
    trained = sum(job.trained for job in reproduction.jobs)
    return (
        f"{experiment.images:,} images of {config.data.source}, {encoder.name} "
        f"({encoder.stem} stem, width {encoder.width:g}), {config.train.epochs} epochs; "
        f"accuracies in % on the {experiment.split or 'validation'} images. {trained} of "
        f"{len(reproduction.jobs)} runs are trained."
    )


def _study(
    reproduction: Reproduction, result: StudyResult, plots: Sequence[Plot]
) -> dict[str, Any]:
    further = result.further_columns()
    return {
        "name": result.name,
        "title": result.study.title,
        "columns": [*result.study.columns, *further],
        "rows": [
            {
                "title": title,
                "measurements": [
                    *row.values(),
                    *(each.get(title, Measurement()) for each in further.values()),
                ],
            }
            for title, row in result.table.items()
        ],
        "verdicts": result.verdicts(),
        "best": result.best(),
        "has_paper": any(variant.paper for variant in result.study.variants),
        "plots": plots,
        "choices": result.choices(),
        "command": reproduction.command([result.name]),
    }


def _card(reproduction: Reproduction) -> list[tuple[str, str]]:
    """What all runs share, and the machines that they ran on."""
    experiment = reproduction.experiment
    config = experiment.config
    runs = [job.run for job in reproduction.jobs if job.run is not None]
    first_seed = config.train.seed
    seeds = range(first_seed, first_seed + reproduction.seeds)
    linear = " ".join(experiment.scale.linear_options) or "on views"
    return [
        ("scale", f"{experiment.name}: {experiment.scale.description}"),
        (
            "images",
            f"{config.data.source}: {experiment.images:,} to train on; validation: "
            f"{config.data.validation}; metrics of: {experiment.split or 'validation'} images",
        ),
        ("seeds", ", ".join(map(str, seeds))),
        ("k-NN", "exact, cosine, plain vote, on the frozen online backbone"),
        ("linear and few labels", f"the paper's layer, {linear}"),
        ("±", "one standard deviation over seeds (n - 1)"),
        (
            "a claim holds",
            "if the 95% interval of the difference, paired by seed (Student's t), is on its side "
            "of zero, in all of its columns",
        ),
        *_environments(runs),
    ]


def _environments(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Machines, versions and commits of the runs; all values are listed where they differ."""
    values_by_name: dict[str, list[str]] = {}
    for run in runs:
        for session in [*run.environment.get("earlier", []), run.environment]:
            machine = session.get("machine", {})
            versions = session.get("versions", {})
            facts = {
                "device": session.get("device"),
                "precision": session.get("precision"),
                "threads": session.get("threads"),
                "cores": machine.get("cores"),
                "torch": versions.get("torch"),
                "meanshift": versions.get("meanshift"),
                "commit": session.get("commit"),
            }
            for name, value in facts.items():
                values = values_by_name.setdefault(name, [])
                if value and str(value) not in values:
                    values.append(str(value))
    return [(name, ", ".join(values)) for name, values in values_by_name.items() if values]


def _run(job: Job) -> dict[str, Any]:
    done, total = job.steps
    state = "trained" if job.trained else f"step {done} of {total}" if total else "not begun"
    return {
        "title": job.title,
        "state": f"failed: {job.failure}" if job.failure else state,
        "command": command_for(job.config, str(job.folder)),
    }
