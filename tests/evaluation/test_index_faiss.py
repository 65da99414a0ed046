"""Indexes with the real FAISS: results, recall, a killed build, damage, and other weights."""

import json
import multiprocessing as mp
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import meanshift as ms
from meanshift.config import Config
from meanshift.data import open_source
from meanshift.evaluation import index as module
from meanshift.evaluation import index_items
from meanshift.evaluation.index import Index
from meanshift.models.features import extract_features
from meanshift.models.weights import load_weights
from meanshift.ops import vector_index
from meanshift.ops.topk import nearest_neighbors
from meanshift.runtime.run_directory import RunDirectory
from tests.support.commands import TINY

faiss = pytest.importorskip("faiss")
pytestmark = pytest.mark.extras

COUNTS = {f"{split}/{name}": 12 for split in ("train", "val") for name in ("ant", "bee")}
OPTIONS = {"image_size": 16, "device": "cpu"}


def write_run(folder, seed=0):
    """The directory of a run whose weights are given by its seed: `random:RUN`."""
    values = {"encoder.name": "resnet10", "encoder.stem": "small-stride2", "encoder.width": 0.125}
    config = Config().with_overrides({**values, "data.image_size": 16, "train.seed": seed})
    RunDirectory(folder).begin(config, extra={})
    return f"random:{folder}"


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """A folder of 48 images, weights, and a finished index."""
    root = tmp_path_factory.mktemp("index")
    rng = np.random.default_rng(0)
    for name, count in COUNTS.items():
        (root / "photos" / name).mkdir(parents=True)
        for i in range(count):
            tone = rng.integers(0, 256, 3)
            pixels = np.clip(tone + rng.normal(0, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / "photos" / name / f"{i:02d}.png")
    spec = write_run(root / "run")
    Index.build(spec, root / "photos", root / "index", device="cpu")
    return root, spec


@pytest.fixture
def copied(setup, tmp_path):
    """An index to change."""
    root, spec = setup
    shutil.copytree(root / "index", tmp_path / "index")
    return tmp_path / "index", root / "photos", spec


def features_of(spec, source):
    weights = load_weights(spec)
    rows = [
        extract_features(weights.backbone, split, image_size=16, device=torch.device("cpu"))
        for split in open_source(str(source)).values()
    ]
    return F.normalize(torch.cat(rows), dim=1)


def test_results_are_those_of_an_exact_search(setup):
    root, spec = setup
    index = Index.open(root / "index")
    assert len(index) == 48 and index.layout.kind == "flat" and index.recall == 1.0
    rows = features_of(spec, root / "photos")
    expected, similarities = nearest_neighbors(rows, rows, 7)
    paths = [
        str(split.root / file)
        for split in open_source(str(root / "photos")).values()
        for file in split.files
    ]
    found = index.search(paths, k=7)
    assert len(found) == 48
    for row, near in enumerate(found):
        assert near.indices.tolist() == expected[row].tolist()
        assert near.similarities == pytest.approx(similarities[row].numpy(), abs=1e-6)
        assert near.paths == [paths[i] for i in near.indices]
        assert near.labels == [path.split("/")[-2] for path in near.paths]
        assert near.paths[0] == paths[row] and near.similarities[0] == pytest.approx(1, abs=1e-6)
    one = index.search(Image.open(paths[5]), k=1)[0]
    assert one.paths == [paths[5]] and ms.Index is Index


def test_the_command_builds_once_and_searches(setup, call, tmp_path):
    root, spec = setup
    out = tmp_path / "index"
    command = ["index", spec, root / "photos", "--out", out, "--device", "cpu"]
    code, text, errors = call(*command)
    assert code == 0, errors
    assert text == f"{out}: 48 x 64, flat (Flat, exact), recall@10 1.000\n"
    metadata = json.loads((out / "index.json").read_text())
    assert metadata["spec"] == spec and metadata["metric"] == "cosine" and metadata["rows"] == 48
    assert set(metadata["data"]) == {"train", "val"} and metadata["versions"]["faiss-cpu"]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*") if path.name != ".lock"}
    assert call(*command)[:2] == (0, text)  # is recognized, and nothing is written again
    assert before == {path: path.stat().st_mtime_ns for path in before}
    query = root / "photos/val/bee/03.png"
    code, text, errors = call("search", out, query, "-k", 2)
    assert code == 0, errors
    title, header, first, second = text.splitlines()
    assert title == str(query) and header.split() == ["rank", "similarity", "label", "path"]
    assert first.split() == ["1", "1.0000", "bee", str(query)] and second.split()[0] == "2"
    code, text, _ = call("search", out, root / "photos/val", query, "-k", 2, "--json")
    answer = json.loads(text)
    assert code == 0 and answer["unreadable"] == {} and len(answer["queries"]) == 25
    for result in answer["queries"]:
        assert result["neighbors"][0]["path"] == result["query"]
        assert [near["rank"] for near in result["neighbors"]] == [1, 2]


def test_unreadable_images_are_named_and_counted(setup, call, tmp_path):
    root, spec = setup
    shutil.copytree(root / "photos", tmp_path / "photos")
    torn = tmp_path / "photos/train/ant/05.png"
    torn.write_bytes(torn.read_bytes()[:50])
    with pytest.warns(
        UserWarning, match=r"1 of 24 images cannot be read and are left out.*05\.png"
    ):
        index = Index.build(spec, tmp_path / "photos", tmp_path / "index", device="cpu")
    assert len(index) == 47 and index.metadata["unreadable"] == 1
    good = tmp_path / "photos/train/bee/07.png"
    assert index.search(good, k=1)[0].paths == [str(good)]  # no row is shifted
    code, text, errors = call("search", tmp_path / "index", torn, good, "-k", 1)
    assert code == 0 and str(good) in text
    assert f"{torn}: cannot be read (" in errors and "1 of 2 cannot be read" in errors
    code, _, errors = call("search", tmp_path / "index", torn)
    assert code == 2 and "none of the 1 images to search with can be read" in errors
    with pytest.raises(ValueError, match=r"05\.png cannot be read"):
        index.search(torn)
    shutil.rmtree(tmp_path / "photos/val")
    for path in (tmp_path / "photos").rglob("*.png"):
        path.write_bytes(b"nothing")
    all_out = pytest.warns(UserWarning, match="24 of 24 images cannot be read")
    with pytest.raises(ValueError, match="none of the 24 images can be read"), all_out:
        Index.build(spec, tmp_path / "photos", tmp_path / "other", device="cpu")


def test_other_weights_or_images_are_refused(copied, call, tmp_path):
    folder, photos, spec = copied
    other = write_run(tmp_path / "other", seed=1)
    code, _, errors = call("index", other, photos, "--out", folder, "--device", "cpu")
    assert code == 2 and "contains an index with other weights; choose another --out" in errors
    code, _, errors = call("index", spec, photos / "val", "--out", folder, "--device", "cpu")
    assert code == 2 and "contains an index with other images" in errors
    code, _, errors = call("index", spec, photos, "--out", folder, "--kind", "ivf-sq8")
    assert code == 2 and "contains an index with other kind" in errors
    code, _, errors = call("index", spec, photos, "--out", photos)
    assert code == 2 and "contains files but no index" in errors
    image = photos / "val/ant/00.png"
    code, _, errors = call("search", folder, image, "--weights", other)
    assert code == 2 and "has other weights than" in errors and "--weights RUN_OR_WEIGHTS" in errors
    assert "meanshift index" in errors
    moved = write_run(tmp_path / "moved")
    assert call("search", folder, image, "--weights", moved)[0] == 0


def test_weights_that_are_gone_are_an_error_that_says_what_to_type(setup, call, tmp_path):
    root, _ = setup
    spec = write_run(tmp_path / "run")
    Index.build(spec, root / "photos", tmp_path / "index", device="cpu")
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    image = root / "photos/val/ant/00.png"
    code, _, errors = call("search", tmp_path / "index", image)
    assert code == 2 and "no weights to embed with" in errors and "--weights RUN" in errors
    command = ["search", tmp_path / "index", image, "--weights", f"random:{tmp_path / 'elsewhere'}"]
    assert call(*command)[0] == 0


@pytest.mark.parametrize("name", ["index.faiss", "index.json", "items/part-00000.parquet"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_one_line_that_names_the_file(copied, call, name, damage):
    folder, photos, _ = copied
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[:-30] if damage == "truncated" else content)
    if damage == "missing":
        path.unlink()
    code, out, errors = call("search", folder, photos / "train/ant/00.png")
    last = errors.strip().splitlines()[-1]
    assert code == 2 and not out and last.startswith("meanshift: ") and path.name in last
    assert "Traceback" not in errors


@pytest.mark.parametrize("moment", ["second part", "faiss", "metadata"])
def test_a_killed_build_is_not_opened_and_is_continued(setup, tmp_path, monkeypatch, moment):
    root, spec = setup
    monkeypatch.setattr(module, "PART_IMAGES", 10)
    out = tmp_path / "index"

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def build_and_die():
        if moment == "second part":
            write = module.write_part
            done = []
            module.write_part = lambda *given: die() if done else done.append(write(*given))
        elif moment == "faiss":
            faiss.write_index = lambda _, writer: (writer.bs, die())
        else:
            write_json = module.checksum.write_json
            module.checksum.write_json = lambda path, *given, **options: (
                die() if path.name == "index.json" else write_json(path, *given, **options)
            )
        Index.build(spec, root / "photos", out, device="cpu")

    process = mp.get_context("fork").Process(target=build_and_die)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(ValueError, match="this index is not finished"):
        Index.open(out)
    parts = {path: path.stat().st_mtime_ns for path in (out / "items").glob("*.parquet")}
    assert len(parts) == (1 if moment == "second part" else 6)
    other = write_run(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="contains an index with other weights"):
        Index.build(other, root / "photos", out, device="cpu")
    index = Index.build(spec, root / "photos", out, device="cpu")
    assert parts.items() <= {p: p.stat().st_mtime_ns for p in parts}.items()  # not written again
    rows = features_of(spec, root / "photos")
    expected, _ = nearest_neighbors(rows, rows, 5)
    assert np.array_equal([near.indices for near in index.nearest(rows, 5)], expected)
    visible = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert visible == {"index.faiss", "index.json", "items"}


# Kinds that are not exact


def vectors(count, seed, dim=32):
    """Rows around 50 centers that vary in few directions."""
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    centers = torch.randn(50, dim, generator=fixed)
    directions = torch.randn(6, dim, generator=fixed)
    rows = centers[torch.randint(50, (count,), generator=generator)]
    rows = rows + 0.5 * torch.randn(count, 6, generator=generator) @ directions
    return rows + 0.2 * torch.randn(count, dim, generator=generator)


def write_rows(folder, rows, monkeypatch, **options):
    """An index of rows that no network has made."""
    monkeypatch.setattr(index_items, "ROW_GROUP", 256)
    from meanshift.data.arrays import ArraySource

    source = ArraySource(rows.numpy(), None, name="rows", kind="vector")
    (folder / "items").mkdir(parents=True)
    parts = []
    for start in range(0, len(rows), 2000):
        ids = torch.arange(start, min(start + 2000, len(rows)))
        path = folder / "items" / f"part-{len(parts):05d}.parquet"
        split = module.EmbeddedSplit("train", source, rows[ids], ids)
        index_items.write_part(path, split, {})
        parts.append(index_items.read_part(path))
    about = {"format": 1, "weights": "", "spec": "", "title": "", "roots": {}, "source": "rows"}
    module.write_index(folder, parts, about, memory=4.0, **options)
    return Index.open(folder)


@pytest.mark.parametrize("kind", ["ivf-sq8", "ivf-pq"])
def test_the_recall_is_that_of_new_queries(tmp_path, monkeypatch, kind):
    count = 9000 if kind == "ivf-sq8" else 3000  # to train a product quantizer takes long
    rows, queries = vectors(count, 1), F.normalize(vectors(300, 2), dim=1)
    index = write_rows(tmp_path / "index", rows, monkeypatch, kind=kind)
    assert index.layout.kind == kind and index.layout.lists > 1 and index.nprobe >= 1
    unit = F.normalize(rows, dim=1)
    exact, _ = nearest_neighbors(queries, unit, 10)
    near = index.nearest(queries, 10)
    found = np.stack([each.indices for each in near])
    measured = vector_index.recall(found, exact.numpy())
    assert index.recall >= 0.9 and abs(measured - index.recall) < 0.05
    for row, each in enumerate(near):  # similarities are exact, also of what is approximate
        expected = (unit[each.indices] @ queries[row]).numpy()
        assert each.similarities == pytest.approx(expected, abs=1e-6)
        assert (np.diff(each.similarities) <= 0).all()
    more = index.nearest(queries, 10, nprobe=index.layout.lists)
    all_lists = vector_index.recall(np.stack([each.indices for each in more]), exact.numpy())
    assert all_lists >= measured and all_lists > (0.999 if kind == "ivf-sq8" else 0.9)
    few = index.nearest(queries, 10, nprobe=1)
    hits = np.mean([np.isin(a.indices, b).mean() for a, b in zip(few, exact, strict=True)])
    assert hits < all_lists


def test_wrong_queries_are_refused(setup, tmp_path, monkeypatch):
    root, _ = setup
    index = Index.open(root / "index")
    rows = torch.randn(2, 64)
    for k in (0, 49):
        with pytest.raises(ValueError, match=f"k: got {k}, need 1 to 48"):
            index.nearest(rows, k)
    with pytest.raises(ValueError, match="nprobe: got 4, need none: this index compares all"):
        index.nearest(rows, 1, nprobe=4)
    with pytest.raises(ValueError, match=r"got embeddings of shape \(2, 63\), need \(n, 64\)"):
        index.nearest(rows[:, :63], 1)
    other = write_rows(tmp_path / "rows", vectors(2000, 1), monkeypatch, kind="ivf-sq8")
    with pytest.raises(ValueError, match=r"nprobe: got 33, need 1 to 32"):
        other.nearest(torch.randn(1, 32), 1, nprobe=33)


def test_a_product_quantizer_needs_rows_to_train_on(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"ivf-pq: got 200 rows, need 256 or more"):
        write_rows(tmp_path / "rows", vectors(200, 1), monkeypatch, kind="ivf-pq")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_very_few_rows_are_an_index_too(tmp_path, monkeypatch, count):
    rows = vectors(count, 1)
    index = write_rows(tmp_path / "rows", rows, monkeypatch)
    assert index.recall == 1.0
    near = index.nearest(rows, count)
    assert [each.indices[0] for each in near] == list(range(count))


def test_embeddings_that_are_not_numbers_are_refused(tmp_path, monkeypatch):
    rows = vectors(300, 1)
    rows[7] = torch.nan
    with pytest.raises(ValueError, match="some embeddings are not finite numbers"):
        write_rows(tmp_path / "rows", rows, monkeypatch)


def test_pandas_duckdb_and_this_program_read_the_items(setup):
    root, spec = setup
    duckdb = pytest.importorskip("duckdb")
    pandas = pytest.importorskip("pandas")
    rows = features_of(spec, root / "photos")
    table = pandas.read_parquet(root / "index/items")
    assert list(table.columns) == ["file", "id", "split", "label", "embedding"]
    values = torch.from_numpy(np.stack(table["embedding"].to_list()))
    assert torch.allclose(F.normalize(values, dim=1), rows, atol=1e-6)
    found = duckdb.sql(
        f"SELECT label, count(*), min(len(embedding)) FROM '{root}/index/items/*.parquet' "
        f"GROUP BY label ORDER BY label"
    ).fetchall()
    assert found == [("ant", 24, 64), ("bee", 24, 64)]


def test_every_python_block_of_the_page_runs(tmp_path, monkeypatch, make_images, call):
    """With the real pandas and DuckDB."""
    pytest.importorskip("duckdb")
    pytest.importorskip("pandas")
    root = make_images(tmp_path / "photos", {"a": 6, "b": 6}, size=(20, 24))
    for path in root.rglob("*.jpg"):  # the names of the page
        Image.open(path).save(path.parent / f"{int(path.stem)}.png")
        path.unlink()
    shutil.copy(root / "b/2.png", tmp_path / "a.jpg")
    monkeypatch.chdir(tmp_path)
    code, _, errors = call("pretrain", "small", "--data", root, "--out", "runs/photos", *TINY)
    assert code == 0, errors
    page = Path(__file__).parents[2] / "docs" / "search.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    values = {}
    for block in blocks:
        exec(compile(block, "docs/search.md", "exec"), values)
    assert values["near"][0].paths[0].endswith("b/2.png") and values["near"][0].labels[0] == "b"
    assert len(values["joined"]) == 2 and values["embeddings"].shape[0] == 2
    assert values["counts"].fetchall() == [("a", 6), ("b", 6)]
    first, *others = values["similar"]
    assert first[0] == "a/0.png" and first[2] == pytest.approx(1, abs=1e-5) and len(others) == 4
    index = values["index"]
    near = index.nearest(torch.from_numpy(index.items.embeddings(np.array([0]))), 5)[0]
    assert [file for file, *_ in values["similar"]] == [
        index.items.items(near.indices)[i].file for i in range(5)
    ]
