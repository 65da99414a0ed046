"""Views match torchvision's transforms, and their parameters torchvision's distributions."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from meanshift.config import SampleSpec, Views
from meanshift.config.samples import IMAGENET_MEAN, IMAGENET_STD
from meanshift.ops import image as image_ops
from meanshift.runtime import rng
from meanshift.transforms import augment
from meanshift.transforms.augment import Address, MultiViewTransform
from tests.support.operators import COUNT, each, matching_fraction, sample_images, to_planes, wide
from tests.support.views import two_views

DRAWS = 4000
STD = torch.tensor(IMAGENET_STD)[:, None, None]
PLAIN = Views(flip=0.0, jitter=0.0, gray=0.0, blur=0.0)
PROBABILITIES = {"flip": 0.5, "jitter": 0.8, "gray": 0.2, "blur": 0.5, "solarize": 0.3}
ALL = Views(solarize=0.3)
ADJUST = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)


@pytest.fixture(scope="module")
def sample():
    return sample_images()


@pytest.fixture(scope="module")
def planes(sample):
    return to_planes(sample)


def address(count=COUNT, *, seed=0, epoch=0, stream=rng.ONLINE):
    return Address(seed, epoch, torch.arange(count), stream)


def strong(views):
    """The specification of a strong online view."""
    return views.spec("online", "strong", index=1)


def torchvision_view(image, box, flip, factors, sequence, jittered, grayed, sigma, solarized, size):
    """One image by the order of steps of MSF and BYOL: crop, jitter, gray, blur, solarize, flip."""
    view = TF.resized_crop(image, *box, [size, size], antialias=True)
    if jittered:
        for part in sequence:
            view = ADJUST[part](view, factors[part])
    if grayed:
        view = TF.rgb_to_grayscale(view, num_output_channels=3)
    if sigma:
        view = TF.gaussian_blur(view, [13, 13], [sigma, sigma])
    if solarized:
        view = TF.solarize(view, 0.5)
    return TF.horizontal_flip(view) if flip else view


def make_params(transform, height, width, draws=DRAWS):
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    return [transform.make_params([image]) for _ in range(draws)]


def choices(views):
    """Which of many images each operator is applied to, by the names of `PROBABILITIES`."""
    colors = augment.draw_colors(strong(views), address(DRAWS))
    flips = augment.draw_flips(strong(views), address(DRAWS))
    applied = (flips, colors.jittered, colors.grayed, colors.sigma > 0, colors.solarized)
    return dict(zip(PROBABILITIES, applied, strict=True))


def same_distribution(a, b):
    return stats.ks_2samp(np.asarray(a), np.asarray(b)).pvalue > 0.01


# Views


@pytest.mark.parametrize("shape", ["square", "wide"])
def test_a_whole_view_matches_torchvision(sample, shape):
    images = {"square": sample, "wide": wide(sample)}[shape]
    size = 28
    views = ALL
    place = address(seed=5, epoch=3)
    height, width = (torch.full((COUNT,), side) for side in images.shape[1:3])
    colors = augment.draw_colors(strong(views), place)
    parameters = [
        augment.draw_boxes(strong(views), place, height, width),
        augment.draw_flips(strong(views), place),
        colors.factors,
        colors.sequence,
        colors.jittered,
        colors.grayed,
        colors.sigma,
        colors.solarized,
    ]
    expected = each(
        lambda *one: torchvision_view(*one, size),
        to_planes(images),
        *(values.tolist() for values in parameters),
    )
    expected = TF.normalize(expected, list(IMAGENET_MEAN), list(IMAGENET_STD))
    _, online = two_views(5, size, views).finish(images, 3, place.ids)
    assert matching_fraction(online * STD, expected * STD) >= 0.999
    _, other = two_views(5, size, views).finish(images, 4, place.ids)
    assert matching_fraction(other * STD, expected * STD) < 0.5


# Distributions


@pytest.mark.parametrize(("height", "width"), [(32, 32), (300, 400), (300, 150)])
def test_crop_boxes_are_distributed_as_torchvisions(height, width):
    theirs = make_params(v2.RandomResizedCrop(32, scale=(0.2, 1.0)), height, width)
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in theirs])
    sides = torch.full((DRAWS,), height), torch.full((DRAWS,), width)
    ours = augment.draw_boxes(strong(Views()), address(DRAWS), *sides).numpy()

    def aspects_of(boxes):
        top, left, h, w = boxes.T
        room_down, room_across = height - h, width - w
        return {
            "top": top,
            "left": left,
            "height": h,
            "width": w,
            "area": h * w,
            "ratio": w / h,
            "place down": (top / np.maximum(room_down, 1))[room_down > 0],
            "place across": (left / np.maximum(room_across, 1))[room_across > 0],
        }

    expected, got = aspects_of(theirs), aspects_of(ours)
    assert [name for name in got if not same_distribution(got[name], expected[name])] == []
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()
    other = augment.draw_boxes(strong(Views(crop_area=(0.25, 1.0))), address(DRAWS), *sides).numpy()
    assert not same_distribution(aspects_of(other)["area"], expected["area"])


@pytest.mark.parametrize(
    ("height", "width"), [(10, 1000), (1000, 10), (1, 50), (50, 1), (8, 300), (301, 8), (13, 501)]
)
def test_extreme_shapes_fall_back_to_torchvisions_central_crop(height, width):
    theirs = make_params(v2.RandomResizedCrop(32, scale=(0.2, 1.0)), height, width, draws=3)
    expected = [[p["top"], p["left"], p["height"], p["width"]] for p in theirs]
    sides = torch.full((3,), height), torch.full((3,), width)
    assert augment.draw_boxes(strong(Views()), address(3), *sides).tolist() == expected


def test_fallback_of_an_allowed_shape_is_the_whole_image():
    image = torch.tensor([10]), torch.tensor([11])
    whole = replace(PLAIN, crop_area=(1.0, 1.0))

    class Fixed(Address):
        uniform = torch.ones(1, 36).double() * 0.999  # a ratio near 4/3 never fits

    box = augment.draw_boxes(strong(whole), Fixed(0, 0, torch.arange(1), 0), *image)
    assert box.tolist() == [[0, 0, 10, 11]]


def test_boxes_of_mixed_sizes_do_not_mix():
    sides = torch.tensor([[32, 32], [300, 20], [64, 48]])
    together = augment.draw_boxes(strong(Views()), address(3), *sides.unbind(1))
    for index in range(3):
        place = Address(0, 0, torch.tensor([index]), rng.ONLINE)
        alone = augment.draw_boxes(strong(Views()), place, *sides[[index]].unbind(1))
        assert torch.equal(alone[0], together[index])


def test_jitter_is_distributed_as_torchvisions():
    theirs = make_params(v2.ColorJitter(0.4, 0.4, 0.4, 0.1), 4, 4)
    ours = augment.draw_colors(strong(Views()), address(DRAWS))
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    for part, name in enumerate(names):
        assert same_distribution(ours.factors[:, part], [p[name] for p in theirs]), name
    narrow = augment.draw_colors(
        strong(Views(jitter_strength=(0.36, 0.4, 0.4, 0.1))), address(DRAWS)
    )
    assert not same_distribution(narrow.factors[:, 0], [p["brightness_factor"] for p in theirs])


def test_the_order_of_the_jitter_is_a_uniform_permutation():
    sequence = augment.draw_colors(strong(Views()), address(DRAWS)).sequence
    assert torch.equal(sequence.sort(1).values, torch.arange(4).expand(DRAWS, 4))
    _, counts = (sequence * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_counts=True)
    assert len(counts) == math.factorial(4)
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


@pytest.mark.parametrize(("name", "probability"), PROBABILITIES.items())
def test_operators_are_applied_with_their_probability(name, probability):
    count = int(choices(ALL)[name].sum())
    assert stats.binomtest(count, DRAWS, probability).pvalue > 0.01
    assert stats.binomtest(count, DRAWS, probability + 0.06).pvalue < 0.01
    assert not choices(replace(ALL, **{name: 0.0}))[name].any()
    assert choices(replace(ALL, **{name: 1.0}))[name].all()


def test_choices_are_independent_of_each_other():
    views = ALL
    parameters = augment.draw_colors(strong(views), address(DRAWS))
    applied = torch.stack(list(choices(views).values())).double()
    correlation = torch.corrcoef(torch.cat([applied, parameters.factors.T, parameters.sigma[None]]))
    correlation[3, 9] = correlation[9, 3] = 0  # whether and how much an image is blurred
    assert (correlation - torch.eye(10)).abs().max() < 4 / DRAWS**0.5


def test_sigma_is_distributed_as_torchvisions():
    theirs = make_params(v2.GaussianBlur(13, sigma=(0.1, 2.0)), 4, 4)
    ours = augment.draw_colors(strong(Views(blur=1.0)), address(DRAWS)).sigma
    assert same_distribution(ours, [p["sigma"][0] for p in theirs])
    wider = augment.draw_colors(
        strong(Views(blur=1.0, blur_sigma=(0.1, 2.2))), address(DRAWS)
    ).sigma
    assert not same_distribution(wider, [p["sigma"][0] for p in theirs])


def test_target_and_online_views_are_cropped_differently():
    sides = torch.full((COUNT,), 32), torch.full((COUNT,), 32)
    target, online = (
        augment.draw_boxes(strong(Views()), address(stream=stream), *sides)
        for stream in (rng.TARGET, rng.ONLINE)
    )
    assert (target == online).all(1).double().mean() < 0.1


# Whole transforms


def crops_of(transform, images, epoch, ids):
    return transform.crop(list(images.permute(0, 3, 1, 2)), epoch, ids)


def test_arrays_and_crops_give_the_same_views(sample):
    transform = two_views(1, 28, Views())
    ids = torch.arange(COUNT)
    from_arrays = transform.finish(sample, 2, ids)
    from_crops = transform.finish(crops_of(transform, sample, 2, ids), 2, ids)
    for from_array, from_crop in zip(from_arrays, from_crops, strict=True):
        difference = (from_array - from_crop).abs() * STD
        assert difference.mean() < 1.5 / 255
        assert (difference < 8 / 255).double().mean() > 0.999


def test_a_weak_view_is_a_flipped_crop_and_a_strong_one_is_more(sample):
    ids = torch.arange(COUNT)
    views = Views(jitter=1.0)
    target, online = two_views(1, 32, views).finish(sample, 0, ids)
    for view, stream, unchanged in ((target, rng.TARGET, True), (online, rng.ONLINE, False)):
        place = address(seed=1, stream=stream)
        sides = torch.full((COUNT,), 32), torch.full((COUNT,), 32)
        boxes = augment.draw_boxes(strong(views), place, *sides)
        flips = augment.draw_flips(strong(views), place)
        weak = image_ops.resized_crop(sample, boxes, flips, 32)
        # Up to rounding, by which compiled operators differ from torch's.
        assert torch.allclose(view, image_ops.normalize(weak), atol=1e-5) == unchanged


def test_one_view_is_the_same_alone_and_beside_another(sample):
    ids = torch.arange(COUNT)
    transform = MultiViewTransform((strong(Views()),), 1, 32)
    (alone,) = transform.finish(sample, 0, ids)
    _, online = two_views(1, 32).finish(sample, 0, ids)
    assert torch.equal(alone, online)
    assert len(crops_of(transform, sample, 0, ids)) == 1


@pytest.mark.parametrize("whole", [True, False], ids=["arrays", "crops"])
def test_a_view_can_have_copies_and_a_size_of_its_own(sample, whole):
    ids = torch.arange(COUNT)
    small = replace(Views().spec("small", "weak", index=0), count=3, size=16)
    transform = MultiViewTransform((strong(Views()), small), 1, 32)
    images = sample if whole else crops_of(transform, sample, 0, ids)
    views = transform.finish(images, 0, ids)
    assert [view.shape[2:] for view in views] == [(32, 32), (16, 16), (16, 16), (16, 16)]
    alone = MultiViewTransform((replace(small, count=1),), 1, 32)
    first = sample if whole else crops_of(alone, sample, 0, ids)
    assert torch.equal(views[1], alone.finish(first, 0, ids)[0])  # has the stream of the view
    for one, other in ((1, 2), (1, 3), (2, 3)):
        different = (views[one] != views[other]).flatten(1).any(1)
        assert different.double().mean() > 0.9


def test_views_differ_by_epoch_seed_and_role(sample):
    ids = torch.arange(20)
    few = sample[:20]
    target, online = two_views(1, 32, PLAIN).finish(few, 0, ids)
    others = [
        online,
        two_views(1, 32, PLAIN).finish(few, 1, ids)[0],
        two_views(2, 32, PLAIN).finish(few, 0, ids)[0],
        two_views(1, 32, PLAIN).finish(few, 0, ids + 1)[0],
    ]
    for other in others:
        assert (other != target).flatten(1).any(1).double().mean() > 0.9
    assert torch.equal(two_views(1, 32, PLAIN).finish(few, 0, ids)[0], target)


@pytest.mark.parametrize("whole", [True, False], ids=["arrays", "crops"])
@pytest.mark.parametrize("blur", [0.0, 1.0], ids=["sharp", "blurred"])
def test_a_view_does_not_depend_on_the_rest_of_its_batch(sample, blur, whole):
    specs = [Views(blur=blur).spec(str(s), "strong", index=s) for s in (rng.TARGET, rng.ONLINE)]
    transform = MultiViewTransform(tuple(specs), 1, 32)
    ids = torch.arange(40)

    def views(chosen):
        images = sample[chosen] if whole else crops_of(transform, sample[chosen], 0, chosen)
        return transform.finish(images, 0, chosen)

    together = views(ids)
    for index in range(0, 40, 4):
        for alone, among in zip(views(ids[[index]]), together, strict=True):
            torch.testing.assert_close(alone[0], among[index], atol=1e-4, rtol=0)
    for reversed_, among in zip(views(ids.flip(0)), together, strict=True):
        torch.testing.assert_close(reversed_.flip(0), among, atol=1e-4, rtol=0)


def test_without_operators_a_whole_image_is_unchanged(sample):
    views = replace(PLAIN, crop_area=(1.0, 1.0))
    for view in two_views(0, 32, views).finish(sample, 0, torch.arange(COUNT)):
        torch.testing.assert_close(view, image_ops.normalize(to_planes(sample)))


@pytest.mark.parametrize("name", PROBABILITIES)
def test_each_operator_has_its_own_probability(sample, name):
    ids = torch.arange(50)
    off = two_views(1, 32, PLAIN).finish(sample[:50], 0, ids)
    on = two_views(1, 32, replace(PLAIN, **{name: 1.0})).finish(sample[:50], 0, ids)
    changed = [(a - b).abs().amax((1, 2, 3)) > 1e-3 for a, b in zip(off, on, strict=True)]
    assert changed[1].double().mean() > 0.9
    assert changed[0].double().mean() > 0.9 if name == "flip" else not changed[0].any()


def test_an_asymmetric_pair_is_blurred_and_solarized_as_in_byol():
    first, second = Views(blur=1.0, solarize=0.2).pair(asymmetric=True)
    assert (first.blur, first.solarize) == (1.0, 0.0)
    assert (second.blur, second.solarize) == (0.1, 0.2)
    assert replace(second, name="first", stream=0, blur=1.0, solarize=0.0) == first
    alike = Views(blur=0.5, solarize=0.2).pair(asymmetric=False)
    assert [(view.blur, view.solarize) for view in alike] == [(0.5, 0.2)] * 2


def test_a_view_that_is_only_solarized_is_a_strong_one():
    assert strong(replace(PLAIN, solarize=0.1)).has_color and not strong(PLAIN).has_color


def test_crops_of_images_of_any_sizes():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 50), (50, 1), (1, 1), (200, 31), (24, 24)]
    images = [
        torch.randint(0, 256, (3, *s), dtype=torch.uint8, generator=generator) for s in shapes
    ]
    transform = two_views(1, 24, Views())
    ids = torch.arange(5)
    crops = transform.crop(images, 0, ids)
    assert [part.shape for part in crops] == [(5, 3, 24, 24)] * 2
    for view in transform.finish(crops, 0, ids):
        assert view.isfinite().all()
    box = augment.draw_boxes(
        strong(Views()),
        Address(1, 0, ids[3:4], rng.TARGET),
        torch.tensor([200]),
        torch.tensor([31]),
    )
    expected = TF.resized_crop(images[3], *box[0].tolist(), [24, 24], antialias=True)
    flips = augment.draw_flips(strong(Views()), Address(1, 0, ids, rng.TARGET))
    assert 0 < flips.sum() < 5
    assert torch.equal(crops[0][3], TF.horizontal_flip(expected) if flips[3] else expected)
    straight = two_views(1, 24, replace(Views(), flip=0.0)).crop(images, 0, ids)[0]
    for index, flip in enumerate(flips):
        once = straight[index]
        assert torch.equal(crops[0][index], TF.horizontal_flip(once) if flip else once)


def test_a_part_of_a_batch_gives_the_same_views(sample, monkeypatch):
    """On a CPU a batch is computed in parts that stay in its cache."""
    transform = two_views(1, 32, Views())
    ids = torch.arange(50)
    whole = transform.finish(sample[:50], 3, ids)
    monkeypatch.setattr(augment, "PIXELS", 7 * 32 * 32)
    for one, other in zip(whole, transform.finish(sample[:50], 3, ids), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0.0)
    few = transform.finish(
        [part[:7] for part in crops_of(transform, sample[:50], 3, ids)], 3, ids[:7]
    )
    some = transform.finish(crops_of(transform, sample[:50], 3, ids), 3, ids)
    assert all(torch.equal(a, b[:7]) for a, b in zip(few, some, strict=True))


def deep_views(channels, size=16, **settings):
    """The views of images of floats, and the images."""
    samples = SampleSpec(
        channels=channels,
        dtype="int32",
        range=(0.0, 4095.0),
        mean=(0.4,) * channels,
        std=(0.2,) * channels,
    )
    specs = (Views(**settings).spec("v", "strong", index=1),)
    images = torch.rand(40, 20, 24, channels, generator=torch.Generator().manual_seed(0))
    return MultiViewTransform(specs, 3, size, samples), images


@pytest.mark.parametrize("cropped", [False, True], ids=["arrays", "crops"])
@pytest.mark.parametrize("channels", [1, 5, 13])
def test_noise_and_dropped_channels_depend_on_their_address_alone(channels, cropped):
    transform, images = deep_views(channels, noise=0.2, channel_dropout=0.3)
    ids = torch.arange(40)

    def view(chosen, epoch=2):
        pixels = images[chosen]
        if cropped:
            pixels = transform.crop([p.permute(2, 0, 1) for p in pixels], epoch, chosen)
        (output,) = transform.finish(pixels, epoch, chosen)
        return output

    together = view(ids)
    assert together.shape == (40, channels, 16, 16)
    for part in (ids[7:8], ids[20:], ids.flip(0)):
        torch.testing.assert_close(view(part), together[part], atol=1e-4, rtol=0)
    assert (view(ids, epoch=3) != together).flatten(1).any(1).all()


def test_noise_is_normal_and_of_any_strength_up_to_the_largest():
    transform, _ = deep_views(
        2, noise=0.1, jitter=0.0, gray=0.0, blur=0.0, flip=0.0, crop_area=(1.0, 1.0)
    )
    images = torch.full((400, 16, 16, 2), 0.5)
    (view,) = transform.finish(images, 0, torch.arange(400))
    noise = view * 0.2 + 0.4 - 0.5
    std = noise.flatten(1).std(1)
    assert std.max() < 0.11 and std.min() < 0.01
    assert 0.04 < std.mean() < 0.06
    unit = (noise / std[:, None, None, None]).flatten()
    assert abs(float(unit.mean())) < 0.01
    assert 0.67 < float((unit.abs() < 1).double().mean()) < 0.70
    assert abs(float((noise[:, 0] * noise[:, 1]).mean())) < 1e-4  # channels are independent


def test_channels_are_dropped_as_often_as_asked():
    transform, images = deep_views(
        13, channel_dropout=0.3, jitter=0.0, gray=0.0, blur=0.0, crop_area=(1.0, 1.0)
    )
    (view,) = transform.finish(images, 0, torch.arange(40))
    constant = view.flatten(2).std(2) < 1e-4
    assert 0.24 < float(constant.double().mean()) < 0.36
    assert len(constant.unique(dim=0)) > 35


def test_noise_does_not_change_what_else_is_drawn(sample):
    plain, noisy = (two_views(5, 24, Views(noise=n)) for n in (0.0, 1e-12))
    ids = torch.arange(8)
    for one, other in zip(
        plain.finish(sample[:8], 1, ids), noisy.finish(sample[:8], 1, ids), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_views_are_normalized_by_the_samples_own_moments():
    transform, images = deep_views(
        5, jitter=0.0, gray=0.0, blur=0.0, flip=0.0, crop_area=(1.0, 1.0), size=20
    )
    square = images[:, :, :20]
    (view,) = transform.finish(square, 0, torch.arange(40))
    torch.testing.assert_close(view, (square.permute(0, 3, 1, 2) - 0.4) / 0.2)
