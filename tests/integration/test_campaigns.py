"""Campaigns: random kills of runs and ranks, and hostile crowds at the explorer."""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.exact import assert_same
from tests.support.explorer import encode_png, get, post, serving_explorer, write_arrays
from tests.support.explorer import write_live_run as write_run
from tests.support.processes import (
    make_photos,
    outcome,
    pretrain_command,
    run_processes,
    start_processes,
    torchrun,
    wait_for_lines,
    worker_pid,
)

pytestmark = pytest.mark.campaign

CONFIGURATIONS = [  # method, workers, processes: 10, each killed 20 times
    *(("msf", workers, 1) for workers in (0, 1, 2)),
    *(("msf", workers, 2) for workers in (0, 2)),
    *(("moco", workers, 1) for workers in (0, 2)),
    ("moco", 0, 2),
    ("swav", 1, 1),
    ("swav", 0, 2),
]
RUNS, KILLS = 4, 5


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos") / "photos")


def command_of(photos, out, method, **changed):
    """20 or 24 steps of a method, with several checkpoints in an epoch."""
    if method == "msf":
        return pretrain_command(photos, out, **changed)
    words = pretrain_command(photos, out, train__batch_size=8, train__epochs=8, **changed)
    for name in ("--method.bank_size", "--method.k"):  # settings of msf
        at = words.index(name)
        del words[at : at + 2]
    own = {
        "moco": "--method.bank_size 24 --encoder.batch_groups 1",
        "swav": "--method.prototypes 4 --method.small_crops 0",
    }
    return [*words, "--method.name", method, *own[method].split()]


def finish(world, command, folder):
    codes, group = run_processes(world, command, folder)
    assert codes == [0] * world, group.output


@pytest.mark.parametrize(("method", "workers", "world"), CONFIGURATIONS)
def test_two_hundred_kills_do_not_change_a_bit(photos, tmp_path, method, workers, world):
    draw = random.Random(f"{method} {workers} {world}")
    whole = tmp_path / "whole"
    finish(world, command_of(photos, whole, method, data__workers=workers), tmp_path / "first")
    expected = outcome(whole)
    killed = 0
    for number in range(RUNS):
        out = tmp_path / f"run-{number}"
        command = command_of(photos, out, method, data__workers=workers)
        for attempt in range(KILLS):
            with start_processes(world, command, tmp_path / f"{number}-{attempt}") as group:
                path = out / "metrics.jsonl"
                lines = path.read_text().count("\n") if path.exists() else 0
                wait_for_lines(out, lines + draw.randint(1, 4), group)
                time.sleep(draw.uniform(0, 0.05))
                killed += None in [process.poll() for process in group.processes]
                group.signal(signal.SIGKILL)
                group.wait()
        finish(world, command, tmp_path / f"{number}-last")
        assert_same(outcome(out), expected)
    print(f"{method}, {workers} workers, {world} processes: {killed} kills, the same bits")
    assert killed == RUNS * KILLS


def test_a_run_of_two_processes_survives_ten_killed_ranks(photos, tmp_path):
    draw = random.Random(0)
    changed = {"train__epochs": 16, "train__save_every": 0.2}
    finish(2, command_of(photos, tmp_path / "whole", "msf", **changed), tmp_path / "first")
    out = tmp_path / "run"
    command = command_of(photos, out, "msf", **changed)
    with torchrun(2, command, tmp_path / "launcher", restarts=11) as launcher:
        for _ in range(10):
            path = out / "metrics.jsonl"
            lines = path.read_text().count("\n") if path.exists() else 0
            wait_for_lines(out, lines + draw.randint(2, 5), launcher)
            os.kill(worker_pid(launcher, draw.randint(0, 1)), signal.SIGKILL)
        assert launcher.wait() == [0], launcher.output
    assert_same(outcome(out), outcome(tmp_path / "whole"))


HOSTILE = [
    "/assets/../explorer/server.py",
    "/assets/..%2f..%2f..%2fsecret.txt",
    "/assets//etc/passwd",
    "/thumbnail/train/..%2f..%2fsecret.txt",
    "/thumbnail/train/99999999999999999999",
    "/api/point/-1",
    "/api/map?epoch=../../secret",
    "/api/rank?by=' or 1=1",
    "/" + "a" * 8000,
    "/%00%ff",
]
ORDINARY = ["/", "/api/run", "/api/images", "/api/point/3", "/thumbnail/train/4", "/api/map"]


def test_two_hundred_clients_and_hostile_requests_for_a_minute(tmp_path):
    secret = b"nobody may read this 7f3a"
    (tmp_path / "secret.txt").write_bytes(secret)
    folder = write_run(tmp_path / "run", write_arrays(tmp_path / "images.npz"))
    answers, problems = Counter(), []
    seconds = 60.0

    with serving_explorer(Explorer(Run(folder))) as port:
        until = time.monotonic() + seconds

        def client(number):
            draw = random.Random(number)
            while time.monotonic() < until:
                try:
                    answer = _request(draw, port)
                except OSError as error:  # a busy server may refuse a connection
                    answers[type(error).__name__] += 1
                    continue
                if answer is None:
                    continue
                answers[answer.status] += 1
                if answer.status >= 500 or secret in answer.body or b"root:" in answer.body:
                    problems.append(f"{answer.status} {answer.body[:200]!r}")

        clients = [threading.Thread(target=client, args=(number,)) for number in range(200)]
        before = open_files()
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        assert not problems, problems[:3]
        assert get(port, "/api/run").status == 200
        time.sleep(1)
        assert open_files() < before + 50
    print(f"{sum(answers.values())} requests of 200 clients: {dict(answers)}")
    assert answers[200] > 200 and answers[404] > 200


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def _request(draw, port):
    """One request of a client; None for what is no request at all."""
    kind = draw.random()
    if kind < 0.5:
        return get(port, draw.choice(ORDINARY))
    if kind < 0.8:
        return get(port, draw.choice(HOSTILE).replace(" ", "%20"))
    if kind < 0.9:
        image = encode_png(_noise(draw)) if draw.random() < 0.5 else draw.randbytes(3000)
        return post(port, "/api/search", image)
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=5)) as raw:
        raw.sendall(draw.randbytes(200) if draw.random() < 0.5 else b"GET / HTTP/1.1\r\nHost: ")
    return None


def _noise(draw):
    return np.frombuffer(draw.randbytes(16 * 16 * 3), np.uint8).reshape(16, 16, 3)
