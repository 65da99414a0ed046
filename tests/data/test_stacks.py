"""Files of several images (TIFF pages, DICOM frames, volumes): slices with an id of the whole."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
import tifffile
import torch
from PIL import Image

from meanshift.data import UnreadableSample, open_source, train_and_validation
from meanshift.data.decode import read_image
from meanshift.data.folder import FolderSource
from tests.support.sources import titles

DICOM = Path(pydicom.__file__).parent / "data" / "test_files"
RANDOM = np.random.default_rng(0)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*are stacks of"),
    pytest.mark.filterwarnings("ignore:.*are kept whole in splits"),
]


def pages(count, dtype="uint8", shape=(6, 7)):
    return RANDOM.integers(0, 200, (count, *shape)).astype(dtype)


def save_pages(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = map(Image.fromarray, pixels)
    first.save(path, save_all=True, append_images=others)


def copy_dicom(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(DICOM / name, folder / name)
    return folder


def assert_is_stack(source, stack):
    """Each image of a source is a slice, channels last."""
    assert len(source) == len(stack)
    for index, pixels in enumerate(stack):
        expected = pixels if pixels.ndim == 3 else pixels[..., None]
        assert np.array_equal(source.read(index).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_pages_of_pillow(tmp_path, dtype):
    stack = pages(3, dtype)
    save_pages(tmp_path / "scan.tif", stack)
    source = FolderSource(tmp_path)
    assert_is_stack(source, stack)
    assert titles(source) == ["scan.tif#0", "scan.tif#1", "scan.tif#2"]
    assert source.wholes == ["scan.tif"] * 3


@pytest.mark.parametrize("bigtiff", [False, True], ids=["TIFF", "BigTIFF"])
@pytest.mark.parametrize(("dtype", "bands"), [("float32", 1), ("uint16", 5), ("int16", 1)])
def test_pages_of_tifffile(tmp_path, dtype, bands, bigtiff):
    stack = pages(4, dtype, (6, 7, bands))
    options = {"photometric": "minisblack", "metadata": None}
    options |= {"planarconfig": "contig"} if bands > 1 else {}
    with tifffile.TiffWriter(tmp_path / "scan.tif", bigtiff=bigtiff) as file:
        for page in stack:
            file.write(page if bands > 1 else page[..., 0], **options)
    source = FolderSource(tmp_path)
    assert_is_stack(source, stack)
    assert titles(source)[3] == "scan.tif#3"


def test_previews_are_no_slices_and_pages_keep_their_numbers(tmp_path):
    stack = [pages(1)[0], pages(1, shape=(2, 2))[0], pages(1)[0]]
    save_pages(tmp_path / "scan.tif", stack)
    source = FolderSource(tmp_path)
    assert titles(source) == ["scan.tif#0", "scan.tif#2"]
    assert_is_stack(source, [stack[0], stack[2]])


def test_a_damaged_stack_is_one_unreadable_image(tmp_path):
    save_pages(tmp_path / "a.tif", pages(3))
    content = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "a.tif").write_bytes(content[:20])
    source = FolderSource(tmp_path)
    assert titles(source) == ["a.tif"]
    with pytest.raises(UnreadableSample):
        source.read(0)


def test_the_number_of_slices_is_told(tmp_path):
    save_pages(tmp_path / "a.tif", pages(3))
    save_pages(tmp_path / "b.tif", pages(4))
    Image.fromarray(pages(1)[0]).save(tmp_path / "c.png")
    with pytest.warns(UserWarning, match="2 files are stacks of 7 images"):
        assert len(FolderSource(tmp_path)) == 8


@pytest.fixture
def scans(tmp_path):
    """Ten stacks of four slices in two classes."""
    for index in range(10):
        save_pages(tmp_path / "scans" / "ab"[index % 2] / f"{index}.tif", pages(4))
    return tmp_path / "scans"


def whole_of(source):
    return {title.partition("#")[0] for title in titles(source)}


def test_slices_of_a_stack_are_on_one_side_of_a_split(scans):
    train, validation = train_and_validation(str(scans), 0.2, seed=0)
    assert train.classes == ["a", "b"] and len(validation) == 8
    assert not whole_of(train) & whole_of(validation)
    assert len(whole_of(train) | whole_of(validation)) == 10


def test_stacks_can_be_divided_if_asked(scans):
    splits = open_source(str(scans), group="none")
    assert splits["train"].groups is None


@pytest.mark.filterwarnings("error:.*more than one of")
def test_files_of_one_name_in_two_splits_are_two_stacks(tmp_path):
    for split in ("train", "test"):
        save_pages(tmp_path / split / "0.tif", pages(2))
    splits = open_source(str(tmp_path))
    assert set(splits["train"].groups.tolist()) != set(splits["test"].groups.tolist())


def test_labels_and_groups_name_the_file(scans):
    files = [f"{'ab'[i % 2]}/{i}.tif" for i in range(10)]
    rows = [f"{file},{'odd' if i % 3 else 'even'}" for i, file in enumerate(files)]
    (scans / "labels.csv").write_text("\n".join(["file,label", *rows, "a/0.tif#1,odd"]))
    pairs = [f"{file},{i // 2}" for i, file in enumerate(files)]
    (scans / "groups.csv").write_text("\n".join(["file,group", *pairs]))
    source = open_source(str(scans))["train"]
    assert source.classes == ["even", "odd"]
    assert source.labels[:4].tolist() == [0, 1, 0, 0]  # the second slice has a label of its own
    assert source.labels[4:8].tolist() == [1] * 4
    assert len(source.groups.unique()) == 5


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["int16", "uint8", "uint16", "float32"])
def test_volumes_of_arrays_are_slices(tmp_path, dtype, order):
    stack = pages(5, dtype) - (np.array(100, dtype) if dtype == "int16" else np.array(0, dtype))
    np.save(tmp_path / "brain.npy", np.asarray(stack, order=order))
    source = FolderSource(tmp_path)
    assert source.kind == "image" and titles(source)[4] == "brain.npy#4"
    assert_is_stack(source, stack)
    assert source.wholes == ["brain.npy"] * 5


@pytest.mark.parametrize("shape", [(6, 7, 3), (6, 7, 1), (3, 6, 7)])
def test_a_short_axis_of_an_array_has_channels(tmp_path, shape):
    pixels = pages(1, shape=shape)[0]
    np.save(tmp_path / "a.npy", pixels)
    source = FolderSource(tmp_path)
    assert titles(source) == ["a.npy"]
    assert_is_stack(source, [pixels if shape[2] <= 3 else pixels.transpose(1, 2, 0)])


def test_other_arrays_among_volumes_are_named(tmp_path):
    np.save(tmp_path / "a.npy", pages(5))
    np.save(tmp_path / "b.npy", np.zeros((2, 5, 6, 7)))
    np.save(tmp_path / "c.npy", pages(1)[0])
    source = FolderSource(tmp_path)
    assert len(source) == 7 and source.read(6).shape == (1, 6, 7)
    with pytest.raises(UnreadableSample, match=r"need numbers, \(slices, height, width\)"):
        source.read(5)


def test_ct_keeps_its_numbers(tmp_path):
    source = FolderSource(copy_dicom(tmp_path, "CT_small.dcm"))
    dataset = pydicom.dcmread(DICOM / "CT_small.dcm")
    expected = dataset.pixel_array.astype("int32") * int(dataset.RescaleSlope)
    expected = expected + int(dataset.RescaleIntercept)
    found = source.read(0)
    assert found.dtype == torch.int32 and np.array_equal(found[0].numpy(), expected)
    assert found.min() < 0 and titles(source) == ["CT_small.dcm"]


def test_values_without_a_scale_stay_as_they_are(tmp_path):
    found = FolderSource(copy_dicom(tmp_path, "MR_small.dcm")).read(0)
    assert np.array_equal(found[0].numpy(), pydicom.dcmread(DICOM / "MR_small.dcm").pixel_array)


def test_frames_of_a_file_are_slices(tmp_path):
    source = FolderSource(copy_dicom(tmp_path, "rtdose.dcm"))
    dataset = pydicom.dcmread(DICOM / "rtdose.dcm")
    assert_is_stack(source, dataset.pixel_array)
    assert titles(source)[14] == "rtdose.dcm#14" and len(set(source.wholes)) == 1


@pytest.mark.parametrize("signed", [False, True])
def test_black_is_low_in_monochrome1(tmp_path, signed):
    dataset = pydicom.dcmread(DICOM / "MR_small.dcm")
    stored = RANDOM.integers(-100 if signed else 0, 100, (dataset.Rows, dataset.Columns))
    dataset.PhotometricInterpretation = "MONOCHROME1"
    dataset.PixelRepresentation = int(signed)
    dataset.BitsStored = 12
    dataset.PixelData = stored.astype("int16").tobytes()
    dataset.save_as(tmp_path / "a.dcm")
    found = read_image(tmp_path / "a.dcm")[0].numpy()
    # By the stored bits, not by the image: equal values mean the same in all images.
    assert np.array_equal(found, (-1 if signed else 4095) - stored)


def test_files_without_pixels_are_counted_and_left_out(tmp_path):
    copy_dicom(tmp_path, "CT_small.dcm", "rtplan.dcm")
    with pytest.warns(UserWarning, match=r"1 DICOM files have no pixels .*, the first is rtplan"):
        assert titles(FolderSource(tmp_path)) == ["CT_small.dcm"]


def test_a_truncated_file_is_named(tmp_path):
    source = FolderSource(copy_dicom(tmp_path, "MR_truncated.dcm"))
    with pytest.raises(UnreadableSample) as caught:
        source.read(0)
    assert caught.value.title.endswith("MR_truncated.dcm") and caught.value.reason


def test_images_of_a_patient_are_on_one_side_of_a_split(tmp_path):
    for index in range(12):
        dataset = pydicom.dcmread(DICOM / "MR_small.dcm")
        dataset.PatientID = f"patient{index // 3}"
        folder = tmp_path / "ab"[index // 3 % 2]
        folder.mkdir(exist_ok=True)
        dataset.save_as(folder / f"{index:02d}.dcm")
    train, validation = train_and_validation(str(tmp_path), 0.5, seed=0)
    patients = [{int(Path(t).stem) // 3 for t in titles(part)} for part in (train, validation)]
    assert not patients[0] & patients[1] and len(patients[1]) == 2


def test_dicom_without_pydicom_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    source = FolderSource(copy_dicom(tmp_path, "CT_small.dcm", "rtdose.dcm"))
    assert len(source) == 2
    with pytest.raises(UnreadableSample, match=r"pip install 'meanshift\[dicom\]'"):
        source.read(0)
