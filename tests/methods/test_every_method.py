"""What holds for every method: it learns in anybody's loop, and a broken one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from meanshift.config import METHODS
from meanshift.evaluation.knn import knn_accuracy
from meanshift.methods import Batch, MeanShift, Method, Progress
from meanshift.methods.byol import BYOL
from meanshift.methods.cmsf import CMSF
from meanshift.methods.co2 import CO2
from meanshift.methods.compress import CompRess
from meanshift.methods.deepcluster_v2 import DeepClusterV2
from meanshift.methods.invp import InvP
from meanshift.methods.isd import ISD
from meanshift.methods.moco import MoCo
from meanshift.methods.pirl import PIRL
from meanshift.methods.sela_v2 import SeLaV2
from meanshift.methods.simclr import SimCLR
from meanshift.methods.simsiam import SimSiam
from meanshift.methods.supervised import Supervised
from meanshift.methods.swav import SwAV
from meanshift.methods.teacher import Teacher
from meanshift.methods.vicreg import VICReg

SAMPLES, SIGNAL, NOISE, DIM, FEATURES, CLASSES = 600, 8, 32, 16, 64, 6
BATCH_SIZE, EPOCHS = 50, 25


class Encoder(nn.Module):
    """Values of an image of one pixel through a hidden layer."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Flatten(), nn.Linear(SIGNAL + NOISE, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU()
        )
        self.projector = nn.Linear(FEATURES, dim) if dim else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        embedding: Tensor = self.projector(self.backbone(images))
        return embedding


class Sees(nn.Module):
    """A teacher whose features are some of the values: the signal or, a bad one, noise."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.layer = nn.Linear(SIGNAL, SIGNAL, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        values = images.flatten(1)[:, self.first : self.first + SIGNAL]
        features: Tensor = self.layer(values)
        return features


BUILD: dict[str, Callable[[], Method]] = {
    "msf": lambda: MeanShift(Encoder(), DIM, k=5, bank_size=300),
    "byol-asym": lambda: MeanShift(Encoder(), DIM, k=1),
    "byol": lambda: BYOL(Encoder(), DIM, hidden=64, momentum=0.9),
    "simsiam": lambda: SimSiam(Encoder(), DIM, predictor_hidden=8),
    "vicreg": lambda: VICReg(Encoder(), DIM),
    "cmsf": lambda: CMSF(Encoder(), DIM, samples=SAMPLES, bank_size=300, hidden=64),
    "swav": lambda: SwAV(Encoder(), DIM, prototypes=12),
    "deepcluster-v2": lambda: DeepClusterV2(Encoder(), DIM, samples=SAMPLES, prototypes=12),
    "sela-v2": lambda: SeLaV2(Encoder(), DIM, samples=SAMPLES, prototypes=12),
    "invp": lambda: InvP(Encoder(), DIM, samples=SAMPLES, background=200, positives=10),
    "pirl": lambda: PIRL(Encoder(), DIM, features=FEATURES, samples=SAMPLES, negatives=200),
    "compress": lambda: CompRess(
        Encoder(SIGNAL), SIGNAL, teacher=Teacher(Sees(), SIGNAL), bank_size=300
    ),
    "supervised": lambda: Supervised(Encoder(0), FEATURES, classes=CLASSES),
    "moco": lambda: MoCo(Encoder(), DIM, bank_size=300, momentum=0.9),
    "co2": lambda: CO2(Encoder(), DIM, alpha=1.0, bank_size=300, momentum=0.9),
    "isd": lambda: ISD(Encoder(), DIM, bank_size=300, hidden=64),
    "simclr": lambda: SimCLR(Encoder(), DIM),
}


def views_of(name: str) -> int:
    """The views that a step takes."""
    return {"invp": 1, "compress": 1, "supervised": 1}.get(name, 2)


class Data:
    """Six classes that differ in 8 of 40 values; the other 32 are noise, new in each view."""

    def __init__(self) -> None:
        self.labels = torch.arange(SAMPLES) % CLASSES
        self.signal = torch.randn(CLASSES, SIGNAL)[self.labels]
        self.signal = self.signal + 0.3 * torch.randn(SAMPLES, SIGNAL)

    def view(self, ids: Tensor) -> Tensor:
        noise = 2 * torch.randn(len(ids), NOISE)
        return torch.cat([self.signal[ids], noise], 1)[:, :, None, None]

    def patches(self, ids: Tensor) -> Tensor:
        return torch.stack([self.view(ids) for _ in range(9)], 1)

    def accuracy(self, backbone: nn.Module) -> float:
        every = torch.arange(SAMPLES)
        with torch.no_grad():
            seen, new = backbone.eval()(self.view(every)), backbone(self.view(every))
        backbone.train()
        half = SAMPLES // 2
        truth = self.labels
        return knn_accuracy(seen[:half], truth[:half], new[half:], truth[half:], ks=[5])["5-NN"]


def train(name: str, *, broken: bool = False) -> tuple[float, float]:
    """The accuracies of the backbone before and after training in the loop of the contract.

    In a broken loop the views of a step are of different samples, with wrong ids and labels, and a
    teacher sees noise.
    """
    torch.manual_seed(0)
    data = Data()
    method = BUILD[name]().train()
    if broken and isinstance(method, CompRess):
        method.teacher = Teacher(Sees(SIGNAL), SIGNAL)
    groups = [{"params": group["params"]} for group in method.parameter_groups()]
    optimizer = torch.optim.AdamW(groups, 3e-3)
    backbone = method.online.get_submodule("backbone")
    before = data.accuracy(backbone)

    def batches() -> Iterator[Batch]:
        for ids in torch.arange(SAMPLES).split(BATCH_SIZE):
            yield Batch((data.view(ids),), ids, data.labels[ids])

    steps = SAMPLES // BATCH_SIZE
    for epoch in range(EPOCHS):
        for number, ids in enumerate(torch.randperm(SAMPLES).split(BATCH_SIZE)):
            now = Progress(epoch * steps + number, steps, EPOCHS)
            if number == 0:
                method.begin_epoch(now, batches)
            method.set_progress(now)
            method.before_forward(now)
            other = torch.randint(SAMPLES, (BATCH_SIZE,)) if broken else ids
            views = [data.view(ids)]
            if views_of(name) == 2:
                views.append(data.patches(other) if name == "pirl" else data.view(other))
            told = torch.randperm(SAMPLES)[:BATCH_SIZE] if broken else ids
            output = method(*views, ids=told, labels=data.labels[told])
            optimizer.zero_grad()
            output.loss.backward()
            method.before_update(now)
            optimizer.step()
            method.after_update(now)
    return before, data.accuracy(backbone)


def test_every_method_is_here() -> None:
    assert set(BUILD) == set(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILD)
def test_it_learns_in_anybodys_loop(name: str) -> None:
    before, after = train(name)
    assert after > before + 15


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILD)
def test_it_does_not_learn_from_wrong_pairs(name: str) -> None:
    """A test of the test: what it measures comes from the pairs."""
    before, after = train(name, broken=True)
    assert after < before + 10
