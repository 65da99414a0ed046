"""The compiled operators of RGB views on a CPU (`image_kernel.c`).

The operators of `ops.image`, and torch's `interpolate` for crops to bytes, are the reference. Bytes
are the same bit for bit. Unit values and colors differ by the rounding of float32, so the record of
a run names which were used (`description`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from meanshift.ops.image import ColorParameters
from meanshift.runtime.c_library import FINITE, CLibrary, address, compute_in_threads, load

_SOURCE = Path(__file__).with_name("image_kernel.c")
_BYTES_PLANAR, _BYTES_INTERLEAVED, _FLOATS_PLANAR = range(3)  # layouts, as in the source
_THREAD_PIXELS = 2**16
"""pixels that are worth a thread"""


def library() -> CLibrary | None:
    """The compiled library; None where there is no compiler, or it is switched off."""
    return load(_SOURCE, FINITE)


def description() -> str:
    """Which operators compute views on this machine's CPU."""
    loaded = library()
    return "torch" if loaded is None else f"C {loaded.fingerprint}"


def can_color(images: Shaped[Tensor, "batch channels height width"]) -> bool:
    """Whether `color` can compute these images."""
    return (
        images.device.type == "cpu"
        and images.shape[1] == 3
        and images.dtype in (torch.uint8, torch.float32)
        and not images.requires_grad
        and library() is not None
    )


def color(
    images: Shaped[Tensor, "batch 3 height width"],
    parameters: ColorParameters | None,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    out: Float[Tensor, "batch 3 height width"],
) -> None:
    """Apply the color operators to bytes or to floats in [0, 1], and normalize, into `out`."""
    assert out.is_contiguous()
    height, width = images.shape[2:]
    layout = _FLOATS_PLANAR if images.dtype == torch.float32 else _BYTES_PLANAR
    if layout == _BYTES_PLANAR and images.permute(0, 2, 3, 1).is_contiguous():
        layout = _BYTES_INTERLEAVED
    else:
        images = images.contiguous()
    count = len(images)
    parameters = parameters or _unchanged(count)
    values = [  # named, so that they live as long as their addresses are used
        parameters.factors.double().contiguous(),
        parameters.sequence.long().contiguous(),
        parameters.jittered.contiguous(),
        parameters.grayed.contiguous(),
        parameters.sigma.double().contiguous(),
        parameters.solarized.contiguous(),
        torch.tensor(mean, dtype=torch.float32),
        torch.tensor(std, dtype=torch.float32),
    ]
    assert all(len(value) == count for value in values[:6])

    def compute(functions: ctypes.CDLL, first: int, last: int) -> int:
        limits = map(ctypes.c_long, (first, last, height, width))
        status: int = functions.color_batch(
            address(images), layout, *limits, *map(address, values), address(out)
        )
        return status

    _run(compute, count, count * height * width)


def can_crop(images: Sequence[Shaped[Tensor, "channels _ _"]]) -> bool:
    """Whether `crop` can compute these images."""
    return library() is not None and all(
        image.dtype == torch.uint8 and image.device.type == "cpu" and image.shape[0] == 3
        for image in images
    )


def crop(
    images: Sequence[UInt8[Tensor, "3 _ _"]],
    boxes: Int[Tensor, "batch 4"],
    flips: Bool[Tensor, " batch"],
    side: int,
) -> UInt8[Tensor, "batch 3 side side"]:
    """Crop, resize (bilinear, antialiased) and flip images of any sizes; channels are last."""
    interleaved = [image.permute(1, 2, 0) for image in images]
    interleaved = [
        image if image.stride()[1:] == (3, 1) else image.contiguous() for image in interleaved
    ]
    addresses = torch.tensor([image.data_ptr() for image in interleaved], dtype=torch.int64)
    row_bytes = torch.tensor([image.stride(0) for image in interleaved], dtype=torch.int64)
    boxes = boxes.contiguous()
    flips = flips.contiguous()
    out = torch.empty(len(images), side, side, 3, dtype=torch.uint8)

    def compute(functions: ctypes.CDLL, first: int, last: int) -> int:
        inputs = map(address, (addresses, row_bytes, boxes, flips))
        limits = map(ctypes.c_long, (first, last, side))
        status: int = functions.crop_batch(*inputs, *limits, address(out))
        return status

    _run(compute, len(images), len(images) * side**2)
    return out.permute(0, 3, 1, 2)


def can_resized_crop(images: Shaped[Tensor, "batch height width channels"]) -> bool:
    """Whether `resized_crop` can compute these images."""
    return (
        images.device.type == "cpu"
        and images.dtype == torch.uint8
        and images.shape[3] == 3
        and library() is not None
    )


def resized_crop(
    images: UInt8[Tensor, "batch height width 3"],
    boxes: Int[Tensor, "batch 4"],
    flips: Bool[Tensor, " batch"],
    size: int,
) -> Float[Tensor, "batch 3 size size"]:
    """Crop, resize (bilinear, antialiased) and flip each image of a batch; values are in [0, 1]."""
    images = images.contiguous()
    boxes = boxes.contiguous()
    flips = flips.contiguous()
    height, width = images.shape[1:3]
    out = torch.empty(len(images), 3, size, size)

    def compute(functions: ctypes.CDLL, first: int, last: int) -> int:
        sizes = map(ctypes.c_long, (height, width))
        limits = map(ctypes.c_long, (first, last, size))
        status: int = functions.resized_crop_batch(
            address(images), *sizes, address(boxes), address(flips), *limits, address(out)
        )
        return status

    _run(compute, len(images), len(images) * size**2)
    return out


def _run(compute: Callable[[ctypes.CDLL, int, int], int], count: int, pixels: int) -> None:
    """Compute all images, in up to as many threads as torch uses."""
    loaded = library()
    assert loaded is not None
    threads = min(torch.get_num_threads(), pixels // _THREAD_PIXELS)
    if any(compute_in_threads(functools.partial(compute, loaded.functions), count, threads)):
        raise MemoryError("the views of a batch do not fit into the memory")


def _unchanged(count: int) -> ColorParameters:
    nothing = torch.zeros(count, dtype=torch.bool)
    zeros = torch.zeros(count, 4, dtype=torch.float64)
    return ColorParameters(
        factors=zeros,
        sequence=zeros.long(),
        jittered=nothing,
        grayed=nothing,
        sigma=zeros[:, 0],
        solarized=nothing,
    )
