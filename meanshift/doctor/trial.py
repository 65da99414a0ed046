"""A few real training steps: what a run takes in time, memory and disk on this machine."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meanshift.config import Config
from meanshift.data import Source
from meanshift.doctor.advice import cores
from meanshift.runtime.device import pick_device
from meanshift.training.loop import training_data
from meanshift.training.session import Session, open_session
from meanshift.training.step import TrainStep
from meanshift.transforms.replay import denormalize, replay_views, to_rgb
from meanshift.viz.analysis import view_title

SECONDS = 5.0
"""time for the steps"""
_STEPS = 30
_SMALL_BATCH = 16
_SHOWN = 6  # samples whose views are drawn
_EPOCHS = 2  # in which they are drawn


@dataclass(frozen=True)
class ViewSheet:
    """The views of some samples, as they are drawn for training."""

    columns: list[str]
    rows: list[list[Tensor]]
    """RGB images of bytes: a sample, then its views"""


@dataclass(frozen=True)
class Trial:
    """What was measured, and what follows from it for the whole run."""

    device: str
    precision: str
    cores: int
    machine_memory: int
    """bytes; 0 if not known"""
    free_disk: int
    steps: int
    """steps that were timed"""
    batch_size: int
    """of the timed steps; time and memory of a larger batch are in proportion"""
    samples_per_second: float
    run_steps: int
    run_seconds: float
    memory: int
    """peak of this process in bytes, or that of the GPU; 0 if not known"""
    checkpoint: int
    """bytes of one checkpoint"""
    disk: int
    """bytes of all checkpoints that a run keeps, and of the one that is being written"""
    sheet: ViewSheet


def try_steps(config: Config, train: Source, readable: list[int]) -> Trial:
    """Train for some steps in a temporary run, on training samples that can be read.

    The network starts with random weights, which take no time to compute.
    """
    settings = config.train
    some = train.subset(torch.tensor(readable))
    device = pick_device(settings.device)
    with (
        contextlib.redirect_stderr(io.StringIO()),
        tempfile.TemporaryDirectory() as folder,
        open_session(
            _quick(config, some), Path(folder) / "run", device, data={"train": some}
        ) as session,
    ):
        sheet = _draw_views(session)
        memory_before = _peak_memory(device)
        steps, batch_size, seconds = _time_steps(session)
        memory = _peak_memory(device)
        session.save()
        files = session.run_directory.checkpoints.rglob("*")
        checkpoint = sum(file.stat().st_size for file in files if file.is_file())
        precision = str(session.precision).removeprefix("torch.")
    run_steps = len(train) // settings.batch_size * settings.epochs
    kept = settings.epochs // settings.keep_every if settings.keep_every else 0
    samples_per_second = batch_size / seconds
    of_batch = (memory - memory_before) * settings.batch_size // batch_size
    return Trial(
        device=str(device),
        precision=precision,
        cores=cores(),
        machine_memory=_machine_memory(),
        free_disk=shutil.disk_usage(Path.cwd()).free,
        steps=steps,
        batch_size=batch_size,
        samples_per_second=samples_per_second,
        run_steps=run_steps,
        run_seconds=run_steps * settings.batch_size / samples_per_second,
        memory=memory_before + of_batch,
        checkpoint=checkpoint,
        disk=(3 + kept) * checkpoint,
        sheet=sheet,
    )


def _quick(config: Config, some: Source) -> Config:
    """The settings of the trial: without what is done before and after the steps of a run."""
    return config.with_overrides(
        {
            "data.validation": "none",
            "encoder.init": "random",
            "encoder.output": "plain",
            "optim.heads_first": 0.0,  # steps that train only the heads would be cheaper
            "train.batch_size": min(config.train.batch_size, len(some)),
            "train.epochs": max(config.train.epochs, 2 * _STEPS),  # enough steps of few samples
            "train.compile": False,
            "train.trackers": (),
        }
    )


def _time_steps(session: Session) -> tuple[int, int, float]:
    """Steps that were timed, their batch size, and the seconds of one.

    A small batch is tried first: a full one is left out where it would take too long.
    """
    config = session.config
    batch_size = config.train.batch_size
    groups = config.encoder.batch_groups
    small = groups * max(2, _SMALL_BATCH // groups)
    if small < batch_size:
        session.config = replace(config, train=replace(config.train, batch_size=small))
        steps, seconds = _run_steps(session, at_most=2)
        session.config = config
        if seconds * batch_size / small > SECONDS:
            return steps, small, seconds
    steps, seconds = _run_steps(session, at_most=_STEPS)
    return steps, batch_size, seconds


def _run_steps(session: Session, *, at_most: int) -> tuple[int, float]:
    """Take one step that does not count, and then some: their number and the seconds of one."""
    train_step = TrainStep(session)
    schedule = session.schedule
    times = list[float]()
    with closing(session.batches()) as batches:
        for images in itertools.islice(batches, 1 + at_most):
            now = schedule.progress(images.step)
            if not times or schedule.begins_epoch(now.step):
                session.method.begin_epoch(now, lambda: training_data(session))
            schedule.set_lr(session.state.optimizer, now.step)
            session.method.set_progress(now)
            train_step(images, now)
            session.state.step += 1
            if session.device.type == "cuda":
                torch.cuda.synchronize(session.device)
            times.append(time.perf_counter())
            if len(times) > 2 and times[-1] - times[0] > SECONDS:
                break
    steps = len(times) - 1
    return steps, (times[-1] - times[0]) / steps


def _draw_views(session: Session) -> ViewSheet:
    source = session.source
    spec = source.sample_spec
    ids = torch.arange(len(source))[:: max(1, len(source) // _SHOWN)][:_SHOWN]
    replayed = [
        replay_views(source, ids, session.transform, epoch=epoch, keep_images=True)
        for epoch in range(_EPOCHS)
    ]
    rows = [[to_rgb(image)] for image in replayed[0].images]
    for one in replayed:
        for row, views in zip(rows, zip(*one.views, strict=True), strict=True):
            row += [to_rgb(denormalize(view, spec)) for view in views]
    names = [view_title(view) for view in session.transform.single_views()]
    return ViewSheet(["sample", *names * _EPOCHS], rows)


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 0


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
