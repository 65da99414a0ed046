"""Training of a detector; after a kill it continues to the same bits."""

from __future__ import annotations

import hashlib
import json
import statistics
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meanshift.data.voc import DetectionDataset
from meanshift.evaluation.context import EncoderContext
from meanshift.evaluation.detection.batches import check_unreadable, inputs, train_batches
from meanshift.evaluation.detection.model import batch_norms, parameter_groups
from meanshift.evaluation.detection.settings import DetectionSettings
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.runtime import checkpoint, distributed
from meanshift.runtime.progress import progress

TRAINING_VERSION = 3
"""increased whenever training changes, so that checkpoints of another version are not continued"""


@dataclass
class TrainingLog:
    """What is recorded while a detector trains."""

    losses: dict[int, float] = field(default_factory=dict)
    """iterations: mean loss since the entry before"""
    unreadable: dict[str, str] = field(default_factory=dict)
    """title of an image: why it could not be read"""
    processes: list[int] = field(default_factory=list)
    """how many processes trained, one number per change"""


def train_detector(
    context: EncoderContext,
    detector: nn.Module,
    train: DetectionDataset,
    settings: DetectionSettings,
    seed: int,
) -> TrainingLog:
    """Train to the last iteration, from the newest checkpoint if there is one."""
    device = context.device
    rank, world = distributed.rank(), distributed.world_size()
    groups = parameter_groups(detector, settings)
    optimizer = torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    folder = checkpoint_folder(context, train, settings, seed)
    start, log = _restore(folder, detector, optimizer)
    if log.processes[-1:] != [world] and start < settings.iterations:
        log.processes.append(world)
    network = _data_parallel(detector, device).train()
    interval = max(1, min(500, settings.iterations // 20))
    steps = train_batches(
        train, settings, seed=seed, start=start, stop=settings.iterations, workers=context.workers
    )
    bar = progress(f"train, seed {seed}", settings.iterations, start=start, shown=rank == 0)
    with bar, torch.random.fork_rng(devices=_generators(device)):
        total_loss = torch.zeros((), device=device)  # on the device, so that no step waits for it
        for step, samples in steps:
            images, targets = inputs(train, samples, settings, seed=seed, step=step, device=device)
            log.unreadable |= {bad.title: bad.reason for one in samples for bad in one.errors}
            check_unreadable(log.unreadable, train)
            for group in optimizer.param_groups:
                group["lr"] = settings.lr_at(step)
            loss = sum(network(images, targets).values())
            optimizer.zero_grad(set_to_none=True)
            # DDP averages over processes, whose parts of a batch may have different sizes.
            weight = len(samples) * world / settings.batch_size
            (loss * weight).backward()
            optimizer.step()
            total_loss += loss.detach() * weight
            bar.update()
            done = step + 1
            if done % interval == 0 or done == settings.iterations:
                _record(log, train, done, total_loss)
                total_loss.zero_()
                shown = {"loss": f"{log.losses[done]:.3f}", "lr": f"{settings.lr_at(step):.2g}"}
                bar.set_postfix(shown, refresh=False)
                if rank == 0:
                    _save(folder, done, log, detector, optimizer)
    _recompute_batch_norms(context, detector, train, settings, seed)
    return log


def checkpoint_folder(
    context: EncoderContext, train: DetectionDataset, settings: DetectionSettings, seed: int
) -> Path:
    """The folder of a detector's checkpoints; another for other weights, images or settings."""
    key = [
        context.fingerprint,
        train.fingerprint(),
        asdict(settings),
        seed,
        str(context.precision),
        TRAINING_VERSION,
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    folder = context.output_dir / "detectors" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _restore(
    folder: Path, detector: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, TrainingLog]:
    """Load the newest checkpoint, if any: (iterations done, log)."""
    state, unreadable = checkpoint.latest(folder)
    for message in unreadable:
        warnings.warn(f"{message}; an earlier one is used", stacklevel=3)
    start = 0
    log = TrainingLog()
    if state is not None:
        detector.load_state_dict(state["detector"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
        log = TrainingLog(**state["log"])
    if len(set(distributed.all_gather_list([start]))) > 1:
        raise ValueError(
            f"detect: the processes found different checkpoints in {folder}; need a folder on a "
            f"disk that all of them share, with --out"
        )
    return start, log


def _save(
    folder: Path,
    step: int,
    log: TrainingLog,
    detector: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    state = {
        "step": step,
        "log": asdict(log),
        "detector": detector.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    checkpoint.save(folder, state)


def _data_parallel(detector: nn.Module, device: torch.device) -> nn.Module:
    """The detector for several processes: synchronized batch norms, averaged gradients."""
    if distributed.world_size() == 1:
        return detector
    return DistributedDataParallel(
        convert_sync_batch_norm(detector, device),
        device_ids=[device.index] if device.type == "cuda" else None,
    )


def _record(log: TrainingLog, train: DetectionDataset, done: int, total_loss: Tensor) -> None:
    """Add the mean loss since the last entry, and the unreadable images of all processes."""
    mean = float(total_loss) / (done - max(log.losses, default=0))
    mean = statistics.fmean(distributed.all_gather_list([mean]))
    if mean != mean or mean == torch.inf:
        raise ValueError(
            f"detect: the loss is {mean} after {done} iterations; try a smaller --lr, or a larger "
            f"--batch-size"
        )
    log.losses[done] = mean
    log.unreadable = dict(distributed.all_gather_list(list(log.unreadable.items())))
    check_unreadable(log.unreadable, train)


@torch.no_grad()
def _recompute_batch_norms(
    context: EncoderContext,
    detector: nn.Module,
    train: DetectionDataset,
    settings: DetectionSettings,
    seed: int,
) -> None:
    """Compute the statistics of the batch norms again with the final weights, as MoCo does.

    The running statistics are of weights that have changed since.
    """
    norms = batch_norms(detector)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over the batches
    start = settings.iterations
    count = settings.batch_norm_batches
    steps = train_batches(
        train, settings, seed=seed, start=start, stop=start + count, workers=context.workers
    )
    bar = progress("batch norm", count, shown=distributed.rank() == 0)
    with bar, torch.random.fork_rng(devices=_generators(context.device)):
        for step, samples in steps:
            images, targets = inputs(
                train, samples, settings, seed=seed, step=step, device=context.device
            )
            detector(images, targets)
            bar.update()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        for statistic in (norm.running_mean, norm.running_var):
            assert statistic is not None
            distributed.all_mean_(statistic)


def _generators(device: torch.device) -> list[torch.device]:
    """The GPUs whose generator is restored after training."""
    return [device] if device.type == "cuda" else []
