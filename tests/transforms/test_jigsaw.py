"""Jigsaw patches: cut from the crop, in random order, by address, and drawn again."""

from dataclasses import replace

import pytest
import torch

from meanshift.config import Views
from meanshift.data.arrays import ArraySource
from meanshift.ops.image import normalize
from meanshift.transforms.augment import Address, MultiViewTransform, PatchAddress, draw_patches
from meanshift.transforms.replay import denormalize, replay_views, to_rgb
from tests.support.operators import sample_images

PLAIN = Views(flip=0.0, jitter=0.0, gray=0.0, blur=0.0, crop_area=(1.0, 1.0))
IDS = torch.arange(40)


def patches_of(views, **changed):
    return replace(views.spec("patches", "strong", index=1), jigsaw=3, **changed)


def transform_of(views, size=36, **changed):
    return MultiViewTransform((patches_of(views, **changed),), 1, size)


@pytest.fixture
def sample():
    return sample_images()[:40]


def position_images(side):
    """Images whose pixels say where they are: red is the row, green the column."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    image = torch.stack([rows, columns, torch.zeros_like(rows)], 2)
    return image.to(torch.uint8).expand(len(IDS), -1, -1, -1)


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_each_cell_gives_one_patch_at_a_random_place_in_random_order(flip):
    transform = transform_of(replace(PLAIN, flip=flip), 36)
    (patches,) = transform.finish(position_images(36), 0, IDS)
    assert patches.shape == (40, 9, 3, 9, 9)
    orders, offsets = set(), set()
    for nine in patches:
        cells = []
        for patch in nine:
            pixels = to_rgb(denormalize(patch)).long()
            top, left = int(pixels[0].min()), int(pixels[1].min())
            expected_rows = (torch.arange(9) + top)[:, None].expand(9, 9)
            expected_columns = (torch.arange(9) + left)[None].expand(9, 9)
            if flip:
                expected_columns = expected_columns.flip(1)
            assert torch.equal(pixels[0], expected_rows)
            assert torch.equal(pixels[1], expected_columns)
            cells.append((top // 12) * 3 + left // 12)
            offsets |= {top % 12, left % 12}
        assert sorted(cells) == list(range(9))
        orders.add(tuple(cells))
    assert offsets == {0, 1, 2, 3} and len(orders) > 35


def test_orders_and_flips_are_uniform():
    ids = torch.arange(4000)
    address = PatchAddress(1, 0, ids, 1, 9)
    corners, flips = draw_patches(patches_of(replace(PLAIN, flip=0.5)), address, 255)
    cells = corners // 85
    first = (cells[:, 0, 0] * 3 + cells[:, 0, 1]).bincount(minlength=9) / len(ids)
    assert (first - 1 / 9).abs().max() < 0.02
    assert (flips.double().mean(0) - 0.5).abs().max() < 0.04
    offsets = corners % 85
    assert offsets.min() == 0 and offsets.max() == 85 - 64


def test_patches_are_colored_one_by_one(sample):
    plain, gray = (
        transform_of(replace(PLAIN, gray=gray)).finish(sample, 0, IDS)[0] for gray in (0.0, 0.5)
    )
    changed = (plain != gray).flatten(2).any(2)
    assert 0.4 < changed.double().mean() < 0.6
    mixed = changed.any(1) & ~changed.all(1)
    assert mixed.double().mean() > 0.9


@pytest.mark.parametrize("cropped", [False, True], ids=["arrays", "crops"])
def test_patches_depend_on_their_address_alone(sample, cropped):
    transform = transform_of(Views(blur=0.5))

    def patches(chosen, epoch=3):
        images = sample[chosen]
        if cropped:
            planes = [image.permute(2, 0, 1) for image in images]
            images = transform.crop(planes, epoch, chosen)
        return transform.finish(images, epoch, chosen)[0]

    together = patches(IDS)
    for index in range(0, 40, 7):
        alone = patches(IDS[[index]])[0]
        torch.testing.assert_close(alone, together[index], atol=1e-4, rtol=0)
    assert (patches(IDS, epoch=4) != together).flatten(1).any(1).all()
    streams = [Address(1, 0, IDS, 1).uniform, PatchAddress(1, 0, IDS, 1, 9).uniform]
    assert streams[1].unique(dim=0).shape[0] == 9 * 40
    assert not torch.isin(streams[0], streams[1]).any()


def test_a_crop_of_a_file_is_not_flipped_but_its_patches_are(sample):
    views = [replace(Views(), flip=flip) for flip in (0.0, 1.0)]
    planes = [image.permute(2, 0, 1) for image in sample[:5]]
    one, other = (transform_of(v).crop(planes, 0, IDS[:5])[0] for v in views)
    assert torch.equal(one, other) and one.shape == (5, 3, 36, 36)


def test_replayed_patches_are_those_of_training_and_make_one_image(sample):
    source = ArraySource(sample.numpy(), None, name="toy")
    transform = transform_of(Views(), size=32, scale=255 / 224)
    assert transform.crop_side(transform.views[0]) == 36
    chosen = torch.tensor([7, 0])
    (replayed,) = replay_views(source, chosen, transform, epoch=2).views
    (trained,) = transform.finish(source.read_batch(IDS), 2, IDS)
    torch.testing.assert_close(replayed, trained[chosen], atol=1e-4, rtol=0)
    image = denormalize(replayed[0])
    assert image.shape == (3, 27, 27)
    assert torch.equal(image[:, 9:18, 18:], denormalize(replayed[0, 5]))
    assert replay_views(source, chosen[:0], transform, epoch=0).views[0].shape == (0, 9, 3, 9, 9)


def test_normalization_is_per_channel():
    black = torch.zeros(2, 36, 36, 3, dtype=torch.uint8)
    (patches,) = transform_of(PLAIN).finish(black, 0, torch.arange(2))
    expected = normalize(torch.zeros(1, 3, 9, 9))[0]
    assert all(torch.allclose(patch, expected) for nine in patches for patch in nine)
