"""The views match torchvision's operators, and their parameters torchvision's distributions."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from meanshift.config import Views
from meanshift.data import open_source
from meanshift.ops import image as image_ops
from meanshift.ops.image import ColorParameters
from meanshift.runtime import rng
from meanshift.transforms import augment
from meanshift.transforms.augment import Address, TwoViews

COUNT, DRAWS = 200, 4000
DEVIATION = torch.tensor(image_ops.STD)[:, None, None]
PLAIN = Views(flip=0.0, jitter=0.0, gray=0.0, blur=0.0)
CHANCES = {"flip": 0.5, "jitter": 0.8, "gray": 0.2, "blur": 0.5}
ADJUST = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)


@pytest.fixture(scope="module")
def sample():
    """Images of all classes, (200, 32, 32, 3)."""
    return open_source("sample")["train"].gather(torch.arange(0, 10_000, 10_000 // COUNT))


@pytest.fixture(scope="module")
def planes(sample):
    return to_planes(sample)


def to_planes(images):
    return images.permute(0, 3, 1, 2).float() / 255


def wide(sample):
    """The same pixels as images that are not square, (200, 24, 40, 3)."""
    return torch.cat([sample, sample.flip(2)], 2)[:, 4:28, 12:52].contiguous()


def share_matching(got, expected):
    """Share of the values that lie within 1/255 of each other."""
    assert got.shape == expected.shape
    return ((got - expected).abs() <= 1 / 255 + 1e-6).double().mean()


def each(operator, images, *parameters):
    """A torchvision operator on each image, with the image's own parameters."""
    return torch.stack([operator(*one) for one in zip(images, *parameters, strict=True)])


def address(count=COUNT, *, seed=0, epoch=0, stream=rng.ONLINE):
    return Address(seed, epoch, torch.arange(count), stream)


def boxes_for(images, views=PLAIN):
    height, width = (torch.full((len(images),), side) for side in images.shape[1:3])
    return augment.draw_boxes(views, address(len(images)), height, width)


def resized_crops(images, boxes, size):
    def cut(image, box):
        return TF.resized_crop(image, *box, [size, size], antialias=True)

    return each(cut, images.permute(0, 3, 1, 2), boxes.tolist()) / 255


def colors(**given):
    unchanged = ColorParameters(
        factors=torch.tensor([[1.0, 1.0, 1.0, 0.0]]).double().repeat(COUNT, 1),
        sequence=torch.arange(4).repeat(COUNT, 1),
        jittered=torch.ones(COUNT, dtype=torch.bool),
        grayed=torch.zeros(COUNT, dtype=torch.bool),
        sigma=torch.zeros(COUNT, dtype=torch.float64),
    )
    return replace(unchanged, **given)


def chain_of_torchvision(image, box, flip, factors, sequence, jittered, grayed, sigma, size):
    """One image by the authors' order of steps: crop, jitter, gray, blur, flip."""
    view = TF.resized_crop(image, *box, [size, size], antialias=True)
    if jittered:
        for part in sequence:
            view = ADJUST[part](view, factors[part])
    if grayed:
        view = TF.rgb_to_grayscale(view, num_output_channels=3)
    if sigma:
        view = TF.gaussian_blur(view, [13, 13], [sigma, sigma])
    return TF.horizontal_flip(view) if flip else view


def make_params(transform, height, width, draws=DRAWS):
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    return [transform.make_params([image]) for _ in range(draws)]


def choices(views):
    """What happens to each of many images, by the names of `CHANCES`."""
    drawn = augment.draw_colors(views, address(DRAWS))
    flips = augment.draw_flips(views, address(DRAWS))
    return dict(zip(CHANCES, (flips, drawn.jittered, drawn.grayed, drawn.sigma > 0), strict=True))


def alike(a, b):
    return stats.ks_2samp(np.asarray(a), np.asarray(b)).pvalue > 0.01


# Operators


@pytest.mark.parametrize("size", [16, 32, 50])
@pytest.mark.parametrize("shape", ["square", "wide", "tall"])
def test_crop_matches_resized_crop(sample, shape, size):
    images = {"square": sample, "wide": wide(sample), "tall": wide(sample).transpose(1, 2)}[shape]
    boxes = boxes_for(images)
    got = image_ops.crop(images, boxes, torch.zeros(COUNT, dtype=torch.bool), size)
    assert share_matching(got, resized_crops(images, boxes, size)) >= 0.999


def test_crop_of_a_shifted_box_does_not_match(sample):
    boxes = boxes_for(sample, replace(PLAIN, crop_area=(0.2, 0.5)))
    shifted = boxes.clone()
    shifted[:, 1] = (boxes[:, 1] + 1).clamp(max=32 - boxes[:, 3])
    got = image_ops.crop(sample, boxes, torch.zeros(COUNT, dtype=torch.bool), 32)
    assert share_matching(got, resized_crops(sample, shifted, 32)) < 0.7


def test_flips_match_horizontal_flip(sample):
    flips = torch.arange(COUNT) % 3 == 0
    boxes = boxes_for(sample)
    unflipped = image_ops.crop(sample, boxes, torch.zeros_like(flips), 32)
    expected = each(lambda p, f: TF.horizontal_flip(p) if f else p, unflipped, flips)
    torch.testing.assert_close(image_ops.crop(sample, boxes, flips, 32), expected)


@pytest.mark.parametrize("part", range(4), ids=["brightness", "contrast", "saturation", "hue"])
def test_each_part_of_jitter_matches_torchvision(planes, part):
    u = torch.linspace(-1, 1, COUNT).double()
    factors = colors().factors
    factors[:, part] = u * 0.5 if part == 3 else 1 + 0.9 * u
    got = image_ops.jitter(planes, colors(factors=factors))
    expected = each(ADJUST[part], planes, factors[:, part].tolist())
    assert share_matching(got, expected) >= 0.999
    assert share_matching(got, planes) < 0.5


def test_jitter_in_the_order_of_each_image(planes):
    drawn = augment.draw_colors(replace(PLAIN, jitter=1.0), address())
    assert len({tuple(order) for order in drawn.sequence.tolist()}) == 24

    def one(image, factors, sequence):
        for part in sequence:
            image = ADJUST[part](image, factors[part])
        return image

    expected = each(one, planes, drawn.factors.tolist(), drawn.sequence.tolist())
    assert share_matching(image_ops.jitter(planes, drawn), expected) >= 0.999
    backwards = replace(drawn, sequence=drawn.sequence.flip(1))
    assert share_matching(image_ops.jitter(planes, backwards), expected) < 0.9


def test_images_without_jitter_are_not_touched(planes):
    drawn = augment.draw_colors(replace(PLAIN, jitter=0.5), address())
    got = image_ops.jitter(planes, drawn)
    assert torch.equal(got[~drawn.jittered], planes[~drawn.jittered])
    changed = (got - planes).abs().amax((1, 2, 3)) > 1 / 255
    assert changed[drawn.jittered].double().mean() > 0.95


def test_jitter_of_gray_black_and_white_images_is_finite():
    flat = torch.tensor([0.0, 0.5, 1.0])[:, None, None, None].expand(3, 3, 8, 8)
    drawn = augment.draw_colors(replace(PLAIN, jitter=1.0), address(3))
    assert image_ops.jitter(flat, drawn).isfinite().all()
    turned = image_ops.adjust_hue(flat, torch.tensor([0.1, -0.3, 0.5]))
    torch.testing.assert_close(turned, flat)


@pytest.mark.parametrize("chroma", [1e-4, 1e-3, 1e-2])
def test_hue_of_images_with_hardly_any_color_matches_adjust_hue(planes, chroma):
    faint = 0.4 + chroma * planes
    shift = torch.linspace(-0.5, 0.5, COUNT)
    expected = each(TF.adjust_hue, faint, shift.tolist())
    torch.testing.assert_close(image_ops.adjust_hue(faint, shift), expected, atol=2e-6, rtol=0)
    assert (expected - faint).abs().max() > 0.5 * chroma


def test_gray_matches_rgb_to_grayscale(planes):
    chosen = torch.arange(COUNT) % 2 == 0
    got = image_ops.to_grayscale(planes, chosen)
    expected = TF.rgb_to_grayscale(planes, num_output_channels=3)
    assert share_matching(got[chosen], expected[chosen]) >= 0.999
    assert torch.equal(got[~chosen], planes[~chosen])


@pytest.mark.parametrize("shape", ["square", "wide"])
def test_blur_matches_gaussian_blur_of_13_taps(sample, shape):
    images = to_planes({"square": sample, "wide": wide(sample)}[shape])
    sigma = torch.linspace(0.1, 2, COUNT).double()
    got = image_ops.blur(images, sigma)
    expected = each(lambda p, s: TF.gaussian_blur(p, [13, 13], [s, s]), images, sigma.tolist())
    assert share_matching(got, expected) >= 0.999
    sharper = image_ops.blur(images, sigma * 0.9)
    assert share_matching(sharper, expected) < 0.9


def test_no_sigma_is_no_blur(planes):
    sigma = torch.where(torch.arange(COUNT) % 2 == 0, 1.5, 0.0).double()
    got = image_ops.blur(planes, sigma)
    assert torch.equal(got[1::2], planes[1::2])
    assert (got[::2] != planes[::2]).double().mean() > 0.5
    assert image_ops.blur(planes, torch.zeros(COUNT).double()) is planes


def test_blur_of_an_image_smaller_than_the_kernel():
    image = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    got = image_ops.blur(image, torch.tensor([2.0]).double())
    assert got.isfinite().all()
    assert got.std() < 0.5 * image.std()
    assert image.min() <= got.min() <= got.max() <= image.max()


def test_normalize_matches_torchvision(planes):
    expected = TF.normalize(planes, list(image_ops.MEAN), list(image_ops.STD))
    torch.testing.assert_close(image_ops.normalize(planes), expected)


@pytest.mark.parametrize("shape", ["square", "wide"])
def test_whole_chain_matches_torchvision(sample, shape):
    images, size, views = {"square": sample, "wide": wide(sample)}[shape], 28, Views()
    place = address(seed=5, epoch=3)
    height, width = (torch.full((COUNT,), side) for side in images.shape[1:3])
    drawn = augment.draw_colors(views, place)
    parameters = [
        augment.draw_boxes(views, place, height, width),
        augment.draw_flips(views, place),
        drawn.factors,
        drawn.sequence,
        drawn.jittered,
        drawn.grayed,
        drawn.sigma,
    ]
    expected = each(
        lambda *one: chain_of_torchvision(*one, size),
        to_planes(images),
        *(values.tolist() for values in parameters),
    )
    expected = TF.normalize(expected, list(image_ops.MEAN), list(image_ops.STD))
    _, online = TwoViews(views, 5, size).finish(images, 3, place.ids)
    assert share_matching(online * DEVIATION, expected * DEVIATION) >= 0.999
    _, other = TwoViews(views, 5, size).finish(images, 4, place.ids)
    assert share_matching(other * DEVIATION, expected * DEVIATION) < 0.5


# Distributions


@pytest.mark.parametrize(("height", "width"), [(32, 32), (300, 400), (300, 150)])
def test_crop_boxes_are_distributed_as_torchvisions(height, width):
    theirs = make_params(v2.RandomResizedCrop(32, scale=(0.2, 1.0)), height, width)
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in theirs])
    sides = torch.full((DRAWS,), height), torch.full((DRAWS,), width)
    ours = augment.draw_boxes(Views(), address(DRAWS), *sides).numpy()

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
    assert [name for name in got if not alike(got[name], expected[name])] == []
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()
    other = augment.draw_boxes(Views(crop_area=(0.25, 1.0)), address(DRAWS), *sides).numpy()
    assert not alike(aspects_of(other)["area"], expected["area"])


@pytest.mark.parametrize(
    ("height", "width"), [(10, 1000), (1000, 10), (1, 50), (50, 1), (8, 300), (301, 8), (13, 501)]
)
def test_extreme_shapes_fall_back_to_torchvisions_central_crop(height, width):
    theirs = make_params(v2.RandomResizedCrop(32, scale=(0.2, 1.0)), height, width, draws=3)
    expected = [[p["top"], p["left"], p["height"], p["width"]] for p in theirs]
    sides = torch.full((3,), height), torch.full((3,), width)
    assert augment.draw_boxes(Views(), address(3), *sides).tolist() == expected


def test_fallback_of_an_allowed_shape_is_the_whole_image():
    image = torch.tensor([10]), torch.tensor([11])
    whole = replace(PLAIN, crop_area=(1.0, 1.0))

    class Fixed(Address):
        uniform = torch.ones(1, 35).double() * 0.999  # a ratio near 4/3 never fits

    box = augment.draw_boxes(whole, Fixed(0, 0, torch.arange(1), 0), *image)
    assert box.tolist() == [[0, 0, 10, 11]]


def test_boxes_of_mixed_sizes_do_not_mix():
    sides = torch.tensor([[32, 32], [300, 20], [64, 48]])
    together = augment.draw_boxes(Views(), address(3), *sides.unbind(1))
    for index in range(3):
        place = Address(0, 0, torch.tensor([index]), rng.ONLINE)
        alone = augment.draw_boxes(Views(), place, *sides[[index]].unbind(1))
        assert torch.equal(alone[0], together[index])


def test_jitter_is_distributed_as_torchvisions():
    theirs = make_params(v2.ColorJitter(0.4, 0.4, 0.4, 0.1), 4, 4)
    ours = augment.draw_colors(Views(), address(DRAWS))
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    for part, name in enumerate(names):
        assert alike(ours.factors[:, part], [p[name] for p in theirs]), name
    narrow = augment.draw_colors(Views(jitter_strength=(0.36, 0.4, 0.4, 0.1)), address(DRAWS))
    assert not alike(narrow.factors[:, 0], [p["brightness_factor"] for p in theirs])


def test_jitters_order_is_any_permutation_with_equal_chance():
    sequence = augment.draw_colors(Views(), address(DRAWS)).sequence
    assert torch.equal(sequence.sort(1).values, torch.arange(4).expand(DRAWS, 4))
    _, counts = (sequence * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_counts=True)
    assert len(counts) == math.factorial(4)
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


@pytest.mark.parametrize(("name", "chance"), CHANCES.items())
def test_chances_are_kept(name, chance):
    count = int(choices(Views())[name].sum())
    assert stats.binomtest(count, DRAWS, chance).pvalue > 0.01
    assert stats.binomtest(count, DRAWS, chance + 0.06).pvalue < 0.01
    assert not choices(replace(Views(), **{name: 0.0}))[name].any()
    assert choices(replace(Views(), **{name: 1.0}))[name].all()


def test_choices_are_independent_of_each_other():
    views = Views()
    drawn = augment.draw_colors(views, address(DRAWS))
    made = torch.stack(list(choices(views).values())).double()
    between = torch.corrcoef(torch.cat([made, drawn.factors.T, drawn.sigma[None]]))
    between[3, 8] = between[8, 3] = 0  # whether and how much an image is blurred
    assert (between - torch.eye(9)).abs().max() < 4 / DRAWS**0.5


def test_sigma_is_distributed_as_torchvisions():
    theirs = make_params(v2.GaussianBlur(13, sigma=(0.1, 2.0)), 4, 4)
    ours = augment.draw_colors(Views(blur=1.0), address(DRAWS)).sigma
    assert alike(ours, [p["sigma"][0] for p in theirs])
    wider = augment.draw_colors(Views(blur=1.0, blur_sigma=(0.1, 2.2)), address(DRAWS)).sigma
    assert not alike(wider, [p["sigma"][0] for p in theirs])


def test_target_and_online_views_are_drawn_apart():
    sides = torch.full((COUNT,), 32), torch.full((COUNT,), 32)
    target, online = (
        augment.draw_boxes(Views(), address(stream=stream), *sides)
        for stream in (rng.TARGET, rng.ONLINE)
    )
    assert (target == online).all(1).double().mean() < 0.1


# Two views


def crops_of(two, images, epoch, ids):
    return two.crop(list(images.permute(0, 3, 1, 2)), epoch, ids)


def test_arrays_and_crops_give_the_same_views(sample):
    two, ids = TwoViews(Views(), 1, 28), torch.arange(COUNT)
    from_arrays = two.finish(sample, 2, ids)
    from_crops = two.finish(crops_of(two, sample, 2, ids), 2, ids)
    for whole, cut in zip(from_arrays, from_crops, strict=True):
        difference = (whole - cut).abs() * DEVIATION
        assert difference.mean() < 1.5 / 255
        assert (difference < 8 / 255).double().mean() > 0.999


def test_the_target_is_weak_and_the_online_view_strong(sample):
    ids, views = torch.arange(COUNT), Views(jitter=1.0)
    target, online = TwoViews(views, 1, 32).finish(sample, 0, ids)
    for view, stream, same in ((target, rng.TARGET, True), (online, rng.ONLINE, False)):
        place = address(seed=1, stream=stream)
        sides = torch.full((COUNT,), 32), torch.full((COUNT,), 32)
        boxes = augment.draw_boxes(views, place, *sides)
        weak = image_ops.crop(sample, boxes, augment.draw_flips(views, place), 32)
        assert torch.allclose(view, image_ops.normalize(weak)) == same
    strong, weak = TwoViews(replace(views, target="strong", online="weak"), 1, 32).finish(
        sample, 0, ids
    )
    assert not torch.allclose(strong, target)
    assert not torch.allclose(weak, online)


def test_the_same_view_is_given_to_both(sample):
    ids, views = torch.arange(COUNT), Views(same_view=True)
    two = TwoViews(views, 1, 32)
    target, online = two.finish(sample, 0, ids)
    assert torch.equal(target, online)
    assert torch.equal(
        online, TwoViews(replace(views, same_view=False), 1, 32).finish(sample, 0, ids)[1]
    )
    cut = crops_of(two, sample, 0, ids)
    assert len(cut) == 1
    assert torch.equal(*two.finish(cut, 0, ids))


def test_views_differ_by_epoch_seed_and_role(sample):
    ids, few = torch.arange(20), sample[:20]
    target, online = TwoViews(PLAIN, 1, 32).finish(few, 0, ids)
    others = [
        online,
        TwoViews(PLAIN, 1, 32).finish(few, 1, ids)[0],
        TwoViews(PLAIN, 2, 32).finish(few, 0, ids)[0],
        TwoViews(PLAIN, 1, 32).finish(few, 0, ids + 1)[0],
    ]
    for other in others:
        assert (other != target).flatten(1).any(1).double().mean() > 0.9
    assert torch.equal(TwoViews(PLAIN, 1, 32).finish(few, 0, ids)[0], target)


@pytest.mark.parametrize("whole", [True, False], ids=["arrays", "crops"])
@pytest.mark.parametrize("blur", [0.0, 1.0], ids=["sharp", "blurred"])
def test_a_view_does_not_depend_on_its_batch_mates(sample, blur, whole):
    two, ids = TwoViews(Views(target="strong", blur=blur), 1, 32), torch.arange(40)

    def views(chosen):
        images = sample[chosen] if whole else crops_of(two, sample[chosen], 0, chosen)
        return two.finish(images, 0, chosen)

    together = views(ids)
    for index in range(0, 40, 4):
        for alone, among in zip(views(ids[[index]]), together, strict=True):
            torch.testing.assert_close(alone[0], among[index], atol=1e-4, rtol=0)
    for reversed_, among in zip(views(ids.flip(0)), together, strict=True):
        torch.testing.assert_close(reversed_.flip(0), among, atol=1e-4, rtol=0)


def test_all_chances_at_zero_leave_a_whole_image_alone(sample):
    views, ids = replace(PLAIN, crop_area=(1.0, 1.0), target="strong"), torch.arange(COUNT)
    for view in TwoViews(views, 0, 32).finish(sample, 0, ids):
        torch.testing.assert_close(view, image_ops.normalize(to_planes(sample)))


@pytest.mark.parametrize("name", ["flip", "jitter", "gray", "blur"])
def test_each_operator_comes_with_its_own_chance(sample, name):
    ids = torch.arange(50)
    off = TwoViews(PLAIN, 1, 32).finish(sample[:50], 0, ids)
    on = TwoViews(replace(PLAIN, **{name: 1.0}), 1, 32).finish(sample[:50], 0, ids)
    changed = [(a - b).abs().amax((1, 2, 3)) > 1e-3 for a, b in zip(off, on, strict=True)]
    assert changed[1].double().mean() > 0.9
    assert changed[0].double().mean() > 0.9 if name == "flip" else not changed[0].any()


def test_crops_of_images_of_any_sizes():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 50), (50, 1), (1, 1), (200, 31), (24, 24)]
    images = [
        torch.randint(0, 256, (3, *s), dtype=torch.uint8, generator=generator) for s in shapes
    ]
    two, ids = TwoViews(Views(), 1, 24), torch.arange(5)
    crops = two.crop(images, 0, ids)
    assert [part.shape for part in crops] == [(5, 3, 24, 24)] * 2
    for view in two.finish(crops, 0, ids):
        assert view.isfinite().all()
    box = augment.draw_boxes(
        Views(), Address(1, 0, ids[3:4], rng.TARGET), torch.tensor([200]), torch.tensor([31])
    )
    expected = TF.resized_crop(images[3], *box[0].tolist(), [24, 24], antialias=True)
    flips = augment.draw_flips(Views(), Address(1, 0, ids, rng.TARGET))
    assert 0 < flips.sum() < 5
    assert torch.equal(crops[0][3], TF.horizontal_flip(expected) if flips[3] else expected)
    straight = TwoViews(replace(Views(), flip=0.0), 1, 24).crop(images, 0, ids)[0]
    for index, flip in enumerate(flips):
        once = straight[index]
        assert torch.equal(crops[0][index], TF.horizontal_flip(once) if flip else once)


def test_a_part_of_a_batch_gives_the_same_views(sample, monkeypatch):
    """On a CPU a batch is made in parts that stay in its cache."""
    two, ids = TwoViews(Views(), 1, 32), torch.arange(50)
    whole = two.finish(sample[:50], 3, ids)
    monkeypatch.setattr(augment, "PIXELS", 7 * 32 * 32)
    for one, other in zip(whole, two.finish(sample[:50], 3, ids), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0.0)
    few = two.finish([part[:7] for part in crops_of(two, sample[:50], 3, ids)], 3, ids[:7])
    some = two.finish(crops_of(two, sample[:50], 3, ids), 3, ids)
    assert all(torch.equal(a, b[:7]) for a, b in zip(few, some, strict=True))
