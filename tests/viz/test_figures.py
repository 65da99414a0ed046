"""Figures by their content: which image is where, which number a line shows, what is missing."""

import functools
import json
import re
from importlib.resources import files
from pathlib import Path

import matplotlib.colors
import matplotlib.font_manager
import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image
from torch.nn import functional as F

from meanshift.config.samples import IMAGENET_MEAN as MEAN
from meanshift.config.samples import IMAGENET_STD as STD
from meanshift.data import open_source
from meanshift.methods import view_specs
from meanshift.runtime.rng import ONLINE, TARGET
from meanshift.transforms.augment import Address, MultiViewTransform, draw_boxes
from meanshift.viz import figures, style
from meanshift.viz.figures import (
    COMBINED,
    NAMES,
    Options,
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
from meanshift.viz.run_reader import MissingData, Run, open_runs
from meanshift.viz.tsne import tsne_maps
from tests.support.packages import hide_packages
from tests.support.runs import (
    CLASSES,
    COLORS,
    SIDE,
    knn_result,
    log_lines,
    random_features,
    write_snapshot,
)
from tests.support.three_views import MODULE


def monitored(**accuracies):
    names = {"one": "1-NN", "twenty": "20-NN"}
    metrics = {names[name]: value for name, value in accuracies.items()}
    return [{"kind": "monitor", "step": 40, "epoch": 4, **metrics}]


def draw_png(folder, name, out, **options):
    """Draw one figure through the contract and read its PNG back."""
    (outcome,) = draw_figures([Run(folder)], out, names=[name], options=Options(**options))
    assert not outcome.missing, outcome.missing
    return np.asarray(Image.open(outcome.files[0]).convert("RGB"))


def image_at(png, top, left, pitch, row, column, size=64):
    """The index of the image whose color fills a cell; None for white."""
    y = top + row * pitch
    x = left + column * pitch
    cell = png[y : y + size, x : x + size].reshape(-1, 3)
    assert (cell == cell[0]).all(), "a cell shows one image, pixel for pixel"
    color = tuple(int(value) for value in cell[0])
    return None if color == (255, 255, 255) else COLORS.index(color)


def naive_neighbors(features, query, count):
    unit = features.double().numpy()
    unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    near = np.argsort(-(unit @ unit[query]))
    return [int(i) for i in near if i != query][:count]


def texts_of(drawing):
    return "\n".join(text.get_text() for text in drawing.figure.findobj(match=_is_text))


def _is_text(artist):
    return hasattr(artist, "get_text")


def titles(drawing):
    return [axes.get_title("left") for axes in drawing.figure.axes if axes.axison]


# Neighbors


def test_neighbors_are_in_their_block_and_order(make, tmp_path):
    snapshots = {0: random_features(0), 2: random_features(1), 4: random_features(2)}
    png = draw_png(make(snapshots=snapshots), "neighbors", tmp_path, rows=5, columns=4)
    place = {"top": 80, "left": 8, "pitch": 70}
    queries = [image_at(png, **place, row=row, column=0) for row in range(5)]
    assert len(set(queries)) == 5
    for row, query in enumerate(queries):
        for block, features in enumerate(snapshots.values()):
            assert image_at(png, **place, row=row, column=1 + 5 * block) is None
            found = [image_at(png, **place, row=row, column=2 + 5 * block + c) for c in range(4)]
            assert found == naive_neighbors(features, query, 4)


def test_queries_are_spread_over_the_classes(make):
    run = Run(make(snapshots={4: random_features(0)}))
    for seed in range(8):
        drawing = neighbors.draw([run], Options(rows=6, columns=1, seed=seed))
        sheet = drawing.figure.axes[0].images[0].get_array()
        queries = [COLORS.index(tuple(map(int, sheet[70 * row, 0]))) for row in range(6)]
        assert len(set(queries)) == 6
        for three in (queries[:3], queries[3:]):
            assert {query % CLASSES for query in three} == {0, 1, 2}


def test_neighbors_follow_the_snapshot_and_not_the_source(make, tmp_path):
    folder = make()
    features = random_features(3, count=10)
    indices = torch.arange(59, 49, -1)
    write_snapshot(folder, 4, features, indices)
    png = draw_png(folder, "neighbors", tmp_path, rows=2, columns=3)
    for row in range(2):
        query = image_at(png, 80, 8, 70, row, 0)
        found = [image_at(png, 80, 8, 70, row, 2 + c) for c in range(3)]
        expected = naive_neighbors(features, indices.tolist().index(query), 3)
        assert found == indices[expected].tolist()


def test_the_percentage_of_the_same_class_is_of_all_snapshot_images(make):
    run = Run(make(snapshots={4: random_features(0)}))
    labels = np.arange(60) % CLASSES
    near = [naive_neighbors(random_features(0), query, 5) for query in range(60)]
    fraction = np.mean([labels[found] == labels[query] for query, found in enumerate(near)])
    drawing = neighbors.draw([run], Options(rows=2))
    assert f"epoch 4\n{fraction:.0%} same class" in texts_of(drawing)
    assert f"{fraction:.0%} after epoch 4" in drawing.text
    underlined = len(drawing.figure.axes[0].lines)
    drawing = neighbors.draw([run], Options(rows=60))
    assert len(drawing.figure.axes[0].lines) == round(fraction * 300) > underlined


def test_unknown_labels_count_as_no_class(make, tmp_path):
    pixels = np.zeros((6, SIDE, SIDE, 3), np.uint8)
    np.savez(tmp_path / "some.npz", x_train=pixels, y_train=np.array([0, 0, 0, -1, -1, -1]))
    snapshots = {1: random_features(0, count=6)}
    run = Run(make(snapshots=snapshots, data__source=tmp_path / "some.npz"))
    assert "40% same class" in texts_of(neighbors.draw([run], Options()))


# Clusters


def clustered(solid, clusters, **card):
    """A result of `evaluate cluster` and its arrays; the titles are in reverse order."""
    result = {"cluster": {"metrics": {}, "card": {"data": str(solid), **card}}}
    titles = np.array([f"#{i}" for i in range(60)])[::-1].copy()
    return result, {"clusters": clusters, "titles": titles}


def test_each_row_shows_one_cluster(make, solid, tmp_path):
    assigned = np.repeat([0, 1, 3, 4], [20, 25, 12, 3])
    results, arrays = clustered(solid, assigned)
    folder = make(results=results)
    np.savez(folder / "results" / "cluster.npz", **arrays)
    members = {c: {59 - i for i in np.flatnonzero(assigned == c)} for c in (0, 1, 3, 4)}
    png = draw_png(folder, "clusters", tmp_path, columns=5)
    left = 24 + 16 * len("20 images")
    rows = [[image_at(png, 8, left, 68, row, c) for c in range(5)] for row in range(4)]
    for row, cluster in zip(rows, members, strict=True):
        shown = {index for index in row if index is not None}
        assert len(shown) == min(5, len(members[cluster]))
        assert shown <= members[cluster]
    drawing = clusters.draw([Run(folder)], Options(columns=5))
    sizes = re.findall(r"(\d+)% (\d)\n(\d+) images", texts_of(drawing))
    assert [int(size) for *_, size in sizes] == [20, 25, 12, 3]
    for (percentage, label, _), inside in zip(sizes, members.values(), strict=True):
        classes = [index % CLASSES for index in inside]
        counts = [classes.count(c) for c in range(CLASSES)]
        assert counts[int(label)] == max(counts)
        assert int(percentage) == round(100 * max(counts) / len(inside))
    other = draw_png(folder, "clusters", tmp_path / "other", columns=5, seed=1)
    assert (other != png).any()


def test_clusters_of_other_images_are_refused(make, solid):
    results, arrays = clustered(solid, np.zeros(60, int), data="elsewhere.npz")
    folder = make(results=results)
    np.savez(folder / "results" / "cluster.npz", **arrays)
    with pytest.raises(MissingData, match=r"of elsewhere.npz.*meanshift evaluate cluster"):
        clusters.draw([Run(folder)], Options())


# Views


@pytest.fixture
def noisy(tmp_path):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (20, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(tmp_path / "noisy.npz", x_train=pixels)
    return tmp_path / "noisy.npz"


def find_rows(png, source, config, *, epochs, rows, top=80, left=8, pitch=232, size=224):
    """The images whose views are the rows of a figure, computed by the transform itself."""
    transform = MultiViewTransform(view_specs(config), config.train.seed, SIDE)
    found = []
    for index in range(len(source)):
        ids = torch.tensor([index])
        expected = [
            (view[0].permute(1, 2, 0) * torch.tensor(STD) + torch.tensor(MEAN)).clamp(0, 1)
            for epoch in epochs
            for view in transform.finish(source.read_batch(ids), epoch - 1, ids)
        ]
        y = top + len(found) * pitch
        for column, pixels in enumerate(expected, 1):
            image = (pixels * 255).round().byte().numpy()
            scale = size // len(image)
            cell = png[y : y + size, left + column * pitch : left + column * pitch + size]
            enlarged = image.repeat(scale, 0).repeat(scale, 1)
            if len(found) == rows or cell.shape != enlarged.shape or (cell != enlarged).any():
                break
        else:
            found.append(index)
    return found


@pytest.mark.parametrize("same_view", [False, True])
def test_views_are_exactly_those_of_training(make, noisy, tmp_path, same_view):
    folder = make(data__source=noisy, method__same_view=same_view, train__seed=7)
    png = draw_png(folder, "views", tmp_path, rows=3, epochs=(2, 4))
    run = Run(folder)
    found = find_rows(png, open_source(str(noisy))["train"], run.config, epochs=(2, 4), rows=3)
    assert len(found) == 3
    drawing = views.draw([run], Options(rows=3, epochs=(2, 4)))
    texts = texts_of(drawing).split("\n")
    assert [text for text in texts if text.startswith("epoch")] == ["epoch 2", "epoch 4"]
    names = ["online (strong)"] if same_view else ["target (weak)", "online (strong)"]
    assert [text for text in texts if text.endswith(("(weak)", "(strong)"))] == 2 * names
    # The crops are those of the first chosen epoch.
    patches = drawing.figure.axes[0].patches
    assert len(patches) == 3 * len(names)
    streams = [ONLINE] if same_view else [TARGET, ONLINE]
    for at, (stream, dashes) in enumerate(zip(streams, ["-", "--"], strict=False)):
        sizes = torch.full((3,), SIDE)
        address = Address(7, 1, torch.tensor(found), stream)
        boxes = 14 * draw_boxes(run.views[at], address, sizes, sizes)
        for row, (box, patch) in enumerate(zip(boxes, patches[3 * at :], strict=False)):
            corner = (patch.get_y() - row * 232, patch.get_x())
            assert [*corner, patch.get_height(), patch.get_width()] == box.tolist()
            assert patch.get_linestyle() == dashes


def test_any_number_of_views_has_a_column_each_with_its_name(make, noisy, tmp_path):
    folder = make(data__source=noisy, method__module=MODULE)
    png = draw_png(folder, "views", tmp_path, rows=2, epochs=(1,))
    run = Run(folder)
    found = find_rows(png, open_source(str(noisy))["train"], run.config, epochs=(1,), rows=2)
    assert len(found) == 2
    drawing = views.draw([run], Options(rows=2, epochs=(1,)))
    names = ["global (weak)", "local 1 (strong)", "local 2 (strong)"]
    assert [text for text in texts_of(drawing).split("\n") if "(" in text] == names
    assert all(name in drawing.text for name in names)
    dashes = [patch.get_linestyle() for patch in drawing.figure.axes[0].patches]
    assert dashes == ["-", "-", "--", "--", ":", ":"]


def test_views_of_large_images_of_any_shape_keep_their_shape(make, make_images, tmp_path):
    photos = make_images(tmp_path / "photos", {"": 4}, size=(40, 80))
    drawing = views.draw([Run(make(data__source=photos))], Options(rows=2))
    sheet = drawing.figure.axes[0].images[0].get_array()
    whole = sheet[:224, :224]
    assert (whole[:56] == 255).all() and (whole[168:] == 255).all()
    assert (whole[60:164] != 255).any(2).mean() > 0.9
    for patch in drawing.figure.axes[0].patches:
        assert patch.get_x() >= 0 and patch.get_x() + patch.get_width() <= 224 + 1e-3
        assert patch.get_y() % 232 >= 56 - 1e-3


def test_epochs_of_views_are_counted_from_one(make):
    run = Run(make())
    for epochs in [(0,), (5,), (1, 9)]:
        with pytest.raises(MissingData, match="1 to 4"):
            views.draw([run], Options(epochs=epochs))


# Curves


def test_curves_show_every_logged_value(make):
    lines = log_lines(loss=lambda e: 1 / e, lr=lambda e: 0.1 * e, agreement=lambda e: e / 10)
    one = make("one", lines=lines + monitored(one=20.0, twenty=30.0))
    two = make("two", lines=log_lines(loss=lambda e: 2 / e))
    drawing = curves.draw(open_runs([one, two]), Options())
    names = ["Loss", "Learning rate", "Agreement of the views", "20-NN, % (1-NN dashed)"]
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
    assert len({line.get_marker() for line in loss.lines}) == 2, "to be told apart in gray"
    assert not curves.draw([Run(one)], Options()).figure.legends, "one run needs no legend"


@pytest.mark.parametrize("count", range(1, 8))
def test_panels_of_curves_fill_their_lines(make, count):
    metrics = ["loss", "lr", "effective_rank", "agreement", "20-NN", "purity", "images_per_second"]
    lines = log_lines(**dict.fromkeys(metrics[:count], lambda e: e))
    figure = curves.draw([Run(make(lines=lines))], Options()).figure
    figure.draw_without_rendering()
    assert len(figure.axes) == count
    boxes = [
        axes.get_tightbbox().transformed(figure.transFigure.inverted()) for axes in figure.axes
    ]
    for line in {round(box.y0, 1) for box in boxes}:
        members = [box for box in boxes if round(box.y0, 1) == line]
        assert max(box.x1 for box in members) > 0.97 and min(box.x0 for box in members) < 0.08
    assert figure.get_figwidth() == (style.COLUMN if count == 1 else style.PAGE)


def test_noisy_curves_are_smoothed_and_the_logged_values_are_behind(make):
    noise = np.random.default_rng(0).normal(size=40)
    lines = [
        {"kind": "train", "step": i + 1, "epoch": (i + 1) / 10, "loss": value, "lr": value}
        for i, value in enumerate(noise.tolist())
    ]
    run = Run(make(lines=lines))
    drawing = curves.draw([run], Options())
    loss, lr = drawing.figure.axes
    behind, smooth = loss.lines
    assert list(behind.get_ydata()) == noise.tolist() and behind.get_alpha() < 0.5
    window = 0.1 * 39  # in steps of 1
    naive = [
        np.mean([noise[j] for j in range(40) if abs(i - j) <= min(window / 2, i)])
        for i in range(40)
    ]
    assert list(smooth.get_ydata()) == pytest.approx(naive)
    assert [list(line.get_ydata()) for line in lr.lines] == [noise.tolist()]
    assert "window of 10%" in drawing.text and "lightly behind" in drawing.text


def test_a_collapse_is_marked_at_the_epoch_of_its_warning(make):
    warned = [
        {"step": 5, "kind": "machine", "message": "m"},
        {"step": 25, "kind": "collapse", "message": "c"},
    ]
    lines = log_lines(loss=lambda e: e, effective_rank=lambda e: e)
    drawing = curves.draw([Run(make(lines=lines, warnings=warned))], Options())
    for axes in drawing.figure.axes:
        marks = [line for line in axes.lines if line.get_color() == style.ALARM]
        assert [list(line.get_xdata()) for line in marks] == [[2.5, 2.5]]
    assert texts_of(drawing).count("collapse") == 1
    assert "warning of a collapse at epoch 2.50" in drawing.text


# Purity


def pure(level):
    return log_lines(purity=lambda e: level * e)


def test_purity_by_k_and_by_views(make):
    by_view = [
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
        make("d", lines=pure(0.07) + by_view, method__k=10, method__target_view="strong"),
        make("byol-asym", lines=log_lines(loss=lambda e: e), method__name="byol-asym"),
    ]
    drawing = purity.draw(open_runs(folders), Options())
    panels = drawing.figure.axes
    assert titles(drawing) == [
        "Purity by k",
        "Purity by views",
        "Purity by kind of view",
    ]
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in panels]
    assert legends == [
        ["k 5", "k 10"],
        ["target view weak", "target view strong"],
        ["weak", "strong"],
    ]
    assert [list(line.get_ydata()) for line in panels[0].lines] == [
        pytest.approx([0.1, 0.2, 0.3, 0.4]),
        pytest.approx([0.2, 0.4, 0.6, 0.8]),
    ]
    assert list(panels[2].lines[0].get_xdata()) == [2, 4]
    assert [list(line.get_ydata()) for line in panels[2].lines] == [[0.25, 0.5], [2 / 9, 4 / 9]]
    # Without a second k, or other views, there is no such panel.
    assert titles(purity.draw(open_runs(folders[:2]), Options())) == ["Purity by k"]
    by_views = purity.draw(open_runs([folders[0], folders[2]]), Options())
    assert titles(by_views) == ["Purity by views"]
    assert titles(purity.draw(open_runs(folders[1:3]), Options())) == ["Purity"]
    # The first run need not be in a comparison, and a run has the same color in every panel.
    later = [make("lone", lines=pure(0.01), method__k=20), folders[0], folders[2]]
    drawing = purity.draw(open_runs(later), Options())
    assert titles(drawing) == ["Purity by k", "Purity by views"]
    colors = [[line.get_color() for line in axes.lines] for axes in drawing.figure.axes]
    first, second, third = style.COLORS[:3]
    assert colors == [[second, first], [second, third]]


def test_purity_of_seeds_is_a_mean_with_a_band(make):
    folders = [make(f"s{seed}", lines=pure(0.1 + seed / 10), train__seed=seed) for seed in (0, 1)]
    (axes,) = purity.draw(open_runs(folders), Options()).figure.axes
    (line,) = axes.lines
    assert line.get_ydata() == pytest.approx([0.15, 0.3, 0.45, 0.6])
    assert "2 seeds" in line.get_label()
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    std = np.std([0.4, 0.8], ddof=1)
    assert (band.max(), band.min()) == pytest.approx((0.6 + std, 0.15 - std / 4))
    other = make("other", lines=pure(0.3), optim__lr=0.01)
    (axes,) = purity.draw(open_runs([*folders, other]), Options()).figure.axes
    assert [line.get_label() for line in axes.lines] == ["lr 0.05 (2 seeds)", "lr 0.01"]


# Accuracy


def test_accuracy_by_bank_size_and_k(make):
    done = log_lines(loss=lambda e: e)
    folders = [
        make("a", lines=done, results=knn_result(40.0)),
        make("a1", lines=done, results=knn_result(44.0), train__seed=1),
        make("b", lines=done, results=knn_result(50.0), method__bank_size=256),
        make("c", lines=done, results=knn_result(45.0), method__k=10),
        make("byol-asym", lines=done, results=knn_result(30.0), method__name="byol-asym"),
        make("alone", lines=done, results=knn_result(99.0), method__k=20, optim__lr=0.5),
        make("young", lines=done[:2], results=knn_result(5.0), method__k=2),
    ]
    drawing = accuracy.draw(open_runs(folders), Options())
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
    assert "evaluated" in drawing.figure.axes[0].get_ylabel()


def test_accuracy_never_mixes_two_metrics(make):
    done = log_lines(loss=lambda e: e)
    folders = [
        make("a", lines=done + monitored(twenty=35.0), results=knn_result(40.0)),
        make("b", lines=done + monitored(twenty=36.0), method__k=10),
    ]
    drawing = accuracy.draw(open_runs(folders), Options())
    (bars,) = drawing.figure.axes[0].containers
    assert list(bars.lines[0].get_ydata()) == [35, 36]
    assert "20-NN accuracy, % (while training)" in drawing.text


# t-SNE


def test_tsne_has_a_panel_per_epoch_and_at_most_ten_classes(make, tmp_path, monkeypatch):
    pixels = np.zeros((150, SIDE, SIDE, 3), np.uint8)
    np.savez(tmp_path / "many.npz", x_train=pixels, y_train=np.arange(150) % 15)
    snapshots = {epoch: random_features(epoch, count=150) for epoch in range(3)}
    run = Run(make(snapshots=snapshots, data__source=tmp_path / "many.npz"))
    fewer = functools.partial(tsne_maps, max_points=100)
    monkeypatch.setattr(tsne, "tsne_maps", fewer)
    drawing = tsne.draw([run], Options(seed=3))
    assert titles(drawing) == ["before training", "epoch 1", "epoch 2"]
    legend = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert legend[-1] == "others" and len(legend) == 11
    color_of = dict(zip(legend, [*style.COLORS, style.RULE], strict=True))
    labels = run.labels.tolist()
    for axes, epoch_map in zip(drawing.figure.axes, fewer(run), strict=True):
        (points,) = axes.collections
        places = np.asarray(points.get_offsets(), np.float32).tolist()
        shown = {
            tuple(place): matplotlib.colors.to_hex(color)
            for place, color in zip(places, points.get_facecolors(), strict=True)
        }
        for row, point in zip(epoch_map.rows.tolist(), epoch_map.points.tolist(), strict=True):
            assert shown[tuple(point)] == color_of.get(str(labels[row]), style.RULE)
    other = tsne.draw([run], Options(seed=4)).figure.legends[0].get_texts()
    assert [text.get_text() for text in other] != legend


def test_tsne_without_labels_is_colored_by_cluster(make, tmp_path):
    grouped = F.one_hot(torch.arange(60) % 10, 16).float() + 0.01 * random_features(0, dim=16)
    run = Run(make(snapshots={4: grouped}, data__source=tmp_path / "unlabeled.npz"))
    drawing = tsne.draw([run], Options())
    assert titles(drawing) == ["epoch 4"]
    assert "k-means of the last snapshot" in drawing.text
    assert "the one before" not in drawing.text and "perplexity 19.7" in drawing.text
    assert len(drawing.figure.legends[0].get_texts()) == 10
    (points,) = drawing.figure.axes[0].collections
    place = {tuple(p): i for i, p in enumerate(tsne_maps(run)[0].points.tolist())}
    offsets = np.asarray(points.get_offsets(), np.float32).tolist()
    pairs = {
        (place[tuple(p)] % 10, tuple(c))
        for p, c in zip(offsets, points.get_facecolors().tolist(), strict=True)
    }
    assert len(pairs) == 10, "one color per group"


def test_tsne_of_snapshot_images_without_a_label_is_colored_by_cluster(make, tmp_path):
    pixels = np.zeros((60, SIDE, SIDE, 3), np.uint8)
    np.savez(tmp_path / "few.npz", x_train=pixels, y_train=np.where(np.arange(60) < 40, -1, 0))
    snapshots = {4: random_features(0, count=40)}
    run = Run(make(snapshots=snapshots, data__source=tmp_path / "few.npz"))
    assert run.source.labeled
    assert "colored by cluster" in tsne.draw([run], Options()).text


# Cost


def cost_result(*fractions):
    """The result of the cost benchmark for banks of 1024, 2048, ... rows; the run has 2048."""
    table = [
        {"bank": 1024 * 2**i, "fraction": fraction, "gflops": 0.1, "bytes": 4096}
        for i, fraction in enumerate(fractions)
    ]
    settings = {
        "table": table,
        "encoder": "resnet10",
        "image_size": 16,
        "batch": 4,
        "k": 5,
        "dim": 8,
        "rounds": 1,
        "bank": 2048,
    }
    card = {"settings": settings, "device": "cpu", "threads": 1}
    return {"cost": {"metrics": {}, "card": card}}


def test_the_cost_of_each_bank_has_a_bar_and_the_runs_own_is_bold(make):
    run = Run(make(results=cost_result(0.1, 0.2, 0.4)))
    (axes,) = cost.draw([run], Options()).figure.axes
    lengths = np.array([bar.get_width() for bar in axes.patches])
    assert lengths / lengths.max() == pytest.approx([0.25, 0.5, 1])
    bold = [text.get_text() for text in axes.texts if text.get_weight() == "bold"]
    assert "2,048" in bold and "20.0%" in bold and "4,096" not in bold


# Missing data


def test_every_figure_reports_what_an_empty_run_lacks(make, tmp_path):
    outcomes = draw_figures([Run(make())], tmp_path / "out")
    missing = {outcome.name: outcome.missing for outcome in outcomes}
    assert list(missing) == list(NAMES)
    expected = {
        "neighbors": "no snapshots.*--train.snapshots 6",
        "tsne": "no snapshots.*--train.snapshots 6",
        "purity": "no metric purity.*--method.k 5",
        "accuracy": "0 of 1 runs.*--method.k 10",
        "clusters": "type: meanshift evaluate cluster .*run",
        "curves": "no lines in metrics.jsonl",
        "views": "^$",
        "cost": "type: python -m benchmarks cost .*run",
    }
    for name, pattern in expected.items():
        assert re.search(pattern, missing[name]), missing[name]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "views.pdf",
        "views.png",
        "views.svg",
        "views.txt",
    ]


def test_a_method_without_neighbors_has_the_other_figures(make, tmp_path):
    lines = log_lines(loss=lambda e: 1 / e)
    snapshots = {0: random_features(0), 4: random_features(1)}
    folder = make(lines=lines, snapshots=snapshots, method__module=MODULE)
    outcomes = draw_figures([Run(folder)], tmp_path / "out")
    missing = {outcome.name: outcome.missing for outcome in outcomes if outcome.missing}
    assert set(missing) == {"purity", "accuracy", "clusters", "cost"}
    assert re.search("no metric purity.*three-views has no neighbors", missing["purity"])


def test_without_matplotlib_the_extra_is_named(make, tmp_path, monkeypatch):
    run = Run(make(lines=log_lines(loss=lambda e: 1 / e)))
    hide_packages(monkeypatch, "matplotlib")
    with pytest.raises(ValueError, match=r"^figures need matplotlib; .*meanshift\[report\]"):
        list(draw_figures([run], tmp_path, names=["curves"]))


def test_images_that_are_gone_or_others_are_asked_for(make, solid, tmp_path):
    results, arrays = clustered(solid, np.zeros(60, int))
    folder = make(snapshots={1: random_features(0)}, results=results)
    np.savez(folder / "results" / "cluster.npz", **arrays)
    names = ["neighbors", "tsne", "clusters", "views"]
    fingerprint = Run(folder).source.fingerprint()
    (folder / "environment.json").write_text(json.dumps({"source": fingerprint}))
    assert not any(o.missing for o in draw_figures([Run(folder)], tmp_path, names=names))
    solid.rename(tmp_path / "moved.npz")
    for outcome in draw_figures([Run(folder)], tmp_path, names=names):
        if outcome.name == "tsne":  # features are enough for a map of clusters
            assert outcome.files
        else:
            assert re.search(r"cannot be found.*--data SOURCE", outcome.missing), outcome
    moved = Run(folder, data=str(tmp_path / "moved.npz"))
    assert not any(o.missing for o in draw_figures([moved], tmp_path, names=names))
    np.savez(solid, x_train=np.zeros((70, SIDE, SIDE, 3), np.uint8))
    for outcome in draw_figures([Run(folder)], tmp_path, names=names):
        if outcome.name != "tsne":
            assert re.search(r"other images than the 70.*--data SOURCE", outcome.missing), outcome
    (folder / "environment.json").unlink()  # too few images are noticed even without it
    np.savez(solid, x_train=np.zeros((59, SIDE, SIDE, 3), np.uint8))
    with pytest.raises(MissingData, match="other images than the 59"):
        _ = Run(folder).source


def test_neighbors_without_labels_or_with_one_image(make, tmp_path):
    run = Run(make(snapshots={1: random_features(0)}, data__source=tmp_path / "unlabeled.npz"))
    drawing = neighbors.draw([run], Options())
    assert "class" not in texts_of(drawing) + drawing.text
    single = Run(make("single", snapshots={1: random_features(0, count=1)}))
    with pytest.raises(MissingData, match=r"1 image.*--train.snapshot_images"):
        neighbors.draw([single], Options())


def test_an_epoch_without_a_snapshot_is_named(make):
    run = Run(make(snapshots={0: random_features(0), 4: random_features(1)}))
    for figure in (neighbors, tsne):
        assert titles(tsne.draw([run], Options(epochs=(4,)))) == ["epoch 4"]
        with pytest.raises(MissingData, match=r"epoch 3; there are 0, 4"):
            figure.draw([run], Options(epochs=(3,)))


@pytest.mark.parametrize("damage", ["truncated", "stray", "no numbers"])
def test_a_damaged_snapshot_is_named_and_spoils_no_other_figure(make, call, damage):
    folder = make(lines=log_lines(loss=lambda e: 1 / e), snapshots={0: random_features(0)})
    name = damage_snapshot(folder, damage)
    code, _, err = call("figures", folder, "--only", "neighbors", "curves")
    assert code == 0 and (folder / "figures/curves.png").exists()
    assert (name in err) == (damage != "stray")


def damage_snapshot(folder, damage):
    """Write a snapshot as a full disk, a person or a diverged run leaves it; return its name."""
    if damage == "no numbers":
        write_snapshot(folder, 4, torch.full((60, 8), torch.nan))
        return "epoch-0004.pt"
    name = "epoch-best.pt" if damage == "stray" else "epoch-0004.pt"
    whole = (folder / "snapshots/epoch-0000.pt").read_bytes()
    (folder / "snapshots" / name).write_bytes(whole[: len(whole) // 2])
    return name


@pytest.mark.parametrize(
    ("flag", "value"), [("--rows", "-1"), ("--columns", "-2"), ("--seed", "1" * 23)]
)
def test_an_invalid_number_is_refused_by_its_flag(make, call, flag, value):
    folder = make(snapshots={4: random_features(0)})
    code, out, err = call("figures", folder, "--only", "neighbors", "views", flag, value)
    assert (code, out) == (2, "")
    assert f"{flag}: got {value}, need" in err and "Traceback" not in err


# Files


@pytest.mark.filterwarnings("ignore:no installed font")
@pytest.mark.slow
def test_files_contain_their_descriptions_and_are_reproducible(make, solid, tmp_path):
    results, arrays = clustered(solid, np.arange(60) % 4)
    results |= {**cost_result(0.1, 0.2), **knn_result(30.0)}
    lines = log_lines(loss=lambda e: e, purity=lambda e: e / 9)
    snapshots = {0: random_features(0), 4: random_features(1)}
    content = {"lines": lines, "snapshots": snapshots, "results": results}
    folders = [make("猫 & $x$", **content), make("two", **content, method__k=10)]
    for folder in folders:
        np.savez(folder / "results" / "cluster.npz", **arrays)
    files = []
    for out in ("first", "second"):
        outcomes = list(draw_figures(open_runs(folders), tmp_path / out))
        assert not [outcome for outcome in outcomes if outcome.missing]
        files.append({p.name: p.read_bytes() for o in outcomes for p in o.files})
    assert files[0] == files[1]
    assert {Path(name).stem for name in files[0]} == COMBINED | {
        f"{name}-{run}" for name in set(NAMES) - COMBINED for run in ("猫 & $x$", "two")
    }
    assert "Run 猫 & $x$: msf" in files[0]["tsne-猫 & $x$.txt"].decode()
    for path in (tmp_path / "first").glob("*.png"):
        image = Image.open(path)
        metadata = image.text
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
        assert image.width <= style.PAGE * 300
        caption = " ".join(path.with_suffix(".txt").read_text().split())
        assert caption == " ".join(f"{metadata['Title']}. {metadata['Description']}".split())
        assert "Run two: msf, resnet10, data" in caption or "猫" in path.name
        pdf = path.with_suffix(".pdf").read_bytes()
        assert b"/FontFile2" in pdf and b"/Type3" not in pdf and b"CreationDate" not in pdf
        assert metadata["Title"] and len(metadata["Description"]) > 40
        svg = path.with_suffix(".svg").read_text()
        assert f"<dc:title>{metadata['Title']}</dc:title>" in svg
        assert "<dc:description>" in svg
        assert "date" not in svg.partition("<defs>")[0]


def test_an_image_is_shown_pixel_for_pixel_between_its_margins(tmp_path):
    image = np.random.default_rng(0).integers(0, 255, (31, 57, 3), dtype=np.uint8)
    figure, _ = style.sheet(image, left=13, top=7, right=5, bottom=3)
    (path, *_) = style.save(figure, tmp_path / "x", title="t", text="t")
    png = np.asarray(Image.open(path).convert("RGB"))
    assert png.shape == (41, 75, 3)
    assert (png[7:38, 13:70] == image).all()
    assert style.cell_size(32) == (32, 2) and style.cell_size(224) == (64, 1)
    assert style.shorten("a\nvery long name of a class", 8) == "a very …"


COLOR_BLINDNESS = {  # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
    "none": np.eye(3),
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def to_lab(linear):
    xyz = (
        linear
        @ np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).T
    )
    x, y, z = (xyz / [0.9505, 1, 1.089]).T
    f = [np.where(v > 0.008856, np.cbrt(v), 7.787 * v + 16 / 116) for v in (x, y, z)]
    return np.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])], 1)


@pytest.mark.parametrize("blindness", COLOR_BLINDNESS)
def test_colors_differ_for_the_color_blind_in_figures_and_pages(blindness):
    css = files("meanshift.viz.assets").joinpath("style.css").read_text()
    blocks = re.findall(
        r"--paper: (#\w+)" + "".join(rf".*?--c{i}: (#\w+)" for i in range(10)), css, re.S
    )
    light, *dark = blocks
    assert light[1:] == style.COLORS and len(dark) == 2 and dark[0] == dark[1]
    for paper, *colors in (light, dark[0]):
        rgb = np.array([matplotlib.colors.to_rgb(color) for color in (paper, *colors)])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        seen = to_lab(np.clip(linear @ np.array(COLOR_BLINDNESS[blindness]).T, 0, 1))
        distances = np.linalg.norm(seen[1:, None] - seen[1:], axis=2) + 100 * np.eye(10)
        assert distances.min() > 15
        bright = linear @ [0.2126, 0.7152, 0.0722] + 0.05
        contrast = np.maximum(bright[1:] / bright[0], bright[0] / bright[1:])
        assert contrast.min() > 2.9


CAT, DOG = "\U000f0001", "\U000f0002"  # of nobody's script: no machine has a font for them


def write_font(path, characters):
    """A font whose characters are squares of different sizes."""
    names = [".notdef", *(f"c{ord(each):x}" for each in characters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap(dict(zip(map(ord, characters), names[1:], strict=True)))
    glyphs = {}
    for size, name in enumerate(names, 1):
        pen = TTGlyphPen(None)
        pen.moveTo((0, 0))
        for point in ((0, 200 * size), (200 * size, 200 * size), (200 * size, 0)):
            pen.lineTo(point)
        pen.closePath()
        glyphs[name] = pen.glyph()
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(dict.fromkeys(names, (900, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def test_characters_that_the_usual_font_lacks_come_from_another_installed_font(
    tmp_path, monkeypatch
):
    def render(label):
        style._fallback_fonts.cache_clear()
        figure = style.figure(2.0, 1.0)
        figure.text(0.1, 0.5, label)
        png, _, svg, _ = style.save(figure, tmp_path / "figure", title="t", text="t")
        assert label in svg.read_text()
        return png.read_bytes()

    with pytest.warns(UserWarning, match=f"no installed font has the characters {CAT}{DOG},"):
        render(f"a {CAT}{DOG}")
    manager = matplotlib.font_manager.fontManager
    monkeypatch.setattr(manager, "ttflist", list(manager.ttflist))
    write_font(tmp_path / "squares.ttf", [CAT, DOG])
    manager.addfont(tmp_path / "squares.ttf")
    assert render(f"a {CAT}") != render(f"a {DOG}")  # and no warning
    style._fallback_fonts.cache_clear()


# Comparisons


def test_runs_are_grouped_and_named_by_their_settings(make):
    folders = [
        make("a", train__log_every=5),
        make("b", method__k=7, train__device="auto"),
        make("c", train__seed=3),
    ]
    runs = open_runs(folders)
    groups = [[run.name for run in group] for group in figures.group_similar(runs)]
    assert groups == [["a", "c"], ["b"]]
    with pytest.warns(UserWarning, match="copy: has the same settings and seed as .*a, left out"):
        with_copy = figures.group_similar([*runs, *open_runs([make("copy")])])
    assert [[run.name for run in group] for group in with_copy] == groups
    assert figures.names_by_settings(runs[:2]) == ["k 5", "k 7"]
    assert figures.names_by_settings([runs[0], runs[2]]) == ["a", "c"]
    far = make("d", views__flip=0.0, method__target_view="strong")
    assert figures.names_by_settings(open_runs([folders[0], far])) == [
        "flip 0.5, target view weak",
        "flip 0.0, target view strong",
    ]
