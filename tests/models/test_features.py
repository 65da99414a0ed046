"""Frozen features: the model does not change, and rows follow the order of the source."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.transforms.v2 import functional as TF

from meanshift import config
from meanshift.config.samples import IMAGENET_MEAN as MEAN
from meanshift.config.samples import IMAGENET_STD as STD
from meanshift.data import open_source
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.models.encoder import build_backbone
from meanshift.models.features import evaluation_batches, extract_features

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def few():
    return open_source("sample")["train"].subset(torch.arange(0, 10_000, 250))


@pytest.fixture
def network():
    torch.manual_seed(0)
    backbone, _ = build_backbone(config.Encoder(name="resnet10", stem="small-stride2", width=0.25))
    with torch.no_grad():  # statistics that a forward pass in training mode would move
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return backbone


def features_of(network, source, image_size=32, **options):
    return extract_features(network, source, image_size=image_size, device=CPU, **options)


def arrays(count, height, width, seed=0):
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return ArraySource(pixels, None, name="toy")


@pytest.mark.parametrize("training", [True, False])
def test_extract_changes_no_bit_of_the_model(network, few, training):
    network.train(training)
    before = copy.deepcopy(network.state_dict())
    parameters = list(network.parameters())
    features_of(network, few)
    after = network.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in parameters)
    assert all(module.training == training for module in network.modules())


def test_extract_restores_the_mode_of_each_module(network, few):
    network.train()
    network.bn1.eval()
    features_of(network, few)
    assert network.training and network.layer1.training
    assert not network.bn1.training


def test_extract_restores_the_mode_after_an_error(few):
    class Fails(nn.Module):
        def forward(self, _):
            raise RuntimeError("on purpose")

    network = Fails().train()
    with pytest.raises(RuntimeError, match="on purpose"):
        features_of(network, few)
    assert network.training


def test_extract_leaves_the_global_generator_alone(network, few):
    before = torch.get_rng_state()
    features_of(network, few)
    assert torch.equal(torch.get_rng_state(), before)


def test_features_are_the_eval_output_in_order(network, few):
    got = features_of(network.train(), few)
    images = few.read_batch(torch.arange(len(few))).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        expected = network.eval()(TF.normalize(images, list(MEAN), list(STD)))
        in_training = network.train()(TF.normalize(images, list(MEAN), list(STD)))
    assert got.dtype == torch.float32
    assert got.shape == (40, 128)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, in_training, atol=1e-2)


@pytest.mark.parametrize("batch_size", [1, 7, 40, 1000])
def test_features_do_not_depend_on_the_batch_size(network, few, batch_size):
    expected = features_of(network, few, batch_size=13)
    got = features_of(network, few, batch_size=batch_size)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_features_follow_the_order_of_the_source(network, few):
    backwards = features_of(network, few.subset(torch.arange(39, -1, -1)))
    torch.testing.assert_close(backwards.flip(0), features_of(network, few), atol=1e-4, rtol=1e-4)


def test_features_in_low_precision_are_float32_and_near(network, few):
    exact = features_of(network, few)
    rough = features_of(network, few, precision=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert 0 < (exact - rough).abs().mean() < 0.05 * exact.abs().mean()


def test_a_head_can_be_trained_on_features(network, few):
    features = features_of(network, few)
    head = nn.Linear(features.shape[1], 2)
    head(features).sum().backward()
    assert head.weight.grad is not None


def test_an_unreadable_image_is_gray_and_moves_no_other(tmp_path, make_images, network):
    source = FolderSource(make_images(tmp_path, {"": 3}))
    whole = features_of(network, source)
    (tmp_path / "001.jpg").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"1 of 3 images cannot be read .*001\.jpg"):
        features = features_of(network, source)
    torch.testing.assert_close(features[[0, 2]], whole[[0, 2]], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(features[1], whole[1], atol=1e-3)
    bad = {}
    again = features_of(network, source, bad=bad)
    assert torch.equal(again, features)
    assert {index: error.title for index, error in bad.items()} == {1: str(tmp_path / "001.jpg")}


def test_evaluation_batches_are_the_source_in_order(few):
    batches = list(evaluation_batches(few, image_size=32, device=CPU, batch_size=16))
    assert [len(indices) for indices, _ in batches] == [16, 16, 8]
    assert torch.equal(torch.cat([indices for indices, _ in batches]), torch.arange(40))
    images = few.read_batch(torch.arange(40)).permute(0, 3, 1, 2).float() / 255
    expected = TF.normalize(images, list(MEAN), list(STD))
    got = torch.cat([views for _, views in batches])
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
