"""Real data that is not photographs, through the commands of the docs: digits, spoken words."""

import itertools
import json
import shutil
import subprocess

import numpy as np
import pytest
from sklearn.datasets import load_digits

from meanshift.cli import main

pytestmark = pytest.mark.slow


def accuracy(run, name="knn"):
    """The 1-NN accuracy of a stored result."""
    return json.loads((run / "results" / f"{name}.json").read_text())["metrics"]["1-NN"]


def test_digits_are_learned_from_their_values(tmp_path):
    x, y = load_digits(return_X_y=True)
    x = x.astype(np.float32)
    source = tmp_path / "digits.npz"
    np.savez(source, x_train=x[:1200], y_train=y[:1200], x_test=x[1200:], y_test=y[1200:])
    run = tmp_path / "run"
    words = ["pretrain", "vector", "--data", str(source), "--out", str(run)]
    assert main([*words, "--train.epochs", "10", "--encoder.width", "0.25"]) == 0
    assert main(["evaluate", "knn", str(run)]) == 0
    assert accuracy(run) > 90


def test_embeddings_that_stay_in_few_dimensions_are_reported(tmp_path):
    x, _ = load_digits(return_X_y=True)
    np.save(tmp_path / "digits.npy", x[:1200].astype(np.float32))
    run = tmp_path / "run"
    words = ["pretrain", "vector", "--data", str(tmp_path / "digits.npy"), "--out", str(run)]
    plain = "--method.variance 0 --method.covariance 0 --method.momentum 0 --optim.lr 0.02"
    assert main([*words, *plain.split(), "--train.epochs", "16"]) == 0
    warnings = [json.loads(line) for line in (run / "warnings.jsonl").read_text().splitlines()]
    assert any(each["message"].startswith("partial collapse") for each in warnings)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_spoken_words_are_learned_from_recordings(tmp_path):
    variants = list(itertools.product(("en-us", "en-gb"), (120, 150, 180), (30, 50, 70)))
    for word in ("one", "seven", "three"):
        for number, (voice, speed, pitch) in enumerate(variants):
            split = "test" if number % 3 == 0 else "train"
            file = tmp_path / "spoken" / split / word / f"{number}.wav"
            file.parent.mkdir(parents=True, exist_ok=True)
            speak = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "-w", str(file)]
            subprocess.run([*speak, word], check=True)
    run = tmp_path / "run"
    words = ["pretrain", "signal", "--data", str(tmp_path / "spoken"), "--out", str(run)]
    settings = "--train.epochs 10 --train.batch_size 12 --data.image_size 8192 --data.workers 0"
    assert main([*words, *settings.split(), "--encoder.width", "0.25"]) == 0
    assert main(["evaluate", "knn", str(run), "--ks", "1"]) == 0
    assert accuracy(run, next((run / "results").glob("knn*.json")).stem) > 60
