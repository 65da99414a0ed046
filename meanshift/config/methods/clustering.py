"""The settings of SwAV, DeepCluster-v2 and SeLa-v2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meanshift.config.methods.base import MethodSettings
from meanshift.config.parsing import need


@dataclass(frozen=True, kw_only=True)
class Clustering(MethodSettings):
    """What the three share: multi-crop, unit embeddings and prototypes.

    The optimizer is that of SwAV's official run with a batch of 256, also for the other two; the
    crops are those of DeepCluster-v2's 800-epoch script. The small-scale values are those of
    lightly's CIFAR-10 benchmark of SwAV, for 256 images, with AdamW for Adam.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "views.crop_area": (0.14, 1.0),
        "views.jitter_strength": (0.8, 0.8, 0.8, 0.2),
        "optim.name": "lars",
        "optim.lr": 0.6,
        "optim.schedule": "step",
        "optim.weight_decay": 1e-6,
        "train.batch_norm": "sync",
    }
    small_defaults: ClassVar[Mapping[str, Any]] = {
        "views.blur": 0.0,
        "method.hidden": 512,
        "method.prototypes": 512,
        "optim.name": "adamw",
        "optim.lr": 0.002,
    }

    dim: int = 128
    """size of the embedding"""
    hidden: int = 2048
    """size of the projector's hidden layer"""
    prototypes: int = 3000
    """number of clusters; at most one for every 16 images is used"""
    temperature: float = 0.1
    """temperature of the softmax over the prototypes"""
    small_crops: int = 6
    """small crops of an image, beside the two large ones"""
    small_crop_size: int = 0
    """side of a small crop in pixels; 0: 3/7 of `data.image_size`, the paper's 96 of 224"""
    small_crop_area: tuple[float, float] = (0.05, 0.14)
    """smallest and largest fraction of the image's area that a small crop covers"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.prototypes >= 2, "method.prototypes", self.prototypes, "2 or more")
        need(self.temperature > 0, "method.temperature", self.temperature, "above 0")
        need(self.small_crops >= 0, "method.small_crops", self.small_crops, "0 or more")
        size = self.small_crop_size
        need(size == 0 or size >= 8, "method.small_crop_size", size, "0, or 8 or more pixels")
        low, high = self.small_crop_area
        area = self.small_crop_area
        need(0 < low <= high <= 1, "method.small_crop_area", area, "0 < low <= high <= 1")

    @classmethod
    def defaults_for(cls, image_size: int) -> Mapping[str, Any]:
        """Crops of 3/7 of 32 pixels would show nothing: CIFAR has the two large ones only."""
        none = {"method.small_crops": 0} if image_size <= 32 else {}
        return {**super().defaults_for(image_size), **none}

    @property
    def passes(self) -> tuple[float, float]:
        crops = 2 + self.small_crops * (96 / 224) ** 2
        return crops, crops

    def prototypes_for(self, samples: int) -> int:
        """The number of prototypes for a dataset of so many images (0: unknown)."""
        return min(self.prototypes, max(2, samples // 16)) if samples else self.prototypes


@dataclass(frozen=True, kw_only=True)
class SwAV(Clustering):
    """SwAV: predict the balanced cluster assignment of a view from the other views.

    paper: Caron et al. 2020, https://arxiv.org/abs/2006.09882
    cost: 1 forward and backward pass per crop, 2 large and 6 small ones; Sinkhorn over the batch
    """

    loss: ClassVar[str] = "cross entropy of each crop with the balanced cluster codes of the others"
    needs: ClassVar[tuple[str, ...]] = ("clusters",)
    small_defaults: ClassVar[Mapping[str, Any]] = {
        **Clustering.small_defaults,
        "method.queue_size": 0,
        "method.freeze_epochs": 0,
    }
    name: Literal["swav"] = "swav"
    """name of the method"""
    epsilon: float = 0.05
    """how soft the assignments are; 0.03 if the loss does not leave ln(prototypes)"""
    iterations: int = 3
    """rounds of Sinkhorn"""
    queue_size: int = 3840
    """past embeddings of each large crop that take part in the assignment; for batches of at most a
    few hundred images, 0 for thousands"""
    queue_epoch: int = 15
    """epoch, counted from 0, in which the queue begins to be filled"""
    freeze_epochs: int = 1
    """first epochs in which the prototypes are not trained"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.epsilon > 0, "method.epsilon", self.epsilon, "above 0")
        need(self.iterations >= 1, "method.iterations", self.iterations, "1 or more")
        for name in ("queue_size", "queue_epoch", "freeze_epochs"):
            value = getattr(self, name)
            need(value >= 0, f"method.{name}", value, "0 or more")

    def check(self, *, batch_size: int) -> None:
        need(
            self.queue_size == 0 or self.queue_size >= batch_size,
            "method.queue_size",
            self.queue_size,
            f"0, or at least the batch of {batch_size} images (--method.queue_size 0)",
        )


@dataclass(frozen=True, kw_only=True)
class SampleClustering(Clustering):
    """What DeepCluster-v2 and SeLa-v2 share: the embeddings and the clusters of every image."""

    own_arguments: ClassVar[tuple[str, ...]] = ("temperature", "clusterings", "iterations")
    """the arguments of the method that have the names of settings"""
    defaults: ClassVar[Mapping[str, Any]] = {**Clustering.defaults, "optim.warmup_epochs": 10}
    small_defaults: ClassVar[Mapping[str, Any]] = {
        **Clustering.small_defaults,
        "optim.warmup_epochs": 0,
    }
    clusterings: int = 3
    """clusterings of the images, each with prototypes of its own"""
    iterations: int = 10
    """rounds of the clustering at the beginning of an epoch"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.clusterings >= 1, "method.clusterings", self.clusterings, "1 or more")
        need(self.iterations >= 1, "method.iterations", self.iterations, "1 or more")

    def check_samples(self, samples: int) -> int:
        """The number of images; an error if there is none."""
        need(
            samples > 0,
            "method.name",
            self.name,
            "the number of images, since it has a row for each (--method.name swav has none)",
        )
        return samples


@dataclass(frozen=True, kw_only=True)
class DeepClusterV2(SampleClustering):
    """DeepCluster-v2: predict the k-means cluster that an image had in the last epoch.

    paper: Caron et al. 2020, https://arxiv.org/abs/2006.09882
    cost: 1 forward and backward pass per crop, 2 large and 6 small ones; k-means in each epoch;
    memory of 8 x dim bytes for each image (1.3 GB for ImageNet), also in checkpoints
    """

    loss: ClassVar[str] = "cross entropy of each crop with the k-means cluster of its image"
    needs: ClassVar[tuple[str, ...]] = ("clusters", "memory")
    name: Literal["deepcluster-v2"] = "deepcluster-v2"
    """name of the method"""


@dataclass(frozen=True, kw_only=True)
class SeLaV2(SampleClustering):
    """SeLa-v2: predict labels that Sinkhorn balances over the whole dataset; our reading.

    paper: Asano et al. 2020, https://arxiv.org/abs/1911.05371; v2 in https://arxiv.org/abs/2006.09882
    cost: 1 forward and backward pass per crop, 2 large and 6 small ones; Sinkhorn over all images
    in each epoch; memory of 8 x dim bytes for each image (1.3 GB for ImageNet), also in checkpoints
    """

    loss: ClassVar[str] = "cross entropy of each crop with the balanced label of its image"
    needs: ClassVar[tuple[str, ...]] = ("clusters", "memory")
    own_arguments: ClassVar[tuple[str, ...]] = (*SampleClustering.own_arguments, "sharpness")
    name: Literal["sela-v2"] = "sela-v2"
    """name of the method"""
    iterations: int = 100
    """most rounds of Sinkhorn at the beginning of an epoch"""
    sharpness: float = 25.0
    """SeLa's lambda: the power of the probabilities that are balanced"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.sharpness > 0, "method.sharpness", self.sharpness, "above 0")
