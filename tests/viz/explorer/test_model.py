"""The map of a run, its colors and its points, also of runs that lack something."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.viz import analysis
from meanshift.viz.explorer import model
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import MissingData, Run
from tests.support.explorer import (
    COPY,
    ORIGINAL,
    encode_png,
    get,
    post,
    read_pixels,
    serving_explorer,
    wait_for,
    write_arrays,
    write_live_run,
    write_live_snapshot,
)


def test_the_map_is_there_at_once_and_becomes_tsne(tmp_path):
    explorer = Explorer(Run(write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"))))
    first = explorer.map()
    assert first["kind"] == "principal components" and first["progress"]["total"] == 2
    assert first["rows"] == list(range(60))
    assert all(len(p) == 120 and max(map(abs, p)) <= 1 for p in first["points"].values())
    assert "points" not in explorer.map(have=first["version"]) or explorer.map()["kind"] == "t-SNE"
    last = wait_for(lambda: answer if (answer := explorer.map())["kind"] == "t-SNE" else None)
    assert last["progress"] is None and last["version"] != first["version"]
    assert list(last["points"]) == [0, 2] and last["points"] != first["points"]
    assert "points" not in explorer.map(have=last["version"])


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_snapshot_that_is_taken_again_replaces_the_old_one(tmp_path, epoch):
    """Also where a later one has fewer images, which the earlier ones then show as well."""
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"))

    def answers(explorer):
        tsne = wait_for(lambda: answer if (answer := explorer.map())["kind"] == "t-SNE" else None)
        ranking = wait_for(lambda: explorer.rank("outliers", name="train", epoch=2))
        colors = [explorer.colors(by, epoch=2) for by in ("cluster", "purity")]
        search = explorer.search(image, name="snapshot", epoch=2)
        return tsne, ranking, explorer.images(), explorer.point(0), colors, search

    explorer = Explorer(Run(folder))
    image = explorer.read_image("train", 0)
    before = explorer.state()
    old = answers(explorer)
    write_live_snapshot(folder, epoch, seed=9, count=30)
    stale = explorer.map(have=old[0]["version"])
    assert stale["rows"] == list(range(30)) and stale["version"] != old[0]["version"]
    new = answers(explorer)
    assert len(new[2]["indices"]) == 30 and new[3]["snapshots"] != old[3]["snapshots"]
    assert new == answers(Explorer(Run(folder)))
    after = explorer.state()
    assert after["version"] != before["version"]
    for known in (0, 2):
        assert after["snapshot_keys"][known] != before["snapshot_keys"][known]


def test_a_new_snapshot_of_the_same_images_leaves_the_others_as_they_are(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"))
    explorer = Explorer(Run(folder))
    before = explorer.state()["snapshot_keys"]
    snapshot = explorer.run.snapshot(0)
    write_live_snapshot(folder, 3)
    after = explorer.state()["snapshot_keys"]
    assert explorer.run.snapshot(0) is snapshot
    assert {epoch: after[epoch] for epoch in before} == before and list(after) == [0, 2, 3]


def test_a_map_that_fails_is_explained_and_not_tried_again(tmp_path):
    source = write_arrays(tmp_path / "p.npz", count=4, validation=4)
    explorer = Explorer(Run(write_live_run(tmp_path / "run", source, snapshot_images=4)))
    failed = wait_for(lambda: answer if (answer := explorer.map())["note"] else None)
    assert failed["kind"] == "principal components" and "5 images" in failed["note"]
    assert explorer.map()["progress"] is None


def test_features_that_are_not_numbers_are_reported(tmp_path):
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "p.npz"), epochs=())
    write_live_snapshot(folder, 0, diverged=True)
    with serving_explorer(Explorer(Run(folder))) as port:
        refused = wait_for(lambda: get(port, "/api/map"))
        assert refused.status == 404 and "diverged" in refused.error
        assert get(port, "/api/run").status == 200
        assert "diverged" in get(port, "/api/point/0").error


def test_colors_by_label_cluster_and_purity(explorer):
    label = explorer.colors("label", epoch=2)
    assert label["names"] == ["0", "1", "2"] and sum(label["sizes"]) == 60
    assert label["values"] == [i % 3 for i in range(60)]
    cluster = explorer.colors("cluster", epoch=0)
    assert cluster["names"] == ["cluster 1", "cluster 2", "cluster 3"]
    assert len(cluster["values"]) == 60
    purity = explorer.colors("purity", epoch=2)
    rows, _ = analysis.neighbors(explorer.run, 2, 10)
    naive = [sum(int(j) % 3 == i % 3 for j in rows[i]) / 10 for i in range(60)]
    assert purity["values"] == pytest.approx(naive) and (purity["low"], purity["high"]) == (0, 1)
    with pytest.raises(ValueError, match="got 'taste', need label, cluster, purity"):
        explorer.colors("taste", epoch=2)
    with pytest.raises(MissingData, match="no snapshot after epoch 1; there are 0, 2"):
        explorer.colors("purity", epoch=1)


def test_a_point_has_its_neighbors_at_each_snapshot_and_which_were_kept(explorer, run):
    point = explorer.point(ORIGINAL)
    assert (point["index"], point["label"], point["title"]) == (ORIGINAL, "1", f"#{ORIGINAL}")
    previous = set()
    for snapshot in point["snapshots"]:
        state = torch.load(run / "snapshots" / f"epoch-{snapshot['epoch']:04d}.pt")
        unit = F.normalize(state["features"].float(), dim=1)
        similarity = (unit @ unit[ORIGINAL]).tolist()
        others = (i for i in range(60) if i != ORIGINAL)
        expected = sorted(others, key=lambda i: -similarity[i])[:10]
        assert snapshot["rows"] == expected and expected[0] == COPY
        distances = [1 - similarity[i] for i in expected]
        assert snapshot["distances"] == pytest.approx(distances, abs=1e-5)
        assert snapshot["kept"] == [i in previous for i in expected]
        assert snapshot["same_label"] == [i % 3 == ORIGINAL % 3 for i in expected]
        previous = set(expected)
    kept = point["snapshots"][1]["kept"]
    assert any(kept) and not all(kept)


def test_without_labels_there_are_clusters(tmp_path):
    source = write_arrays(tmp_path / "p.npz", labels=False)
    folder = write_live_run(tmp_path / "run", source)
    with serving_explorer(Explorer(Run(folder))) as port:
        state = get(port, "/api/run").json
        assert state["colorings"] == [["cluster", "cluster"]]
        assert [source["name"] for source in state["sources"]] == ["train"]
        assert get(port, "/api/images").json["labels"] is None
        point = get(port, "/api/point/0").json
        assert point["label"] is None and point["snapshots"][0]["same_label"] is None
        assert len(get(port, "/api/colors?by=cluster&epoch=0").json["names"]) == 10
        refused = get(port, "/api/colors?by=purity&epoch=0")
        assert refused.status == 404 and "no labels" in refused.error
        assert get(port, "/api/prepare?in=validation&epoch=0").error == (
            "got the images 'validation', need one of snapshot, train"
        )


@pytest.mark.filterwarnings("ignore:.*are unlabeled:UserWarning")
def test_images_of_unknown_label_have_no_purity(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"": 12}, size=(16, 16))
    names = [f"{i:03d}.jpg" for i in range(12)]
    lines = [f"{name},{'ab'[i % 2] if i < 8 else ''}" for i, name in enumerate(names)]
    (root / "labels.csv").write_text("\n".join(["file,label", *lines]))
    explorer = Explorer(Run(write_live_run(tmp_path / "run", root, validation="none")))
    purity = explorer.colors("purity", epoch=0)["values"]
    assert [value is None for value in purity] == [i >= 8 for i in range(12)]
    assert explorer.colors("label", epoch=0)["values"][8:] == [None] * 4
    assert explorer.point(9)["snapshots"][0]["same_label"] is None


def test_snapshot_images_without_a_label_offer_no_colors_by_label(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "p.npz", x_train=pixels, y_train=np.where(np.arange(60) < 40, -1, 0))
    folder = write_live_run(
        tmp_path / "run", tmp_path / "p.npz", snapshot_images=30, validation="none"
    )
    assert Explorer(Run(folder)).state()["colorings"] == [("cluster", "cluster")]


def test_a_run_whose_images_are_gone_can_still_be_explored(tmp_path):
    source = write_arrays(tmp_path / "p.npz")
    folder = write_live_run(tmp_path / "run", source)
    upload = encode_png(read_pixels(folder, 7))
    source.unlink()
    with serving_explorer(Explorer(Run(folder))) as port:
        state = get(port, "/api/run").json
        assert "--data SOURCE" in state["missing"] and state["sources"] == []
        assert get(port, "/api/map").status == 200
        assert get(port, "/api/point/0").json["title"] == "#0"
        assert "--data SOURCE" in get(port, "/thumbnail/train/0").error
        assert get(port, "/api/rank?epoch=2").status == 200
        found = post(port, "/api/search?epoch=2", upload).json["found"]
        assert found[0]["index"] == 7
        assert post(port, "/api/search?epoch=2&in=train", upload).status == 404
    moved = write_arrays(tmp_path / "moved.npz")
    assert Explorer(Run(folder, data=str(moved))).missing == ""


def test_opening_a_large_array_reads_only_images_that_are_shown(tmp_path, monkeypatch):
    source = tmp_path / "many.npy"
    np.lib.format.open_memmap(source, "w+", np.uint8, (100_000, 16, 16, 3)).flush()
    folder = write_live_run(tmp_path / "run", source, epochs=(0,), validation="none")
    read = []
    original = ArraySource.read_batch

    def read_batch(self, indices):
        read.extend(indices.tolist())
        return original(self, indices)

    monkeypatch.setattr(ArraySource, "read_batch", read_batch)
    explorer = Explorer(Run(folder))
    assert explorer.state()["sources"][0]["count"] == 100_000
    explorer.map()
    explorer.thumbnail("train", 99_999, 64)
    assert read == [99_999]


def test_opening_a_folder_reads_only_images_that_are_shown(tmp_path, make_images, monkeypatch):
    root = make_images(tmp_path / "photos", {"a": 100, "b": 100}, size=(16, 16))
    folder = write_live_run(tmp_path / "run", root, epochs=(0,), validation="none")
    read = []
    original = FolderSource.read
    monkeypatch.setattr(FolderSource, "read", lambda self, i: read.append(i) or original(self, i))
    explorer = Explorer(Run(folder))
    assert explorer.state()["sources"][0]["count"] == 200
    explorer.map()
    explorer.thumbnail("train", 199, 64)
    assert read == [199]


@pytest.mark.parametrize("labels", [True, False])
def test_the_first_image_is_nearest_to_the_center_of_the_largest_group(tmp_path, labels):
    folder = write_live_run(
        tmp_path / "run", write_arrays(tmp_path / "p.npz", 58, labels=labels), epochs=(2,)
    )
    explorer = Explorer(Run(folder))
    features = explorer.run.snapshot(2).features
    groups = explorer.colors("label" if labels else "cluster", epoch=2)["values"]
    sizes = {group: groups.count(group) for group in set(groups)}
    members = [row for row in range(58) if groups[row] == max(sizes, key=lambda one: sizes[one])]
    assert not labels or len(members) == 20  # the first of three classes has one more
    center = sum(features[row] for row in members) / len(members)
    expected = max(members, key=lambda row: float(features[row] @ center))
    assert explorer.images()["typical"] == expected


def test_a_sheet_has_the_thumbnails_of_its_rows_in_order(port, explorer):
    rows = [7, 3, 12, 1, 0, 2, 40, 5, 59]
    answer = get(port, f"/sheet?rows={','.join(map(str, rows))}&v={explorer.cache_key}")
    assert answer.headers["Content-Type"] == "image/jpeg"
    assert "immutable" in answer.headers["Cache-Control"]
    sheet = np.asarray(Image.open(io.BytesIO(answer.body))).astype(int)
    assert sheet.shape == (128, 512, 3) and sheet[64:, 64:].mean() < 3  # nothing behind the last
    for position, row in enumerate(rows):
        line, column = divmod(position, 8)
        tile = sheet[64 * line : 64 * line + 64, 64 * column : 64 * column + 64]
        expected = explorer.run.thumbnail(row, 64).numpy().astype(int)
        assert abs(tile.mean((0, 1)) - expected.mean((0, 1))).max() < 3
        assert abs(tile - expected).mean() < 25  # color is compressed


@pytest.mark.parametrize(
    ("rows", "status", "message"),
    [
        ("", 400, "need up to 64"),
        ("1,x", 400, "need up to 64"),
        (",".join(["1"] * 65), 400, "need up to 64"),
        ("60", 404, "from 0 to 59"),
    ],
)
def test_a_sheet_of_other_rows_is_refused(port, rows, status, message):
    answer = get(port, f"/sheet?rows={rows}")
    assert answer.status == status and message in answer.error


def test_beyond_the_landmarks_images_are_placed_and_assigned(run, monkeypatch):
    whole = Explorer(Run(run))
    clusters = whole.colors("cluster", epoch=2)["values"]
    monkeypatch.setattr(model, "LANDMARKS", 30)
    explorer = Explorer(Run(run))
    first = explorer.map()
    assert first["kind"] == "principal components" and len(first["rows"]) == 30
    answer = wait_for(lambda: ((now := explorer.map())["progress"] is None and now) or None)
    assert (answer["kind"], answer["placed"]) == ("t-SNE", 30)
    assert answer["rows"] == list(range(60))
    points = np.array(answer["points"][2]).reshape(60, 2)
    embedded = np.array(first["rows"])
    assert np.isfinite(points).all() and abs(points).max() <= 1
    if ORIGINAL in embedded and COPY not in embedded:
        assert np.allclose(points[COPY], points[ORIGINAL], atol=1e-3)
    assigned = explorer.colors("cluster", epoch=2)["values"]
    assert set(assigned) <= set(clusters) and len(assigned) == 60
    features = explorer.run.snapshot(2).features
    for row in range(60):  # with the group whose mean direction is nearest
        means = {
            group: sum(features[i] for i in embedded if assigned[i] == group)
            for group in {assigned[i] for i in embedded}
        }
        scores = {group: float(features[row] @ mean / mean.norm()) for group, mean in means.items()}
        if row not in embedded:
            assert assigned[row] == max(scores, key=lambda group: scores[group])
