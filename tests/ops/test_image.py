"""The batched image operators against torchvision's."""

from dataclasses import replace

import pytest
import torch
from torchvision.transforms.v2 import functional as TF

from meanshift.config import Views
from meanshift.config.samples import IMAGENET_MEAN, IMAGENET_STD
from meanshift.ops import image as image_ops
from meanshift.ops.image import ColorParameters
from meanshift.runtime import rng
from meanshift.transforms import augment
from meanshift.transforms.augment import Address
from tests.support.operators import COUNT, each, matching_fraction, sample_images, to_planes, wide

PLAIN = Views(flip=0.0, jitter=0.0, gray=0.0, blur=0.0)
ADJUST = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)


@pytest.fixture(scope="module")
def sample():
    return sample_images()


@pytest.fixture(scope="module")
def planes(sample):
    return to_planes(sample)


@pytest.mark.parametrize(
    ("height", "width", "cut"),
    [(1, 100, (1, 4)), (100, 1, (4, 1)), (10, 40, (10, 40)), (10, 41, (10, 40)), (3, 3, (3, 3))],
)
def test_only_the_middle_of_very_long_images_is_left(height, width, cut):
    pixels = torch.arange(height * width).view(1, height, width).to(torch.uint8)
    expected = TF.center_crop(pixels, list(cut))
    assert torch.equal(image_ops.cut_to_aspect(pixels, 4), expected)


def drawn_colors(count=COUNT, **settings):
    """The color parameters of strong views."""
    view = replace(PLAIN, **settings).spec("online", "strong", index=1)
    return augment.draw_colors(view, Address(0, 0, torch.arange(count), rng.ONLINE))


def boxes_for(images, **settings):
    """The crop boxes of views."""
    view = replace(PLAIN, **settings).spec("online", "weak", index=1)
    height, width = (torch.full((len(images),), side) for side in images.shape[1:3])
    place = Address(0, 0, torch.arange(len(images)), rng.ONLINE)
    return augment.draw_boxes(view, place, height, width)


def resized_crops(images, boxes, size):
    def crop(image, box):
        return TF.resized_crop(image, *box, [size, size], antialias=True)

    return each(crop, images.permute(0, 3, 1, 2), boxes.tolist()) / 255


def colors(**parameters):
    unchanged = ColorParameters(
        factors=torch.tensor([[1.0, 1.0, 1.0, 0.0]]).double().repeat(COUNT, 1),
        sequence=torch.arange(4).repeat(COUNT, 1),
        jittered=torch.ones(COUNT, dtype=torch.bool),
        grayed=torch.zeros(COUNT, dtype=torch.bool),
        sigma=torch.zeros(COUNT, dtype=torch.float64),
        solarized=torch.zeros(COUNT, dtype=torch.bool),
    )
    return replace(unchanged, **parameters)


@pytest.mark.parametrize("size", [16, 32, 50])
@pytest.mark.parametrize("shape", ["square", "wide", "tall"])
def test_resized_crop_matches_torchvision(sample, shape, size):
    images = {"square": sample, "wide": wide(sample), "tall": wide(sample).transpose(1, 2)}[shape]
    boxes = boxes_for(images)
    got = image_ops.resized_crop(images, boxes, torch.zeros(COUNT, dtype=torch.bool), size)
    assert matching_fraction(got, resized_crops(images, boxes, size)) >= 0.999


def test_crop_of_a_shifted_box_does_not_match(sample):
    boxes = boxes_for(sample, crop_area=(0.2, 0.5))
    shifted = boxes.clone()
    shifted[:, 1] = (boxes[:, 1] + 1).clamp(max=32 - boxes[:, 3])
    got = image_ops.resized_crop(sample, boxes, torch.zeros(COUNT, dtype=torch.bool), 32)
    assert matching_fraction(got, resized_crops(sample, shifted, 32)) < 0.7


def test_flips_match_horizontal_flip(sample):
    flips = torch.arange(COUNT) % 3 == 0
    boxes = boxes_for(sample)
    unflipped = image_ops.resized_crop(sample, boxes, torch.zeros_like(flips), 32)
    expected = each(lambda p, f: TF.horizontal_flip(p) if f else p, unflipped, flips)
    torch.testing.assert_close(image_ops.resized_crop(sample, boxes, flips, 32), expected)


@pytest.mark.parametrize("part", range(4), ids=["brightness", "contrast", "saturation", "hue"])
def test_each_part_of_jitter_matches_torchvision(planes, part):
    u = torch.linspace(-1, 1, COUNT).double()
    factors = colors().factors
    factors[:, part] = u * 0.5 if part == 3 else 1 + 0.9 * u
    got = image_ops.color_jitter(planes, colors(factors=factors))
    expected = each(ADJUST[part], planes, factors[:, part].tolist())
    assert matching_fraction(got, expected) >= 0.999
    assert matching_fraction(got, planes) < 0.5


def test_jitter_in_the_order_of_each_image(planes):
    parameters = drawn_colors(jitter=1.0)
    assert len({tuple(order) for order in parameters.sequence.tolist()}) == 24

    def one(image, factors, sequence):
        for part in sequence:
            image = ADJUST[part](image, factors[part])
        return image

    expected = each(one, planes, parameters.factors.tolist(), parameters.sequence.tolist())
    assert matching_fraction(image_ops.color_jitter(planes, parameters), expected) >= 0.999
    backwards = replace(parameters, sequence=parameters.sequence.flip(1))
    assert matching_fraction(image_ops.color_jitter(planes, backwards), expected) < 0.9


def test_images_without_jitter_are_unchanged(planes):
    parameters = drawn_colors(jitter=0.5)
    got = image_ops.color_jitter(planes, parameters)
    assert torch.equal(got[~parameters.jittered], planes[~parameters.jittered])
    changed = (got - planes).abs().amax((1, 2, 3)) > 1 / 255
    assert changed[parameters.jittered].double().mean() > 0.95


def test_jitter_of_gray_black_and_white_images_is_finite():
    flat = torch.tensor([0.0, 0.5, 1.0])[:, None, None, None].expand(3, 3, 8, 8)
    parameters = drawn_colors(3, jitter=1.0)
    assert image_ops.color_jitter(flat, parameters).isfinite().all()
    rotated = image_ops.adjust_hue(flat, torch.tensor([0.1, -0.3, 0.5]))
    torch.testing.assert_close(rotated, flat)


@pytest.mark.parametrize("chroma", [1e-4, 1e-3, 1e-2])
def test_the_hue_of_nearly_gray_images_matches_adjust_hue(planes, chroma):
    faint = 0.4 + chroma * planes
    shift = torch.linspace(-0.5, 0.5, COUNT)
    expected = each(TF.adjust_hue, faint, shift.tolist())
    torch.testing.assert_close(image_ops.adjust_hue(faint, shift), expected, atol=2e-6, rtol=0)
    assert (expected - faint).abs().max() > 0.5 * chroma


def test_gray_matches_rgb_to_grayscale(planes):
    chosen = torch.arange(COUNT) % 2 == 0
    got = image_ops.to_grayscale(planes, chosen)
    expected = TF.rgb_to_grayscale(planes, num_output_channels=3)
    assert matching_fraction(got[chosen], expected[chosen]) >= 0.999
    assert torch.equal(got[~chosen], planes[~chosen])


@pytest.mark.parametrize("shape", ["square", "wide"])
def test_blur_matches_gaussian_blur_of_13_taps(sample, shape):
    images = to_planes({"square": sample, "wide": wide(sample)}[shape])
    sigma = torch.linspace(0.1, 2, COUNT).double()
    got = image_ops.gaussian_blur(images, sigma)
    expected = each(lambda p, s: TF.gaussian_blur(p, [13, 13], [s, s]), images, sigma.tolist())
    assert matching_fraction(got, expected) >= 0.999
    sharper = image_ops.gaussian_blur(images, sigma * 0.9)
    assert matching_fraction(sharper, expected) < 0.9


def test_no_sigma_is_no_blur(planes):
    sigma = torch.where(torch.arange(COUNT) % 2 == 0, 1.5, 0.0).double()
    got = image_ops.gaussian_blur(planes, sigma)
    assert torch.equal(got[1::2], planes[1::2])
    assert (got[::2] != planes[::2]).double().mean() > 0.5
    assert image_ops.gaussian_blur(planes, torch.zeros(COUNT).double()) is planes


def test_blur_of_an_image_smaller_than_the_kernel():
    image = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    got = image_ops.gaussian_blur(image, torch.tensor([2.0]).double())
    assert got.isfinite().all()
    assert got.std() < 0.5 * image.std()
    assert image.min() <= got.min() <= got.max() <= image.max()


def test_solarize_matches_torchvision(planes):
    chosen = torch.arange(COUNT) % 2 == 0
    planes = planes.clone()
    planes[0, 0, 0, :3] = torch.tensor([0.5, 0.4999, 0.5001])  # the threshold itself is inverted
    planes[0, 1] = 0.5
    got = image_ops.solarize(planes, chosen)
    assert torch.equal(got[chosen], TF.solarize(planes[chosen], 0.5))
    assert torch.equal(got[~chosen], planes[~chosen])
    assert (got[chosen] != planes[chosen]).double().mean() > 0.2
    lower = image_ops.solarize(planes, chosen, threshold=0.3)
    assert torch.equal(lower[chosen], TF.solarize(planes[chosen], 0.3))
    assert image_ops.solarize(planes, torch.zeros_like(chosen)) is planes


def test_color_operators_solarize_after_the_blur(planes):
    solarized = torch.ones(COUNT, dtype=torch.bool)
    sigma = torch.full((COUNT,), 2.0).double()
    parameters = colors(jittered=~solarized, sigma=sigma, solarized=solarized)
    expected = TF.solarize(TF.gaussian_blur(planes, [13, 13], [2.0, 2.0]), 0.5)
    assert matching_fraction(image_ops.apply_color(planes, parameters), expected) >= 0.998
    before = TF.gaussian_blur(TF.solarize(planes, 0.5), [13, 13], [2.0, 2.0])
    assert matching_fraction(before, expected) < 0.9


def test_normalize_matches_torchvision(planes):
    expected = TF.normalize(planes, list(IMAGENET_MEAN), list(IMAGENET_STD))
    torch.testing.assert_close(image_ops.normalize(planes), expected)


@pytest.mark.parametrize("part", range(2), ids=["brightness", "contrast"])
def test_jitter_of_one_channel_matches_torchvision(planes, part):
    gray = planes[:, :1]
    factors = colors().factors
    factors[:, part] = 1 + 0.9 * torch.linspace(-1, 1, COUNT).double()
    got = image_ops.color_jitter(gray, colors(factors=factors))
    expected = each(ADJUST[part], gray, factors[:, part].tolist())
    assert matching_fraction(got, expected) >= 0.999
    assert matching_fraction(got, gray) < 0.6


@pytest.mark.parametrize("part", [2, 3], ids=["saturation", "hue"])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_colors_of_other_images_than_rgb_stay(planes, channels, part):
    images = planes.repeat(1, 2, 1, 1)[:, :channels]
    factors = colors().factors
    factors[:, part] = 0.3
    everything_gray = torch.ones(COUNT, dtype=torch.bool)
    got = image_ops.apply_color(images, colors(factors=factors, grayed=everything_gray))
    torch.testing.assert_close(got, images, atol=1e-6, rtol=0)


@pytest.mark.parametrize("channels", [1, 2, 5, 13])
def test_a_strong_view_of_any_channels_is_valid(planes, channels):
    images = planes.repeat(1, 5, 1, 1)[:, :channels]
    drawn = drawn_colors(jitter=1.0, gray=0.5, blur=0.5, solarize=0.3)
    got = image_ops.apply_color(images, drawn)
    assert got.shape == images.shape and got.min() >= -1e-6 and got.max() <= 1 + 1e-6
    assert ((got - images).abs().flatten(1).max(1).values > 0.01).all()
    one_by_one = [  # without colors, the channels of an image are treated alike
        image_ops.solarize(image_ops.gaussian_blur(images[:, [c]], drawn.sigma), drawn.solarized)
        for c in range(channels)
    ]
    plain = replace(drawn, jittered=torch.zeros(COUNT, dtype=torch.bool))
    torch.testing.assert_close(
        image_ops.apply_color(images, plain), torch.cat(one_by_one, 1), atol=1e-5, rtol=0
    )


def test_dropped_channels_are_their_mean(planes):
    dropped = torch.arange(COUNT * 3).view(COUNT, 3) % 4 == 0
    got = image_ops.drop_channels(planes, dropped)
    for image, mask, result in zip(planes, dropped, got, strict=True):
        for channel, drop, values in zip(image, mask, result, strict=True):
            expected = channel.mean().expand(32, 32) if drop else channel
            torch.testing.assert_close(values, expected)


def test_noise_stays_in_the_range(planes):
    noise = torch.full_like(planes, 0.3)
    assert torch.equal(image_ops.add_noise(planes, noise), (planes + 0.3).clamp(max=1))
    assert image_ops.add_noise(planes, -10 * noise).unique().tolist() == [0]


def test_bytes_and_floats_become_values_from_0_to_1(sample):
    torch.testing.assert_close(image_ops.to_unit(sample), sample.float() / 255)
    floats = torch.rand(2, 3)
    assert torch.equal(image_ops.to_unit(floats), floats)
