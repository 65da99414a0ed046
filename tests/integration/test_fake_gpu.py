"""A rehearsal for a GPU: nothing is on the wrong device, and nothing in a step waits for it.

Not rehearsed, since fake tensors have no values: the backward pass, autocast, the gradient scaler,
torch.compile, several processes, the clustering before an epoch, snapshots, checkpoints and the
numbers themselves. `make gpu-check` runs them where there is a GPU.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from meanshift import MeanShift
from meanshift.config import METHODS, Encoder
from meanshift.data import open_source
from meanshift.methods.finite import NotFiniteError
from meanshift.models.convnet import CONVNETS
from meanshift.models.encoder import _RESNETS, build_backbone
from meanshift.models.features import feature_batches
from meanshift.training import metrics
from meanshift.training.session import open_session
from meanshift.training.step import TrainStep
from tests.support.every_method import configure
from tests.support.fake_gpu import DELIBERATE, GPU, Waits, fake_gpu


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as mode:
        yield mode


def take_steps(config, out, gpu, count=1):
    """Steps on the fake GPU as the loop takes them, with zeros for gradients."""
    with open_session(config, out, GPU) as session:
        train_step = TrainStep(session)
        state = session.state
        devices = {t.device.type for t in (*state.method.parameters(), *state.method.buffers())}
        assert devices == {"cuda"}
        gpu.strict = True
        for images in session.batches():
            if images.step == count:
                break
            now = session.schedule.progress(images.step)
            session.schedule.set_lr(state.optimizer, now.step)
            session.method.set_progress(now)
            batch = train_step._augment(images)
            assert {view.device.type for view in batch.views} == {"cuda"}
            session.method.before_forward(now)
            output = train_step.module(batch)
            assert output.loss.requires_grad
            for group in state.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            train_step._update(now)
            state.averages.add(output)
            state.embeddings.add(output.embeddings)
        gpu.strict = False


EVERYDAY = ("msf", "moco", "swav")  # the others are slow tests
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name not in EVERYDAY]


@pytest.mark.parametrize("name", [*EVERYDAY, *OTHERS])
def test_a_step_of_every_method_stays_on_the_gpu(name, source, teacher, tmp_path, gpu):
    take_steps(configure(name, source, teacher), tmp_path / "run", gpu)


@pytest.mark.parametrize(
    "changed",
    [
        {"method.whiten": True, "method.symmetric": True, "optim.name": "muon", "optim.lr": 1e-3},
        {"method.same_image": "skip", "method.bank_dtype": "bfloat16", "optim.clip_norm": 1.0},
        {"method.variance": 1.0, "method.covariance": 1.0, "optim.name": "lars"},
    ],
)
def test_so_do_the_options_of_mean_shift(changed, source, tmp_path, gpu):
    take_steps(configure("msf", source).with_overrides(changed), tmp_path / "run", gpu, count=2)


def test_a_value_that_is_copied_in_each_step_is_found(source, tmp_path, gpu, monkeypatch):
    """A test of the test: `torch.tensor(n, device="cuda")` waits."""

    def add(self, name, mean, weight):
        self.sums[name] = mean * torch.as_tensor(weight, device=mean.device)

    monkeypatch.setattr(metrics.MetricAverages, "_add", add)
    with pytest.raises(Waits, match="_to_copy"):
        take_steps(configure("msf", source), tmp_path / "run", gpu)


@pytest.mark.parametrize(
    "wait",
    [
        lambda rows: rows.cpu(),
        lambda rows: rows.new_tensor([1.0]),
        lambda rows: torch.zeros(3, 2).copy_(rows),
        lambda rows: rows[torch.tensor([0, 1])],
        lambda rows: rows[rows > 0],
        lambda rows: float(rows.sum()),
        lambda rows: rows.tolist(),
        lambda rows: rows.numpy(),
        lambda rows: rows + torch.ones(3, 2),
        lambda rows: torch.linalg.eigh(rows[:2]),
    ],
)
def test_what_waits_or_is_on_two_devices_is_an_error(wait, gpu):
    rows = torch.zeros(3, 2, device=GPU)
    assert torch.ones(3, 2).sum() == 6  # CPU tensors are real
    gpu.strict = True
    with pytest.raises((Waits, RuntimeError)):
        wait(rows)


@pytest.mark.usefixtures("gpu")
def test_nan_on_a_gpu_is_reported_when_it_arrives():
    method = MeanShift(nn.Linear(4, 4), 4, k=2, bank_size=8).to(GPU)
    view = torch.zeros(4, 4, device=GPU)
    places = "the input `online_view`", "the input `target_view`", "the embeddings", "the loss"
    for where in places:
        method(view, view)
        assert tuple(method._finite._flags) == places
        method._finite._flags[where][1].fill_(True)
        with pytest.raises(NotFiniteError, match=f"NaN or infinity in {where} in one of the last"):
            method._finite.raise_arrived()
    method(view, view)


ENCODERS = [Encoder(name=name, width=0.125) for name in (*_RESNETS, *CONVNETS)]
ENCODERS += [
    Encoder(name="mobilenet_v3_small"),
    Encoder(output="whitened"),
    Encoder(stem="small-stride2"),
]


@pytest.mark.parametrize("settings", ENCODERS, ids=lambda e: f"{e.name}-{e.stem}-{e.output}")
def test_features_of_every_encoder_wait_only_for_their_copy(settings, source, gpu):
    network, features = build_backbone(settings, image_size=32)
    network.to(GPU)
    gpu.strict = True
    images = open_source(str(source))["train"]
    batches = feature_batches(network, images, image_size=32, device=GPU, batch_size=32, bad={})
    assert [tuple(rows.shape) for rows in batches] == [(32, features), (16, features)]


def test_the_deliberate_waits_are_documented():
    page = Path("docs/reliability.md").read_text()
    for name, reason in DELIBERATE.items():
        assert f"| `{name}` | {reason} |" in page
