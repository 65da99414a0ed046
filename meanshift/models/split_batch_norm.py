"""Batch norm over groups of a batch, as if each group were on a GPU of its own (SplitBN).

The small recipe of MoCo trains on one GPU with groups that simulate eight. Together with shuffled
keys, a query and its key are then normalized with different images, so that batch norm does not
reveal which key belongs to which query. The parameters and their names are those of batch norm, so
weights can be exchanged.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.models.timm_networks import has_activation
from meanshift.runtime import distributed


class SplitBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose statistics in training are those of equal parts of the batch.

    The running statistics are moved by the mean of those of the parts.
    """

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__(channels)
        self.groups = groups

    def forward(
        self, input: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        if not self.training or self.groups == 1:
            return super().forward(input)
        if len(input) % self.groups:
            raise ValueError(
                f"batch norm: got {len(input)} images for {self.groups} groups in this process; "
                f"need a multiple: change --train.batch_size or --encoder.batch_groups"
            )
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # the average of all batches
            momentum = 1.0 / float(self.num_batches_tracked)
        mean = self.running_mean.repeat(self.groups, 1)
        var = self.running_var.repeat(self.groups, 1)
        output = torch.cat(
            [
                F.batch_norm(
                    part, mean[group], var[group], self.weight, self.bias, True, momentum, self.eps
                )
                for group, part in enumerate(input.chunk(self.groups))
            ]
        )
        self.running_mean.copy_(mean.mean(0))
        self.running_var.copy_(var.mean(0))
        return output


class SplitBatchNormAct2d(SplitBatchNorm2d):
    """The same for timm's batch norm that ends in an activation."""

    drop: nn.Module
    act: nn.Module

    def forward(
        self, input: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


def split_batch_norm(network: nn.Module, groups: int) -> None:
    """Replace every two-dimensional batch norm of a network; its weights stay the same.

    `groups` is that of the whole batch: each process has its share of them.
    """
    processes = distributed.world_size()
    if groups % processes:
        raise ValueError(
            f"encoder.batch_groups: got {groups} groups for {processes} processes, need a multiple "
            f"of the processes: --encoder.batch_groups {-(-groups // processes) * processes}, or 1"
        )
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, _split(child, groups // processes))


def _split(norm: nn.BatchNorm2d, groups: int) -> SplitBatchNorm2d:
    """The batch norm over groups with the weights and settings of a batch norm."""
    if has_activation(norm):
        split: SplitBatchNorm2d = SplitBatchNormAct2d(norm.num_features, groups)
        split.drop, split.act = norm.drop, norm.act
    elif type(norm) is nn.BatchNorm2d:
        split = SplitBatchNorm2d(norm.num_features, groups)
    else:
        raise ValueError(
            f"encoder.batch_groups: the network has a {type(norm).__name__}, which cannot be "
            f"split; type --encoder.batch_groups 1"
        )
    split.eps, split.momentum = norm.eps, norm.momentum
    split.load_state_dict(norm.state_dict())
    return split
