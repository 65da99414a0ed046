"""Array files give the right images and labels; what is wrong with them is named."""

import numpy as np
import pytest
import torch

from meanshift.config.samples import RGB
from meanshift.data import open_source, train_and_validation
from meanshift.data.arrays import ArraySource
from tests.support.sources import truncate_file

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def assert_contains(source, pixels, labels):
    assert np.array_equal(source.read_batch(torch.arange(len(source))).numpy(), pixels)
    assert np.array_equal(source.read(3).numpy(), pixels[3].transpose(2, 0, 1))
    assert (source.labels is None and labels is None) or source.labels.tolist() == labels.tolist()


def test_npz_without_compression_is_mapped(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x_train=PIXELS, y_train=LABELS, x_test=PIXELS[:4], y_test=LABELS[:4])
    splits = open_source(str(path))
    assert list(splits) == ["train", "test"]
    assert isinstance(splits["train"].pixels, np.memmap)
    assert_contains(splits["train"], PIXELS, LABELS)
    assert_contains(splits["test"], PIXELS[:4], LABELS[:4])


def test_npz_with_compression_is_read(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=PIXELS, labels=LABELS[:, None])
    source = open_source(str(path))["train"]
    assert not isinstance(source.pixels, np.memmap)
    assert_contains(source, PIXELS, LABELS)
    assert source.classes == ["0", "1", "2"]


def test_npz_in_fortran_order_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(PIXELS), y=LABELS)
    assert_contains(open_source(str(tmp_path / "a.npz"))["train"], PIXELS, LABELS)


def test_npy_is_mapped_and_has_no_labels(tmp_path):
    np.save(tmp_path / "a.npy", PIXELS)
    source = open_source(str(tmp_path / "a.npy"))["train"]
    assert isinstance(source.pixels, np.memmap)
    assert_contains(source, PIXELS, None)


@pytest.mark.parametrize("layout", ["nhw", "nhw1", "n1hw"])
def test_gray_arrays_have_one_channel(layout):
    gray = PIXELS[..., 0]
    given = {"nhw": gray, "nhw1": gray[..., None], "n1hw": gray[:, None]}[layout]
    source = ArraySource(given, None, name="x")
    assert_contains(source, gray[..., None], None)
    as_rgb = source.with_spec(RGB).sample_batch(torch.arange(12))
    assert np.array_equal(as_rgb.numpy(), np.stack([gray] * 3, 3))


def test_channels_may_come_second():
    first = np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2))
    assert_contains(ArraySource(first, None, name="x"), PIXELS, None)


@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
def test_13_bands_of_16_bits_keep_their_values(tmp_path, first):
    bands = np.random.default_rng(1).integers(0, 65536, (5, 16, 20, 13)).astype(np.uint16)
    np.save(tmp_path / "a.npy", bands.transpose(0, 3, 1, 2) if first else bands)
    source = open_source(str(tmp_path / "a.npy"))["train"]
    assert_contains(source, bands.astype(np.int32), None)
    spec = source.sample_spec
    assert (spec.channels, spec.dtype, spec.kind) == (13, "int32", "image")
    low, high = spec.range
    sample = source.sample(2)
    expected = ((bands[2].astype(np.float64) - low) / (high - low)).clip(0, 1)
    assert sample.dtype == torch.float32
    np.testing.assert_allclose(sample.permute(1, 2, 0).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("<i2", [-1024, 0, 3071]),
        (">i2", [-1024, 0, 3071]),
        (">u2", [0, 4095, 65535]),
        ("u4", [0, 70_000, 2**32 - 1]),
        ("f4", [-80.5, 0.25, 12.0]),
        ("f8", [-80.5, 0.25, 12.0]),
        ("f2", [-80.5, 0.25, 12.0]),
    ],
)
def test_numbers_of_any_type_are_read_as_they_are(dtype, values):
    pixels = np.array(values, dtype).reshape(1, 1, 3)
    read = ArraySource(pixels, None, name="x").read(0)
    assert read[0, 0].tolist() == values


def test_masks_are_black_and_white():
    read = ArraySource(PIXELS > 127, None, name="x").read_batch(torch.arange(12))
    assert np.array_equal(read.numpy(), np.where(PIXELS > 127, 255, 0))


def test_a_batch_has_the_order_that_was_asked_for():
    got = ArraySource(PIXELS, None, name="x").read_batch(torch.tensor([5, 0, 5]))
    assert np.array_equal(got.numpy(), PIXELS[[5, 0, 5]])


@pytest.mark.parametrize("pixels", [PIXELS.astype(str), PIXELS.astype(complex)])
def test_pixels_of_other_types_are_refused(pixels):
    with pytest.raises(ValueError, match=rf"x: pixels of type {pixels.dtype}; need numbers"):
        ArraySource(pixels, None, name="x")


@pytest.mark.parametrize("shape", [(5,), (5, 0), (5, 4, 4, 3, 1), (0, 4, 4, 3)])
def test_arrays_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"x: an array of shape .*; need images \(n, hei"):
        ArraySource(np.zeros(shape, np.uint8), None, name="x")


@pytest.mark.parametrize(
    "labels",
    [
        LABELS[:5],
        LABELS.astype(float),
        np.eye(3, dtype=int)[LABELS],
        LABELS.astype(str),
        np.array(3),
    ],
    ids=["too few", "fractions", "one-hot", "text", "a single number"],
)
def test_bad_labels_are_refused(labels):
    with pytest.raises(ValueError, match=r"x: labels of shape .*; need one integer per image"):
        ArraySource(PIXELS, labels, name="x")


@pytest.mark.parametrize("unknown", [-1, -100])
@pytest.mark.parametrize("known", [3, 0])
def test_labels_below_zero_are_unknown(tmp_path, unknown, known):
    labels = np.where(np.arange(12) < known, LABELS, unknown)
    parts = {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "y_test": labels}
    np.savez(tmp_path / "a.npz", **parts)
    validation = train_and_validation(str(tmp_path / "a.npz"), "auto", seed=0)[1]
    assert validation.labels.tolist() == [*LABELS[:known].tolist(), *[-1] * (12 - known)]


def test_an_npz_without_images_lists_what_it_has(tmp_path):
    np.savez(tmp_path / "a.npz", weights=PIXELS)
    with pytest.raises(ValueError, match=r"found the arrays weights; need x_train"):
        open_source(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("suffix", ["npz", "npy"])
@pytest.mark.parametrize("content", [b"", b"hello, I am text", b"PK\x03\x04 torn"])
def test_a_broken_array_file_is_named(tmp_path, suffix, content):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not a readable \.np") as caught:
        open_source(str(path))
    assert str(path) in str(caught.value)


def test_a_torn_npz_is_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x_train=PIXELS)
    truncate_file(path)
    with pytest.raises(ValueError, match=r"a\.npz: not a readable \.npz file"):
        open_source(str(path))


def test_a_damaged_npz_is_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x_train=np.arange(40_000).reshape(100, 20, 20).astype(np.uint8))
    content = bytearray(path.read_bytes())
    content[100:110] = bytes(10)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz: not a readable \.npz file"):
        open_source(str(path))
