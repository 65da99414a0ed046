"""Views of vectors: noise, dropped columns and mixing, as their addresses say."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from meanshift.config import Views
from meanshift.data.arrays import ArraySource
from meanshift.transforms.augment import DROPOUT, MIX, NOISE, Address
from meanshift.transforms.replay import replay_views
from meanshift.transforms.vectors import VectorTransform
from meanshift.transforms.views import view_transform

ALL = Views(noise=0.3, channel_dropout=0.25, mix=0.4)
IDS = torch.arange(40)
EPOCH = 2


@pytest.fixture
def source():
    vectors = np.random.default_rng(0).normal(3, 2, (40, 5)).astype("float32")
    vectors[:, 2] *= 100  # another scale, so each column has its own deviation
    return ArraySource(vectors, None, name="vectors")


def transform_for(source, views):
    specs = views.spec("target", "weak", index=0), views.spec("online", "strong", index=1)
    return view_transform(specs, source, seed=7, size=0)


def views_of(source, views, ids=IDS):
    return transform_for(source, views).finish(source.sample_batch(ids), EPOCH, ids)


def normalized(source, rows):
    spec = source.sample_spec
    return (rows - np.array(spec.mean)) / np.array(spec.std)


def normal(u):
    """The quantile of a standard normal distribution."""
    return 2**0.5 * torch.erfinv(2 * u.double() - 1).numpy()


def naive_view(source, view, index):
    """The strong view of one sample, number by number."""
    transform = transform_for(source, view)
    spec = transform.views[1]
    address = Address(7, EPOCH, torch.tensor([index]), spec.stream)
    vector = source.pixels[index].astype("float64")
    if view.mix:
        which, share = address.many(2, MIX)[0].tolist()
        weight = view.mix * share
        other = transform.others[int(which * len(transform.others))].numpy()
        vector = (1 - weight) * vector + weight * other
    vector = normalized(source, vector)
    vector = vector + view.noise * normal(address.many(5, NOISE)[0])
    dropped = address.many(5, DROPOUT)[0].numpy() < view.channel_dropout
    return np.where(dropped, 0, vector)


@pytest.mark.parametrize(
    "views",
    [ALL, Views(noise=0.5), Views(channel_dropout=0.5), Views(mix=1.0), Views()],
    ids=["all", "noise", "dropout", "mix", "none"],
)
def test_the_strong_view_is_that_of_the_naive_rule(source, views):
    strong = views_of(source, views)[1]
    expected = np.stack([naive_view(source, views, index) for index in IDS.tolist()])
    np.testing.assert_allclose(strong.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_weak_view_has_noise_only(source):
    weak = views_of(source, ALL)[0]
    noise = weak.numpy() - normalized(source, source.pixels)
    address = Address(7, EPOCH, IDS, 0)
    np.testing.assert_allclose(noise, 0.3 * normal(address.many(5, NOISE)), atol=1e-4)
    quiet = views_of(source, Views(channel_dropout=0.9, mix=1.0))[0]
    np.testing.assert_allclose(quiet, normalized(source, source.pixels), atol=1e-5)


def test_any_part_of_a_batch_gives_the_same_views(source):
    whole = views_of(source, ALL)
    part = torch.tensor([31, 4, 17])
    for all_rows, some in zip(whole, views_of(source, ALL, part), strict=True):
        assert torch.equal(all_rows[part], some)
    replayed = replay_views(source, part, transform_for(source, ALL), epoch=EPOCH)
    assert all(torch.equal(a[part], b) for a, b in zip(whole, replayed.views, strict=True))


def test_views_of_samples_one_by_one_are_those_of_a_batch(source):
    transform = transform_for(source, ALL)
    crops = transform.crop([source.sample(int(i)) for i in IDS], EPOCH, IDS)
    one_by_one = transform.finish(crops, EPOCH, IDS)
    assert all(map(torch.equal, one_by_one, views_of(source, ALL)))


def test_the_strengths_are_as_set(source):
    many = torch.arange(4000) % 40  # ids below; the rows repeat
    ids = torch.arange(4000)
    rows = source.sample_batch(many)

    def strong(views):
        return transform_for(source, views).finish(rows, EPOCH, ids)[1]

    plain = strong(Views())
    assert abs(float((strong(Views(noise=0.3)) - plain).std()) - 0.3) < 0.01
    dropped = strong(Views(channel_dropout=0.25)) == 0
    assert abs(float(dropped.double().mean()) - 0.25) < 0.01
    moved = (strong(Views(mix=0.4)) - plain).norm(dim=1)
    farthest = torch.cdist(plain, plain[:40]).amax(1)
    assert bool((moved <= 0.4 * farthest + 1e-4).all()) and float(moved.mean()) > 0


def test_two_views_and_two_epochs_differ(source):
    transform = transform_for(source, ALL)
    rows = source.sample_batch(IDS)
    weak, strong = transform.finish(rows, 0, IDS)
    assert not torch.equal(weak, strong)
    assert not torch.equal(transform.finish(rows, 1, IDS)[0], weak)
    assert transform.shape(transform.views[0]) == (5,)


def test_only_mixing_reads_other_samples(source):
    assert transform_for(source, Views(noise=0.3)).others is None
    others = transform_for(source, ALL).others
    assert isinstance(transform_for(source, ALL), VectorTransform)
    assert sorted(others[:, 0].tolist()) == sorted(source.pixels[:, 0].tolist())


def test_patches_need_images(source):
    view = replace(Views().spec("patches", "strong", index=1), jigsaw=3)
    with pytest.raises(ValueError, match="needs patches of images, and vectors holds vectors"):
        view_transform([view], source, seed=0, size=8)
