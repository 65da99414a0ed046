"""Views of signals: windows in time, gain, noise and silence, as their addresses say."""

import numpy as np
import pytest
import torch

from meanshift.config import Views
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.transforms.augment import NOISE, Address
from meanshift.transforms.replay import replay_views
from meanshift.transforms.signals import SignalTransform, window
from meanshift.transforms.views import view_transform
from tests.support.signals import write_tones

ALL = Views(noise=0.2, gain=6.0, mask=0.5)
EPOCH = 3
SIZE = 64
IDS = torch.arange(6)


@pytest.fixture(params=["files", "array"])
def source(request, tmp_path):
    if request.param == "files":
        return FolderSource(write_tones(tmp_path, count=3, length=40))  # shorter and longer ones
    signals = np.random.default_rng(0).normal(1, 3, (6, 2, 100)).astype("float32")
    return ArraySource(signals, None, name="signals", kind="signal")


def transform_for(source, views):
    specs = views.spec("target", "weak", index=0), views.spec("online", "strong", index=1)
    return view_transform(specs, source, seed=7, size=SIZE)


def views_of(source, views, ids=IDS):
    return replay_views(source, ids, transform_for(source, views), epoch=EPOCH).views


def naive_window(signal, size, place):
    """The window that begins at one of all possible times; a short signal is whole in it."""
    length = signal.shape[1]
    start = int(place * (abs(length - size) + 1))
    start = start if length >= size else -start
    output = np.zeros((len(signal), size), "float32")
    for at in range(size):
        if 0 <= start + at < length:
            output[:, at] = signal[:, start + at]
    return output


def naive_view(source, views, index, strong):
    spec = transform_for(source, views).views[strong]
    address = Address(7, EPOCH, torch.tensor([index]), spec.stream)
    place, gain, noise, mask, mask_start = address.uniform[0, :5].tolist()
    view = naive_window(source.read(index).numpy(), SIZE, place).astype("float64")
    samples = source.sample_spec
    view = (view - np.array(samples.mean)[:, None]) / np.array(samples.std)[:, None]
    if strong:
        view = view * 10 ** (views.gain * (2 * gain - 1) / 20)
    normal = torch.special.ndtri(address.many(view.size, NOISE)[0]).view(view.shape).numpy()
    view = view + views.noise * noise * normal
    if strong:
        length = views.mask * mask * SIZE
        start = mask_start * (SIZE - length)
        for at in range(SIZE):
            if start <= at < start + length:
                view[:, at] = 0
    return view


@pytest.mark.parametrize(
    "views",
    [ALL, Views(noise=0.5), Views(gain=12.0), Views(mask=1.0), Views()],
    ids=["all", "noise", "gain", "mask", "none"],
)
@pytest.mark.parametrize("strong", [0, 1], ids=["weak", "strong"])
def test_views_are_those_of_the_naive_rule(source, views, strong):
    found = views_of(source, views)[strong]
    expected = np.stack([naive_view(source, views, index, strong) for index in IDS.tolist()])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_any_part_of_a_batch_gives_the_same_views(source):
    part = torch.tensor([5, 0, 3])
    for whole, some in zip(views_of(source, ALL), views_of(source, ALL, part), strict=True):
        assert torch.equal(whole[part], some)


def test_views_have_the_shape_that_the_transform_states(source):
    transform = transform_for(source, ALL)
    assert isinstance(transform, SignalTransform)
    shape = (source.sample_spec.channels, SIZE)
    assert transform.shape(transform.views[0]) == shape
    assert all(view.shape[1:] == shape for view in views_of(source, ALL))
    empty = replay_views(source, torch.arange(0), transform, epoch=0).views
    assert all(view.shape == (0, *shape) for view in empty)


@pytest.mark.parametrize("length", [3, 8, 11])
def test_windows_reach_every_place_equally_often(length):
    signal = torch.arange(1.0, length + 1)[None]
    counts = {}
    for place in np.linspace(0, 1, 720, endpoint=False):
        key = tuple(window(signal, 8, place)[0].tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == abs(length - 8) + 1
    assert max(counts.values()) - min(counts.values()) <= 1
    if length < 8:  # a short signal is whole in every window
        assert all(sum(key) == float(signal.sum()) for key in counts)


def test_the_end_of_the_range_stays_inside():
    assert (
        window(torch.ones(1, 9), 8, 1.0).shape == window(torch.ones(1, 5), 8, 1.0).shape == (1, 8)
    )
