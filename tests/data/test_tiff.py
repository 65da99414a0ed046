"""TIFF files of any bands and depth are read as they are, or say what is needed for it."""

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from meanshift.config.samples import RGB
from meanshift.data import UnreadableSample, tiff
from meanshift.data.convert import convert, has_alpha
from meanshift.data.decode import read_image
from meanshift.data.folder import FolderSource

RANDOM = np.random.default_rng(0)


def bands(channels, dtype="uint16"):
    """Random pixels, channels last."""
    pixels = RANDOM.integers(0, 60_000, (7, 9, channels))
    return (pixels - 30_000 if dtype.startswith(("int", "float")) else pixels).astype(dtype)


def write(path, pixels, *, planar=False, **options):
    options = {"photometric": "minisblack", "metadata": None, **options}
    if planar:
        pixels = pixels.transpose(2, 0, 1)
        options["planarconfig"] = "separate"
    elif pixels.shape[2] > 1:
        options["planarconfig"] = "contig"
    else:
        pixels = pixels[..., 0]
    tifffile.imwrite(path, pixels, **options)


def read(path):
    return read_image(path).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("planar", [False, True], ids=["contiguous", "planar"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize("channels", [2, 4, 5, 13])
def test_bands_are_all_there(tmp_path, channels, dtype, planar):
    pixels = bands(channels, dtype)
    write(tmp_path / "a.tif", pixels, planar=planar, extrasamples=[0] * (channels - 1))
    assert np.array_equal(read(tmp_path / "a.tif"), pixels)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "uint32"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_gray_of_any_integers(tmp_path, dtype, byteorder):
    pixels = bands(1, dtype)
    write(tmp_path / "a.tif", pixels, byteorder=byteorder)
    assert np.array_equal(read(tmp_path / "a.tif"), pixels)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gray_of_any_floats(tmp_path, dtype):
    pixels = bands(1, dtype)
    write(tmp_path / "a.tif", pixels)
    assert np.array_equal(read(tmp_path / "a.tif"), pixels)


@pytest.mark.parametrize(
    "options", [{"bigtiff": True}, {"compression": "zlib"}, {"tile": (16, 16)}]
)
def test_other_layouts(tmp_path, options):
    pixels = bands(5)
    write(tmp_path / "a.tif", pixels, **options)
    assert np.array_equal(read(tmp_path / "a.tif"), pixels)


def test_colors_of_16_bits(tmp_path):
    pixels = bands(3)
    write(tmp_path / "a.tif", pixels, photometric="rgb")
    assert np.array_equal(read(tmp_path / "a.tif"), pixels)


def test_a_fourth_band_is_no_transparency_but_alpha_is(tmp_path):
    pixels = bands(4, "uint8")
    write(tmp_path / "bands.tif", pixels, photometric="rgb", extrasamples=[0])
    assert np.array_equal(read(tmp_path / "bands.tif"), pixels)
    assert FolderSource(tmp_path).sample_spec.channels == 4
    Image.fromarray(pixels).save(tmp_path / "alpha.tif")
    assert np.array_equal(read(tmp_path / "alpha.tif"), pixels)
    assert has_alpha(read_image(tmp_path / "alpha.tif"))
    assert not has_alpha(read_image(tmp_path / "bands.tif"))


def test_a_fourth_band_among_rgb_files_is_refused_by_name(tmp_path, make_images):
    make_images(tmp_path, {"": 170})
    write(tmp_path / "zbands.tif", bands(4, "uint8"), photometric="rgb", extrasamples=[0])
    Image.fromarray(bands(4, "uint8")).save(tmp_path / "zzalpha.tif")
    source = FolderSource(tmp_path)
    assert source.sample_spec == RGB  # neither is among those that are looked at
    assert source.sample(171).shape[0] == 3
    with pytest.raises(UnreadableSample, match=r"zbands\.tif.*4 channels; the network takes 3"):
        source.sample(170)


def test_8_bit_colors_do_not_need_tifffile(tmp_path, monkeypatch):
    monkeypatch.setattr(tiff, "read_page", None)
    pixels = bands(3, "uint8")
    for name, options in (("plain", {}), ("lzw", {"compression": "tiff_lzw"})):
        Image.fromarray(pixels).save(tmp_path / f"{name}.tif", **options)
        assert torch.equal(
            convert(read_image(tmp_path / f"{name}.tif"), RGB),
            torch.from_numpy(pixels).permute(2, 0, 1),
        )
    Image.new("CMYK", (4, 4)).save(tmp_path / "print.tif")
    assert read(tmp_path / "print.tif").tolist() == [[[255] * 3] * 4] * 4


def test_without_tifffile_the_extra_is_named(tmp_path, monkeypatch):
    def require(*_, **__):
        raise ValueError("TIFF files need tifffile; type: pip install 'meanshift[tiff]'")

    write(tmp_path / "a.tif", bands(5))
    monkeypatch.setattr(tiff, "require", require)
    with pytest.raises(UnreadableSample, match=r"a\.tif.*pip install 'meanshift\[tiff\]'"):
        read_image(tmp_path / "a.tif")


def test_a_torn_file_and_a_bomb_are_named(tmp_path, monkeypatch):
    write(tmp_path / "a.tif", bands(5))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 62)
    with pytest.raises(UnreadableSample, match="9 x 7 pixels, more than the limit of 62"):
        read_image(tmp_path / "a.tif")
    monkeypatch.undo()
    content = (tmp_path / "a.tif").read_bytes()
    for length in (6, 60, len(content) - 100):
        (tmp_path / "a.tif").write_bytes(content[:length])
        with pytest.raises(UnreadableSample, match=r"a\.tif"):
            read_image(tmp_path / "a.tif")
