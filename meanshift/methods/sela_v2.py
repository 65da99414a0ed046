"""SeLa-v2 (Asano et al. 2020, improved in Caron et al. 2020), as we read it.

Papers: https://arxiv.org/abs/1911.05371 and https://arxiv.org/abs/2006.09882, appendix. No code of
SeLa-v2 was published. Its author describes it (facebookresearch/swav, issue 59) as
`main_deepclusterv2.py` with labels by Sinkhorn-Knopp instead of k-means, and with prototypes that
are trained as in SwAV. The labels are those of SeLa (yukimasano/self-label, `sinkhornknopp.py`):
equal shares over the whole dataset, of softmax probabilities to the power of lambda = 25.

Our reading, not verified: three sets of labels, renewed in each epoch from the embeddings of the
last one; lambda for probabilities of temperature 0.1; prototypes never frozen; rounds of Sinkhorn
until shares differ by 5% from equal ones, at most 100. The first labels are those of embeddings
minus their mean, as in `methods.deepcluster_v2`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.methods.base import Progress
from meanshift.methods.deepcluster_v2 import DeepClusterV2
from meanshift.ops.sinkhorn import balanced_labels


class SeLaV2(DeepClusterV2):
    """DeepCluster-v2 with trained prototypes, and labels that are balanced over the dataset.

    >>> method = SeLaV2(encoder, dim=128, samples=50_000)
    """

    trained_prototypes = True

    def __init__(
        self, *arguments: Any, sharpness: float = 25.0, iterations: int = 100, **options: Any
    ) -> None:
        super().__init__(*arguments, iterations=iterations, **options)
        self.sharpness = sharpness

    def _cluster(
        self, clustering: int, rows: Float[Tensor, "known dim"], epoch: int
    ) -> Int[Tensor, " known"]:
        """Label rows by the prototypes, as many with each."""
        return balanced_labels(
            rows,
            self.prototypes[clustering],
            epsilon=self.temperature / self.sharpness,
            iterations=self.iterations,
        )

    @torch.no_grad()
    def after_update(self, now: Progress | None = None) -> None:
        """Renormalize the prototypes."""
        for prototypes in self.prototypes:
            prototypes.copy_(nn.functional.normalize(prototypes, dim=1))
