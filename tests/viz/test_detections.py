"""The image of detections: boxes in their styles, tags that fit any image, results on disk."""

import itertools
import json
import threading

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from meanshift.ops.average_precision import Detections, GroundTruth
from meanshift.viz import detections, style
from meanshift.viz.detections import DIFFICULT, FALSE, FOUND, MISSED

CLASSES = ["cat", "dog"]


def photo(height=300, width=400, gray=128):
    return torch.full((3, height, width), gray, dtype=torch.uint8)


def truth(boxes=(), labels=(), difficult=None):
    difficult = [False] * len(boxes) if difficult is None else difficult
    return GroundTruth(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(difficult, dtype=torch.bool),
    )


def found(boxes=(), scores=(), labels=()):
    return Detections(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.tensor(scores, dtype=torch.float32),
        torch.tensor(labels, dtype=torch.int64),
    )


def draw(images, truths, founds, titles=None, **options):
    titles = [f"VOC2007/{i:06d}" for i in range(len(images))] if titles is None else titles
    return detections.draw(images, truths, founds, titles=titles, **{"classes": CLASSES, **options})


def texts_of(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def tags(figure):
    return [text for text in figure.axes[0].texts if text.get_color() == "white"]


def boxes_of(figure, style):
    """The closed lines of one style: (left, top, right, bottom) in pixels of the sheet."""
    return [
        (min(line.get_xdata()), min(line.get_ydata()), max(line.get_xdata()), max(line.get_ydata()))
        for line in figure.axes[0].lines
        if line.get_color() == style.color and len(line.get_xdata()) == 5
    ]


def canvas_of(figure):
    figure.dpi = style.SCREEN_DPI
    return FigureCanvasAgg(figure)


def pixels(figure):
    """The figure as it is drawn."""
    canvas = canvas_of(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].astype(int)


def extents(figure, texts):
    """The boxes around texts, in pixels from the lower left."""
    renderer = canvas_of(figure).get_renderer()
    return [text.get_window_extent(renderer) for text in texts]


def overlaps(boxes):
    return [
        (a, b)
        for a, b in itertools.combinations(boxes, 2)
        if a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1
    ]


SCENE = (
    [photo()],
    [truth([[40, 60, 140, 160], [200, 100, 300, 200]], [0, 1])],
    [
        found(
            [[42, 60, 140, 160], [300, 10, 390, 80], [40, 60, 140, 160], [10, 200, 60, 250]],
            [0.93, 0.71, 0.6, 0.49],
            [0, 1, 0, 1],
        )
    ],
)


def test_found_missed_and_false_positives_have_their_own_lines_and_tags():
    figure = draw(*SCENE)
    assert len({style.line for style in detections.STYLES}) == len(detections.STYLES)
    scale = 420 / 300
    assert boxes_of(figure, FOUND) == [
        pytest.approx((40 * scale, 60 * scale, 140 * scale, 160 * scale))
    ]
    assert boxes_of(figure, MISSED) == [pytest.approx((280, 140, 420, 280))]
    assert boxes_of(figure, FALSE) == [  # a second detection of the cat is one as well
        pytest.approx((56, 84, 196, 224)),
        pytest.approx((420, 14, 546, 112)),
    ]
    assert boxes_of(figure, DIFFICULT) == []
    assert [tag.get_text() for tag in tags(figure)] == ["cat 0.93", "dog", "dog 0.71", "cat 0.60"]
    assert texts_of(figure)[0] == "1 of 2 objects found, 2 false positives"
    assert texts_of(figure)[-3:] == ["found", "missed", "false positive (score ≥ 0.5)"]
    assert "000000" in texts_of(figure)


def test_detections_below_the_score_are_left_out():
    assert detections.summarize(*SCENE[1:]) == "1 of 2 objects found, 2 false positives"
    assert detections.summarize(*SCENE[1:], score=0.7) == "1 of 2 objects found, 1 false positive"
    assert detections.summarize(*SCENE[1:], score=0.95) == "0 of 2 objects found, 0 false positives"
    assert detections.summarize(*SCENE[1:], score=0.1) == "1 of 2 objects found, 3 false positives"
    figure = draw(*SCENE, score=0.95)
    assert [tag.get_text() for tag in tags(figure)] == ["cat", "dog"]
    assert texts_of(figure)[-1] == "false positive (score ≥ 0.95)"


def test_difficult_objects_are_drawn_in_their_own_style_and_not_counted():
    there = truth([[40, 60, 140, 160], [200, 100, 300, 200]], [0, 1], [True, True])
    figure = draw([photo()], [there], [found([[40, 60, 140, 160]], [0.9], [0])])
    assert len(boxes_of(figure, DIFFICULT)) == 2 and tags(figure) == []
    assert texts_of(figure)[0] == "0 of 0 objects found, 0 false positives"
    assert texts_of(figure)[-1] == "difficult"
    legend = extents(figure, figure.axes[0].texts[-4:])
    assert legend[-1].x1 <= figure.bbox.x1
    lines = [line.get_xdata() for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    ends = [16 + x for line, text in zip(lines, legend, strict=True) for x in (*line, text.x1 - 16)]
    assert ends == sorted(ends)  # a line, its word, the next line


def test_pixels_show_the_colors_where_the_boxes_are():
    figure = draw(*SCENE)
    image = pixels(figure)
    top, left = 86, 16  # the margins
    for kind, (x, y) in ((FOUND, (56, 150)), (MISSED, (280, 150))):
        color = [int(kind.color[i : i + 2], 16) for i in (1, 3, 5)]
        around = image[top + y - 12 : top + y + 12, left + x - 3 : left + x + 4].reshape(-1, 3)
        assert np.abs(around - color).sum(1).min() < 30
    inside = image[top + 150, left + 120]
    assert inside.tolist() == [128, 128, 128]
    green = image[top + 150 - 40 : top + 190, left + 56]  # a solid line has no gap
    assert (np.abs(green - [0x1B, 0x80, 0x58]).sum(1) < 60).all()
    red = image[top + 150 : top + 270, left + 280]  # a dashed one has
    near = np.abs(red - [0xB3, 0x26, 0x1E]).sum(1) < 60
    assert near.any() and not near.all()


# Rows


SHAPES = {
    "one tiny": [(64, 64)],
    "one": [(375, 500)],
    "one tall": [(500, 90)],
    "one wide": [(60, 1500)],
    "one low": [(12, 1500)],
    "one of a pixel": [(1, 1)],
    "row": [(300, 400), (400, 300), (333, 500)],
    "tiny row": [(64, 64)] * 7,
    "all kinds": [(64, 64), (1200, 1600), (1200, 90), (100, 3000), (375, 500), (500, 375)],
    "many": [(375, 500), (500, 375)] * 12,
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_images_keep_their_aspect_ratio_and_rows_are_straight(shapes):
    images = [photo(*shape, gray=10 * (i + 1)) for i, shape in enumerate(shapes)]
    sheet, places = detections._lay_out(images)
    for image, (left, top, right, bottom) in zip(images, places, strict=True):
        assert 0 <= left < right <= sheet.shape[1] and 0 <= top < bottom <= sheet.shape[0]
        assert (sheet[top:bottom, left:right] == int(image[0, 0, 0])).all()
        shape = image.shape[2] / image.shape[1]
        assert abs((right - left) - shape * (bottom - top)) <= 1 + shape / 2
        assert bottom - top <= detections.MAX_HEIGHT
    painted = sum((right - left) * (bottom - top) for left, top, right, bottom in places)
    assert int((sheet[:, :, 0] < 255).sum()) == painted  # no two overlap
    rows = [list(of) for _, of in itertools.groupby(places, key=lambda place: place[1])]
    assert all(len({place[3] for place in row}) == 1 for row in rows)
    if len(shapes) > 6:
        assert all(abs(row[-1][2] - detections.ROW_WIDTH) <= 1 for row in rows)


def test_a_tiny_image_keeps_its_pixels_and_a_large_one_is_smooth():
    chess = ((torch.arange(64)[:, None] + torch.arange(64)) % 2 * 255).byte().expand(3, 64, 64)
    sheet, [(left, top, right, bottom)] = detections._lay_out([chess])
    assert set(np.unique(sheet[top:bottom, left:right])) == {0, 255}
    large = chess.repeat(1, 10, 10)
    sheet, [(left, top, right, bottom)] = detections._lay_out([large])
    assert len(np.unique(sheet[top:bottom, left:right])) > 2


def test_at_most_24_are_drawn_and_counted():
    one = truth([[40, 60, 140, 160]], [0])
    figure = draw([photo()] * 30, [one] * 30, [found()] * 30)
    assert texts_of(figure)[0] == "0 of 24 objects found, 0 false positives"
    assert "000023" in texts_of(figure) and "000024" not in texts_of(figure)


# Tags


def crowd(seed, shape, count):
    """Boxes anywhere, also beyond the edges."""
    random = np.random.default_rng(seed)
    corner = random.random((count, 2)) * 1.1 - 0.1
    boxes = np.concatenate([corner, corner + random.random((count, 2)) * 0.5], 1)
    boxes *= [shape[1], shape[0]] * 2
    labels = random.integers(0, 2, count).tolist()
    half = count // 2
    return (
        truth(boxes[:half].tolist(), labels[:half]),
        found(boxes[half // 2 :].tolist(), random.random(count - half // 2).tolist(),
              labels[half // 2 :]),
    )  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_no_text_overlaps_another_or_leaves_its_image(shapes):
    names = ["Felis silvestris catus", "W" * 40]
    both = [crowd(seed, shape, 8) for seed, shape in enumerate(shapes)]
    images = [photo(*shape) for shape in shapes]
    titles = [f"folder/{'w' * (i % 9 * 4)}.jpg" for i in range(len(shapes))]
    figure = draw(images, [one for one, _ in both], [one for _, one in both], titles, classes=names)
    _, places = detections._lay_out(images)
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    room = extents(figure, texts)
    assert overlaps(room) == []
    for box in room:
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    turn = figure.axes[0].transData.inverted()  # to pixels of the sheet, y downwards
    for tag in extents(figure, tags(figure)):
        (x0, y1), (x1, y0) = turn.transform(tag.get_points())
        assert any(
            left <= x0 and x1 <= right + 1 and top <= y0 and y1 <= bottom
            for left, top, right, bottom in places
        )
    assert tags(figure) or min(map(min, shapes)) < 100


def test_boxes_stay_on_their_image():
    figure = draw([photo()], [truth([[-50, -50, 900, 900]], [0])], [found()])
    assert boxes_of(figure, MISSED) == [(2, 2, 558, 418)]


@pytest.mark.filterwarnings("ignore:no installed font")
def test_long_names_are_shortened_and_strange_ones_are_drawn(tmp_path):
    names = ["Felis silvestris catus", "$日本_x\udcff"]
    figure = draw(*SCENE, ["$a_日\udcff"], classes=names)
    assert [tag.get_text() for tag in tags(figure)][:2] == ["Felis silvest… 0.93", "$日本_x?"]
    files = style.save(
        figure, tmp_path / "detections", title="Detections", text=texts_of(figure)[0]
    )
    assert [file.name for file in files] == [
        "detections.png",
        "detections.pdf",
        "detections.svg",
        "detections.txt",
    ]
    with Image.open(files[0]) as image:
        assert image.size == (632, 86 + 420 + 26 + 6)
    assert all("1 of 2 objects found" in file.read_text() for file in files[2:])


def test_images_without_objects_are_drawn_bare():
    figure = draw([photo()] * 2, [truth()] * 2, [found()] * 2)
    assert texts_of(figure)[0] == "0 of 0 objects found, 0 false positives"
    assert tags(figure) == [] and len(figure.axes[0].lines) == 3  # the legend's


def test_the_same_figure_from_several_threads():
    def work(number):
        images[number] = pixels(draw(*SCENE))

    images = {}
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(images) == 3 and all(np.array_equal(images[0], image) for image in images.values())


def test_inputs_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="got 1 images, 1 truths, 0 detections and 1 titles"):
        draw([photo()], [truth()], [])
    with pytest.raises(ValueError, match="at least one image"):
        draw([], [], [])


# Stored results


def write_result(folder, name="detect-VOC2007", *, images=2):
    """A result as `evaluate detect` stores it, with one box per image that is found."""
    for index in range(images):
        pixels = np.full((60, 80, 3), 40 * (index + 1), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:06d}.png")
    one_each = np.ones(images, np.int64)
    boxes = np.tile(np.array([[10, 10, 40, 40]], np.float32), (images, 1))
    labels = np.zeros(images, np.int64)
    np.savez(
        folder / f"{name}.npz",
        titles=np.array([f"VOC2007/{index:06d}" for index in range(images)]),
        files=np.array([str(folder / f"{index:06d}.png") for index in range(images)]),
        classes=np.array(CLASSES),
        truth_counts=one_each,
        truth_boxes=boxes,
        truth_labels=labels,
        truth_difficult=np.zeros(images, bool),
        detection_counts=2 * one_each,
        detection_boxes=np.repeat(boxes, 2, 0),
        detection_scores=np.tile(np.array([0.9, 0.2], np.float32), images),
        detection_labels=np.repeat(labels, 2),
    )
    card = {"protocol": "detect", "encoder": "runs/a: resnet50, step 10"}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"metrics": {"AP50": 50.0}, "card": card}))
    return path


def test_a_stored_result_is_drawn_beside_its_card(tmp_path):
    card = write_result(tmp_path)
    assert detections.draw_result(card) == "2 of 2 objects found, 0 false positives"
    with Image.open(tmp_path / "detect-VOC2007.png") as image:
        assert image.text["Title"] == "detect: runs/a: resnet50, step 10"
        assert image.text["Description"] == "2 of 2 objects found, 0 false positives"
        pixels = np.asarray(image.convert("RGB"))
    for gray in (40, 80):
        assert (pixels == gray).all(2).sum() > 1000
    green = [int(FOUND.color[i : i + 2], 16) for i in (1, 3, 5)]
    assert (np.abs(pixels.astype(int) - green).sum(2) < 30).sum() > 200


def test_images_that_are_gone_are_left_out(tmp_path):
    card = write_result(tmp_path, images=3)
    (tmp_path / "000001.png").unlink()
    assert detections.draw_result(card) == "2 of 2 objects found, 0 false positives"
    for file in tmp_path.glob("0*.png"):
        file.unlink()
    with pytest.raises(ValueError, match="at least one image"):
        detections.draw_result(card)
