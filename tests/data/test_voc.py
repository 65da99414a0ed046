"""Pascal VOC: the layout, what a box means, and everything that can be wrong with the files."""

import os
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.data.source import UnreadableSample
from meanshift.data.voc import read_voc

SIZE = (30, 40)  # height, width


def thing(name="cat", box=(1, 1, 40, 30), difficult="0"):
    corners = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    inside = "".join(f"<{side}>{x}</{side}>" for side, x in corners)
    mark = "" if difficult is None else f"<difficult>{difficult}</difficult>"
    # a part has a box of its own, as in 2012's annotations
    part = "<part><name>head</name><bndbox><xmin>2</xmin></bndbox></part>"
    return f"<object><name>{name}</name>{mark}{part}<bndbox>{inside}</bndbox></object>"


def annotation(*things, size=SIZE):
    sides = f"<size><width>{size[1]}</width><height>{size[0]}</height></size>" if size else ""
    return f"<annotation>{sides}{''.join(things)}</annotation>"


@pytest.fixture
def devkit(tmp_path):
    """Writes one year: the images of each list as `{name: XML}`, all with the same pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.jpg")
    jpeg = (tmp_path / "one.jpg").read_bytes()

    def write(year="VOC2007", *, root=tmp_path / "VOCdevkit", **lists):
        folder = root / year
        for part in ("ImageSets/Main", "JPEGImages", "Annotations"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for split, images in lists.items():
            (folder / f"ImageSets/Main/{split}.txt").write_text("\n".join(images) + "\n")
            for name, text in images.items():
                (folder / f"JPEGImages/{name}.jpg").write_bytes(jpeg)
                (folder / f"Annotations/{name}.xml").write_text(text)
        return folder

    return write


def many(count=20, start=0, text=None):
    """So many plain images that one bad one among them is a small fraction."""
    text = annotation(thing(), thing("dog")) if text is None else text
    return {f"{number:06d}": text for number in range(start, start + count)}


@pytest.fixture
def voc(devkit):
    """20 good training and 20 good test images, and those that are given."""

    def write(train=None, test=None):
        return devkit(
            trainval={**many(), **(train or {})}, test={**many(start=100), **(test or {})}
        )

    return write


def read_with_warnings(folder, **options):
    """What is read, and the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train, test = read_voc(folder, **options)
    return train, test, [str(warning.message) for warning in caught]


def image(dataset, name):
    return next(image for image in dataset.images if image.title.endswith(f"/{name}"))


# Images and boxes


def test_a_box_is_half_open_from_zero_and_labels_are_indices_of_the_sorted_classes(devkit):
    text = annotation(
        thing("dog", (1, 2, 40, 30)),
        thing("cat", (5.5, 6, 7, 8.25), "1"),
        thing("dog", difficult=None),
    )
    devkit(trainval={"000012": text}, test={"000013": annotation(thing("cat"))})
    folder = devkit(test={"000013": annotation(thing("cat"))})
    train, test = read_voc(folder)
    assert (train.name, test.name) == ("VOC 07 trainval", "VOC 07 test")
    assert train.classes == test.classes == ["cat", "dog"] and len(train) == len(test) == 1
    one = train.images[0]
    assert one.title == "VOC2007/000012" and one.size == SIZE
    assert one.file == folder / "JPEGImages/000012.jpg"
    assert one.boxes.tolist() == [[0, 1, 40, 30], [4.5, 5, 7, 8.25], [0, 0, 40, 30]]
    assert one.boxes.dtype == torch.float32 and one.labels.dtype == torch.int64
    assert one.labels.tolist() == [1, 0, 1] and one.difficult.tolist() == [False, True, False]
    assert test.images[0].labels.tolist() == [0]


def test_the_overlap_of_two_boxes_is_the_devkits(devkit):
    from torchvision.ops import box_iou

    a, b = (3, 4, 12, 20), (5, 1, 30, 15)
    folder = devkit(
        trainval={"a": annotation(thing(box=a), thing(box=b))}, test={"b": annotation(thing())}
    )
    wide, high = min(a[2], b[2]) - max(a[0], b[0]) + 1, min(a[3], b[3]) - max(a[1], b[1]) + 1
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
    boxes = read_voc(folder)[0].images[0].boxes.double()
    assert float(box_iou(boxes, boxes)[0, 1]) == wide * high / (sum(areas) - wide * high)


def test_2012_is_trained_on_if_it_is_there(devkit, tmp_path):
    devkit("VOC2012", trainval=many(3), test=many(2, 50))
    folder = devkit(trainval=many(2), test=many(2, 50))  # the same names as in 2012
    for root in (tmp_path, tmp_path / "VOCdevkit"):
        train, test = read_voc(root)
        assert [image.title for image in train.images] == [
            "VOC2007/000000",
            "VOC2007/000001",
            "VOC2012/000000",
            "VOC2012/000001",
            "VOC2012/000002",
        ]
        assert (train.name, test.name, len(test)) == ("VOC 07+12 trainval", "VOC 07 test", 2)
        assert train.images[4].file.parts[-3] == "VOC2012"
    alone, _ = read_voc(folder)
    assert (alone.name, len(alone)) == ("VOC 07 trainval", 2)


def test_images_are_read_as_they_are_and_bad_ones_are_named(devkit):
    folder = devkit(trainval=many(2), test=many(1, 50))
    train, _ = read_voc(folder)
    expected = torch.from_numpy(np.array(Image.open(folder / "JPEGImages/000001.jpg")))
    assert torch.equal(train.read(1), expected.permute(2, 0, 1))
    Image.fromarray(np.full((9, 9), 77, np.uint8)).save(folder / "JPEGImages/000001.jpg")
    assert train.read(1).shape == (3, 9, 9)
    (folder / "JPEGImages/000001.jpg").write_bytes(b"nothing")
    with pytest.raises(UnreadableSample) as caught:
        train.read(1)
    assert caught.value.title == "VOC2007/000001"


@pytest.mark.parametrize("suffix", [".jpeg", ".png", ".JPG"])
def test_other_suffixes_are_found(devkit, suffix):
    folder = devkit(trainval=many(1), test=many(1, 50))
    Image.new("RGB", SIZE[::-1]).save(folder / f"JPEGImages/000000{suffix}")
    (folder / "JPEGImages/000000.jpg").unlink()
    assert read_voc(folder)[0].images[0].file.suffix == suffix


def test_the_fingerprint_changes_with_all_that_matters(devkit):
    folder = devkit(trainval=many(2), test=many(2, 50))
    first = read_voc(folder)[0].fingerprint()
    assert first == read_voc(folder)[0].fingerprint() != read_voc(folder)[1].fingerprint()
    prints = [first]
    file = folder / "Annotations/000001.xml"
    for text in (
        annotation(thing(box=(2, 1, 40, 30)), thing("dog")),
        annotation(thing(), thing("cat")),
        annotation(thing(), thing("dog", difficult="1")),
        annotation(thing(), thing("cow")),
    ):
        file.write_text(text)
        prints.append(read_voc(folder)[0].fingerprint())
    for name in ("000000", "000001"):  # the same indices in the list of classes
        (folder / f"Annotations/{name}.xml").write_text(annotation(thing(), thing("duck")))
    for name in ("000050", "000051"):
        (folder / f"Annotations/{name}.xml").write_text(annotation(thing()))
    prints.append(read_voc(folder)[0].fingerprint())
    os.utime(folder / "JPEGImages/000000.jpg", ns=(0, 0))
    prints.append(read_voc(folder)[0].fingerprint())
    (folder / "ImageSets/Main/trainval.txt").write_text("000001\n000000\n")
    prints.append(read_voc(folder)[0].fingerprint())
    assert len(set(prints)) == 8


# Classes


def test_other_classes_are_left_out_and_reported_with_their_counts(voc):
    folder = voc(
        {"a": annotation(thing("cow"), thing("cow"), thing("bird"))},
        {"b": annotation(thing("cow"))},
    )
    train, test, messages = read_with_warnings(folder, classes=["dog", "cat"])
    assert train.classes == test.classes == ["dog", "cat"]
    assert image(train, "000000").labels.tolist() == [1, 0]
    assert len(train) == 20 and len(test) == 21 and len(image(test, "b").labels) == 0
    assert "VOC 07 trainval: 3 boxes of classes that were not chosen" in messages[0]
    assert "cow (2), bird (1)" in messages[0]
    assert messages[1].startswith("VOC 07 trainval: 1 images without an object are left out")
    assert "VOC 07 test: 1 boxes" in messages[2] and "cow (1)" in messages[2] and len(messages) == 3


def test_a_class_that_only_the_test_set_has_is_left_out(voc):
    train, test, messages = read_with_warnings(voc(None, {"b": annotation(thing("cow"), thing())}))
    assert train.classes == ["cat", "dog"] and image(test, "b").labels.tolist() == [0]
    assert len(messages) == 1 and "VOC 07 test: 1 boxes" in messages[0] and "cow (1)" in messages[0]


@pytest.mark.parametrize(
    ("classes", "reason"), [(["cat", "cow"], "lack cow"), (["cat"] * 2, "once")]
)
def test_classes_must_be_there_and_be_named_once(voc, classes, reason):
    with pytest.raises(ValueError, match=reason):
        read_voc(voc(), classes=classes)


# Lists and folders


def test_what_is_missing_is_reported_with_the_layout(devkit, tmp_path):
    for root, reason in ((tmp_path / "none", "no folder"), (tmp_path, "no VOC2007 in it")):
        with pytest.raises(
            ValueError, match=rf"{reason}.*VOCdevkit/VOC2007.*host\.robots\.ox\.ac\.uk"
        ):
            read_voc(root)
    devkit(trainval=many(1))
    with pytest.raises(ValueError, match=r"test\.txt: cannot be read.*VOCtest_06-Nov-2007\.tar"):
        read_voc(tmp_path)
    devkit(trainval=many(1), test=many(1, 50))
    (tmp_path / "VOCdevkit/VOC2012").mkdir()
    with pytest.raises(ValueError, match=r"VOC2012.*trainval\.txt: cannot be read.*11-May-2012"):
        read_voc(tmp_path)


@pytest.mark.parametrize("text", ["", "\n  \n", "000000 -1\n000001  -1\n"])
def test_an_empty_list_is_refused(voc, text):
    folder = voc()
    (folder / "ImageSets/Main/test.txt").write_text(text)
    with pytest.raises(ValueError, match=r"test\.txt: lists no image; need one name per line"):
        read_voc(folder)


def test_a_list_that_is_no_text_is_refused(voc):
    folder = voc()
    (folder / "ImageSets/Main/trainval.txt").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ValueError, match=r"trainval\.txt: cannot be read"):
        read_voc(folder)


def test_lists_of_one_class_leave_out_what_they_mark(voc):
    folder = voc()
    (folder / "ImageSets/Main/trainval.txt").write_text(
        "000000  1\r\n000001 -1\r\n000002  0\r\n\r\n"
    )
    train, _ = read_voc(folder)
    assert [image.title[-1] for image in train.images] == ["0", "2"]


def test_names_may_have_spaces_and_numbers(devkit):
    names = {
        "my cat 1": annotation(thing()),
        "my cat 2": annotation(thing()),
        "ß.x": annotation(thing()),
    }
    train, _ = read_voc(devkit(trainval=names, test=many(1, 0, annotation(thing()))))
    assert [image.title for image in train.images] == [f"VOC2007/{name}" for name in names]


def test_an_image_listed_twice_is_used_once(voc):
    folder = voc()
    (folder / "ImageSets/Main/trainval.txt").write_text("000000\n000001\n000000\n000000\n000001")
    train, _, messages = read_with_warnings(folder)
    assert [image.title[-1] for image in train.images] == ["0", "1"]
    assert (
        len(messages) == 1
        and "2 images listed more than once" in messages[0]
        and "000000" in messages[0]
    )


def test_an_image_in_both_lists_is_refused(voc):
    with pytest.raises(ValueError, match=r"2 images are in both.*the first is 000003"):
        read_voc(voc(test={"000007": annotation(), "000003": annotation()}))


# Files


def spoil_nothing_there(folder):
    (folder / "JPEGImages/bad.jpg").unlink()


def spoil_no_image(folder):
    (folder / "JPEGImages/bad.jpg").write_bytes(b"nothing")


def spoil_huge(folder):
    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    (folder / "JPEGImages/bad.jpg").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 10000, 10000, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )  # fmt: skip


def spoil_no_xml(folder):
    (folder / "Annotations/bad.xml").unlink()


def spoil_broken_xml(folder):
    (folder / "Annotations/bad.xml").write_text("<annotation><object>")


def spoil_other_xml(folder):
    (folder / "Annotations/bad.xml").write_text("<html/>")


BOMB = '<!DOCTYPE a [<!ENTITY b "cat">]><annotation><object><name>&b;</name></object></annotation>'


def spoil_bomb(folder):
    (folder / "Annotations/bad.xml").write_text(BOMB)


def spoil_hidden_bomb(folder):
    head = '<?xml version="1.0" encoding="UTF-16"?>'
    (folder / "Annotations/bad.xml").write_bytes((head + BOMB).encode("utf-16"))


SPOILS = {
    spoil_nothing_there: "no .jpg, .jpeg or .png in JPEGImages",
    spoil_no_image: "cannot identify image file",
    spoil_huge: "decompression bomb",
    spoil_no_xml: "FileNotFoundError",
    spoil_broken_xml: "ParseError",
    spoil_other_xml: "begins with <html>",
    spoil_bomb: "has a DTD",
    spoil_hidden_bomb: "has a DTD",
}


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("split", ["train", "test"])
def test_unreadable_files_are_left_out_counted_and_named(voc, spoil, split):
    folder = voc(**{split: {"bad": annotation(thing())}})
    spoil(folder)
    train, test, messages = read_with_warnings(folder)
    assert len(train) == len(test) == 20 and len(messages) == 1
    name = "VOC 07 trainval" if split == "train" else "VOC 07 test"
    assert messages[0].startswith(f"{name}: 1 images without a readable image or annotation")
    assert "VOC2007/bad (" in messages[0] and SPOILS[spoil] in messages[0]


@pytest.mark.parametrize(("bad", "fatal"), [(2, False), (3, True)])
def test_more_than_a_twentieth_unreadable_is_an_error(devkit, bad, fatal):
    folder = devkit(trainval=many(40), test=many(1, 100))
    for number in range(bad):
        where = ("JPEGImages", "jpg") if number % 2 else ("Annotations", "xml")
        (folder / where[0] / f"{number:06d}.{where[1]}").unlink()
    if fatal:
        with pytest.raises(
            ValueError, match=r"3 of 40 images cannot be read, the first is VOC2007/000000 "
        ):
            read_voc(folder)
    else:
        train, _, messages = read_with_warnings(folder)
        assert len(train) == 38 and len(messages) == 1 and " 2 images " in messages[0]


def test_an_image_of_another_size_than_annotated_is_reported(voc):
    text = annotation(thing(box=(1, 1, 60, 30)), size=(30, 60))
    train, _, messages = read_with_warnings(voc({"odd": text}))
    assert image(train, "odd").size == SIZE
    assert image(train, "odd").boxes.tolist() == [[0, 0, 40, 30]]
    assert "1 images have another size than annotated" in messages[0]
    assert "VOC2007/odd, 60 x 30 in its XML and 40 x 30 when read" in messages[0]
    assert "1 boxes that extend beyond their image are clipped" in messages[1]


def test_an_image_turned_by_its_exif_has_the_size_that_it_is_read_with(voc):
    folder = voc(
        {
            "turned": annotation(thing(box=(1, 1, 30, 40)), size=(40, 30)),
            "no-size": annotation(thing(box=(1, 1, 30, 40)), size=None),
        }
    )
    for name in ("turned", "no-size"):
        file = folder / f"JPEGImages/{name}.jpg"
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.open(file).save(file, exif=exif)
    train, _ = read_voc(folder)  # no warning
    for index in (20, 21):
        assert train.images[index].size == tuple(train.read(index).shape[1:]) == (40, 30)
        assert train.images[index].boxes.tolist() == [[0, 0, 30, 40]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("sized", [True, False])
def test_boxes_are_turned_with_the_image(voc, orientation, sized):
    if not sized and orientation > 4:
        return  # boxes of the image as it is read
    size = (32, 48) if sized else None
    folder = voc({"odd": annotation(thing(box=(9, 17, 40, 24)), size=size)})
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[16:24, 8:40] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(folder / "JPEGImages/odd.jpg", quality=100, exif=exif)
    train, _, messages = read_with_warnings(folder)
    left, top, right, bottom = map(int, image(train, "odd").boxes[0].tolist())
    read = train.read(20).float().mean(0)
    assert image(train, "odd").size == tuple(read.shape)
    assert (right - left) * (bottom - top) == 8 * 32
    assert read[top:bottom, left:right].mean() > 250
    expected = ["VOC 07 trainval: 1 images are turned by their EXIF, and their boxes with them"]
    assert [message.partition(";")[0] for message in messages] == expected * (orientation > 1)


# Boxes


@pytest.mark.parametrize(
    ("box", "clipped"),
    [
        ((0, 1, 40, 30), [0, 0, 40, 30]),
        ((11, 11, 41, 99), [10, 10, 40, 30]),
        ((-5, -5, 10, 10), [0, 0, 10, 10]),
    ],
)
def test_boxes_that_extend_beyond_the_image_are_clipped_and_counted(voc, box, clipped):
    train, _, messages = read_with_warnings(voc({"out": annotation(thing(box=box))}))
    assert image(train, "out").boxes.tolist() == [clipped]
    assert len(messages) == 1 and "VOC 07 trainval: 1 boxes that extend" in messages[0]
    assert f"VOC2007/out, cat at {' '.join(map(str, box))}" in messages[0]


@pytest.mark.parametrize(
    "bad",
    [
        thing(box=(50, 1, 60, 30)),
        thing(box=(-9, 1, 0, 30)),
        thing(box=(10, 10, 9, 20)),
        thing(box=(20, 10, 5, 20)),
        thing(box=("nan", 1, 40, 30)),
        thing(box=(1, 1, "inf", 30)),
        thing(box=(1, "many", 40, 30)),
        thing(box=(1, "", 40, 30)),
        thing(name=" "),
        "<object><name>cat</name></object>",
        "<object/>",
    ],
)
def test_objects_without_a_box_are_left_out_and_counted(voc, bad):
    train, _, messages = read_with_warnings(voc({"odd": annotation(bad, thing("dog"), bad)}))
    assert image(train, "odd").labels.tolist() == [1]
    assert len(messages) == 1 and "2 objects without a name or a box inside" in messages[0]
    assert "VOC2007/odd" in messages[0]


def test_a_box_of_one_pixel_is_a_box(voc):
    train, _ = read_voc(voc({"dot": annotation(thing(box=(40, 30, 40, 30)))}))
    assert image(train, "dot").boxes.tolist() == [[39, 29, 40, 30]]


def test_images_without_objects_are_tested_on_and_not_trained_on(voc):
    train, test, messages = read_with_warnings(
        voc({"x": annotation(), "y": annotation()}, {"z": annotation()})
    )
    assert len(train) == 20 and len(test) == 21
    empty = image(test, "z")
    assert empty.boxes.shape == (0, 4) and empty.labels.shape == empty.difficult.shape == (0,)
    assert empty.labels.dtype == torch.int64 and empty.difficult.dtype == torch.bool
    assert (
        len(messages) == 1
        and "2 images without an object" in messages[0]
        and "VOC2007/x" in messages[0]
    )


@pytest.mark.parametrize("split", ["trainval", "test"])
def test_nothing_to_find_is_an_error(devkit, split):
    lists = {"trainval": many(2), "test": many(2, 50)}
    start = 0 if split == "trainval" else 50
    folder = devkit(**{**lists, split: many(2, start, annotation())})
    with pytest.raises(ValueError, match=f"VOC 07 {split}: 2 images without any object"):
        read_voc(folder)


def test_good_data_gives_no_warning(voc):
    assert read_with_warnings(voc())[2] == []
