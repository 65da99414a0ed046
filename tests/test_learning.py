"""Learning itself: these fail when a run no longer learns, whatever the unit tests say."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from meanshift import Config, MeanShift, load_encoder, pretrain
from meanshift.data.arrays import ArraySource
from meanshift.evaluate.knn import KNNMonitor, knn_accuracy
from meanshift.train import build_method


def test_vectors_ten_lines_of_loop():
    """Six groups told apart by 8 of 40 values; the other 32 are noise, new in each view."""
    torch.manual_seed(0)
    labels = torch.arange(1200) % 6
    signal = torch.randn(6, 8)[labels] + 0.3 * torch.randn(1200, 8)

    def view():
        return torch.cat([signal, 3 * torch.randn(1200, 32)], 1)

    encoder = nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    method = MeanShift(encoder, dim=16, k=5, bank_size=1024)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], 0.1, 0.9)

    def accuracy():
        with torch.no_grad():
            seen, new = encoder.eval()(view()), encoder(view())
        encoder.train()
        return knn_accuracy(seen[:900], labels[:900], new[900:], labels[900:], ks=[5])["5-NN"]

    before = accuracy()
    for _ in range(150):
        chosen = torch.randperm(1200)[:128]
        loss = method(view()[chosen], view()[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.follow()
    assert accuracy() > before + 15


def pictures(count, seed):
    """Four gratings of random phase and colour under noise: the class is the direction."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:16, :16]
    labels = np.arange(count) % 4
    made = np.empty((count, 16, 16, 3), np.uint8)
    for i, label in enumerate(labels):
        angle, phase = np.pi * label / 4, random.uniform(0, 2 * np.pi)
        wave = np.sin(1.3 * (x * np.cos(angle) + y * np.sin(angle)) + phase)[..., None]
        colour = random.uniform(20, 60, 3) * random.choice([-1, 1], 3)
        made[i] = np.clip(128 + wave * colour + random.normal(0, 25, (16, 16, 3)), 0, 255)
    return made, labels


@pytest.fixture
def gratings(tmp_path):
    x_train, y_train = pictures(800, 0)
    x_test, y_test = pictures(200, 1)
    path = tmp_path / "gratings.npz"
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def configure(path, **more):
    return Config().with_overrides(
        {
            "data.source": str(path), "data.image_size": 16, "encoder.name": "resnet10",
            "encoder.stem": "small-stride2", "encoder.width": 0.25, "method.bank_size": 512,
            "method.same_image": "skip", "views.flip": 0.0, "views.blur": 0.0,
            "views.crop_area": (0.4, 1.0), "train.epochs": 6, "train.batch_size": 50,
            "train.lr": 0.05, "train.device": "cpu", "train.snapshots": 2, **more,
        }
    )  # fmt: skip


def test_pictures_from_config_to_judged_run(gratings, tmp_path):
    config = configure(gratings)
    train = ArraySource(*pictures(800, 0), name="train")
    test = ArraySource(*pictures(200, 1), name="test")
    monitor = KNNMonitor(train, test, image_size=16)
    untrained = monitor(build_method(config).online.backbone)
    run = pretrain(config, tmp_path / "run", monitor=monitor)
    trained = monitor(load_encoder(run))
    assert trained["20-NN"] > untrained["20-NN"] + 10
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["kind"] == "snapshot"
    purity = [line["purity"] for line in lines if line["kind"] == "train"]
    assert np.mean(purity[-4:]) > np.mean(purity[:4]) + 0.05
