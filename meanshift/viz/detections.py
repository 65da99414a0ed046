"""Detections drawn on their photographs: green where an object was found, red where missed."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from meanshift.ops.average_precision import Detections, GroundTruth, match
from meanshift.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 24
WIDE, HIGH, HIGHEST = 1600, 240, 420  # pixels of a row: its width, its height, and at most
GAP, CAPTION, TAG, PAD = 14, 26, 19, 4
SMALL = 6.5  # points of the type on and under a photograph

Place = tuple[int, int, int, int]  # left, top, right, bottom
Rect = tuple[int | float, ...]


@dataclass(frozen=True)
class Style:
    """How one kind of box is drawn; lines differ for those to whom the colors look alike."""

    word: str
    color: str
    width: float
    line: str | tuple[int, tuple[float, ...]] = "-"


FOUND = Style("found", "#1b8058", 1.8)
MISSED = Style("missed", style.ALARM, 1.6, (0, (4.0, 2.2)))
FALSE = Style("false alarm", "#96683c", 1.2, (0, (1.0, 1.4)))
HARD = Style("difficult", style.QUIET, 0.9, (0, (5.0, 1.5, 1.0, 1.5)))
STYLES = (FOUND, MISSED, FALSE, HARD)


@dataclass(frozen=True)
class Mark:
    """One box on a photograph, in its pixels, and the class and the score for its tag."""

    style: Style
    box: list[float]
    label: int
    score: float | None


def count(
    truths: Sequence[GroundTruth], founds: Sequence[Detections], *, score: float = 0.5
) -> str:
    """The figure's sentence: how many objects were found, and how many alarms were false."""
    marks = [mark for pair in zip(truths, founds, strict=True) for mark in _marks(*pair, score)]
    found, missed, false = (sum(mark.style is style for mark in marks) for style in STYLES[:3])
    alarms = f"{false} false alarm{'' if false == 1 else 's'}"
    return f"{found} of {found + missed} objects found, {alarms}"


def draw(
    images: Sequence[UInt8[Tensor, "3 _ _"]],
    truths: Sequence[GroundTruth],
    founds: Sequence[Detections],
    *,
    classes: Sequence[str],
    titles: Sequence[str],
    score: float = 0.5,
) -> Figure:
    """The first 24 photographs with their boxes; detections below `score` are not looked at.

    >>> look.save(draw(...), path, title="Detections", text=count(truths, founds))
    """
    if not len(images) == len(truths) == len(founds) == len(titles) or not images:
        got = f"{len(images)} images, {len(truths)} truths, {len(founds)} detections"
        raise ValueError(f"got {got} and {len(titles)} titles; need as many of each, and an image")
    truths, founds = truths[:MOST], founds[:MOST]
    sheet, places = _lay(images[:MOST])
    figure, axes = style.sheet(sheet, left=16, top=86, right=16, bottom=6)
    axes.text(0, -52, count(truths, founds, score=score), size=10, weight="bold")
    styles = {FOUND, MISSED, FALSE}
    for index, place in enumerate(places):
        wide, taken = place[2] - place[0], list[Rect]()
        caption = _fitting(titles[index].rpartition("/")[2], wide)
        axes.text(place[0] + wide / 2, place[3] + 13, caption, size=SMALL, color=style.QUIET,
                  ha="center", va="center")  # fmt: skip
        marks = _marks(truths[index], founds[index], score)
        boxes = [_on_sheet(mark, wide / images[index].shape[2], place) for mark in marks]
        styles.update(mark.style for mark in marks)
        for mark, box in reversed([*zip(marks, boxes, strict=True)]):  # those found lie above
            _outline(axes, mark.style, box)
        for mark, box in zip(marks, boxes, strict=True):
            if mark.style is not HARD:
                _tag(axes, mark, classes[mark.label], box, place, taken)
    _legend(axes, [style for style in STYLES if style in styles], score)
    return figure


def _marks(truth: GroundTruth, found: Detections, score: float) -> list[Mark]:
    """The boxes of one photograph: those found first, then the missed, then false alarms."""
    of_found, of_truth = match(found, truth, score=score)
    marks = []
    for index, by in enumerate(of_truth.tolist()):
        style = HARD if truth.difficult[index] else MISSED if by < 0 else FOUND
        sure = float(found.scores[by]) if style is FOUND else None
        marks.append(Mark(style, truth.boxes[index].tolist(), int(truth.labels[index]), sure))
    for index in ((found.scores >= score) & (of_found < 0)).nonzero()[:, 0].tolist():
        box, label = found.boxes[index].tolist(), int(found.labels[index])
        marks.append(Mark(FALSE, box, label, float(found.scores[index])))
    return sorted(marks, key=lambda mark: STYLES.index(mark.style))


def _lay(
    images: Sequence[UInt8[Tensor, "3 _ _"]],
) -> tuple[UInt8[np.ndarray, "high wide 3"], list[Place]]:
    """The photographs on white, in rows of one width and almost one height, and their places."""
    shapes = np.array([image.shape[2] / image.shape[1] for image in images])
    rows = max(1, math.ceil(shapes.sum() * HIGH / WIDE - 0.25))
    row_of = ((shapes.cumsum() - shapes / 2) * (rows / shapes.sum())).astype(int)
    places, top = list[Place](), 0
    for row in np.unique(row_of):
        mine = shapes[row_of == row]
        exact = min(HIGHEST, (WIDE - GAP * (len(mine) - 1)) / float(mine.sum()))
        high = max(1, round(exact))
        lefts = np.append(0, (mine * exact + GAP).cumsum()).round().astype(int).tolist()
        for left, after in itertools.pairwise(lefts):
            places.append((left, top, max(left + 1, after - GAP), top + high))
        top += high + CAPTION + GAP
    wide = max(580, *(place[2] for place in places))  # for title and legend
    sheet = np.full((top - GAP, wide, 3), 255, dtype=np.uint8)
    for image, (left, above, right, below) in zip(images, places, strict=True):
        photo = Image.fromarray(image.permute(1, 2, 0).numpy())
        tiny = below - above >= 2 * image.shape[1]  # keeps its pixels, as squares
        way = Image.Resampling.NEAREST if tiny else Image.Resampling.LANCZOS
        sheet[above:below, left:right] = np.asarray(
            photo.resize((right - left, below - above), way)
        )
    return sheet, places


def _on_sheet(mark: Mark, scale: float, place: Place) -> Rect:
    """A mark's box on the sheet; its line stays on the photograph."""
    x0, x1 = (min(max(place[0] + x * scale, place[0] + 2), place[2] - 2) for x in mark.box[::2])
    y0, y1 = (min(max(place[1] + y * scale, place[1] + 2), place[3] - 2) for y in mark.box[1::2])
    return x0, y0, x1, y1


def _outline(axes: Axes, style: Style, box: Rect) -> None:
    """A white line below and the style's above: seen on dark and on light photographs."""
    x, y = [box[at] for at in (0, 2, 2, 0, 0)], [box[at] for at in (1, 1, 3, 3, 1)]
    axes.plot(x, y, color="white", alpha=0.85, lw=style.width + 1.2, solid_joinstyle="miter")
    axes.plot(x, y, color=style.color, lw=style.width, ls=style.line, solid_joinstyle="miter")


def _tag(axes: Axes, mark: Mark, name: str, box: Rect, place: Place, taken: list[Rect]) -> None:
    """Name and score at a corner of the box, on the photograph and on no other tag, or nowhere."""
    left, top, right, bottom = place
    for most in (14, 7, 3):
        words = style.short(name, most) + ("" if mark.score is None else f" {mark.score:.2f}")
        wide = _width(words, SMALL) + 2 * PAD
        for y in (box[1] - TAG, box[1], box[3] - TAG, box[3]):
            for x in (box[0] - 2, box[2] + 2 - wide):
                x0, y0 = max(min(x, right - wide), left), max(min(y, bottom - TAG), top)
                x1, y1 = x0 + wide, y0 + TAG
                met = any(x0 < c and a < x1 and y0 < d and b < y1 for a, b, c, d in taken)
                if not met and x1 <= right and y1 <= bottom:
                    taken.append((x0, y0, x1, y1))
                    axes.fill_between([x0, x1], y0, y1, color=mark.style.color, lw=0, zorder=3)
                    axes.text(x0 + PAD, y1 - PAD - 1, words, size=SMALL, color="white", zorder=4)
                    return


def _legend(axes: Axes, styles: Sequence[Style], score: float) -> None:
    """A line of each kind and its word, below the title."""
    x, size = 0.0, SMALL + 0.5
    for kind in styles:
        words = f"{kind.word} (score ≥ {score:g})" if kind is FALSE else kind.word
        axes.plot([x, x + 32], [-24, -24], color=kind.color, lw=kind.width, ls=kind.line,
                  clip_on=False)  # fmt: skip
        axes.text(x + 40, -19, words, size=size, color=style.QUIET)
        x += 40 + _width(words, size) + 24


def _fitting(words: str, wide: int) -> str:
    """Words that are not wider than their photograph."""
    tried = (style.short(words, most) for most in range(1 + wide // 4, 1, -1))
    return next((some for some in tried if _width(some, SMALL) <= wide), "")


def _width(words: str, points: float) -> float:
    """How wide words will be, in pixels."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of scripts that the font lacks
        font = FontProperties(size=points)
        wide, _, _ = text_to_path.get_text_width_height_descent(words, font, ismath=False)
    return float(wide) * style.DPI / 72
