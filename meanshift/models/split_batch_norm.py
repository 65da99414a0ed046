"""Batch norm over groups of a batch, as if each group were on a GPU of its own (SplitBN).

The small recipes of MoCo and of methods compared with it train one GPU as if it were eight: batch
norm then tells less about the other images of a batch. The parameters and their names are those of
batch norm, so weights can be exchanged.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


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
        if not self.training:
            return super().forward(input)
        batch, channels, *size = input.shape
        if batch % self.groups:
            raise ValueError(
                f"encoder.batch_groups: got {self.groups} groups for {batch} images; need a "
                f"--train.batch_size that is a multiple of the groups, in each process"
            )
        assert self.running_mean is not None and self.running_var is not None
        assert self.weight is not None and self.bias is not None
        # The channels of each part become channels of their own, side by side.
        parts = input.unflatten(0, (self.groups, -1)).transpose(0, 1).flatten(1, 2)
        mean, var = (s.repeat(self.groups) for s in (self.running_mean, self.running_var))
        momentum = 0.0 if self.momentum is None else self.momentum
        output = F.batch_norm(
            parts,
            mean,
            var,
            self.weight.repeat(self.groups),
            self.bias.repeat(self.groups),
            training=True,
            momentum=momentum,
            eps=self.eps,
        )
        self.running_mean.copy_(mean.view(self.groups, channels).mean(0))
        self.running_var.copy_(var.view(self.groups, channels).mean(0))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        whole: Tensor = output.unflatten(1, (self.groups, channels)).transpose(0, 1)
        return whole.reshape(batch, channels, *size)


def split_batch_norm(network: nn.Module, groups: int) -> None:
    """Replace every two-dimensional batch norm of a network; its weights stay the same."""
    for module in network.modules():
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm2d:
                split = SplitBatchNorm2d(child.num_features, groups)
                split.eps, split.momentum = child.eps, child.momentum
                split.load_state_dict(child.state_dict())
                setattr(module, name, split)
