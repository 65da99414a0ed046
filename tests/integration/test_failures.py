"""Failures of several processes, by real ones: killed, hung, a full disk, a second run."""

import json
import os
import re
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils.data import get_worker_info

from meanshift.config import Config
from meanshift.data.bad_files import BadFiles
from meanshift.data.folder import FolderSource
from meanshift.runtime import checkpoint, distributed, signals
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training import resume
from meanshift.training.optim import build_optimizer
from meanshift.training.resume import TrainState
from meanshift.training.session import build_method
from meanshift.training.step import TrainStep
from tests.support.exact import assert_same
from tests.support.forked import in_processes
from tests.support.processes import (
    DEADLINE,
    limit_file_size,
    make_photos,
    outcome,
    pretrain_command,
    read_lines,
    run_processes,
    start_processes,
    torchrun,
    wait_for_lines,
    worker_pid,
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="module")
def command(photos):
    """The command that trains in a directory, by default with a sharded memory bank."""

    def of(out, layout="sharded", **changed):
        return pretrain_command(photos, out, method__bank_layout=layout, **changed)

    return of


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The outcome of runs of so many processes that nothing disturbed."""
    outcomes = {}

    def of(world, layout="sharded"):
        if (world, layout) not in outcomes:
            folder = tmp_path_factory.mktemp("whole")
            codes, group = run_processes(world, command(folder / "run", layout), folder)
            assert codes == [0] * world, group.output
            outcomes[world, layout] = outcome(folder / "run")
        return outcomes[world, layout]

    return of


@pytest.fixture(scope="module")
def stopped(command, tmp_path_factory):
    """A run of two processes that SIGTERM to the second of them stopped half way."""
    runs = {}

    def of(layout="sharded"):
        if layout not in runs:
            folder = tmp_path_factory.mktemp("stopped")
            with start_processes(2, command(folder / "run", layout), folder) as group:
                wait_for_lines(folder / "run", 7, group)
                group.signal(signal.SIGTERM, 1)
                codes = group.wait()
            runs[layout] = folder / "run", codes, group
        return runs[layout]

    return of


@pytest.fixture
def halfway(stopped, tmp_path):
    """A copy of such a run, to continue."""

    def of(layout="sharded"):
        return shutil.copytree(stopped(layout)[0], tmp_path / "run")

    return of


def finish(world, command, folder):
    codes, group = run_processes(world, command, folder / "last")
    assert codes == [0] * world, group.output
    return group


def step_of(out):
    state, unreadable = checkpoint.latest(out / "checkpoints")
    assert not unreadable
    return state["step"]


# Killed


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_torchrun_restarts_what_was_killed_and_it_ends_in_the_same_bits(
    command, whole, tmp_path, layout
):
    out = tmp_path / "run"
    with torchrun(2, command(out, layout), tmp_path, restarts=2) as launcher:
        wait_for_lines(out, 9, launcher)
        os.kill(worker_pid(launcher, 1), signal.SIGKILL)
        assert launcher.wait() == [0], launcher.output
    assert "continues after step" in launcher.output
    assert_same(outcome(out), whole(2, layout))


@pytest.mark.parametrize("late", [0, 1])
def test_what_killed_processes_left_in_the_store_is_not_read_after_a_restart(late):
    short = timedelta(seconds=10)
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=short)  # as torchrun has one
    found = [dict[int, object]() for _ in range(3)]
    for attempt, came in enumerate(found):

        def come(rank, attempt=attempt, came=came):
            own = TCPStore("127.0.0.1", store.port, is_master=False, timeout=short)
            came[rank] = distributed._fresh_store(own, rank, 2, 10.0)
            came[rank].set(f"from/{rank}", str(attempt))

        if attempt == 1:  # only the second comes, asks, and is killed
            store.set("request/1", "dead")
            continue
        both = [threading.Thread(target=come, args=(rank,)) for rank in (1 - late, late)]
        for one in both:
            one.start()
            time.sleep(0.1)
        for one in both:
            one.join()
        for rank in (0, 1):
            assert came[rank].get(f"from/{1 - rank}") == str(attempt).encode()
    assert found[2][0].get("from/1") == b"2" and found[0][0].get("from/1") == b"0"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_three_killed_at_once_add_gradients_in_the_same_order_when_started_again(
    command, whole, tmp_path, layout
):
    out = tmp_path / "run"
    with start_processes(3, command(out, layout), tmp_path) as group:
        wait_for_lines(out, 9, group)
        group.signal(signal.SIGKILL)
        assert group.wait() == [-signal.SIGKILL] * 3
    assert "continues after step" in finish(3, command(out, layout), tmp_path).output
    assert_same(outcome(out), whole(3, layout))


# Hung


def hang(rank, command, out, folder):
    before = step_of(out)
    with start_processes(2, [*command, "--train.timeout", "10"], folder) as group:
        wait_for_lines(out, len(read_lines(out)) + 2, group)
        group.signal(signal.SIGSTOP, rank)
        assert group.wait(1 - rank) == [2], group.output
    assert step_of(out) >= before
    assert "Traceback" not in group.output
    assert "the same command continues from the last checkpoint" in group.output_of(1 - rank)
    return group.output_of(1 - rank)


@pytest.mark.slow
def test_a_process_that_hangs_is_named_and_the_run_can_be_continued(
    command, whole, halfway, tmp_path
):
    out = halfway()
    output = hang(1, command(out), out, tmp_path)
    assert re.search(
        r"process 0 of 2 gives up: process 1 on \S+ does not answer .* for 10 s", output
    )
    finish(2, command(out), tmp_path)
    assert_same(outcome(out), whole(2))


@pytest.mark.slow
def test_a_first_process_that_hangs_is_named_too(command, halfway, tmp_path):
    out = halfway()
    output = hang(0, command(out), out, tmp_path)
    assert re.search(r"process 1 of 2 gives up: process 0\b.* does not", output)


# A full disk


@pytest.mark.parametrize(
    ("layout", "rank", "size", "file"),
    [
        pytest.param("replicated", 0, 200_000, r"step-\d+\.pt", marks=pytest.mark.slow),
        pytest.param("sharded", 0, 200_000, r"step-\d+\.pt", marks=pytest.mark.slow),
        pytest.param(
            "sharded", 1, 2_000, r"step-\d+\.part-0001-of-0002\.pt", marks=pytest.mark.slow
        ),
    ],
)
def test_a_full_disk_names_the_file_ends_all_processes_and_damages_nothing(
    command, whole, halfway, tmp_path, layout, rank, size, file
):
    out = halfway(layout)
    before = {path: path.read_bytes() for path in (out / "checkpoints").iterdir()}
    limited = {rank: limit_file_size(size)}
    codes, group = run_processes(2, command(out, layout), tmp_path, before=limited)
    assert codes == [2, 2], group.output
    path = re.escape(f"{out / 'checkpoints'}{os.sep}") + file
    assert re.search(rf"{path}: could not be written \(.*File too large", group.output), (
        group.output
    )
    assert "Traceback" not in group.output
    after = {path: path.read_bytes() for path in (out / "checkpoints").iterdir()}
    assert before == {path: content for path, content in after.items() if path in before}
    finish(2, command(out, layout), tmp_path)
    assert_same(outcome(out), whole(2, layout))


# Unreadable in one process


@pytest.mark.slow
def test_an_image_that_one_process_cannot_read_is_counted_in_all(photos, tmp_path):
    seen = shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    shutil.copy(photos / "a" / "1.png", tmp_path / "0" / "hidden.png")
    (seen / "a" / "1.png").unlink()
    (seen / "a" / "1.png").symlink_to("/proc/self/cwd/hidden.png")
    out = tmp_path / "run"
    command = pretrain_command(seen, out, train__monitor_every=0)
    codes, group = run_processes(2, command, tmp_path, cwds=[tmp_path / "0", tmp_path / "1"])
    assert codes == [0, 0], group.output
    warned = [w["file"] for w in read_lines(out, "warnings.jsonl") if w["kind"] == "bad image"]
    both = sorted([str(seen / "a" / "1.png"), str(seen / "b" / "broken.jpg")])
    assert sorted(warned) == both
    state, _ = checkpoint.latest(out / "checkpoints")
    assert state["step"] == 20 and sorted(title for title, _ in state["bad_files"]) == both


# Asked to stop


@pytest.mark.slow
def test_sigterm_to_one_process_saves_the_run_and_it_ends_in_the_same_bits(
    command, whole, stopped, halfway, tmp_path
):
    _, codes, group = stopped()
    assert codes == [signals.REQUEUE] * 2, group.output
    out = halfway()
    assert group.output.count(f"stopped and saved at step {step_of(out)};") == 1
    assert len([line for line in read_lines(out) if line["kind"] == "train"]) == step_of(out) < 20
    finish(2, command(out), tmp_path)
    assert_same(outcome(out), whole(2))


@pytest.mark.slow
def test_a_stop_request_that_only_the_first_process_sees_stops_all(command, tmp_path):
    out = tmp_path / "run"

    def ask_in_step_six():
        watch = signals.watch_stop_request
        signals.watch_stop_request = lambda path: watch(path, every=0.0)
        step = TrainStep.__call__

        def changed(self, images, now):
            if now.step == 6:
                (out / "stop-requested").touch()
            return step(self, images, now)

        TrainStep.__call__ = changed

    codes, group = run_processes(2, command(out), tmp_path, before={0: ask_in_step_six})
    assert codes == [130] * 2 and step_of(out) == 7, group.output
    assert group.output.count("stopped and saved at step 7; the same command continues") == 1
    assert not (out / "stop-requested").exists()


@pytest.mark.slow
def test_sigterm_to_all_twice_within_a_second_still_saves(command, halfway, tmp_path):
    out = halfway()
    before = step_of(out)
    with start_processes(2, command(out), tmp_path) as group:
        wait_for_lines(out, len(read_lines(out)) + 1, group)
        group.signal(signal.SIGTERM)
        time.sleep(0.001)
        group.signal(signal.SIGTERM)
        codes = group.wait()
    assert codes == [signals.REQUEUE] * 2, group.output
    assert before < step_of(out) < 20
    assert f"stopped and saved at step {step_of(out)};" in group.output_of(0)


def test_sigterm_while_a_process_waits_for_another_one_asks_for_a_requeue(command, tmp_path):
    rendezvous = distributed.rendezvous

    def wait(*arguments, **options):
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        return rendezvous(*arguments, **options)

    def before():
        signals.GRACE = 0.1
        distributed.rendezvous = wait

    before = {0: before, 1: lambda: time.sleep(DEADLINE)}  # the second one never comes
    with start_processes(2, command(tmp_path / "run"), tmp_path, before=before) as group:
        assert group.wait(0) == [signals.REQUEUE], group.output


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_its_workers(command, halfway, tmp_path):
    out = halfway()
    with torchrun(2, command(out), tmp_path) as launcher:
        wait_for_lines(out, len(read_lines(out)) + 1, launcher)
        launcher.signal(signal.SIGTERM)
        code = launcher.wait()
    assert code != [0]
    trained = [line["step"] for line in read_lines(out) if line["kind"] == "train"]
    assert step_of(out) == trained[-1] < 20
    assert f"stopped and saved at step {step_of(out)};" in launcher.output


# A second run


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused_and_the_first_undisturbed(
    command, whole, tmp_path, world
):
    out = tmp_path / "run"
    with start_processes(world, command(out), tmp_path / "first") as first:
        wait_for_lines(out, 4, first)
        first.signal(signal.SIGSTOP)  # so that it cannot end before the second one starts
        codes, second = run_processes(world, command(out), tmp_path / "second")
        first.signal(signal.SIGCONT)
        assert first.wait() == [0] * world, first.output
    assert codes == [2] * world, second.output
    holder = f"{out}: process {first.processes[0].pid} on "
    assert second.output.count(holder) == 1 and "Traceback" not in second.output
    assert_same(outcome(out), whole(world))


# Other numbers of processes


BUFFERS = ("rows", "ids", "labels")


def restored(out):
    """The memory bank of this process as a session would restore it."""
    run_directory = RunDirectory(out, writes=False)
    values, _ = checkpoint.latest(run_directory.checkpoints)
    config = Config.from_dict(values["config"])
    method = build_method(config)
    state = TrainState(
        method=method,
        optimizer=build_optimizer(config.optim, method),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        bad_files=BadFiles(0.1, 37),
    )
    resume.load(run_directory, state, values)
    return {name: getattr(method.bank, name).tolist() for name in BUFFERS}


def saved(out):
    """The memory bank in the newest checkpoint."""
    state, unreadable = checkpoint.latest(out / "checkpoints")
    assert not unreadable
    parts = [part["bank"] for part in checkpoint.parts(out / "checkpoints", state)]
    parts = parts or [{name: state["method"][f"bank.{name}"] for name in BUFFERS}]
    return {name: [row for part in parts for row in part[name].tolist()] for name in BUFFERS}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("sharded", "sharded", marks=pytest.mark.slow),
        pytest.param("replicated", "replicated", marks=pytest.mark.slow),
        pytest.param("sharded", "replicated", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_in_fewer_processes(command, tmp_path, first, then):
    out, stops = tmp_path / "run", []
    for world, layout in ((4, first), (2, then)):
        with start_processes(world, command(out, layout, train__batch_size=8), tmp_path) as group:
            wait_for_lines(out, len(read_lines(out)) + 3, group)
            group.signal(signal.SIGTERM)
            assert group.wait() == [signals.REQUEUE] * world, group.output
        stops.append(step_of(out))
        bank = saved(out)
        assert len(bank["rows"]) == 21
        parts = in_processes(world // 2, restored, out)
        if layout == "replicated":
            assert all(part == bank for part in parts)
        else:
            for name in BUFFERS:
                assert [row for part in parts for row in part[name]] == bank[name]
    finish(1, command(out, then, train__batch_size=8), tmp_path)
    assert 0 < stops[0] < stops[1] < 12 == step_of(out)
    trained = [line["step"] for line in read_lines(out) if line["kind"] == "train"]
    assert trained == list(range(1, 13))
    warnings = [w for w in read_lines(out, "warnings.jsonl") if w["kind"] == "machine"]
    assert [w["step"] for w in warnings] == stops
    assert "processes 2 after processes 4" in warnings[0]["message"]
    assert "processes 1 after processes 2" in warnings[1]["message"]


# Refused


def test_too_small_a_batch_is_refused_with_one_message(command, tmp_path):
    out = tmp_path / "run"
    codes, group = run_processes(2, command(out, train__batch_size=3), tmp_path)
    assert codes == [2, 2] and not out.exists()
    assert group.output.count("meanshift:") == 1 and "Traceback" not in group.output
    assert "meanshift: train.batch_size: got 3 for 2 processes" in group.output_of(0)


def test_other_images_in_one_process_are_refused_with_one_message(photos, tmp_path):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        shutil.copytree(photos, tmp_path / rank / "photos")
    (tmp_path / "1" / "photos" / "a" / "1.png").rename(tmp_path / "1" / "photos" / "c" / "99.png")
    out = tmp_path / "run"
    command = pretrain_command(Path("/proc/self/cwd/photos"), out)
    codes, group = run_processes(2, command, tmp_path, cwds=[tmp_path / "0", tmp_path / "1"])
    assert codes == [2, 2], group.output
    assert group.output.count("meanshift:") == 1 and "Traceback" not in group.output
    assert f"{out}: process 1 sees other images than process 0" in group.output_of(0)
    assert not out.exists()


# An error in a loader worker


def break_reading():
    """Makes one image raise an error in loader workers that is none of the image's."""
    read = FolderSource.read

    def broken(self, index):
        if get_worker_info() is not None and self.title(index).endswith("c/3.png"):
            raise RuntimeError("a mistake in the program")
        return read(self, index)

    FolderSource.read = broken


def test_an_error_in_a_loader_worker_ends_the_run_and_is_printed(photos, tmp_path):
    command = pretrain_command(photos, tmp_path / "run", data__workers=2, train__monitor_every=0)
    before = dict.fromkeys(range(2), break_reading)
    codes, group = run_processes(2, command, tmp_path, before=before)
    assert 0 not in codes, group.output
    assert "RuntimeError: a mistake in the program" in group.output
    assert group.output.count("gives up") == 1  # the other process


# Evaluation


@pytest.mark.filterwarnings("ignore:.*images cannot be read")
def test_embeddings_and_neighbors_are_those_of_one_process(stopped, photos, tmp_path):
    out, _, _ = stopped()
    results = {}
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        embed = ["embed", out, photos, "--out", folder / "rows.npz", "--device", "cpu"]
        knn = ["evaluate", "knn", out, "--out", folder, "--device", "cpu"]
        for name, arguments in (("embed", embed), ("knn", knn)):
            codes, group = run_processes(world, [str(word) for word in arguments], folder / name)
            assert codes == [0] * world, group.output
            printed = ["1-NN" in group.output_of(rank) for rank in range(world)]
            assert sum(printed) == (name == "knn")
        (result,) = folder.rglob("results/knn*.json")
        results[world] = (
            (folder / "rows.npz").read_bytes(),
            json.loads(result.read_text())["metrics"],
        )
    assert results[1] == results[2]


@pytest.mark.parametrize("name", ["evaluate linear", "report"])
def test_commands_for_one_process_are_refused_in_several(stopped, tmp_path, name):
    codes, group = run_processes(2, [*name.split(), str(stopped()[0])], tmp_path)
    assert codes == [2, 2], group.output
    assert "2 processes were started" in group.output_of(0) and "torchrun" in group.output_of(0)
    assert "Traceback" not in group.output
