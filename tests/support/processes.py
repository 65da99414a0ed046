"""Real processes of one command that know of each other, as a launcher would start them."""

from __future__ import annotations

import json
import os
import signal
import socket
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

DEADLINE = 90.0
"""seconds after which anything that still runs counts as hanging"""

MODULE = ("-m", "meanshift")
KNOWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMING = ("images_per_second", "seconds")


def pretraining(photos: Path, out: Path, **changed: object) -> list[str]:
    """The words of a command that trains a tiny network for 20 steps, in a second."""
    settings = {
        "data.image_size": 16, "data.workers": 0, "data.max_bad_fraction": 0.1, "data.validation": 0.2,
        "encoder.width": 0.125, "encoder.stem": "small-stride2", "encoder.name": "resnet10",
        "method.bank_size": 21, "method.k": 3, "train.epochs": 4, "train.batch_size": 6,
        "optim.warmup_epochs": 1, "train.save_every": 0.3, "train.log_every": 1,
        "train.monitor_every": 4, "train.snapshots": 2, "train.snapshot_images": 10,
        "train.device": "cpu",
    }  # fmt: skip
    settings |= {name.replace("__", "."): value for name, value in changed.items()}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return ["pretrain", "small", "--data", str(photos), "--out", str(out), *flags]


def make_photos(root: Path) -> Path:
    """37 images in 3 classes, of which one cannot be read."""
    noise = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (root / name).mkdir(parents=True)
        for index in range(12):
            pixels = noise.integers(0, 256, (20 + index, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    (root / "b" / "broken.jpg").write_bytes(b"no image")
    return root


class Group:
    """Processes that were started together, with what each of them says in a file of its own."""

    def __init__(self, home: Path) -> None:
        self.home, self.started = home, list[subprocess.Popen[bytes]]()

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        with self._file(len(self.started)).open("wb") as told:
            kept = {name: value for name, value in os.environ.items() if name not in KNOWN}
            process = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=told, stderr=told,
                env=kept | {"OMP_NUM_THREADS": "1"} | dict(env), cwd=cwd, preexec_fn=before,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)

    def signal(self, number: int, *ranks: int) -> None:
        """To these, or to all."""
        for rank in ranks or range(len(self.started)):
            os.kill(self.started[rank].pid, number)

    def wait(self, *ranks: int, within: float = DEADLINE) -> list[int]:
        """The exit codes of these, or of all."""
        until = time.monotonic() + within
        try:
            return [
                self.started[rank].wait(max(0.01, until - time.monotonic()))
                for rank in ranks or range(len(self.started))
            ]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within:g} s:\n{self.told}") from None

    def said(self, rank: int) -> str:
        return self._file(rank).read_text(errors="replace")

    @property
    def told(self) -> str:
        """What all of them said, one after another."""
        return "\n".join(self.said(rank) for rank in range(len(self.started)))

    def end(self) -> None:
        """Nobody stays, nor their children: each was started in a session of its own."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _file(self, rank: int) -> Path:
        return self.home / f"{rank}.txt"


@contextmanager
def together(
    world: int,
    arguments: Sequence[str],
    home: Path,
    *,
    program: Sequence[str] = MODULE,
    cwds: Sequence[Path] = (),
    before: Mapping[int, Callable[[], None]] | None = None,
) -> Iterator[Group]:
    """`world` processes of a command; what each says goes to a file in `home`."""
    port = free_port()
    with _group(home) as group:
        for rank in range(world):
            given = (rank, rank, world, "127.0.0.1", port) if world > 1 else ()
            env = {name: str(value) for name, value in zip(KNOWN, given, strict=False)}
            cwd = cwds[rank] if cwds else None
            group.start([*program, *arguments], env, cwd=cwd, before=(before or {}).get(rank))
        yield group


@contextmanager
def torchrun(
    world: int, arguments: Sequence[str], home: Path, *, restarts: int = 0
) -> Iterator[Group]:
    """The launcher itself, as a group of one that has children."""
    launch = f"--standalone --nproc-per-node {world} --max-restarts {restarts}".split()
    with _group(home) as group:
        group.start(["-m", "torch.distributed.run", *launch, *MODULE, *arguments], {})
        try:
            yield group
        finally:
            left = [process_of(group, rank) for rank in range(world)]
            group.end()
            for process in left:  # torchrun gives each a session of its own
                if process is not None:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)


def run(world: int, arguments: Sequence[str], home: Path, **how: Any) -> tuple[list[int], Group]:
    """Start and wait: the exit codes, and what was said."""
    with together(world, arguments, home, **how) as group:
        return group.wait(), group


@contextmanager
def _group(home: Path) -> Iterator[Group]:
    home.mkdir(parents=True, exist_ok=True)
    group = Group(home)
    try:
        yield group
    finally:
        group.end()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def process_of(launcher: Group, rank: int) -> int | None:
    """The process that torchrun started as the one of this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            known = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher.started[0].pid and f"RANK={rank}".encode() in known:
            return int(folder.name)
    return None


def lines(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = out / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def grown(out: Path, count: int, group: Group) -> None:
    """Wait until the metrics have `count` lines, as long as anyone is alive to write them."""
    path, until = out / "metrics.jsonl", time.monotonic() + DEADLINE
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until, f"the run does not get on:\n{group.told}"
        assert None in [process.poll() for process in group.started], group.told
        time.sleep(0.002)


def outcome(out: Path) -> tuple[Any, ...]:
    """Everything that must not depend on interruptions."""
    state, wrong = checkpoint.latest(out / "checkpoints")
    assert state is not None and not wrong
    parts = list(checkpoint.parts(out / "checkpoints", state))
    kept = [{k: v for k, v in line.items() if k not in TIMING} for line in lines(out)]
    moments = [checkpoint.read(path) for path in sorted((out / "snapshots").glob("*.pt"))]
    bad = [w for w in lines(out, "warnings.jsonl") if w["kind"] == "bad image"]
    return state, kept, moments, bad, parts
