"""The networks for vectors and signals."""

import pytest
import torch

from meanshift.config import Encoder, SampleSpec
from meanshift.models.encoder import build_backbone
from meanshift.models.small_networks import MLP, SHORTEST, Conv1d


def samples(kind, channels):
    return SampleSpec(
        kind=kind, channels=channels, dtype="float32", mean=(0.0,) * channels, std=(1.0,) * channels
    )


@pytest.mark.parametrize("columns", [5, 64])
def test_an_mlp_begins_with_the_distances_of_the_data(columns):
    vectors = torch.randn(30, columns)
    features = MLP(columns, 64)(vectors)
    torch.testing.assert_close(features @ features.T, vectors @ vectors.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
def test_conv1d_takes_any_length_from_the_shortest_on(channels):
    network = Conv1d(channels, 8).eval()
    for length in (SHORTEST, SHORTEST + 1, 3 * SHORTEST + 7):
        assert network(torch.randn(2, channels, length)).shape == (2, network.features)


def test_features_of_a_sound_do_not_depend_on_its_time():
    network = Conv1d(1, 8).eval()
    sound = torch.zeros(1, 1, 8192)
    sound[..., 2048:3072] = torch.randn(1024)
    shifted = sound.roll(4**5, 2)  # all strides together
    torch.testing.assert_close(network(sound), network(shifted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "channels", "shape"),
    [("mlp", "vector", 7, (3, 7)), ("conv1d", "signal", 2, (3, 2, 2000))],
)
@pytest.mark.parametrize("width", [1.0, 0.125])
def test_backbones_are_built_for_their_samples(name, kind, channels, shape, width):
    settings = Encoder(name=name, width=width)
    backbone, features = build_backbone(settings, image_size=2000, samples=samples(kind, channels))
    assert backbone(torch.randn(shape)).shape == (3, features)


def test_a_window_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match=r"data.image_size: got 1000, need at least 1024"):
        build_backbone(Encoder(name="conv1d"), image_size=1000, samples=samples("signal", 1))
