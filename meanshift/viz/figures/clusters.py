"""Random images of random clusters (appendix of the MSF paper): one row per cluster."""

from __future__ import annotations

from collections.abc import Sequence

from meanshift.runtime import rng
from meanshift.viz import style
from meanshift.viz.analysis import stored_clusters
from meanshift.viz.figures import Drawing, Options
from meanshift.viz.run_reader import Run


def draw(runs: Sequence[Run], options: Options) -> Drawing:
    """Clusters of `meanshift evaluate cluster`, with their size and most common class."""
    (run,) = runs
    assigned, indices = stored_clusters(run)
    labels = run.source.labels if run.source.labeled else None
    filled = assigned.unique()
    chosen = filled[rng.choice(options.seed, len(filled), options.rows or 30, rng.SAMPLE)]
    side, scale = style.cell_size(run.config.data.image_size)
    cells = []
    captions = []
    for cluster in chosen.tolist():
        members = indices[assigned == cluster]
        seed = rng.derive_seed(options.seed, cluster, rng.SAMPLE)
        shown = members[rng.permutation(seed, 0, len(members))[: options.columns or 20]]
        cells.append([run.thumbnail(index, side).numpy() for index in shown.tolist()])
        caption = f"{len(members):,} images"
        if labels is not None and len(known := labels[members][labels[members] >= 0]):
            label = int(known.bincount().argmax())
            fraction = float((known == label).float().mean())
            name = style.shorten(run.source.classes[label], 13)
            caption = f"{fraction:.0%} {name}\n{caption}"
        captions.append(caption)

    gap = 4
    left = 24 + 16 * max(len(line) for caption in captions for line in caption.split("\n"))
    figure, axes = style.sheet(style.mosaic(cells, gap=gap, scale=scale), left=left)
    for row, caption in enumerate(captions):
        y = row * (side * scale + gap) + side * scale / 2
        axes.text(-10, y, caption, ha="right", va="center", size=6, color=style.QUIET)
    rows = "; ".join(caption.replace("\n", ", ") for caption in captions)
    text = (
        f"Random images of {len(chosen)} of {len(filled)} k-means clusters, one cluster per row, "
    )
    text += "with the number of its images" + ("" if labels is None else " and its largest class")
    text += f": {rows}."
    return Drawing(figure, "Clusters", text)
