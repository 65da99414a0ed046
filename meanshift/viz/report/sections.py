"""The parts of a report that show images of one run: map, clusters, views, data, detections."""

from __future__ import annotations

import base64
import io
import math
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from meanshift.data import UnreadableSample
from meanshift.runtime import rng
from meanshift.transforms.replay import center_square
from meanshift.viz import detections, style
from meanshift.viz.analysis import (
    cluster_features,
    cluster_result,
    nearest_others,
    replay,
    same_label,
    stored_clusters,
    view_title,
)
from meanshift.viz.run_reader import MissingData, Run
from meanshift.viz.tsne import tsne_maps

NEIGHBORS = 8


def map_section(run: Run, sheets: dict[str, str], *, max_images: int) -> dict[str, Any]:
    """The map and the neighbors by epoch; all images that they show lie on one sheet.

    `sheets` collects the sheets of all runs; `data` of the result is for the page's script.
    """
    maps = tsne_maps(run, max_points=max_images)
    rows = maps[0].rows
    indices = run.snapshot(maps[-1].epoch).indices[rows].tolist()
    labels = None if run.labels is None else run.labels[rows]
    if labels is not None and not bool((labels >= 0).any()):  # of so few drawn, none is labeled
        labels = None
    neighbors = []
    purity = []
    for epoch_map in maps:
        nearest, _ = nearest_others(run.snapshot(epoch_map.epoch).features[rows], NEIGHBORS)
        neighbors.append(nearest.tolist())
        if labels is not None:
            matches = same_label(labels, nearest)[labels >= 0]
            purity.append(float(matches.float().mean()))
    names, groups, colored_by = _groups(run, labels, rows)
    side = _thumbnail_side(run)
    cells = [run.thumbnail(index, side).numpy() for index in indices]
    coloring = "colored by class"
    if colored_by == "cluster":
        coloring = "colored by cluster, since none of them has a label"
    return {
        "caption": f"{len(rows)} training {run.source.kind}s, {coloring}",
        "colored_by": colored_by,
        "legend": list(enumerate(names)),
        "data": {
            "epochs": [epoch_map.epoch for epoch_map in maps],
            "points": [
                [round(value, 3) for value in epoch_map.points.flatten().tolist()]
                for epoch_map in maps
            ],
            "neighbors": neighbors,
            "purity": purity,
            "groups": groups,
            "group_names": names,
            "colored_by": colored_by,
            "titles": [run.source.title(index) for index in indices],
            "sheet": _add_sheet(cells, sheets),
            "side": side,
            "columns": _sheet_columns(cells),
            "queries": _choose_queries(labels, len(rows)),
        },
    }


def _groups(
    run: Run, labels: Int[Tensor, " n"] | None, rows: Int[Tensor, " n"]
) -> tuple[list[str], list[int], str]:
    """What the points are colored by: classes, or clusters of the last snapshot."""
    if labels is not None:
        return list(run.source.classes), labels.tolist(), "label"
    names, assigned = cluster_features(run.snapshot(run.snapshot_epochs[-1]).features)
    return names, assigned[rows].tolist(), "cluster"


def _choose_queries(labels: Int[Tensor, " n"] | None, size: int) -> list[int]:
    """Images whose neighbors are shown: one of each class, up to ten."""
    order = rng.uniform(0, 0, torch.arange(size), rng.SPLIT, 1)[:, 0].argsort().tolist()
    if labels is None:
        return order[:10]
    first_of_class: dict[int, int] = {}
    for row in order:
        first_of_class.setdefault(int(labels[row]), row)
    return [first_of_class[label] for label in sorted(first_of_class) if label >= 0][:10]


def _thumbnail_side(run: Run) -> int:
    return 32 if run.config.data.image_size <= 48 else 64


def _sheet_columns(cells: list[NDArray[np.uint8]]) -> int:
    return math.ceil(math.sqrt(len(cells)))


def _add_sheet(cells: list[NDArray[np.uint8]], sheets: dict[str, str]) -> str:
    """Add all images as one JPEG and return its name; runs with the same images share it."""
    columns = _sheet_columns(cells)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    url = _data_url(style.mosaic(rows, gap=0), quality=82)
    for name, known in sheets.items():
        if known == url:
            return name
    name = f"sheet-{len(sheets)}"
    sheets[name] = url
    return name


def clusters_section(run: Run, *, rows: int = 10, columns: int = 14) -> dict[str, Any]:
    """Random images of random clusters, from the stored result."""
    assigned, indices = stored_clusters(run)
    side = _thumbnail_side(run)
    filled = (assigned.bincount() > 0).nonzero()[:, 0]
    chosen = filled[rng.choice(0, len(filled), rows, rng.SAMPLE)]
    strips = []
    for cluster in chosen.tolist():
        members = indices[assigned == cluster]
        order = rng.uniform(cluster, 0, torch.arange(len(members)), rng.SAMPLE, 1)[:, 0].argsort()
        caption = f"{len(members):,} {run.source.kind}s"
        if run.source.labels is not None:
            labels = run.source.labels[members]
            for label, count in Counter(labels[labels >= 0].tolist()).most_common(1):
                caption += f", {count / len(members):.0%} {run.source.classes[label]}"
        shown = members[order[:columns]].tolist()
        strips.append(_strip(caption, [run.thumbnail(index, side).numpy() for index in shown]))
    return {
        "strips": strips,
        "outdated": run.outdated(run.results.get(cluster_result(run), {"card": {}})),
    }


def views_section(run: Run, *, count: int = 8) -> dict[str, Any]:
    """Training images and the views of each in the first epoch, one strip per view."""
    ids = rng.choice(1, len(run.source), count, rng.SAMPLE)
    replayed = replay(run, ids, epoch=0, keep_images=True)
    if not len(replayed.ids):
        raise MissingData(f"{run.folder}: none of the images that were chosen can be read")
    side = min(run.config.data.image_size, 96)
    samples = [center_square(run.to_rgb(i), side).numpy() for i in replayed.images]
    strips = [_strip(run.source.kind, samples, 88)]
    views = [single for view in run.views for single in view.expand()]
    for view, images in zip(views, replayed.views, strict=True):
        cells = [center_square(run.view_to_rgb(image), side).numpy() for image in images]
        strips.append(_strip(view_title(view), cells, quality=88))
    return {"strips": strips}


def data_section(run: Run) -> dict[str, Any]:
    """How many images, of which sizes and classes."""
    source = run.source
    validation = run.validation
    rows = [
        (f"Training {source.kind}s", f"{len(source):,} from {run.config.data.source}"),
        (f"Validation {source.kind}s", "none" if validation is None else f"{len(validation):,}"),
        *_size_rows(run),
    ]
    classes = []
    if source.labeled and source.labels is not None:
        counts = Counter(source.labels.tolist())
        rows.append(("Unlabeled", f"{counts.pop(-1, 0):,}"))
        largest = max(counts.values())
        classes = [
            (source.classes[label], count, count / largest)
            for label, count in counts.most_common(20)
        ]
        if len(counts) > 20:
            rows.append(("Classes", f"{len(counts)}, the 20 largest are shown"))
    return {"rows": rows, "classes": classes}


def _size_rows(run: Run) -> list[tuple[str, str]]:
    """The sizes of the images: of all, or of a random sample where each file must be read."""
    source = run.source
    if source.sample_spec.kind == "vector":
        return [("Columns", f"{source.sample_spec.channels}")]
    sample = rng.choice(0, len(source), 1 if source.uniform else 200, rng.SAMPLE)
    sizes = []
    for index in sample.tolist():
        try:
            size = tuple(source.read(index).shape[1:])
        except UnreadableSample:
            continue
        sizes.append(size[::-1])
    if not sizes:
        return []
    if source.sample_spec.kind == "signal":
        lengths = sorted(size[0] for size in sizes)
        return [("Length", f"{lengths[0]:,} to {lengths[-1]:,} values ({len(sizes)} sampled)")]
    if len(set(sizes)) == 1:
        extent = "all" if source.uniform else f"all of {len(sizes)} sampled"
        return [("Size", f"{sizes[0][0]} x {sizes[0][1]} pixels ({extent})")]
    by_area = sorted(sizes, key=lambda size: size[0] * size[1])
    smallest, median, largest = (
        f"{width} x {height}"
        for width, height in (by_area[0], by_area[len(by_area) // 2], by_area[-1])
    )
    rows = [("Size", f"{smallest}, median {median}, up to {largest} ({len(sizes)} sampled)")]
    small = sum(min(size) < run.config.data.image_size for size in sizes)
    if small:
        rows.append(("Enlarged", f"{small / len(sizes):.0%} are smaller than the views"))
    return rows


def result_image(run: Run, result: str) -> dict[str, str] | None:
    """The image that belongs to a result; detections are drawn here if they are not yet."""
    path = run.directory.results / f"{result}.png"
    try:
        if _has_new_detections(path):
            detections.draw_result(path.with_name(f"{result}.json"))
        with Image.open(path) as opened:
            description = str(opened.info.get("Description", ""))
            image = opened.convert("RGB")
    except (OSError, ValueError, zipfile.BadZipFile):  # no image, or one that cannot be read
        return None
    image.thumbnail((1400, 1400))
    return {"image": _data_url(np.asarray(image), quality=82), "description": description}


def _has_new_detections(image: Path) -> bool:
    """Whether boxes are stored beside a result that its image does not show yet."""
    arrays = image.with_suffix(".npz")
    if not arrays.exists():
        return False
    if image.exists() and image.stat().st_mtime_ns >= arrays.stat().st_mtime_ns:
        return False
    with arrays.open("rb") as file, np.load(file) as stored:
        return "detection_boxes" in stored.files


def _strip(caption: str, cells: list[NDArray[np.uint8]], quality: int = 85) -> dict[str, str]:
    """A row of images with its caption."""
    return {"caption": caption, "image": _data_url(style.mosaic([cells], gap=2), quality=quality)}


def _data_url(pixels: NDArray[np.uint8], *, quality: int = 85) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
