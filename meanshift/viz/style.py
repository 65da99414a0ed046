"""The look of all figures: colors, fonts, mosaics of images, and the files they are written to."""

from __future__ import annotations

import functools
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meanshift.runtime.extras import require
from meanshift.runtime.files import atomic_writer, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

INK = "#1f2430"
QUIET = "#5d6575"
RULE = "#d9dde5"
PAPER = "#ffffff"
ALARM = "#b3261e"
COLORS = (
    "#2f6fde", "#d97200", "#006900", "#ff2d96", "#009fae",
    "#782d2d", "#929256", "#782d78", "#e10f2d", "#5a0fb4",
)  # fmt: skip
"""Ten colors that differ for the color-blind too; style.css has the same."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
"""one per color, so that a gray copy can be read"""
COLUMN = 3.4
"""inches: the width of one column of a paper"""
PAGE = 7.0
"""inches: the width of both columns"""
DPI = 300
SCREEN_DPI = 160
"""for images of web pages"""


def figure(width: float, height: float, *, dpi: int = DPI) -> Figure:
    """An empty figure of a size in inches, without the global state of pyplot."""
    require("matplotlib", extra="report", what="figures")
    from matplotlib.figure import Figure

    apply_style()
    return Figure(figsize=(width, height), dpi=dpi, facecolor=PAPER, layout="constrained")


def apply_style() -> None:
    """Set the fonts, lines and colors of every figure."""
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # for readers of the SVG
            "font.size": 8,
            "text.color": INK,
            "axes.edgecolor": QUIET,
            "axes.linewidth": 0.6,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.titlesize": 7.5,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=COLORS),
            "grid.color": RULE,
            "grid.linewidth": 0.5,
            "lines.linewidth": 1.2,
            "lines.markersize": 3.5,
            "xtick.color": QUIET,
            "ytick.color": QUIET,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
            "axes.formatter.useoffset": False,
            "legend.fontsize": 7,
            "legend.frameon": False,
            "figure.constrained_layout.w_pad": 0.02,
            "figure.constrained_layout.h_pad": 0.02,
            "pdf.fonttype": 42,  # TrueType, which publishers require
            "svg.hashsalt": "meanshift",  # the same figure gives the same file
            "svg.fonttype": "none",
            "text.parse_math": False,  # a class may be called $100
        }
    )


def show_percent(axes: Axes) -> None:
    """Show the fractions of the vertical axis, when all are plotted, as percentages."""
    from matplotlib.ticker import PercentFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if high - low >= 0.04 else 1))


def sheet(
    image: NDArray[np.uint8],
    *,
    left: int = 8,
    top: int = 8,
    right: int = 8,
    bottom: int = 8,
    dpi: int = DPI,
) -> tuple[Figure, Axes]:
    """A figure that shows an image pixel for pixel between margins; its units are pixels."""
    height, width = image.shape[:2]
    total_width = left + width + right
    total_height = top + height + bottom
    drawn = figure(total_width / dpi, total_height / dpi, dpi=dpi)
    drawn.set_layout_engine("none")
    axes = drawn.add_axes(
        (
            left / total_width,
            bottom / total_height,
            width / total_width,
            height / total_height,
        )
    )
    axes.imshow(image, interpolation="nearest", aspect="auto", extent=(0, width, height, 0))
    axes.axis("off")
    axes.set_autoscale_on(False)
    return drawn, axes


def cell_size(image_size: int) -> tuple[int, int]:
    """(side, scale) at which an image is shown in a mosaic: about 64 pixels, a whole multiple."""
    side = min(64, image_size)
    return side, max(1, 64 // side)


def mosaic(
    cells: Sequence[Sequence[NDArray[np.uint8] | None]], *, gap: int = 2, scale: int = 1
) -> NDArray[np.uint8]:
    """Rows of square images of one side as one image on white; None leaves a cell empty.

    Cell (row, column) starts at pixel `(side * scale + gap) * (row, column)`.
    """
    side = next(cell.shape[0] for row in cells for cell in row if cell is not None) * scale
    pitch = side + gap
    height = len(cells) * pitch - gap
    width = max(map(len, cells)) * pitch - gap
    image = np.full((height, width, 3), 255, dtype=np.uint8)
    for r, row in enumerate(cells):
        for c, cell in enumerate(row):
            if cell is not None:
                enlarged = np.repeat(np.repeat(cell, scale, 0), scale, 1)
                image[r * pitch : r * pitch + side, c * pitch : c * pitch + side] = enlarged
    return image


def shorten(name: str, length: int = 18) -> str:
    """A name of at most `length` characters on one line."""
    name = " ".join(name.encode("utf-8", "replace").decode().split())
    return name if len(name) <= length else name[: length - 1] + "…"


def save(
    drawn: Figure,
    path: Path,
    *,
    title: str,
    text: str,
    suffixes: Sequence[str] = (".png", ".pdf", ".svg", ".txt"),
) -> list[Path]:
    """Write a figure in each format, and its caption as text.

    The formats contain title and caption too, for those who cannot see the figure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    title, text = (words.encode("utf-8", "replace").decode() for words in (title, text))
    _add_fonts(drawn)
    keys = {  # of the caption, and of what would differ from file to file
        ".png": ("Description", "Software"),
        ".pdf": ("Subject", "CreationDate"),
        ".svg": ("Description", "Date"),
    }
    files = []
    for suffix in suffixes:
        target = path.with_name(path.name + suffix)
        files.append(target)
        if suffix == ".txt":
            wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
            write_text(target, wrapper.fill(f"{title}. {text}") + "\n")
            continue
        caption, left_out = keys[suffix]
        metadata = {"Title": title, caption: text, left_out: None}
        with atomic_writer(target, shared=True) as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # `_add_fonts` has warned once of them all
            drawn.savefig(file, format=suffix[1:], dpi=drawn.dpi, metadata=metadata)
    return files


def _add_fonts(drawn: Figure) -> None:
    """Let texts take characters that the usual font lacks, as 猫, from other installed fonts."""
    from matplotlib.text import Text

    texts = [found for found in drawn.findobj(Text) if isinstance(found, Text)]
    characters = "".join(sorted({character for text in texts for character in text.get_text()}))
    families, missing = _fallback_fonts(characters)
    if families:
        for text in texts:
            text.set_fontfamily(["sans-serif", *families])
    if missing:
        warnings.warn(
            f"no installed font has the characters {missing[:20]}, so PNG and PDF show boxes; "
            f"install one, such as Noto Sans CJK, and draw again (an SVG shows them where it is "
            f"opened with such a font)",
            stacklevel=3,
        )


@functools.lru_cache(maxsize=64)
def _fallback_fonts(characters: str) -> tuple[list[str], str]:
    """Font families for the characters that the usual font lacks, and those that none has."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    usual = get_font(findfont(FontProperties())).get_charmap()
    missing = {each for each in characters if not each.isspace() and ord(each) not in usual}
    covered = dict[str, set[str]]()
    for entry in fontManager.ttflist if missing else []:
        if entry.name.startswith("Last Resort"):  # matplotlib's own: a box for every character
            continue
        try:
            font = get_font(entry.fname)
        except (OSError, RuntimeError):  # not a file that can be read
            continue
        if font.scalable:
            found = {each for each in missing if font.get_char_index(ord(each))}
            covered[entry.name] = covered.get(entry.name, set()) | found
    families = []
    while best := max(covered, key=lambda name: len(covered[name] & missing), default=""):
        if not covered[best] & missing:
            break
        families.append(best)
        missing -= covered[best]
    return families, "".join(sorted(missing))
