"""The supervised baseline: cross entropy of a linear classifier on top of the backbone.

torchvision's recipe (`references/classification/train.py`) in this program's loop: its learning
rate and weight decay, but a cosine schedule instead of steps, and the strong view of the other
methods by default. Images without a label (-1) are ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import BuildContext, Method, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.runtime import distributed

UNLABELED = -1


class Supervised(Method):
    """Learn the classes of labeled images.

    `encoder` is any module that maps an input to `dim` features.

    >>> method = Supervised(encoder, dim=2048, classes=1000)
    >>> output = method(view, labels=labels)
    >>> output.loss.backward(); optimizer.step()
    """

    def __init__(self, encoder: nn.Module, dim: int, *, classes: int) -> None:
        super().__init__()
        if classes < 2:
            raise ValueError(
                f"the supervised method needs images of at least 2 classes, got {classes}: give "
                f"labeled images (a folder with a subfolder for each class), or choose a method "
                f"that needs no labels (--method.name msf)"
            )
        self.dim = dim
        self.online = encoder
        self.classifier = nn.Linear(dim, classes)

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:
        return (operators.spec("online", settings.online_view, index=1),)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> Supervised:  # noqa: ARG003
        encoder = context.encoder(projector=lambda _: nn.Identity())
        return cls(encoder, encoder.features, classes=context.classes)

    def forward(
        self,
        view: Any,
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """Classify the view and compare with the labels."""
        features = check_embedding(self.online(view), self.dim)
        logits = self.classifier(features)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = self._check_labels(labels, logits)
        known = labels != UNLABELED
        correct = (logits.argmax(1) == labels).float().sum()  # no class is -1
        accuracy = correct / known.sum().clamp(min=1)
        loss = _mean_over_labeled(logits, labels)
        return StepOutput(loss, normalize(features.detach()), {"accuracy": (accuracy, known.sum())})

    def _check_labels(
        self, labels: Tensor | None, logits: Float[Tensor, "batch classes"]
    ) -> Int[Tensor, " batch"]:
        if labels is not None:
            return labels.to(logits.device, non_blocking=True)
        if self.training:
            raise ValueError("the supervised method needs labels: pass labels to the step")
        return torch.full((len(logits),), UNLABELED, device=logits.device)

    def collapse_hint(self) -> str:
        return "the learning rate is too high (halve optim.lr)"


def _mean_over_labeled(
    logits: Float[Tensor, "batch classes"], labels: Int[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """The mean cross entropy over the labeled images of all processes; 0 if there are none.

    The loop weights the loss of a process by its number of images: divided by it here, each
    labeled image counts the same.
    """
    total = F.cross_entropy(logits, labels, ignore_index=UNLABELED, reduction="sum")
    known = distributed.all_sum((labels != UNLABELED).sum())
    images = sum(distributed.all_lengths(len(labels)))
    return total / known.clamp(min=1) * (images / len(labels))
