"""What goes wrong in several processes, by real ones: killed, hung, out of room, one too many."""

import os
import re
import resource
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from meanshift.config import Config
from meanshift.runtime import checkpoint, distributed, signals
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training import resume
from meanshift.training.loop import build_method
from tests.support.exact import assert_same
from tests.support.forked import in_processes
from tests.support.processes import (
    grown,
    lines,
    make_photos,
    outcome,
    pretraining,
    process_of,
    run,
    together,
    torchrun,
)

LAYOUTS = [pytest.param("replicated", marks=pytest.mark.slow), "sharded"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="module")
def words(photos):
    """The command that trains in a directory; the bank lies in parts unless told otherwise."""

    def of(out, layout="sharded", **changed):
        return pretraining(photos, out, method__bank_layout=layout, **changed)

    return of


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """What runs of so many processes that nothing disturbs end in."""
    known = {}

    def of(world, layout="sharded"):
        if (world, layout) not in known:
            home = tmp_path_factory.mktemp("whole")
            codes, group = run(world, words(home / "run", layout), home)
            assert codes == [0] * world, group.told
            known[world, layout] = outcome(home / "run")
        return known[world, layout]

    return of


@pytest.fixture(scope="module")
def stopped(words, tmp_path_factory):
    """A run of two processes that SIGTERM to the second of them stopped half way."""
    known = {}

    def of(layout="sharded"):
        if layout not in known:
            home = tmp_path_factory.mktemp("stopped")
            with together(2, words(home / "run", layout), home) as group:
                grown(home / "run", 7, group)
                group.signal(signal.SIGTERM, 1)
                codes = group.wait()
            known[layout] = home / "run", codes, group
        return known[layout]

    return of


@pytest.fixture
def halfway(stopped, tmp_path):
    """A copy of such a run, to go on with."""

    def of(layout="sharded"):
        return shutil.copytree(stopped(layout)[0], tmp_path / "run")

    return of


def finish(world, words, home):
    codes, group = run(world, words, home / "last")
    assert codes == [0] * world, group.told
    return group


def step_of(out):
    state, wrong = checkpoint.latest(out / "checkpoints")
    assert not wrong
    return state["step"]


# Killed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchrun_starts_again_what_was_killed_and_it_ends_in_the_same_bits(
    words, whole, tmp_path, layout
):
    out = tmp_path / "run"
    with torchrun(2, words(out, layout), tmp_path, restarts=2) as launcher:
        grown(out, 9, launcher)
        second = process_of(launcher, 1)
        os.kill(second, signal.SIGKILL)
        assert launcher.wait() == [0], launcher.told
    assert "continues after step" in launcher.told
    assert_same(outcome(out), whole(2, layout))


@pytest.mark.parametrize("late", [0, 1])
def test_what_the_killed_left_in_the_store_is_not_read_by_those_after_them(late):
    short = timedelta(seconds=10)
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=short)  # as torchrun keeps one
    found = [dict[int, object]() for _ in range(3)]
    for attempt, came in enumerate(found):

        def come(rank, attempt=attempt, came=came):
            own = TCPStore("127.0.0.1", store.port, is_master=False, timeout=short)
            came[rank] = distributed._of_this_start(own, rank, 2, 10.0)
            came[rank].set(f"from/{rank}", str(attempt))

        if attempt == 1:  # only the second comes, asks, and is killed
            store.set("asks/1", "dead")
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
    words, whole, tmp_path, layout
):
    out = tmp_path / "run"
    with together(3, words(out, layout), tmp_path) as group:
        grown(out, 9, group)
        group.signal(signal.SIGKILL)
        assert group.wait() == [-signal.SIGKILL] * 3
    assert "continues after step" in finish(3, words(out, layout), tmp_path).told
    assert_same(outcome(out), whole(3, layout))


# Hung


def hang(rank, words, out, home):
    before = step_of(out)
    with together(2, [*words, "--train.timeout", "5"], home) as group:
        grown(out, len(lines(out)) + 2, group)
        group.signal(signal.SIGSTOP, rank)
        assert group.wait(1 - rank, within=30) == [2], group.told
    assert step_of(out) >= before
    assert "Traceback" not in group.told
    assert "the same command continues from the last checkpoint" in group.said(1 - rank)
    return group.said(1 - rank)


def test_a_process_that_hangs_is_named_and_a_later_start_goes_on(words, whole, halfway, tmp_path):
    out = halfway()
    told = hang(1, words(out), out, tmp_path)
    assert re.search(r"process 0 of 2 gives up: process 1 on \S+ does not answer .* for 5 s", told)
    finish(2, words(out), tmp_path)
    assert_same(outcome(out), whole(2))


def test_a_first_process_that_hangs_is_named_too(words, halfway, tmp_path):
    out = halfway()
    told = hang(0, words(out), out, tmp_path)
    assert re.search(r"process 1 of 2 gives up: process 0\b.* does not", told)


# Out of room


def no_more_than(size):
    """Files of this process can grow to so many bytes, as on a disk that is full."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


@pytest.mark.parametrize(
    ("layout", "rank", "size", "file"),
    [
        pytest.param("replicated", 0, 200_000, r"step-\d+\.pt", marks=pytest.mark.slow),
        pytest.param("sharded", 0, 200_000, r"step-\d+\.pt", marks=pytest.mark.slow),
        ("sharded", 1, 2_000, r"step-\d+\.part-0001-of-0002\.pt"),
    ],
)
def test_a_full_disk_names_the_file_ends_all_and_spoils_nothing(
    words, whole, halfway, tmp_path, layout, rank, size, file
):
    out = halfway(layout)
    before = {path: path.read_bytes() for path in (out / "checkpoints").iterdir()}
    with together(2, words(out, layout), tmp_path, before={rank: no_more_than(size)}) as group:
        first = group.wait(rank)
        assert [*first, *group.wait(1 - rank, within=10)] == [2, 2], group.told
    path = re.escape(f"{out / 'checkpoints'}{os.sep}") + file
    assert re.search(rf"{path}: could not be written \(.*File too large", group.told), group.told
    assert "Traceback" not in group.told
    after = {path: path.read_bytes() for path in (out / "checkpoints").iterdir()}
    assert before == {path: held for path, held in after.items() if path in before}
    finish(2, words(out, layout), tmp_path)
    assert_same(outcome(out), whole(2, layout))


# Unreadable for one


def test_an_image_that_one_process_cannot_read_is_counted_in_all(photos, tmp_path):
    seen = shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    shutil.copy(photos / "a" / "1.png", tmp_path / "0" / "hidden.png")
    (seen / "a" / "1.png").unlink()
    (seen / "a" / "1.png").symlink_to("/proc/self/cwd/hidden.png")
    out = tmp_path / "run"
    command = pretraining(seen, out, train__monitor_every=0)
    codes, group = run(2, command, tmp_path, cwds=[tmp_path / "0", tmp_path / "1"])
    assert codes == [0, 0], group.told
    warned = [w["file"] for w in lines(out, "warnings.jsonl") if w["kind"] == "bad image"]
    both = sorted([str(seen / "a" / "1.png"), str(seen / "b" / "broken.jpg")])
    assert sorted(warned) == both
    state, _ = checkpoint.latest(out / "checkpoints")
    assert state["step"] == 20 and sorted(title for title, _ in state["bad"]) == both


# Asked to stop


def test_sigterm_to_one_saves_all_and_it_goes_on_to_the_same_bits(
    words, whole, stopped, halfway, tmp_path
):
    _, codes, group = stopped()
    assert codes == [signals.REQUEUE] * 2, group.told
    out = halfway()
    assert group.told.count(f"stopped and saved at step {step_of(out)};") == 1
    assert len([line for line in lines(out) if line["kind"] == "train"]) == step_of(out) < 20
    finish(2, words(out), tmp_path)
    assert_same(outcome(out), whole(2))


def test_sigterm_to_all_twice_within_a_second_still_saves(words, halfway, tmp_path):
    out = halfway()
    before = step_of(out)
    with together(2, words(out), tmp_path) as group:
        grown(out, len(lines(out)) + 1, group)
        group.signal(signal.SIGTERM)
        time.sleep(0.001)
        group.signal(signal.SIGTERM)
        codes = group.wait()
    assert codes == [signals.REQUEUE] * 2, group.told
    assert before < step_of(out) < 20
    assert f"stopped and saved at step {step_of(out)};" in group.said(0)


def test_sigterm_to_torchrun_saves_its_workers(words, halfway, tmp_path):
    out = halfway()
    with torchrun(2, words(out), tmp_path) as launcher:
        grown(out, len(lines(out)) + 1, launcher)
        launcher.signal(signal.SIGTERM)
        code = launcher.wait()
    assert code != [0]
    trained = [line["step"] for line in lines(out) if line["kind"] == "train"]
    assert step_of(out) == trained[-1] < 20
    assert f"stopped and saved at step {step_of(out)};" in launcher.told


# One run too many


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_second_run_in_the_same_directory_is_refused_and_the_first_undisturbed(
    words, whole, tmp_path, world
):
    out = tmp_path / "run"
    with together(world, words(out), tmp_path / "first") as first:
        grown(out, 4, first)
        first.signal(signal.SIGSTOP)  # else it would end before the second has loaded
        codes, second = run(world, words(out), tmp_path / "second")
        first.signal(signal.SIGCONT)
        assert first.wait() == [0] * world, first.told
    assert codes == [2] * world, second.told
    holder = f"{out}: process {first.started[0].pid} on "
    assert second.told.count(holder) == 1 and "Traceback" not in second.told
    assert_same(outcome(out), whole(world))


# Other numbers of processes


def loaded(out):
    """The bank with which a session of the processes that call this would begin."""
    journal = RunDirectory(out, writes=False)
    state, _ = checkpoint.latest(journal.checkpoints)
    method = build_method(Config.from_dict(state["config"]))
    resume.load(method, state, journal)
    return method.bank.first, method.bank.rows, method.bank.ids, method.bank.labels


def saved(out):
    state, wrong = checkpoint.latest(out / "checkpoints")
    assert not wrong
    parts = list(checkpoint.parts(out / "checkpoints", state))
    parts = parts or [{n: state["method"][f"bank.{n}"] for n in ("rows", "ids", "labels")}]
    return [[row for part in parts for row in part[n].tolist()] for n in ("rows", "ids", "labels")]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("sharded", "sharded"),
        pytest.param("replicated", "replicated", marks=pytest.mark.slow),
        pytest.param("sharded", "replicated", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_fewer_processes(words, tmp_path, first, then):
    out, stops = tmp_path / "run", list[int]()
    for world, layout in ((4, first), (2, then)):
        with together(world, words(out, layout, train__batch_size=8), tmp_path) as group:
            grown(out, len(lines(out)) + 3, group)
            group.signal(signal.SIGTERM)
            assert group.wait() == [signals.REQUEUE] * world, group.told
        stops.append(step_of(out))
        held = saved(out)
        assert len(held[0]) == 21
        next_world = world // 2
        began = in_processes(next_world, loaded, out)
        if layout == "replicated":
            began = began[:1]
        for name in range(3):
            assert [row for one in began for row in one[1 + name].tolist()] == held[name]
    finish(1, words(out, then, train__batch_size=8), tmp_path)
    assert 0 < stops[0] < stops[1] < 12 == step_of(out)
    trained = [line["step"] for line in lines(out) if line["kind"] == "train"]
    assert trained == list(range(1, 13))
    told = [w for w in lines(out, "warnings.jsonl") if w["kind"] == "machine"]
    assert [w["step"] for w in told] == stops
    assert "processes 2 after" in told[0]["message"] and "processes 4" in told[0]["message"]
    assert "processes 1 after" in told[1]["message"]


# Refused


def test_too_small_a_batch_is_refused_with_one_message(words, tmp_path):
    out = tmp_path / "run"
    codes, group = run(2, words(out, train__batch_size=3), tmp_path)
    assert codes == [2, 2] and not out.exists()
    assert group.told.count("meanshift:") == 1 and "Traceback" not in group.told
    assert "meanshift: train.batch_size: got 3 for 2 processes" in group.said(0)


def test_other_images_in_one_process_are_refused_with_one_message(photos, tmp_path):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        shutil.copytree(photos, tmp_path / rank / "photos")
    (tmp_path / "1" / "photos" / "a" / "1.png").rename(tmp_path / "1" / "photos" / "c" / "99.png")
    out = tmp_path / "run"
    command = pretraining(Path("/proc/self/cwd/photos"), out)
    codes, group = run(2, command, tmp_path, cwds=[tmp_path / "0", tmp_path / "1"])
    assert codes == [2, 2], group.told
    assert group.told.count("meanshift:") == 1 and "Traceback" not in group.told
    assert f"{out}: process 1 sees other images than process 0" in group.said(0)
    assert not out.exists()


# A mistake in a worker

BROKEN = """
import os, sys
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as main does, which comes too late here
from meanshift.cli import main
from meanshift.data.folder import FolderSource

read = FolderSource.read

def broken(self, index):
    if self.title(index).endswith("c/3.png"):
        raise RuntimeError("a mistake in the program")
    return read(self, index)

FolderSource.read = broken
sys.exit(main(sys.argv[1:]))
"""


def test_a_mistake_in_a_loader_worker_ends_the_run_with_it(photos, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BROKEN)
    command = pretraining(photos, tmp_path / "run", data__workers=2, train__monitor_every=0)
    codes, group = run(2, command, tmp_path, program=[str(program)])
    assert 0 not in codes, group.told
    assert "RuntimeError: a mistake in the program" in group.told
    assert group.told.count("gives up") == 1  # the other one


# Judging


@pytest.mark.filterwarnings("ignore:.*images cannot be read")
def test_embeddings_and_neighbors_are_those_of_one_process(stopped, photos, tmp_path, call):
    out, _, _ = stopped()
    made = {}
    for world in (1, 2):
        home = tmp_path / str(world)
        home.mkdir()
        embed = ["embed", out, photos, "--out", home / "rows.npz", "--device", "cpu"]
        knn = ["evaluate", "knn", out, "--out", home, "--device", "cpu"]
        for name, command in (("embed", embed), ("knn", knn)):
            if world == 1:
                code, _, wrong = call(*command)
                assert code == 0, wrong
            else:
                codes, group = run(2, [str(word) for word in command], home / name)
                assert codes == [0, 0], group.told
                assert sum("1-NN" in group.said(rank) for rank in range(2)) == (name == "knn")
        cards = [path.read_text() for path in sorted(home.rglob("results/knn*.json"))]
        figures = [re.search(r'"figures": \{[^}]*\}', card)[0] for card in cards]
        made[world] = (home / "rows.npz").read_bytes(), figures
    assert made[1] == made[2] and len(made[1][1]) == 1


@pytest.mark.parametrize("command", ["evaluate linear", "report"])
def test_what_is_for_one_process_is_refused_in_several(stopped, tmp_path, command):
    codes, group = run(2, [*command.split(), str(stopped()[0])], tmp_path)
    assert codes == [2, 2], group.told
    assert "2 processes were started" in group.said(0) and "torchrun" in group.said(0)
    assert "Traceback" not in group.told
