"""One file a figure of the paper, behind one contract: runs in, a drawing and its words out."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meanshift.viz.run_reader import Run

NAMES = ("neighbors", "tsne", "purity", "accuracy", "clusters", "curves", "views", "cost")
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
    from meanshift.viz import style
    from meanshift.viz.run_reader import MissingData

    for name in names:
        module = importlib.import_module(f"meanshift.viz.figures.{name}")
        for group in [list(runs)] if name in TOGETHER else [[run] for run in runs]:
            alone = len(runs) == 1 or name in TOGETHER
            file = name if alone else f"{name}-{group[0].name.replace('/', '-')}"
            try:
                drawing: Drawing = module.draw(group, choices or Choices())
            except MissingData as lacking:
                yield Outcome(file, lacks=str(lacking))
                continue
            files = style.save(drawing.figure, out / file, title=drawing.title, text=drawing.text)
            yield Outcome(file, tuple(files))


def alike(runs: Sequence[Run], *, but: Collection[str] = ("train.seed",)) -> list[list[Run]]:
    """Runs in groups that differ in nothing but some settings, in the order given."""
    from meanshift.viz.run_reader import differing

    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if not set(differing([group[0], run])) - set(but):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def names_by_settings(runs: Sequence[Run], *, but: Collection[str] = ("train.seed",)) -> list[str]:
    """What sets each run apart from the others: `k 10`, `w/s`; its name, where that is too much."""
    from meanshift.viz.run_reader import differing

    views = {"method.target_view", "method.online_view", "method.same_view"}
    apart = {name: values for name, values in differing(runs).items() if name not in but}
    told = [
        dict.fromkeys(
            run.pair
            if name in views
            else f"{name.partition('.')[2].replace('_', ' ')} {values[at]}"
            for name, values in apart.items()
        )
        for at, run in enumerate(runs)
    ]
    names = [", ".join(words) for words in told]
    clear = len(set(names)) == len(runs) and all(1 <= len(words) <= 3 for words in told)
    return names if clear else [run.name for run in runs]
