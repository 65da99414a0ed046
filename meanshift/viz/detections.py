"""Detections drawn on their images: green where an object was found, red where it was missed."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from meanshift.config.samples import RGB
from meanshift.data import UnreadableSample
from meanshift.data.convert import convert
from meanshift.data.decode import read_image
from meanshift.ops.average_precision import Detections, GroundTruth, match_detections
from meanshift.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_IMAGES = 24
# All lengths are in pixels.
ROW_WIDTH = 1600
ROW_HEIGHT = 240
MAX_HEIGHT = 420
MIN_WIDTH = 600  # room for title and legend
GAP = 14
CAPTION_HEIGHT = 26
TAG_HEIGHT = 19
TAG_PADDING = 4
FONT_SIZE = 6.5  # in points

Place = tuple[int, int, int, int]
"""left, top, right, bottom"""
Rectangle = tuple[int | float, ...]


@dataclass(frozen=True)
class BoxStyle:
    """How one kind of box is drawn; the dashes differ for those to whom the colors look alike."""

    name: str
    color: str
    width: float
    line: str | tuple[int, tuple[float, ...]] = "-"


FOUND = BoxStyle("found", "#1b8058", 1.8)
MISSED = BoxStyle("missed", style.ALARM, 1.6, (0, (4.0, 2.2)))
FALSE = BoxStyle("false positive", "#96683c", 1.2, (0, (1.0, 1.4)))
DIFFICULT = BoxStyle("difficult", style.QUIET, 0.9, (0, (5.0, 1.5, 1.0, 1.5)))
STYLES = (FOUND, MISSED, FALSE, DIFFICULT)


@dataclass(frozen=True)
class Box:
    """One box of an image, in its pixels, with the class and the score for its tag."""

    style: BoxStyle
    corners: list[float]
    label: int
    score: float | None


def draw_result(card: Path) -> str:
    """Draw the stored detections of a result: from `detect*.npz` to `detect*.png` beside the card.

    Images that cannot be read any more are left out. Returns the sentence of `summarize`.
    """
    with card.with_suffix(".npz").open("rb") as file, np.load(file) as arrays:
        stored = {name: arrays[name] for name in arrays.files}
    truths = [
        GroundTruth(*arrays) for arrays in _split(stored, "truth", "boxes", "labels", "difficult")
    ]
    detections = [
        Detections(*arrays) for arrays in _split(stored, "detection", "boxes", "scores", "labels")
    ]
    titles = stored["titles"].tolist()
    images = dict[int, Tensor]()
    for index, file in enumerate(stored["files"].tolist()):
        with contextlib.suppress(UnreadableSample, ValueError):
            images[index] = convert(read_image(Path(file), title=titles[index]), RGB)
    truths = [truths[index] for index in images]
    detections = [detections[index] for index in images]
    figure = draw(
        list(images.values()),
        truths,
        detections,
        classes=stored["classes"].tolist(),
        titles=[titles[index] for index in images],
    )
    metadata = json.loads(card.read_text())["card"]
    text = summarize(truths, detections)
    title = f"{metadata['protocol']}: {metadata['encoder']}"
    style.save(figure, card.with_suffix(""), title=title, text=text, suffixes=[".png"])
    return text


def _split(stored: dict[str, np.ndarray], kind: str, *names: str) -> list[tuple[Tensor, ...]]:
    """The arrays `KIND_NAME` image by image; they are stored one image after the other."""
    counts = stored[f"{kind}_counts"].tolist()
    columns = [torch.from_numpy(stored[f"{kind}_{name}"]).split(counts) for name in names]
    return list(zip(*columns, strict=True))


def summarize(
    truths: Sequence[GroundTruth], detections: Sequence[Detections], *, score: float = 0.5
) -> str:
    """One sentence: how many objects were found, and how many detections are false."""
    boxes = [box for pair in zip(truths, detections, strict=True) for box in _boxes(*pair, score)]
    found, missed, false = (sum(box.style is kind for box in boxes) for kind in STYLES[:3])
    plural = "" if false == 1 else "s"
    return f"{found} of {found + missed} objects found, {false} false positive{plural}"


def draw(
    images: Sequence[UInt8[Tensor, "3 _ _"]],
    truths: Sequence[GroundTruth],
    detections: Sequence[Detections],
    *,
    classes: Sequence[str],
    titles: Sequence[str],
    score: float = 0.5,
) -> Figure:
    """The first 24 images with their boxes; detections below `score` are left out."""
    if not len(images) == len(truths) == len(detections) == len(titles) or not images:
        counts = f"{len(images)} images, {len(truths)} truths, {len(detections)} detections"
        raise ValueError(
            f"got {counts} and {len(titles)} titles; need as many of each, and at least one image"
        )
    images = images[:MAX_IMAGES]
    truths = truths[:MAX_IMAGES]
    detections = detections[:MAX_IMAGES]
    sheet, places = _lay_out(images)
    figure, axes = style.sheet(sheet, left=16, top=86, right=16, bottom=6, dpi=style.SCREEN_DPI)
    axes.text(0, -52, summarize(truths, detections, score=score), size=10, weight="bold")
    styles = {FOUND, MISSED, FALSE}
    for image, truth, detection, title, place in zip(
        images, truths, detections, titles, places, strict=False
    ):
        boxes = _boxes(truth, detection, score)
        styles.update(box.style for box in boxes)
        _write_caption(axes, title, place)
        _draw_boxes(axes, boxes, classes, place, scale=(place[2] - place[0]) / image.shape[2])
    _write_legend(axes, [kind for kind in STYLES if kind in styles], score)
    return figure


def _boxes(truth: GroundTruth, detection: Detections, score: float) -> list[Box]:
    """The boxes of one image: those found first, then the missed, then false positives."""
    truth_of, detection_of = match_detections(detection, truth, min_score=score)
    boxes = []
    for index, matched in enumerate(detection_of.tolist()):
        kind = DIFFICULT if truth.difficult[index] else MISSED if matched < 0 else FOUND
        confidence = float(detection.scores[matched]) if kind is FOUND else None
        corners = truth.boxes[index].tolist()
        boxes.append(Box(kind, corners, int(truth.labels[index]), confidence))
    for index in ((detection.scores >= score) & (truth_of < 0)).nonzero()[:, 0].tolist():
        corners = detection.boxes[index].tolist()
        label = int(detection.labels[index])
        boxes.append(Box(FALSE, corners, label, float(detection.scores[index])))
    return sorted(boxes, key=lambda box: STYLES.index(box.style))


def _lay_out(
    images: Sequence[UInt8[Tensor, "3 _ _"]],
) -> tuple[UInt8[np.ndarray, "height width 3"], list[Place]]:
    """The images on white, in rows of one width and almost one height, and their places."""
    ratios = np.array([image.shape[2] / image.shape[1] for image in images])
    rows = max(1, math.ceil(ratios.sum() * ROW_HEIGHT / ROW_WIDTH - 0.25))
    row_of = ((ratios.cumsum() - ratios / 2) * (rows / ratios.sum())).astype(int)
    places = list[Place]()
    top = 0
    for row in np.unique(row_of):
        in_row = ratios[row_of == row]
        exact = min(MAX_HEIGHT, (ROW_WIDTH - GAP * (len(in_row) - 1)) / float(in_row.sum()))
        height = max(1, round(exact))
        lefts = np.append(0, (in_row * exact + GAP).cumsum()).round().astype(int).tolist()
        for left, following in itertools.pairwise(lefts):
            places.append((left, top, max(left + 1, following - GAP), top + height))
        top += height + CAPTION_HEIGHT + GAP
    width = max(MIN_WIDTH, *(place[2] for place in places))
    sheet = np.full((top - GAP, width, 3), 255, dtype=np.uint8)
    for image, (left, above, right, below) in zip(images, places, strict=True):
        tiny = below - above >= 2 * image.shape[1]  # its pixels are shown as squares
        resampling = Image.Resampling.NEAREST if tiny else Image.Resampling.LANCZOS
        photo = Image.fromarray(image.permute(1, 2, 0).numpy())
        resized = photo.resize((right - left, below - above), resampling)
        sheet[above:below, left:right] = np.asarray(resized)
    return sheet, places


def _draw_boxes(
    axes: Axes, boxes: Sequence[Box], classes: Sequence[str], place: Place, *, scale: float
) -> None:
    """Draw the boxes of one image with their tags; those of found objects lie on top."""
    rectangles = [_on_sheet(box, scale, place) for box in boxes]
    for box, rectangle in reversed([*zip(boxes, rectangles, strict=True)]):
        _outline(axes, box.style, rectangle)
    taken = list[Rectangle]()
    for box, rectangle in zip(boxes, rectangles, strict=True):
        if box.style is not DIFFICULT:
            _write_tag(axes, box, classes[box.label], rectangle, place, taken)


def _on_sheet(box: Box, scale: float, place: Place) -> Rectangle:
    """A box in pixels of the sheet; its line stays on the image."""
    left, top, right, bottom = place
    x0, x1 = (min(max(left + x * scale, left + 2), right - 2) for x in box.corners[::2])
    y0, y1 = (min(max(top + y * scale, top + 2), bottom - 2) for y in box.corners[1::2])
    return x0, y0, x1, y1


def _outline(axes: Axes, kind: BoxStyle, box: Rectangle) -> None:
    """A white line below and the colored one above: visible on dark and on light images."""
    x = [box[corner] for corner in (0, 2, 2, 0, 0)]
    y = [box[corner] for corner in (1, 1, 3, 3, 1)]
    axes.plot(x, y, color="white", alpha=0.85, lw=kind.width + 1.2, solid_joinstyle="miter")
    axes.plot(x, y, color=kind.color, lw=kind.width, ls=kind.line, solid_joinstyle="miter")


def _write_tag(
    axes: Axes, box: Box, name: str, at: Rectangle, place: Place, taken: list[Rectangle]
) -> None:
    """Write class and score at a corner of the box where they fit on the image, off other tags."""
    left, top, right, bottom = place
    for length in (14, 7, 3):
        words = style.shorten(name, length) + ("" if box.score is None else f" {box.score:.2f}")
        width = _text_width(words, FONT_SIZE) + 2 * TAG_PADDING
        for y in (at[1] - TAG_HEIGHT, at[1], at[3] - TAG_HEIGHT, at[3]):
            for x in (at[0] - 2, at[2] + 2 - width):
                x0 = max(min(x, right - width), left)
                y0 = max(min(y, bottom - TAG_HEIGHT), top)
                x1 = x0 + width
                y1 = y0 + TAG_HEIGHT
                overlaps = any(x0 < c and a < x1 and y0 < d and b < y1 for a, b, c, d in taken)
                if not overlaps and x1 <= right and y1 <= bottom:
                    taken.append((x0, y0, x1, y1))
                    axes.fill_between([x0, x1], y0, y1, color=box.style.color, lw=0, zorder=3)
                    baseline = y1 - TAG_PADDING - 1
                    axes.text(
                        x0 + TAG_PADDING, baseline, words, size=FONT_SIZE, color="white", zorder=4
                    )
                    return


def _write_caption(axes: Axes, title: str, place: Place) -> None:
    """Write the file's name below its image, not wider than the image."""
    left, _, right, bottom = place
    axes.text(
        (left + right) / 2,
        bottom + 13,
        _shorten_to(title.rpartition("/")[2], right - left),
        size=FONT_SIZE,
        color=style.QUIET,
        ha="center",
        va="center",
    )


def _write_legend(axes: Axes, styles: Sequence[BoxStyle], score: float) -> None:
    """A line of each kind and its name, below the title."""
    x = 0.0
    size = FONT_SIZE + 0.5
    for kind in styles:
        words = f"{kind.name} (score ≥ {score:g})" if kind is FALSE else kind.name
        axes.plot(
            [x, x + 32], [-24, -24], color=kind.color, lw=kind.width, ls=kind.line, clip_on=False
        )
        axes.text(x + 40, -19, words, size=size, color=style.QUIET)
        x += 40 + _text_width(words, size) + 24


def _shorten_to(words: str, width: int) -> str:
    """The longest beginning of a text that is not wider than `width` pixels."""
    candidates = (style.shorten(words, length) for length in range(1 + width // 4, 1, -1))
    return next((text for text in candidates if _text_width(text, FONT_SIZE) <= width), "")


def _text_width(words: str, points: float) -> float:
    """The width of a text in pixels."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of scripts that the font lacks
        font = FontProperties(size=points)
        width, _, _ = text_to_path.get_text_width_height_descent(words, font, ismath=False)
    return float(width) * style.SCREEN_DPI / 72
