"""Exactness by real kills: an interrupted run ends in the bits of one that was not interrupted."""

import multiprocessing
import os
import shutil
import signal
import time

import pytest

from meanshift.runtime import checkpoint, signals
from meanshift.training import loop
from tests.support.exact import assert_same
from tests.support.processes import (
    in_step,
    kill_in,
    make_photos,
    outcome,
    pretrain_command,
    run_processes,
    start_processes,
    wait_for_lines,
)

WORKERS = "state[0].config.data.workers"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="module")
def command(photos):
    """The command that trains 20 steps in a directory, with a checkpoint every second step."""

    def of(out, **changed):
        return pretrain_command(photos, out, train__snapshots=3, train__monitor_every=1, **changed)

    return of


def finish(command, out, **how):
    """Run a command to its end and return what it printed."""
    codes, group = run_processes(1, command, out.parent / "last", **how)
    assert codes == [0], group.output
    return group.output


def close_output():
    """Let standard output and error be pipes that nobody reads."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(reader)
    os.close(writer)


def interrupt(command, out, step):
    """Run a command that is killed in a step."""
    codes, group = run_processes(1, command, out.parent / "killed", before={0: kill_in(step)})
    assert codes == [-signal.SIGKILL], group.output


def stop(command, out, number, *, whole_group=False):
    """Signal a command after some steps: its exit code and output."""
    with start_processes(1, command, out.parent / "stopped") as group:
        wait_for_lines(out, 6, group)
        (process,) = group.processes
        (os.killpg if whole_group else os.kill)(process.pid, number)
        return group.wait()[0], group.output


@pytest.fixture(scope="module")
def whole_run(command, tmp_path_factory):
    """The directory of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    finish(command(out), out)
    return out


@pytest.fixture(scope="module")
def expected(whole_run):
    return outcome(whole_run)


@pytest.mark.parametrize(
    ("workers", "steps"), [(0, (3, 11)), pytest.param(2, (0, 7), marks=pytest.mark.slow)]
)
def test_a_run_killed_again_and_again_ends_in_the_same_bits(
    command, expected, tmp_path, workers, steps
):
    """Also before its first checkpoint, which is written after step 2."""
    out = tmp_path / "run"
    arguments = command(out, data__workers=workers)
    for step in (1, *steps):
        interrupt(arguments, out, step)
    assert "continues after step" in finish(arguments, out)
    assert_same(outcome(out), expected, unless=WORKERS)


@pytest.mark.slow
def test_a_run_killed_in_fresh_interpreters_ends_in_the_same_bits(command, expected, tmp_path):
    """As a user types it: `python -m meanshift pretrain ...`, killed, and typed again."""
    out = tmp_path / "run"
    with start_processes(1, command(out), tmp_path / "first", fresh=True) as group:
        wait_for_lines(out, 8, group)
        group.signal(signal.SIGKILL)
        assert group.wait() == [-signal.SIGKILL]
    finish(command(out), out, fresh=True)
    assert_same(outcome(out), expected)


@pytest.mark.slow
def test_a_run_killed_while_gradients_accumulate_ends_in_the_same_bits(command, tmp_path):
    """Three batches per update: steps 4 and 9 are the second and the last of their epoch's.

    AdamW trains the heads alone in the first 8 steps, after a start from principal components.
    """
    settings = {
        "encoder__init": "pca",
        "optim__accumulate": 3,
        "optim__name": "adamw",
        "optim__lr": 1e-3,
        "optim__decay_norms": False,
        "optim__heads_first": 0.3,
        "train__save_every": 0.2,
    }
    finish(command(tmp_path / "whole", **settings), tmp_path / "whole")
    out = tmp_path / "run"
    for step in (0, 4, 9):
        interrupt(command(out, **settings), out, step)
    finish(command(out, **settings), out)
    assert_same(outcome(out), outcome(tmp_path / "whole"))


def test_sigterm_saves_and_says_how_to_continue(command, expected, tmp_path):
    out = tmp_path / "run"
    code, output = stop(command(out), out, signal.SIGTERM)
    assert code == signals.REQUEUE
    assert "stopped and saved at step" in output and "the same command continues" in output
    assert "Traceback" not in output
    finish(command(out), out)
    assert_same(outcome(out), expected)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, signals.REQUEUE), (signal.SIGHUP, 129)],
)
def test_a_signal_saves_the_run_also_if_nobody_reads_its_output(
    command, tmp_path, number, code, workers
):
    """As Ctrl-C with `2>&1 | tee log` does, which ends `tee` too; or a closed terminal."""
    out = tmp_path / "run"

    def before():
        close_output()
        in_step([6], lambda: os.killpg(os.getpid(), number))()

    arguments = command(out, data__workers=workers)
    codes, _ = run_processes(1, arguments, tmp_path / "stopped", before={0: before})
    assert codes == [code]
    state, unreadable = checkpoint.latest(out / "checkpoints")
    assert state["step"] == 7 and not unreadable


def test_a_run_whose_output_nobody_reads_is_finished(command, expected, tmp_path):
    out = tmp_path / "run"
    finish(command(out), out, before={0: close_output})
    assert_same(outcome(out), expected)


def test_sigterm_before_the_first_step_asks_for_a_requeue(command, tmp_path):
    def before():
        loop.open_session = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)

    out = tmp_path / "run"
    codes, group = run_processes(1, command(out), tmp_path / "stopped", before={0: before})
    assert codes == [signals.REQUEUE], group.output
    assert "stopped; the same command continues" in group.output
    assert "Traceback" not in group.output and not out.exists()


@pytest.mark.slow
def test_a_killed_loader_worker_is_reported_with_what_to_do(command, expected, tmp_path):
    """The system kills a worker when the memory is full."""

    def kill_workers():
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
        time.sleep(10)  # ended by the error, which is raised wherever the program is

    out = tmp_path / "run"
    arguments = command(out, data__workers=1)
    killed = {0: in_step([5], kill_workers)}
    codes, group = run_processes(1, arguments, tmp_path / "killed", before=killed)
    assert codes == [2] and "Traceback" not in group.output, group.output
    assert "DataLoader worker" in group.output and "the memory is full" in group.output
    assert "type the same command again" in group.output
    finish(arguments, out)
    assert_same(outcome(out), expected, unless=WORKERS)


@pytest.mark.slow
def test_sigterm_to_the_whole_group_ends_the_workers_too(command, expected, tmp_path):
    out = tmp_path / "run"
    arguments = command(out, data__workers=2)
    code, output = stop(arguments, out, signal.SIGTERM, whole_group=True)
    assert code == signals.REQUEUE and "stopped and saved" in output, output
    finish(arguments, out)
    assert_same(outcome(out), expected, unless=WORKERS)


@pytest.mark.slow
def test_a_truncated_newest_checkpoint_is_reported_and_the_one_before_is_used(
    command, expected, tmp_path
):
    out = tmp_path / "run"
    interrupt(command(out), out, 13)
    newest = max((out / "checkpoints").glob("step-*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    output = finish(command(out), out)
    assert newest.name in output and "going back to step" in output
    assert '"checkpoint"' in (out / "warnings.jsonl").read_text()
    assert_same(outcome(out), expected)


def test_a_finished_run_is_left_as_it_is(command, whole_run, tmp_path):
    out = shutil.copytree(whole_run, tmp_path / "run")
    before = files(out)
    finish(command(out), out)
    assert before == files(out)


def files(out):
    """The content of all files but those about the session."""
    paths = [path for path in out.rglob("*") if path.is_file()]
    return {
        path.relative_to(out): path.read_bytes()
        for path in paths
        if path.name not in ("environment.json", ".lock")
    }
