"""Frozen features: nothing of the model changes, order is kept, images are cut by the rule."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.transforms.v2 import functional as TF

from meanshift import config
from meanshift.data import UnreadableSample, open_source
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.models.encoder import build_backbone
from meanshift.models.features import extract_features
from meanshift.ops import image
from meanshift.transforms.eval import eval_transform

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def few():
    return open_source("sample")["train"].take(torch.arange(0, 10_000, 250))


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
    image = random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return ArraySource(image, None, name="toy")


@pytest.mark.parametrize("training", [True, False])
def test_extract_changes_no_bit_of_the_model(network, few, training):
    network.train(training)
    before, kept = copy.deepcopy(network.state_dict()), list(network.parameters())
    features_of(network, few)
    after = network.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(a is b for a, b in zip(network.parameters(), kept, strict=True))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in kept)
    assert all(module.training == training for module in network.modules())


def test_extract_keeps_the_mode_of_each_part(network, few):
    network.train()
    network.bn1.eval()
    features_of(network, few)
    assert network.training and network.layer1.training
    assert not network.bn1.training


def test_extract_gives_the_mode_back_after_an_error(few):
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
    images = few.gather(torch.arange(len(few))).permute(0, 3, 1, 2).float() / 255
    mean, deviation = list(image.MEAN), list(image.STD)
    with torch.no_grad():
        expected = network.eval()(TF.normalize(images, mean, deviation))
        in_training = network.train()(TF.normalize(images, mean, deviation))
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
    backwards = features_of(network, few.take(torch.arange(39, -1, -1)))
    torch.testing.assert_close(backwards.flip(0), features_of(network, few), atol=1e-4, rtol=1e-4)


def test_features_in_low_precision_are_float32_and_near(network, few):
    exact, rough = features_of(network, few), features_of(network, few, precision=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert 0 < (exact - rough).abs().mean() < 0.05 * exact.abs().mean()


def test_a_head_can_be_trained_on_features(network, few):
    features = features_of(network, few)
    head = nn.Linear(features.shape[1], 2)
    head(features).sum().backward()
    assert head.weight.grad is not None


def test_arrays_that_were_trained_enlarged_are_judged_enlarged():
    assert eval_transform(arrays(2, 32, 28), torch.arange(2), 48).shape == (2, 3, 48, 48)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 20), (64, 64)])
def test_small_arrays_keep_their_own_size(height, width):
    source = arrays(5, height, width)
    got = eval_transform(source, torch.tensor([4, 1]), 32)
    assert got.shape == (2, 3, height, width)
    assert np.array_equal(got.numpy(), source.pixels[[4, 1]].transpose(0, 3, 1, 2))


@pytest.mark.parametrize(("height", "width"), [(80, 80), (100, 70), (66, 300)])
def test_large_arrays_are_cut_from_the_center(height, width):
    source = arrays(3, height, width)
    got = eval_transform(source, torch.arange(3), 56)
    expected = TF.resize(torch.from_numpy(source.pixels).permute(0, 3, 1, 2), [64], antialias=True)
    expected = TF.center_crop(expected, [56, 56])
    assert got.shape == (3, 3, 56, 56)
    torch.testing.assert_close(got, expected)


def test_photos_are_resized_to_256_and_cut_to_224(tmp_path, make_images):
    make_images(tmp_path, {"wide": 1}, size=(60, 90))
    make_images(tmp_path, {"tall": 1}, size=(300, 40))
    source = FolderSource(tmp_path)
    got = eval_transform(source, torch.tensor([0, 1]), 224)
    assert got.shape == (2, 3, 224, 224)
    for index in range(2):
        resized = TF.resize(source.read(index), [256], antialias=True)
        assert min(resized.shape[1:]) == 256
        assert torch.equal(got[index], TF.center_crop(resized, [224, 224]))


def test_the_papers_own_crop_can_be_had(tmp_path, make_images):
    source = FolderSource(make_images(tmp_path, {"": 1}, size=(60, 90)))
    got = eval_transform(source, torch.tensor([0]), 256, 256)
    expected = TF.center_crop(TF.resize(source.read(0), [256], antialias=True), [256, 256])
    assert torch.equal(got[0], expected)


def test_small_photos_are_cut_too(tmp_path, make_images):
    source = FolderSource(make_images(tmp_path, {"": 2}, size=(20, 30)))
    assert eval_transform(source, torch.arange(2), 32).shape == (2, 3, 32, 32)


def test_an_unreadable_photo_is_gray_and_moves_no_other(tmp_path, make_images, network):
    source = FolderSource(make_images(tmp_path, {"": 3}))
    whole = features_of(network, source)
    (tmp_path / "001.jpg").write_bytes(b"")
    with pytest.raises(UnreadableSample, match=r"001\.jpg"):
        eval_transform(source, torch.arange(3), 32)
    bad = {}
    got = eval_transform(source, torch.arange(3), 32, bad=bad)
    assert (got[1] == 128).all()
    assert {index: error.title for index, error in bad.items()} == {1: str(tmp_path / "001.jpg")}
    with pytest.warns(UserWarning, match=r"1 of 3 images cannot be read .*001\.jpg"):
        features = features_of(network, source)
    torch.testing.assert_close(features[[0, 2]], whole[[0, 2]], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(features[1], whole[1], atol=1e-3)
