"""Background tasks: computed once, with progress, one at a time, stopped on demand."""

import threading

import pytest

from meanshift.viz.explorer.background import THREAD_NAME, BackgroundTasks, Pending
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.explorer import (
    get,
    post,
    serving_explorer,
    wait_for,
    write_arrays,
    write_live_run,
)


def test_a_task_runs_once_reports_its_progress_and_can_be_stopped():
    tasks = BackgroundTasks(patience=0.05)
    go = threading.Event()
    started = []

    def compute(progress):
        progress(3, 7)
        started.append(1)
        go.wait(5)
        progress(4, 7)
        return "done"

    for _ in range(2):
        with pytest.raises(Pending) as pending:
            tasks.get("key", "title", compute)
    assert (pending.value.title, pending.value.done, pending.value.total) == ("title", 3, 7)
    go.set()
    assert wait_for(lambda: tasks.get("key", "title", compute)) == "done" and started == [1]
    go.clear()
    with pytest.raises(Pending):
        tasks.get("other", "title", compute)
    tasks.stop()
    go.set()
    assert wait_for(lambda: tasks.get("third", "title", lambda _: 3)) == 3
    assert wait_for(lambda: tasks.get("other", "title", compute)) == "done" and len(started) == 3


def test_of_tasks_that_wait_only_the_last_requested_one_runs(monkeypatch):
    monkeypatch.setattr("meanshift.viz.explorer.background._FORGOTTEN_AFTER", 0.0)
    tasks = BackgroundTasks(patience=0.05)
    started = threading.Event()
    go = threading.Event()
    others = set(threading.enumerate())
    ran = []

    def named(name):
        def compute(_):
            ran.append(name)
            started.set()
            return go.wait(10) and name

        return compute

    for name in ("first", "second", "third", "last"):
        with pytest.raises(Pending):
            tasks.get(name, name, named(name))
        assert started.wait(10)
    go.set()
    assert wait_for(lambda: tasks.get("last", "last", named("last"))) == "last"
    for thread in set(threading.enumerate()) - others:
        thread.join(10)
    assert ran == ["first", "last"]


def test_a_task_that_failed_is_tried_again():
    tasks = BackgroundTasks(patience=5.0)
    tries = []

    def compute(_):
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("disk full")
        return len(tries)

    with pytest.raises(ValueError, match="disk full"):
        tasks.get("key", "title", compute)
    assert tasks.get("key", "title", compute) == 2


@pytest.fixture
def slow_explorer(tmp_path, monkeypatch):
    """An explorer of 600 images that waits for `go` when it reads the first and sets `reading`."""
    source = write_arrays(tmp_path / "p.npz", count=600)
    explorer = Explorer(Run(write_live_run(tmp_path / "run", source)))
    explorer.reading = threading.Event()
    explorer.go = threading.Event()
    kind = type(explorer.run.source)
    original = kind.read_batch

    def slow(self, indices):
        explorer.reading.set()
        explorer.go.wait(10)
        return original(self, indices)

    monkeypatch.setattr(kind, "read_batch", slow)
    return explorer


def test_a_request_that_waits_for_a_stopped_task_is_answered(slow_explorer):
    slow_explorer.searcher.tasks = BackgroundTasks(patience=20.0)
    answers = []
    with serving_explorer(slow_explorer) as port:
        path = "/api/prepare?in=train&epoch=0"
        thread = threading.Thread(target=lambda: answers.append(get(port, path)))
        thread.start()
        assert slow_explorer.reading.wait(10) and post(port, "/api/stop").status == 200
        slow_explorer.go.set()
        thread.join(10)
    assert answers[0].status == 409 and answers[0].error == "stopped"


def test_stopping_ends_the_reading_of_images(slow_explorer):
    with serving_explorer(slow_explorer) as port:
        answer = get(port, "/api/prepare?in=train&epoch=0")
        assert answer.status == 202 and answer.json["pending"].startswith("Features of 600 images")
        assert post(port, "/api/stop").status == 200
        slow_explorer.go.set()
        for thread in [t for t in threading.enumerate() if t.name == THREAD_NAME]:
            thread.join(10)
        assert list((slow_explorer.run.folder / "features").iterdir()) == []
        assert wait_for(lambda: get(port, "/api/prepare?in=train&epoch=0")).status == 200
