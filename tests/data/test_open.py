"""Sources of every kind give the right images and labels; what is wrong is named."""

import shutil
import struct
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from meanshift.config import Views
from meanshift.data import UnreadableSample, open_source, split_off, train_and_validation
from meanshift.data.arrays import ArraySource
from meanshift.data.decode import read_image
from meanshift.data.folder import FolderSource
from meanshift.data.loader import batches
from meanshift.transforms.augment import TwoViews

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (12, 6, 8, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def titles(source):
    return [source.title(index) for index in range(len(source))]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def truncate(path):
    return write(path, path.read_bytes()[:200])


def labeled(counts):
    """An array source with so many images of each class."""
    labels = np.repeat(np.arange(len(counts)), counts)
    return ArraySource(np.zeros((len(labels), 2, 2), np.uint8), labels, name="toy")


def numbers_of(source):
    """Which images of an array source (or of a cut of it) these are."""
    return {int(title[1:]) for title in titles(source)}


# Folders


def test_subfolders_are_classes_in_the_order_of_their_names(tmp_path, make_images):
    source = open_source(str(make_images(tmp_path, {"pear": 2, "apple": 3})))["train"]
    assert source.classes == ["apple", "pear"]
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    apples = [f"apple/{index:03d}.jpg" for index in range(3)]
    assert titles(source) == [*apples, "pear/000.jpg", "pear/001.jpg"]
    assert source.read(0).shape == (3, 40, 48)
    assert source.read(0).dtype == torch.uint8


def test_a_flat_folder_has_no_labels(tmp_path, make_images):
    source = open_source(str(make_images(tmp_path, {"": 3})))["train"]
    assert len(source) == 3
    assert source.labels is None
    assert source.classes == []


def test_one_subfolder_is_no_class(tmp_path, make_images):
    source = open_source(str(make_images(tmp_path, {"everything": 3})))["train"]
    assert len(source) == 3
    assert source.labels is None


def test_an_image_at_the_top_makes_the_subfolders_mere_storage(tmp_path, make_images):
    source = open_source(str(make_images(tmp_path, {"a": 2, "b": 2, "": 1})))["train"]
    assert len(source) == 5
    assert source.labels is None


def test_nested_folders_belong_to_the_class_at_the_top(tmp_path, make_images):
    make_images(tmp_path, {"a/2019/may": 1, "a/2020": 2, "b/x": 1})
    source = open_source(str(tmp_path))["train"]
    assert source.classes == ["a", "b"]
    assert source.labels.tolist() == [0, 0, 0, 1]


def test_train_val_and_test_are_splits(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 3, "train/b": 2, "val/a": 1, "val/b": 1, "test/a": 1})
    splits = open_source(str(tmp_path))
    assert list(splits) == ["train", "val", "test"]
    assert [len(part) for part in splits.values()] == [5, 2, 1]
    assert splits["train"].classes == ["a", "b"]
    train, held = train_and_validation(str(tmp_path), "auto", seed=0)
    assert (len(train), len(held)) == (5, 2)
    assert len(train_and_validation(str(tmp_path), "none", seed=0)[0]) == 5


def test_a_folder_that_holds_only_train_is_that_split(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 2, "train/b": 2})
    assert open_source(str(tmp_path))["train"].classes == ["a", "b"]


def test_train_beside_other_folders_is_a_class(tmp_path, make_images):
    make_images(tmp_path, {"train": 2, "other": 2})
    splits = open_source(str(tmp_path))
    assert list(splits) == ["train"]
    assert splits["train"].classes == ["other", "train"]


def test_hidden_files_and_other_files_are_passed_over(tmp_path, make_images):
    make_images(tmp_path, {"a": 1, "b": 1, ".cache": 1, "a/.thumbs": 1})
    shutil.copy(tmp_path / "a/000.jpg", tmp_path / "a/._000.jpg")
    write(tmp_path / "notes.txt", b"hello")
    write(tmp_path / "a/Thumbs.db", b"hello")
    shutil.copy(tmp_path / "a/000.jpg", tmp_path / "a/LOUD.JPEG")
    assert titles(open_source(str(tmp_path))["train"]) == ["a/000.jpg", "a/LOUD.JPEG", "b/000.jpg"]


def test_an_empty_folder_says_what_it_needs(tmp_path):
    write(tmp_path / "notes.txt", b"hello")
    with pytest.raises(ValueError, match=r"no image found; need files ending in .*\.jpg") as caught:
        open_source(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_what_is_no_source_is_refused_with_what_is(tmp_path):
    with pytest.raises(ValueError, match=r"nothing there; need a folder .*cifar10"):
        open_source(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"neither \.npz nor \.npy"):
        open_source(str(write(tmp_path / "table.csv", b"1,2")))


# Decoding


def saved(path, image, **options):
    image.save(path, **options)
    return read_image(path).permute(1, 2, 0).numpy()


def test_rgb_comes_through_unchanged(tmp_path):
    assert np.array_equal(saved(tmp_path / "a.png", Image.fromarray(PIXELS[0])), PIXELS[0])


def test_gray_is_repeated_in_three_channels(tmp_path):
    gray = PIXELS[0, ..., 0]
    pixels = saved(tmp_path / "a.png", Image.fromarray(gray))
    assert np.array_equal(pixels, np.stack([gray] * 3, 2))


def test_black_and_white_of_one_bit(tmp_path):
    bits = PIXELS[0, ..., 0] > 127
    pixels = saved(tmp_path / "a.png", Image.fromarray(bits))
    assert np.array_equal(pixels[..., 0], np.where(bits, 255, 0))


def test_palettes_give_their_colors(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert saved(tmp_path / "a.png", palette).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    pixels = saved(tmp_path / "b.png", palette, transparency=1)
    assert pixels.tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_alpha_lies_on_white(tmp_path):
    alpha = np.array([[[200, 0, 0, 0], [200, 0, 0, 255], [0, 0, 0, 128]]], np.uint8)
    pixels = saved(tmp_path / "a.png", Image.fromarray(alpha))
    assert pixels.tolist() == [[[255, 255, 255], [200, 0, 0], [127, 127, 127]]]


def test_gray_with_alpha_lies_on_white(tmp_path):
    alpha = np.array([[[90, 0], [90, 255]]], np.uint8)
    pixels = saved(tmp_path / "a.png", Image.fromarray(alpha))
    assert pixels.tolist() == [[[255] * 3, [90] * 3]]


def test_cmyk_becomes_rgb(tmp_path):
    pixels = saved(tmp_path / "a.jpg", Image.new("CMYK", (16, 16), (0, 255, 255, 0)), quality=95)
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() <= 8


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bit_gray_is_scaled_and_not_clipped(tmp_path, suffix):
    deep = np.array([[0, 255, 256, 1000, 32768, 65535]], np.uint16)
    pixels = saved(tmp_path / f"a.{suffix}", Image.fromarray(deep))
    assert pixels[0, :, 0].tolist() == [0, 0, 1, 3, 128, 255]
    assert (pixels == pixels[..., :1]).all()


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (6, -1), (3, 2), (8, 1)])
def test_exif_rotation_is_applied(tmp_path, orientation, turns):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = saved(tmp_path / "a.png", Image.fromarray(PIXELS[0]), exif=exif)
    assert np.array_equal(upright, np.rot90(PIXELS[0], turns))
    photo = np.kron(PIXELS[0, :2, :3], np.ones((16, 16, 1), np.uint8))
    upright = saved(tmp_path / "a.jpg", Image.fromarray(photo), exif=exif, quality=95)
    assert np.abs(upright.astype(int) - np.rot90(photo, turns)).mean() < 12


def test_images_of_one_pixel_width(tmp_path):
    assert saved(tmp_path / "a.png", Image.fromarray(PIXELS[0, :, :1])).shape == (6, 1, 3)
    assert saved(tmp_path / "b.png", Image.fromarray(PIXELS[0, :1])).shape == (1, 8, 3)


def test_the_content_counts_and_not_the_suffix(tmp_path):
    pixels = saved(tmp_path / "png.jpg", Image.fromarray(PIXELS[0]), format="PNG")
    assert np.array_equal(pixels, PIXELS[0])


@pytest.mark.parametrize(
    "kind", ["truncated", "text", "empty", "missing", "float", "beyond 16 bits"]
)
def test_what_cannot_be_read_is_named(tmp_path, make_images, kind):
    path = tmp_path / "bad.jpg"
    if kind == "truncated":
        make_images(tmp_path, {"": 1})
        (tmp_path / "000.jpg").rename(path)
        truncate(path)
    elif kind == "float":
        Image.fromarray(np.zeros((4, 4), np.float32)).save(path, format="TIFF")
    elif kind == "beyond 16 bits":
        Image.fromarray(np.full((4, 4), 70_000, np.int32)).save(path, format="TIFF")
    elif kind != "missing":
        write(path, b"hello" if kind == "text" else b"")
    with pytest.raises(UnreadableSample) as caught:
        read_image(path)
    assert caught.value.title == str(path)
    assert len(caught.value.why) > 10


# Arrays


def test_npz_without_compression_is_mapped(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x_train=PIXELS, y_train=LABELS, x_test=PIXELS[:4], y_test=LABELS[:4])
    splits = open_source(str(path))
    assert list(splits) == ["train", "test"]
    assert isinstance(splits["train"].pixels, np.memmap)
    assert_holds(splits["train"], PIXELS, LABELS)
    assert_holds(splits["test"], PIXELS[:4], LABELS[:4])


def assert_holds(source, pixels, labels):
    assert np.array_equal(source.gather(torch.arange(len(source))).numpy(), pixels)
    assert np.array_equal(source.read(3).numpy(), pixels[3].transpose(2, 0, 1))
    assert (source.labels is None and labels is None) or source.labels.tolist() == labels.tolist()


def test_npz_with_compression_is_read(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=PIXELS, labels=LABELS[:, None])
    source = open_source(str(path))["train"]
    assert not isinstance(source.pixels, np.memmap)
    assert_holds(source, PIXELS, LABELS)
    assert source.classes == ["0", "1", "2"]


def test_npz_in_fortran_order_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(PIXELS), y=LABELS)
    assert_holds(open_source(str(tmp_path / "a.npz"))["train"], PIXELS, LABELS)


def test_npy_is_mapped_and_has_no_labels(tmp_path):
    np.save(tmp_path / "a.npy", PIXELS)
    source = open_source(str(tmp_path / "a.npy"))["train"]
    assert isinstance(source.pixels, np.memmap)
    assert_holds(source, PIXELS, None)


@pytest.mark.parametrize("layout", ["nhw", "nhw1", "n1hw"])
def test_gray_arrays_have_three_channels(layout):
    gray = PIXELS[..., 0]
    given = {"nhw": gray, "nhw1": gray[..., None], "n1hw": gray[:, None]}[layout]
    assert_holds(ArraySource(given, None, name="x"), np.stack([gray] * 3, 3), None)


def test_channels_may_come_second():
    first = np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2))
    assert_holds(ArraySource(first, None, name="x"), PIXELS, None)


def test_16_bits_are_scaled():
    deep = np.array([0, 255, 256, 65535], np.uint16).reshape(1, 2, 2)
    got = ArraySource(deep, None, name="x").gather(torch.arange(1))
    assert got[0, ..., 0].tolist() == [[0, 0], [1, 255]]


def test_gathering_keeps_the_asked_order():
    got = ArraySource(PIXELS, None, name="x").gather(torch.tensor([5, 0, 5]))
    assert np.array_equal(got.numpy(), PIXELS[[5, 0, 5]])


@pytest.mark.parametrize("pixels", [PIXELS / 255, PIXELS.astype(np.int64), PIXELS.astype(bool)])
def test_pixels_of_other_types_are_refused(pixels):
    with pytest.raises(ValueError, match=rf"x: pixels of type {pixels.dtype}; need uint8"):
        ArraySource(pixels, None, name="x")


@pytest.mark.parametrize("shape", [(5,), (5, 4), (5, 4, 4, 2), (5, 4, 4, 3, 1), (0, 4, 4, 3)])
def test_arrays_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"x: an array of shape .*; need \(n, height, width\)"):
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
    with pytest.raises(ValueError, match=r"x: labels of shape .*; need one whole number an image"):
        ArraySource(PIXELS, labels, name="x")


def test_an_npz_without_images_says_what_it_found(tmp_path):
    np.savez(tmp_path / "a.npz", weights=PIXELS)
    with pytest.raises(ValueError, match=r"found the arrays weights; need x_train"):
        open_source(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("suffix", ["npz", "npy"])
@pytest.mark.parametrize("content", [b"", b"hello, I am text", b"PK\x03\x04 torn"])
def test_a_broken_array_file_is_named(tmp_path, suffix, content):
    path = write(tmp_path / f"a.{suffix}", content)
    with pytest.raises(ValueError, match=r"not a readable \.np") as caught:
        open_source(str(path))
    assert str(path) in str(caught.value)


def test_a_torn_npz_is_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x_train=PIXELS)
    truncate(path)
    with pytest.raises(ValueError, match=r"a\.npz: not a readable \.npz file"):
        open_source(str(path))


def test_a_damaged_npz_is_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x_train=np.arange(40_000).reshape(100, 20, 20).astype(np.uint8))
    content = bytearray(path.read_bytes())
    content[100:110] = bytes(10)
    with pytest.raises(ValueError, match=r"a\.npz: not a readable \.npz file"):
        open_source(str(write(path, content)))


# Named datasets and the sample


def test_a_named_dataset_that_is_missing_says_so_in_one_line(tmp_path, monkeypatch):
    attempts = []

    def no_network(root, *, download, **given):
        attempts.append((root, download, given))
        raise URLError("no route") if download else RuntimeError("Dataset not found")

    monkeypatch.setenv("MEANSHIFT_DATA", str(tmp_path / "deep"))
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", no_network)
    with pytest.raises(
        ValueError, match=r"cifar10: .*no route.*; put torchvision's CIFAR10"
    ) as caught:
        open_source("CIFAR10")
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path / "deep") in message and "MEANSHIFT_DATA" in message
    assert attempts == [(tmp_path / "deep", wish, {"train": True}) for wish in (False, True)]


def write_idx(path, array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    write(path, header + array.tobytes())


def test_a_named_dataset_of_arrays_that_is_there(tmp_path, monkeypatch):
    gray = RANDOM.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = (np.arange(30) % 10).astype(np.uint8)
    raw = tmp_path / "MNIST" / "raw"
    for split, part in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        for name, array in (("images-idx3", gray[part]), ("labels-idx1", labels[part])):
            write_idx(raw / f"{split}-{name}-ubyte", array)
    monkeypatch.setenv("MEANSHIFT_DATA", str(tmp_path))
    splits = open_source("mnist")
    assert list(splits) == ["train", "test"]
    assert splits["train"].uniform
    assert_holds(splits["train"], np.stack([gray[:20]] * 3, 3), labels[:20])
    assert_holds(splits["test"], np.stack([gray[20:]] * 3, 3), labels[20:])
    assert splits["train"].classes[7] == "7 - seven"


def test_a_named_dataset_of_files_that_is_there(tmp_path, monkeypatch, make_images):
    root = make_images(tmp_path / "eurosat" / "2750", {"Forest": 2, "River": 1})
    write(root / "River" / "001.jpg", b"hello")
    monkeypatch.setenv("MEANSHIFT_DATA", str(tmp_path))
    splits = open_source("eurosat")
    assert list(splits) == ["train"]
    source = splits["train"]
    assert source.classes == ["Forest", "River"]
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(source.read(2), read_image(root / "River" / "000.jpg"))
    with pytest.raises(
        UnreadableSample, match=r"River/001.jpg"
    ):  # a number would not help to find it
        source.read(3)


def test_unlabeled_named_data_has_no_labels(monkeypatch):
    class Unlabeled:
        def __init__(self, _root, *, split, **_):
            self.classes = ["cat", "dog", "fox"]
            self.data = PIXELS.transpose(0, 3, 1, 2)
            self.labels = np.full(12, -1) if split == "unlabeled" else LABELS

    monkeypatch.setattr(torchvision.datasets, "STL10", Unlabeled)
    splits = open_source("stl10")
    assert_holds(splits["train"], PIXELS, None)
    assert_holds(splits["test"], PIXELS, LABELS)


def test_the_sample_is_balanced():
    splits = open_source("sample")
    assert list(splits) == ["train", "test"]
    for part, count in zip(splits.values(), (1000, 200), strict=True):
        assert len(part) == 10 * count
        assert part.labels.bincount().tolist() == [count] * 10
        assert part.gather(torch.arange(3)).shape == (3, 32, 32, 3)
        assert part.classes == "airplane automobile bird cat deer dog frog horse ship truck".split()
    images = torch.cat([p.gather(torch.arange(len(p))).flatten(1) for p in splits.values()])
    assert len({row.tobytes() for row in images.numpy()}) > 11_980


# Splits and classes


def test_hold_out_keeps_the_proportions_of_the_classes():
    source = labeled([50, 30, 20])
    rest, held = split_off(source, 0.1, seed=0)
    assert held.labels.bincount().tolist() == [5, 3, 2]
    assert rest.labels.bincount().tolist() == [45, 27, 18]
    assert numbers_of(rest) | numbers_of(held) == set(range(100))
    assert not numbers_of(rest) & numbers_of(held)


def test_hold_out_is_seeded():
    source = labeled([50, 50])
    chosen = [numbers_of(split_off(source, 0.2, seed=seed)[1]) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert min(chosen[0]) < 50 <= max(chosen[0]) and chosen[0] != set(range(len(chosen[0])))


def test_hold_out_works_without_labels():
    source = ArraySource(np.zeros((40, 2, 2), np.uint8), None, name="toy")
    rest, held = split_off(source, 0.25, seed=0)
    assert (len(rest), len(held), held.labels) == (30, 10, None)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_hold_out_leaves_no_side_empty(share):
    with pytest.raises(ValueError, match=r"toy: a share of .* of 20 images leaves one side empty"):
        split_off(labeled([10, 10]), share, seed=0)


def test_a_tenth_of_a_labeled_source_is_held_out(tmp_path):
    for count, expected in ((200, 20), (60, None)):
        np.savez(tmp_path / "a.npz", x=np.zeros((count, 2, 2), np.uint8), y=np.arange(count) % 2)
        train, held = train_and_validation(str(tmp_path / "a.npz"), "auto", seed=0)
        assert (held and len(held)) == expected
        assert len(train) == count - (expected or 0)


def test_a_split_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"no split 'val'; it has test"):
        train_and_validation("sample", "val", seed=0)
    _, held = train_and_validation("sample", "test", seed=0)
    assert len(held) == 2000


def test_held_out_classes_are_numbered_by_their_names(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 1, "train/b": 1, "train/c": 1, "val/b": 2, "val/c": 1})
    _, held = train_and_validation(str(tmp_path), "auto", seed=0)
    assert held.labels.tolist() == [1, 1, 2]
    assert held.classes == ["a", "b", "c"]


def test_held_out_classes_that_training_lacks_are_refused(tmp_path, make_images):
    make_images(tmp_path, {"train/a": 1, "train/b": 1, "val/b": 1, "val/z": 1})
    with pytest.raises(ValueError, match=r"val: has classes that .*train lacks: z;"):
        train_and_validation(str(tmp_path), "auto", seed=0)


def test_an_unknown_label_stays_unknown(tmp_path):
    np.savez(
        tmp_path / "a.npz", x_train=PIXELS, y_train=LABELS, x_test=PIXELS[:3], y_test=[0, -1, 1]
    )
    _, held = train_and_validation(str(tmp_path / "a.npz"), "auto", seed=0)
    assert held.labels.tolist() == [0, -1, 1]


def test_a_cut_is_the_chosen_images_in_the_chosen_order():
    source = ArraySource(PIXELS, LABELS, name="toy")
    cut = source.take(torch.tensor([7, 2, 5]))
    assert titles(cut) == ["#7", "#2", "#5"]
    assert_holds(cut.take(torch.tensor([2, 0, 1, 1])), PIXELS[[5, 7, 2, 2]], LABELS[[5, 7, 2, 2]])


def test_a_folders_fingerprint_sees_names_and_labels(tmp_path, make_images):
    make_images(tmp_path, {"a": 2, "b": 2})
    prints = [FolderSource(tmp_path).fingerprint(), FolderSource(tmp_path).fingerprint()]
    (tmp_path / "a/000.jpg").rename(tmp_path / "a/zzz.jpg")
    prints.append(FolderSource(tmp_path).fingerprint())
    (tmp_path / "a/zzz.jpg").rename(tmp_path / "b/zzz.jpg")
    prints.append(FolderSource(tmp_path).fingerprint())
    (tmp_path / "b/zzz.jpg").unlink()
    prints.append(FolderSource(tmp_path).fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_an_arrays_fingerprint_sees_pixels_labels_and_size(cut):
    def fingerprint(pixels, labels):
        source = ArraySource(pixels, labels, name="toy")
        return (source.take(torch.arange(8)) if cut else source).fingerprint()

    other_pixels, other_labels = PIXELS.copy(), LABELS.copy()
    other_pixels[3, 0, 0, 0] ^= 1
    other_labels[3] = 1
    prints = [
        fingerprint(PIXELS, LABELS),
        fingerprint(other_pixels, LABELS),
        fingerprint(PIXELS, other_labels),
        fingerprint(PIXELS, None),
        fingerprint(PIXELS.transpose(0, 2, 1, 3), LABELS),
    ]
    assert len(set(prints)) == 5
    assert fingerprint(PIXELS.copy(), LABELS) == prints[0]


def test_a_cuts_fingerprint_sees_which_images():
    source = ArraySource(PIXELS, None, name="toy")
    one, other = source.take(torch.tensor([1, 2])), source.take(torch.tensor([2, 1]))
    assert len({one.fingerprint(), other.fingerprint(), source.fingerprint()}) == 3


# Batches

TWO = TwoViews(Views(), 3, 16)


def load(source, start, stop, *, batch_size=4, seed=3, workers=0):
    two = TwoViews(Views(), seed, 16)
    options = {"batch_size": batch_size, "seed": seed, "workers": workers}
    return list(batches(source, two.crop, start=start, stop=stop, **options))


def assert_same(some, others):
    assert len(some) == len(others) > 0
    for a, b in zip(some, others, strict=True):
        assert (a.step, a.epoch, a.bad) == (b.step, b.epoch, b.bad)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.labels, b.labels)
        whole = isinstance(a.images, torch.Tensor)
        pairs = [(a.images, b.images)] if whole else zip(a.images, b.images, strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


@pytest.fixture
def folder(tmp_path, make_images):
    return FolderSource(make_images(tmp_path, {"a": 7, "b": 8}))


@pytest.mark.parametrize("kind", ["folder", "arrays"])
def test_any_start_gives_the_same_batches(folder, kind):
    source = folder if kind == "folder" else ArraySource(PIXELS, LABELS, name="toy")
    from_zero = load(source, 0, 8)
    assert [(b.step, b.epoch) for b in from_zero] == [(s, s // 3) for s in range(8)]
    for start in (1, 3, 4, 7):
        assert_same(load(source, start, 8), from_zero[start:])


def test_workers_change_nothing(folder):
    truncate(folder.root / "a/003.jpg")
    alone, helped = load(folder, 2, 6), load(folder, 2, 6, workers=2)
    assert_same(alone, helped)
    assert any(batch.bad for batch in alone)


def test_batches_leave_the_global_generator_alone(folder):
    before = torch.get_rng_state()
    load(folder, 0, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_visits_each_image_at_most_once(folder):
    epochs = [torch.cat([b.ids for b in load(folder, 3 * e, 3 * e + 3)]) for e in range(4)]
    for ids in epochs:
        assert len(ids) == len(set(ids.tolist())) == 12
    assert len({tuple(ids.tolist()) for ids in epochs}) == 4
    assert set(torch.cat(epochs).tolist()) == set(range(15))


def test_batches_hold_the_images_of_their_ids(folder):
    for batch in load(folder, 0, 3):
        assert torch.equal(batch.labels, folder.labels[batch.ids])
        expected = TWO.crop([folder.read(int(i)) for i in batch.ids], batch.epoch, batch.ids)
        assert all(torch.equal(a, b) for a, b in zip(batch.images, expected, strict=True))
    arrays = ArraySource(PIXELS, LABELS, name="toy")
    for batch in load(arrays, 0, 3):
        assert np.array_equal(batch.images.numpy(), PIXELS[batch.ids])
        assert batch.labels.tolist() == LABELS[batch.ids].tolist()


def test_the_seed_decides_the_order(folder):
    ids = [torch.cat([b.ids for b in load(folder, 0, 3, seed=seed)]).tolist() for seed in (3, 4)]
    assert ids[0] != ids[1]


def test_an_unreadable_image_is_replaced_by_the_same_one_each_time(folder):
    clean = torch.cat([b.ids for b in load(folder, 0, 15)])
    index = 5
    path = truncate(folder.root / folder.title(index))
    stand_ins = set()
    loaded = load(folder, 0, 15)
    ids = torch.cat([b.ids for b in loaded])
    for batch, asked in zip(loaded, clean.split(4), strict=True):
        was = asked == index
        assert torch.equal(batch.ids[~was], asked[~was])
        stand_ins |= set(batch.ids[was].tolist())
        assert [title for title, _ in batch.bad] == [str(path)] * int(was.sum())
        assert torch.equal(batch.labels, folder.labels[batch.ids])
        expected = TWO.crop([folder.read(int(i)) for i in batch.ids], batch.epoch, batch.ids)
        assert all(torch.equal(a, b) for a, b in zip(batch.images, expected, strict=True))
    assert (clean == index).sum() > 1
    assert len(stand_ins) == 1
    assert index not in ids


def test_when_nothing_can_be_read_every_file_is_named(tmp_path):
    for index in range(4):
        write(tmp_path / f"{index}.jpg", b"")
    (batch,) = load(FolderSource(tmp_path), 0, 1)
    assert {title.split("/")[-1] for title, _ in batch.bad} == {f"{i}.jpg" for i in range(4)}


def test_too_few_images_for_a_batch_is_said(folder):
    with pytest.raises(ValueError, match=r"15 images do not fill one batch of 16; use --train"):
        load(folder, 0, 1, batch_size=16)
    assert len(load(folder, 0, 1, batch_size=15)) == 1


def test_a_batch_moves_without_its_ids(folder):
    batch = load(folder, 0, 1)[0]
    moved = batch.to(torch.device("meta"))
    assert moved.labels.is_meta and all(crops.is_meta for crops in moved.images)
    assert not moved.ids.is_meta
