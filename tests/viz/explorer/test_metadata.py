"""A user's table about the images: how it is read, and that it colors the map."""

from urllib.parse import quote

import pytest

from meanshift.viz.explorer.metadata import Metadata, categories
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.explorer import get, serving_explorer

TITLES = ["a/1.jpg", "a/2.jpg", "b/1.jpg", "b/3.jpg"]


def read_metadata(tmp_path, text):
    path = tmp_path / "about.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Metadata.read(path, TITLES)


def test_images_are_found_by_path_or_by_a_unique_file_name(tmp_path):
    with pytest.warns(UserWarning, match=r"2 of its files are not among.*'1\.jpg'"):
        metadata = read_metadata(
            tmp_path,
            '\ufeffsite,file,age\n"B, east",a/1.jpg,3\nB,2.jpg,nan\nC,3.jpg,7.5\n\n'
            "D,1.jpg,9\nE,no,1\n",
        )
    assert metadata.columns == ["site", "age"]
    assert metadata.row(0) == {"site": "B, east", "age": "3"}
    assert metadata.row(2) == {}  # two files are called 1.jpg
    age = metadata.colors("age", [0, 1, 2, 3])
    assert (age["kind"], age["low"], age["high"]) == ("scale", 3.0, 7.5)
    assert age["values"] == [3.0, None, None, 7.5]
    site = metadata.colors("site", [3, 0, 2])
    assert site["names"] == ["C", "B, east"] and site["values"] == [0, 1, None]
    with pytest.raises(ValueError, match="got the column 'x', need one of site, age"):
        metadata.colors("x", [0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "starts with 'nothing'; need a first line with the column file"),
        ("name,age\na/1.jpg,3\n", "starts with 'name,age'; need a first line"),
        ("file\na/1.jpg\n", "column file and others"),
        ("file;age\na/1.jpg;3\n", "separated by semicolons"),
        ("file,age,age\na/1.jpg,3,4\n", "each of its own name"),
        ("file,age\na/1.jpg,3\na/1.jpg,4\n", "line 3: a/1.jpg is listed twice; need one line"),
        ("file,age\na/1.jpg,3,4\n", "line 2: 3 cells, need 2"),
        ("file,age\nx/9.jpg,3\n", "none of its files is among the 4 training images; got"),
        ("file,age\n", "got 'nothing' first, need names such as 'a/1.jpg'"),
        (b"file,age\n\xff\xfe,3\n", "not a readable CSV.*UTF-8"),
        (b"file,age\n\x00,3\n", "not a readable CSV|none of its files"),
    ],
)
def test_a_wrong_table_is_refused_with_what_is_needed(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_metadata(tmp_path, text)


def test_many_categories_become_twenty_and_other():
    values = [f"c{i // 2}" if i < 50 else None for i in range(52)] + ["c3"]
    merged = categories(values)
    assert len(merged["names"]) == 21 and merged["names"][0] == "c3"
    assert merged["names"][-1] == "other (5 more)" and merged["sizes"][-1] == 10
    assert merged["values"][50] is None and merged["values"][-1] == 0
    assert max(value for value in merged["values"] if value is not None) == 20


def test_metadata_color_the_map_and_are_shown_with_an_image(tmp_path, run):
    path = tmp_path / "about.csv"
    path.write_text("file,weight,=x\n" + "".join(f"#{i},{i},{i % 2}a\n" for i in range(60)))
    with serving_explorer(Explorer(Run(run), metadata=path)) as port:
        colorings = get(port, "/api/run").json["colorings"]
        assert colorings[-2:] == [["=weight", "weight"], ["==x", "=x"]]
        colors = get(port, "/api/colors?epoch=2&by=" + quote("=weight")).json
        assert colors["values"] == list(range(60)) and colors["high"] == 59
        assert get(port, "/api/colors?epoch=2&by=" + quote("==x")).json["names"] == ["0a", "1a"]
        assert get(port, "/api/point/7").json["metadata"] == {"weight": "7", "=x": "1a"}
    with pytest.raises(ValueError, match=r"missing\.csv: not found"):
        Explorer(Run(run), metadata=tmp_path / "missing.csv")
