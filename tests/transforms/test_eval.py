"""The evaluation transform: sizes, center crops, and unreadable images."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as TF

from meanshift.data import UnreadableSample
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.transforms.eval import EvalDataset, eval_transform, needs_no_resize, rank_batches


def arrays(count, height, width, seed=0):
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return ArraySource(pixels, None, name="toy")


def test_arrays_that_were_trained_enlarged_are_evaluated_enlarged():
    assert eval_transform(arrays(2, 32, 28), torch.arange(2), 48).shape == (2, 3, 48, 48)


@pytest.mark.parametrize("side", [32, 80])
def test_arrays_of_the_image_size_stay_as_they_are(side):
    source = arrays(5, side, side)
    got = eval_transform(source, torch.tensor([4, 1]), side)
    assert np.array_equal(got.numpy(), source.pixels[[4, 1]].transpose(0, 3, 1, 2))


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 20), (64, 64)])
@pytest.mark.parametrize("image_size", [16, 28, 48])
def test_arrays_have_the_image_size_that_was_asked_for(height, width, image_size):
    got = eval_transform(arrays(2, height, width), torch.arange(2), image_size)
    assert got.shape == (2, 3, image_size, image_size)


@pytest.mark.parametrize("uniform", [True, False])
def test_a_resize_is_used_for_small_images_too(tmp_path, uniform):
    source = arrays(1, 32, 32)
    if not uniform:
        Image.fromarray(source.pixels[0]).save(tmp_path / "0.png")
        source = FolderSource(tmp_path)
    resized = TF.resize(source.read(0), [40], antialias=True)
    got = eval_transform(source, torch.tensor([0]), 32, 40)[0]
    assert torch.equal(got, TF.center_crop(resized, [32, 32]))


def test_a_resize_below_the_image_size_is_refused():
    message = "--resize 31: is below the image size of 32"
    with pytest.raises(ValueError, match=message):  # it would be padded with black
        EvalDataset(arrays(1, 32, 32), 32, resize=31, bicubic=False, batch_size=1)
    with pytest.raises(ValueError, match=message):
        eval_transform(arrays(1, 32, 32), torch.tensor([0]), 32, 31)


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_very_long_images_take_little_memory(tmp_path, monkeypatch, size):
    resized = []
    resize = TF.resize
    monkeypatch.setattr(
        TF, "resize", lambda *a, **k: resized.append(resize(*a, **k)) or resized[-1]
    )
    Image.fromarray(np.full((*size, 3), 7, np.uint8)).save(tmp_path / "long.png")
    got = eval_transform(FolderSource(tmp_path), torch.tensor([0]), 224)
    assert got.shape == (1, 3, 224, 224) and (got == 7).all()
    assert resized[0].numel() < 4_000_000  # and not 12 GB


@pytest.mark.parametrize(("height", "width"), [(80, 80), (100, 70), (66, 300)])
def test_large_arrays_are_center_cropped(height, width):
    source = arrays(3, height, width)
    got = eval_transform(source, torch.arange(3), 56)
    expected = TF.resize(torch.from_numpy(source.pixels).permute(0, 3, 1, 2), [64], antialias=True)
    expected = TF.center_crop(expected, [56, 56])
    assert got.shape == (3, 3, 56, 56)
    torch.testing.assert_close(got, expected)


def test_images_are_resized_to_256_and_cropped_to_224(tmp_path, make_images):
    make_images(tmp_path, {"wide": 1}, size=(60, 90))
    make_images(tmp_path, {"tall": 1}, size=(300, 40))
    source = FolderSource(tmp_path)
    got = eval_transform(source, torch.tensor([0, 1]), 224)
    assert got.shape == (2, 3, 224, 224)
    for index in range(2):
        resized = TF.resize(source.read(index), [256], antialias=True)
        assert min(resized.shape[1:]) == 256
        assert torch.equal(got[index], TF.center_crop(resized, [224, 224]))


def test_the_resize_can_be_chosen(tmp_path, make_images):
    source = FolderSource(make_images(tmp_path, {"": 1}, size=(60, 90)))
    got = eval_transform(source, torch.tensor([0]), 256, 256)
    expected = TF.center_crop(TF.resize(source.read(0), [256], antialias=True), [256, 256])
    assert torch.equal(got[0], expected)


def test_small_images_are_cropped_too(tmp_path, make_images):
    source = FolderSource(make_images(tmp_path, {"": 2}, size=(20, 30)))
    assert eval_transform(source, torch.arange(2), 32).shape == (2, 3, 32, 32)


def test_an_unreadable_image_is_an_error_or_gray(tmp_path, make_images):
    source = FolderSource(make_images(tmp_path, {"": 3}))
    (tmp_path / "001.jpg").write_bytes(b"")
    with pytest.raises(UnreadableSample, match=r"001\.jpg"):
        eval_transform(source, torch.arange(3), 32)
    bad = {}
    got = eval_transform(source, torch.arange(3), 32, bad=bad)
    assert (got[1] == 128).all()
    assert {index: error.title for index, error in bad.items()} == {1: str(tmp_path / "001.jpg")}


def test_bicubic_differs_from_bilinear(tmp_path, make_images):
    source = FolderSource(make_images(tmp_path, {"": 1}, size=(60, 90)))
    bicubic = eval_transform(source, torch.tensor([0]), 224, bicubic=True)
    mode = TF.InterpolationMode.BICUBIC
    resized = TF.resize(source.read(0), [256], mode, antialias=True)
    assert torch.equal(bicubic[0], TF.center_crop(resized, [224, 224]))
    assert not torch.equal(bicubic, eval_transform(source, torch.tensor([0]), 224))


@pytest.mark.parametrize("side", [20, 32, 64, 72, 80])
@pytest.mark.parametrize("image_size", [32, 64, 72])
@pytest.mark.parametrize("resize", [0, 72, 80])
def test_needs_no_resize_is_true_where_nothing_changes(side, image_size, resize):
    source = arrays(2, side, side)
    pixels = source.read_batch(torch.arange(2)).permute(0, 3, 1, 2)
    unchanged = torch.equal(eval_transform(source, torch.arange(2), image_size, resize), pixels)
    assert needs_no_resize(source, image_size, resize) == unchanged


def test_a_dataset_gives_whole_batches():
    source = arrays(10, 32, 32)
    dataset = EvalDataset(source, 32, resize=0, bicubic=False, batch_size=4)
    batches = [dataset[index] for index in range(len(dataset))]
    assert [indices.tolist() for indices, _, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    images = torch.cat([images for _, images, _ in batches])
    assert torch.equal(images, eval_transform(source, torch.arange(10), 32))
    assert [batch.tolist() for batch in rank_batches(3, 2)] == [[0, 1], [2]]
