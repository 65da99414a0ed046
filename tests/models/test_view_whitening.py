"""Features whitened by the differences of views: the formula, the fit, and who sees it."""

import pytest
import torch
from torch import nn

from meanshift import config, pretrain
from meanshift.config import Config, Data, Train, Views
from meanshift.data import open_source
from meanshift.models.encoder import Encoder, build_backbone
from meanshift.models.fit_whitening import fit_view_whitening
from meanshift.models.view_whitening import SHRINKAGE, ViewWhitening, without_whitening
from meanshift.models.weights import load_weights
from meanshift.transforms.augment import MultiViewTransform
from meanshift.transforms.replay import replay_views

SETTINGS = config.Encoder(name="conv3", width=0.125, init="pca", output="whitened")


def test_cosines_are_those_of_the_inverse_square_root() -> None:
    """Any matrix whose product with its transpose is the inverse covariance gives them."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 6, generator=generator) + 1
    differences = torch.randn(40, 6, generator=generator) * torch.arange(1.0, 7.0)
    layer = ViewWhitening(nn.Identity(), 6)
    layer.fit(features, differences)
    covariance = (differences.T @ differences / 80).double()
    covariance += SHRINKAGE * covariance.diagonal().mean() * torch.eye(6)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    expected = (features - features.mean(0)).double() @ root
    white = layer(features).double()
    torch.testing.assert_close(white @ white.T, expected @ expected.T, atol=1e-4, rtol=1e-4)


def test_before_the_fit_nothing_changes() -> None:
    features = torch.randn(5, 4)
    assert torch.equal(ViewWhitening(nn.Identity(), 4)(features), features)


def test_the_layer_is_fitted_to_a_weak_and_a_strong_view_of_each_image() -> None:
    torch.manual_seed(0)
    backbone, features = build_backbone(SETTINGS)
    backbone.eval()
    source = open_source("sample")["train"].subset(torch.arange(300))
    specs = (Views().spec("a", "weak", index=0), Views().spec("b", "strong", index=1))
    chosen = torch.arange(300)
    views = replay_views(source, chosen, MultiViewTransform(specs, 0, 32), epoch=0).views
    with torch.no_grad():
        weak, strong = (backbone(view) for view in views)
    expected = ViewWhitening(nn.Identity(), features)
    expected.fit(weak, weak - strong)
    fit_view_whitening(backbone, source, Views(), image_size=32, seed=0, device=torch.device("cpu"))
    torch.testing.assert_close(backbone.matrix, expected.matrix, rtol=1e-3, atol=1e-4)
    fitted = backbone.matrix.clone()
    fit_view_whitening(backbone, source, Views(), image_size=32, seed=0, device=torch.device("cpu"))
    assert torch.equal(backbone.matrix, fitted)


def test_the_projector_takes_the_features_without_it() -> None:
    torch.manual_seed(0)
    encoder = Encoder(SETTINGS, dim=8).eval()
    images = torch.randn(4, 3, 32, 32)
    expected = encoder(images)
    encoder.backbone.fit(torch.randn(9, encoder.features), torch.randn(9, encoder.features))
    assert torch.equal(encoder(images), expected)
    assert not torch.equal(encoder.backbone(images), without_whitening(encoder.backbone)(images))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("whitened")
    settings = Config(
        data=Data(source="sample", image_size=16),
        encoder=SETTINGS,
        train=Train(epochs=1, batch_size=1000, precision="float32", snapshots=0, monitor_every=0),
    )
    pretrain(settings.with_overrides({"method.k": 1, "method.hidden": 16}), out)
    return out


def test_a_run_is_fitted_at_its_start_and_at_its_end(run) -> None:
    start, end = (load_weights(f"{kind}{run}").backbone for kind in ("untrained:", ""))
    assert isinstance(start, ViewWhitening) and isinstance(end, ViewWhitening)
    identity = torch.eye(len(end.matrix))
    assert not torch.equal(start.matrix, identity)
    assert not torch.equal(end.matrix, identity)
    assert not torch.equal(start.matrix, end.matrix)
