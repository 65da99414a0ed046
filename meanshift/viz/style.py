"""One look for all figures and pages: colors, type, mosaics, and files that are made alike."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meanshift.runtime.run_directory import atomic_writer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

INK, QUIET, RULE, PAPER = "#1f2430", "#5d6575", "#d9dde5", "#ffffff"
ALARM = "#b3261e"
COLORS = (
    "#2f6fde", "#e0662b", "#2a9d6f", "#c23a6b", "#8a5bd0",
    "#a8780a", "#1794a8", "#8c5a3c", "#d957b9", "#7a8a1f",
)  # fmt: skip
"""Ten that differ in lightness as well as in hue; the pages have the same."""
DPI = 160
ASSETS = Path(__file__).parent / "assets"


def figure(width: float, height: float) -> Figure:
    """An empty figure in inches, without the global state of pyplot."""
    from matplotlib.figure import Figure

    style()
    return Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")


def style() -> None:
    """Type and lines of every figure."""
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


def pixels_of(image_size: int) -> tuple[int, int]:
    """(side, scale) at which a small image is drawn: about 64 pixels, never between pixels."""
    side = min(64, image_size)
    return side, max(1, 64 // side)


def sheet(
    image: NDArray[np.uint8], *, left: int = 8, top: int = 8, right: int = 8, bottom: int = 8
) -> tuple[Figure, Axes]:
    """A figure that shows an image pixel for pixel between margins; its units are pixels."""
    height, width = image.shape[:2]
    wide, high = left + width + right, top + height + bottom
    drawn = figure(wide / DPI, high / DPI)
    drawn.set_layout_engine("none")
    axes = drawn.add_axes((left / wide, bottom / high, width / wide, height / high))
    extent = (0, width, height, 0)
    axes.imshow(image, interpolation="nearest", aspect="auto", extent=extent)
    axes.axis("off")
    axes.set_autoscale_on(False)
    return drawn, axes


def short(name: str, most: int = 18) -> str:
    """A name that fits beside an image."""
    name = " ".join(name.encode("utf-8", "replace").decode().split())
    return name if len(name) <= most else name[: most - 1] + "…"


def mosaic(
    cells: Sequence[Sequence[NDArray[np.uint8] | None]], *, gap: int = 2, scale: int = 1
) -> NDArray[np.uint8]:
    """Rows of square images of one side as one image on white; None leaves a cell empty.

    Cell (row, column) begins at pixel `(side * scale + gap) * (row, column)`.
    """
    side = next(cell.shape[0] for row in cells for cell in row if cell is not None) * scale
    height, width = len(cells), max(map(len, cells))
    sheet = np.full(
        (height * (side + gap) - gap, width * (side + gap) - gap, 3), 255, dtype=np.uint8
    )
    for r, row in enumerate(cells):
        for c, cell in enumerate(row):
            if cell is not None:
                top, left = r * (side + gap), c * (side + gap)
                big = np.repeat(np.repeat(cell, scale, 0), scale, 1)
                sheet[top : top + side, left : left + side] = big
    return sheet


def save(
    drawn: Figure,
    path: Path,
    *,
    title: str,
    text: str,
    suffixes: Sequence[str] = (".png", ".svg"),
) -> list[Path]:
    """Write PNG and SVG; both carry their title and a text for those who cannot see them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = []
    about = {"Title": title, "Description": text}
    for suffix in suffixes:
        told = {**about, {".png": "Software", ".svg": "Date"}[suffix]: None}
        target = path.with_name(path.name + suffix)
        with atomic_writer(target, shared=True) as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # of scripts that the font lacks
            drawn.savefig(file, format=suffix[1:], dpi=DPI, metadata=told)
        files.append(target)
    return files


def page(template: str, **given: Any) -> str:
    """A page of `assets/`, whole in itself: styles and scripts are written into it."""
    import jinja2

    place = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    given |= {"version": metadata.version("meanshift")}
    return place.get_template(template).render(
        asset=lambda name: (ASSETS / name).read_text(), **given
    )


def thinned(
    x: Sequence[float], y: Sequence[float], *, most: int = 400
) -> tuple[list[float], list[float]]:
    """At most so many points of a curve, each the mean of its stretch; ends are kept."""
    if len(x) > most:
        edges = np.linspace(0, len(x), most + 1).astype(int)
        parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        x = [x[0], *(statistics.fmean(x[p]) for p in parts[1:-1]), x[-1]]
        y = [y[0], *(statistics.fmean(y[p]) for p in parts[1:-1]), y[-1]]
    return [round(value, 3) for value in x], [float(f"{value:.5g}") for value in y]
