"""Fits the layer of `view_whitening` to the views of training images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.data import Source
from meanshift.models.features import eval_mode
from meanshift.models.view_whitening import ViewWhitening
from meanshift.runtime import rng
from meanshift.transforms.replay import replay_views
from meanshift.transforms.views import view_transform

IMAGES = 1000
"""training images whose views the layer is fitted to"""

_BATCH_SIZE = 200


@torch.no_grad()
def fit_view_whitening(
    backbone: nn.Module,
    source: Source,
    views: Views,
    *,
    image_size: int,
    seed: int,
    device: torch.device,
) -> None:
    """Fit the layer of a backbone, if it has one, to a weak and a strong view of training images.

    Images that cannot be read are left out.
    """
    if not isinstance(backbone, ViewWhitening):
        return
    whole = ViewSpec(name="whole", stream=0, crop_area=(1.0, 1.0), flip=0.0)
    specs = (whole, views.spec("weak", "weak", index=0), views.spec("strong", "strong", index=1))
    # Views of one's own change the weak and the strong view, not the whole image.
    parts = [specs[:1], specs[1:]] if views.module else [specs]
    transforms = [
        view_transform(
            part,
            source,
            seed=seed,
            size=image_size,
            module="" if whole in part else views.module,
        )
        for part in parts
    ]
    chosen = rng.choice(seed, len(source), IMAGES, rng.SAMPLE)
    features: list[list[Tensor]] = [[], [], []]
    with eval_mode(backbone):
        for ids in chosen.split(_BATCH_SIZE):
            replayed = [replay_views(source, ids, each, epoch=0) for each in transforms]
            seen = [view for part in replayed for view in part.views]
            for rows, view in zip(features, seen, strict=True):
                if len(view):
                    rows.append(backbone.network(view.to(device)).float())
    if features[0]:
        plain, weak, strong = map(torch.cat, features)
        backbone.fit(plain, weak - strong)
