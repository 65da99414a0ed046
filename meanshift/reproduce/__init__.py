"""`meanshift reproduce`: the paper's tables and ablations, at a scale that can be run."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meanshift.config import Config, differences
from meanshift.reproduce import jobs, page
from meanshift.reproduce.claims import Cell
from meanshift.reproduce.cost import bench_cost
from meanshift.reproduce.drawing import draw
from meanshift.reproduce.jobs import Job, same
from meanshift.reproduce.scales import SCALES, Base
from meanshift.reproduce.sheet import Sheet, protocols
from meanshift.reproduce.studies import STUDIES, Study
from meanshift.runtime.run_directory import write_text
from meanshift.viz.figures import draw_figures
from meanshift.viz.style import save

__all__ = ["SCALES", "STUDIES", "Reproduction"]


@dataclass
class Reproduction:
    """Studies at one scale, in one folder; finished runs in it are found and not repeated.

    >>> whole = Reproduction(["k"], Base.of("cpu", data=None, overrides={}), Path("runs/k"))
    >>> whole.work(["cpu"])
    >>> whole.write()
    """

    names: Sequence[str]
    base: Base
    out: Path
    seeds: int = 2
    studies: dict[str, Study] = field(init=False)
    jobs: list[Job] = field(init=False)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"--seeds: got {self.seeds}, need 1 or more")
        self.studies = {name: self.base.study(name) for name in dict.fromkeys(self.names)}
        self.jobs, self._by_row = [], dict[tuple[str, str], list[Job]]()
        for seed in range(self.seeds):  # the first seed of all before the second of any
            for name, study in self.studies.items():
                if not study.measured:
                    self._add(name, study, seed)

    def _add(self, name: str, study: Study, seed: int) -> None:
        """The jobs of a study; one that another study has asked for already is shared."""
        for variant in study.variants:
            config = self.base.run(variant.changes, self.base.config.train.seed + seed)
            job = next((job for job in self.jobs if same(job.config, config)), None)
            if job is None:
                job = self._job(variant.title, config)
                self.jobs.append(job)
            job.judge |= {each: self.base.judge(each) for each in protocols(study.columns)}
            self._by_row.setdefault((name, variant.title), []).append(job)

    def _job(self, title: str, config: Config) -> Job:
        taken = [job.folder for job in self.jobs]
        images = functools.partial(self.base.fingerprint, config.train.seed)
        folder = jobs.find(self.out, config, title, images, taken)
        views = self.base.images * config.train.epochs
        told = f"{title}, seed {config.train.seed}"
        return Job(told, config, folder, {}, self.base.split, views)

    def plan(self) -> Iterator[str]:
        """What would be typed to have all of it, by hand."""
        for job in self.jobs:
            yield f"# {job.title}" + (", trained" if job.trained else "")
            for words in job.commands():
                yield shlex.join(["meanshift", *words])

    def work(self, devices: Sequence[str]) -> list[Job]:
        """Train, judge and measure what is missing; gives the jobs that failed."""
        if self.jobs:
            jobs.work(self.jobs, self.out, devices)
        for at in range(self.seeds if self._measures() else 0):
            self._cost(at)
        return [job for job in self.jobs if job.failure]

    def _measures(self) -> bool:
        return any(study.measured for study in self.studies.values())

    def _cost(self, at: int) -> dict[str, Any]:
        """The cost of searching, measured once a seed; kept for the same network and batch."""
        path, config = self.out / f"cost-{at}.json", self.base.run({}, 0)
        sizes = sorted({int(v.at or 0) for v in self.base.study("cost").variants})
        if path.exists():
            held: dict[str, Any] = json.loads(path.read_text())
            known = Config.from_dict(held["config"])
            device = known.train.device == config.train.device
            if device and same(known, config) and held["sizes"] == sizes:
                return held
        self.out.mkdir(parents=True, exist_ok=True)
        held = {"config": config.to_dict(), "sizes": sizes}
        held |= bench_cost(config, rounds=9, sizes=sizes)
        write_text(path, json.dumps(held, indent=2) + "\n")
        return held

    def sheets(self) -> list[Sheet]:
        """The tables, as far as the runs have come."""
        return [
            self._measured(name, study)
            if study.measured
            else Sheet.of(
                name,
                study,
                {v.title: self._by_row[name, v.title] for v in study.variants},
                apart=bool(self.base.split),
            )
            for name, study in self.studies.items()
        ]

    def _measured(self, name: str, study: Study) -> Sheet:
        found = [
            self._cost(at) for at in range(self.seeds) if (self.out / f"cost-{at}.json").exists()
        ]
        table = {}
        for variant in study.variants:
            rows = [
                row
                for held in found
                for row in held["card"]["settings"]["table"]
                if row["bank"] == variant.at
            ]
            batch = self.base.config.train.batch_size
            told = [(100 * r["share"], r["gflops"] / batch, r["bytes"] / 1e6) for r in rows]
            table[variant.title] = {
                column: Cell(tuple(row[i] for row in told), variant.paper.get(column))
                for i, column in enumerate(study.columns)
            }
        return Sheet(name, study, table, {})

    def write(self) -> Path:
        """Markdown, CSV, images and the page; gives the page's path."""
        sheets, images = self.sheets(), dict[str, tuple[Path, str]]()
        self.out.mkdir(parents=True, exist_ok=True)
        for sheet in sheets:
            write_text(self.out / f"{sheet.name}.md", sheet.markdown())
            write_text(self.out / f"{sheet.name}.csv", sheet.csv())
            runs = [
                run
                for v in sheet.study.variants
                for job in self._by_row.get((sheet.name, v.title), [])
                if (run := job.look()) is not None
            ]
            if sheet.study.drawn and runs:
                outcome = next(draw_figures(runs, self.out, names=[sheet.study.drawn]))
                if outcome.files:
                    images[sheet.name] = outcome.files[0], ""
            elif (drawing := draw(sheet)) is not None:
                files = save(
                    drawing.figure, self.out / sheet.name, title=drawing.title, text=drawing.text
                )
                images[sheet.name] = files[0], drawing.text
        return page.write(self, sheets, images)

    def command(self, names: Sequence[str] = ()) -> str:
        """What to type for the same again."""
        apart = differences(self.base.scale.config, self.base.config)
        changed = {name: now for name, (_, now) in apart.items() if name != "data.source"}
        words = ["meanshift", "reproduce", *(names or self.names), "--scale", self.base.name]
        words += ["--data", self.base.config.data.source, "--seeds", str(self.seeds)]
        for name, value in changed.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{name}", text]
        return shlex.join([*words, "--out", str(self.out)])
