"""Runs as processes: one after another, or side by side on devices; they can be stopped."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from meanshift.config import Config, differences, resume_safe
from meanshift.config.recipes import command_for
from meanshift.evaluation.result import result_name
from meanshift.runtime.files import exclusive_lock
from meanshift.runtime.progress import progress
from meanshift.runtime.signals import Stopped, catch_signals
from meanshift.viz.run_reader import Run

ARCHIVED = "archived.json"
"""the file that marks a run directory as restored from an archive, without weights"""


@dataclass
class Job:
    """A run to be trained and evaluated in its folder."""

    title: str
    config: Config
    folder: Path
    evaluations: dict[tuple[str, str], Sequence[str]]
    """the options of `meanshift evaluate` by weights ("": the trained ones, or `random`) and
    protocol"""
    split: str
    images_seen: int
    """images of all epochs together, for the time that is left"""
    failure: str = ""
    _run: Run | None = field(default=None, init=False, repr=False)

    @property
    def run(self) -> Run | None:
        """The run as far as it is trained; None before it has begun."""
        if self._run is None and (self.folder / "config.json").is_file():
            self._run = Run(self.folder)
        return self._run

    @property
    def steps(self) -> tuple[int, int]:
        """(done, total); the total is 0 before the run has begun."""
        run = self.run
        if run is None or "steps" not in run.environment:
            return 0, 0
        last = max((record["step"] for record in run.lines("metrics.jsonl")), default=0)
        return last, int(run.environment["steps"])

    @property
    def finished(self) -> bool:
        """Whether the run was trained to its end, here or where it was stored."""
        done, total = self.steps
        return 0 < total == done and (self._last_checkpoint.is_file() or self._restored)

    @property
    def trained(self) -> bool:
        """Whether the run need not be trained: it is finished, and has its weights or results."""
        return self.finished and (self._last_checkpoint.is_file() or self.archived)

    @property
    def archived(self) -> bool:
        """Whether the run has no weights, but all results that need them."""
        return self._restored and all(
            self.result(protocol) is not None
            for weights, protocol in self.evaluations
            if not weights  # others, such as random ones, need only its settings
        )

    @property
    def _restored(self) -> bool:
        return (self.folder / ARCHIVED).is_file() and not self._last_checkpoint.is_file()

    @property
    def _last_checkpoint(self) -> Path:
        return self.folder / "checkpoints" / f"step-{self.steps[1]:09d}.pt"

    def result(self, protocol: str, weights: str = "") -> dict[str, Any] | None:
        """The result of a protocol, unless it is of weights before the last ones."""
        if self.run is None:
            return None
        words = self.evaluations.get((weights, protocol), ())
        fractions = [float(word) for word in words if not word.startswith("-")]
        options = {"fractions": fractions} if fractions else {}
        name = f"{protocol}-cached" if "--cached" in words else protocol
        result = self.run.results.get(result_name(name, weights, self.split, options=options))
        return None if result is None or self.run.outdated(result) else result

    def commands(self) -> Iterator[list[str]]:
        """The commands that are still to be run, the training first."""
        if not self.trained:
            yield shlex.split(command_for(self.config, str(self.folder)))[1:]
        for weights in dict.fromkeys(weights for weights, _ in self.evaluations):
            missing = {
                protocol: options
                for (evaluated, protocol), options in self.evaluations.items()
                if evaluated == weights and self.result(protocol, weights) is None
            }
            if missing:
                spec = f"{weights}:{self.folder}" if weights else str(self.folder)
                split = ["--split", self.split] if self.split else []
                options = dict.fromkeys(word for words in missing.values() for word in words)
                device = ["--device", self.config.train.device]
                yield ["evaluate", *missing, spec, *split, *device, *options]


def same_run(one: Config, other: Config) -> bool:
    """Whether two configurations give the same run: only resume-safe settings may differ."""
    one = replace(one, data=one.data.recalling(other.data))
    other = replace(other, data=other.data.recalling(one.data))
    return not set(differences(one, other)) - (resume_safe(one) - {"data.source"})


def find_runs(out: Path) -> list[Run]:
    """The run directories of a reproduction that can be read."""
    runs = []
    for config_file in sorted((out / "runs").glob("*/config.json")):
        with contextlib.suppress(ValueError):
            runs.append(Run(config_file.parent))
    return runs


def find_folder(
    out: Path,
    config: Config,
    title: str,
    *,
    runs: Sequence[Run],
    fingerprint: Callable[[], str],
    taken: Sequence[Path],
) -> Path:
    """The directory of a run with these settings and images, or a new one for it.

    `runs` are those in `out`. Of several the first is used: a copy of a run is not another seed.
    """
    found = []
    for run in runs:
        if same_run(run.config, config):
            source = run.environment.get("source")
            if source is None or source == fingerprint():
                found.append(run.folder)
    if len(found) > 1:
        others = ", ".join(folder.name for folder in found[1:])
        warnings.warn(
            f"{found[0]}: has the same settings as {others}; only the first is used for {title}",
            stacklevel=2,
        )
    if found:
        return found[0]
    name = re.sub(r"[^a-z0-9=.]+", "-", f"{title}-seed{config.train.seed}".lower()).strip("-")
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folders = (out / "runs" / each for each in names)
    return next(folder for folder in folders if folder not in taken and not folder.exists())


def run_jobs(
    jobs: Sequence[Job], out: Path, devices: Sequence[str], finish: Callable[[Job], object]
) -> None:
    """Train and evaluate what is missing; a job that fails is reported and the others go on.

    `finish` is called with each job that ended without a failure. Raises `Stopped` after a signal,
    when all processes have saved their runs.
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    lock = exclusive_lock(out / ".lock", "is reproducing in it", "another --out")
    with lock, catch_signals() as signals, _ProgressBar(jobs) as bar:
        waiting = list(jobs)
        processes: list[subprocess.Popen[bytes]] = []
        several = len(devices) > 1
        threads = max(1, (os.cpu_count() or 1) // len(devices)) if several else 0
        workers = [
            _run_on_device(
                device, waiting, processes, bar, finish, logs=out / "logs", threads=threads
            )
            for device in devices
        ]
        try:
            while running := [job for worker in workers if (job := next(worker, None))]:
                bar.show(running)
                time.sleep(0.5)
                if signals:  # before a process that had the same signal counts as failed
                    raise Stopped(signals[0], 0)
        finally:
            for process in processes:  # all at once; each saves its run
                process.terminate()
            for worker in workers:
                worker.close()


def _run_on_device(
    device: str,
    waiting: list[Job],
    processes: list[subprocess.Popen[bytes]],
    bar: _ProgressBar,
    finish: Callable[[Job], object],
    *,
    logs: Path,
    threads: int,
) -> Generator[Job, None, None]:
    """Take waiting jobs one after another; yields the present one while its process runs."""
    while waiting:
        job = waiting.pop(0)
        was_finished = True
        job.config = job.config.with_overrides({"train.device": device})
        try:
            for command in job.commands():
                was_finished = False
                log = logs / f"{job.folder.name}.log"
                log_start = log.stat().st_size if log.exists() else 0
                with _start(command, log, threads if device == "cpu" else 0) as process:
                    processes.append(process)
                    while process.poll() is None:
                        yield job
                processes.remove(process)
                if process.returncode:
                    job.failure = _read_error(log, log_start, process.returncode)
                    break
            if not job.failure:
                finish(job)
        except (ValueError, OSError) as error:
            job.failure = str(error)
        bar.end(job, silent=was_finished and not job.failure)


def _start(command: Sequence[str], log: Path, threads: int) -> subprocess.Popen[bytes]:
    """Start a command of this program; the environment's OMP_NUM_THREADS wins over `threads`."""
    environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with log.open("ab") as file:
        file.write(f"\n$ {shlex.join(['meanshift', *command])}\n".encode())
        file.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "meanshift", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**environment, **os.environ},
            start_new_session=True,  # Ctrl-C reaches this process, which passes it on once
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )


def _end_with_parent() -> None:
    """If this program is killed, its runs get SIGTERM and save themselves."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _read_error(log: Path, start: int, code: int) -> str:
    """The error message of a process; its part of the log begins at `start`."""
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if line.startswith("meanshift: ")]
    message = " ".join(lines[errors[-1] if errors else -1 :])[:500].removeprefix("meanshift: ")
    return f"{message} (exit code {code}; the whole log: {log})"


class _ProgressBar:
    """One bar over all runs: images, finished runs, and the metrics of those that train.

    In a log it is a line for each run that ends.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.ended = 0
        self.images_seen = {id(job): _images_seen(job) for job in jobs}
        self.start_images = sum(self.images_seen.values())
        self.start_time = time.monotonic()
        self.total = sum(job.images_seen for job in jobs)
        self.bar = progress(
            "reproduce",
            self.total,
            unit="img",
            start=self.start_images,
            shown=sys.stderr.isatty(),
        )

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, running: Sequence[Job]) -> None:
        """Update the bar with the jobs that run."""
        states = []
        for job in running:
            self.images_seen[id(job)] = _images_seen(job)
            states.append(f"{job.title}: {'evaluating' if job.trained else _metrics(job)}")
        text = f"{self.ended}/{len(self.jobs)} runs; {'; '.join(states)}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(sum(self.images_seen.values()) - self.bar.n)

    def end(self, job: Job, *, silent: bool) -> None:
        """Count a job that has ended, and print how."""
        self.ended += 1
        if silent:
            return
        self.images_seen[id(job)] = _images_seen(job)
        outcome = f"failed: {job.failure}" if job.failure else "finished"
        line = f"{self.ended}/{len(self.jobs)} {job.title}: {outcome}{self._time_left()}"
        self.bar.write(line, file=sys.stderr)

    def _time_left(self) -> str:
        done = sum(self.images_seen.values())
        if not self.bar.disable or done <= self.start_images:
            return ""
        seconds = (time.monotonic() - self.start_time) / (done - self.start_images)
        return f", {tqdm.format_interval(seconds * (self.total - done))} left"


def _images_seen(job: Job) -> int:
    done, total = job.steps
    return round(job.images_seen * done / total) if total else 0


def _metrics(job: Job) -> str:
    """The last loss and purity of a run that trains."""
    records = job.run.records("train")[-1:] if job.run else []
    values = [
        f"{name} {record[name]:.2f}"
        for record in records
        for name in ("loss", "purity")
        if name in record
    ]
    return " ".join(values) or "begins"
