"""Frozen features of a source: heads removed, eval mode, nothing of the model changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as TF

from meanshift.augment import normalise
from meanshift.data import Source, Unreadable
from meanshift.encoder import memory_format
from meanshift.machine import autocast


@torch.no_grad()
def extract(
    network: nn.Module,
    source: Source,
    *,
    image_size: int,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    batch_size: int = 256,
) -> Float[Tensor, "n features"]:
    """The network's output for every picture of a source, in order, in float32 on the CPU."""
    layout, bad, parts = memory_format(network), list[Unreadable](), []
    with judged(network):
        for indices in torch.arange(len(source)).split(batch_size):
            pictures = prepare(source, indices, image_size, bad).to(device, non_blocking=True)
            with autocast(device, precision):
                parts.append(
                    network(normalise(pictures).contiguous(memory_format=layout)).float().cpu()
                )
    if bad:
        warnings.warn(
            f"{source.name}: {len(bad)} of {len(source)} pictures cannot be read and count as grey "
            f"ones, the first is {bad[0].title} ({bad[0].why})",
            stacklevel=2,
        )
    return torch.cat(parts)


@contextmanager
def judged(network: nn.Module) -> Iterator[nn.Module]:
    """A network in eval mode for a while; each of its parts gets its own mode back."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield network
    finally:
        for module, training in modes.items():
            module.training = training


def prepare(
    source: Source,
    indices: Int[Tensor, " batch"],
    image_size: int,
    bad: list[Unreadable] | None = None,
) -> Float[Tensor, "batch channels _ _"]:
    """Pictures as they are judged: small ones of one size as they are, others cut from the centre.

    The short side is resized to 256/224 of `image_size` and the centre taken (256 and 224 in the
    authors' code). Small arrays keep their own size, or are enlarged to
    `image_size`. An unreadable picture raises, or where a list
    `bad` is given it is added there and counts as a grey one.
    """
    if source.uniform:
        pictures = source.gather(indices).permute(0, 3, 1, 2)
        if max(pictures.shape[2:]) <= max(image_size, 64):
            if max(pictures.shape[2:]) < image_size:  # trained enlarged, so judged enlarged
                pictures = TF.resize(pictures, [image_size, image_size], antialias=True)
            return pictures.float().div_(255)
        unbound: Iterable[Tensor] = pictures.unbind(0)
    else:
        unbound = (_readable(source, int(index), image_size, bad) for index in indices)
    short = round(image_size * 256 / 224)
    cut = [
        TF.center_crop(TF.resize(picture, [short], antialias=True), [image_size, image_size])
        for picture in unbound
    ]
    return torch.stack(cut).float().div_(255)


def _readable(source: Source, index: int, image_size: int, bad: list[Unreadable] | None) -> Tensor:
    try:
        return source.read(index)
    except Unreadable as error:
        if bad is None:
            raise
        bad.append(error)
        return torch.full((3, image_size, image_size), 128, dtype=torch.uint8)
