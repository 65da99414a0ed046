"""What methods with a momentum target share: an online encoder and its slow moving average."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import Batch, Method, Progress, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.schedules import cosine_to_one
from meanshift.models.split_batch_norm import SplitBatchNorm2d
from meanshift.runtime import distributed


class MomentumTarget(Method):
    """An `online` encoder sees one view, a `target` encoder the other one; see `MeanShift`."""

    target: nn.Module
    """moving average of the online encoder; no gradient"""
    dim: int
    momentum: float
    settings: Any = None
    """the settings that it was built from, for schedules; None as a library call"""
    shuffle_seed: int | None = None
    """seed by which the target's images are permuted over all processes and all groups of batch
    norm (SplitBN), or None"""

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        """The target's view and the online view; one for both if they are the same."""
        online = operators.spec("online", settings.online_view, index=1)
        if settings.same_view:
            return (online,)
        return (operators.spec("target", settings.target_view, index=0), online)

    def step(self, batch: Batch) -> StepOutput:
        target_view, online_view = batch.views[0], batch.views[-1]
        self.shuffle_seed = batch.shuffle_seed
        output: StepOutput = self(online_view, target_view, ids=batch.ids, labels=batch.labels)
        return output

    def apply_target(self, view: Any) -> Tensor:
        """The target's output for a view; its images are shuffled first if a seed is set.

        Where batch norm sees the whole batch, in one process without groups, they need not be.
        """
        shuffled = self.training and (distributed.world_size() > 1 or self._has_groups)
        return distributed.apply_shuffled(
            self.target, view, self.shuffle_seed if shuffled else None
        )

    @cached_property
    def _has_groups(self) -> bool:
        return any(isinstance(module, SplitBatchNorm2d) for module in self.target.modules())

    @torch.no_grad()
    def project(self, view: Any) -> Float[Tensor, "batch dim"]:
        """The target embedding, of unit length; batch norm uses the batch's own statistics."""
        return normalize(check_embedding(self.apply_target(view), self.dim))

    def encoders(self) -> Sequence[nn.Module]:
        return [self.online, self.target]

    def set_progress(self, now: Progress) -> dict[str, float | int]:
        if self.settings is not None and self.settings.momentum_schedule == "cosine":
            self.momentum = cosine_to_one(self.settings.momentum, now.fraction)
        return {"momentum": self.momentum}

    @torch.no_grad()
    def after_update(self, now: Progress | None = None) -> None:
        """Move the target towards the online encoder, parameters only, after the optimizer."""
        update = get_ema_multi_avg_fn(self.momentum)
        update(list(self.target.parameters()), list(self.online.parameters()), None)

    def collapse_hint(self) -> str:
        if self.settings is not None and self.settings.same_view:
            return "both encoders see the same view (method.same_view): give them different views"
        return (
            "the views are too alike (method.online_view strong, smaller views.crop_area), the "
            "learning rate is too high (halve optim.lr), or the target encoder changes too fast "
            "(raise method.momentum)"
        )
