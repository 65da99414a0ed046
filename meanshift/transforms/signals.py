"""Training views of signals: a window in time, gain, noise, silence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from meanshift.config import ViewSpec
from meanshift.ops.image import normalize
from meanshift.transforms.augment import Address, MultiViewTransform

_START, _GAIN, _NOISE, _MASK, _MASK_START = range(5)  # columns of the uniform random numbers


@dataclass(frozen=True)
class SignalTransform(MultiViewTransform):
    """The views of signals that a method declares; `size` is their length in values.

    A view is a random window; a shorter signal has silence before and after it.
    """

    def crop(
        self, images: list[Float[Tensor, "channels _"]], epoch: int, ids: Int[Tensor, " batch"]
    ) -> list[Tensor]:
        crops = []
        for view in self.single_views():
            u = Address(self.seed, epoch, ids, view.stream).uniform[:, _START].tolist()
            windows = [window(s, self.size, at) for s, at in zip(images, u, strict=True)]
            crops.append(torch.stack(windows))
        return crops

    def finish(
        self,
        images: Float[Tensor, "batch time channels"] | list[Float[Tensor, "batch channels size"]],
        epoch: int,
        ids: Int[Tensor, " batch"],
    ) -> tuple[Float[Tensor, "batch channels size"], ...]:
        crops = (
            self.crop(list(images.movedim(2, 1)), epoch, ids)
            if isinstance(images, Tensor)
            else images
        )
        return tuple(
            self._view(signals, view, Address(self.seed, epoch, ids, view.stream))
            for signals, view in zip(crops, self.single_views(), strict=True)
        )

    def _view(self, signals: Tensor, view: ViewSpec, address: Address) -> Tensor:
        u = address.uniform.float()
        numbers = u[:, : _MASK_START + 1].to(signals.device, non_blocking=True)[..., None, None]
        output = normalize(signals, self.samples.mean, self.samples.std)
        if view.gain:
            output = output * 10 ** (view.gain * (2 * numbers[:, _GAIN] - 1) / 20)
        if view.noise:
            noise = address.normal((self.samples.channels, self.size))
            noise = noise.to(signals.device, non_blocking=True)
            output = output + view.noise * numbers[:, _NOISE] * noise
        if view.mask:
            length = view.mask * numbers[:, _MASK] * self.size
            start = numbers[:, _MASK_START] * (self.size - length)
            time = torch.arange(self.size, device=signals.device)
            output = output.masked_fill((time >= start) & (time < start + length), 0.0)
        return output

    def shape(self, view: ViewSpec) -> tuple[int, ...]:
        del view
        return (self.samples.channels, self.size)


def window(
    signal: Float[Tensor, "channels _"], size: int, place: float
) -> Float[Tensor, "channels size"]:
    """The window of `size` values at a place between 0 (the beginning) and 1 (the end)."""
    free = signal.shape[1] - size
    if free >= 0:
        start = min(int((free + 1) * place), free)
        return signal[:, start : start + size]
    before = min(int((1 - free) * place), -free)
    return F.pad(signal, (before, -free - before))
