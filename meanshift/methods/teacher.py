"""A frozen teacher: any weights, known by their fingerprint, with features that can be cached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from meanshift.config.samples import RGB
from meanshift.methods.base import Batch
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.sample_memory import require_ids
from meanshift.models.weights import fingerprint, load_weights
from meanshift.runtime import distributed


class Teacher(nn.Module):
    """A network that maps an input to `dim` features; it is not trained and stays in eval mode.

    A checkpoint has its fingerprint: a run is not continued with another teacher. The weights are
    those of `network`, for `Method.not_saved`.
    """

    cache: Float[Tensor, "size dim"] | None = None
    """features of all samples, if `fill_cache` was called; no buffer, since it is not saved"""

    def __init__(self, network: nn.Module, dim: int, *, spec: str = "", title: str = "") -> None:
        super().__init__()
        self.network = network.requires_grad_(False).eval()
        self.dim = dim
        self.spec = spec
        self.title = title
        self.fingerprint = fingerprint(network)

    @staticmethod
    def load(spec: str) -> Teacher:
        """The weights that a user names, as `meanshift evaluate` takes them."""
        if not spec:
            raise ValueError(
                "method.teacher: got none, need the weights of a teacher: --method.teacher with a "
                "run, a file, torchvision:resnet50:IMAGENET1K_V2, timm:NAME or meanshift:NAME"
            )
        try:
            weights = load_weights(spec)
        except ValueError as error:
            raise ValueError(
                f"method.teacher: {error} (a run needs its teacher also to continue)"
            ) from None
        if weights.samples != RGB:
            raise ValueError(
                f"method.teacher: {weights.title} needs another normalization of its input than "
                f"ImageNet's, which the views do not have; choose other weights"
            )
        side = weights.image_size
        channels = 3 if weights.sample_spec is None else weights.sample_spec.channels
        with torch.no_grad():
            features = weights.backbone.eval()(torch.zeros(1, channels, side, side))
        return Teacher(weights.backbone, features.shape[1], spec=spec, title=weights.title)

    @torch.no_grad()
    def forward(self, view: Any, ids: Tensor | None = None) -> Float[Tensor, "batch dim"]:
        """The features of a view, or the cached ones of the samples; of unit length."""
        if self.cache is None:
            return normalize(check_embedding(self.network(view), self.dim))
        ids = require_ids(ids, "a cached teacher")
        return self.cache[ids.to(self.cache.device, non_blocking=True)]

    @torch.no_grad()
    def fill_cache(self, batches: Iterable[Batch], rows: Float[Tensor, "samples dim"]) -> None:
        """Compute the features of all samples once, into `rows` that are zero; they are the cache.

        Of several processes each has its part of the batches.
        """
        for batch in batches:
            features = normalize(check_embedding(self.network(batch.views[0]), self.dim))
            rows[batch.ids] = features.to(rows)
        distributed.all_sum_(rows)
        self.cache = rows

    def card(self) -> dict[str, str]:
        """What a run records of it."""
        return {"teacher": self.spec, "title": self.title, "fingerprint": self.fingerprint}

    def train(self, mode: bool = True) -> Teacher:
        return super().train(False)

    def get_extra_state(self) -> dict[str, str]:
        return {"fingerprint": self.fingerprint}

    def set_extra_state(self, state: dict[str, str]) -> None:
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"method.teacher: {self.spec} has the fingerprint {self.fingerprint}, the teacher "
                f"that the run began with had {state['fingerprint']}; give the same weights with "
                f"--method.teacher, or choose another --out"
            )
