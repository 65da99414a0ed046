"""Labels from a CSV, for a folder and for its splits."""

import shutil

import numpy as np
import pytest
import torch

from meanshift.data import open_source, train_and_validation
from meanshift.data.labels import is_table, read_table


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
    path = table(mark + text.encode())
    assert is_table(path)
    assert read_table(path) == {"a.jpg": "cat", "b/c.jpg": "dog"}


def test_spaces_empty_lines_quotes_and_dots_are_understood(table):
    path = table(
        'file,label\n\n  a b.jpg ,  a cat \n,\n"c,d.jpg","x, y"\n./e//f.jpg,été\ng.jpg,dog,'
    )
    expected = {"a b.jpg": "a cat", "c,d.jpg": "x, y", "e/f.jpg": "été", "g.jpg": "dog"}
    assert read_table(path) == expected


def test_an_empty_label_is_kept_as_unknown(table):
    assert read_table(table("file,label\na.jpg,\nb.jpg,cat")) == {"a.jpg": "", "b.jpg": "cat"}


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
        read_table(table(content))
    assert f"table.csv: begins with {begins!r};" in str(caught.value)


@pytest.mark.parametrize(
    "line", ["b.jpg,cat,dog", "b.jpg,cat;dog", "b.jpg,cat|dog", "b.jpg,cat,,dog", "b.jpg,,cat,dog"]
)
def test_several_labels_in_a_line_are_refused(table, line):
    with pytest.raises(ValueError, match=r"line 3: b\.jpg has several labels .*one label per file"):
        read_table(table(f"file,label\na.jpg,cat\n{line}\n"))


def test_the_same_file_with_two_labels_is_refused(table):
    path = table("file,label\na.jpg,cat\nb.jpg,cat\n./a.jpg,dog\n")
    with pytest.raises(ValueError, match=r"line 4: a\.jpg is 'dog' here and 'cat' before"):
        read_table(path)


def test_the_same_file_twice_with_one_label_is_harmless(table):
    assert read_table(table("file,label\na.jpg,cat\na.jpg,cat\n")) == {"a.jpg": "cat"}


def test_a_line_without_a_label_column_is_refused(table):
    with pytest.raises(ValueError, match=r"table\.csv, line 2: got 'a\.jpg'; need file,label"):
        read_table(table("file,label\na.jpg\n"))


@pytest.mark.parametrize("kind", ["missing", "folder", "UTF-16", "Latin-1", "a huge field"])
def test_what_is_no_csv_is_named(table, tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / "none.csv"
    if kind in ("UTF-16", "Latin-1"):
        path = table("file,label\ncafé.jpg,été\n".encode(kind))
    elif kind == "a huge field":
        path = table("file,label\na.jpg," + 200_000 * "x")
    with pytest.raises(ValueError, match=r"not a readable CSV \(") as caught:
        read_table(path)
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


def test_labels_csv_at_the_top_is_used_automatically(flat, table):
    shutil.move(table("file,label\n000.jpg,a\n001.jpg,b\n002.jpg,a\n"), flat / "labels.csv")
    source = open_source(str(flat))["train"]
    assert source.labels.tolist() == [0, 1, 0]
    assert len(source) == 3  # the CSV is no image


def test_a_given_csv_replaces_labels_csv(flat, table):
    (flat / "labels.csv").write_text("file,label\n000.jpg,a\n001.jpg,b\n002.jpg,a\n")
    path = table("file,label\n000.jpg,x\n001.jpg,x\n002.jpg,y\n")
    assert open_source(str(flat), labels=path)["train"].classes == ["x", "y"]


def test_a_csv_replaces_the_class_folders(tmp_path, make_images, table):
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
    with pytest.warns(UserWarning, match=r"labels 1 files, 1 of them among the 3 images") as caught:
        source = open_source(str(flat), labels=path)["train"]
    assert source.labels.tolist() == [-1, -1, 0]
    assert source.classes == ["cat"]
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(path) in message and str(flat) in message


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


def test_a_csv_of_only_unknown_labels_is_refused_for_that(flat, table):
    with pytest.raises(ValueError, match="none of the 0 files that it labels"):
        open_source(str(flat), labels=table("file,label\n000.jpg,\n001.jpg,\n002.jpg,\n"))


def test_a_labels_csv_of_another_kind_is_not_used(tmp_path, make_images):
    make_images(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "labels.csv").write_text("id,breed\n000,pug\n")
    with pytest.warns(UserWarning, match=r"begins with 'id,breed', not file,label: not used"):
        source = open_source(str(tmp_path))["train"]
    assert source.classes == ["a", "b"]


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


@pytest.mark.filterwarnings("ignore:.*taken as splits")
@pytest.mark.parametrize("inside", ["", "archive/"])
@pytest.mark.parametrize("front", ["path", "folder", "split"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "labels.csv"])
def test_a_csv_may_name_the_folders_of_the_splits(
    tmp_path, make_images, table, inside, front, given
):
    layout = {f"{inside}Training": 2, f"{inside}Testing": 1}
    root = make_images(tmp_path / "photos", layout, size=(6, 6))
    names = {"path": [*layout], "folder": ["Training", "Testing"], "split": ["train", "test"]}
    train, test = names[front]
    path = table(f"file,label\n{train}/000.jpg,b\n{train}/001.jpg,a\n{test}/000.jpg,a\n")
    if not given:
        shutil.move(path, root / (inside if front == "folder" else "") / "labels.csv")
    splits = open_source(str(root), labels=path if given else None)
    assert splits["train"].labels.tolist() == [1, 0]
    assert splits["test"].labels.tolist() == [0]


def test_the_split_in_front_distinguishes_images_of_one_name(tmp_path, make_images, table):
    root = make_images(tmp_path / "photos", {"train": 1, "val": 1}, size=(6, 6))
    path = table("file,label\ntrain/000.jpg,cat\nval/000.jpg,dog\n")
    splits = open_source(str(root), labels=path)
    assert labels_of(splits["train"]) == {"000.jpg": "cat"}
    assert labels_of(splits["val"]) == {"000.jpg": "dog"}


def test_a_bare_name_that_two_splits_have_is_refused(tmp_path, make_images, table):
    root = make_images(tmp_path / "photos", {"train": 2, "val": 1}, size=(6, 6))
    path = table("file,label\n000.jpg,cat\n001.jpg,dog\n")
    with pytest.raises(
        ValueError, match=r"000\.jpg is in more than one of train, val; .*in front, as train/000"
    ):
        open_source(str(root), labels=path)
    path = table("file,label\nval/000.jpg,cat\n000.jpg,dog\n001.jpg,dog\n")
    assert labels_of(open_source(str(root), labels=path)["val"]) == {"000.jpg": "cat"}


def test_classes_have_one_number_in_all_splits(split, table):
    path = table(
        "file,label\ntrain/000.jpg,z\ntrain/001.jpg,m\ntrain/002.jpg,m\nval/100.jpg,z\nval/101.jpg,"
    )
    with pytest.warns(UserWarning, match="labels 4 files, 4 of them among the 5 images"):
        splits = open_source(str(split), labels=path)
    assert splits["train"].labels.tolist() == [1, 0, 0]
    assert splits["val"].labels.tolist() == [1, -1]


def test_training_uses_the_labels_of_the_csv_too(split, table):
    shutil.move(
        table("file,label\n000.jpg,b\n001.jpg,a\n002.jpg,b\n100.jpg,b\n101.jpg,a\n"),
        split / "labels.csv",
    )
    train, validation = train_and_validation(str(split), "auto", seed=0)
    assert train.labels.tolist() == [1, 0, 1]
    assert validation.labels.tolist() == [1, 0]


@pytest.mark.parametrize("spec", ["a.npy", "a.npz", "sample", "cifar10"])
def test_a_csv_is_refused_where_there_is_no_folder(tmp_path, table, spec):
    path = table("file,label\n#0,cat\n")
    pixels = np.zeros((3, 4, 4), np.uint8)
    np.save(tmp_path / "a.npy", pixels)
    np.savez(tmp_path / "a.npz", x=pixels)
    spec = str(tmp_path / spec) if spec.startswith("a.") else spec
    with pytest.raises(
        ValueError, match=r"table\.csv: .*for folders of images, not for "
    ) as caught:
        open_source(spec, labels=path)
    assert spec in str(caught.value)
