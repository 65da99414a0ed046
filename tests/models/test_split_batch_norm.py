"""Batch norm over groups against batch norm of each group, and in the encoder."""

import pytest
import torch
from torch import nn

from meanshift import config
from meanshift.config.recipes import recipe
from meanshift.models.encoder import build_backbone
from meanshift.models.split_batch_norm import SplitBatchNorm2d


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


def test_an_encoder_has_it_with_the_names_of_batch_norm():
    settings = config.Encoder(name="resnet10", width=0.125, batch_groups=2)
    network, _ = build_backbone(settings, image_size=32)
    plain, _ = build_backbone(config.Encoder(name="resnet10", width=0.125), image_size=32)
    plain.load_state_dict(network.state_dict())
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms and all(isinstance(m, SplitBatchNorm2d) and m.groups == 2 for m in norms)
    with pytest.raises(ValueError, match=r"2 groups for 3 images; need a --train\.batch_size"):
        network(torch.zeros(3, 3, 32, 32))


@pytest.mark.parametrize(("name", "groups"), [("cifar10-r18", 8), ("small", 1)])
def test_moco_at_the_size_of_cifar_has_eight_groups(name, groups):
    assert recipe(name).with_overrides({"method.name": "moco"}).encoder.batch_groups == groups
