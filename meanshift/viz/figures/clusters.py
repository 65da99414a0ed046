"""Random images of random clusters (the paper's appendix): a row a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meanshift.runtime import rng
from meanshift.viz import style
from meanshift.viz.figures import Choices, Drawing
from meanshift.viz.run_reader import MissingData, Run


def draw(runs: Sequence[Run], choices: Choices) -> Drawing:
    """What `meanshift evaluate cluster` found, with size and majority where labels are known."""
    (run,) = runs
    _refuse_others(run)
    assigned, index = run.clusters()
    labels = run.source.labels if run.source.labeled else None
    filled = assigned.unique()
    chosen = filled[rng.choice(choices.seed, len(filled), choices.rows or 30, rng.PROBE)]
    side, scale = style.pixels_of(run.config.data.image_size)
    columns, cells, words = choices.columns or 20, [], []
    for cluster in chosen.tolist():
        members = index[assigned == cluster]
        stream = rng.derive_seed(choices.seed, cluster, rng.PROBE)
        shown = members[rng.permutation(stream, 0, len(members))[:columns]]
        cells.append([run.thumbnail(i, side).numpy() for i in shown.tolist()])
        words.append(f"{len(members):,} images")
        if labels is not None and len(known := labels[members][labels[members] >= 0]):
            label = int(known.bincount().argmax())
            share = float((known == label).float().mean())
            words[-1] = f"{share:.0%} {style.short(run.source.classes[label], 13)}\n{words[-1]}"

    gap, left = 4, 190
    figure, axes = style.sheet(style.mosaic(cells, gap=gap, scale=scale), left=left, top=44)
    title = f"{style.short(run.name)}: random images of {len(chosen)} of the {len(filled)} clusters"
    axes.text(8 - left, -12, title, size=10, weight="bold", va="bottom")
    for row, told in enumerate(words):
        y = row * (side * scale + gap) + side * scale / 2
        axes.text(-10, y, told, ha="right", va="center", size=7.5, color=style.QUIET)
    text = f"Random images of {len(chosen)} clusters of {run.name}, one a row: "
    return Drawing(figure, "Clusters", text + "; ".join(w.replace("\n", ", ") for w in words) + ".")


def _refuse_others(run: Run) -> None:
    """Numbers are no names: clusters of other images would find places in the run's as well."""
    held = run.results.get("cluster", {"card": {}, "figures": {}})
    data, own = held["card"].get("data"), (run.journal.config.data.source, run.config.data.source)
    again = f"type: meanshift evaluate cluster {run.folder}"
    if data is not None and _place(data) not in map(_place, own):
        raise MissingData(f"{run.folder}: its clusters are of {data}, not of {own[1]}; {again}")
    named = held["card"].get("labels", "the source's own") != "the source's own"
    if "NMI" in held["figures"] and not named and not run.source.labeled:
        raise MissingData(
            f"{run.folder}: its clusters are of labeled images that it was not trained on; need "
            f"clusters of its own images"
        )


def _place(source: str) -> Path:
    return Path(source).expanduser().absolute()
