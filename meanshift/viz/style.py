"""The look of all figures: colors, fonts, mosaics of images, and the files they are written to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meanshift.runtime.extras import require
from meanshift.runtime.files import atomic_writer

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
    "#2f6fde", "#e0662b", "#2a9d6f", "#c23a6b", "#8a5bd0",
    "#a8780a", "#1794a8", "#8c5a3c", "#d957b9", "#7a8a1f",
)  # fmt: skip
"""Ten colors that differ in lightness as well as in hue; style.css has the same."""
DPI = 160


def figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, without the global state of pyplot."""
    require("matplotlib", extra="report", what="figures")
    from matplotlib.figure import Figure

    apply_style()
    return Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")


def apply_style() -> None:
    """Set the fonts, lines and colors of every figure."""
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # for readers of the SVG
            "font.size": 9,
            "text.color": INK,
            "axes.edgecolor": RULE,
            "axes.labelcolor": QUIET,
            "axes.titlecolor": INK,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=COLORS),
            "grid.color": RULE,
            "grid.linewidth": 0.6,
            "lines.linewidth": 1.6,
            "xtick.color": QUIET,
            "ytick.color": QUIET,
            "xtick.major.size": 0,
            "ytick.major.size": 0,
            "legend.frameon": False,
            "svg.hashsalt": "meanshift",  # the same figure gives the same file
            "svg.fonttype": "none",
            "text.parse_math": False,  # a class may be called $100
        }
    )


def sheet(
    image: NDArray[np.uint8], *, left: int = 8, top: int = 8, right: int = 8, bottom: int = 8
) -> tuple[Figure, Axes]:
    """A figure that shows an image pixel for pixel between margins; its units are pixels."""
    height, width = image.shape[:2]
    total_width = left + width + right
    total_height = top + height + bottom
    drawn = figure(total_width / DPI, total_height / DPI)
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
    suffixes: Sequence[str] = (".png", ".svg"),
) -> list[Path]:
    """Write PNG and SVG; both contain the title and a description for those who cannot see them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left_out = {".png": "Software", ".svg": "Date"}  # the same figure gives the same file
    files = []
    for suffix in suffixes:
        metadata = {"Title": title, "Description": text, left_out[suffix]: None}
        target = path.with_name(path.name + suffix)
        with atomic_writer(target, shared=True) as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # of scripts that the font lacks
            drawn.savefig(file, format=suffix[1:], dpi=DPI, metadata=metadata)
        files.append(target)
    return files
