"""A detector that several processes train is that of one process."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from meanshift import config
from meanshift.cli import main
from meanshift.data.voc import AnnotatedImage, DetectionDataset
from meanshift.evaluation.context import EncoderContext
from meanshift.evaluation.detection import evaluate as protocol
from meanshift.evaluation.detection.model import build_detector
from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.evaluation.detection.train import train_detector
from meanshift.models.encoder import build_backbone
from meanshift.models.weights import Weights, fingerprint
from meanshift.runtime import distributed
from tests.support.forked import in_processes

pytestmark = pytest.mark.slow

START = [0.3, -0.2, 0.5]
REAL = DetectionSettings.scaled(3, size=64, batch_size=3, rois=8)


class Toy(nn.Module):
    """A model whose loss is a mean over images, independent of the rest of the batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(START))

    def forward(self, images, targets):
        means = torch.stack([image.mean((1, 2)) for image in images])
        sides = torch.stack([target["boxes"][0, 0] for target in targets]) / 10
        return {"loss": (means @ self.weight - sides).square().mean()}


def toy_settings(batch_size):
    return DetectionSettings.scaled(4, size=64, batch_size=batch_size, rois=8, lr=0.1)


def context_for(folder):
    torch.manual_seed(0)
    small = config.Encoder(name="resnet10", stem="small-stride2", width=0.125)
    backbone, _ = build_backbone(small)
    return EncoderContext(Weights("test", backbone, "test", 64, folder), device="cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Five images with a box each."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    images = []
    for index in range(5):
        file = folder / f"{index}.png"
        pixels = random.integers(0, 256, (72, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels // (1 + index)).save(file)
        boxes = torch.tensor([[4.0 + index, 5.0, 50.0, 60.0]])
        label, difficult = torch.tensor([index % 2]), torch.tensor([False])
        images.append(AnnotatedImage(file.stem, file, (72, 80), boxes, label, difficult))
    return DetectionDataset("train", ["cat", "dog"], images)


def train_toy(folder, dataset, batch_size):
    toy = Toy()
    log = train_detector(context_for(folder), toy, dataset, toy_settings(batch_size), 1)
    return toy.weight.tolist(), list(log.losses.values()), log.processes


@pytest.mark.parametrize("batch_size", [2, 3])
def test_two_processes_train_as_one_also_with_parts_of_different_sizes(
    dataset, tmp_path, batch_size
):
    ((weight, losses, _),) = in_processes(1, train_toy, tmp_path / "1", dataset, batch_size)
    first, second = in_processes(2, train_toy, tmp_path / "2", dataset, batch_size)
    assert first == second
    assert first[0] == pytest.approx(weight, rel=1e-5)
    assert first[0] != pytest.approx(START, rel=1e-2)
    assert first[1] == pytest.approx(losses, rel=1e-5)
    assert len(set(losses)) == 4


@pytest.mark.parametrize("batch_size", [2, 3])
def test_two_processes_continue_where_one_was_stopped(dataset, tmp_path, batch_size):
    ((weight, _, _),) = in_processes(1, train_toy, tmp_path, dataset, batch_size)
    (newest,) = tmp_path.glob("detectors/*/step-000000004.pt")
    newest.unlink()
    for continued, _, processes in in_processes(2, train_toy, tmp_path, dataset, batch_size):
        assert continued == pytest.approx(weight, rel=1e-5)
        assert processes == [1, 2]


def train_apart(folder, dataset):
    """Process 1 has a folder of its own, without the checkpoints of the other one."""
    train_toy(folder / "shared", dataset, 2)
    try:
        train_toy(folder / ["shared", "other"][distributed.rank()], dataset, 2)
    except ValueError as error:
        return str(error)
    return ""


def test_processes_that_do_not_share_a_disk_are_refused(dataset, tmp_path):
    for message in in_processes(2, train_apart, tmp_path, dataset):
        assert "the processes found different checkpoints" in message
        assert "need a folder on a disk that all of them share" in message


def evaluate(folder, dataset):
    context = context_for(folder)
    detector = build_detector(context.backbone, 2, settings=REAL)
    untrained = fingerprint(detector)
    train_detector(context, detector, dataset, REAL, 0)
    result = protocol.evaluate(context, dataset, dataset, settings=REAL)
    return untrained, fingerprint(detector), result


def test_a_real_detector_and_its_result_are_the_same_in_both_processes(dataset, tmp_path):
    first, second = in_processes(2, evaluate, tmp_path / "2", dataset)
    assert first[:2] == second[:2]
    assert first[0] != first[1]
    for name in ("metrics", "settings", "card"):
        assert getattr(first[2], name) == getattr(second[2], name)
    assert first[2].metrics
    assert first[2].settings["processes"] == [[2]]
    assert first[2].card["unreadable"] == 0
    ((*_, alone),) = in_processes(1, evaluate, tmp_path / "1", dataset)
    assert alone.settings["processes"] == [[1]]


def test_protocols_for_one_process_are_refused_in_several(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "2 processes were started; of the protocols knn and detect work in several"
    for arguments in (["linear", "pixels"], ["linear", "detect", "pixels", "--root", "."]):
        for rank in (0, 1):
            monkeypatch.setenv("RANK", str(rank))
            assert main(["evaluate", *arguments, "--data", "sample"]) == 2
            assert (message in capsys.readouterr().err) == (rank == 0)  # reported once
