"""The views of some images, computed again, and where they were cropped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from meanshift.config import ViewSpec
from meanshift.runtime import rng
from meanshift.transforms.replay import center_square, crop_boxes
from meanshift.viz import style
from meanshift.viz.analysis import replay, view_title
from meanshift.viz.figures import Drawing, Options
from meanshift.viz.run_reader import MissingData, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP = 8
_COLORS = (style.COLORS[1], style.COLORS[0], *style.COLORS[2:])
_DASHES = ("-", "--", ":", "-.")


def draw(runs: Sequence[Run], options: Options) -> Drawing:
    """One row per image: its crops, then every view of the method at each chosen epoch."""
    (run,) = runs
    kind = run.config.data.sample_spec.kind
    if kind != "image":
        raise MissingData(f"{run.folder}: was trained on {kind}s; need images for this figure")
    views = [single for view in run.views for single in view.expand()]
    image_size = run.config.data.image_size
    side = min(224, image_size) * -(-224 // image_size)
    pitch = side + _GAP
    fitting = (int(style.PAGE * style.DPI) // pitch - 1) // len(views)
    epochs = _choose_epochs(run, options.epochs, count=min(3, max(1, fitting)))
    ids = rng.choice(options.seed, len(run.source), options.rows or 6, rng.SAMPLE)
    replayed = [
        replay(run, ids, epoch=epoch - 1, keep_images=epoch == epochs[0]) for epoch in epochs
    ]
    first = replayed[0]
    if not len(first.ids):
        raise MissingData(
            f"{run.folder}: none of the {len(ids)} images can be read; repair them in "
            f"{run.config.data.source}, or choose others with another seed"
        )

    cells = [[fit(run.to_rgb(image), side)] for image in first.images]
    for one in replayed:
        for row, images in zip(cells, zip(*one.views, strict=True), strict=True):
            row += [enlarge(run.view_to_rgb(view), side) for view in images]
    figure, axes = style.sheet(style.mosaic(cells, gap=_GAP), top=80)
    axes.text(0, -38, "crops", va="bottom")
    axes.text(0, -6, f"at epoch {epochs[0]}", size=6, color=style.QUIET, va="bottom")
    for at, epoch in enumerate(epochs):
        left = (1 + len(views) * at) * pitch
        axes.text(left, -38, f"epoch {epoch}", va="bottom")
        for column, (view, color, _) in enumerate(_styled(views)):
            x = left + column * pitch
            axes.text(x, -6, view_title(view), size=6, color=color, va="bottom")
    boxes = crop_boxes(first, views, seed=run.config.train.seed, epoch=epochs[0] - 1)
    for (_, color, dashes), view_boxes in zip(_styled(views), boxes, strict=True):
        for at, (image, box) in enumerate(zip(first.images, view_boxes, strict=True)):
            _outline(axes, image, box, side=side, top=at * pitch, color=color, dashes=dashes)
    names = ", ".join(view_title(view) for view in views)
    text = f"{len(cells)} random training images with the crops of epoch {epochs[0]} (left), then "
    text += f"their views at epochs {', '.join(map(str, epochs))}, computed again from the seed of "
    text += f"the run: {names}."
    return Drawing(figure, "Views", text)


def _choose_epochs(run: Run, requested: Sequence[int], *, count: int) -> list[int]:
    """The requested epochs, counted from 1, or the first `count`."""
    last = run.config.train.epochs
    epochs = list(requested) or list(range(1, min(count, last) + 1))
    if not all(1 <= epoch <= last for epoch in epochs):
        raise MissingData(
            f"{run.folder}: got epochs {', '.join(map(str, epochs))}; need epochs of its training, "
            f"1 to {last}"
        )
    return epochs


def _styled(views: Sequence[ViewSpec]) -> list[tuple[ViewSpec, str, str]]:
    """Each view with the color and the dashes of its crop."""
    colors = itertools.cycle(_COLORS)
    dashes = itertools.cycle(_DASHES)
    return list(zip(views, colors, dashes, strict=False))


def _outline(
    axes: Axes,
    image: Shaped[Tensor, "channels height width"],
    box: Int[Tensor, "4"],
    *,
    side: int,
    top: int,
    color: str,
    dashes: str,
) -> None:
    """Draw a crop on its image, which lies in the middle of a square."""
    from matplotlib.patches import Rectangle

    size = torch.tensor(image.shape[1:])
    zoom = side / float(size.max())
    y, x = ((side - zoom * size) / 2 + zoom * box[:2]).tolist()
    height, width = (zoom * box[2:]).tolist()
    axes.add_patch(
        Rectangle(
            (x, y + top),
            width,
            height,
            fill=False,
            ec=color,
            ls=dashes,
            lw=1.2,
            clip_on=False,
        )
    )


def enlarge(image: UInt8[Tensor, "3 height width"], side: int) -> np.ndarray:
    """An image in which each pixel is a square."""
    scale = max(1, side // image.shape[1])
    small = center_square(image, side // scale).numpy()
    nearest = np.arange(side) * len(small) // side  # views of any size fill the cell
    return np.asarray(small[nearest][:, nearest])


def fit(image: UInt8[Tensor, "3 height width"], side: int) -> np.ndarray:
    """A whole image in the middle of a white square."""
    height, width = image.shape[1:]
    size = [max(1, round(side * length / max(height, width))) for length in (height, width)]
    small = max(height, width) < side
    interpolation = InterpolationMode.NEAREST if small else InterpolationMode.BILINEAR
    resized = TF.resize(image, size, interpolation, antialias=not small)
    cell = np.full((side, side, 3), 255, dtype=np.uint8)
    top = (side - size[0]) // 2
    left = (side - size[1]) // 2
    cell[top : top + size[0], left : left + size[1]] = resized.permute(1, 2, 0).numpy()
    return cell
