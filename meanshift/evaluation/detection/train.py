"""A detector at work: its iterations, resumable to the bit, and its detections."""

from __future__ import annotations

import hashlib
import json
import statistics
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from meanshift.data.bad_files import (
    MAX_BAD_FRACTION_BOXES,
    ReadSample,
    read_or_replace,
    refuse_too_many,
)
from meanshift.data.loader import iterate
from meanshift.data.voc import DetectionDataset
from meanshift.evaluation.context import EncoderContext
from meanshift.evaluation.detection.model import DetectionSettings, groups
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.ops.average_precision import Detections
from meanshift.runtime import checkpoint, distributed, rng
from meanshift.runtime.progress import progress

TRAINED = 2  # raised whenever training changes, so that detectors of before are not met again


@dataclass
class Learned:
    """What is told of a detector's training, beside the detector."""

    losses: dict[int, float]
    """mean loss of the iterations up to each of these"""
    bad: dict[str, str]
    """images that could not be read, and why"""
    processes: list[int]
    """how many worked on it, one after another"""


def learn(
    judged: EncoderContext, detector: nn.Module, train: DetectionDataset, recipe: DetectionSettings, seed: int
) -> Learned:
    """Train to the last iteration, from the last checkpoint where there is one."""
    device, world, rank = judged.device, distributed.world_size(), distributed.rank()
    optimizer = torch.optim.SGD(groups(detector, recipe), lr=recipe.lr, momentum=recipe.momentum)
    folder = _folder(judged, train, recipe, seed)
    state, wrong = checkpoint.latest(folder)
    for message in wrong:
        warnings.warn(f"{message}; an earlier one is used", stacklevel=2)
    start, told = 0, Learned({}, {}, [])
    if state is not None:
        detector.load_state_dict(state["detector"])
        optimizer.load_state_dict(state["optimizer"])
        start, told = state["step"], Learned(**state["told"])
    if len(set(distributed.all_gather_list([start]))) > 1:
        raise ValueError(
            f"detect: the processes found different checkpoints in {folder}; need a folder on a "
            f"disk that all of them share, with --out"
        )
    if told.processes[-1:] != [world] and start < recipe.iterations:
        told.processes.append(world)
    network = detector
    if world > 1:
        detector = convert_sync_batch_norm(detector, device)
        network = DistributedDataParallel(
            detector, device_ids=[device.index] if device.type == "cuda" else None
        )
    network.train()
    every = max(1, min(500, recipe.iterations // 20))
    bar = progress(f"train, seed {seed}", recipe.iterations, start=start, shown=rank == 0)
    with bar, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        passed = torch.zeros((), device=device)  # summed there, so that no step waits for it
        for step, samples in _batches(
            train, recipe, seed, start, recipe.iterations, judged.workers
        ):
            images, targets = _prepared(train, samples, recipe, seed, step, device)
            told.bad |= {bad.title: bad.reason for _, _, errors in samples for bad in errors}
            refuse_many(told.bad, train)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            loss = sum(network(images, targets).values())
            optimizer.zero_grad(set_to_none=True)
            share = len(samples) * world / recipe.batch_size
            (loss * share).backward()
            optimizer.step()
            passed += loss.detach() * share
            bar.update()
            done = step + 1
            if done % every == 0 or done == recipe.iterations:
                told.losses[done] = _mean_loss(passed, done, told.losses)
                told.bad = dict(distributed.all_gather_list(list(told.bad.items())))
                refuse_many(told.bad, train)
                passed.zero_()
                shown = {"loss": f"{told.losses[done]:.3f}", "lr": f"{recipe.rate(step):.2g}"}
                bar.set_postfix(shown, refresh=False)
                if rank == 0:
                    held = {"detector": detector.state_dict(), "optimizer": optimizer.state_dict()}
                    checkpoint.save(folder, {"step": done, "told": asdict(told), **held})
    _settle(judged, detector, train, recipe, seed)
    return told


@torch.no_grad()
def _settle(
    judged: EncoderContext, detector: nn.Module, train: DetectionDataset, recipe: DetectionSettings, seed: int
) -> None:
    """Measure the batch norms' statistics anew with the last weights, as MoCo's program does.

    Those gathered while training are of weights that have changed since.
    """
    norms = [m for m in detector.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over the batches
    start, device = recipe.iterations, judged.device
    batches = _batches(train, recipe, seed, start, start + recipe.settling, judged.workers)
    bar = progress("batch norm", recipe.settling, shown=distributed.rank() == 0)
    with bar, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for step, samples in batches:
            detector(*_prepared(train, samples, recipe, seed, step, device))
            bar.update()
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
        for held in (norm.running_mean, norm.running_var):
            assert held is not None
            distributed.all_mean_(held)


def refuse_many(bad: dict[str, str], images: DetectionDataset) -> None:
    """A few images that cannot be read are counted; many would make another task of it."""
    refuse_too_many(
        len(bad),
        len(images),
        max_fraction=MAX_BAD_FRACTION_BOXES,
        spare=1,
        name=images.name,
        first=next((f"{title} ({reason})" for title, reason in bad.items()), ""),
        advice="repair them, or take them off the list",
    )


def _mean_loss(passed: Tensor, done: int, losses: dict[int, float]) -> float:
    """Of the iterations since the last entry, over all processes; nothing learned may be nan."""
    mean = float(passed) / (done - max(losses, default=0))
    mean = statistics.fmean(distributed.all_gather_list([mean]))
    if mean != mean or mean == torch.inf:
        raise ValueError(
            f"detect: the loss is {mean} after {done} iterations; try a smaller --lr, or a larger "
            f"--batch-size"
        )
    return mean


@torch.no_grad()
def detect(
    judged: EncoderContext, detector: nn.Module, test: DetectionDataset, title: str
) -> tuple[dict[int, Detections], dict[str, str]]:
    """The detections in each image that can be read; each process looks at its share."""
    world, rank, device = distributed.world_size(), distributed.rank(), judged.device
    detector.eval()
    mine, bad = list[tuple[int, Detections]](), list[tuple[str, str]]()
    indices = [[index] for index in range(rank, len(test), world)]
    samples = iterate(_DecodedBatches(test), indices, workers=judged.workers)
    with closing(samples), progress(title, len(indices), shown=rank == 0) as bar:
        for [(image, index, errors)] in samples:
            bar.update()
            if errors:  # another image stands in its place, which is for training
                bad.append((errors[0].title, errors[0].reason))
                continue
            found = detector([image.to(device).float().div_(255)])[0]
            boxes, scores = (found[name].float().cpu() for name in ("boxes", "scores"))
            mine.append((index, Detections(boxes, scores, found["labels"].cpu() - 1)))
    return dict(distributed.all_gather_list(mine)), dict(distributed.all_gather_list(bad))


def _batches(
    train: DetectionDataset, recipe: DetectionSettings, seed: int, start: int, stop: int, workers: int
) -> Iterator[tuple[int, list[ReadSample]]]:
    """This process's share of each batch; every image comes once an epoch, in a new order."""
    size, count = recipe.batch_size, len(train)
    rank, world = distributed.rank(), distributed.world_size()
    shares, orders = [], dict[int, list[int]]()
    for step in range(start, stop):
        share = []
        for place in range(step * size + rank, (step + 1) * size, world):
            epoch, at = divmod(place, count)
            if epoch not in orders:
                orders = {epoch: rng.permutation(seed, epoch, count).tolist()} | (
                    {epoch - 1: orders[epoch - 1]} if epoch - 1 in orders else {}
                )
            share.append(orders[epoch][at])
        shares.append(share)
    samples = iterate(_DecodedBatches(train), shares, workers=workers)
    yield from zip(range(start, stop), samples, strict=True)


class _DecodedBatches(Dataset[list[ReadSample]]):
    """Images by lists of indices; the next readable image replaces one that cannot be read."""

    def __init__(self, images: DetectionDataset) -> None:
        self.images = images

    def __getitem__(self, indices: list[int]) -> list[ReadSample]:
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> ReadSample:
        size = len(self.images)
        others = ((index + more) % size for more in range(1, size))
        return read_or_replace(self.images, index, others, gray_size=32)


def _prepared(
    train: DetectionDataset,
    samples: list[ReadSample],
    recipe: DetectionSettings,
    seed: int,
    step: int,
    device: torch.device,
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images in 0..1 and their targets, half of them mirrored; each draw has its own address.

    Also those that torchvision draws: sizes, and the regions that are learned from.
    """
    world, rank = distributed.world_size(), distributed.rank()
    torch.manual_seed(rng.derive_seed(seed, step * world + rank, rng.NETWORK))
    places = step * recipe.batch_size + rank + world * torch.arange(len(samples))
    mirrored = rng.uniform(seed, 0, places, rng.ONLINE, 1)[:, 0] < 0.5
    images, targets = [], []
    for (image, index, _), mirror in zip(samples, mirrored.tolist(), strict=True):
        boxes, labels = train.images[index].boxes, train.images[index].labels
        if mirror:
            image, width = image.flip(2), image.shape[2]
            boxes = torch.stack(
                [width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1
            )
        images.append(image.to(device, non_blocking=True).float().div_(255))
        targets.append({"boxes": boxes.to(device), "labels": labels.to(device) + 1})
    return images, targets


def _folder(judged: EncoderContext, train: DetectionDataset, recipe: DetectionSettings, seed: int) -> Path:
    """Where a detector's checkpoints lie: another for other weights, images or settings."""
    how = [asdict(recipe), seed, str(judged.precision), TRAINED]
    key = [judged.fingerprint, train.fingerprint(), *how]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    folder = judged.home / "detectors" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
