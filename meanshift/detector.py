"""Faster R-CNN on the C4 features of a ResNet, put together from torchvision's parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.resnet import ResNet
from torchvision.ops import MultiScaleRoIAlign

from meanshift import keyed

_BATCH, _SIZE, _ROIS, _LR = 16, 800, 512, 0.02  # the paper's


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The paper's (MoCo's): how long, on what sizes, at which rate.

    The rate rises over `warmup` iterations and falls to a tenth after 3/4 and 11/12 of them.
    """

    iterations: int = 24_000
    size: int = _SIZE
    """short side when judged; in training it is 0.6 to 1 times that, in 11 steps"""
    batch_size: int = _BATCH
    rois: int = _ROIS
    """regions of a picture from which the box head learns"""
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
    ) -> Recipe:
        """The paper's, or all of it smaller: the batch with the size, the regions with its square,
        the rate with the batch, and a warm-up of a tenth where 100 iterations would be more."""
        size = size or _SIZE
        batch_size = batch_size or max(2, min(_BATCH, round(_BATCH * size / _SIZE)))
        return Recipe(
            iterations=iterations,
            size=size,
            batch_size=batch_size,
            rois=rois or max(64, min(_ROIS, round(_ROIS * (size / _SIZE) ** 2))),
            lr=_LR * batch_size / _BATCH if lr is None else lr,
            warmup=min(100, iterations // 10),
        )

    @property
    def tag(self) -> str:
        """What a result's name adds when this is not the paper's recipe."""
        usual, told = Recipe.of(self.iterations, size=self.size), ""
        for name, word in {"batch_size": "batch", "rois": "rois", "lr": "lr"}.items():
            if getattr(self, name) != getattr(usual, name):
                told += f"-{word}-{getattr(self, name):g}"
        return "" if self == Recipe() else f"-{self.iterations}-at-{self.size}{told}"

    @property
    def sizes(self) -> list[int]:
        """Short sides of the training pictures: 480 to 800 in steps of 32 in the paper."""
        return [round(self.size * (0.6 + 0.04 * step)) for step in range(11)]

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


def build_detector(
    backbone: nn.Module, classes: int, *, recipe: Recipe, seed: int = 0
) -> FasterRCNN:
    """A detector around a copy of the backbone; the numbers are Detectron2's for C4."""
    if not isinstance(backbone, ResNet):
        raise ValueError(
            f"detect: needs a ResNet, whose last stage becomes the box head; got "
            f"{type(backbone).__name__}"
        )
    own, scale = copy.deepcopy(backbone), recipe.size / _SIZE
    anchors = AnchorGenerator(
        (tuple(round(side * scale) for side in (32, 64, 128, 256, 512)),), ((0.5, 1.0, 2.0),)
    )
    share = recipe.rois / _ROIS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed.seed_of(seed, 0, keyed.INITIAL))
        head = _Stage4(own.layer4)
        predictor = FastRCNNPredictor(head.features, classes + 1)  # the first is the background
        nn.init.normal_(predictor.cls_score.weight, std=0.01)
        nn.init.normal_(predictor.bbox_pred.weight, std=0.001)
        for layer in (predictor.cls_score, predictor.bbox_pred):
            nn.init.zeros_(layer.bias)
        detector: FasterRCNN = FasterRCNN(
            _Stages(own),
            min_size=recipe.sizes,
            max_size=round(1333 * scale),
            rpn_anchor_generator=anchors,
            rpn_pre_nms_top_n_train=round(12_000 * share),
            rpn_pre_nms_top_n_test=round(6_000 * share),
            rpn_post_nms_top_n_train=round(2_000 * share),
            rpn_post_nms_top_n_test=round(1_000 * share),
            box_roi_pool=MultiScaleRoIAlign(["0"], output_size=14, sampling_ratio=0),
            box_head=head,
            box_predictor=predictor,
            box_batch_size_per_image=recipe.rois,
        )
    return detector.requires_grad_()


def groups(detector: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    """What the optimiser learns: no weight decay on the batch norms, as in Detectron2."""
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

    def __init__(self, resnet: ResNet) -> None:
        stem: Sequence[nn.Module] = (resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
        super().__init__(*stem, resnet.layer1, resnet.layer2, resnet.layer3)
        self.out_channels = resnet.layer4[0].conv1.in_channels


class _Stage4(nn.Module):
    """The box head: the fourth stage on each region, an extra batch norm, and the mean."""

    def __init__(self, layer4: nn.Module) -> None:
        super().__init__()
        self.layer4 = layer4
        self.features = [m for m in layer4.modules() if isinstance(m, nn.BatchNorm2d)][
            -1
        ].num_features
        self.norm = nn.BatchNorm2d(self.features)

    def forward(
        self, regions: Float[Tensor, "n channels side side"]
    ) -> Float[Tensor, "n features"]:
        pooled: Tensor = self.norm(self.layer4(regions)).mean((2, 3))
        return pooled
