"""The views that both encoders saw of some images, drawn again, and where they were cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from meanshift.runtime import rng
from meanshift.transforms.replay import center_square, crop_boxes, denormalize, replay_views
from meanshift.viz import style
from meanshift.viz.figures import Choices, Drawing
from meanshift.viz.run_reader import MissingData, Run

_GAP = 8


def draw(runs: Sequence[Run], choices: Choices) -> Drawing:
    """A row an image: its crops, then the target's and the online view at each chosen epoch."""
    from matplotlib.patches import Rectangle

    (run,) = runs
    config, last = run.config, run.config.train.epochs
    epochs = list(choices.epochs) or list(range(1, min(3, last) + 1))
    if not all(1 <= epoch <= last for epoch in epochs):
        wrong = ", ".join(map(str, epochs))
        raise MissingData(
            f"{run.folder}: got epochs {wrong}; need epochs of its training, 1 to {last}"
        )
    ids = rng.choice(choices.seed, len(run.source), choices.rows or 6, rng.PROBE)
    drawn = [
        replay_views(run.source, ids, epoch=epoch - 1, config=config, keep=epoch == epochs[0])
        for epoch in epochs
    ]
    first = drawn[0]
    if not len(first.ids):
        raise MissingData(
            f"{run.folder}: none of the {len(ids)} images can be read; repair them in "
            f"{config.data.source}, or choose others with another seed"
        )

    side = min(224, config.data.image_size) * -(-128 // config.data.image_size)
    cells = [[_whole(image, side)] for image in first.images]
    for one in drawn:
        for row, pair in zip(cells, zip(one.target, one.online, strict=True), strict=True):
            row += [_view(view, side) for view in pair]
    pitch = side + _GAP
    figure, axes = style.sheet(style.mosaic(cells, gap=_GAP), top=100)
    same = "; both encoders see the same view" if config.method.same_view else ""
    axes.set_title(f"{style.short(run.name)}: views of {len(cells)} images{same}", pad=30)
    axes.text(0, -28, "crops", va="bottom")
    axes.text(0, -6, f"at epoch {epochs[0]}", size=7, color=style.QUIET, va="bottom")
    inks = {"target": (style.COLORS[1], "-"), "online": (style.COLORS[0], "--")}
    strength = {
        "target": config.method.online_view if same else config.method.target_view,
        "online": config.method.online_view,
    }
    for at, epoch in enumerate(epochs):
        left = (1 + 2 * at) * pitch
        axes.text(left, -28, f"epoch {epoch}", va="bottom")
        for column, (role, (ink, _)) in enumerate(inks.items()):
            words, x = f"{role} ({strength[role]})", left + column * pitch
            axes.text(x, -6, words, size=7, color=ink, va="bottom")
    cut = crop_boxes(first, epoch=epochs[0] - 1, config=config)
    for (ink, dashes), found in zip(inks.values(), cut, strict=True):
        for at, (image, box) in enumerate(zip(first.images, found, strict=True)):
            sizes = torch.tensor(image.shape[1:])
            zoom = side / float(sizes.max())
            corner = (side - zoom * sizes) / 2 + zoom * box[:2] + torch.tensor([at * pitch, 0])
            (y, x), (high, wide) = corner.tolist(), (zoom * box[2:]).tolist()
            axes.add_patch(
                Rectangle((x, y), wide, high, fill=False, ec=ink, ls=dashes, lw=1.6, clip_on=False)
            )
    when = ", ".join(map(str, epochs))
    text = f"{len(cells)} images of {run.name} with the crops of epoch {epochs[0]} (target solid, "
    text += f"online dashed), then at epochs {when} the target's {strength['target']} view and the "
    return Drawing(figure, "Views", text + f"online encoder's {strength['online']} view{same}.")


def _view(view: Float[Tensor, "3 size size"], side: int) -> np.ndarray:
    """A normalized view as an image, each of its pixels a square."""
    image = denormalize(view)
    scale = max(1, side // image.shape[1])
    small = center_square(image, side // scale).numpy()
    return np.repeat(np.repeat(small, scale, 0), scale, 1)


def _whole(image: UInt8[Tensor, "3 height width"], side: int) -> np.ndarray:
    """A whole image in the middle of a white square."""
    height, width = image.shape[1:]
    size = [max(1, round(side * n / max(height, width))) for n in (height, width)]
    small = max(height, width) < side
    way = InterpolationMode.NEAREST if small else InterpolationMode.BILINEAR
    fitted = TF.resize(image, size, way, antialias=not small)
    cell = np.full((side, side, 3), 255, dtype=np.uint8)
    top, left = (side - size[0]) // 2, (side - size[1]) // 2
    cell[top : top + size[0], left : left + size[1]] = fitted.permute(1, 2, 0).numpy()
    return cell
