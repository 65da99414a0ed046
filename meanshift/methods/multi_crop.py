"""Multi-crop (Caron et al. 2020): two large crops and several small ones of each image."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.embeddings import check_embedding, normalize

LARGE_CROPS = 2
"""crops that clusters are assigned by; they come first"""


def multi_crop_views(settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
    """The large crops and the small ones, all strong, as `config.methods.clustering` has them."""
    large = replace(operators.spec("large", "strong", index=0), count=LARGE_CROPS)
    if not settings.small_crops:
        return (large,)
    small = replace(
        operators.spec("small", "strong", index=1),
        count=settings.small_crops,
        size=settings.small_crop_size,
        scale=3 / 7,  # 96 of 224 pixels
        crop_area=settings.small_crop_area,
    )
    return (large, small)


def embed_crops(
    encoder: nn.Module, crops: Sequence[Tensor], dim: int
) -> Float[Tensor, "crops batch dim"]:
    """The embeddings of all crops, of unit length; crops of one size are one forward pass."""
    if len(crops) < LARGE_CROPS:
        raise ValueError(f"got {len(crops)} crops of each image; need {LARGE_CROPS} or more")
    embeddings = []
    for _, same_size in itertools.groupby(crops, lambda crop: crop.shape[1:]):
        batch = torch.cat(list(same_size))
        embeddings.append(normalize(check_embedding(encoder(batch), dim)))
    return torch.cat(embeddings).view(len(crops), len(crops[0]), dim)
