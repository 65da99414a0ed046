"""One file a figure of the paper, behind one contract: runs in, a drawing and its words out."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meanshift.run import Run

NAMES = ("neighbours", "tsne", "purity", "accuracy", "clusters", "curves", "views", "cost")
TOGETHER = frozenset({"purity", "accuracy", "curves"})
"""figures that hold all runs side by side; of the others there is one a run"""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a person may choose about figures; 0 and () leave it to the figure."""

    rows: int = 0
    columns: int = 0
    epochs: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Drawing:
    """A figure with a title and a text that tells what is to be seen."""

    figure: Figure
    title: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """What became of a figure: its files, or what it lacks."""

    name: str
    files: tuple[Path, ...] = ()
    lacks: str = ""


def draw_figures(
    runs: Sequence[Run], out: Path, *, names: Sequence[str] = NAMES, choices: Choices | None = None
) -> Iterator[Outcome]:
    """Draw the named figures into `out`, as PNG and SVG; one that lacks something says what."""
    from meanshift import look
    from meanshift.run import Lacking

    for name in names:
        module = importlib.import_module(f"meanshift.figures.{name}")
        for group in [list(runs)] if name in TOGETHER else [[run] for run in runs]:
            alone = len(runs) == 1 or name in TOGETHER
            file = name if alone else f"{name}-{group[0].name.replace('/', '-')}"
            try:
                drawing: Drawing = module.draw(group, choices or Choices())
            except Lacking as lacking:
                yield Outcome(file, lacks=str(lacking))
                continue
            files = look.save(drawing.figure, out / file, title=drawing.title, text=drawing.text)
            yield Outcome(file, tuple(files))
