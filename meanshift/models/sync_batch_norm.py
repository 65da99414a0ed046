"""Batch norm over the images of all processes.

On GPUs this is PyTorch's SyncBatchNorm. That one refuses CPU tensors, for which there is a plain
one here, built on a differentiable sum over processes (`distributed.all_sum`). Its outputs and
gradients are those of one batch norm over the whole batch; it is slower than PyTorch's fused one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meanshift.models.timm_networks import has_activation
from meanshift.runtime import distributed


def convert_sync_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """Convert each batch norm of a module to one over all processes; with one process, none."""
    if distributed.world_size() == 1:
        return module
    if device.type == "cuda":
        converted: nn.Module = _pytorch_conversion(module)(module)
        return converted
    for submodule in module.modules():
        if isinstance(submodule, _BatchNorm):  # weights, statistics and settings do not change
            submodule.__class__ = SyncBatchNormAct if has_activation(submodule) else SyncBatchNorm
    return module


def _pytorch_conversion(module: nn.Module) -> Callable[[nn.Module], Any]:
    """PyTorch's conversion, or timm's where there are activations that PyTorch's would lose."""
    if not any(has_activation(submodule) for submodule in module.modules()):
        return nn.SyncBatchNorm.convert_sync_batchnorm
    from timm.layers import convert_sync_batchnorm

    return convert_sync_batchnorm  # type: ignore[no-any-return]


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance are those of the rows of all processes."""

    def _check_input_dim(self, _: Tensor) -> None:
        """Accept any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        rows = x.numel() / x.shape[1]
        var, mean = torch.var_mean(x, dims, correction=0)
        # In float64, since the squares of large means are subtracted again.
        mean, var = mean.double(), var.double()
        sums = torch.cat([mean * rows, (var + mean.square()) * rows, mean.new_full((1,), rows)])
        total = distributed.all_sum(sums)
        count = total[-1].detach()
        mean, squares = (total[:-1] / count).chunk(2)
        var = squares - mean.square()
        self._update_running_statistics(mean.detach(), var.detach(), count)
        scale = (var + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        output = torch.addcmul(shift.to(x).view(shape), x, scale.to(x).view(shape))
        return output.to(input.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Update the statistics as one batch norm over the whole batch does."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = self.momentum
        if momentum is None:  # the plain mean over the batches
            momentum = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        self.running_var.lerp_((var * count / (count - 1)).to(self.running_var), momentum)


class SyncBatchNormAct(SyncBatchNorm):
    """The same for timm's batch norm that ends in an activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output
