"""The figures of runs, one file per figure: `draw(runs, options)` returns a `Drawing`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meanshift.viz.run_reader import Run

NAMES = ("neighbors", "tsne", "purity", "accuracy", "clusters", "curves", "views", "cost")
COMBINED = frozenset({"purity", "accuracy", "curves"})
"""figures that show all runs together; each of the others is drawn once per run"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose about figures; 0 and () are the figure's own defaults."""

    rows: int = 0
    columns: int = 0
    epochs: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Drawing:
    """A figure with its title and its caption: what is shown, the axes, how it was computed."""

    figure: Figure
    title: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """The files of a figure, or why it was not drawn."""

    name: str
    files: tuple[Path, ...] = ()
    missing: str = ""


def draw_figures(
    runs: Sequence[Run], out: Path, *, names: Sequence[str] = NAMES, options: Options | None = None
) -> Iterator[Outcome]:
    """Write the named figures and their captions into `out`; one that lacks data is skipped."""
    from meanshift.viz import style
    from meanshift.viz.run_reader import MissingData

    for name in names:
        module = importlib.import_module(f"meanshift.viz.figures.{name}")
        groups = [list(runs)] if name in COMBINED else [[run] for run in runs]
        for group in groups:
            file = name
            if len(runs) > 1 and name not in COMBINED:
                file = f"{name}-{group[0].name.replace('/', '-')}"
            try:
                drawing: Drawing = module.draw(group, options or Options())
            except MissingData as error:
                yield Outcome(file, missing=str(error))
                continue
            text = " ".join([drawing.text, *map(describe_run, group)])
            files = style.save(drawing.figure, out / file, title=drawing.title, text=text)
            yield Outcome(file, tuple(files))


def describe_run(run: Run) -> str:
    """A sentence on a run for the caption of a figure: method, encoder, data and epochs."""
    config = run.config
    return (
        f"Run {run.name}: {run.method}, {config.encoder.name}, data {config.data.source} at "
        f"{config.data.image_size} pixels, {run.epochs_done:.4g} of {config.train.epochs} epochs, "
        f"seed {config.train.seed}."
    )


def group_similar(
    runs: Sequence[Run], *, ignore: Collection[str] = ("train.seed",)
) -> list[list[Run]]:
    """Groups of runs that differ only in the ignored settings, in the order given.

    If `method.name` is ignored, so are settings that only one of two methods has. A run that
    differs from another one in no setting is left out with a warning: it is not another seed.
    """
    groups: list[list[Run]] = []
    for run in runs:
        group = next((group for group in groups if _similar(group[0], run, ignore)), None)
        if group is None:
            groups.append([run])
        elif first := next((other for other in group if _similar(other, run, ())), None):
            warnings.warn(
                f"{run.folder}: has the same settings and seed as {first.folder}, left out of the "
                f"figure",
                stacklevel=2,
            )
        else:
            group.append(run)
    return groups


def _similar(one: Run, other: Run, ignore: Collection[str]) -> bool:
    from meanshift.viz.run_reader import differing_settings

    return all(
        name in ignore or ("method.name" in ignore and None in values)
        for name, values in differing_settings([one, other]).items()
    )


def names_by_settings(
    runs: Sequence[Run], *, ignore: Collection[str] = ("train.seed",)
) -> list[str]:
    """Short names of runs by the settings in which they differ, as `k 10`.

    Where there are more than three such settings, or the names are not unique, the run's own name.
    """
    from meanshift.viz.run_reader import differing_settings

    differing = {
        name.partition(".")[2].replace("_", " "): values
        for name, values in differing_settings(runs).items()
        if name not in ignore
    }
    names = [
        ", ".join(f"{setting} {values[at]}" for setting, values in differing.items())
        for at in range(len(runs))
    ]
    unique = len(set(names)) == len(runs)
    return names if unique and 1 <= len(differing) <= 3 else [run.name for run in runs]
