"""The live page over an index, with the real FAISS: search by upload and by image, thumbnails."""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from meanshift.evaluation.index import Index
from meanshift.viz.explorer.indexed import IndexedSource
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.explorer import (
    get,
    post,
    serving_explorer,
    wait_for,
    write_arrays,
    write_live_run,
)

pytest.importorskip("faiss")
pytestmark = pytest.mark.extras


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A run on arrays, and an index of a folder of other images: (run, index, photos)."""
    root = tmp_path_factory.mktemp("indexed")
    rng = np.random.default_rng(0)
    for split, count in (("train", 14), ("val", 4)):
        for name in ("ant", "bee"):
            (root / "photos" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
                pixels[:] = pixels // 3 + rng.integers(0, 170, 3, dtype=np.uint8)
                Image.fromarray(pixels).save(root / "photos" / split / name / f"{i:02d}.png")
    run = write_live_run(root / "run", write_arrays(root / "images.npz"))
    Index.build(f"random:{run}", root / "photos", root / "index", device="cpu")
    return run, root / "index", root / "photos"


@pytest.fixture(scope="module")
def port(indexed):
    run, index, _ = indexed
    explorer = Explorer(Run(run), indexed=IndexedSource.open(index, run))
    with serving_explorer(explorer) as number:
        yield number


def test_the_page_offers_the_index_for_search(port):
    state = get(port, "/api/run").json
    assert state["index"] == {"name": "index", "title": "indexed images", "count": 36}
    assert [source["name"] for source in state["sources"]] == ["train", "validation"]
    assert get(port, "/api/prepare?in=index&epoch=2").status == 200


def test_an_uploaded_file_finds_itself_and_is_shown(port, indexed):
    _, _, photos = indexed
    content = (photos / "val/bee/02.png").read_bytes()
    found = post(port, "/api/search?in=index&epoch=2&count=5", content).json["found"]
    assert len(found) == 5 and [one["distance"] for one in found] == sorted(
        one["distance"] for one in found
    )
    first = found[0]
    assert (first["title"], first["label"], first["source"]) == ("bee/02.png", "bee", "index")
    assert first["distance"] == pytest.approx(0, abs=1e-5) and first["row"] is None
    shown = get(port, f"/thumbnail/index/{first['index']}?side=768")
    assert shown.status == 200
    by_image = post(port, f"/api/search?in=index&epoch=2&count=5&of=index&index={first['index']}")
    assert by_image.json["found"] == found
    of_run = post(port, "/api/search?in=index&epoch=2&count=5&of=train&index=3").json["found"]
    assert len(of_run) == 5 and of_run != found


def test_the_thumbnail_has_the_pixels_of_the_file(port, indexed):
    _, index, photos = indexed
    opened = Index.open(index)
    row = opened.search(photos / "train/ant/03.png", k=1)[0].indices[0]
    answer = get(port, f"/thumbnail/index/{row}?side=64")
    with Image.open(io.BytesIO(answer.body)) as shown:
        assert np.array_equal(shown, Image.open(photos / "train/ant/03.png"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/rank?in=index&epoch=2", "can only be searched"),
        ("/thumbnail/index/36?side=64", "got image 36, need 0 to 35"),
    ],
)
def test_what_an_index_cannot_do_is_an_error(port, path, message):
    answer = get(port, path)
    assert answer.status == 404 and message in answer.error


def test_the_other_sources_are_searched_as_before(port):
    wait_for(lambda: get(port, "/api/prepare?in=train&epoch=2"))
    found = post(port, "/api/search?in=train&epoch=2&count=3&of=train&index=7").json["found"]
    assert found[0]["index"] == 7 and found[0]["source"] == "train"


def test_images_that_changed_are_named_and_not_shown(indexed, tmp_path):
    run, index, photos = indexed
    shutil.copytree(index, tmp_path / "index")
    shutil.copytree(photos, tmp_path / "photos")
    Index.build(f"random:{run}", tmp_path / "photos", tmp_path / "other", device="cpu")
    (tmp_path / "photos/train/ant/00.png").unlink()  # the ids of the others move
    source = IndexedSource.open(tmp_path / "other", run)
    with serving_explorer(Explorer(Run(run), indexed=source)) as number:
        answer = get(number, "/thumbnail/index/5?side=64")
        assert answer.status == 404 and "have changed since they were indexed" in answer.error


def test_an_index_of_other_weights_is_refused_before_the_page_is_served(call, indexed, tmp_path):
    run, index, photos = indexed
    other = write_live_run(tmp_path / "run", write_arrays(tmp_path / "x.npz"), train__seed=3)
    Index.build(f"random:{other}", photos, tmp_path / "index", device="cpu")
    shutil.move(other, tmp_path / "moved")
    code, _, errors = call("explore", run, "--index", tmp_path / "index", "--no-browser")
    assert code == 2 and "no weights to embed with" in errors
    code, _, errors = call("explore", run, "--index", tmp_path, "--no-browser")
    assert code == 2 and "no index there" in errors
    metadata = json.loads((index / "index.json").read_text())
    assert metadata["spec"] == f"random:{run}"


def test_a_browser_searches_the_index_and_the_other_images(chromium, port, indexed):
    _, _, photos = indexed
    page = chromium.new_page(viewport={"width": 1280, "height": 860})
    messages = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.set_default_timeout(60_000)
    page.goto(f"http://127.0.0.1:{port}/#search")
    page.wait_for_selector("#search-in option >> nth=3", state="attached")
    assert page.locator("#search-in").input_value() == "index"
    assert page.locator("#search-epoch").is_disabled()  # an index has weights of its own
    page.set_input_files("#file", photos / "train/bee/04.png")
    page.wait_for_selector("#found .card >> nth=23")
    assert page.inner_text("#found .card >> nth=0").split() == ["bee/04.png", "bee", "0"]
    assert page.inner_text("#search-status") == "24 images, nearest first; features of the index"
    page.select_option("#search-in", "train")
    page.get_by_text("features after epoch 2 (newest)").wait_for()
    assert page.locator("#search-epoch").is_enabled()
    assert "indexed images (36)" not in page.locator("#clean-in option").all_text_contents()
    page.close()
    assert messages == []
