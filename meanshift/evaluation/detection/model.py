"""Faster R-CNN on the C4 features of a ResNet, built from torchvision's parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.resnet import ResNet
from torchvision.ops import roi_align

from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.runtime import rng
from meanshift.runtime.device import autocast


def build_detector(
    backbone: nn.Module,
    classes: int,
    *,
    settings: DetectionSettings,
    seed: int = 0,
    precision: torch.dtype = torch.float32,
) -> FasterRCNN:
    """Build a detector around a copy of the backbone; the numbers are Detectron2's for C4.

    Only the stages of the backbone compute in `precision`: boxes need all bits of float32.
    """
    if not isinstance(backbone, ResNet):
        raise ValueError(
            f"detect: needs a ResNet, torchvision's or ours, whose last stage becomes the box "
            f"head; got {type(backbone).__name__} of {type(backbone).__module__.partition('.')[0]}"
        )
    resnet = copy.deepcopy(backbone)
    sides = tuple(round(side * settings.scale) for side in (32, 64, 128, 256, 512))
    anchors = AnchorGenerator((sides,), ((0.5, 1.0, 2.0),))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(seed, 0, rng.INITIAL))
        c4 = _C4Stages(resnet, precision)
        head = _C5BoxHead(resnet.layer4, precision)
        predictor = FastRCNNPredictor(head.features, classes + 1)  # the first is the background
        nn.init.normal_(predictor.cls_score.weight, std=0.01)
        nn.init.normal_(predictor.bbox_pred.weight, std=0.001)
        for layer in (predictor.cls_score, predictor.bbox_pred):
            nn.init.zeros_(layer.bias)
        detector: FasterRCNN = FasterRCNN(
            c4,
            min_size=settings.train_sizes,
            max_size=settings.max_size,
            rpn_anchor_generator=anchors,
            box_head=head,
            box_predictor=predictor,
            box_batch_size_per_image=settings.rois,
            **settings.proposals,
        )
    # torchvision's own guesses the stride from the first images that it gets.
    detector.roi_heads.box_roi_pool = _RoIAlign(c4.stride)
    return detector.requires_grad_()


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """All batch norms of a module."""
    return [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]


def parameter_groups(detector: nn.Module, settings: DetectionSettings) -> list[dict[str, Any]]:
    """Groups for the optimizer: batch norms have no weight decay, as in Detectron2."""
    norms = [parameter for norm in batch_norms(detector) for parameter in norm.parameters()]
    norm_ids = set(map(id, norms))
    others = [parameter for parameter in detector.parameters() if id(parameter) not in norm_ids]
    return [{"params": others, "weight_decay": settings.weight_decay}, {"params": norms}]


class _C4Stages(nn.Sequential):
    """A ResNet from its stem to its third stage."""

    def __init__(self, resnet: ResNet, precision: torch.dtype) -> None:
        stem = (resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
        super().__init__(*stem, resnet.layer1, resnet.layer2, resnet.layer3)
        self.precision = precision
        self.out_channels = resnet.layer4[0].conv1.in_channels
        self.eval()
        with torch.no_grad():
            image = torch.zeros(1, 3, 256, 256, device=resnet.conv1.weight.device)
            self.stride = 256 // self(image).shape[2]
        self.train()

    def forward(self, images: Float[Tensor, "n 3 _ _"]) -> Float[Tensor, "n channels _ _"]:
        with autocast(images.device, self.precision):
            features = images
            for stage in self:
                features = stage(features)
        return features.float()


class _RoIAlign(nn.Module):
    """RoI align on the one feature map, with the signature of torchvision's poolers."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(
        self,
        features: Mapping[str, Float[Tensor, "n channels _ _"]],
        proposals: list[Float[Tensor, "_ 4"]],
        sizes: list[tuple[int, int]],  # noqa: ARG002
    ) -> Float[Tensor, "regions channels 14 14"]:
        [feature_map] = features.values()
        regions: Tensor = roi_align(feature_map, proposals, 14, 1 / self.stride, aligned=True)
        return regions


class _C5BoxHead(nn.Module):
    """The box head: the fourth stage on each region, an extra batch norm, and the mean."""

    def __init__(self, layer4: nn.Module, precision: torch.dtype) -> None:
        super().__init__()
        self.layer4 = layer4
        self.precision = precision
        self.features = batch_norms(layer4)[-1].num_features
        self.norm = nn.BatchNorm2d(self.features)

    def forward(
        self, regions: Float[Tensor, "n channels side side"]
    ) -> Float[Tensor, "n features"]:
        with autocast(regions.device, self.precision):
            features: Tensor = self.norm(self.layer4(regions))
        return features.float().mean((2, 3))
