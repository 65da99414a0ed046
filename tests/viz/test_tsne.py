"""Maps: aligned from epoch to epoch, as faithful as others, cached."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE, trustworthiness
from torch.nn import functional as F

from meanshift.viz import tsne
from meanshift.viz.run_reader import MissingData, Run
from meanshift.viz.tsne import tsne_maps
from tests.support.packages import hide_packages
from tests.support.runs import SIDE, random_features, write_snapshot


def drifting(count=150, epochs=3):
    """Features of ten clusters whose directions gain and lose weight from epoch to epoch."""
    generator = torch.Generator().manual_seed(0)
    points = 2 * torch.randn(10, 16, generator=generator)[torch.arange(count) % 10]
    points = points + torch.randn(count, 16, generator=generator)
    weights = 0.9 + 0.2 * torch.rand(epochs, 16, generator=generator)
    return {epoch: F.normalize(points * weights[epoch], dim=1) for epoch in range(epochs)}


@pytest.fixture
def drifted(make, tmp_path):
    pixels = np.zeros((150, SIDE, SIDE, 3), np.uint8)
    np.savez(tmp_path / "many.npz", x_train=pixels, y_train=np.arange(150) % 15)
    return make("drifted", snapshots=drifting(), data__source=tmp_path / "many.npz")


def standardize(points):
    points = np.asarray(points, dtype=np.float64)
    points = points - points.mean(0)
    return points / np.sqrt((points**2).sum(1).mean())


def median_movement(maps):
    pairs = itertools.pairwise(maps)
    return np.median([np.linalg.norm(after - before, axis=1) for before, after in pairs])


def test_maps_are_aligned_and_as_faithful_as_independent_ones(drifted):
    maps = tsne_maps(Run(drifted))
    independent = []
    for (epoch, features), epoch_map in zip(drifting().items(), maps, strict=True):
        rows = features[epoch_map.rows].numpy()
        other = TSNE(random_state=epoch, init="random").fit_transform(rows)
        independent.append(torch.from_numpy(other - other.mean(0)))
        own = trustworthiness(rows, epoch_map.points.numpy())
        assert own > trustworthiness(rows, independent[-1]) - 0.02
        assert epoch_map.epoch == epoch
    movement = median_movement([standardize(one.points) for one in maps])
    assert movement < 0.35 * median_movement([standardize(points) for points in independent])
    rotated = list(itertools.accumulate(independent, lambda before, now: tsne._align(now, before)))
    assert movement < 0.6 * median_movement([standardize(points) for points in rotated])
    every = torch.cat([one.points for one in maps])
    assert float(every.abs().max()) == pytest.approx(1, abs=1e-4)


def test_a_map_starts_from_the_one_before_and_is_rotated_to_fit(drifted, monkeypatch):
    starts = []

    def first_two_features(features, start, **_):
        starts.append(start)
        return features[:, :2] - features[:, :2].mean(0)

    with monkeypatch.context() as patched:
        patched.setattr(tsne, "_tsne", first_two_features)
        maps = [one.points for one in tsne._chain(Run(drifted), [0, 1, 2], 90)]
    assert [len(start) for start in starts] == [90, 90, 90]
    assert float(starts[0].abs().max()) < 1e-3, "the first one starts from small components"
    assert torch.equal(starts[1], maps[0]) and torch.equal(starts[2], maps[1])

    rotation = torch.tensor([[0.6, 0.8], [0.8, -0.6]])  # and reflection
    previous = random_features(0, dim=2)
    previous -= previous.mean(0)
    starts.clear()

    def rotated(_, start, **__):
        starts.append(start)
        return previous @ rotation + 3

    monkeypatch.setattr(tsne, "tsne", rotated)
    assert torch.allclose(tsne._next_map(random_features(1), previous), previous, atol=1e-5)
    assert torch.equal(starts[0], previous)


def test_maps_are_cached_and_a_new_snapshot_does_not_change_them(drifted, monkeypatch):
    before = tsne_maps(Run(drifted))
    computed = []
    original = tsne._tsne
    monkeypatch.setattr(tsne, "_tsne", lambda *a, **b: computed.append(a) or original(*a, **b))
    files = {path.name: path.read_bytes() for path in (drifted / "maps").iterdir()}
    again = tsne_maps(Run(drifted))
    assert not computed
    assert all(torch.equal(a.points, b.points) for a, b in zip(before, again, strict=True))
    write_snapshot(drifted, 9, drifting(epochs=4)[3])
    after = tsne_maps(Run(drifted))
    assert len(computed) == 1 and len(after) == 4
    assert files.items() <= {p.name: p.read_bytes() for p in (drifted / "maps").iterdir()}.items()
    for old, new in zip(before, after, strict=False):
        assert standardize(old.points) == pytest.approx(standardize(new.points), abs=1e-4)


def test_the_orientation_depends_neither_on_the_points_nor_on_their_order(drifted, make):
    features = drifting()[0]
    components = tsne._principal_components(features)
    reference = PCA(2).fit(features.numpy())
    largest = np.abs(reference.components_).argmax(1)
    signs = np.sign(reference.components_[[0, 1], largest])
    assert components.numpy() == pytest.approx(reference.transform(features) * signs, abs=1e-5)
    shuffled = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(
        tsne._principal_components(features[shuffled]), components[shuffled], atol=1e-5
    )
    for maps in (tsne_maps(Run(drifted), max_points=150), tsne_maps(Run(drifted), max_points=60)):
        points = maps[0].points - maps[0].points.mean(0)
        product = points.T @ components[maps[0].rows]
        assert torch.allclose(product, product.T, rtol=0.02), "no rotation fits better"
        assert float(torch.linalg.eigvalsh(product).min()) > 0, "and no reflection"
    one_feature = Run(make("narrow", snapshots={0: torch.ones(20, 1)}))
    assert tsne_maps(one_feature)[0].points.isfinite().all()


def test_progress_is_reported_after_each_map(make):
    run = Run(make(snapshots={epoch: random_features(epoch, count=10) for epoch in (0, 4)}))
    reported = []
    tsne_maps(run, progress=lambda done, total: reported.append((done, total)))
    assert reported == [(1, 2), (2, 2)]


def test_few_images_are_refused_and_no_library_is_needed(make, monkeypatch):
    few = Run(make("few", snapshots={1: random_features(0, count=4)}))
    with pytest.raises(MissingData, match="5 images or more"):
        tsne_maps(few)
    hide_packages(monkeypatch, "sklearn")
    (epoch_map,) = tsne_maps(Run(make("enough", snapshots={1: random_features(0)})))
    assert epoch_map.points.isfinite().all()
