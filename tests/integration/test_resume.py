"""Exactness by real kills: an interrupted run ends in the bits of one that never was."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from meanshift.runtime import checkpoint, signals
from tests.support.exact import assert_same

TIMING = ("images_per_second", "seconds")
WORKERS = "state[0].config.data.workers"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    import numpy as np
    from PIL import Image

    root, noise = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (root / name).mkdir()
        for index in range(12):
            pixels = noise.integers(0, 256, (20 + index, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    (root / "b" / "broken.jpg").write_bytes(b"no image")
    return root


def command(photos, out, workers):
    settings = {
        "data.image_size": 16, "data.workers": workers, "data.max_bad_fraction": 0.1,
        "encoder.width": 0.125, "encoder.stem": "small-stride2", "encoder.name": "resnet10",
        "method.bank_size": 21, "method.k": 3, "train.epochs": 4, "train.batch_size": 6,
        "optim.warmup_epochs": 1, "train.save_every": 0.3, "train.log_every": 1,
        "train.monitor_every": 1, "train.snapshots": 3, "train.snapshot_images": 10,
        "train.device": "cpu", "data.validation": 0.2,
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    base = [sys.executable, "-m", "meanshift", "pretrain", "small", "--data", str(photos)]
    return [*base, "--out", str(out), *flags]


def finish(photos, out, workers=0):
    done = subprocess.run(
        command(photos, out, workers), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def interrupt(photos, out, how, *, after_lines, workers=0, group=False):
    """Start, wait until the metrics have grown by some lines, and send a signal."""
    metrics = out / "metrics.jsonl"

    def lines():
        return metrics.read_text().count("\n") if metrics.exists() else 0

    before = lines()
    told = out.with_suffix(".stderr")
    with told.open("w") as stderr:
        process = subprocess.Popen(
            command(photos, out, workers), stdout=stderr, stderr=stderr, start_new_session=True
        )
        deadline = time.monotonic() + 120
        while lines() < before + after_lines and process.poll() is None:
            assert time.monotonic() < deadline, "the run does not get on"
            time.sleep(0.005)
        (os.killpg if group else os.kill)(process.pid, how)
        return process.wait(timeout=60), told.read_text()


def outcome(out):
    """Everything that must not depend on interruptions."""
    state, wrong = checkpoint.latest(out / "checkpoints")
    assert not wrong
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k not in TIMING} for line in lines]
    moments = [checkpoint.read(path) for path in sorted((out / "snapshots").glob("*.pt"))]
    warnings = [w for w in (out / "warnings.jsonl").read_text().splitlines() if "bad image" in w]
    return state, kept, moments, warnings


@pytest.fixture(scope="module")
def uninterrupted(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    finish(photos, out)
    return outcome(out)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_again_and_again_ends_in_the_same_bits(
    photos, uninterrupted, tmp_path, workers
):
    draw, out = random.Random(workers), tmp_path / "run"
    for _ in range(2):
        interrupt(photos, out, signal.SIGKILL, after_lines=draw.randint(2, 8), workers=workers)
    finish(photos, out, workers)
    assert_same(outcome(out), uninterrupted, unless=WORKERS)


def test_a_run_killed_before_its_first_checkpoint_ends_in_the_same_bits(
    photos, uninterrupted, tmp_path
):
    interrupt(photos, tmp_path / "run", signal.SIGKILL, after_lines=1)
    finish(photos, tmp_path / "run")
    assert_same(outcome(tmp_path / "run"), uninterrupted, unless=WORKERS)


def test_sigterm_to_the_whole_group_ends_the_workers_too(photos, uninterrupted, tmp_path):
    out = tmp_path / "run"
    code, told = interrupt(photos, out, signal.SIGTERM, after_lines=5, workers=2, group=True)
    assert code == signals.REQUEUE, told
    assert "stopped and saved" in told
    finish(photos, out, 2)
    assert_same(outcome(out), uninterrupted, unless=WORKERS)


def test_sigterm_saves_and_says_how_to_go_on(photos, uninterrupted, tmp_path):
    out = tmp_path / "run"
    code, told = interrupt(photos, out, signal.SIGTERM, after_lines=5)
    assert code == signals.REQUEUE
    assert "stopped and saved at step" in told and "the same command continues" in told
    assert "Traceback" not in told
    finish(photos, out)
    assert_same(outcome(out), uninterrupted, unless=WORKERS)


def test_a_truncated_newest_checkpoint_is_reported_and_the_one_before_is_used(
    photos, uninterrupted, tmp_path
):
    out = tmp_path / "run"
    interrupt(photos, out, signal.SIGKILL, after_lines=14)
    newest = max((out / "checkpoints").glob("step-*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    done = finish(photos, out)
    assert newest.name in done.stderr and "going back to step" in done.stderr
    assert '"checkpoint"' in (out / "warnings.jsonl").read_text()
    assert_same(outcome(out), uninterrupted, unless=WORKERS)


def held(out):
    """All files, but for those that tell of the session."""
    files = [
        p for p in out.rglob("*") if p.is_file() and p.name not in ("environment.json", ".lock")
    ]
    return {path: path.read_bytes() for path in files}


def test_a_finished_run_is_left_as_it_is(photos, uninterrupted, tmp_path):
    out = tmp_path / "run"
    finish(photos, out)
    before = held(out)
    finish(photos, out)
    assert before == held(out)
    assert_same(outcome(out), uninterrupted, unless=WORKERS)


def test_other_images_are_refused(tmp_path, make_images):
    other = make_images(tmp_path / "photos", {"a": 20, "b": 20}, size=(20, 20))
    out = tmp_path / "run"
    finish(other, out)
    (other / "a" / "000.jpg").rename(other / "a" / "zzz.jpg")
    refused = subprocess.run(command(other, out, 0), capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "trained on other images" in refused.stderr
