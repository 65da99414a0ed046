"""The recipe for networks without batch norm: torchvision's ConvNeXt and ViT take its steps."""

import pytest
import torch

from meanshift.config.recipes import recipe
from meanshift.training.session import open_session
from meanshift.training.step import TrainStep
from tests.support.toy_method import make_arrays

STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext_tiny", "vit_b_16"])
def test_torchvisions_networks_are_trained_after_a_warm_up(name, tmp_path):
    config = recipe("small-convnext").with_overrides(
        {
            "data.source": str(make_arrays(tmp_path)), "data.image_size": 32, "data.workers": 0,
            "encoder.name": name, "encoder.output": "plain", "method.bank_size": 16,
            "optim.heads_first": 0, "train.batch_size": 4, "train.device": "cpu",
            "train.precision": "float32", "train.snapshots": 0,
        }
    )  # fmt: skip
    rates, losses = [], []
    with open_session(config, tmp_path / "run", torch.device("cpu")) as session:
        train_step = TrainStep(session)
        before = {n: p.detach().clone() for n, p in session.backbone.named_parameters()}
        for images in session.batches():
            if images.step == STEPS:
                break
            rates.append(session.schedule.set_lr(session.state.optimizer, images.step))
            output = train_step(images, session.schedule.progress(images.step))
            losses.append(float(output.loss.detach()))
        after = dict(session.backbone.named_parameters())
    assert torch.tensor(losses).isfinite().all()
    assert rates == sorted(rates) and rates[-1] < config.optim.lr / 4
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    assert not unchanged
