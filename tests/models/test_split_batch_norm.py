"""Batch norm over groups against batch norm of each group, in encoders and with shuffled keys."""

import pytest
import torch
from torch import nn

from meanshift import config
from meanshift.config.recipes import recipe
from meanshift.methods.moco import MoCo
from meanshift.models.encoder import Encoder, build_backbone
from meanshift.models.split_batch_norm import SplitBatchNorm2d, split_batch_norm
from meanshift.runtime import distributed
from tests.support.forked import in_processes


def test_each_group_is_normalized_as_by_batch_norm_of_its_own():
    torch.manual_seed(0)
    images = torch.randn(6, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    split = SplitBatchNorm2d(4, 3).double()
    nn.init.normal_(split.weight)
    nn.init.normal_(split.bias)
    alone = [nn.BatchNorm2d(4).double() for _ in range(3)]
    for norm in alone:
        norm.load_state_dict(split.state_dict())
    expected = torch.cat([norm(part) for norm, part in zip(alone, images.split(2), strict=True)])
    output = split(images)
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), images)
    (found,) = torch.autograd.grad((output * weights).sum(), images)
    torch.testing.assert_close(found, wanted)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(norm, name) for norm in alone]).mean(0)
        torch.testing.assert_close(getattr(split, name), mean)
    plain = nn.BatchNorm2d(4).double()
    plain.load_state_dict(split.state_dict())
    torch.testing.assert_close(split.eval()(images), plain.eval()(images))


def test_channels_last_stays_and_the_momentum_may_be_none():
    torch.manual_seed(0)
    images = torch.randn(6, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    split = SplitBatchNorm2d(4, 3)
    split.momentum = None  # the average of all batches
    assert split(images).is_contiguous(memory_format=torch.channels_last)
    split(2 * images)
    means = torch.stack([images.mean((0, 2, 3)), 2 * images.mean((0, 2, 3))])
    torch.testing.assert_close(split.running_mean, means.mean(0))
    assert split.num_batches_tracked == 2


def test_an_encoder_has_it_with_the_names_of_batch_norm():
    settings = config.Encoder(name="resnet10", width=0.125, batch_groups=2)
    network = Encoder(settings, image_size=32).backbone
    plain, _ = build_backbone(settings, image_size=32)  # what is evaluated has no groups
    assert not any(isinstance(m, SplitBatchNorm2d) for m in plain.modules())
    plain.load_state_dict(network.state_dict())
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms and all(isinstance(m, SplitBatchNorm2d) and m.groups == 2 for m in norms)
    with pytest.raises(ValueError, match=r"3 images for 2 groups.*--train\.batch_size"):
        network(torch.zeros(3, 3, 32, 32))


def groups_of_a_process(groups):
    network = nn.Sequential(nn.BatchNorm2d(4))
    try:
        split_batch_norm(network, groups)
    except ValueError as error:
        return str(error)
    return network[0].groups


def test_groups_are_those_of_all_processes():
    assert groups_of_a_process(4) == 4
    assert in_processes(2, groups_of_a_process, 4) == [2, 2]
    assert in_processes(2, groups_of_a_process, 2) == [1, 1]
    for message in in_processes(2, groups_of_a_process, 5):
        assert "got 5 groups for 2 processes" in message and "--encoder.batch_groups 6" in message


class Recorder(nn.Module):
    """Knows which images were in each group; an image is known by its first value."""

    def __init__(self, groups):
        super().__init__()
        self.norm = SplitBatchNorm2d(4, groups)
        self.seen = []

    def forward(self, images):
        self.seen = [set(part[:, 0, 0, 0].tolist()) for part in images.chunk(self.norm.groups)]
        return self.norm(images).mean((2, 3))


def test_keys_are_normalized_with_other_images_than_their_queries():
    torch.manual_seed(0)
    images = torch.randn(16, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    method = MoCo(Recorder(4), 4, bank_size=16)
    method.shuffle_seed = 5
    shuffled = method(images, images).embeddings
    online, target = method.online.seen, method.target.seen
    assert set.union(*online) == set.union(*target) and len(set.union(*target)) == 16
    assert all(len(group) == 4 for group in target)
    assert not any(group in online for group in target)
    method.shuffle_seed = None
    plain = method(images, images).embeddings
    assert method.target.seen == method.online.seen
    assert not torch.allclose(shuffled, plain)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(5))
    expected = torch.empty_like(plain)  # the keys come back in their order
    expected[order] = nn.functional.normalize(method.target(images[order]))
    torch.testing.assert_close(shuffled, expected)
    method.eval()
    method.shuffle_seed = 5
    method(images, images)
    assert method.target.seen == method.online.seen


def moco_losses():
    """The losses of steps with 4 groups over all processes and shuffled keys, and the queue."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)
    ).double()
    split_batch_norm(network, 4)
    method = MoCo(network.double(), 5, bank_size=32).double()
    first, end = distributed.shard_range(16)
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        views = torch.randn(2, 16, 3, 4, 4, generator=generator, dtype=torch.float64)
        method.shuffle_seed = step
        loss = method(*views[:, first:end]).loss.detach()
        distributed.all_mean_(loss)
        losses.append(loss)
    return torch.stack(losses), method.bank.rows


def test_two_processes_have_the_groups_of_one():
    expected = moco_losses()
    for found in in_processes(2, moco_losses):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "groups"), [("cifar10-r18", 8), ("small", 1)])
def test_moco_at_the_size_of_cifar_has_eight_groups(name, groups):
    moco = recipe(name).with_overrides({"method.name": "moco"})
    assert moco.encoder.batch_groups == groups and moco.train.batch_norm == "shuffle"
