"""A reproduction: studies at one scale in one folder, from the plan to the page."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meanshift.config import Config, differences
from meanshift.config.parsing import setting_text
from meanshift.reproduce import archive, page, plots, publish
from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.cost import measure_cost
from meanshift.reproduce.experiment import Experiment
from meanshift.reproduce.jobs import Job, find_folder, find_runs, run_jobs, same_run
from meanshift.reproduce.label_free import MEASURES
from meanshift.reproduce.results import RANKED_BY, StudyResult, protocols
from meanshift.reproduce.studies import Study
from meanshift.runtime.files import write_text
from meanshift.viz.figures import draw_figures
from meanshift.viz.style import save

TIME_TITLE = "Accuracy by CPU time"


@dataclass
class Reproduction:
    """Studies in one folder; runs that are finished there are found and not repeated.

    >>> experiment = Experiment.open("cpu", data=None, overrides={})
    >>> reproduction = Reproduction(["k"], experiment, Path("runs/k"))
    >>> reproduction.run(["cpu"])
    >>> reproduction.write()
    """

    names: Sequence[str]
    experiment: Experiment
    out: Path
    seeds: int = 2
    archive: Path | None = None
    """a folder of finished runs without weights: those in it are not trained, others are added"""
    studies: dict[str, Study] = field(init=False)
    jobs: list[Job] = field(init=False)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"--seeds: got {self.seeds}, need 1 or more")
        self.studies = {name: self.experiment.study(name) for name in dict.fromkeys(self.names)}
        if self.archive is not None:
            archive.restore(self.archive, self.out)
        self._runs = find_runs(self.out)
        self.jobs = []
        self._jobs_by_row: dict[tuple[str, str], list[Job]] = {}
        for seed in range(self.seeds):  # the first seed of all before the second one of any
            for name, study in self.studies.items():
                if study.trains:
                    self._add_jobs(name, study, seed)

    def _add_jobs(self, name: str, study: Study, seed: int) -> None:
        """The jobs of a study; a job that another study has too is shared."""
        experiment = self.experiment
        for variant in study.variants:
            config = experiment.run_config(variant.changes, experiment.config.train.seed + seed)
            job = next((job for job in self.jobs if same_run(job.config, config)), None)
            if job is None:
                job = self._make_job(variant.title, config)
                self.jobs.append(job)
            columns = [*study.columns, *([] if variant.weights else MEASURES)]
            for protocol in protocols(columns):
                options = experiment.evaluate_options(protocol)
                job.evaluations[variant.weights, protocol] = options
            self._jobs_by_row.setdefault((name, variant.title), []).append(job)

    def _make_job(self, title: str, config: Config) -> Job:
        folder = find_folder(
            self.out,
            config,
            title,
            runs=self._runs,
            fingerprint=functools.partial(self.experiment.fingerprint, config.train.seed),
            taken=[job.folder for job in self.jobs],
        )
        return Job(
            title=f"{title}, seed {config.train.seed}",
            config=config,
            folder=folder,
            evaluations={},
            split=self.experiment.split,
            images_seen=self.experiment.images * config.train.epochs,
        )

    def plan(self) -> Iterator[str]:
        """The commands that give all runs by hand."""
        for job in self.jobs:
            yield f"# {job.title}" + (", trained" if job.trained else "")
            for words in job.commands():
                yield shlex.join(["meanshift", *words])

    def run(self, devices: Sequence[str], *, only: Sequence[str] = ()) -> list[Job]:
        """Train, evaluate and measure what is missing; returns the jobs that failed.

        `only` are titles of variants: the runs of others are left for later.
        """
        jobs = self._select(only) if only else self.jobs
        if jobs:
            run_jobs(jobs, self.out, devices, self._archive)
        if not all(study.trains for study in self.studies.values()):
            for seed in range(self.seeds):
                if self._read_cost(seed) is None:
                    self._measure_cost(seed)
        return [job for job in self.jobs if job.failure]

    def _select(self, titles: Sequence[str]) -> list[Job]:
        """The jobs of some variants, in the order of all jobs."""
        known = list(dict.fromkeys(title for _, title in self._jobs_by_row))
        for title in titles:
            if title not in known:
                raise ValueError(
                    f"--only: got {title!r}, need one or more of {', '.join(map(repr, known))}"
                )
        rows = [jobs for (_, title), jobs in self._jobs_by_row.items() if title in titles]
        selected = {id(job) for jobs in rows for job in jobs}
        return [job for job in self.jobs if id(job) in selected]

    def _archive(self, job: Job) -> None:
        if self.archive is not None:
            archive.store(job, self.archive)

    def _measure_cost(self, seed: int) -> None:
        """Measure the cost of the search once, and write it to the file of a seed."""
        config, sizes = self._cost_settings()
        self.out.mkdir(parents=True, exist_ok=True)
        cost = measure_cost(config, rounds=9, sizes=sizes)
        result = {"config": config.to_dict(), "sizes": sizes, **cost}
        write_text(self._cost_file(seed), json.dumps(result, indent=2) + "\n")

    def _read_cost(self, seed: int) -> dict[str, Any] | None:
        """The cost in the file of a seed; None if there is none with these settings."""
        path = self._cost_file(seed)
        if not path.exists():
            return None
        config, sizes = self._cost_settings()
        result: dict[str, Any] = json.loads(path.read_text())
        measured = Config.from_dict(result["config"])
        same_device = measured.train.device == config.train.device
        same = same_device and same_run(measured, config) and result["sizes"] == sizes
        return result if same else None

    def _cost_settings(self) -> tuple[Config, list[int]]:
        """The configuration whose steps are timed, and the bank sizes that are searched."""
        variants = self.experiment.study("cost").variants
        sizes = sorted({int(variant.position or 0) for variant in variants})
        return self.experiment.run_config({}, 0), sizes

    def _cost_file(self, seed: int) -> Path:
        return self.out / f"cost-{seed}.json"

    def results(self) -> list[StudyResult]:
        """The tables, as far as the runs are finished; nothing is computed."""
        return [
            self._study_result(name, study) if study.trains else self._cost_result(name, study)
            for name, study in self.studies.items()
        ]

    def _study_result(self, name: str, study: Study) -> StudyResult:
        titles = [variant.title for variant in study.variants]
        jobs = {title: self._jobs_by_row[name, title] for title in titles}
        return StudyResult.collect(name, study, jobs, has_test_split=bool(self.experiment.split))

    def _cost_result(self, name: str, study: Study) -> StudyResult:
        costs = [self._read_cost(seed) for seed in range(self.seeds)]
        measured = [cost for cost in costs if cost is not None]
        batch_size = self.experiment.config.train.batch_size
        table = {}
        for variant in study.variants:
            rows = [
                row
                for result in measured
                for row in result["card"]["settings"]["table"]
                if row["bank"] == variant.position
            ]
            values = [
                (100 * row["fraction"], row["gflops"] / batch_size, row["bytes"] / 1e6)
                for row in rows
            ]
            table[variant.title] = {
                column: Measurement(tuple(row[i] for row in values), variant.paper.get(column))
                for i, column in enumerate(study.columns)
            }
        return StudyResult(name, study, table, {})

    def write(self) -> Path:
        """Write Markdown, CSV, plots and the page; returns the path of the page."""
        results = self.results()
        self.out.mkdir(parents=True, exist_ok=True)
        plotted: dict[str, list[page.Plot]] = {}
        for result in results:
            write_text(self.out / f"{result.name}.md", result.markdown())
            write_text(self.out / f"{result.name}.csv", result.csv())
            found = [self._plot(result), self._plot_time(result)]
            plotted[result.name] = [plot for plot in found if plot is not None]
        return page.write(self, results, plotted)

    def publish(self, document: Path) -> list[str]:
        """Update the tables and figures of these studies in a document; returns their names.

        It has markers for those of an archive, so that the tables are of runs which are stored.
        """
        assert self.archive is not None
        folder = self.archive.name
        tables = {}
        for result in self.results():
            image = self.out / f"{result.name}.png"
            figures = []
            for file, text in ((image, result.study.title), (self._time_image(result), TIME_TITLE)):
                if file.exists():
                    name = f"reproduce-{folder}-{file.name}"
                    figures.append(f"![{text}]({publish.add_image(document, file, name)})")
            command = f"    {self.command([result.name], out=False)}"
            tables[result.name] = "\n\n".join([result.markdown().strip(), *figures, command, ""])
        return publish.update(document, folder, tables)

    def _time_image(self, result: StudyResult) -> Path:
        return self.out / f"{result.name}-time.png"

    def _plot(self, result: StudyResult) -> page.Plot | None:
        """A figure of all runs if the study names one, else the columns of its table."""
        titles = [variant.title for variant in result.study.variants]
        jobs = [job for title in titles for job in self._jobs_by_row.get((result.name, title), [])]
        runs = [job.run for job in jobs if job.run is not None]
        if result.study.figure and runs:
            outcome = next(draw_figures(runs, self.out, names=[result.study.figure]))
            return page.Plot(outcome.files[0], "") if outcome.files else None
        drawing = plots.draw(result)
        if drawing is None:
            return None
        files = save(drawing.figure, self.out / result.name, title=drawing.title, text=drawing.text)
        return page.Plot(files[0], drawing.text)

    def _plot_time(self, result: StudyResult) -> page.Plot | None:
        """Accuracy by CPU time of the variants of a study that compares accuracies."""
        if RANKED_BY not in result.study.columns:
            return None
        runs = {
            variant.title: [
                job.run
                for job in self._jobs_by_row.get((result.name, variant.title), [])
                if job.run is not None and job.finished
            ]
            for variant in result.study.variants
            if not variant.weights
        }
        drawing = plots.draw_cpu_time(runs, result.timed_on)
        if drawing is None:
            return None
        path = self._time_image(result).with_suffix("")
        files = save(drawing.figure, path, title=drawing.title, text=drawing.text)
        return page.Plot(files[0], drawing.text)

    def command(self, names: Sequence[str] = (), *, out: bool = True) -> str:
        """The command that gives the same again, or some of its studies."""
        experiment = self.experiment
        changes = differences(experiment.scale.config, experiment.config)
        words = ["meanshift", "reproduce", *(names or self.names), "--scale", experiment.name]
        words += ["--data", experiment.config.data.source, "--seeds", str(self.seeds)]
        for name, (_, value) in changes.items():
            if name != "data.source":
                words += [f"--{name}", setting_text(value)]
        if experiment.equal_epochs:
            words.append("--equal-epochs")
        if experiment.teacher != experiment.scale.teacher:
            words += ["--teacher", experiment.teacher]
        return shlex.join([*words, *(["--out", str(self.out)] if out else [])])
