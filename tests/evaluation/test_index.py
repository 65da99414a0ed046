"""What an index refuses, before FAISS is needed."""

import json

import pytest

from meanshift.evaluation.index import Index
from meanshift.runtime import checksum
from tests.support.packages import hide_packages


def write_metadata(folder, **changed):
    folder.mkdir(exist_ok=True)
    values = {"format": 1, "dim": 4, "parts": [], "layout": {}, "recall": 1.0, "nprobe": 0}
    checksum.write_json(folder / "index.json", values | changed)
    return folder


def test_what_is_no_index_is_an_error_that_says_what_to_type(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"no index there .* meanshift index RUN SOURCE --out"):
            Index.open(folder)
    (tmp_path / "unfinished.json").write_text("{}")
    with pytest.raises(ValueError, match="is not finished; finish it with: meanshift index"):
        Index.open(tmp_path)


def test_damaged_metadata_and_missing_files_are_named(tmp_path):
    folder = write_metadata(tmp_path / "index")
    with pytest.raises(ValueError, match=r"index\.faiss: damaged \(the file is missing\)"):
        Index.open(folder)
    path = folder / "index.json"
    whole = path.read_text()
    for content in (whole[:-20], whole.replace('"dim": 4', '"dim": 5'), "", "{}", "\x00" * 100):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"index\.json: damaged"):
            Index.open(folder)
    part = {"name": "part-00000.parquet", "rows": 3, "size": 10, "crc32": "0"}
    write_metadata(folder, parts=[part])
    (folder / "index.faiss").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"part-00000\.parquet: damaged \(the file is missing\)"):
        Index.open(folder)


def test_another_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has format 9, and this version reads 1"):
        Index.open(write_metadata(tmp_path / "index", format=9))


@pytest.mark.parametrize("package", ["faiss", pytest.param("pyarrow", marks=pytest.mark.extras)])
def test_a_missing_library_is_named_with_its_extra(call, monkeypatch, tmp_path, package):
    hide_packages(monkeypatch, package)
    out = tmp_path / "index"
    code, _, errors = call("index", "pixels", "sample", "--out", out)
    assert code == 2 and "pip install 'meanshift[faiss,parquet]'" in errors
    assert f"need {package}" in errors and not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("search {index} {index}/none.jpg", "none.jpg: no such file or folder"),
        ("search {index}", "the following arguments are required: IMAGE"),
        ("search {index}/none {index}", "no index there (no index.json)"),
        ("index pixels sample --out {index} --memory 0", "--memory: got 0, need GB above 0"),
        ("index pixels sample --out {index} --memory nan", "--memory: got nan, need GB above 0"),
        ("index pixels sample --out {index} --kind hnsw", "argument --kind: invalid choice"),
        ("index pixels sample", "the following arguments are required: --out"),
        ("index nothing sample --out {index}", "nothing: not found; need a run directory"),
    ],
)
def test_wrong_arguments_are_refused(call, tmp_path, words, message):
    code, out, errors = call(*words.format(index=write_metadata(tmp_path / "i")).split())
    assert code == 2 and message in errors and "Traceback" not in errors and not out


def test_json_of_a_search_is_parsed_by_its_name(call, tmp_path):
    """`--json` changes what is printed and not what is refused."""
    code, out, errors = call("search", tmp_path, tmp_path, "--json")
    assert code == 2 and not out and "no index there" in errors
    with pytest.raises(json.JSONDecodeError):
        json.loads(out)
