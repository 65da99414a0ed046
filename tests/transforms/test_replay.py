"""Replayed views are those of training, and boxes and colors can be read back from them."""

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from meanshift.config import Views
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.ops.image import normalize
from meanshift.transforms.replay import (
    center_square,
    crop_boxes,
    denormalize,
    replay_views,
    to_rgb,
)
from tests.support.operators import sample_images
from tests.support.views import two_views

IDS = torch.tensor([7, 0, 3])
PLAIN = Views(flip=0.0)


@pytest.fixture
def arrays():
    return ArraySource(sample_images()[:10].numpy(), None, name="toy")


@pytest.fixture
def folder(tmp_path, make_images):
    make_images(tmp_path, {"a": 4}, size=(30, 40))
    return FolderSource(make_images(tmp_path, {"b": 4}, size=(50, 20)))


def test_views_of_arrays_are_those_of_a_whole_batch(arrays):
    transform = two_views(1, 24)
    replayed = replay_views(arrays, IDS, transform, epoch=2)
    everything = transform.finish(arrays.read_batch(torch.arange(10)), 2, torch.arange(10))
    assert torch.equal(replayed.ids, IDS)
    assert replayed.sizes.tolist() == [[32, 32]] * 3
    assert replayed.images == []
    for view, whole in zip(replayed.views, everything, strict=True):
        torch.testing.assert_close(view, whole[IDS], atol=1e-4, rtol=0)


def test_views_of_files_are_those_of_the_crops_of_a_worker(folder):
    transform = two_views(1, 24)
    replayed = replay_views(folder, IDS, transform, epoch=2, keep_images=True)
    images = [folder.read(index) for index in IDS.tolist()]
    expected = transform.finish(transform.crop(images, 2, IDS), 2, IDS)
    assert all(torch.equal(a, b) for a, b in zip(replayed.views, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(replayed.images, images, strict=True))
    assert replayed.sizes.tolist() == [[50, 20], [30, 40], [30, 40]]


def test_unreadable_images_are_left_out(folder, tmp_path):
    (tmp_path / "a/000.jpg").write_bytes(b"")
    replayed = replay_views(folder, IDS, two_views(1, 24), epoch=0)
    assert replayed.ids.tolist() == [7, 3]
    assert [view.shape for view in replayed.views] == [(2, 3, 24, 24)] * 2
    nothing = replay_views(folder, torch.tensor([0]), two_views(1, 24), epoch=0)
    assert len(nothing.ids) == len(nothing.sizes) == 0
    assert [view.shape for view in nothing.views] == [(0, 3, 24, 24)] * 2


def test_the_boxes_are_where_the_views_were_cropped(folder):
    transform = two_views(1, 24, PLAIN)
    replayed = replay_views(folder, IDS, transform, epoch=2, keep_images=True)
    (boxes, _) = crop_boxes(replayed, transform.views, seed=1, epoch=2)
    for image, box, view in zip(replayed.images, boxes, replayed.views[0], strict=True):
        expected = TF.resized_crop(image, *box.tolist(), [24, 24], antialias=True)
        difference = (to_rgb(denormalize(view)).int() - expected.int()).abs()
        assert difference.max() <= 1


def test_denormalize_inverts_normalize():
    pixels = sample_images()[:5].permute(0, 3, 1, 2)
    views = normalize(pixels.float() / 255)
    assert all(torch.equal(to_rgb(denormalize(v)), p) for v, p in zip(views, pixels, strict=True))


def test_a_center_square_is_the_center_of_an_image():
    image = sample_images()[0].permute(2, 0, 1)
    assert torch.equal(center_square(image, 32), image.permute(1, 2, 0))
    wide = image.repeat(1, 1, 2)
    expected = TF.center_crop(TF.resize(wide, [16], antialias=True), [16, 16])
    assert torch.equal(center_square(wide, 16), expected.permute(1, 2, 0))


def test_a_vector_is_shown_as_a_grid_of_its_values():
    image = to_rgb(torch.tensor([-2.0, 8.0, 3.0, 0.0, -1.0]))
    assert image.shape == (3, 3, 3) and torch.equal(image[0], image[2])
    assert image[0].flatten().tolist() == [0, 255, 128, 51, 26, 255, 255, 255, 255]
    assert to_rgb(torch.ones(4))[0].tolist() == [[0, 0], [0, 0]]


def test_a_signal_is_shown_as_its_waveform():
    silent, loud = torch.zeros(2, 640), torch.zeros(2, 640)
    loud[0, :320] = torch.tensor([-3.0, 3.0]).repeat(160)
    dark = to_rgb(loud)[0] < 128
    assert dark.shape == (64, 64)
    assert bool(dark[:, :32].all())  # from top to bottom, whatever the largest value is
    assert int(dark[:, 32:].sum()) == 32 * 2  # a line in the middle
    assert int((to_rgb(silent)[0] < 128).sum()) == 64 * 2
    assert to_rgb(torch.randn(1, 10)).shape == (3, 64, 10)
