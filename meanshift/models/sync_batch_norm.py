"""Batch norm over the images of all processes.

On GPUs PyTorch's SyncBatchNorm does it. It refuses tensors of a CPU, where a plain one built on a
sum with a gradient (`distributed.summed`) stands in: in value and gradient that of one batch norm
over the whole batch, slower than PyTorch's fused one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meanshift.runtime import distributed


def convert_sync_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """The same module, with each batch norm taken over all processes; in one it is left alone."""
    if distributed.world_size() == 1:
        return module
    if device.type == "cuda":
        changed: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return changed
    for one in module.modules():
        if isinstance(one, _BatchNorm):
            one.__class__ = SyncBatchNorm  # weights, statistics and settings stay as they are
    return module


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance are those of the rows of all processes."""

    def _check_input_dim(self, _: Tensor) -> None:
        """Any number of dimensions goes."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        over, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        rows = x.numel() / x.shape[1]
        var, mean = torch.var_mean(x, over, correction=0)
        # In float64, so that the squares of large means can be taken off again.
        mean, var = mean.double(), var.double()
        own = torch.cat([mean * rows, (var + mean.square()) * rows, mean.new_tensor([rows])])
        total = distributed.all_sum(own)
        count = total[-1].detach()
        mean, squares = (total[:-1] / count).chunk(2)
        var = squares - mean.square()
        self._remember(mean.detach(), var.detach(), count)
        scale = (var + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        made = torch.addcmul(shift.to(x).view(shape), x, scale.to(x).view(shape))
        return made.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Running statistics, as one batch norm over the whole batch would keep them."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # the plain mean over the batches
            share = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_((var * count / (count - 1)).to(self.running_var), share)
