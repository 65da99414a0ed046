"""The step of each paper on one page, behind one contract: two views in, a `Step` out."""

from __future__ import annotations

import torch

from meanshift import config
from meanshift.methods.msf import MeanShift
from meanshift.models.encoder import Encoder

__all__ = ["MeanShift", "build"]


def build(settings: config.Method, encoder: Encoder, *, seed: int) -> MeanShift:
    """The method of a config around an encoder; `byol` is Mean Shift with k=1."""
    return MeanShift(
        encoder,
        encoder.dim,
        k=settings.k,
        bank_size=settings.bank_size,
        bank_dtype=getattr(torch, settings.bank_dtype),
        momentum=settings.momentum,
        hidden=encoder.hidden,
        same_image=settings.same_image,
        search_filled_only=settings.search_filled_only,
        symmetric=settings.symmetric,
        whiten=settings.whiten,
        sharded=settings.bank_layout == "sharded",
        seed=seed,
    )
