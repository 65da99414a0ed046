"""Runs as processes: one after another, or side by side on devices; stopped and taken up again."""

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
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from meanshift.config import RESUME_SAFE, Config, differences
from meanshift.config.recipes import command_for
from meanshift.runtime.progress import progress
from meanshift.runtime.run_directory import exclusive_lock
from meanshift.runtime.signals import Stopped, catch_signals
from meanshift.viz.run_reader import Run


@dataclass
class Job:
    """A run to be trained and judged; `run` is its directory, whoever made it."""

    title: str
    config: Config
    folder: Path
    judge: dict[str, Sequence[str]]
    """the words of `meanshift evaluate` by protocol"""
    split: str
    views: int
    """images that it sees in all, for the time left"""
    failure: str = ""
    run: Run | None = field(default=None, repr=False)

    def look(self) -> Run | None:
        """The run as far as it has come; None before it has begun."""
        if self.run is None and (self.folder / "config.json").is_file():
            self.run = Run(self.folder)
        return self.run

    @property
    def steps(self) -> tuple[int, int]:
        """(done, all); all is not known before the run has begun."""
        run = self.look()
        if run is None or "steps" not in run.environment:
            return 0, 0
        last = max((r["step"] for r in run.lines("metrics.jsonl")), default=0)
        return last, int(run.environment["steps"])

    @property
    def trained(self) -> bool:
        done, total = self.steps
        last = self.folder / "checkpoints" / f"step-{total:09d}.pt"
        return total > 0 and done == total and last.is_file()

    def result(self, protocol: str) -> dict[str, Any] | None:
        """What judging left, unless it is of weights before the last."""
        run = self.look()
        if run is None:
            return None
        cached = "cached" if "--cached" in self.judge.get(protocol, ()) else ""
        held = run.results.get("-".join(filter(None, [protocol, cached, self.split])))
        return None if held is None or run.older(held) else held

    def commands(self) -> Iterator[list[str]]:
        """What is still to be typed, the training first."""
        if not self.trained:
            yield shlex.split(command_for(self.config, str(self.folder)))[1:]
        missing = [protocol for protocol in self.judge if self.result(protocol) is None]
        if missing:
            split = ["--split", self.split] if self.split else []
            words = dict.fromkeys(word for name in missing for word in self.judge[name])
            device = ["--device", self.config.train.device]
            yield ["evaluate", *missing, str(self.folder), *split, *device, *words]


def same(one: Config, other: Config) -> bool:
    """Whether two runs would be one: of the same images and settings, but for harmless ones."""
    return not set(differences(one, other)) - (RESUME_SAFE - {"data.source"})


def find(
    out: Path, config: Config, title: str, images: Callable[[], str], taken: Sequence[Path]
) -> Path:
    """The directory of a run with these settings and images, or one for it to begin in."""
    runs = out / "runs"
    for known in sorted(runs.glob("*/config.json")):
        with contextlib.suppress(ValueError):
            run = Run(known.parent)
            if same(run.config, config):
                was = run.environment.get("source")
                if was is None or was == images():
                    return known.parent
    name = re.sub(r"[^a-z0-9=.]+", "-", f"{title}-seed{config.train.seed}".lower()).strip("-")
    free = itertools.chain([name], (f"{name}-{at}" for at in itertools.count(2)))
    return next(
        runs / each for each in free if runs / each not in taken and not (runs / each).exists()
    )


def work(jobs: Sequence[Job], out: Path, devices: Sequence[str]) -> None:
    """Train and judge what is missing; a job that fails says so and the others go on.

    Raises `Stopped` after a signal, when all that ran has saved itself.
    """
    (out / "logs").mkdir(parents=True, exist_ok=True)
    once = exclusive_lock(out / ".lock", "is at work in it", "another --out")
    with once, catch_signals() as asked, _View(jobs) as view:
        waiting, running = list(jobs), list[subprocess.Popen[bytes]]()
        share = max(1, (os.cpu_count() or 1) // len(devices)) if len(devices) > 1 else 0
        lanes = [_lane(waiting, d, share, out / "logs", running, view) for d in devices]
        try:
            while busy := [job for lane in lanes if (job := next(lane, None))]:
                view.show(busy)
                time.sleep(0.5)
                if asked:  # before a run that had the same signal is taken for one that failed
                    raise Stopped(asked[0], 0)
        finally:
            for process in running:  # all at once; each saves itself
                process.terminate()
            for lane in lanes:
                lane.close()


def _lane(
    waiting: list[Job],
    device: str,
    threads: int,
    logs: Path,
    running: list[subprocess.Popen[bytes]],
    view: _View,
) -> Generator[Job, None, None]:
    """Job after job on one device; gives the present one for as long as its process runs."""
    while waiting:
        job, idle = waiting.pop(0), True
        job.config = job.config.with_overrides({"train.device": device})
        try:
            for command in job.commands():
                idle = False
                log = logs / f"{job.folder.name}.log"
                before = log.stat().st_size if log.exists() else 0
                with _start(command, log, threads if device == "cpu" else 0) as process:
                    running.append(process)
                    while process.poll() is None:
                        yield job
                running.remove(process)
                if process.returncode:
                    job.failure = _last_words(log, before, process.returncode)
                    break
        except (ValueError, OSError) as error:
            job.failure = str(error)
        view.ended(job, quiet=idle and not job.failure)


def _start(command: Sequence[str], log: Path, threads: int) -> subprocess.Popen[bytes]:
    """A command of this program as a process, with so many threads unless the user says."""
    share = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with log.open("ab") as file:
        file.write(f"\n$ {shlex.join(['meanshift', *command])}\n".encode())
        file.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "meanshift", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**share, **os.environ},
            start_new_session=True,  # Ctrl-C is for us; we hand it on once
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )


def _die_with_parent() -> None:
    """Should this program be killed, its runs save themselves instead of going on unseen."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _last_words(log: Path, before: int, code: int) -> str:
    """What a process said of its end; `before` it the log tells of others."""
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    at = [i for i, line in enumerate(lines) if line.startswith("meanshift: ")]
    told = " ".join(lines[at[-1] if at else -1 :])[:500].removeprefix("meanshift: ")
    return f"{told} (exit code {code}; all of it: {log})"


class _View:
    """One bar over all runs: images, runs ended, and what people watch of those that go on.

    In a log it is a line for each run that ends.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.count, self.jobs = 0, jobs
        self.seen = {id(job): _views(job) for job in jobs}
        self.first, self.began = sum(self.seen.values()), time.monotonic()
        self.total = sum(job.views for job in jobs)
        shown = sys.stderr.isatty()
        self.bar = progress("reproduce", self.total, unit="pic", start=self.first, shown=shown)

    def __enter__(self) -> _View:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, busy: Sequence[Job]) -> None:
        told = []
        for job in busy:
            self.seen[id(job)] = _views(job)
            last = run.records("train")[-1:] if (run := job.look()) else []
            seen = {name: last[0][name] for name in ("loss", "purity") if last and name in last[0]}
            doing = " ".join(f"{name} {value:.2f}" for name, value in seen.items())
            told.append(f"{job.title}: {'judging' if job.trained else doing or 'begins'}")
        words = f"{self.count}/{len(self.jobs)} runs; {'; '.join(told)}"
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update(sum(self.seen.values()) - self.bar.n)

    def ended(self, job: Job, *, quiet: bool) -> None:
        self.count += 1
        if quiet:  # there was nothing left to do
            return
        self.seen[id(job)] = _views(job)
        done = sum(self.seen.values())
        how, left = f"failed: {job.failure}" if job.failure else "finished", ""
        if self.bar.disable and done > self.first:
            spent = (time.monotonic() - self.began) / (done - self.first)
            left = f", {tqdm.format_interval(spent * (self.total - done))} left"
        line = f"{self.count}/{len(self.jobs)} {job.title}: {how}{left}"
        self.bar.write(line, file=sys.stderr)


def _views(job: Job) -> int:
    done, total = job.steps
    return round(job.views * done / total) if total else 0
