"""Labels from a CSV, cuts in the proportions of the classes, contents, and incomplete batches."""

import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from meanshift.config import Views
from meanshift.data import open_source, stratified, train_and_validation
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.data.labels import read_labels
from meanshift.data.loader import batches, steps_per_epoch
from meanshift.transforms.augment import TwoViews


@pytest.fixture
def table(tmp_path):
    """Writes a CSV from text or bytes."""

    def write(content, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def flat(tmp_path, make_images):
    return make_images(tmp_path / "photos", {"": 3}, size=(6, 6))


@pytest.fixture
def split(tmp_path, make_images):
    """Two splits without class folders; no two images have the same name."""
    root = make_images(tmp_path / "photos", {"train": 3, "val": 2}, size=(6, 6))
    for index in range(2):
        (root / f"val/{index:03d}.jpg").rename(root / f"val/1{index:02d}.jpg")
    return root


def labels_of(source):
    """The label of each image by its name, as words."""
    return {
        source.title(index): source.classes[label] if label >= 0 else None
        for index, label in enumerate(source.labels.tolist())
    }


# The file


@pytest.mark.parametrize(
    "header",
    ["file,label", "File,Label", "FILE,LABEL", " file , label ", '"file","label"', "file,label,"],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_the_header_may_be_written_in_many_ways(table, header, mark, end):
    text = end.join([header, "a.jpg,cat", "b/c.jpg,dog", ""])
    assert read_labels(table(mark + text.encode())) == {"a.jpg": "cat", "b/c.jpg": "dog"}


def test_spaces_empty_lines_quotes_and_dots_are_understood(table):
    path = table(
        'file,label\n\n  a b.jpg ,  a cat \n,\n"c,d.jpg","x, y"\n./e//f.jpg,été\ng.jpg,dog,'
    )
    expected = {"a b.jpg": "a cat", "c,d.jpg": "x, y", "e/f.jpg": "été", "g.jpg": "dog"}
    assert read_labels(path) == expected


def test_an_empty_label_is_kept_as_unknown(table):
    assert read_labels(table("file,label\na.jpg,\nb.jpg,cat")) == {"a.jpg": "", "b.jpg": "cat"}


@pytest.mark.parametrize(
    ("content", "begins"),
    [
        ("", "nothing"),
        ("a.jpg,cat\n", "a.jpg,cat"),
        ("label,file\ncat,a.jpg\n", "label,file"),
        ("file;label\na.jpg;cat\n", "file;label"),
        ("file\na.jpg\n", "file"),
        ("\nfile,label\n", ""),
    ],
)
def test_a_missing_header_is_named(table, content, begins):
    with pytest.raises(ValueError, match=r"need the line file,label first") as caught:
        read_labels(table(content))
    assert f"table.csv: begins with {begins!r};" in str(caught.value)


@pytest.mark.parametrize(
    "line", ["b.jpg,cat,dog", "b.jpg,cat;dog", "b.jpg,cat|dog", "b.jpg,cat,,dog", "b.jpg,,cat,dog"]
)
def test_several_labels_in_a_line_are_refused(table, line):
    with pytest.raises(ValueError, match=r"line 3: b\.jpg has several labels .*one label a file"):
        read_labels(table(f"file,label\na.jpg,cat\n{line}\n"))


def test_the_same_file_with_two_labels_is_refused(table):
    path = table("file,label\na.jpg,cat\nb.jpg,cat\n./a.jpg,dog\n")
    with pytest.raises(ValueError, match=r"line 4: a\.jpg is 'dog' here and 'cat' before"):
        read_labels(path)


def test_the_same_file_twice_with_one_label_is_harmless(table):
    assert read_labels(table("file,label\na.jpg,cat\na.jpg,cat\n")) == {"a.jpg": "cat"}


def test_a_line_without_a_label_column_is_refused(table):
    with pytest.raises(ValueError, match=r"table\.csv, line 2: got 'a\.jpg'; need file,label"):
        read_labels(table("file,label\na.jpg\n"))


@pytest.mark.parametrize("kind", ["missing", "folder", "UTF-16", "Latin-1", "a huge field"])
def test_what_is_no_csv_is_named(table, tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / "none.csv"
    if kind in ("UTF-16", "Latin-1"):
        path = table("file,label\ncafé.jpg,été\n".encode(kind))
    elif kind == "a huge field":
        path = table("file,label\na.jpg," + 200_000 * "x")
    with pytest.raises(ValueError, match=r"not a readable CSV \(") as caught:
        read_labels(path)
    assert str(caught.value).startswith(f"{path}: ")


# With a folder


def test_a_csv_labels_a_flat_folder(flat, table):
    path = table("file,label\n002.jpg,ant\n000.jpg,bee\n001.jpg,ant\n")
    splits = open_source(str(flat), labels=path)
    assert list(splits) == ["train"]
    source = splits["train"]
    assert source.classes == ["ant", "bee"]
    assert source.labels.tolist() == [1, 0, 0]
    assert source.labels.dtype == torch.int64
    assert labels_of(source) == {"000.jpg": "bee", "001.jpg": "ant", "002.jpg": "ant"}


def test_labels_csv_at_the_top_is_taken_by_itself(flat, table):
    shutil.move(table("file,label\n000.jpg,a\n001.jpg,b\n002.jpg,a\n"), flat / "labels.csv")
    source = open_source(str(flat))["train"]
    assert source.labels.tolist() == [0, 1, 0]
    assert len(source) == 3  # the CSV is no image


def test_a_csv_that_is_given_goes_before_labels_csv(flat, table):
    (flat / "labels.csv").write_text("file,label\n000.jpg,a\n001.jpg,b\n002.jpg,a\n")
    path = table("file,label\n000.jpg,x\n001.jpg,x\n002.jpg,y\n")
    assert open_source(str(flat), labels=path)["train"].classes == ["x", "y"]


def test_a_csv_goes_before_the_class_folders(tmp_path, make_images, table):
    root = make_images(tmp_path / "photos", {"monday": 2, "tuesday": 1}, size=(6, 6))
    assert open_source(str(root))["train"].classes == ["monday", "tuesday"]
    path = table("file,label\nmonday/000.jpg,cat\nmonday/001.jpg,dog\ntuesday/000.jpg,cat\n")
    source = open_source(str(root), labels=path)["train"]
    assert source.classes == ["cat", "dog"]
    assert source.labels.tolist() == [0, 1, 0]
    shutil.copy(path, root / "labels.csv")
    assert open_source(str(root))["train"].labels.tolist() == [0, 1, 0]


def test_images_without_a_label_are_unknown_and_counted(flat, table):
    path = table("file,label\n000.jpg,\n002.jpg,cat\n")
    with pytest.warns(UserWarning, match=r"labels 1 files, 1 of them among the 3 images") as told:
        source = open_source(str(flat), labels=path)["train"]
    assert source.labels.tolist() == [-1, -1, 0]
    assert source.classes == ["cat"]
    assert len(told) == 1
    assert str(path) in str(told[0].message) and str(flat) in str(told[0].message)


def test_files_that_are_not_there_are_counted(flat, table):
    lines = "".join(f"{index:03d}.jpg,{'ab'[index % 2]}\n" for index in range(5))
    with pytest.warns(UserWarning, match=r"labels 5 files, 3 of them among the 3 images"):
        source = open_source(str(flat), labels=table(f"file,label\n{lines}"))["train"]
    assert source.labels.tolist() == [0, 1, 0]


def test_a_csv_that_knows_none_of_the_images_is_refused(flat, table):
    path = table("file,label\nx/000.jpg,a\nx/001.jpg,b\n")
    with pytest.raises(
        ValueError, match=r"none of the 2 files .* the first is x/000\.jpg; need paths inside"
    ) as caught:
        open_source(str(flat), labels=path)
    assert str(path) in str(caught.value) and str(flat) in str(caught.value)
    with pytest.raises(ValueError, match=r"none of the 0 files that it labels .*missing"):
        open_source(str(flat), labels=table("file,label\n"))


def test_a_csv_of_nothing_but_unknown_labels_is_not_said_to_lack_the_files(flat, table):
    with pytest.raises(ValueError, match="none of the 0 files that it labels"):
        open_source(str(flat), labels=table("file,label\n000.jpg,\n001.jpg,\n002.jpg,\n"))


# With splits


@pytest.mark.parametrize("front", [True, False], ids=["split in front", "bare"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "labels.csv"])
def test_one_csv_labels_all_splits(split, table, front, given):
    train, val = ("train/", "val/") if front else ("", "")
    path = table(
        f"file,label\n{train}000.jpg,b\n{train}001.jpg,c\n{train}002.jpg,b\n"
        f"{val}100.jpg,c\n{val}101.jpg,a\n"
    )
    if not given:
        shutil.move(path, split / "labels.csv")
    splits = open_source(str(split), labels=path if given else None)
    assert list(splits) == ["train", "val"]
    assert labels_of(splits["train"]) == {"000.jpg": "b", "001.jpg": "c", "002.jpg": "b"}
    assert labels_of(splits["val"]) == {"100.jpg": "c", "101.jpg": "a"}
    for part in splits.values():
        assert part.classes == ["a", "b", "c"]
    assert splits["val"].labels.tolist() == [2, 0]


@pytest.mark.parametrize("front", [True, False], ids=["split in front", "bare"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "labels.csv"])
def test_train_alone_may_have_a_csv_beside_it(tmp_path, make_images, table, front, given):
    root = make_images(tmp_path / "photos", {"train": 2}, size=(6, 6))
    inside = "train/" if front else ""
    path = table(f"file,label\n{inside}000.jpg,b\n{inside}001.jpg,a\n")
    if not given:
        shutil.move(path, root / "labels.csv")
    source = open_source(str(root), labels=path if given else None)["train"]
    assert labels_of(source) == {"000.jpg": "b", "001.jpg": "a"}


def test_the_split_in_front_tells_images_of_one_name_apart(tmp_path, make_images, table):
    root = make_images(tmp_path / "photos", {"train": 1, "val": 1}, size=(6, 6))
    path = table("file,label\ntrain/000.jpg,cat\nval/000.jpg,dog\n")
    splits = open_source(str(root), labels=path)
    assert labels_of(splits["train"]) == {"000.jpg": "cat"}
    assert labels_of(splits["val"]) == {"000.jpg": "dog"}


def test_a_bare_name_that_two_splits_have_is_refused(tmp_path, make_images, table):
    root = make_images(tmp_path / "photos", {"train": 2, "val": 1}, size=(6, 6))
    path = table("file,label\n000.jpg,cat\n001.jpg,dog\n")
    with pytest.raises(ValueError, match=r"000\.jpg is in more than one of train, val; .*in front"):
        open_source(str(root), labels=path)
    path = table("file,label\nval/000.jpg,cat\n000.jpg,dog\n001.jpg,dog\n")
    assert labels_of(open_source(str(root), labels=path)["val"]) == {"000.jpg": "cat"}


def test_classes_have_one_number_in_all_splits_whatever_they_hold(split, table):
    path = table(
        "file,label\ntrain/000.jpg,z\ntrain/001.jpg,m\ntrain/002.jpg,m\nval/100.jpg,z\nval/101.jpg,"
    )
    with pytest.warns(UserWarning, match="labels 4 files, 4 of them among the 5 images"):
        splits = open_source(str(split), labels=path)
    assert splits["train"].labels.tolist() == [1, 0, 0]
    assert splits["val"].labels.tolist() == [1, -1]


def test_training_takes_the_labels_of_the_csv_too(split, table):
    shutil.move(
        table("file,label\n000.jpg,b\n001.jpg,a\n002.jpg,b\n100.jpg,b\n101.jpg,a\n"),
        split / "labels.csv",
    )
    train, held = train_and_validation(str(split), "auto", seed=0)
    assert train.labels.tolist() == [1, 0, 1]
    assert held.labels.tolist() == [1, 0]


@pytest.mark.parametrize("spec", ["a.npy", "a.npz", "sample", "cifar10"])
def test_a_csv_is_refused_where_there_is_no_folder(tmp_path, table, spec):
    path, pixels = table("file,label\n#0,cat\n"), np.zeros((3, 4, 4), np.uint8)
    np.save(tmp_path / "a.npy", pixels)
    np.savez(tmp_path / "a.npz", x=pixels)
    spec = str(tmp_path / spec) if spec.startswith("a.") else spec
    with pytest.raises(ValueError, match=r"table\.csv: .*for folders of images, not for ") as told:
        open_source(spec, labels=path)
    assert spec in str(told.value)


# Cuts in the proportions of the classes

COUNTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@st.composite
def cuts(draw):
    """Labels in any order, and a size that a cut of them can have."""
    counts = draw(COUNTS)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(
        len(labels), generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))
    )
    return labels[order], draw(st.integers(len(counts), len(labels)))


@settings(max_examples=100, deadline=None)
@given(cuts(), st.integers(0, 2**31))
def test_a_cut_has_its_size_its_proportions_and_all_classes(cut, seed):
    labels, count = cut
    chosen = stratified(labels, count, seed=seed)
    assert len(chosen) == count
    assert (chosen[1:] > chosen[:-1]).all()  # rising, so none twice
    assert chosen[0] >= 0 and chosen[-1] < len(labels)
    got, members = labels[chosen].bincount(), labels.bincount()
    assert (got >= 1).all() and (got <= members).all()
    share = members * count / len(labels)
    if (share >= 1).all():  # nobody needs more than a share, so nobody is a whole one off
        assert ((got - share).abs() < 1 + 1e-4).all()
    assert (got[share < 1] <= 1 + share[share < 1].ceil()).all()
    larger = members[:, None] > members[None]
    assert (got[:, None] >= got[None] - 1)[larger].all()


@pytest.mark.parametrize(
    ("members", "count", "expected"),
    [
        ([50, 30, 20], 10, [5, 3, 2]),
        ([50, 30, 20], 100, [50, 30, 20]),
        ([50, 30, 20], 3, [1, 1, 1]),
        ([97, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([97, 1, 1, 1], 10, [7, 1, 1, 1]),
        ([100, 100, 100], 100, [34, 33, 33]),
        ([60, 26, 14], 10, [6, 3, 1]),  # shares 6, 2.6 and 1.4
        ([1300] * 10, 130, [13] * 10),
    ],
)
def test_cuts_that_can_be_checked_by_hand(members, count, expected):
    labels = torch.arange(len(members)).repeat_interleave(torch.tensor(members))
    chosen = stratified(labels, count, seed=0)
    assert labels[chosen].bincount().tolist() == expected


def test_a_cut_is_a_function_of_the_seed():
    labels = torch.arange(300) % 3
    before = torch.get_rng_state()
    cut = [stratified(labels, 60, seed=seed) for seed in (0, 0, 1, 2)]
    assert torch.equal(cut[0], cut[1])
    assert len({tuple(chosen.tolist()) for chosen in cut}) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_each_image_is_as_likely_as_another():
    labels = torch.tensor([0] * 60 + [1] * 20)
    drawn = torch.stack([stratified(labels, 20, seed=s).bincount(minlength=80) for s in range(200)])
    often = drawn.float().mean(0)  # a quarter; five deviations of 200 draws are 0.15
    assert (often - 0.25).abs().max() < 0.15


def test_a_smaller_cut_of_the_same_seed_lies_in_a_larger_one():
    labels = torch.arange(200) % 4
    small, large = (set(stratified(labels, count, seed=5).tolist()) for count in (20, 80))
    assert small < large


def test_classes_need_no_images_of_every_number():
    labels = torch.tensor([7, 2, 7, 2, 7, 7])
    assert labels[stratified(labels, 3, seed=0)].bincount().tolist() == [0, 0, 1, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 10])
def test_a_cut_that_cannot_be_is_refused(count):
    with pytest.raises(
        ValueError, match=rf"a cut of {count} images out of 9 of 3 classes; need at least one a"
    ):
        stratified(torch.arange(9) % 3, count, seed=0)


# Contents: what a cache of features depends on


def test_contents_see_a_pixel_where_a_fingerprint_looks_at_some_images():
    pixels = np.zeros((1500, 2, 2), np.uint8)
    source = ArraySource(pixels, None, name="toy")
    before = source.contents(), source.fingerprint()
    pixels[1, 0, 0] = 1
    assert source.fingerprint() == before[1]
    assert source.contents() != before[0]
    pixels[1, 0, 0] = 0
    assert source.contents() == before[0]


def test_contents_of_an_array_see_shape_and_labels_and_not_the_layout():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    whole = ArraySource(pixels, None, name="toy").contents()
    turned = np.ascontiguousarray(pixels.transpose(0, 2, 1, 3))
    assert ArraySource(pixels.reshape(6, 5, 4, 3), None, name="toy").contents() != whole
    assert ArraySource(turned, None, name="toy").contents() != whole
    assert ArraySource(pixels, np.arange(6), name="toy").contents() != whole
    assert ArraySource(pixels.astype(np.uint16), None, name="toy").contents() != whole
    assert ArraySource(turned.transpose(0, 2, 1, 3), None, name="elsewhere").contents() == whole


def test_contents_of_a_mapped_file_see_what_was_written_anew_without_reading_it_all(tmp_path):
    path = tmp_path / "a.npy"
    pixels = np.random.default_rng(0).integers(0, 256, (2500, 4, 5, 3), dtype=np.uint8)
    np.save(path, pixels)
    prints = [open_source(str(path))["train"].contents() for _ in range(2)]
    assert prints[0] == prints[1]
    told = path.stat()
    pixels[1, 0, 0, 0] ^= 1  # an image that the fingerprint does not look at
    np.save(path, pixels)
    os.utime(path, ns=(told.st_atime_ns, told.st_mtime_ns + 1))
    assert open_source(str(path))["train"].contents() != prints[0]


def test_contents_of_a_folder_see_what_was_written_anew(flat):
    prints = [FolderSource(flat).contents(), FolderSource(flat).contents()]
    told = (flat / "001.jpg").stat()
    Image.new("RGB", (6, 6), "red").save(flat / "001.jpg")
    prints.append(FolderSource(flat).contents())
    os.utime(flat / "001.jpg", ns=(told.st_atime_ns, told.st_mtime_ns + 1))
    prints.append(FolderSource(flat).contents())
    content = bytearray((flat / "001.jpg").read_bytes())
    content[-10] ^= 1
    (flat / "001.jpg").write_bytes(content)  # of the same size, and now of the same date
    os.utime(flat / "001.jpg", ns=(told.st_atime_ns, told.st_mtime_ns + 1))
    prints.append(FolderSource(flat).contents())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
    assert len({FolderSource(flat).fingerprint() for _ in range(2)}) == 1


def test_contents_of_a_folder_do_not_depend_on_its_place(flat, tmp_path):
    shutil.copytree(flat, tmp_path / "copy")
    assert FolderSource(tmp_path / "copy").contents() == FolderSource(flat).contents()


def test_contents_of_a_folder_can_be_told_when_a_file_has_gone(flat):
    source = FolderSource(flat)
    before = source.contents()
    (flat / "001.jpg").unlink()
    assert source.contents() == source.contents() != before


def test_contents_of_a_cut_see_the_whole_and_the_choice(flat):
    source = FolderSource(flat)
    cut = [source.take(torch.tensor(chosen)) for chosen in ([0, 1], [1, 0], [0, 2])]
    prints = {part.contents() for part in (source, *cut)}
    assert len(prints) == 4
    Image.new("RGB", (6, 6), "red").save(flat / "000.jpg")
    assert cut[0].contents() not in prints
    assert cut[0].contents() == FolderSource(flat).take(torch.tensor([0, 1])).contents()


# Incomplete batches


def load(source, start, stop, *, batch_size=4, partial=True, workers=0):
    two = TwoViews(Views(), 3, 16)
    options = {"batch_size": batch_size, "partial": partial, "workers": workers}
    return list(batches(source, two.crop, seed=3, start=start, stop=stop, **options))


def numbered(kind, root, make_images):
    if kind == "folder":
        return FolderSource(make_images(root, {"a": 5, "b": 6}, size=(6, 6)))
    pixels = np.random.default_rng(0).integers(0, 256, (11, 6, 6, 3), dtype=np.uint8)
    return ArraySource(pixels, np.arange(11) % 2, name="toy")


@pytest.fixture(params=["folder", "arrays"])
def eleven(request, tmp_path, make_images):
    return numbered(request.param, tmp_path / "eleven", make_images)


def tensors(batch):
    images = batch.images if isinstance(batch.images, list) else [batch.images]
    return [batch.ids, batch.labels, *images]


def assert_same(some, others):
    assert len(some) == len(others) > 0
    for a, b in zip(some, others, strict=True):
        assert (a.step, a.epoch, a.bad) == (b.step, b.epoch, b.bad)
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@pytest.mark.parametrize("batch_size", [1, 4, 5, 10, 11, 20])
def test_an_epoch_has_each_image_exactly_once(eleven, batch_size):
    steps = steps_per_epoch(eleven, batch_size, partial=True)
    assert steps == -(-11 // batch_size)
    loaded = load(eleven, 0, 3 * steps, batch_size=batch_size)
    assert [batch.epoch for batch in loaded] == [step // steps for step in range(3 * steps)]
    orders = []
    for epoch in range(3):
        part = loaded[epoch * steps : (epoch + 1) * steps]
        orders.append(torch.cat([batch.ids for batch in part]).tolist())
        assert sorted(orders[-1]) == list(range(11))
        sizes = [len(batch.ids) for batch in part]
        assert sizes == [batch_size] * (steps - 1) + [11 - batch_size * (steps - 1)]
        assert all(len(held) == len(batch.ids) for batch in part for held in tensors(batch))
    assert len(set(map(tuple, orders))) == 3


def test_incomplete_batches_hold_the_images_of_their_ids(eleven):
    two = TwoViews(Views(), 3, 16)
    for batch in load(eleven, 0, 6):
        assert torch.equal(batch.labels, eleven.labels[batch.ids])
        expected = (
            [eleven.gather(batch.ids)]
            if eleven.uniform
            else two.crop([eleven.read(int(index)) for index in batch.ids], batch.epoch, batch.ids)
        )
        assert all(torch.equal(a, b) for a, b in zip(tensors(batch)[2:], expected, strict=True))


def test_a_start_in_the_middle_gives_the_same_incomplete_batches(eleven):
    whole = load(eleven, 0, 8)
    assert [len(batch.ids) for batch in whole] == [4, 4, 3, 4, 4, 3, 4, 4]
    for start in (1, 2, 3, 5, 7):
        assert_same(load(eleven, start, 8), whole[start:])


def test_workers_change_nothing_of_incomplete_batches(tmp_path, make_images):
    source = numbered("folder", tmp_path, make_images)
    assert_same(load(source, 1, 6, workers=2), load(source, 1, 6))


def test_whole_batches_are_the_same_with_and_without_the_incomplete_one(eleven):
    with_it, without = load(eleven, 0, 3), load(eleven, 0, 2, partial=False)
    assert_same(with_it[:2], without)
    assert steps_per_epoch(eleven, 4) == 2


def test_a_batch_larger_than_the_source_is_the_whole_source(eleven):
    with pytest.raises(ValueError, match="11 images do not fill one batch of 12"):
        load(eleven, 0, 1, batch_size=12, partial=False)
    (batch,) = load(eleven, 0, 1, batch_size=12)
    assert sorted(batch.ids.tolist()) == list(range(11))


def test_a_csv_of_another_kind_that_lies_in_the_folder_is_not_used(tmp_path, make_images):
    make_images(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "labels.csv").write_text("id,breed\n000,pug\n")
    with pytest.warns(UserWarning, match=r"begins with 'id,breed', not file,label: not used"):
        source = open_source(str(tmp_path))["train"]
    assert source.classes == ["a", "b"]
