"""Thumbnails: exact or resized, cached by the server and by the browser, errors."""

import io
import os
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.viz.explorer.model import Explorer
from meanshift.viz.explorer.thumbnails import Thumbnails, encode
from meanshift.viz.run_reader import Run
from tests.support.explorer import get, post, read_pixels, serving_explorer, write_live_run


def test_small_images_are_shown_pixel_by_pixel(port, run):
    answer = get(port, "/thumbnail/train/5?side=256")
    assert answer.headers["Content-Type"] == "image/png"
    assert np.array_equal(np.array(Image.open(io.BytesIO(answer.body))), read_pixels(run, 5))


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(400, 200, (64, 128)), (2, 5000, (128, 1)), (100, 100, (100, 100))],
)
def test_large_images_are_resized_to_fit(height, width, size):
    content, media_type = encode(torch.zeros(3, height, width, dtype=torch.uint8), 128)
    assert media_type == "image/jpeg" and Image.open(io.BytesIO(content)).size == size


def test_thumbnails_are_cached_by_the_browser(port):
    key = get(port, "/api/run").json["cache_key"]
    plain = get(port, "/thumbnail/train/5")
    keyed = get(port, f"/thumbnail/train/5?v={key}")
    assert plain.headers["Cache-Control"] == "private, no-cache"
    assert keyed.headers["Cache-Control"] == "private, max-age=31536000, immutable"
    tag = plain.headers["ETag"]
    assert key in tag and get(port, "/thumbnail/train/6").headers["ETag"] != tag
    again = get(port, "/thumbnail/train/5", If_None_Match=tag)
    assert (again.status, again.body) == (304, b"")


def test_other_images_with_the_same_names_have_other_addresses(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 4, "b": 4}, size=(16, 16))
    folder = write_live_run(tmp_path / "run", root, validation="none")
    key = Explorer(Run(folder)).cache_key
    assert Explorer(Run(folder)).cache_key == key
    make_images(root, {"a": 4, "b": 4}, size=(16, 16), seed=1)
    other = Explorer(Run(folder))
    assert other.missing == "" and other.cache_key != key


def test_thumbnails_are_encoded_once_and_the_cache_stays_within_its_limit(run, monkeypatch):
    source = Run(run).source
    read = []
    original = source.read
    monkeypatch.setattr(source, "read", lambda index: read.append(index) or original(index))
    thumbnails = Thumbnails(max_bytes=3000)  # a PNG of noise takes about 900 bytes
    for index in (0, 1, 0, 2, 0, 3, 4, 0, 1):
        thumbnails.get("train", source, index, 64)
    assert read == [0, 1, 2, 3, 4, 1]
    size = sum(len(content) for content, _ in thumbnails._cache.values())
    assert size == thumbnails._bytes <= 3000


@pytest.mark.parametrize("side", ["0", "100", "4096", "x", "-64", "1e3", "²", ""])
def test_other_sides_are_refused(port, side):
    assert get(port, f"/thumbnail/train/5?side={quote(side)}").status == 400


def test_an_unreadable_image_is_named(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 6, "b": 6}, size=(20, 24))
    folder = write_live_run(tmp_path / "run", root, validation="none")
    (root / "a" / "001.jpg").write_bytes(b"not an image")
    with serving_explorer(Explorer(Run(folder))) as port:
        answer = get(port, "/thumbnail/train/1")
        assert answer.status == 404 and "001.jpg" in answer.error
        assert get(port, "/thumbnail/train/2").headers["Content-Type"] == "image/png"
        assert post(port, "/api/search?epoch=0&of=train&index=1").status == 404


def test_names_that_are_not_unicode_are_sent(tmp_path, make_images):
    odd = os.fsdecode(b"caf\xe9")
    root = tmp_path / "photos"
    try:
        make_images(root, {odd: 6, "plain": 6}, size=(16, 16))
    except OSError:
        pytest.skip("this file system takes only unicode names")
    folder = write_live_run(tmp_path / "run", root, validation="none", epochs=(0,))
    with serving_explorer(Explorer(Run(folder))) as port:
        assert get(port, "/api/images").json["titles"][0] == f"{odd}/000.jpg"
        assert get(port, "/api/colors?by=label&epoch=0").json["names"] == [odd, "plain"]
        for path in ("/api/run", "/api/point/0", "/api/rank?epoch=0", "/thumbnail/train/0"):
            assert get(port, path).status == 200, path
        (root / odd / "001.jpg").write_bytes(b"not an image")
        assert odd in get(port, "/thumbnail/train/1").error
