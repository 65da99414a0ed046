"""t-SNE against automatic differentiation of its divergence, and against scikit-learn."""

import pytest
import torch
from sklearn.manifold import TSNE, trustworthiness
from sklearn.manifold._t_sne import _joint_probabilities_nn
from sklearn.neighbors import NearestNeighbors
from torch.nn import functional as F

from meanshift.ops import tsne as tsne_module
from meanshift.ops.tsne import joint_affinities, tsne, tsne_gradient


@pytest.fixture(params=["kernel", "operators"])
def each_way(request, monkeypatch):
    """The forces by the compiled kernel, and by torch's operators."""
    if request.param == "operators":
        monkeypatch.setattr(tsne_module, "load", lambda *_: None)
    elif tsne_module.load(tsne_module._SOURCE) is None:
        pytest.skip("needs Linux and a C compiler")


def clusters(count, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(10, dim, generator=generator)
    return centers[torch.arange(count) % 10] + torch.randn(count, dim, generator=generator)


def divergence(points, affinities):
    """The Kullback-Leibler divergence between affinities and map."""
    points, affinities = points.double(), affinities[:, : len(points)].double()
    weights = 1 / (1 + (points[:, None] - points).square().sum(2))
    weights = weights * (1 - torch.eye(len(points), dtype=torch.float64))
    pairs = affinities > 0
    ratio = affinities[pairs] * weights.sum() / weights[pairs]
    return (affinities[pairs] * ratio.log()).sum()


@pytest.mark.parametrize("count", [5, 16, 101])
def test_the_gradient_is_that_of_the_divergence(count):
    affinities = joint_affinities(clusters(count), min(30.0, (count - 1) / 3))
    points = 3 * torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    points.requires_grad_()
    (expected,) = torch.autograd.grad(divergence(points, affinities), points)
    gradient = tsne_gradient(points.detach(), affinities)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    scaled = affinities * 4  # exaggeration multiplies the affinities, not the whole gradient
    torch.testing.assert_close(
        tsne_gradient(points.detach(), affinities, 4.0), tsne_gradient(points.detach(), scaled)
    )


@pytest.mark.parametrize("count", [5, 16, 101])
def test_the_kernel_takes_the_same_steps(monkeypatch, count):
    """Also from exploration to refinement; later steps amplify the rounding of float32."""
    if tsne_module.load(tsne_module._SOURCE) is None:
        pytest.skip("needs Linux and a C compiler")
    monkeypatch.setattr(tsne_module, "EXPLORATION", 2)
    start = 3 * torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    options = {"perplexity": min(30.0, (count - 1) / 3), "exaggeration": 3.0, "iterations": 4}
    ours = tsne(clusters(count), start, **options)
    monkeypatch.setattr(tsne_module, "load", lambda *_: None)
    expected = tsne(clusters(count), start, **options)
    assert not torch.allclose(ours, start, atol=0.1)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [20, 300])
def test_affinities_are_those_of_scikit_learn(count):
    features = clusters(count)
    perplexity = min(30.0, (count - 1) / 3)
    search = NearestNeighbors(n_neighbors=min(count - 1, int(3 * perplexity + 1))).fit(features)
    squares = search.kneighbors_graph(mode="distance")
    squares.data **= 2
    expected = _joint_probabilities_nn(squares, perplexity, 0).toarray()
    affinities = joint_affinities(features, perplexity)
    assert affinities[:, :count].numpy() == pytest.approx(expected, abs=1e-4 * expected.max())
    assert not affinities[:, count:].any()
    assert float(affinities.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.usefixtures("each_way")
def test_a_map_is_as_good_as_that_of_scikit_learn():
    features = F.normalize(clusters(400), dim=1)
    start = 1e-4 * torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    ours = tsne(features, start, perplexity=30.0, exaggeration=12.0, iterations=500)
    other = TSNE(init=start.numpy(), perplexity=30, max_iter=500, random_state=0)
    theirs = torch.from_numpy(other.fit_transform(features.numpy()))
    affinities = joint_affinities(features, 30.0)
    assert divergence(ours, affinities) < 1.03 * divergence(theirs, affinities)
    assert trustworthiness(features, ours) > trustworthiness(features, theirs) - 0.01


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("count", [5, 40])
def test_equal_rows_have_a_map(count):
    start = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    perplexity = (count - 1) / 3
    points = tsne(
        torch.ones(count, 3), start, perplexity=perplexity, exaggeration=2.0, iterations=300
    )
    assert points.isfinite().all()
