"""Principal components as initial filters, compared with naive references."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meanshift import config
from meanshift.data.arrays import ArraySource
from meanshift.data.sample import read_sample
from meanshift.evaluation.knn import KNNMonitor
from meanshift.models import initialization
from meanshift.models.encoder import build_backbone
from meanshift.models.initialization import (
    initialize_from_images,
    measure_batch_norm,
    patch_covariance,
    principal_filters,
    set_principal_components,
)
from meanshift.models.split_batch_norm import split_batch_norm
from tests.support.exact import assert_same
from tests.support.sources import open_one

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count=12, side=10, channels=3, seed=0):
    """Smooth images, whose patches have a clear spectrum."""
    noise = torch.randn(count, channels, side, side, generator=generator(seed))
    return F.avg_pool2d(noise, 3, stride=1, padding=1) + 0.3 * noise + 2


def naive_covariances(layer, inputs):
    """The covariance of all patches of each group, by `unfold` and `torch.cov`."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    size, dilation = layer.kernel_size, layer.dilation
    if layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        pads = [total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2]
    else:
        pads = [layer.padding[1]] * 2 + [layer.padding[0]] * 2
    padded = F.pad(inputs, pads, mode=mode)
    covariances = []
    for part in padded.chunk(layer.groups, 1):
        patches = F.unfold(part, size, dilation=dilation, stride=layer.stride)
        covariances.append(torch.cov(patches.transpose(1, 2).flatten(0, 1).T, correction=0))
    return torch.stack(covariances)


LAYERS = {
    "3x3": nn.Conv2d(4, 8, 3, padding=1),
    "1x1": nn.Conv2d(4, 6, 1),
    "stride": nn.Conv2d(4, 8, 3, stride=2, padding=1),
    "not square": nn.Conv2d(4, 8, (1, 5), stride=(2, 1), padding=(0, 2)),
    "dilated": nn.Conv2d(4, 8, 3, dilation=2, padding=2, padding_mode="reflect"),
    "circular": nn.Conv2d(4, 8, (3, 2), padding=(2, 1), padding_mode="circular"),
    "same": nn.Conv2d(4, 8, (2, 3), padding="same"),
    "grouped": nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": nn.Conv2d(4, 8, 3, padding=1, groups=4),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_covariance_is_that_of_all_patches_of_each_group(layer):
    inputs = images(channels=4)
    expected = naive_covariances(layer, inputs)
    torch.testing.assert_close(
        patch_covariance(layer, inputs, generator()), expected, atol=1e-5, rtol=1e-4
    )


def test_only_a_sample_of_many_patches_is_copied(monkeypatch):
    layer = nn.Conv2d(3, 8, 3)
    inputs = images(100, side=20)
    monkeypatch.setattr(initialization, "_CHUNK", 500)
    monkeypatch.setattr(initialization, "PATCHES", 3000)
    got = patch_covariance(layer, inputs, generator())
    expected = naive_covariances(layer, inputs)
    assert 0 < (got - expected).norm() / expected.norm() < 0.2


@pytest.mark.parametrize(("filters", "values"), [(8, 20), (7, 20), (1, 9), (10, 4)])
def test_filters_are_white_components_with_both_signs(filters, values):
    """Odd numbers, a single filter, and more filters than components."""
    rows = torch.randn(2, 500, values, generator=generator()) * torch.linspace(3, 0.5, values)
    covariance = torch.stack([torch.cov(part.T) for part in rows])
    got = principal_filters(covariance, filters, generator(1))
    assert got.shape == (2, filters, values)
    half = (filters + 1) // 2
    for matrix, own in zip(covariance.double().numpy(), got.double().numpy(), strict=True):
        spectrum, vectors = np.linalg.eigh(matrix)
        for place in range(min(half, values)):
            expected = vectors[:, -1 - place] / np.sqrt(
                spectrum[-1 - place] + 0.1 * spectrum.mean()
            )
            expected *= np.sign(expected[np.abs(expected).argmax()])
            np.testing.assert_allclose(own[place], expected, atol=1e-4)
        np.testing.assert_array_equal(own[half:], -own[: filters - half])
        assert np.linalg.matrix_rank(own) == min(half, values)
        assert np.abs(own).min(1).max() > 0


def test_a_constant_input_does_not_make_huge_filters():
    """As behind a residual branch that begins as zero."""
    filters = principal_filters(torch.zeros(2, 9, 9), 4, generator())
    torch.testing.assert_close(filters.norm(dim=2), torch.ones(2, 4))


def test_large_matrices_have_the_same_leading_components(monkeypatch):
    spectrum = 0.9 ** torch.arange(300.0)
    basis = torch.linalg.qr(torch.randn(300, 300, generator=generator()))[0]
    covariance = ((basis * spectrum) @ basis.T)[None]
    expected = principal_filters(covariance, 20, generator())
    monkeypatch.setattr(initialization, "_FULL_DECOMPOSITION", 10)
    got = principal_filters(covariance, 20, generator())
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


class Branches(nn.Module):
    """Registered in another order than executed; one layer is shared and one never reached."""

    def __init__(self):
        super().__init__()
        self.last = nn.Conv2d(8, 6, 1, bias=False)
        self.unused = nn.Conv2d(8, 8, 3)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.shared = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.norms[0](self.first(x)).relu()
        x = x + self.norms[1](self.shared(x)).relu()
        x = x + self.norms[2](self.shared(x)).relu()
        return self.head(self.dropout(self.last(x).mean((2, 3))))


class Reached(Exception):
    pass


def layer_by_layer(network, inputs):
    """The reference: for each layer, run the network from its start up to it."""
    for name in ("first", "shared", "last"):
        layer = network.get_submodule(name)
        seen = []

        def stop(_, arguments, seen=seen):
            seen.append(arguments[0])
            raise Reached

        handle = layer.register_forward_pre_hook(stop)
        with torch.no_grad(), pytest.raises(Reached):
            network.train()(inputs)
        handle.remove()
        covariance = naive_covariances(layer, seen[0])
        filters = principal_filters(covariance, layer.out_channels // layer.groups, generator())
        with torch.no_grad():
            layer.weight.copy_(filters.reshape(layer.weight.shape))
            if layer.bias is not None:
                layer.bias.zero_()


def test_a_single_pass_is_what_a_pass_for_each_layer_gives():
    torch.manual_seed(0)
    network = Branches()
    reference = copy.deepcopy(network)
    layer_by_layer(reference, images())
    assert set_principal_components(network, images(), generator()) == ["first", "shared", "last"]
    for (name, ours), theirs in zip(
        network.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3, msg=name)


def small_source(count=40, side=12):
    pixels = images(count, side).permute(0, 2, 3, 1)
    pixels = ((pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255).to(torch.uint8)
    return ArraySource(pixels.numpy(), np.arange(count) % 2, name="small")


def initialize(network, source, seed=0):
    return initialize_from_images(network, source, image_size=12, seed=seed, device=CPU)


def test_the_result_depends_on_the_seed_alone_and_modes_are_restored():
    torch.manual_seed(0)
    networks = [Branches() for _ in range(3)]
    for network in networks[1:]:
        network.load_state_dict(networks[0].state_dict())
        network.norms[1].eval()
        network.norms[0].momentum = 0.3
    state = torch.random.get_rng_state()
    results = [
        initialize(n, small_source(), seed) for n, seed in zip(networks, (0, 0, 1), strict=True)
    ]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same(networks[1].state_dict(), networks[0].state_dict())
    assert not torch.equal(networks[2].first.weight, networks[0].first.weight)
    assert networks[1].training and not networks[1].norms[1].training
    assert networks[1].norms[0].momentum == 0.3
    assert results[0] == results[1]
    assert (results[0].images, results[0].statistics_images) == (20, 20)
    assert results[0].random_layers == ["unused", "head"]
    stay_random, few = results[0].warnings()
    assert "3 convolutions" in stay_random and "stay random: unused, head" in stay_random
    assert "measured on only 20 images" in few
    assert results[0].card()["layers"] == ["first", "shared", "last"]


def test_statistics_are_the_mean_over_batches_of_other_images(monkeypatch):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    seen = []
    network.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    monkeypatch.setattr(initialization, "BATCH_SIZE", 10)
    result = initialize(network, small_source(45))
    fitted, *batches = seen
    assert [len(batch) for batch in seen] == [22, 8, 8, 7] and result.statistics_images == 23
    others = torch.cat(batches)
    assert not (fitted.flatten(1)[:, None] == others.flatten(1)).all(2).any()
    outputs = [network[0](batch) for batch in batches]
    means = torch.stack([output.mean((0, 2, 3)) for output in outputs])
    variances = torch.stack([output.var((0, 2, 3)) for output in outputs])
    torch.testing.assert_close(network[1].running_mean, means.mean(0))
    torch.testing.assert_close(network[1].running_var, variances.mean(0))


def test_groups_of_batch_norm_are_not_used_for_its_statistics():
    """The batches of 50 images are no multiple of the 8 groups."""
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()) for _ in "ab"]
    networks[1].load_state_dict(networks[0].state_dict())
    split_batch_norm(networks[1], 8)
    results = [initialize(network, small_source(100)) for network in networks]
    assert results[0] == results[1]
    assert_same(networks[1].state_dict(), networks[0].state_dict())
    assert networks[1][1].running_mean.abs().min() > 0
    assert networks[1][1].groups == 8


def test_unreadable_images_are_left_out(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 30}, size=(12, 12))
    for index in (3, 7, 20):
        (root / "a" / f"{index:03d}.jpg").write_bytes(b"torn")
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    seen = []
    network.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    result = initialize(network, open_one(root))
    assert result.images + result.statistics_images == 27 == sum(map(len, seen))
    assert all(image.std() > 0.1 for batch in seen for image in batch)  # none of them is gray


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match=r"at least 8 images, got 5.*--encoder.init random"):
        initialize(Branches(), small_source(5))


@pytest.mark.parametrize(
    ("name", "size", "stays_random"),
    [("mobilenet_v3_small", 32, 1), ("shufflenet_v2_x0_5", 32, 0)],
)
def test_networks_of_torchvision(name, size, stays_random):
    """Depthwise convolutions, squeeze and excitation, split channels."""
    torch.manual_seed(0)
    backbone, features = build_backbone(config.Encoder(name=name), image_size=size)
    result = initialize_from_images(
        backbone, small_source(24, size), image_size=size, seed=0, device=CPU
    )
    convolutions = [m for m in backbone.modules() if isinstance(m, nn.Conv2d)]
    assert len(result.layers) == len(convolutions)
    assert len(result.random_layers) == stays_random
    output = backbone.eval()(images(4, size))
    assert output.shape == (4, features) and output.isfinite().all()


def test_the_start_is_better_than_random_weights_on_the_sample():
    """20-NN of 500 images among 2,000, both with measured batch norm: 30 and 36 or more."""
    sample = read_sample()
    train = sample["train"].subset(torch.arange(0, 10_000, 5))
    monitor = KNNMonitor(train, sample["test"].subset(torch.arange(0, 2000, 4)), image_size=32)
    torch.manual_seed(0)
    backbone, _ = build_backbone(config.Encoder(name="resnet10", width=0.5))
    some = train.subset(torch.arange(0, 2000, 4))
    measure_batch_norm(backbone, initialization.readable_batches(some, image_size=32, device=CPU))
    random = monitor(backbone)["20-NN"]
    initialize_from_images(backbone, train, image_size=32, seed=0, device=CPU)
    assert monitor(backbone)["20-NN"] > random + 4
