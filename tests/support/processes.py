"""Real processes of the program, alone or several together, to be watched, signaled and killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from meanshift.runtime import checkpoint
from meanshift.training.step import TrainStep
from tests.support.forked import RANK_VARIABLES, ForkedCommand, free_port, rank_environment

DEADLINE = 240.0
"""seconds after which a process counts as hanging; less than the timeout of a test, so that its
output is shown"""

TIMING = ("images_per_second", "seconds", "cpu_seconds")
"""metrics that differ from run to run"""


def pretrain_command(photos: Path, out: Path, **changed: object) -> list[str]:
    """A command that trains a tiny network for 20 steps; `group__name=value` changes a setting."""
    settings = {
        "data.image_size": 16,
        "data.workers": 0,
        "data.max_bad_fraction": 0.1,
        "data.validation": 0.2,
        "encoder.name": "resnet10",
        "encoder.stem": "small-stride2",
        "encoder.width": 0.125,
        "method.bank_size": 21,
        "method.k": 3,
        "optim.warmup_epochs": 1,
        "train.epochs": 4,
        "train.batch_size": 6,
        "train.save_every": 0.3,
        "train.log_every": 1,
        "train.monitor_every": 2,
        "train.snapshots": 2,
        "train.snapshot_images": 10,
        "train.device": "cpu",
        "train.precision": "float32",
    }
    settings |= {name.replace("__", "."): value for name, value in changed.items()}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return ["pretrain", "small-resnet18", "--data", str(photos), "--out", str(out), *flags]


def make_photos(root: Path) -> Path:
    """37 images in 3 classes, one of which cannot be read."""
    noise = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (root / name).mkdir(parents=True)
        for index in range(12):
            pixels = noise.integers(0, 256, (20 + index, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    (root / "b" / "broken.jpg").write_bytes(b"no image")
    return root


class ProcessGroup:
    """Processes that work together, by rank; the output of each is in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes] | ForkedCommand] = []

    def fork(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Start a command of the program; `before` is called in its process."""
        output = self._output_file(len(self.processes))
        self.processes.append(
            ForkedCommand(arguments, env=env, output=output, cwd=cwd, before=before)
        )

    def spawn(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a fresh Python interpreter."""
        clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        with self._output_file(len(self.processes)).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**clean, **env},
                start_new_session=True,
            )
        self.processes.append(process)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks, or to all."""
        for rank in ranks or range(len(self.processes)):
            os.kill(self.processes[rank].pid, number)

    def wait(self, *ranks: int, within: float = DEADLINE) -> list[int]:
        """The exit codes of these ranks, or of all."""
        until = time.monotonic() + within
        try:
            return [
                self.processes[rank].wait(max(0.01, until - time.monotonic()))
                for rank in ranks or range(len(self.processes))
            ]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within:g} s:\n{self.output}") from None

    def output_of(self, rank: int) -> str:
        return self._output_file(rank).read_text(errors="replace")

    @property
    def output(self) -> str:
        """The output of all ranks, one after another."""
        return "\n".join(self.output_of(rank) for rank in range(len(self.processes)))

    def kill(self) -> None:
        """Kill what still runs, with its children: each has a process group of its own."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _output_file(self, rank: int) -> Path:
        return self.folder / f"{rank}.txt"


@contextmanager
def start_processes(
    world: int,
    arguments: Sequence[str],
    folder: Path,
    *,
    fresh: bool = False,
    cwds: Sequence[Path] = (),
    before: Mapping[int, Callable[[], None]] | None = None,
) -> Iterator[ProcessGroup]:
    """`world` processes of a command; the output of each is a file in `folder`.

    They are forked from the test, which starts them at once; `fresh` ones are new interpreters.
    """
    port = free_port()
    with _group(folder) as group:
        for rank in range(world):
            env = rank_environment(world, rank, port)
            if fresh:
                group.spawn(["-m", "meanshift", *arguments], env)
            else:
                cwd = cwds[rank] if cwds else None
                group.fork(arguments, env, cwd=cwd, before=(before or {}).get(rank))
        yield group


@contextmanager
def torchrun(
    world: int, arguments: Sequence[str], folder: Path, *, restarts: int = 0
) -> Iterator[ProcessGroup]:
    """The launcher itself, as a group of one process that has children."""
    launch = f"--standalone --nproc-per-node {world} --max-restarts {restarts}".split()
    with _group(folder) as group:
        group.spawn(["-m", "torch.distributed.run", *launch, "-m", "meanshift", *arguments], {})
        try:
            yield group
        finally:
            workers = [worker_pid(group, rank) for rank in range(world)]
            group.kill()
            for pid in workers:  # torchrun gives each a session of its own
                if pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def run_processes(
    world: int, arguments: Sequence[str], folder: Path, *, within: float = DEADLINE, **how: Any
) -> tuple[list[int], ProcessGroup]:
    """Start processes and wait for them: exit codes, and the group for its output."""
    with start_processes(world, arguments, folder, **how) as group:
        return group.wait(within=within), group


@contextmanager
def _group(folder: Path) -> Iterator[ProcessGroup]:
    folder.mkdir(parents=True, exist_ok=True)
    group = ProcessGroup(folder)
    try:
        yield group
    finally:
        group.kill()


def limit_file_size(size: int) -> Callable[[], None]:
    """A `before` that lets files grow to so many bytes, as on a disk that is full."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def in_step(steps: Sequence[int], act: Callable[[], None]) -> Callable[[], None]:
    """A `before` that makes a process do something in each of these steps that it reaches."""

    def patch() -> None:
        step = TrainStep.__call__

        def changed(self: TrainStep, images: Any, now: Any) -> Any:
            if now.step in steps:
                act()
            return step(self, images, now)

        TrainStep.__call__ = changed  # type: ignore[method-assign]

    return patch


def kill_in(*steps: int) -> Callable[[], None]:
    """A `before` that makes a process kill itself in the first of these steps that it reaches."""
    return in_step(steps, lambda: os.kill(os.getpid(), signal.SIGKILL))


def worker_pid(launcher: ProcessGroup, rank: int) -> int | None:
    """The process that torchrun started for a rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher.processes[0].pid and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    return None


def read_lines(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a run's file, without one that is being written; none if there is no file."""
    path = out / name
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for_lines(out: Path, count: int, group: ProcessGroup) -> None:
    """Wait until the metrics have `count` lines, as long as a process lives to write them."""
    path = out / "metrics.jsonl"
    until = time.monotonic() + DEADLINE
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until, f"the run makes no progress:\n{group.output}"
        assert None in [process.poll() for process in group.processes], group.output
        time.sleep(0.002)


def outcome(out: Path) -> tuple[Any, ...]:
    """Everything of a run that must not depend on interruptions."""
    state, unreadable = checkpoint.latest(out / "checkpoints")
    assert state is not None and not unreadable
    parts = list(checkpoint.parts(out / "checkpoints", state))
    metrics = [
        {name: value for name, value in line.items() if name not in TIMING}
        for line in read_lines(out)
    ]
    snapshots = [checkpoint.read(path) for path in sorted((out / "snapshots").glob("*.pt"))]
    bad = [line for line in read_lines(out, "warnings.jsonl") if line["kind"] == "bad image"]
    return state, metrics, snapshots, bad, parts
