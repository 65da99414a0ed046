"""Figures by their content: which image stands where, which number a line holds, what lacks."""

import functools
import itertools
import json
import re
from pathlib import Path

import matplotlib.colors
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.manifold import TSNE, trustworthiness
from torch.nn import functional as F

from meanshift.config import Config, Data, Encoder, Method, Train
from meanshift.data import open_source
from meanshift.methods.memory_bank import MemoryBank
from meanshift.ops.image import MEAN, STD
from meanshift.reproduce.laps import Laps
from meanshift.runtime import checkpoint
from meanshift.runtime.rng import ONLINE, TARGET
from meanshift.runtime.run_directory import RunDirectory
from meanshift.transforms.augment import Address, TwoViews, draw_boxes
from meanshift.transforms.replay import replay_views
from meanshift.viz import figures, style
from meanshift.viz import tsne as maps
from meanshift.viz.figures import (
    NAMES,
    Choices,
    accuracy,
    clusters,
    cost,
    curves,
    draw_figures,
    neighbors,
    purity,
    tsne,
    views,
)
from meanshift.viz.run_reader import MissingData, Run, differing, open_runs

SIDE, CLASSES = 16, 3
COLORS = [(30 + 20 * (i % 10), 25 * (i // 10), 255 - 20 * (i % 7)) for i in range(60)]
BASE = Config(
    data=Data(image_size=SIDE, held_out="none"),
    encoder=Encoder(name="resnet10", stem="small", width=0.125),
    method=Method(k=5, bank_size=64),
    train=Train(epochs=4, batch_size=4, device="cpu"),
)


@pytest.fixture
def solid(tmp_path):
    """60 images, each of a color of its own, in three classes."""
    pixels = np.ones((60, SIDE, SIDE, 3), np.uint8) * np.array(COLORS, np.uint8)[:, None, None]
    labels = np.arange(60) % CLASSES
    np.savez(tmp_path / "solid.npz", x_train=pixels, y_train=labels)
    np.savez(tmp_path / "unlabeled.npz", x_train=pixels)
    return tmp_path / "solid.npz"


@pytest.fixture
def make(tmp_path, solid):
    """Writes a run directory by hand; settings as `method__k=10`."""

    def make_run(name="run", *, lines=(), warnings=(), moments=None, results=None, **settings):
        folder = tmp_path / name
        for part in ("snapshots", "results"):
            (folder / part).mkdir(parents=True)
        chosen = {key.replace("__", "."): value for key, value in settings.items()}
        config = BASE.with_overrides({"data.source": str(solid), **chosen})
        (folder / "config.json").write_text(config.to_json())
        (folder / "environment.json").write_text(json.dumps({"steps": 10 * config.train.epochs}))
        for file, records in {"metrics.jsonl": lines, "warnings.jsonl": warnings}.items():
            (folder / file).write_text("".join(json.dumps(r) + "\n" for r in records))
        for epoch, features in (moments or {}).items():
            add_moment(folder, epoch, features)
        for result, held in (results or {}).items():
            RunDirectory(folder).save_result(result, held)
        return folder

    return make_run


def add_moment(folder, epoch, features, indices=None):
    indices = torch.arange(len(features)) if indices is None else indices
    state = {"format": 1, "epoch": epoch, "indices": indices, "weights": {}}
    path = folder / "snapshots" / f"epoch-{epoch:04d}.pt"
    checkpoint.write(path, {**state, "features": features, "embeddings": features})


def random_features(seed, count=60, dim=8):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def told(**figures):
    """Lines of four epochs of ten steps; each figure is a function of the epoch."""
    return [
        {"kind": "train", "step": 10 * e, "epoch": e, **{n: f(e) for n, f in figures.items()}}
        for e in range(1, 5)
    ]


def monitored(**figures):
    names = {"one": "1-NN", "twenty": "20-NN"}
    more = {names[name]: value for name, value in figures.items()}
    return [{"kind": "monitor", "step": 40, "epoch": 4, **more}]


def draw_png(folder, name, out, **choices):
    """Draw one figure through the contract and read its PNG back."""
    (outcome,) = draw_figures([Run(folder)], out, names=[name], choices=Choices(**choices))
    assert not outcome.lacks, outcome.lacks
    return np.asarray(Image.open(outcome.files[0]).convert("RGB"))


def which(png, top, left, pitch, row, column, size=64):
    """The index of the image whose color fills a cell; None for white."""
    y, x = top + row * pitch, left + column * pitch
    cell = png[y : y + size, x : x + size].reshape(-1, 3)
    assert (cell == cell[0]).all(), "a cell holds one image, pixel for pixel"
    color = tuple(int(value) for value in cell[0])
    return None if color == (255, 255, 255) else COLORS.index(color)


def nearest_by_hand(features, query, count):
    unit = features.double().numpy()
    unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    near = np.argsort(-(unit @ unit[query]))
    return [int(i) for i in near if i != query][:count]


def words_of(drawing):
    return "\n".join(text.get_text() for text in drawing.figure.findobj(match=_is_text))


def _is_text(artist):
    return hasattr(artist, "get_text")


def titles(drawing):
    return [axes.get_title("left") for axes in drawing.figure.axes if axes.axison]


# Neighbors


def test_neighbors_stand_in_their_block_and_order(make, tmp_path):
    moments = {0: random_features(0), 2: random_features(1), 4: random_features(2)}
    png = draw_png(make(moments=moments), "neighbors", tmp_path, rows=5, columns=4)
    place = {"top": 72, "left": 8, "pitch": 70}
    queries = [which(png, **place, row=row, column=0) for row in range(5)]
    assert len(set(queries)) == 5
    for row, query in enumerate(queries):
        for block, features in enumerate(moments.values()):
            assert which(png, **place, row=row, column=1 + 5 * block) is None
            found = [which(png, **place, row=row, column=2 + 5 * block + c) for c in range(4)]
            assert found == nearest_by_hand(features, query, 4)


def test_queries_are_spread_over_the_classes(make):
    run = Run(make(moments={4: random_features(0)}))
    for seed in range(8):
        drawing = neighbors.draw([run], Choices(rows=6, columns=1, seed=seed))
        sheet = drawing.figure.axes[0].images[0].get_array()
        queries = [COLORS.index(tuple(map(int, sheet[70 * row, 0]))) for row in range(6)]
        assert len(set(queries)) == 6
        for three in (queries[:3], queries[3:]):
            assert {query % CLASSES for query in three} == {0, 1, 2}


def test_neighbors_follow_the_probe_and_not_the_source(make, tmp_path):
    folder, features = make(), random_features(3, count=10)
    indices = torch.arange(59, 49, -1)
    add_moment(folder, 4, features, indices)
    png = draw_png(folder, "neighbors", tmp_path, rows=2, columns=3)
    for row in range(2):
        query = which(png, 72, 8, 70, row, 0)
        found = [which(png, 72, 8, 70, row, 2 + c) for c in range(3)]
        by_hand = nearest_by_hand(features, indices.tolist().index(query), 3)
        assert found == indices[by_hand].tolist()


def test_the_share_of_the_same_class_is_of_the_whole_probe(make):
    run = Run(make(moments={4: random_features(0)}))
    labels = np.arange(60) % CLASSES
    near = [nearest_by_hand(random_features(0), query, 5) for query in range(60)]
    share = np.mean([labels[found] == labels[query] for query, found in enumerate(near)])
    drawing = neighbors.draw([run], Choices(rows=2))
    assert f"epoch 4: {share:.0%} same class" in words_of(drawing)
    underlined = len(drawing.figure.axes[0].lines)
    drawing = neighbors.draw([run], Choices(rows=60))
    assert len(drawing.figure.axes[0].lines) == round(share * 300) > underlined


def test_unknown_labels_are_no_class(make, tmp_path):
    pixels = np.zeros((6, SIDE, SIDE, 3), np.uint8)
    np.savez(tmp_path / "some.npz", x_train=pixels, y_train=np.array([0, 0, 0, -1, -1, -1]))
    moments = {1: random_features(0, count=6)}
    run = Run(make(moments=moments, data__source=str(tmp_path / "some.npz")))
    assert run.pure(1, 5).tolist() == pytest.approx([0.4] * 3 + [0] * 3)
    assert "40% same class" in words_of(neighbors.draw([run], Choices()))


# Clusters


def clustered(solid, assigned, **card):
    return {"cluster": {"figures": {}, "card": {"data": str(solid), **card}}}, {
        "assigned": assigned,
        "image": np.array([f"#{i}" for i in range(60)])[::-1].copy(),
    }


def test_each_row_of_clusters_holds_one_cluster(make, solid, tmp_path):
    assigned = np.repeat([0, 1, 3, 4], [20, 25, 12, 3])  # of the titles, which run backwards
    results, arrays = clustered(solid, assigned)
    folder = make(results=results)
    np.savez(folder / "results" / "cluster.npz", **arrays)
    members = {c: {59 - i for i in np.flatnonzero(assigned == c)} for c in (0, 1, 3, 4)}
    png = draw_png(folder, "clusters", tmp_path, columns=5)
    rows = [[which(png, 44, 190, 68, row, c) for c in range(5)] for row in range(4)]
    for row, cluster in zip(rows, members, strict=True):
        shown = {index for index in row if index is not None}
        assert len(shown) == min(5, len(members[cluster]))
        assert shown <= members[cluster]
    drawing = clusters.draw([Run(folder)], Choices(columns=5))
    sizes = re.findall(r"(\d+)% (\d)\n(\d+) images", words_of(drawing))
    assert [int(size) for *_, size in sizes] == [20, 25, 12, 3]
    for (share, label, _), inside in zip(sizes, members.values(), strict=True):
        classes = [index % CLASSES for index in inside]
        counts = [classes.count(c) for c in range(CLASSES)]
        assert counts[int(label)] == max(counts)
        assert int(share) == round(100 * max(counts) / len(inside))
    other = draw_png(folder, "clusters", tmp_path / "other", columns=5, seed=1)
    assert (other != png).any()


def test_clusters_of_other_images_are_refused(make, solid):
    results, arrays = clustered(solid, np.zeros(60, int), data="elsewhere.npz")
    folder = make(results=results)
    np.savez(folder / "results" / "cluster.npz", **arrays)
    with pytest.raises(MissingData, match=r"of elsewhere.npz.*meanshift evaluate cluster"):
        clusters.draw([Run(folder)], Choices())


# Views


@pytest.fixture
def noisy(tmp_path):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (20, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(tmp_path / "noisy.npz", x_train=pixels)
    return tmp_path / "noisy.npz"


@pytest.mark.parametrize("same_view", [False, True])
def test_views_are_exactly_those_of_training(make, noisy, tmp_path, same_view):
    folder = make(data__source=str(noisy), method__same_view=same_view, train__seed=7)
    png = draw_png(folder, "views", tmp_path, rows=3, epochs=(2, 4))
    drawing = views.draw([Run(folder)], Choices(rows=3, epochs=(2, 4)))
    source, config = open_source(str(noisy))["train"], Run(folder).config
    two_views = TwoViews(config.views, 7, SIDE)
    size, top, left, pitch = 128, 100, 8, 136
    found = []
    for index in range(20):  # which images were chosen: those whose views are there
        ids = torch.tensor([index])
        shown = []
        for epoch in (1, 3):
            for view in two_views.finish(source.gather(ids), epoch, ids):
                mean, deviation = torch.tensor(MEAN), torch.tensor(STD)
                pixels = view[0].permute(1, 2, 0) * deviation + mean
                shown.append((pixels.clamp(0, 1) * 255).round().byte().numpy())
        row = len(found)
        y = top + row * pitch
        cells = [png[y : y + size, left + c * pitch : left + c * pitch + size] for c in range(1, 5)]
        if row < 3 and all(
            (cell == one.repeat(8, 0).repeat(8, 1)).all()
            for cell, one in zip(cells, shown, strict=True)
        ):
            found.append(index)
    assert len(found) == 3
    words = words_of(drawing)
    assert [word for word in words.split("\n") if word.startswith("epoch")] == [
        "epoch 2",
        "epoch 4",
    ]
    assert ("both encoders see the same view" in words) == same_view
    target = "strong" if same_view else "weak"
    assert f"target ({target})" in words and "online (strong)" in words
    # The crops are those of the first chosen epoch, the target's solid.
    patches = drawing.figure.axes[0].patches
    streams = [ONLINE, ONLINE] if same_view else [TARGET, ONLINE]
    for at, (stream, dashes) in enumerate(zip(streams, ["-", "--"], strict=True)):
        sizes = torch.full((3,), SIDE)
        address = Address(7, 1, torch.tensor(found), stream)
        boxes = 8 * draw_boxes(config.views, address, sizes, sizes)
        for row, (box, patch) in enumerate(zip(boxes, patches[3 * at :], strict=False)):
            corner = (patch.get_y() - row * pitch, patch.get_x())
            assert [*corner, patch.get_height(), patch.get_width()] == box.tolist()
            assert patch.get_linestyle() == dashes


def test_views_of_large_images_of_any_shape_keep_their_shape(make, make_images, tmp_path):
    photos = make_images(tmp_path / "photos", {"": 4}, size=(40, 80))
    drawing = views.draw([Run(make(data__source=str(photos)))], Choices(rows=2))
    sheet = drawing.figure.axes[0].images[0].get_array()
    whole = sheet[:128, :128]
    assert (whole[:32] == 255).all() and (whole[96:] == 255).all()
    assert (whole[36:92] != 255).any(2).mean() > 0.9
    for patch in drawing.figure.axes[0].patches:
        assert patch.get_x() >= 0 and patch.get_x() + patch.get_width() <= 128 + 1e-3
        assert patch.get_y() % 136 >= 32 - 1e-3


def test_views_drawn_again_keep_whole_images_only_when_wished_for(make_images, tmp_path):
    source = open_source(str(make_images(tmp_path / "photos", {"": 5}, size=(40, 56))))["train"]
    ids, two_views = torch.tensor([3, 0, 4]), TwoViews(BASE.views, BASE.train.seed, SIDE)
    images = [source.read(index) for index in ids.tolist()]
    truth = two_views.finish(two_views.crop(images, 2, ids), 2, ids)
    for keep in (False, True):
        drawn = replay_views(source, ids, epoch=2, config=BASE, keep=keep)
        assert len(drawn.images) == (3 if keep else 0)
        assert drawn.ids.tolist() == [3, 0, 4] and drawn.sizes.tolist() == [[40, 56]] * 3
        assert torch.equal(drawn.target, truth[0]) and torch.equal(drawn.online, truth[1])


def test_views_count_epochs_as_people_do(make):
    run = Run(make())
    for epochs in [(0,), (5,), (1, 9)]:
        with pytest.raises(MissingData, match="1 to 4"):
            views.draw([run], Choices(epochs=epochs))


# Curves


def test_curves_hold_the_lines_as_they_were_written(make):
    lines = told(loss=lambda e: 1 / e, lr=lambda e: 0.1 * e, agreement=lambda e: e / 10)
    one = make("one", lines=lines + monitored(one=20.0, twenty=30.0))
    two = make("two", lines=told(loss=lambda e: 2 / e))
    drawing = curves.draw(open_runs([one, two]), Choices())
    names = ["Loss", "Learning rate", "Agreement of the views", "20-NN (1-NN dashed), %"]
    assert titles(drawing) == names
    loss, lr, *_, knn = (axes for axes in drawing.figure.axes if axes.axison)
    assert [list(line.get_ydata()) for line in loss.lines] == [
        [1 / e for e in range(1, 5)],
        [2 / e for e in range(1, 5)],
    ]
    assert list(loss.lines[0].get_xdata()) == [1, 2, 3, 4]
    assert [line.get_color() for line in loss.lines] == list(style.COLORS[:2])
    assert len(lr.lines) == 1
    dashes = {line.get_linestyle(): list(line.get_ydata()) for line in knn.lines}
    assert dashes == {"-": [30.0], "--": [20.0]}
    legend = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert legend == ["one", "two"]


def test_a_collapse_is_marked_where_it_was_warned_of(make):
    warned = [
        {"step": 5, "kind": "machine", "message": "m"},
        {"step": 25, "kind": "collapse", "message": "c"},
    ]
    lines = told(loss=lambda e: e, effective_rank=lambda e: e)
    drawing = curves.draw([Run(make(lines=lines, warnings=warned))], Choices())
    for axes in drawing.figure.axes:
        marks = [line for line in axes.lines if line.get_color() == style.ALARM]
        assert [list(line.get_xdata()) for line in marks] == [[2.5, 2.5]]
    assert words_of(drawing).count("collapse") == 1
    assert "collapse warned of at epoch 2.50" in drawing.text


# Purity


def pure(level):
    return told(purity=lambda e: level * e)


def test_purity_by_k_and_by_views(make):
    probed = [
        {
            "kind": "snapshot",
            "step": 10 * e,
            "epoch": e,
            "purity_weak": e / 8,
            "purity_strong": e / 9,
        }
        for e in (2, 4)
    ]
    folders = [
        make("a", lines=pure(0.1)),
        make("b", lines=pure(0.2), method__k=10),
        make("c", lines=pure(0.05), method__target_view="strong"),
        make("d", lines=pure(0.07) + probed, method__k=10, method__target_view="strong"),
        make("byol-asym", lines=told(loss=lambda e: e), method__k=1),
    ]
    drawing = purity.draw(open_runs(folders), Choices())
    panels = drawing.figure.axes
    assert titles(drawing) == [
        "Purity by k",
        "Purity by views (target/online)",
        "Target's purity by weak and strong views",
    ]
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in panels]
    assert legends == [["k 5", "k 10"], ["w/s", "s/s"], ["weak", "strong"]]
    assert [list(line.get_ydata()) for line in panels[0].lines] == [
        pytest.approx([0.1, 0.2, 0.3, 0.4]),
        pytest.approx([0.2, 0.4, 0.6, 0.8]),
    ]
    assert list(panels[2].lines[0].get_xdata()) == [2, 4]
    assert [list(line.get_ydata()) for line in panels[2].lines] == [[0.25, 0.5], [2 / 9, 4 / 9]]
    # Without a second k, or a second pair of views, the panel goes.
    assert titles(purity.draw(open_runs(folders[:2]), Choices())) == ["Purity by k"]
    by_views = purity.draw(open_runs([folders[0], folders[2]]), Choices())
    assert titles(by_views) == ["Purity by views (target/online)"]
    assert titles(purity.draw(open_runs(folders[1:3]), Choices())) == ["Purity"]
    # Neither comparison must hold the first run, and a run keeps its color in every panel.
    later = [make("lone", lines=pure(0.01), method__k=20), folders[0], folders[2]]
    drawing = purity.draw(open_runs(later), Choices())
    assert titles(drawing) == ["Purity by k", "Purity by views (target/online)"]
    colors = [[line.get_color() for line in axes.lines] for axes in drawing.figure.axes]
    first, second, third = style.COLORS[:3]
    assert colors == [[second, first], [second, third]]


def test_purity_of_seeds_is_a_mean_with_a_band(make):
    folders = [make(f"s{seed}", lines=pure(0.1 + seed / 10), train__seed=seed) for seed in (0, 1)]
    (axes,) = purity.draw(open_runs(folders), Choices()).figure.axes
    (line,) = axes.lines
    assert line.get_ydata() == pytest.approx([0.15, 0.3, 0.45, 0.6])
    assert "2 seeds" in line.get_label()
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    wide = np.std([0.4, 0.8], ddof=1)
    assert (band.max(), band.min()) == pytest.approx((0.6 + wide, 0.15 - wide / 4))
    other = make("other", lines=pure(0.3), optim__lr=0.01)
    (axes,) = purity.draw(open_runs([*folders, other]), Choices()).figure.axes
    assert [line.get_label() for line in axes.lines] == ["lr 0.05 (2 seeds)", "lr 0.01"]


# Accuracy


def knn(twenty):
    return {"knn": {"figures": {"1-NN": 1.0, "20-NN": twenty}, "card": {}}}


def test_accuracy_by_bank_size_and_k(make):
    done = told(loss=lambda e: e)
    folders = [
        make("a", lines=done, results=knn(40.0)),
        make("a1", lines=done, results=knn(44.0), train__seed=1),
        make("b", lines=done, results=knn(50.0), method__bank_size=256),
        make("c", lines=done, results=knn(45.0), method__k=10),
        make("byol-asym", lines=done, results=knn(30.0), method__k=1, method__name="byol-asym"),
        make("alone", lines=done, results=knn(99.0), method__k=20, optim__lr=0.5),
        make("young", lines=done[:2], results=knn(5.0), method__k=2),
    ]
    drawing = accuracy.draw(open_runs(folders), Choices())
    assert titles(drawing) == ["Accuracy by bank size", "Accuracy by k"]
    by_size, by_k = (axes.containers for axes in drawing.figure.axes)
    assert [list(bars.lines[0].get_xdata()) for bars in by_size] == [[64, 256]]
    assert list(by_size[0].lines[0].get_ydata()) == [42, 50]
    assert list(by_k[0].lines[0].get_xdata()) == [1, 5, 10]
    assert list(by_k[0].lines[0].get_ydata()) == [30, 42, 45]
    assert len(by_k) == 1, "a run that differs in more is on no line, an unfinished one neither"
    bar = by_k[0].lines[2][0].get_segments()[1][:, 1]
    assert bar.tolist() == pytest.approx([42 - 8**0.5, 42 + 8**0.5])
    assert drawing.figure.axes[0].get_xscale() == "log"
    assert "judged" in drawing.figure.axes[0].get_ylabel()


def test_accuracy_never_mixes_two_measures(make):
    done = told(loss=lambda e: e)
    folders = [
        make("a", lines=done + monitored(twenty=35.0), results=knn(40.0)),
        make("b", lines=done + monitored(twenty=36.0), method__k=10),
    ]
    drawing = accuracy.draw(open_runs(folders), Choices())
    (bars,) = drawing.figure.axes[0].containers
    assert list(bars.lines[0].get_ydata()) == [35, 36]
    assert "20-NN accuracy, % (while training)" in drawing.text


# Maps


def drifting(count=150, epochs=3):
    """Ten clusters whose directions gain and lose weight from epoch to epoch."""
    generator = torch.Generator().manual_seed(0)
    points = 2 * torch.randn(10, 16, generator=generator)[torch.arange(count) % 10]
    points = points + torch.randn(count, 16, generator=generator)
    weights = 0.9 + 0.2 * torch.rand(epochs, 16, generator=generator)
    return {epoch: F.normalize(points * weights[epoch], dim=1) for epoch in range(epochs)}


@pytest.fixture
def drifted(make, tmp_path):
    pixels = np.zeros((150, SIDE, SIDE, 3), np.uint8)
    np.savez(tmp_path / "many.npz", x_train=pixels, y_train=np.arange(150) % 15)
    return make("drifted", moments=drifting(), data__source=str(tmp_path / "many.npz"))


def scaled(points):
    points = np.asarray(points, dtype=np.float64)
    points = points - points.mean(0)
    return points / np.sqrt((points**2).sum(1).mean())


def moved(drawn):
    return np.median([np.linalg.norm(b - a, axis=1) for a, b in itertools.pairwise(drawn)])


def test_maps_are_aligned_and_as_true_as_others(drifted):
    drawn, alone = maps.draw_maps(Run(drifted)), []
    for (epoch, features), one in zip(drifting().items(), drawn, strict=True):
        rows = features[one.rows].numpy()
        other = TSNE(random_state=epoch, init="random").fit_transform(rows)
        alone.append(torch.from_numpy(other - other.mean(0)))
        assert trustworthiness(rows, one.points.numpy()) > trustworthiness(rows, alone[-1]) - 0.02
        assert one.epoch == epoch
    ours = moved([scaled(one.points) for one in drawn])
    assert ours < 0.35 * moved([scaled(points) for points in alone])
    fitted = list(itertools.accumulate(alone, lambda before, now: maps._turned(now, before)))
    assert ours < 0.6 * moved([scaled(points) for points in fitted]), "even turned to fit"
    every = torch.cat([one.points for one in drawn])
    assert float(every.abs().max()) == pytest.approx(1, abs=1e-4)


def test_a_map_begins_at_the_one_before_and_is_turned_to_fit(drifted, monkeypatch):
    begun = []
    with monkeypatch.context() as patched:
        patched.setattr(maps, "_tsne", lambda x, before: begun.append(before) or x[:, :2])
        maps.draw_maps(Run(drifted), most=90)
    assert begun[0] is None and len(begun) == 3
    for before, features in zip(begun[1:], drifting().values(), strict=False):
        near = torch.cdist(before, features[:, :2]).amin(1)
        assert len(before) == 90 and float(near.max()) < 1e-3

    starts, turn = [], torch.tensor([[0.6, 0.8], [0.8, -0.6]])  # a turn and a mirror
    before = random_features(0, dim=2)
    before -= before.mean(0)

    def turned(fitter, _):
        starts.append(fitter.init)
        return (before @ turn + 3).numpy()

    monkeypatch.setattr(TSNE, "fit_transform", turned)
    assert torch.allclose(maps._tsne(random_features(1), before), before, atol=1e-5)
    assert (starts[0] == before.numpy()).all()


def test_maps_are_kept_and_a_new_snapshot_leaves_them(drifted, monkeypatch):
    before, asked, make_one = maps.draw_maps(Run(drifted)), [], maps._tsne
    monkeypatch.setattr(maps, "_tsne", lambda *given: asked.append(given) or make_one(*given))
    files = {path.name: path.read_bytes() for path in (drifted / "maps").iterdir()}
    again = maps.draw_maps(Run(drifted))
    assert not asked
    assert all(torch.equal(a.points, b.points) for a, b in zip(before, again, strict=True))
    add_moment(drifted, 9, drifting(epochs=4)[3])
    after = maps.draw_maps(Run(drifted))
    assert len(asked) == 1 and len(after) == 4
    assert files.items() <= {p.name: p.read_bytes() for p in (drifted / "maps").iterdir()}.items()
    for old, new in zip(before, after, strict=False):
        assert scaled(old.points) == pytest.approx(scaled(new.points), abs=1e-4)


def test_tsne_has_a_panel_an_epoch_and_ten_classes_at_the_most(drifted, monkeypatch):
    run, fewer = Run(drifted), functools.partial(maps.draw_maps, most=100)
    monkeypatch.setattr(tsne, "draw_maps", fewer)
    drawing = tsne.draw([run], Choices(seed=3))
    assert titles(drawing) == ["untrained", "epoch 1", "epoch 2"]
    legend = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert legend[-1] == "others" and len(legend) == 11
    inks = dict(zip(legend, [*style.COLORS, style.RULE], strict=True))
    labels = run.labels.tolist()
    for axes, one in zip(drawing.figure.axes, fewer(run), strict=True):
        (points,) = axes.collections
        named = {
            tuple(point): matplotlib.colors.to_hex(color)
            for point, color in zip(
                np.asarray(points.get_offsets(), np.float32).tolist(),
                points.get_facecolors(),
                strict=True,
            )
        }
        for row, point in zip(one.rows.tolist(), one.points.tolist(), strict=True):
            assert named[tuple(point)] == inks.get(str(labels[row]), style.RULE)
    other = tsne.draw([run], Choices(seed=4)).figure.legends[0].get_texts()
    assert [text.get_text() for text in other] != legend


def test_tsne_without_labels_is_colored_by_cluster(make, tmp_path):
    grouped = F.one_hot(torch.arange(60) % 10, 16).float() + 0.01 * random_features(0, dim=16)
    source = str(tmp_path / "unlabeled.npz")
    run = Run(make(moments={4: grouped}, data__source=source))
    drawing = tsne.draw([run], Choices())
    assert titles(drawing) == ["epoch 4"]
    assert "Only one snapshot" in drawing.text and "k-means of the last snapshot" in drawing.text
    legend = drawing.figure.legends[0]
    assert "k-means" in legend.get_title().get_text()
    assert len(legend.get_texts()) == 10
    (points,) = drawing.figure.axes[0].collections
    place = {tuple(p): i for i, p in enumerate(maps.draw_maps(run)[0].points.tolist())}
    offsets = np.asarray(points.get_offsets(), np.float32).tolist()
    pairs = {
        (place[tuple(p)] % 10, tuple(c))
        for p, c in zip(offsets, points.get_facecolors().tolist(), strict=True)
    }
    assert len(pairs) == 10, "a color a group"


def test_tsne_of_a_probe_without_a_label_is_colored_by_cluster(make, tmp_path):
    pixels, labels = np.zeros((60, SIDE, SIDE, 3), np.uint8), np.where(np.arange(60) < 40, -1, 0)
    np.savez(tmp_path / "few.npz", x_train=pixels, y_train=labels)
    moments = {4: random_features(0, count=40)}
    run = Run(make(moments=moments, data__source=str(tmp_path / "few.npz")))
    assert run.source.labeled
    assert "colored by cluster" in tsne.draw([run], Choices()).text


# Cost


@pytest.fixture
def clock(monkeypatch):
    """A phase of a step takes one unit of time, a search one for each 1,024 rows that it reads."""
    read, search = [], MemoryBank.search

    def watched(bank, *given, **more):
        read.append(bank.filled if more.get("filled_only") else len(bank.rows))
        return search(bank, *given, **more)

    def timed(laps, name, work):
        result, took = work(), 1.0
        if name == "search":
            took = read[-1] / 1024
        laps.taken.setdefault(name, []).append(took)
        return result

    monkeypatch.setattr(MemoryBank, "search", watched)
    monkeypatch.setattr(Laps, "time", timed)


@pytest.mark.usefixtures("clock")
def test_bench_cost_feeds_the_cost_table(make, call):
    folder = make(method__same_image="skip", method__bank_size=2048)
    code, out, err = call("bench", "cost", folder, "--rounds", "1")
    assert code == 0, err
    held = Run(folder).results["cost"]
    table = held["card"]["settings"]["table"]
    assert [row["bank"] for row in table] == [1024, 2048, 4096, 16384, 65536, 131072]
    dim = held["card"]["settings"]["dim"]
    for row in table:
        searched = row["bank"] / 1024
        assert row["share"] == pytest.approx(searched / (searched + 7)), "a step has seven phases"
        assert row["gflops"] == pytest.approx(2 * row["bank"] * dim * 4 / 1e9)
        assert row["bytes"] == row["bank"] * dim * 4
        assert f"{row['bank']:,}" in out and f"{row['share']:.2%}" in out
    assert held["figures"]["bank 2048, %"] == pytest.approx(100 * table[1]["share"])
    assert {"versions", "date", "threads", "device"} <= set(held["card"])
    drawing = cost.draw([Run(folder)], Choices())
    bars = [bar.get_width() for bar in drawing.figure.axes[0].patches]
    shares = [row["share"] for row in table]
    assert np.array(bars) / max(bars) == pytest.approx(np.array(shares) / max(shares))
    bold = [t.get_text() for t in drawing.figure.axes[0].texts if t.get_weight() == "bold"]
    assert "2,048" in bold and "4,096" not in bold


def test_bench_cost_refuses_what_it_cannot_mean(make, call):
    folder = make()
    assert "leave out method.k" in call("bench", "cost", folder, "--method.k", "9")[2]
    assert "only cost takes one" in call("bench", "step", folder)[2]
    assert "2 or more" in call("bench", "cost", make("byol-asym", method__k=1))[2]
    assert "--rounds" in call("bench", "cost", folder, "--rounds", "0")[2]
    assert not (folder / "results" / "cost.json").exists()


# What lacks


def test_every_figure_says_what_an_empty_run_lacks(make, tmp_path):
    lacking = {o.name: o.lacks for o in draw_figures([Run(make())], tmp_path / "out")}
    assert list(lacking) == list(NAMES)
    expected = {
        "neighbors": "no snapshots.*--train.snapshots 6",
        "tsne": "no snapshots.*--train.snapshots 6",
        "purity": "no purity.*--method.k 5",
        "accuracy": "0 of 1 runs.*--method.k 10",
        "clusters": "type: meanshift evaluate cluster .*run",
        "curves": "no lines in metrics.jsonl",
        "views": "^$",
        "cost": "type: meanshift bench cost .*run",
    }
    for name, words in expected.items():
        assert re.search(words, lacking[name]), lacking[name]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["views.png", "views.svg"]


def test_images_that_are_gone_or_others_are_asked_for(make, solid, tmp_path):
    results, arrays = clustered(solid, np.zeros(60, int))
    folder = make(moments={1: random_features(0)}, results=results)
    np.savez(folder / "results" / "cluster.npz", **arrays)
    needy = ["neighbors", "tsne", "clusters", "views"]
    fingerprint = Run(folder).source.fingerprint()
    (folder / "environment.json").write_text(json.dumps({"source": fingerprint}))
    assert not any(o.lacks for o in draw_figures([Run(folder)], tmp_path, names=needy))
    solid.rename(tmp_path / "moved.npz")
    for outcome in draw_figures([Run(folder)], tmp_path, names=needy):
        if outcome.name == "tsne":  # features are enough for a map of clusters
            assert outcome.files
        else:
            assert re.search(r"cannot be found.*--data SOURCE", outcome.lacks), outcome
    moved = Run(folder, data=str(tmp_path / "moved.npz"))
    assert not any(o.lacks for o in draw_figures([moved], tmp_path, names=needy))
    np.savez(solid, x_train=np.zeros((70, SIDE, SIDE, 3), np.uint8))
    for outcome in draw_figures([Run(folder)], tmp_path, names=needy):
        if outcome.name != "tsne":
            assert re.search(r"other images than the 70.*--data SOURCE", outcome.lacks), outcome
    (folder / "environment.json").unlink()  # of an older program: too few can still be told
    np.savez(solid, x_train=np.zeros((59, SIDE, SIDE, 3), np.uint8))
    with pytest.raises(MissingData, match="other images than the 59"):
        _ = Run(folder).source


def test_without_labels_or_with_one_image(make, tmp_path):
    source = str(tmp_path / "unlabeled.npz")
    run = Run(make(moments={1: random_features(0)}, data__source=source))
    drawing = neighbors.draw([run], Choices())
    assert "class" not in words_of(drawing) + drawing.text
    with pytest.raises(MissingData, match="no labels"):
        run.pure(1)
    lonely = Run(make("lonely", moments={1: random_features(0, count=1)}))
    with pytest.raises(MissingData, match=r"1 image.*--train.snapshot_images"):
        neighbors.draw([lonely], Choices())
    with pytest.raises(MissingData, match="5 images or more"):
        tsne.draw([lonely], Choices())


def test_an_epoch_without_a_snapshot_is_named(make):
    run = Run(make(moments={0: random_features(0), 4: random_features(1)}))
    for figure in (neighbors, tsne):
        assert titles(tsne.draw([run], Choices(epochs=(4,)))) == ["epoch 4"]
        with pytest.raises(MissingData, match=r"epoch 3; there are 0, 4"):
            figure.draw([run], Choices(epochs=(3,)))


@pytest.mark.parametrize("damage", ["truncated", "stray", "no numbers"])
def test_a_damaged_snapshot_is_named_and_spoils_no_other_figure(make, call, damage):
    folder = make(lines=told(loss=lambda e: 1 / e), moments={0: random_features(0)})
    name = damage_snapshot(folder, damage)
    code, _, err = call("figures", folder, "--only", "neighbors", "curves")
    assert code == 0 and (folder / "figures/curves.png").exists()
    assert (name in err) == (damage != "stray")


def damage_snapshot(folder, damage):
    """Leaves a snapshot as a full disk, a person or a diverged run would; its file's name."""
    if damage == "no numbers":
        add_moment(folder, 4, torch.full((60, 8), torch.nan))
        return "epoch-0004.pt"
    name = "epoch-best.pt" if damage == "stray" else "epoch-0004.pt"
    whole = (folder / "snapshots/epoch-0000.pt").read_bytes()
    (folder / "snapshots" / name).write_bytes(whole[: len(whole) // 2])
    return name


@pytest.mark.parametrize(
    ("flag", "value"), [("--rows", "-1"), ("--columns", "-2"), ("--seed", "1" * 23)]
)
def test_a_senseless_number_is_refused_by_its_flag(make, call, flag, value):
    folder = make(moments={4: random_features(0)})
    code, out, err = call("figures", folder, "--only", "neighbors", "views", flag, value)
    assert (code, out) == (2, "")
    assert f"{flag}: got {value}, need" in err and "Traceback" not in err


# Files


def test_files_carry_their_words_and_are_made_alike(make, solid, tmp_path):
    results, arrays = clustered(solid, np.arange(60) % 4)
    settings = {
        "table": [{"bank": 64, "share": 0.1, "gflops": 1.0, "bytes": 9}],
        "encoder": "e", "image_size": 16, "batch": 4, "k": 5, "dim": 8, "rounds": 1, "bank": 64,
    }  # fmt: skip
    card = {"settings": settings, "device": "cpu", "threads": 1}
    results |= {"cost": {"figures": {}, "card": card}, **knn(30.0)}
    lines = told(loss=lambda e: e, purity=lambda e: e / 9)
    moments = {0: random_features(0), 4: random_features(1)}
    one = make("猫 & $x$", lines=lines, moments=moments, results=results)
    two = make("two", lines=lines, moments=moments, results=results, method__k=10)
    for folder in (one, two):
        np.savez(folder / "results" / "cluster.npz", **arrays)
    made = []
    for out in ("first", "second"):
        outcomes = list(draw_figures(open_runs([one, two]), tmp_path / out))
        assert not [outcome for outcome in outcomes if outcome.lacks]
        made.append({p.name: p.read_bytes() for o in outcomes for p in o.files})
    assert made[0] == made[1]
    together = {"purity", "accuracy", "curves"}
    assert {Path(name).stem for name in made[0]} == together | {
        f"{name}-{run}" for name in set(NAMES) - together for run in ("猫 & $x$", "two")
    }
    assert "t-SNE of 猫 &amp; $x$<" in made[0]["tsne-猫 & $x$.svg"].decode()
    for name in made[0]:
        path = tmp_path / "first" / name
        if path.suffix == ".png":
            told_there = Image.open(path).text
            assert told_there["Title"] and len(told_there["Description"]) > 40
            beside = path.with_suffix(".svg").read_text()
            assert f"<dc:title>{told_there['Title']}</dc:title>" in beside
            assert "<dc:description>" in beside
            assert "date" not in beside.partition("<defs>")[0]


def test_a_figure_begins_at_its_margins(tmp_path):
    image = np.random.default_rng(0).integers(0, 255, (31, 57, 3), dtype=np.uint8)
    figure, _ = style.sheet(image, left=13, top=7, right=5, bottom=3)
    (path, _) = style.save(figure, tmp_path / "x", title="t", text="t")
    png = np.asarray(Image.open(path).convert("RGB"))
    assert png.shape == (41, 75, 3)
    assert (png[7:38, 13:70] == image).all()
    assert style.pixels_of(32) == (32, 2) and style.pixels_of(224) == (64, 1)
    assert style.short("a\nvery long name of a class", 8) == "a very …"


# Reading runs


def test_series_are_by_epoch_and_without_nonsense(make):
    lines = [
        {"kind": "train", "step": 5, "epoch": 1, "loss": 2.0, "purity": float("nan")},
        {"kind": "monitor", "step": 10, "epoch": 1, "1-NN": 12},
        {"kind": "train", "step": 20, "epoch": 2, "loss": 1.0, "purity": None},
    ]
    run = Run(make(lines=lines))
    assert run.steps == 10 and run.done == 2
    assert run.series("loss") == ([0.5, 2.0], [2.0, 1.0])
    assert run.series("1-NN") == ([1.0], [12.0])
    assert run.series("purity") == ([], [])
    assert len(run.records("train")) == 2
    (run.folder / "environment.json").unlink()  # a run of an older program
    assert Run(run.folder).steps == 10


def test_a_file_that_grows_is_read_on_and_one_made_anew_from_its_start(make):
    folder = make(lines=told(loss=lambda e: e)[:2])
    run, path = Run(folder), folder / "metrics.jsonl"
    assert len(run.lines("metrics.jsonl")) == 2
    whole = json.dumps({"kind": "train", "step": 30, "epoch": 3, "loss": 3.0})
    with path.open("a") as file:
        file.write(whole[:20])
    assert len(run.lines("metrics.jsonl")) == 2
    with path.open("a") as file:
        file.write(whole[20:] + "\n")
    assert run.series("loss") == ([1, 2, 3], [1, 2, 3])
    RunDirectory(folder).rewind(10)
    assert run.series("loss") == ([1], [1])
    kept = path.read_text()
    with path.open("a") as file:
        file.write(whole + "\n")
    assert len(run.lines("metrics.jsonl")) == 2
    path.write_text(kept)  # cut in its place
    assert run.series("loss") == ([1], [1])
    assert run.lines("nothing.jsonl") == []


def test_results_that_are_broken_are_left_out(make):
    folder = make(results={**knn(3.0), "demo": {"rows": {}}})
    (folder / "results" / "cut.json").write_text('{"figures": ')
    assert list(Run(folder).results) == ["knn"]


def test_runs_of_one_name_are_told_apart(make, tmp_path):
    folders = [make("x/run"), make("y/run"), make("z")]
    assert [run.name for run in open_runs(folders)] == ["x/run", "y/run", "z"]
    with pytest.raises(ValueError, match="not a run directory"):
        open_runs([tmp_path])


def test_differing_settings_leave_out_the_harmless(make):
    folders = [
        make("a", train__log_every=5),
        make("b", method__k=7, train__device="auto"),
        make("c", train__seed=3),
    ]
    runs = open_runs(folders)
    assert differing(runs) == {"method.k": [5, 7, 5], "train.seed": [0, 0, 3]}
    groups = [[run.name for run in group] for group in figures.alike(runs)]
    assert groups == [["a", "c"], ["b"]]
    assert figures.names_by_settings(runs[:2]) == ["k 5", "k 7"]
    assert figures.names_by_settings([runs[0], runs[2]]) == ["a", "c"]
    far = make("d", views__flip=0.0, method__target_view="strong")
    assert figures.names_by_settings(open_runs([folders[0], far])) == [
        "w/s, flip 0.5",
        "s/s, flip 0.0",
    ]
