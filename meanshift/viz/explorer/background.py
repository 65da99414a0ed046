"""Long computations beside the requests: one at a time, with progress, stopped on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

THREAD_NAME = "meanshift background task"
_FORGOTTEN_AFTER = 3.0  # seconds; a page that waits asks twice a second
ProgressCallback = Callable[[int, int], None]
"""called by a task with (done, total); raises `Stopped` if the task was stopped"""


class Stopped(Exception):
    """The task was stopped by a user."""


class Pending(Exception):
    """The result is being computed: ask again later."""

    def __init__(self, title: str, done: int, total: int) -> None:
        super().__init__(title)
        self.title = title
        self.done = done
        self.total = total


class _Task:
    def __init__(self, title: str) -> None:
        self.title = title
        self.done = 0
        self.total = 0
        self.started = False
        self.stopped = False
        self.ended = threading.Event()
        self.last_asked = 0.0
        self.result: Any = None
        self.error: Exception | None = None

    def is_forgotten(self) -> bool:
        """Whether it still waits to start, and nobody has asked for it lately."""
        return not self.started and time.monotonic() - self.last_asked > _FORGOTTEN_AFTER

    def report(self, done: int, total: int) -> None:
        """The progress callback of the computation."""
        if self.stopped:
            raise Stopped("stopped")
        self.done = done
        self.total = total


class BackgroundTasks:
    """Results that take long, each computed once in a thread; the newest few are kept.

    >>> tasks = BackgroundTasks()
    >>> tasks.get("features", "reading images", lambda progress: compute(progress))
    """

    def __init__(self, *, keep: int = 6, patience: float = 0.25) -> None:
        self._tasks: dict[Hashable, _Task] = {}
        self._keep = keep
        self._patience = patience
        self._lock = threading.Lock()
        self._running = threading.Lock()

    def get(self, key: Hashable, title: str, compute: Callable[[ProgressCallback], Any]) -> Any:
        """Return what `compute` returned, or raise what it raised; `Pending` while it runs.

        A computation that takes less than `patience` seconds is waited for.
        """
        with self._lock:
            task = self._tasks.pop(key, None)
            if task is None:
                for old in [k for k, known in self._tasks.items() if known.is_forgotten()]:
                    self._tasks.pop(old).stopped = True
                task = _Task(title)
                threading.Thread(
                    target=self._run, args=(task, compute), name=THREAD_NAME, daemon=True
                ).start()
            task.last_asked = time.monotonic()
            self._tasks[key] = task  # at the end: asked for last
            ended = [k for k, known in self._tasks.items() if known.ended.is_set() and k != key]
            for old in ended[: max(0, len(ended) - self._keep + 1)]:
                del self._tasks[old]
        if not task.ended.wait(self._patience):
            raise Pending(task.title, task.done, task.total)
        if task.error is not None:
            with self._lock:
                self._tasks.pop(key, None)  # the next request tries again
            raise task.error
        return task.result

    def stop(self) -> None:
        """Stop all running tasks, each at its next report of progress."""
        with self._lock:
            for key, task in list(self._tasks.items()):
                if not task.ended.is_set():
                    task.stopped = True
                    del self._tasks[key]

    def _run(self, task: _Task, compute: Callable[[ProgressCallback], Any]) -> None:
        with self._running:
            try:
                task.report(0, 0)
                task.started = True
                task.result = compute(task.report)
            except Exception as error:
                task.error = error
            finally:
                task.ended.set()
