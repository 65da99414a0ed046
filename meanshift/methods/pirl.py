"""PIRL (Misra, van der Maaten 2019): an image and its jigsaw patches have one representation.

Read `PIRL.forward`. A memory has one row per sample. The image and its nine shuffled patches are
each compared with the sample's row, by noise-contrastive estimation (NCE) against random rows.

Paper: https://arxiv.org/abs/1912.01991. Official files: VISSL
`configs/config/pretrain/pirl/pirl_jigsaw_4node_resnet50.yaml`, `vissl/losses/nce_loss.py`, which
are followed: the normalizer Z is estimated from the first batch of patches and then constant, a
negative may be the sample itself, and the image embedding updates the row after both losses.
Differences: the samples of a step share their negatives, in both losses and in all processes
(VISSL draws them for each, which takes batch x negatives rows of memory); there are at most as many
as samples; with `fill_memory` the rows start as embeddings, not at random; VISSL's photometric
operators (posterize, sharpness, solarize, autocontrast) are missing, and its epsilon beside the
noise probability is left out.
Not verified: the paper's own program, of which VISSL is the successor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import Batch, BuildContext, Method, Progress, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.nce import NCELoss
from meanshift.methods.sample_memory import SampleMemory, require_ids
from meanshift.models.heads import head
from meanshift.models.view_whitening import without_whitening
from meanshift.runtime import rng

GRID = 3


class PIRL(Method):
    """Compare an image and its jigsaw patches with the remembered embedding of the sample.

    `encoder` maps an image to `dim` values; its `backbone` maps a patch to `features` values.
    `samples` is the size of the dataset, whose ids are 0 to samples-1. Patches are a tensor
    (batch, 9, channels, height, width).

    >>> method = PIRL(encoder, dim=128, features=2048, samples=50_000)
    >>> output = method(image, patches, ids=ids)
    >>> output.loss.backward(); optimizer.step()
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 128,
        *,
        features: int,
        samples: int,
        temperature: float = 0.07,
        negatives: int = 32_000,
        patch_weight: float = 0.5,
        memory_momentum: float = 0.5,
        fill_memory: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.patch_weight = patch_weight
        self.seed = seed
        self.steps = 0
        self.online = encoder
        self.patch_projector = nn.Linear(features, dim)
        self.patches_projector = nn.Linear(GRID**2 * dim, dim)
        self.fill_memory = fill_memory
        self.memory = SampleMemory(samples, dim, momentum=memory_momentum, seed=seed)
        self.negatives = min(negatives, samples)
        self.nce = NCELoss(samples, temperature)

    def begin_epoch(self, now: Progress, batches: Callable[[], Iterator[Batch]]) -> None:
        """Before the first step, fill the memory if the settings ask for it."""
        if self.fill_memory and not bool(self.memory.seen.any()):
            self.memory.fill(self.online, batches())

    def forward(
        self,
        image: Any,
        patches: Float[Tensor, "batch patches channels height width"],
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; in eval mode nothing is written."""
        ids = require_ids(ids, "PIRL")
        of_patches = self.embed_patches(patches)
        of_image = normalize(check_embedding(self.online(image), self.dim))
        rows = self.memory.read(ids)
        noise = self.memory.read(self._draw_negatives())
        loss = self.patch_weight * self.nce(of_patches, rows, noise)
        loss = loss + (1 - self.patch_weight) * self.nce(of_image, rows, noise)
        if self.training:
            self.memory.update(ids, of_image)
            self.steps += 1
        embeddings = of_image.detach()
        agreement = (of_patches.detach() * embeddings).sum(1).mean()
        return StepOutput(loss, embeddings, {"agreement": (agreement, len(ids))})

    def embed_patches(
        self, patches: Float[Tensor, "batch patches channels height width"]
    ) -> Float[Tensor, "batch dim"]:
        """Project each patch, then all patches of an image together, in the order they have."""
        backbone = without_whitening(self.online.get_submodule("backbone"))
        each = self.patch_projector(backbone(patches.flatten(0, 1)))
        return normalize(self.patches_projector(each.unflatten(0, (len(patches), -1)).flatten(1)))

    def _draw_negatives(self) -> Int[Tensor, " negatives"]:
        """The negatives of this step, the same in every process."""
        numbers = torch.arange(self.negatives)
        words = rng.bits(self.seed, self.steps, numbers, rng.NEGATIVES, 1)[:, 0]
        return words % len(self.memory.rows)

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        """The image, and patches of another crop: of 255 pixels beside an image of 224."""
        patches = operators.spec("patches", "strong", index=1)
        return (
            operators.spec("image", "strong", index=0),
            replace(patches, jigsaw=GRID, crop_area=settings.patch_area, scale=255 / 224),
        )

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> PIRL:
        encoder = context.encoder(projector=lambda features: head([features, settings.dim]))
        names = "temperature negatives patch_weight memory_momentum fill_memory".split()
        return cls(
            encoder,
            settings.dim,
            features=encoder.features,
            samples=context.dataset_size,
            seed=context.seed,
            **{name: getattr(settings, name) for name in names},
        )

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]
