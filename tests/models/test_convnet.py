"""The plain convolutional networks: shapes, width, and the grid of means."""

import pytest
import torch

from meanshift import config
from meanshift.models.convnet import Architecture, ConvNet, ResidualBlock
from meanshift.models.encoder import build_backbone


@pytest.mark.parametrize("name", ["conv3", "conv4", "conv7"])
@pytest.mark.parametrize("width", [0.5, 1.0])
@pytest.mark.parametrize("size", [8, 28, 32, 65])
def test_features_have_the_announced_number(name: str, width: float, size: int) -> None:
    network, features = build_backbone(config.Encoder(name=name, width=width))
    assert features == {"conv3": 1024, "conv4": 2048, "conv7": 1024}[name] * width
    assert network(torch.zeros(2, 3, size, size)).shape == (2, features)


def test_features_are_means_over_the_quarters_of_the_last_map() -> None:
    network = ConvNet(Architecture((8, 16, 24))).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    last_map = network.layers(images)
    assert last_map.shape == (2, 24, 4, 4)
    quarters = network(images).unflatten(1, (24, 2, 2))
    torch.testing.assert_close(quarters[:, :, 1, 0], last_map[:, :, 2:, :2].mean((2, 3)))


def test_without_the_pool_maps_have_twice_the_side() -> None:
    images = torch.zeros(2, 3, 32, 32)
    for stem, side in (("imagenet", 4), ("small-stride2", 8)):
        network, features = build_backbone(config.Encoder(name="conv7", stem=stem, width=0.25))
        assert network.layers(images).shape == (2, 64, side, side)
        assert network(images).shape == (2, features) == (2, 256)


def test_the_small_stem_is_for_resnets() -> None:
    with pytest.raises(ValueError, match=r"encoder\.stem is for resnet10"):
        build_backbone(config.Encoder(name="conv3", stem="small"))


def test_residual_blocks_begin_as_the_identity() -> None:
    plain = ConvNet(Architecture((8, 16, 24))).eval()
    deep = ConvNet(Architecture((8, 16, 24), blocks=True)).eval()
    trunk = [layer for layer in deep.layers if not isinstance(layer, ResidualBlock)]
    for layer, copy in zip(plain.layers, trunk, strict=True):
        layer.load_state_dict(copy.state_dict())
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(deep(images), plain(images))
    assert sum(isinstance(module, torch.nn.Conv2d) for module in deep.modules()) == 7
