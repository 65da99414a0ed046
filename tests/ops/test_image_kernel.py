"""The compiled operators match torch's: bytes bit for bit, unit values up to rounding."""

import random
from dataclasses import replace

import pytest
import torch

from meanshift.config import Views
from meanshift.config.samples import IMAGENET_MEAN, IMAGENET_STD
from meanshift.ops import image_kernel
from meanshift.ops.image import apply_color, normalize, resized_crop, to_unit
from meanshift.runtime import rng
from meanshift.transforms.augment import (
    Address,
    crop_one_by_one,
    draw_colors,
)
from tests.support.views import two_views

pytestmark = pytest.mark.skipif(image_kernel.library() is None, reason="needs a C compiler")

STD = torch.tensor(IMAGENET_STD)[:, None, None]
BOUND = 3e-6  # of values in [0, 1]
STRONG = Views(jitter=0.9, gray=0.3, blur=0.5, solarize=0.3)


def random_bytes(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def drawn(count, views=STRONG):
    view = views.spec("online", "strong", index=1)
    return draw_colors(view, Address(0, 0, torch.arange(count), rng.ONLINE))


def colored(images, parameters):
    out = torch.empty(images.shape)
    image_kernel.color(images, parameters, IMAGENET_MEAN, IMAGENET_STD, out=out)
    return out


def difference(images, parameters):
    """The largest difference from torch's operators, in values from 0 to 1."""
    plain = to_unit(images.contiguous())
    plain = plain if parameters is None else apply_color(plain, parameters)
    expected = normalize(plain, IMAGENET_MEAN, IMAGENET_STD)
    return ((colored(images, parameters) - expected) * STD).abs().max()


def interleaved(images):
    return images.contiguous(memory_format=torch.channels_last)


# Crops


def check_crop(image, box, side, *, flip):
    arguments = [image], torch.tensor([box]), torch.tensor([flip]), side
    assert image_kernel.can_crop([image])
    assert torch.equal(image_kernel.crop(*arguments), crop_one_by_one(*arguments))


@pytest.mark.parametrize("side", [1, 7, 32, 224])
def test_crops_of_any_size_are_the_same_bits(side):
    draw = random.Random(side)
    for trial in range(40):
        longest = draw.choice([8, 60, 500])
        height, width = draw.randint(1, longest), draw.randint(1, longest)
        image = random_bytes(height, width, 3, seed=trial)
        if trial % 4 == 0:
            image = 255 * (image > 127).to(torch.uint8)
        box_height, box_width = draw.randint(1, height), draw.randint(1, width)
        top, left = draw.randint(0, height - box_height), draw.randint(0, width - box_width)
        box = (top, left, box_height, box_width)
        check_crop(image.permute(2, 0, 1), box, side, flip=trial % 2 == 0)


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (4000, 1), (2500, 30)])
def test_extreme_crops_are_the_same_bits(size):
    for pixels in (random_bytes(*size, 3), torch.full((*size, 3), 255, dtype=torch.uint8)):
        check_crop(pixels.permute(2, 0, 1), (0, 0, *size), 32, flip=True)


def test_the_layout_of_an_image_does_not_matter():
    pixels = random_bytes(3, 50, 40)
    gray = pixels[:1].expand(3, 50, 40)
    wider = random_bytes(50, 80, 4)[:, ::2, :3].permute(2, 0, 1)
    for image in (pixels, gray, wider, pixels.flip(2), pixels.transpose(1, 2)):
        check_crop(image, (3, 5, 30, 20), 32, flip=False)


def test_crops_of_images_of_other_kinds_are_torchs():
    assert not image_kernel.can_crop([random_bytes(1, 8, 8)])
    assert not image_kernel.can_crop([random_bytes(3, 8, 8), torch.rand(3, 8, 8)])
    transform = two_views()
    crops = transform.crop([torch.rand(3, 20, 20)], 0, torch.arange(1))
    assert crops[0].dtype == torch.float32


# Crops of images of one size, to unit values


def random_boxes(count, height, width):
    draw = random.Random(height)
    boxes = []
    for _ in range(count):
        box_height, box_width = draw.randint(1, height), draw.randint(1, width)
        top, left = draw.randint(0, height - box_height), draw.randint(0, width - box_width)
        boxes.append((top, left, box_height, box_width))
    boxes[0] = (0, 0, height, width)
    return torch.tensor(boxes)


@pytest.mark.parametrize(
    ("size", "side", "bound"),
    [
        ((32, 32), 32, BOUND),
        ((40, 24), 32, BOUND),
        ((7, 5), 9, BOUND),
        ((1, 1), 3, BOUND),
        ((300, 70), 5, BOUND),
        ((224, 224), 96, 3e-5),  # torch computes the weights in float32, the kernel in float64
    ],
)
def test_resized_crops_match_torchs_operators(size, side, bound):
    images = random_bytes(24, *size, 3)
    images[1] = 255
    arguments = images, random_boxes(24, *size), torch.arange(24) % 2 == 0, side
    assert image_kernel.can_resized_crop(images)
    got = image_kernel.resized_crop(*arguments)
    assert (got - resized_crop(*arguments)).abs().max() < bound


def test_a_resized_crop_depends_neither_on_the_batch_nor_on_the_layout():
    images = random_bytes(8, 3, 32, 32).permute(0, 2, 3, 1)
    boxes, flips = random_boxes(8, 32, 32), torch.arange(8) % 2 == 0
    whole = image_kernel.resized_crop(images, boxes, flips, 32)
    assert torch.equal(whole, image_kernel.resized_crop(images.contiguous(), boxes, flips, 32))
    alone = [
        image_kernel.resized_crop(images[i : i + 1], boxes[i : i + 1], flips[i : i + 1], 32)
        for i in range(8)
    ]
    assert torch.equal(whole, torch.cat(alone))


def test_resized_crops_of_images_of_other_kinds_are_torchs():
    assert not image_kernel.can_resized_crop(random_bytes(2, 8, 8, 1))
    assert not image_kernel.can_resized_crop(torch.rand(2, 8, 8, 3))
    (view, _) = two_views().finish(torch.rand(2, 32, 32, 3), 0, torch.arange(2))
    assert view.dtype == torch.float32


# Colors


@pytest.mark.parametrize("size", [(32, 32), (100, 100), (17, 33), (24, 513)])
def test_strong_views_match_torchs_operators(size):
    images = random_bytes(12, 3, *size)
    parameters = drawn(12)
    assert difference(images, parameters) < BOUND
    assert difference(interleaved(images), parameters) < BOUND
    assert difference(images / 255, parameters) < BOUND
    assert difference(interleaved(images / 255), parameters) < BOUND
    other = replace(parameters, factors=parameters.factors + 0.001)
    changed = (colored(images, other) - colored(images, parameters)) * STD
    assert changed.abs().max() > 10 * BOUND


def test_every_order_and_operator_matches():
    images = random_bytes(200, 3, 12, 12)
    always = Views(jitter=1.0, gray=0.0, blur=0.0, solarize=0.0)
    assert len({tuple(order) for order in drawn(200, always).sequence.tolist()}) == 24
    for name in ("jitter", "gray", "blur", "solarize"):
        views = replace(always, **{"jitter": 0.0, name: 1.0})
        parameters = drawn(200, views)
        assert difference(images, parameters) < BOUND
        assert not torch.equal(colored(images, parameters), colored(images, None))


def test_weak_views_match():
    assert difference(random_bytes(8, 3, 40, 40), None) < 2e-7


def test_extreme_colors_match():
    levels = torch.tensor([0.0, 1e-7, 0.25, 0.5, 1 - 1e-7, 1.0])
    flat = torch.cartesian_prod(levels, levels, levels)[:, :, None, None].expand(-1, 3, 5, 5)
    assert difference(flat.contiguous(), drawn(len(flat))) < BOUND
    noisy = flat.clone()
    noisy[..., ::2] += 1e-4 * torch.rand(1, 3, 5, 3)
    assert difference(noisy.clamp(0, 1), drawn(len(flat))) < BOUND


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 2.0, 30.0, 1e4])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (4, 5), (40, 70)])
def test_any_blur_of_any_size_matches(size, sigma):
    parameters = replace(drawn(6), sigma=torch.full((6,), sigma, dtype=torch.float64))
    assert difference(random_bytes(6, 3, *size), parameters) < BOUND


def test_a_view_depends_neither_on_the_batch_nor_on_threads_nor_on_the_layout(monkeypatch):
    monkeypatch.setattr(image_kernel, "_THREAD_PIXELS", 1)
    images = random_bytes(9, 3, 61, 47)
    parameters = drawn(9)
    expected = colored(images, parameters)
    boxes = torch.tensor([[3, 4, 50, 40]]).expand(9, 4)
    crops = image_kernel.crop(list(images), boxes, parameters.grayed, 32)
    threads = torch.get_num_threads()
    try:
        for count in (2, 5, 20):
            torch.set_num_threads(count)
            assert torch.equal(colored(images, parameters), expected)
            assert torch.equal(image_kernel.crop(list(images), boxes, parameters.grayed, 32), crops)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(colored(interleaved(images), parameters), expected)
    for n in range(9):
        alone = {name: value[n : n + 1] for name, value in vars(parameters).items()}
        one = colored(images[n : n + 1], replace(parameters, **alone))
        assert torch.equal(one[0], expected[n])


@pytest.mark.parametrize("channels", [1, 2, 4, 13])
def test_images_of_other_channels_are_torchs(channels):
    assert not image_kernel.can_color(random_bytes(2, channels, 8, 8))
    assert not image_kernel.can_color(torch.rand(2, 3, 8, 8, dtype=torch.float64))
    assert not image_kernel.can_color(torch.rand(2, 3, 8, 8, requires_grad=True))
    assert image_kernel.can_color(random_bytes(2, 3, 8, 8))


@pytest.mark.parametrize("views", [STRONG, replace(STRONG, noise=0.1), replace(STRONG, gray=0.0)])
def test_views_are_the_same_without_a_compiler(monkeypatch, views):
    transform = two_views(size=24, views=views)
    images = [random_bytes(3, 20 + n, 30 - n, seed=n) for n in range(6)]
    ids = torch.arange(6)
    uniform = random_bytes(6, 28, 28, 3)

    def both():
        return *transform.finish(transform.crop(images, 1, ids), 1, ids), *transform.finish(
            uniform, 1, ids
        )

    compiled = both()
    monkeypatch.setattr(image_kernel, "library", lambda: None)
    assert image_kernel.description() == "torch"
    for got, expected in zip(compiled, both(), strict=True):
        assert ((got - expected) * STD).abs().max() < BOUND
