"""Stored samples become what a network takes: its channels, as bytes or floats in [0, 1]."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.config import SampleSpec
from meanshift.config.samples import RGB
from meanshift.data import UnreadableSample
from meanshift.data.arrays import ArraySource
from meanshift.data.convert import blank, convert, mark_alpha
from meanshift.data.folder import FolderSource

RANDOM = np.random.default_rng(0)
GRAY = SampleSpec(channels=1, mean=(0.5,), std=(0.25,))
DEEP = replace(GRAY, dtype="int32", range=(0.0, 4095.0))


def stored(*shape, dtype=np.uint8, high=256):
    return torch.from_numpy(RANDOM.integers(0, high, shape).astype(dtype))


def test_8_bit_rgb_is_left_alone():
    image = stored(3, 5, 6)
    assert convert(image, RGB) is image


def test_gray_is_repeated_for_three_channels():
    image = stored(1, 5, 6)
    assert torch.equal(convert(image, RGB), torch.cat([image] * 3))
    batch = stored(2, 5, 6, 1)
    assert torch.equal(convert(batch, RGB, channel_dim=-1), torch.cat([batch] * 3, 3))


def test_colors_are_mixed_to_gray_as_pillow_does():
    image = stored(3, 5, 6)
    expected = np.array(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L"))
    assert (convert(image, GRAY)[0].int() - torch.from_numpy(expected).int()).abs().max() <= 1


def test_all_gray_levels_of_12_bits_reach_the_network():
    levels = torch.arange(4096, dtype=torch.int32).view(1, 64, 64)
    unit = convert(levels, DEEP)
    assert unit.dtype == torch.float32
    assert len(unit.unique()) == 4096
    torch.testing.assert_close(unit.flatten(), torch.linspace(0, 1, 4096))


def test_values_beyond_the_range_are_clipped():
    hounsfield = torch.tensor([[[-3000, -1000, 0, 1000, 3000]]], dtype=torch.int16)
    spec = replace(GRAY, dtype="int16", range=(-1000.0, 1000.0))
    assert convert(hounsfield, spec).flatten().tolist() == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float32])
def test_deep_values_among_8_bits_say_what_to_do(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"{name} values among 8-bit .*--data\.dtype {name} --da"):
        convert(torch.zeros(3, 4, 4, dtype=dtype), RGB)


@pytest.mark.parametrize(("channels", "wanted"), [(5, 3), (13, 1), (2, 5), (3, 4)])
def test_other_channels_are_refused(channels, wanted):
    spec = SampleSpec(channels=wanted, mean=(0.5,) * wanted, std=(0.5,) * wanted)
    with pytest.raises(ValueError, match=f"{channels} channels; the network takes {wanted}"):
        convert(stored(channels, 4, 4), spec)


@pytest.mark.parametrize(("channels", "wanted"), [(2, 1), (2, 3), (4, 1), (4, 3)])
def test_alpha_is_blended_only_where_the_file_says_so(channels, wanted):
    spec = SampleSpec(channels=wanted, mean=(0.5,) * wanted, std=(0.5,) * wanted)
    image = stored(channels, 4, 4)
    with pytest.raises(ValueError, match=f"{channels} channels; the network takes {wanted}"):
        convert(image, spec)
    assert convert(mark_alpha(image), spec).shape == (wanted, 4, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(value):
    pixels = np.full((3, 4, 4), 0.5, np.float32)
    pixels[1, 2, 2] = value
    source = ArraySource(pixels, None, name="x")
    assert source.sample(0).isfinite().all()
    with pytest.raises(UnreadableSample) as caught:
        source.sample(1)
    assert caught.value.title == "#1"
    assert "not finite" in caught.value.reason


def test_a_16_bit_file_among_8_bit_ones_is_named(tmp_path, make_images):
    make_images(tmp_path, {"": 5})
    Image.fromarray(np.full((9, 9), 4000, np.uint16)).save(tmp_path / "deep.png")
    source = FolderSource(tmp_path)
    assert source.sample_spec == RGB
    bad = [index for index in range(len(source)) if source.title(index).endswith("deep.png")]
    for index in range(len(source)):
        if index not in bad:
            assert source.sample(index).shape == (3, 40, 48)
    with pytest.raises(UnreadableSample, match=r"deep\.png.*int32 values among 8-bit images"):
        source.sample(bad[0])


@pytest.mark.parametrize("spec", [RGB, GRAY, DEEP])
def test_a_blank_sample_is_like_the_others(spec):
    sample = blank(spec, [6, 7])
    image = convert(torch.zeros(spec.channels, 6, 7, dtype=getattr(torch, spec.dtype)), spec)
    assert (sample.shape, sample.dtype) == (image.shape, image.dtype)


def test_a_source_can_have_several_specifications():
    source = ArraySource(stored(4, 9, 9).numpy(), None, name="x")
    assert source.sample_spec.channels == 1
    rgb = source.with_spec(RGB)
    assert rgb.sample(2).shape == (3, 9, 9) and source.sample(2).shape == (1, 9, 9)
    assert source.with_spec(RGB) is rgb and rgb.with_spec(RGB) is rgb
    assert rgb.with_spec(source.sample_spec).sample(2).shape == (1, 9, 9)
    part = source.subset(torch.tensor([3, 1])).with_spec(RGB)
    assert part.sample_spec == RGB
    assert torch.equal(part.sample(1), rgb.sample(1))
    assert torch.equal(part.sample_batch(torch.tensor([0]))[0].permute(2, 0, 1), rgb.sample(3))
    assert part.fingerprint() == source.subset(torch.tensor([3, 1])).fingerprint()
