"""Frozen features: the output of a network for every image of a source, in evaluation mode."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from meanshift.data import Source, UnreadableSample
from meanshift.data.loader import iterate
from meanshift.models.encoder import memory_format
from meanshift.ops.image import normalize, to_unit
from meanshift.runtime import distributed
from meanshift.runtime.device import autocast
from meanshift.runtime.progress import progress
from meanshift.transforms.eval import EvalDataset, rank_batches

BATCH_SIZE = 256


def extract_features(
    network: nn.Module,
    source: Source,
    *,
    image_size: int,
    resize: int = 0,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    batch_size: int = BATCH_SIZE,
    workers: int = 0,
    bad: dict[int, UnreadableSample] | None = None,
) -> Float[Tensor, "n features"]:
    """Return the network's output for every image of a source, in order, in float32 on the CPU.

    Several processes share the work, batch by batch, and each returns all rows. Unreadable images
    are replaced by gray ones, with a warning, or are added to `bad` if it is given.
    """
    unreadable: dict[int, UnreadableSample] = {}
    batches = feature_batches(
        network,
        source,
        image_size=image_size,
        resize=resize,
        device=device,
        precision=precision,
        batch_size=batch_size,
        workers=workers,
        bad=unreadable,
    )
    own_rows = list(batches)
    (width,) = distributed.all_max(own_rows[0].shape[1] if own_rows else 0)
    features = distributed.all_gather_rows(torch.cat([*own_rows, torch.empty(0, width)]))
    unreadable = dict(distributed.all_gather_list(list(unreadable.items())))
    if bad is not None:
        bad |= unreadable
    elif unreadable:
        warn_unreadable(source, unreadable, "are replaced by gray ones")
    return features


def feature_batches(
    network: nn.Module,
    source: Source,
    *,
    image_size: int,
    resize: int = 0,
    bicubic: bool = False,
    device: torch.device,
    precision: torch.dtype = torch.float32,
    batch_size: int = BATCH_SIZE,
    workers: int = 0,
    bad: dict[int, UnreadableSample],
    show_progress: bool = False,
) -> Generator[Float[Tensor, "batch features"], None, None]:
    """Yield this process's features batch by batch, in float32 on the CPU.

    The workers decode images while the network computes. Unreadable images are added to `bad`
    before the batch that they belong to is yielded.
    """
    layout = memory_format(network)
    own_images = sum(map(len, rank_batches(len(source), batch_size)))
    visible = show_progress and distributed.rank() == 0
    batches = evaluation_batches(
        source,
        image_size=image_size,
        resize=resize,
        bicubic=bicubic,
        device=device,
        batch_size=batch_size,
        workers=workers,
        bad=bad,
    )
    with eval_mode(network), progress("features", own_images, unit="img", shown=visible) as bar:
        for indices, images in batches:
            with torch.no_grad(), autocast(device, precision):
                rows = network(images.contiguous(memory_format=layout))
            yield rows.float().cpu()
            bar.update(len(indices))


def evaluation_batches(
    source: Source,
    *,
    image_size: int,
    resize: int = 0,
    bicubic: bool = False,
    device: torch.device,
    batch_size: int = BATCH_SIZE,
    workers: int = 0,
    bad: dict[int, UnreadableSample] | None = None,
    shared: bool = True,
) -> Iterator[tuple[Int[Tensor, " batch"], Float[Tensor, "batch channels *size"]]]:
    """Yield this process's part of a source in order, as (indices, normalized evaluation views).

    Unreadable images are replaced by gray ones, and are added to `bad` if it is given. Without
    `shared` every process gets all images.
    """
    dataset = EvalDataset(
        source,
        image_size,
        resize=resize,
        bicubic=bicubic,
        batch_size=batch_size,
        shared=shared,
    )
    for indices, images, unreadable in iterate(
        dataset,
        workers=0 if source.uniform else workers,
        pin_memory=device.type == "cuda",
    ):
        if bad is not None:
            bad |= unreadable
        spec = source.sample_spec
        unit = to_unit(images.to(device, non_blocking=True))
        yield indices, normalize(unit, spec.mean, spec.std)


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[nn.Module]:
    """Switch a network to evaluation mode, then restore the mode of each of its modules."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield network
    finally:
        for module, training in modes.items():
            module.training = training


def warn_unreadable(
    source: Source, unreadable: Mapping[int, UnreadableSample], consequence: str
) -> None:
    """Warn about images that cannot be read; name the first one."""
    first = next(iter(unreadable.values()))
    warnings.warn(
        f"{source.name}: {len(unreadable)} of {len(source)} images cannot be read and "
        f"{consequence}, the first is {first.title} ({first.reason})",
        stacklevel=3,
    )
