"""Search by image, uploads, outliers, duplicates and labels, against naive computations."""

import contextlib
import http.client
import io
import math
import statistics

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from meanshift.models.encoder import build_backbone
from meanshift.models.features import extract_features
from meanshift.runtime import checkpoint
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.explorer.search import decode_upload, histogram
from meanshift.viz.run_reader import MissingData, Run
from tests.support.explorer import (
    COPY,
    ORIGINAL,
    Answer,
    encode_png,
    get,
    load_weights,
    post,
    read_pixels,
    wait_for,
    write_arrays,
    write_live_run,
)


def indices_of(items):
    return [item["index"] for item in items]


@pytest.mark.parametrize("source", ["snapshot", "train"])
def test_an_uploaded_image_of_the_source_finds_itself_and_its_copy(port, run, source):
    prepared = wait_for(lambda: get(port, f"/api/prepare?in={source}&epoch=2"))
    assert prepared.status == 200
    path = f"/api/search?epoch=2&in={source}&count=5"
    found = post(port, path, encode_png(read_pixels(run, ORIGINAL))).json["found"]
    assert indices_of(found)[:2] == [ORIGINAL, COPY] and len(found) == 5
    assert found[0]["distance"] < 1e-4 and found[1]["distance"] < 1e-4 < found[2]["distance"]
    first = found[0]
    assert (first["row"], first["title"], first["label"]) == (ORIGINAL, f"#{ORIGINAL}", "1")
    by_index = post(port, f"{path}&of=train&index={ORIGINAL}").json["found"]
    assert indices_of(by_index) == indices_of(found)


def test_distances_are_those_of_the_weights_of_each_snapshot(explorer, run):
    train = explorer.run.source
    options = {"image_size": 16, "device": torch.device("cpu")}
    orders = []
    for epoch in (0, 2):
        backbone, _ = build_backbone(explorer.run.config.encoder, image_size=16)
        load_weights(backbone, torch.load(run / f"snapshots/epoch-{epoch:04d}.pt")["weights"])
        backbone.eval()
        rows = F.normalize(extract_features(backbone, explorer.run.validation, **options), dim=1)
        one = train.subset(torch.tensor([9]))
        query = F.normalize(extract_features(backbone, one, **options), dim=1)
        distances = (1 - query @ rows.T)[0]
        found = wait_for(
            lambda epoch=epoch: explorer.search(
                train.read(9), name="validation", epoch=epoch, count=20
            )
        )
        assert indices_of(found) == distances.argsort(stable=True).tolist()
        expected = pytest.approx(distances.sort().values, abs=1e-5)
        assert [item["distance"] for item in found] == expected
        assert {item["source"] for item in found} == {"validation"} and found[0]["row"] is None
        orders.append(indices_of(found))
    assert orders[0] != orders[1]


def test_arrays_that_are_enlarged_for_the_encoder_find_themselves(tmp_path):
    source = write_arrays(tmp_path / "p.npz")
    folder = write_live_run(tmp_path / "run", source, image_size=24, epochs=(0,))
    explorer = Explorer(Run(folder))
    pixels = read_pixels(folder, 8)
    found = explorer.search(decode_upload(encode_png(pixels)), name="snapshot", epoch=0)
    assert found[0]["index"] == 8 and found[0]["distance"] < 1e-4
    enlarged = decode_upload(encode_png(np.repeat(np.repeat(pixels, 2, 0), 2, 1)))
    assert explorer.search(enlarged, name="snapshot", epoch=0)[0]["index"] == 8


def test_files_find_themselves_and_unreadable_ones_are_left_out(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 6, "b": 6}, size=(40, 48))
    folder = write_live_run(tmp_path / "run", root, validation="none", epochs=(0,))
    (root / "b" / "005.jpg").write_bytes(b"nothing")
    explorer = Explorer(Run(folder))
    content = (root / "b" / "002.jpg").read_bytes()
    with pytest.warns(UserWarning, match="cannot be read and are left out"):
        found = wait_for(lambda: explorer.search(decode_upload(content), name="train", epoch=0))
    assert (found[0]["title"], len(found)) == ("b/002.jpg", 11)
    assert found[0]["distance"] < 1e-4 < found[1]["distance"]


def test_an_encoder_that_cannot_be_built_is_named_and_the_snapshot_images_are_compared(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"), epochs=(0,))
    path = folder / "snapshots" / "epoch-0000.pt"
    checkpoint.write(path, {**checkpoint.read(path), "weights": {"other": torch.zeros(3)}})
    explorer = Explorer(Run(folder))
    with pytest.raises(MissingData, match="the method msf has an encoder of its own"):
        explorer.search(explorer.run.source.read(0), name="snapshot", epoch=0)
    assert wait_for(lambda: explorer.rank("outliers", name="snapshot", epoch=0))["total"] == 60


# Uploads


def odd_image(kind, pixels):
    image = Image.fromarray(pixels)
    if kind == "gray16":
        return encode_png(pixels[:, :, 0].astype(np.uint16) << 8)
    exif = Image.Exif()
    if kind == "rotated":
        exif[0x0112] = 6
    images = {
        "palette": image.convert("P"),
        "alpha": image.convert("RGBA"),
        "rotated": image,
        "strip": Image.new("RGB", (60_000, 1)),
        "alpha strip": Image.new("RGBA", (60_000, 1)),
        "one pixel": Image.new("RGB", (1, 1)),
    }
    buffer = io.BytesIO()
    images[kind].save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "kind", ["gray16", "palette", "alpha", "strip", "alpha strip", "one pixel", "rotated"]
)
def test_odd_images_are_read(port, run, kind):
    upload = odd_image(kind, read_pixels(run, 3))
    assert post(port, "/api/search?epoch=2", upload).status == 200


@pytest.mark.parametrize(
    ("upload", "message"),
    [
        (b"hello, I am text", "no image was recognized; need a whole JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image was recognized"),
        (encode_png(np.zeros((90, 90, 3), np.uint8))[:-40], "truncated"),
        (b"\x89PNG\r\n\x1a\n" + b"\x00" * 50, "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image was recognized"),
    ],
)
def test_uploads_that_are_no_images_are_refused(port, upload, message):
    answer = post(port, "/api/search?epoch=2", upload)
    assert answer.status == 400 and message in answer.error and "0x" not in answer.error


@pytest.mark.parametrize("side", [10_000, 20_000])  # where Pillow warns, and where it refuses
def test_a_decompression_bomb_is_refused_before_it_is_decoded(port, monkeypatch, side):
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, "PNG")
    upload = buffer.getvalue()
    decoded = []
    monkeypatch.setattr("meanshift.data.decode.to_array", decoded.append)
    answer = post(port, "/api/search?epoch=2", upload)
    assert len(upload) < 100_000 and answer.status == 400
    assert "decompression bomb" in answer.error
    assert decoded == []


@contextlib.contextmanager
def open_upload(port, name, value):
    """The connection of a search whose body is not sent yet, with one more header."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/api/search?epoch=2")
        connection.putheader("Origin", f"http://127.0.0.1:{port}")
        connection.putheader(name, value)
        connection.endheaders()
        yield connection


def test_an_upload_beyond_the_limit_is_refused_by_its_length_alone(port):
    with open_upload(port, "Content-Length", str(20 * 2**20 + 1)) as connection:
        answer = Answer(connection.getresponse())
    assert answer.status == 413 and "20 MB" in answer.error


def test_an_upload_of_unknown_length_is_stopped_at_the_limit(port):
    sent = 0
    chunk = bytes(2**20)
    with open_upload(port, "Transfer-Encoding", "chunked") as connection:
        with contextlib.suppress(OSError):
            while sent < 200:
                connection.send(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                sent += 1
        with contextlib.suppress(OSError):  # the server may have closed the connection
            assert connection.getresponse().status == 413
    assert 20 <= sent < 100


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("epoch=1", 404, "no snapshot after epoch 1; there are 0, 2"),
        ("epoch=", 400, "epoch: got ''"),
        ("epoch=-1", 400, "epoch: got '-1', need a whole number"),
        ("epoch=2&in=x", 404, "got the images 'x', need one of snapshot, train, validation"),
        ("epoch=2&count=9999", 400, "count: got '9999'"),
        ("epoch=2&of=train&index=60", 404, "got image 60, need 0 to 59"),
        ("epoch=2&of=..%2f&index=0", 404, "got the images '../'"),
        ("epoch=2", 400, "index: got ''"),
        ("epoch=2&index=0", 404, "got the images ''"),
    ],
)
def test_a_wrong_search_is_refused_with_what_is_needed(port, query, status, message):
    answer = post(port, f"/api/search?{query}")
    assert answer.status == status and message in answer.error


# Outliers and duplicates


@pytest.mark.parametrize("source", ["snapshot", "train"])
def test_outliers_and_duplicates_are_those_of_a_naive_search(explorer, source):
    features, indices = wait_for(lambda: explorer.searcher.features(source, 2))
    unit = F.normalize(features, dim=1).double()
    distances = (1 - unit @ unit.T).clamp(min=0).fill_diagonal_(9)
    outliers = wait_for(lambda: explorer.rank("outliers", name=source, epoch=2, count=100))
    mean = distances.sort(1).values[:, :10].mean(1)
    assert outliers["total"] == len(indices) == 60
    scores = [item["score"] for item in outliers["items"]]
    assert scores == sorted(scores, reverse=True)
    by_index = {item["index"]: item["score"] for item in outliers["items"]}
    assert by_index == pytest.approx(dict(enumerate(mean.tolist())), abs=1e-5)
    duplicates = wait_for(lambda: explorer.rank("duplicates", name=source, epoch=2, count=100))
    nearest = distances.argmin(1).tolist()
    pairs = {tuple(sorted(pair)) for pair in enumerate(nearest)} - {(ORIGINAL, COPY)}
    found = [(item["nearest"]["index"], item["index"]) for item in duplicates["items"]]
    assert found[0] == (ORIGINAL, COPY) and duplicates["items"][0]["score"] < 1e-5
    assert set(found[1:]) == pairs and len(found) == len(set(found)) == duplicates["total"]
    scores = [item["score"] for item in duplicates["items"]]
    assert scores == sorted(scores)


def test_an_image_with_more_copies_than_neighbors_is_not_its_own_duplicate(tmp_path):
    np.savez(tmp_path / "p.npz", images=np.full((30, 16, 16, 3), 90, np.uint8))
    explorer = Explorer(Run(write_live_run(tmp_path / "run", tmp_path / "p.npz", epochs=(0,))))
    answer = wait_for(lambda: explorer.rank("duplicates", name="snapshot", epoch=0, count=100))
    items = answer["items"]
    assert all(item["index"] > item["nearest"]["index"] for item in items)
    assert 20 < len(set(indices_of(items))) < 30  # one image is left when all copies are deleted
    assert all(item["score"] < 1e-5 for item in items)


def test_a_ranking_is_sent_page_by_page(port):
    items = get(port, "/api/rank?epoch=2&count=60").json["items"]
    assert get(port, "/api/rank?epoch=2&start=10&count=5").json["items"] == items[10:15]
    assert get(port, "/api/rank?epoch=2&start=99").json["items"] == []
    assert "need outliers, duplicates or labels" in get(port, "/api/rank?epoch=2&order=size").error


def test_one_image_alone_cannot_be_compared(tmp_path):
    np.savez(tmp_path / "p.npz", images=np.zeros((1, 16, 16, 3), np.uint8))
    explorer = Explorer(Run(write_live_run(tmp_path / "run", tmp_path / "p.npz", epochs=(0,))))
    with pytest.raises(MissingData, match="need 2 or more"):
        explorer.rank("outliers", name="snapshot", epoch=0)
    assert explorer.point(0)["snapshots"][0]["rows"] == []


# Doubtful labels, copies, and the threshold of duplicates


@pytest.mark.parametrize("name", ["snapshot", "train", "validation"])
def test_doubtful_labels_are_those_that_a_naive_vote_contradicts(explorer, name):
    answer = wait_for(lambda: explorer.rank("labels", name=name, epoch=2, count=1000))
    features, indices = explorer.searcher.features(name, 2)
    labels = explorer.searcher.labels(name)[indices].tolist()
    features = F.normalize(features, dim=1)
    expected = {}
    for row, own in enumerate(features):
        similarity = (features @ own).tolist()
        others = [other for other in range(len(features)) if other != row]
        near = sorted(others, key=lambda other: -similarity[other])[:10]
        votes = dict.fromkeys(labels, 0.0)
        for other in near:
            votes[labels[other]] += math.exp(similarity[other] / 0.07)
        best = max(votes, key=lambda label: votes[label])
        share = votes[best] / sum(votes.values())
        if best != labels[row] and share > 0.5:
            expected[int(indices[row])] = (str(best), pytest.approx(share, abs=1e-3))
    items = answer["items"]
    assert {item["index"]: (item["suggested"], item["score"]) for item in items} == expected
    assert answer["total"] == len(items) > 0
    scores = [item["score"] for item in items]
    assert scores == sorted(scores, reverse=True)


def test_without_labels_the_list_says_why_it_is_empty(tmp_path):
    source = write_arrays(tmp_path / "p.npz", labels=False)
    explorer = Explorer(Run(write_live_run(tmp_path / "run", source, epochs=(0,))))
    answer = explorer.rank("labels", name="snapshot", epoch=0)
    assert answer["items"] == [] and "no labels" in answer["note"]


@pytest.mark.filterwarnings("ignore:.*are unlabeled:UserWarning")
def test_images_without_a_label_neither_vote_nor_are_listed(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"": 12}, size=(16, 16))
    lines = [f"{i:03d}.jpg,{'ab'[i % 2] if i < 5 else ''}" for i in range(12)]
    (root / "labels.csv").write_text("\n".join(["file,label", *lines]))
    explorer = Explorer(Run(write_live_run(tmp_path / "run", root, validation="none")))
    items = explorer.rank("labels", name="snapshot", epoch=0)["items"]
    assert items and all(item["label"] in "ab" and item["suggested"] in "ab" for item in items)


def test_copies_with_the_same_pixels_are_marked(explorer, monkeypatch):
    first, second = explorer.rank("duplicates", name="snapshot", epoch=2)["items"][:2]
    assert (first["index"], first["nearest"]["index"]) == (COPY, ORIGINAL) and first["exact"]
    assert not second["exact"]
    monkeypatch.setattr("meanshift.viz.explorer.model._COPY_DISTANCE", 2.0)  # all are compared
    items = explorer.rank("duplicates", name="snapshot", epoch=2)["items"]
    assert [item["exact"] for item in items] == [True] + [False] * (len(items) - 1)


def test_the_histogram_counts_pairs_and_starts_below_the_usual_distance(explorer):
    answer = explorer.rank("duplicates", name="snapshot", epoch=2, count=1000)
    distances = [item["distance"] for item in answer["items"]]
    counted = answer["histogram"]
    assert counted["edges"][-1] == pytest.approx(max(distances), rel=1e-5)
    assert counted["below"][-1] == answer["total"] == len(distances)

    usual = [0.2 * math.exp(0.1 * math.sin(i)) for i in range(500)]
    copies = [0.0, 1e-5, 0.01]
    found = histogram(sorted(copies + usual))
    for edge, below in zip(found["edges"], found["below"], strict=True):
        assert below == sum(value <= edge for value in copies + usual)
    assert found["below"][found["start"]] == len(copies)
    assert found["edges"][found["start"]] < statistics.median(usual)


@pytest.mark.parametrize("distances", [[0.0], [0.0, 0.0, 0.0], [0.3], [0.1, 0.1, 0.1, 0.1]])
def test_pairs_that_are_all_alike_have_a_histogram(distances):
    found = histogram(distances)
    assert found["below"][-1] == len(distances) and 0 <= found["start"] < len(found["edges"])
