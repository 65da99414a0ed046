"""Training views of vectors: another sample mixed in, noise, dropped columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meanshift.config import ViewSpec
from meanshift.ops.image import normalize
from meanshift.transforms.augment import DROPOUT, MIX, Address, MultiViewTransform

MIXED_IN = 1024
"""samples of the source that can be mixed into others"""


@dataclass(frozen=True)
class VectorTransform(MultiViewTransform):
    """The views of vectors that a method declares; `size` is not used.

    A view is mixed with another sample, normalized, and gets noise; then some of its columns are
    replaced by their mean, which is 0.
    """

    others: Float[Tensor, "others columns"] | None = None
    """samples that can be mixed in"""

    def crop(
        self, images: list[Float[Tensor, " columns"]], epoch: int, ids: Int[Tensor, " batch"]
    ) -> list[Tensor]:
        del epoch, ids
        return [torch.stack(images)] * len(self.single_views())

    def finish(
        self,
        images: Float[Tensor, "batch columns"] | list[Float[Tensor, "batch columns"]],
        epoch: int,
        ids: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch columns"], ...]:
        vectors = images if isinstance(images, Tensor) else images[0]
        return tuple(
            self._view(vectors, view, Address(self.seed, epoch, ids, view.stream))
            for view in self.single_views()
        )

    def _view(self, vectors: Tensor, view: ViewSpec, address: Address) -> Tensor:
        device = vectors.device
        if view.mix and self.others is not None:
            u = address.many(2, MIX)
            other = self.others[(u[:, 0] * len(self.others)).long()]
            weight = (view.mix * u[:, 1:]).float().to(device, non_blocking=True)
            vectors = torch.lerp(vectors, other.to(device, non_blocking=True), weight)
        output = normalize(vectors, self.samples.mean, self.samples.std)
        if view.noise:
            noise = view.noise * address.normal((self.samples.channels,))
            output = output + noise.to(device, non_blocking=True)
        if view.channel_dropout:
            dropped = address.many(self.samples.channels, DROPOUT) < view.channel_dropout
            output = output.masked_fill(dropped.to(device, non_blocking=True), 0.0)
        return output

    def shape(self, view: ViewSpec) -> tuple[int, ...]:
        del view
        return (self.samples.channels,)
