"""Faster R-CNN on the C4 features of a ResNet, put together from torchvision's parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.resnet import ResNet
from torchvision.ops import roi_align

from meanshift.runtime import rng
from meanshift.runtime.device import autocast

_BATCH, _SIZE, _ROIS, _LR = 16, 800, 512, 0.02  # the paper's


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """The paper's (MoCo's): how long, on what sizes, at which rate.

    The rate rises over `warmup` iterations and falls to a tenth after 3/4 and 11/12 of them.
    """

    iterations: int = 24_000
    size: int = _SIZE
    """short side when judged; in training it is 0.6 to 1 times that, in 11 steps"""
    batch_size: int = _BATCH
    rois: int = _ROIS
    """regions of an image from which the box head learns"""
    lr: float = _LR
    warmup: int = 100
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        if min(self.iterations, self.batch_size, self.rois) < 1 or self.size < 32 or self.lr <= 0:
            raise ValueError(
                f"got --iterations {self.iterations}, --size {self.size}, --batch-size "
                f"{self.batch_size}, --rois {self.rois}, --lr {self.lr:g}; need 1 or more, a size "
                f"of 32 or more and a rate above 0"
            )

    @staticmethod
    def of(
        iterations: int = 24_000,
        *,
        size: int = 0,
        batch_size: int = 0,
        rois: int = 0,
        lr: float | None = None,
    ) -> DetectionSettings:
        """The paper's, or all of it smaller: the batch with the size, the regions with its square,
        the rate with the batch, and a warm-up of a tenth where 100 iterations would be more."""
        size = size or _SIZE
        batch_size = batch_size or max(2, min(_BATCH, round(_BATCH * size / _SIZE)))
        return DetectionSettings(
            iterations=iterations,
            size=size,
            batch_size=batch_size,
            rois=rois or round(_ROIS * _share(size)),
            lr=_LR * batch_size / _BATCH if lr is None else lr,
            warmup=min(100, iterations // 10),
        )

    @property
    def tag(self) -> str:
        """What a result's name adds when this is not the paper's recipe."""
        usual = DetectionSettings.of(self.iterations, size=self.size, batch_size=self.batch_size)
        usual, told = replace(usual, batch_size=DetectionSettings.of(size=self.size).batch_size), ""
        for name, word in {"batch_size": "batch", "rois": "rois", "lr": "lr"}.items():
            if getattr(self, name) != getattr(usual, name):
                told += f"-{word}-{getattr(self, name):g}"
        return "" if self == DetectionSettings() else f"-{self.iterations}-at-{self.size}{told}"

    @property
    def sizes(self) -> list[int]:
        """Short sides of the training images: 480 to 800 in steps of 32 in the paper."""
        return [round(self.size * (0.6 + 0.04 * step)) for step in range(11)]

    @property
    def proposals(self) -> dict[str, int]:
        """Regions that are proposed, before and after suppression; the paper's at 800."""
        most = {"rpn_pre_nms_top_n_train": 12_000, "rpn_pre_nms_top_n_test": 6_000,
                "rpn_post_nms_top_n_train": 2_000, "rpn_post_nms_top_n_test": 1_000}  # fmt: skip
        return {name: round(count * _share(self.size)) for name, count in most.items()}

    @property
    def settling(self) -> int:
        """Batches on which the batch norms' statistics are measured in the end: 200 in MoCo's."""
        return min(200, 1 + self.iterations // 10)

    def rate(self, step: int) -> float:
        """The learning rate of an iteration, counted from 0."""
        if step < self.warmup:
            return self.lr * (0.001 + 0.999 * step / self.warmup)
        passed = sum(step >= self.iterations * share for share in (3 / 4, 11 / 12))
        return float(self.lr * 0.1**passed)


def _share(size: int) -> float:
    """Of the paper's regions, in smaller images."""
    return max(1 / 8, min(1.0, (size / _SIZE) ** 2))


def build_detector(
    backbone: nn.Module,
    classes: int,
    *,
    recipe: DetectionSettings,
    seed: int = 0,
    precision: torch.dtype = torch.float32,
) -> FasterRCNN:
    """A detector around a copy of the backbone; the numbers are Detectron2's for C4.

    Only the stages of the backbone compute in `precision`: boxes need every bit of float32.
    """
    if not isinstance(backbone, ResNet):
        raise ValueError(
            f"detect: needs a ResNet, whose last stage becomes the box head; got "
            f"{type(backbone).__name__}"
        )
    own, scale = copy.deepcopy(backbone), recipe.size / _SIZE
    anchors = AnchorGenerator(
        (tuple(round(side * scale) for side in (32, 64, 128, 256, 512)),), ((0.5, 1.0, 2.0),)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(seed, 0, rng.INITIAL))
        stages, head = _Stages(own, precision), _Stage4(own.layer4, precision)
        predictor = FastRCNNPredictor(head.features, classes + 1)  # the first is the background
        nn.init.normal_(predictor.cls_score.weight, std=0.01)
        nn.init.normal_(predictor.bbox_pred.weight, std=0.001)
        for layer in (predictor.cls_score, predictor.bbox_pred):
            nn.init.zeros_(layer.bias)
        detector: FasterRCNN = FasterRCNN(
            stages,
            min_size=recipe.sizes,
            max_size=round(1333 * scale),
            rpn_anchor_generator=anchors,
            box_head=head,
            box_predictor=predictor,
            box_batch_size_per_image=recipe.rois,
            **recipe.proposals,
        )
    # torchvision's own guesses the stride from the first images that it meets.
    detector.roi_heads.box_roi_pool = _Regions(stages.stride)
    return detector.requires_grad_()


def groups(detector: nn.Module, recipe: DetectionSettings) -> list[dict[str, object]]:
    """What the optimizer learns: no weight decay on the batch norms, as in Detectron2."""
    norms = [
        parameter
        for module in detector.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for parameter in module.parameters()
    ]
    known = set(map(id, norms))
    rest = [parameter for parameter in detector.parameters() if id(parameter) not in known]
    return [{"params": rest, "weight_decay": recipe.weight_decay}, {"params": norms}]


class _Stages(nn.Sequential):
    """A ResNet from its stem to its third stage."""

    def __init__(self, resnet: ResNet, precision: torch.dtype) -> None:
        stem: Sequence[nn.Module] = (resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
        super().__init__(*stem, resnet.layer1, resnet.layer2, resnet.layer3)
        self.precision, self.out_channels = precision, resnet.layer4[0].conv1.in_channels
        self.eval()
        with torch.no_grad():
            probe = torch.zeros(1, 3, 256, 256, device=resnet.conv1.weight.device)
            self.stride = 256 // self(probe).shape[2]
        self.train()

    def forward(self, images: Float[Tensor, "n 3 _ _"]) -> Float[Tensor, "n channels _ _"]:
        with autocast(images.device, self.precision):
            features = images
            for stage in self:
                features = stage(features)
        return features.float()


class _Regions(nn.Module):
    """RoI align on the one map of features, as torchvision's heads call it."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(
        self,
        features: Mapping[str, Float[Tensor, "n channels _ _"]],
        proposals: list[Float[Tensor, "_ 4"]],
        sizes: list[tuple[int, int]],  # noqa: ARG002
    ) -> Float[Tensor, "regions channels 14 14"]:
        [whole] = features.values()
        regions: Tensor = roi_align(whole, proposals, 14, 1 / self.stride, aligned=True)
        return regions


class _Stage4(nn.Module):
    """The box head: the fourth stage on each region, an extra batch norm, and the mean."""

    def __init__(self, layer4: nn.Module, precision: torch.dtype) -> None:
        super().__init__()
        self.layer4, self.precision = layer4, precision
        norms = [m for m in layer4.modules() if isinstance(m, nn.BatchNorm2d)]
        self.features = norms[-1].num_features
        self.norm = nn.BatchNorm2d(self.features)

    def forward(
        self, regions: Float[Tensor, "n channels side side"]
    ) -> Float[Tensor, "n features"]:
        with autocast(regions.device, self.precision):
            features: Tensor = self.norm(self.layer4(regions))
        return features.float().mean((2, 3))
