"""Samples are measured as numpy would; what is set stays, and what is odd is said."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.config import Data, SampleSpec
from meanshift.config.samples import RGB
from meanshift.data import open_source
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.data.measure import measure
from meanshift.models.features import evaluation_batches
from tests.support.sources import write_deep_png

RANDOM = np.random.default_rng(0)


def arrays(*shape, high=4096, dtype=np.uint16):
    return RANDOM.integers(0, high, shape).astype(dtype)


def folder_of(root, images):
    root.mkdir(exist_ok=True)
    for index, pixels in enumerate(images):
        Image.fromarray(pixels).save(root / f"{index:03}.png")
    return FolderSource(root)


def test_8_bit_rgb_is_as_for_imagenet():
    assert ArraySource(
        arrays(4, 8, 8, 3, high=256, dtype=np.uint8), None, name="x"
    ).sample_spec == (SampleSpec())


def test_8_bit_gray_keeps_its_bytes_and_measures_its_moments():
    pixels = arrays(40, 16, 16, high=200, dtype=np.uint8)
    spec = ArraySource(pixels, None, name="x").sample_spec
    assert spec.is_bytes and spec.channels == 1
    assert spec.mean == (pytest.approx((pixels / 255).mean(), abs=1e-5),)
    assert spec.std == (pytest.approx((pixels / 255).std(), abs=1e-5),)


@pytest.mark.parametrize("channels", [1, 2, 4, 13])
def test_range_and_moments_match_numpy(channels):
    scale = np.linspace(0.2, 1, channels)
    pixels = (arrays(50, 16, 20, channels) * scale).astype(np.uint16)
    spec = ArraySource(pixels, None, name="x").sample_spec
    assert (spec.channels, spec.dtype) == (channels, "int32")
    assert spec.range == tuple(np.percentile(pixels, [0.1, 99.9], method="nearest"))
    low, high = spec.range
    unit = ((pixels.astype(float) - low) / (high - low)).clip(0, 1).reshape(-1, channels)
    np.testing.assert_allclose(spec.mean, unit.mean(0), atol=1e-5)
    np.testing.assert_allclose(spec.std, unit.std(0), atol=1e-5)


def test_of_many_samples_some_are_measured():
    pixels = arrays(2000, 4, 4)
    spec = ArraySource(pixels, None, name="x").sample_spec
    low, high = spec.range
    unit = ((pixels.astype(float) - low) / (high - low)).clip(0, 1)
    assert spec.mean[0] == pytest.approx(unit.mean(), abs=0.02)
    assert spec == ArraySource(pixels, None, name="x").sample_spec


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_input_of_a_network_is_normalized(channels):
    pixels = arrays(30, 16, 16, channels, high=60_000)
    source = ArraySource(pixels, None, name="x")
    batches = evaluation_batches(source, image_size=16, resize=16, device=torch.device("cpu"))
    inputs = torch.cat([images for _, images in batches])
    assert inputs.mean((0, 2, 3)).abs().max() < 1e-3
    assert (inputs.std((0, 2, 3)) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_files_of_12_bits_keep_all_gray_levels_to_the_network(tmp_path, suffix):
    levels = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    for index, image in enumerate((levels, levels.T)):
        Image.fromarray(image).save(tmp_path / f"{index}.{suffix}")
    source = FolderSource(tmp_path)
    source = source.with_spec(measure(source, Data(range="minmax")))
    options = {"image_size": 64, "device": torch.device("cpu")}
    (inputs,) = (images for _, images in evaluation_batches(source, **options))
    assert inputs.shape == (2, 1, 64, 64)
    assert len(inputs[0].unique()) == len(inputs[1].unique()) == 4096


def test_what_is_set_stays():
    pixels = arrays(20, 8, 8)
    source = ArraySource(pixels, None, name="x")
    spec = measure(source, Data(range=(0.0, 10_000.0)))
    assert spec.range == (0, 10_000)
    assert spec.mean == (pytest.approx(pixels.mean() / 10_000, abs=1e-5),)
    spec = measure(source, Data(range="minmax", mean=(0.25,)))
    assert spec.range == (pixels.min(), pixels.max()) and spec.mean == (0.25,)
    spec = measure(source, Data(channels=3, std=(1.0, 2.0, 3.0)))
    assert spec.channels == 3 and spec.std == (1, 2, 3)
    assert spec.mean == (spec.mean[0],) * 3
    typed = measure(source, Data(dtype="float32"))
    assert typed.dtype == "float32" and typed.channels == 1


def test_negative_and_float_values():
    spec = ArraySource(arrays(9, 8, 8).astype(np.int16) - 1024, None, name="x").sample_spec
    assert spec.dtype == "int16" and spec.range[0] < -1000
    spec = ArraySource(RANDOM.normal(-40, 9, (9, 8, 8)), None, name="x").sample_spec
    assert spec.dtype == "float64" and -90 < spec.range[0] < -55 < -30 < spec.range[1] < 10


def test_constant_samples_have_a_range_and_an_std():
    spec = ArraySource(np.full((5, 8, 8), 700, np.uint16), None, name="x").sample_spec
    assert spec.range == (700, 701) and spec.mean == (0,) and spec.std == (1,)


def test_gray_and_rgb_together_are_rgb(tmp_path):
    gray, rgb = arrays(8, 8, high=256, dtype=np.uint8), arrays(8, 8, 3, high=256, dtype=np.uint8)
    source = folder_of(tmp_path, [gray, gray, rgb])
    assert source.sample_spec == RGB
    assert np.array_equal(source.sample(1).numpy(), np.stack([gray] * 3))
    assert np.array_equal(source.sample(2).numpy(), rgb.transpose(2, 0, 1))


def test_transparency_is_said_once_with_a_count(tmp_path):
    alpha = arrays(8, 8, 4, high=256, dtype=np.uint8)
    source = folder_of(tmp_path, [alpha, alpha[..., :3], alpha])
    message = r"2 of 3 images that were looked at have transparency.*--data\.channels 4 to keep"
    with pytest.warns(UserWarning, match=message) as caught:
        assert source.sample_spec == RGB
    assert len(caught) == 1
    with warnings.catch_warnings(record=True) as others:
        images = [source.sample(index) for index in range(3)]
        kept = measure(folder_of(tmp_path / "all", [alpha] * 3), Data(channels=4))
    assert [w for w in others if "transparency" in str(w.message)] == []
    assert [image.shape for image in images] == [(3, 8, 8)] * 3
    assert kept.channels == 4 and len(kept.mean) == 4


def test_other_warnings_while_looking_are_passed_on():
    class Warning1(ArraySource):
        def read(self, index):
            warnings.warn("odd file", stacklevel=2)
            return super().read(index)

    source = Warning1(arrays(2, 8, 8, 3, high=256, dtype=np.uint8), None, name="x")
    with pytest.warns(UserWarning, match="odd file"):
        assert source.sample_spec == RGB


@pytest.mark.parametrize(("stored", "asked"), [(4, 3), (13, 3), (2, 1), (1, 4), (3, 13)])
def test_bands_are_never_dropped_nor_blended(stored, asked):
    source = ArraySource(arrays(5, 16, 16, stored), None, name="x")
    with pytest.raises(ValueError, match=f"x: samples of {stored} channels, .* takes {asked}"):
        measure(source, Data(channels=asked))


def test_8_bits_among_16_are_said(tmp_path):
    deep = arrays(8, 8)
    source = folder_of(tmp_path, [deep, deep, (deep >> 4).astype(np.uint8)])
    with pytest.warns(UserWarning, match=r"1 of 3 samples .* are of 8 bits among .* int32"):
        assert source.sample_spec.dtype == "int32"


def test_an_alpha_channel_of_16_bits_is_no_brightness(tmp_path):
    deep = np.concatenate([arrays(8, 8, 3), np.full((8, 8, 1), 65535, np.uint16)], 2)
    write_deep_png(tmp_path / "a.png", deep)
    source = open_source(str(tmp_path))["train"]
    with pytest.warns(UserWarning, match="1 of 1 images .* have transparency"):
        spec = source.sample_spec
    assert spec.channels == 3 and spec.range[1] < 4096


def test_columns_of_one_scale_get_one_std_and_others_each_their_own():
    rows = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    alike = rows * [1, 2, 3, 4]
    one = measure(ArraySource(alike, None, name="x")).std
    assert len(set(one)) == 1
    assert one[0] == pytest.approx(np.sqrt(alike.var(0).mean()), rel=1e-3)
    different = rows * [1, 1, 1, 1000]
    each = measure(ArraySource(different, None, name="x")).std
    assert each == pytest.approx(different.std(0), rel=1e-3)
