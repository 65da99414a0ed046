"""What a page shows of one run's images: map, neighbors, clusters, views, state of the data."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from meanshift.data import UnreadableSample
from meanshift.ops.topk import nearest_neighbors
from meanshift.runtime import rng
from meanshift.transforms.replay import center_square, denormalize, replay_views
from meanshift.viz import style
from meanshift.viz.run_reader import MissingData, Run
from meanshift.viz.tsne import EpochMap, draw_maps

_NEAR = 8  # neighbors in a strip


def seen(run: Run, sheets: dict[str, str], most: int) -> dict[str, Any]:
    """Map and neighbors by epoch, with every image that they show on one sheet."""
    maps = draw_maps(run, most=most)
    rows = maps[0].rows
    indices = run.moment(maps[-1].epoch).indices[rows]
    side = 32 if run.config.data.image_size <= 48 else 64
    labels = None if run.labels is None else run.labels[rows]
    near, pure = [], []
    for one in maps:
        unit = run.moment(one.epoch).features[rows]
        found, _ = nearest_neighbors(
            unit, unit, min(_NEAR, len(unit) - 1), leave_out=torch.arange(len(unit))
        )
        near.append(found.tolist())
        if labels is not None:
            pure.append(float((labels[found] == labels[:, None])[labels >= 0].float().mean()))
    names, groups, by = _groups(run, labels, maps)
    cells = [run.thumbnail(index, side).numpy() for index in indices.tolist()]
    words = f"{len(rows)} training images, " + (
        "colored by class" if by == "label" else "colored by cluster, since there are no labels"
    )
    return {
        "words": words,
        "by": by,
        "legend": list(enumerate(names)),
        "drawn": {
            "epochs": [one.epoch for one in maps],
            "points": [[round(v, 3) for v in one.points.flatten().tolist()] for one in maps],
            "near": near,
            "pure": pure,
            "groups": groups,
            "names": names,
            "by": by,
            "titles": [run.source.title(index) for index in indices.tolist()],
            "sheet": _sheet(cells, sheets),
            "side": side,
            "columns": math.ceil(math.sqrt(len(cells))),
            "queries": _queries(labels, len(rows)),
        },
    }


def _groups(
    run: Run, labels: Tensor | None, maps: Sequence[EpochMap]
) -> tuple[list[str], list[int], str]:
    """What the points are colored by: classes, or clusters of the last snapshot."""
    if labels is not None:
        return list(run.source.classes), labels.tolist(), "label"
    from meanshift.evaluation.cluster import groups

    names, assigned = groups(run.moment(maps[-1].epoch).features)
    return names, assigned[maps[-1].rows].tolist(), "cluster"


def _queries(labels: Tensor | None, size: int) -> list[int]:
    """Images whose neighbors are shown: one of each class, up to ten."""
    some = rng.choice(0, size, size, rng.SPLIT)
    order = rng.uniform(0, 0, some, rng.SPLIT, 1)[:, 0].argsort().tolist()
    if labels is None:
        return order[:10]
    firsts: dict[int, int] = {}
    for row in order:
        firsts.setdefault(int(labels[row]), row)
    return [firsts[label] for label in sorted(firsts) if label >= 0][:10]


def _sheet(cells: list[NDArray[np.uint8]], sheets: dict[str, str]) -> str:
    """All images of a probe as one JPEG; runs with the same probe share it."""
    columns = math.ceil(math.sqrt(len(cells)))
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    address = _address(style.mosaic(rows, gap=0), quality=82)
    for name, known in sheets.items():
        if known == address:
            return name
    sheets[f"s{len(sheets)}"] = address
    return f"s{len(sheets) - 1}"


def clusters(run: Run, *, rows: int = 10, columns: int = 14) -> dict[str, Any]:
    """Random images of random clusters, from the stored assignment."""
    assigned, places = run.clusters()
    sizes, side = assigned.bincount(), 32 if run.config.data.image_size <= 48 else 64
    chosen = (sizes > 0).nonzero()[:, 0]
    chosen = chosen[rng.choice(0, len(chosen), rows, rng.PROBE)]
    made = []
    for cluster in chosen.tolist():
        members = places[(assigned == cluster).nonzero()[:, 0]]
        order = rng.uniform(cluster, 0, torch.arange(len(members)), rng.PROBE, 1)[:, 0].argsort()
        some = members[order[:columns]]
        told = f"{len(members):,} images"
        if run.source.labels is not None:
            labels = run.source.labels[members]
            for common, count in Counter(labels[labels >= 0].tolist()).most_common(1):
                told += f", {count / len(members):.0%} {run.source.classes[common]}"
        cells = [run.thumbnail(i, side).numpy() for i in some.tolist()]
        made.append({"words": told, "image": _address(style.mosaic([cells], gap=2))})
    return {"rows": made, "older": run.older(run.results.get("cluster", {"card": {}}))}


def views(run: Run, *, count: int = 8) -> dict[str, Any]:
    """Images and the two views of each in the first epoch."""
    ids = rng.choice(1, len(run.source), count, rng.PROBE)
    drawn = replay_views(run.source, ids, epoch=0, config=run.config, keep=True)
    if not len(drawn.ids):
        raise MissingData(f"{run.folder}: none of the images that were drawn can be read")
    side = min(run.config.data.image_size, 96)
    rows = [
        [center_square(image, side).numpy() for image in drawn.images],
        [center_square(denormalize(view), side).numpy() for view in drawn.target],
        [center_square(denormalize(view), side).numpy() for view in drawn.online],
    ]
    how = run.config.views
    names = ["the image", f"the target's view ({how.online if how.same_view else how.target})"]
    names += [f"the online view ({how.online}{', the same' if how.same_view else ''})"]
    return {
        "rows": [
            {"words": words, "image": _address(style.mosaic([row], gap=2), quality=88)}
            for words, row in zip(names, rows, strict=True)
        ]
    }


def data(run: Run) -> dict[str, Any]:
    """How many images, of which sizes and classes; what could not be read is listed apart."""
    source = run.source
    some = rng.choice(0, len(source), 1 if source.uniform else 200, rng.PROBE)
    sizes = []
    for index in some.tolist():
        try:
            sizes.append(tuple(source.read(index).shape[1:][::-1]))
        except UnreadableSample:
            continue
    told = []
    if sizes and len(set(sizes)) == 1:
        every = "all" if source.uniform else f"all of {len(sizes)} looked at"
        told.append(("Size", f"{sizes[0][0]} x {sizes[0][1]} pixels ({every})"))
    elif sizes:
        by_area = sorted(sizes, key=lambda size: size[0] * size[1])
        words = [f"{w} x {h}" for w, h in (by_area[0], by_area[len(by_area) // 2], by_area[-1])]
        told.append(
            ("Size", f"{words[0]}, median {words[1]}, up to {words[2]} ({len(sizes)} looked at)")
        )
        short = sum(min(size) < run.config.data.image_size for size in sizes)
        if short:
            told.append(("Enlarged", f"{short / len(sizes):.0%} are smaller than the views"))
    classes = []
    if source.labeled and source.labels is not None:
        counts = Counter(source.labels.tolist())
        told.append(("Unlabeled", f"{counts.pop(-1, 0):,}"))
        top = max(counts.values())
        classes = [
            (source.classes[label], count, count / top) for label, count in counts.most_common(20)
        ]
        if len(counts) > 20:
            told.append(("Classes", f"{len(counts)}, the 20 largest are shown"))
    held = run.held_out
    told.insert(0, ("Held out for judging", f"{len(held):,}" if held is not None else "none"))
    told.insert(0, ("Images to train on", f"{len(source):,} from {run.config.data.source}"))
    return {"told": told, "classes": classes}


def beside(run: Run, result: str) -> dict[str, str] | None:
    """The image that judging left beside a result, and what it shows in words."""
    try:
        with Image.open(run.journal.results / f"{result}.png") as held:
            words = str(held.info.get("Description", ""))
            image = held.convert("RGB")
    except OSError:
        return None
    image.thumbnail((1400, 1400))
    return {"image": _address(np.asarray(image), quality=82), "words": words}


def _address(pixels: NDArray[np.uint8], *, quality: int = 85) -> str:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()
