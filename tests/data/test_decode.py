"""Files of every kind are decoded as they are stored; what cannot be read is named."""

import os
import threading

import numpy as np
import pytest
from PIL import Image

from meanshift.config.samples import RGB
from meanshift.data import UnreadableSample, file_access
from meanshift.data.convert import convert, has_alpha
from meanshift.data.decode import read_image
from tests.support.sources import truncate_file, write_deep_png

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)


def saved(path, image, **options):
    """The pixels of an image that was written to a file and read again."""
    image.save(path, **options)
    return read_image(path).permute(1, 2, 0).numpy()


def test_rgb_comes_through_unchanged(tmp_path):
    assert np.array_equal(saved(tmp_path / "a.png", Image.fromarray(PIXELS)), PIXELS)


def transparent(path, image, **options):
    """The same for an image with an alpha channel, as it is stored and as RGB."""
    pixels = saved(path, image, **options)
    decoded = read_image(path)
    assert has_alpha(decoded)
    return pixels, convert(decoded, RGB).permute(1, 2, 0).numpy()


def test_gray_stays_gray(tmp_path):
    gray = PIXELS[..., :1]
    pixels = saved(tmp_path / "a.png", Image.fromarray(gray[..., 0]))
    assert np.array_equal(pixels, gray)


def test_black_and_white_of_one_bit(tmp_path):
    bits = PIXELS[..., 0] > 127
    pixels = saved(tmp_path / "a.png", Image.fromarray(bits))
    assert np.array_equal(pixels[..., 0], np.where(bits, 255, 0))


def test_palettes_give_their_colors(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert saved(tmp_path / "a.png", palette).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    pixels, blended = transparent(tmp_path / "b.png", palette, transparency=1)
    assert pixels.tolist() == [[[255, 0, 0, 255], [0, 0, 255, 0]]]
    assert blended.tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_transparency_becomes_white(tmp_path):
    alpha = np.array([[[200, 0, 0, 0], [200, 0, 0, 255], [0, 0, 0, 128]]], np.uint8)
    pixels, blended = transparent(tmp_path / "a.png", Image.fromarray(alpha))
    assert np.array_equal(pixels, alpha)
    assert blended.tolist() == [[[255, 255, 255], [200, 0, 0], [127, 127, 127]]]


def test_transparency_is_blended_as_pillow_does(tmp_path):
    color, opacity = np.meshgrid(np.arange(256), np.arange(256))
    alpha = np.stack([color, 255 - color, color, opacity], 2).astype(np.uint8)
    image = Image.fromarray(alpha)
    expected = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    _, blended = transparent(tmp_path / "a.png", image)
    assert np.array_equal(blended, np.array(expected.convert("RGB")))


def test_gray_with_transparency_becomes_white(tmp_path):
    alpha = np.array([[[90, 0], [90, 255]]], np.uint8)
    pixels, blended = transparent(tmp_path / "a.png", Image.fromarray(alpha))
    assert np.array_equal(pixels, alpha)
    assert blended.tolist() == [[[255] * 3, [90] * 3]]


@pytest.mark.parametrize(("mode", "color"), [("L", 7), ("RGB", (7, 8, 9))])
def test_one_color_that_is_transparent_becomes_white(tmp_path, mode, color):
    image = Image.new(mode, (2, 1), color)
    image.putpixel((1, 0), 0 if mode == "L" else (0, 0, 0))
    _, blended = transparent(tmp_path / "a.png", image, transparency=color)
    assert blended.tolist() == [[[255] * 3, [0] * 3]]


def test_cmyk_becomes_rgb(tmp_path):
    pixels = saved(tmp_path / "a.jpg", Image.new("CMYK", (16, 16), (0, 255, 255, 0)), quality=95)
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() <= 8


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bit_gray_keeps_its_values(tmp_path, suffix):
    deep = np.array([[0, 255, 256, 1000, 32768, 65535]], np.uint16)
    pixels = saved(tmp_path / f"a.{suffix}", Image.fromarray(deep))
    assert pixels.shape == (1, 6, 1) and pixels.dtype == np.int32
    assert np.array_equal(pixels[..., 0], deep)


@pytest.mark.parametrize("channels", [3, 4])
def test_16_bit_colors_keep_their_values(tmp_path, channels):
    deep = np.random.default_rng(1).integers(0, 65536, (6, 8, channels)).astype(np.uint16)
    write_deep_png(tmp_path / "a.png", deep)
    decoded = read_image(tmp_path / "a.png")
    assert has_alpha(decoded) == (channels == 4)
    pixels = decoded.permute(1, 2, 0).numpy()
    assert pixels.dtype == np.int32 and np.array_equal(pixels, deep)


@pytest.mark.parametrize(
    "values", [np.float32([[-80.5, 0.25, 1e6]]), np.int32([[-70_000, 0, 70_000]])], ids=str
)
def test_32_bit_gray_keeps_its_values(tmp_path, values):
    pixels = saved(tmp_path / "a.tiff", Image.fromarray(values))
    assert pixels.dtype == values.dtype and np.array_equal(pixels[..., 0], values)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (6, -1), (3, 2), (8, 1)])
def test_exif_rotation_is_applied(tmp_path, orientation, turns):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = saved(tmp_path / "a.png", Image.fromarray(PIXELS), exif=exif)
    assert np.array_equal(upright, np.rot90(PIXELS, turns))
    photo = np.kron(PIXELS[:2, :3], np.ones((16, 16, 1), np.uint8))
    upright = saved(tmp_path / "a.jpg", Image.fromarray(photo), exif=exif, quality=95)
    assert np.abs(upright.astype(int) - np.rot90(photo, turns)).mean() < 12


def test_images_of_one_pixel_width(tmp_path):
    assert saved(tmp_path / "a.png", Image.fromarray(PIXELS[:, :1])).shape == (6, 1, 3)
    assert saved(tmp_path / "b.png", Image.fromarray(PIXELS[:1])).shape == (1, 8, 3)


def test_the_content_counts_and_not_the_suffix(tmp_path):
    pixels = saved(tmp_path / "png.jpg", Image.fromarray(PIXELS), format="PNG")
    assert np.array_equal(pixels, PIXELS)


@pytest.mark.parametrize("kind", ["truncated", "text", "empty", "missing"])
def test_an_unreadable_file_is_named(tmp_path, make_images, kind):
    path = tmp_path / "bad.jpg"
    if kind == "truncated":
        make_images(tmp_path, {"": 1})
        (tmp_path / "000.jpg").rename(path)
        truncate_file(path)
    elif kind != "missing":
        path.write_bytes(b"hello" if kind == "text" else b"")
    with pytest.raises(UnreadableSample) as caught:
        read_image(path)
    assert caught.value.title == str(path)
    assert len(caught.value.reason) > 10
    assert str(path) not in caught.value.reason  # the title has it already


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("fifo", "a FIFO"), ("zeros", "a device"), ("terminal", "a device"), ("folder", "a dir")],
)
def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path, kind, reason):
    path = tmp_path / "bad.jpg"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "zeros" else "/dev/ptmx")
    with pytest.raises(UnreadableSample, match=f"{reason}.*not a file") as caught:
        read_image(path)
    assert caught.value.title == str(path)


def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(file_access, "DISK_TIMEOUT", 0.02)
    monkeypatch.setattr(file_access, "_regular", lambda _: answer.wait(60))
    try:
        for _ in range(7):
            with pytest.raises(UnreadableSample, match=r"a\.jpg.*no answer from the disk"):
                read_image(tmp_path / "a.jpg")
        with pytest.raises(file_access.DiskTimeout, match=r"a\.jpg: no answer .* nor from 7 files"):
            read_image(tmp_path / "a.jpg")
    finally:
        answer.set()


@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff", "webp"])
def test_a_large_file_is_read_in_parts(tmp_path, monkeypatch, suffix):
    options = {"compression": "tiff_lzw"} if suffix == "tiff" else {}
    pixels = saved(tmp_path / f"a.{suffix}", Image.fromarray(PIXELS), **options)
    monkeypatch.setattr(file_access, "AT_ONCE", 10)
    assert np.array_equal(read_image(tmp_path / f"a.{suffix}").permute(1, 2, 0).numpy(), pixels)
