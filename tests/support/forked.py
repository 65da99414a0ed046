"""Processes that are forked from a test, so that they start without importing anything again."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from meanshift.runtime import distributed

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""environment variables by which a launcher tells a process of the others"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rank_environment(world: int, rank: int, port: int) -> dict[str, str]:
    """What a launcher sets for one of several processes; nothing for a process alone."""
    values = (rank, rank, world, "127.0.0.1", port) if world > 1 else ()
    return {name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=False)}


def in_processes(world: int, work: Callable[..., Any], *given: Any, timeout: float = 60.0) -> list:
    """`work(*given)` in each of `world` processes that work together; their results by rank.

    A single process needs no fork: the work is done here.
    """
    if world == 1:
        return [work(*given)]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(world)]
        pids = []
        for rank, file in enumerate(files):
            environment = rank_environment(world, rank, port)
            pids.append(_fork(lambda: _store_result(file, work, given, timeout), environment))  # noqa: B023
        for pid in pids:
            os.waitpid(pid, 0)
        results = [pickle.loads(file.read_bytes()) if file.exists() else "died" for file in files]
    errors = [result for result in results if isinstance(result, str)]
    assert not errors, "\n".join(errors)
    return [result[0] for result in results]


class ForkedCommand:
    """A command of the program in a process of its own, with the interface of `Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        output: Path,
        cwd: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        import meanshift.training.loop  # noqa: F401  (before the fork, so that no child has to)
        from meanshift.cli import main

        def work() -> int:
            return _run_command(main, arguments, output, cwd, before)

        self.returncode: int | None = None
        self.pid = _fork(work, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("meanshift", timeout or 0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode


def _fork(work: Callable[[], int], env: Mapping[str, str]) -> int:
    """Do `work` in a child process with a process group of its own; the child's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return pid
    _child(work, env)


def _child(work: Callable[[], int], env: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        _forget_children()
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(env)
        torch.set_num_threads(1)
        code = work()
    finally:  # whatever happened, the child never returns into the test
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_children() -> None:
    """Do what `multiprocessing` does after a fork: drop the test's own workers and sockets."""
    multiprocessing.util._finalizer_registry.clear()
    multiprocessing.util._run_after_forkers()
    multiprocessing.process._children.clear()


def _store_result(file: Path, work: Callable[..., Any], given: Any, timeout: float) -> int:
    result: Any = "left"
    try:
        with distributed.process_group(torch.device("cpu"), timeout=timeout):
            result = (work(*given),)
    except BaseException:
        result = traceback.format_exc()
    file.write_bytes(pickle.dumps(result))
    return 0


def _run_command(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    output: Path,
    cwd: Path | None,
    before: Callable[[], None] | None,
) -> int:
    """The command as a fresh interpreter would run it, with its output in a file."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["meanshift", *arguments]
    warnings.simplefilter("default")  # pytest has made them errors
    if cwd is not None:
        os.chdir(cwd)
    try:
        if before is not None:
            before()
        return main(arguments)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
