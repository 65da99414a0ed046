"""DeepCluster-v2 (in Caron et al. 2020) on one page. Read `begin_epoch` and `forward`.

Paper: https://arxiv.org/abs/2006.09882, appendix. Official code: facebookresearch/swav,
`main_deepclusterv2.py`: at the beginning of an epoch, spherical k-means of the embeddings that the
large crops had in the last one; the centroids are the prototypes of the epoch, without gradient.

Differences from the official code: the first clustering is that of one pass over the data in
evaluation views, in eval mode, instead of in training crops; it has the embeddings minus their
mean, since those of a random network, whose batch norm has no statistics yet, lie in a narrow cone;
a sample that the last epoch left out (an incomplete batch) keeps its older row instead of being
ignored; those of `methods.swav` in batch norm, learning rate and LARS. The official recipe has a
batch of 4,096 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import Batch, BuildContext, Method, Progress, StepOutput
from meanshift.methods.embeddings import normalize
from meanshift.methods.multi_crop import LARGE_CROPS, embed_crops, multi_crop_views
from meanshift.methods.sample_memory import SampleMemory, embed_samples, require_ids
from meanshift.ops.kmeans import spherical_kmeans
from meanshift.runtime import distributed, rng


class DeepClusterV2(Method):
    """Predict the cluster of each image from all of its crops; cluster again in every epoch.

    `encoder` is any module that maps images to `dim` values; `samples` is the number of images,
    whose ids are 0 to samples-1. The first two views are the large crops.

    >>> method = DeepClusterV2(encoder, dim=128, samples=50_000)
    >>> method.begin_epoch(now, batches)  # before each epoch
    >>> output = method(large_1, large_2, small_1, ids=ids)
    >>> output.loss.backward(); optimizer.step(); method.after_update()
    """

    trained_prototypes = False
    assignments: Int[Tensor, "clusterings samples"]
    """cluster of each sample; -1: unknown, the sample is ignored"""

    def __init__(
        self,
        encoder: nn.Module,
        dim: int = 128,
        *,
        samples: int,
        prototypes: int = 3000,
        clusterings: int = 3,
        temperature: float = 0.1,
        iterations: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.temperature = temperature
        self.iterations = iterations
        self.seed = seed
        self.online = encoder
        self.memory = SampleMemory(samples, LARGE_CROPS * dim)  # a row: both large crops
        random = nn.functional.normalize(torch.randn(clusterings, prototypes, dim), dim=2)
        self.prototypes = nn.ParameterList(
            nn.Parameter(rows, requires_grad=self.trained_prototypes) for rows in random
        )
        self.register_buffer("assignments", torch.full((clusterings, samples), -1))

    def begin_epoch(self, now: Progress, batches: Callable[[], Iterator[Batch]]) -> None:
        """Cluster the embeddings of the last epoch; at first, those of one pass over the data."""
        if not bool(self.memory.seen.any()):
            self._fill(batches())
        known = self.memory.seen.nonzero()[:, 0]
        for clustering in range(len(self.prototypes)):
            first = clustering % LARGE_CROPS * self.dim  # the clusterings take the crops in turn
            rows = self.memory.rows[known, first : first + self.dim]
            self.assignments[clustering, known] = self._cluster(clustering, rows, now.epoch)

    def _cluster(
        self, clustering: int, rows: Float[Tensor, "known dim"], epoch: int
    ) -> Int[Tensor, " known"]:
        """Cluster rows by k-means; the centroids become the prototypes."""
        prototypes = len(self.prototypes[clustering])
        seed = rng.derive_seed(self.seed, epoch * len(self.prototypes) + clustering, rng.SAMPLE)
        labels, centers = spherical_kmeans(rows, prototypes, iterations=self.iterations, seed=seed)
        self.prototypes[clustering].data.copy_(centers)
        return labels

    def forward(
        self,
        *crops: Tensor,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; in eval mode the memory is not written."""
        z = embed_crops(self.online, crops, self.dim)
        ids = require_ids(ids, type(self).__name__).to(z.device, non_blocking=True)
        loss = self._loss(z, self.assignments[:, ids])
        if self.training:
            self.memory.update(ids, torch.cat([*z[:LARGE_CROPS]], 1))
        agreement = (z[0] * z[1]).sum(1).mean().detach()
        return StepOutput(loss, z[0].detach(), {"agreement": (agreement, len(ids))})

    def _loss(
        self, z: Float[Tensor, "crops batch dim"], clusters: Int[Tensor, "clusterings batch"]
    ) -> Float[Tensor, ""]:
        """Cross entropy of all crops, a mean over the samples whose cluster is known."""
        known = (clusters[0] >= 0).to(z)
        counts = distributed.all_sum(torch.stack([known.sum(), torch.ones_like(known).sum()]))
        loss = z.new_zeros(())
        for prototypes, cluster in zip(self.prototypes, clusters, strict=True):
            with torch.autocast(z.device.type, enabled=False):
                log_p = (z @ prototypes.T / self.temperature).log_softmax(2)
            own = cluster.clamp(min=0).expand(len(z), -1)[:, :, None]
            loss = loss - (log_p.gather(2, own)[:, :, 0] * known).mean()
        return loss / len(clusters) * counts[1] / counts[0].clamp(min=1)

    @torch.no_grad()
    def _fill(self, batches: Iterator[Batch]) -> None:
        """Fill the memory with the centered embedding of a view of each sample, for both crops."""
        ids, z = embed_samples(self.online, batches, self.memory.rows[:, : self.dim])
        count = distributed.all_sum(z.new_full((), len(z)))
        z = normalize(z - distributed.all_sum(z.sum(0)) / count)
        self.memory.update(ids, z.repeat(1, LARGE_CROPS))

    def memory_use(self, batch_size: int) -> dict[str, int]:
        clusters = {"their clusters, also in each checkpoint": self.assignments.nbytes}
        return super().memory_use(batch_size) | clusters

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        return multi_crop_views(settings, operators)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> DeepClusterV2:
        samples = settings.check_samples(context.dataset_size)
        encoder = context.encoder(dim=settings.dim, hidden=settings.hidden)
        return cls(
            encoder,
            encoder.dim,
            samples=samples,
            prototypes=settings.prototypes_for(samples),
            seed=context.seed,
            **{name: getattr(settings, name) for name in settings.own_arguments},
        )
