"""A run that is open for training: its parts, checked, locked and restored.

The order is deliberate: refuse, lock, read, write. What is refused leaves every file as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meanshift.config import Config
from meanshift.data import Source, loader, train_and_validation
from meanshift.data.bad_files import BadFiles
from meanshift.methods import BuildContext, Method, method_class, view_specs
from meanshift.models.encoder import Encoder, memory_format, strides_over_one_pixel
from meanshift.models.fit_whitening import fit_view_whitening
from meanshift.models.input_check import check_image_size
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.models.view_whitening import ViewWhitening
from meanshift.models.weights import has_start_file
from meanshift.ops import image_kernel
from meanshift.runtime import checkpoint, distributed, rng
from meanshift.runtime.device import pick_precision
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training import resume
from meanshift.training.console import Console
from meanshift.training.optim import Schedule, build_optimizer, trained_second
from meanshift.training.resume import TrainState
from meanshift.training.start import (
    Start,
    describe_samples,
    recall_samples,
    resolve_samples,
    resolve_weights,
)
from meanshift.training.trackers import Trackers
from meanshift.transforms.augment import MultiViewTransform
from meanshift.transforms.views import view_transform

Monitor = Callable[[nn.Module], dict[str, float]]
"""Evaluates the online backbone while it trains: the network in, named metrics out."""
MakeMonitor = Callable[[Config, Source, Source | None], Monitor | None]
"""Makes the monitor of a run from its training and validation images."""


@dataclass
class Session:
    """The parts of a run; `state` is what a checkpoint contains."""

    config: Config
    device: torch.device
    precision: torch.dtype
    run_directory: RunDirectory
    source: Source
    fingerprint: str
    """of the source"""
    schedule: Schedule
    transform: MultiViewTransform
    state: TrainState
    start: Start
    trained_second: list[nn.Parameter]
    """parameters that are not trained while the heads are (`optim.heads_first`)"""
    monitor: Monitor | None
    console: Console
    trackers: Trackers
    collapsed: bool = False
    """whether a collapse was already reported"""

    @property
    def method(self) -> Method:
        return self.state.method

    @property
    def backbone(self) -> nn.Module:
        return self.method.online.get_submodule("backbone")

    @property
    def machine(self) -> dict[str, Any]:
        """What the bits of a run depend on besides its settings and images."""
        machine = {
            "device": self.device.type,
            "precision": str(self.precision),
            "threads": torch.get_num_threads(),
            "processes": distributed.world_size(),
        }
        if self.device.type == "cpu":
            machine["image operators"] = image_kernel.description()
        return machine | ({"compiled": True} if self.config.train.compile else {})

    def fit_output(self) -> None:
        """Fit the layer behind the backbone to the present weights, if there is one."""
        with distributed.fail_together():
            if distributed.rank() == 0:
                fit_view_whitening(
                    self.backbone,
                    self.source,
                    self.config.views,
                    image_size=self.config.data.image_size,
                    seed=self.config.train.seed,
                    device=self.device,
                )
        if isinstance(self.backbone, ViewWhitening):
            distributed.broadcast(iter([self.backbone.mean, self.backbone.matrix]))

    def batches(self) -> Generator[loader.Batch, None, None]:
        """The batches of the steps that are left."""
        return loader.batches(
            self.source,
            self.transform.crop,
            batch_size=self.config.train.batch_size,
            seed=self.config.train.seed,
            start=self.state.step,
            stop=self.schedule.total,
            workers=self.config.data.workers,
            pin_memory=self.device.type == "cuda",
        )

    def warn(self, kind: str, message: str, **more: str) -> None:
        """Show a warning and record it in warnings.jsonl."""
        self.console.print(f"warning: {message}")
        self.run_directory.warn(self.state.step, kind, message, **more)

    def log(self, kind: str, epoch: int, metrics: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, and the same to the trackers."""
        line = {"kind": kind, "step": self.state.step, "epoch": epoch, **metrics}
        self.run_directory.append("metrics.jsonl", line)
        self.trackers.log(line)

    def save(self) -> None:
        """Write a checkpoint of the present step, after the metrics that led to it."""
        self.run_directory.flush()
        about = {
            "config": self.config.to_dict(),
            "source": self.fingerprint,
            "machine": self.machine,
        }
        keep_steps = self.config.train.keep_every * self.schedule.steps_per_epoch
        if keep_steps and self.state.step % keep_steps == 0:
            self.keep()
        resume.save(self.run_directory, self.state, about)
        self.trackers.saved()

    def close_trackers(self) -> None:
        self.trackers.close(finished=self.state.step >= self.schedule.total)

    def keep(self) -> None:
        """Never delete the checkpoint of the present step."""
        if self.state.step not in self.state.kept:
            self.state.kept.append(self.state.step)


@contextmanager
def open_session(
    config: Config,
    out: Path,
    device: torch.device,
    make_monitor: MakeMonitor | None = None,
    data: Mapping[str, Source] | None = None,
) -> Iterator[Session]:
    """Check the settings, open the data, lock the run directory, and start or continue the run."""
    with distributed.fail_together():
        session = _prepare(config, out, device, make_monitor, data)
    run_directory = session.run_directory
    resume.check_same_in_all(run_directory, "images", session.fingerprint)
    session.start.broadcast(session.method, _local_names(session.method))
    with ExitStack() as stack:
        with distributed.fail_together():
            stack.enter_context(run_directory.lock())
        values, unreadable, finished_epochs = _latest_checkpoint(session)
        if values is None:
            session.fit_output()
        with distributed.fail_together():
            if values is not None:
                resume.load(run_directory, session.state, values)
            run_directory.begin(session.config, extra=_about(session))
            run_directory.rewind(-1 if values is None else session.state.step)
            if values is None:
                session.start.save(session.backbone)
        session.console.start(session.state.step)
        session.trackers.start(session.warn)
        stack.callback(session.close_trackers)
        images = math.ceil(session.config.train.batch_size / distributed.world_size())
        for message in (
            *describe_samples(session.config, session.transform.single_views()),
            session.method.memory_report(images),
            *session.start.messages,
        ):
            if message:
                session.console.print(message)
        for message in session.start.warnings:
            session.warn("initialization", message)
        for message in unreadable:
            session.warn("checkpoint", f"{message}; going back to step {session.state.step}")
        _report_other_machine(session, values)
        del values  # as large as what was restored from it
        warnings = run_directory.read("warnings.jsonl")
        session.collapsed = any(warning["kind"] == "collapse" for warning in warnings)
        if finished_epochs is not None:
            session.keep()
            _report_extension(session, finished_epochs, warnings)
        yield session


def build_method(
    config: Config,
    source: Source | None = None,
    start: Callable[[nn.Module], None] | None = None,
) -> Method:
    """The method of a config with the random weights that its seed gives.

    `start` then sets the backbone, before the method makes copies of it.
    """
    seed = rng.derive_seed(config.train.seed, 0, rng.INITIAL)
    encoders = 0

    def encoder(**heads: Any) -> Encoder:
        nonlocal encoders
        encoders += 1
        torch.manual_seed(seed)  # the same weights whatever a method builds before: `untrained:RUN`
        data = config.data
        built = Encoder(
            config.encoder, image_size=data.image_size, samples=data.sample_spec, **heads
        )
        if start is not None:
            start(built.backbone)
        return built

    context = BuildContext(
        encoder=encoder,
        dataset_size=0 if source is None else len(source),
        classes=0 if source is None else len(source.classes),
        batch_size=config.train.batch_size * config.optim.accumulate,
        seed=config.train.seed,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = method_class(config.method).build(config.method, context)
    if start is not None and not encoders:
        raise ValueError(
            f"encoder: the method {config.method.name} has an encoder of its own, which "
            f"encoder.init and encoder.weights do not reach; type --encoder.init random, and leave "
            f"encoder.weights empty"
        )
    return method


def _prepare(
    config: Config,
    out: Path,
    device: torch.device,
    make_monitor: MakeMonitor | None,
    data: Mapping[str, Source] | None,
) -> Session:
    """Check the settings and make all parts of a session; nothing is written."""
    train = config.train
    run_directory = RunDirectory(out, writes=distributed.rank() == 0)
    _check_batch_size(train.batch_size)
    config, given = resolve_weights(config, run_directory)
    config = recall_samples(config, run_directory)
    run_directory.check_compatible(config)
    source, validation = train_and_validation(
        data or config.data.source,
        config.data.validation,
        seed=train.seed,
        group=config.data.group,
    )
    config = resolve_samples(config, source, given)
    samples = config.data.sample_spec
    source = source.with_spec(samples)
    validation = None if validation is None else validation.with_spec(samples)
    transform = view_transform(
        view_specs(config),
        source,
        seed=train.seed,
        size=config.data.image_size,
        module=config.views.module,
    )
    start = Start(config, run_directory, source, device, given)
    method = build_method(config, source, start if has_start_file(config) else None)
    _check_views(config, method, transform)
    precision = _pick_precision(train.precision, device, method, transform)
    method = _move_to_device(method, device, sync_batch_norm=train.batch_norm == "sync")
    schedule = Schedule(config, loader.steps_per_epoch(source, train.batch_size))
    state = TrainState(
        method=method,
        optimizer=build_optimizer(config.optim, method),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == torch.float16),
        bad_files=BadFiles(config.data.max_bad_fraction, len(source)),
    )
    return Session(
        config=config,
        device=device,
        precision=precision,
        run_directory=run_directory,
        source=source,
        fingerprint=source.fingerprint(),
        schedule=schedule,
        transform=transform,
        state=state,
        start=start,
        trained_second=trained_second(config.optim, method),
        monitor=make_monitor(config, source, validation) if make_monitor else None,
        console=Console(schedule, train.batch_size, kind=source.kind, shown=run_directory.writes),
        trackers=Trackers(config, run_directory),
    )


def _move_to_device(method: Method, device: torch.device, *, sync_batch_norm: bool) -> Method:
    """The method in training mode on its device, in the memory format that is fastest for it."""
    method = method.to(device).train()
    if sync_batch_norm:
        convert_sync_batch_norm(method, device)
    return method.to(memory_format=memory_format(method))


def _check_views(config: Config, method: Method, transform: MultiViewTransform) -> None:
    """Refuse views of another size than `data.image_size` that the network does not take."""
    own = config.data.image_size
    sides = {transform.side(view) for view in transform.single_views()} - {own}
    if config.data.sample_spec.kind != "image":
        return
    for side in sorted(sides):
        check_image_size(
            method.online.get_submodule("backbone"),
            channels=config.data.sample_spec.channels,
            image_size=side,
            error=f"encoder.name: the method {config.method.name} also has views of {side} pixels, "
            f"which {config.encoder.name} does not take; choose an encoder that takes any "
            f"size, such as resnet18, or another method",
        )


def _local_names(method: Method) -> tuple[str, ...]:
    """The beginnings of the names of buffers that each process has for itself."""
    return tuple(f"{name}." for name in method.process_local())


def _latest_checkpoint(
    session: Session,
) -> tuple[dict[str, Any] | None, list[str], int | None]:
    """The newest checkpoint that can be read, errors about newer ones, and the epochs of a
    finished run that is extended."""
    run_directory = session.run_directory
    finished_epochs = None
    with distributed.fail_together():
        values, unreadable = checkpoint.latest(run_directory.checkpoints)
        if values is not None:
            resume.check_same_images(
                run_directory, values["source"], session.fingerprint, len(session.source)
            )
            finished_epochs = resume.extended_from(
                run_directory, values, session.config.train.epochs, session.schedule.steps_per_epoch
            )
    step = -1 if values is None else values["step"]
    resume.check_same_in_all(run_directory, "checkpoints", step)
    return values, unreadable, finished_epochs


def _about(session: Session) -> dict[str, Any]:
    """What environment.json records beside versions and hardware."""
    return {
        **session.machine,
        "source": session.fingerprint,
        "images": len(session.source),
        "steps": session.schedule.total,
        "start": session.start.card or {"init": "random"},
        "method": session.method.card(),
    }


def _pick_precision(
    name: str,
    device: torch.device,
    method: Method,
    transform: MultiViewTransform,
) -> torch.dtype:
    """The precision of the settings; `auto` avoids bfloat16 where its gradients are wrong."""
    precision = pick_precision(name, device)
    if name == "auto" and device.type == "cpu" and precision == torch.bfloat16:
        backbone = method.online.get_submodule("backbone")
        shapes = {transform.shape(view)[-3:] for view in transform.single_views()}
        if any(strides_over_one_pixel(backbone, shape) for shape in shapes):
            return torch.float32
    return precision


def _report_other_machine(session: Session, values: dict[str, Any] | None) -> None:
    """Warn that a run which continues elsewhere is not bit for bit the same."""
    if values is None or session.state.step >= session.schedule.total:
        return
    if values["machine"] != session.machine:
        session.warn("machine", resume.describe_change(values["machine"], session.machine))


def _report_extension(
    session: Session, finished_epochs: int, warnings: list[dict[str, Any]]
) -> None:
    """Mark that a finished run goes on: its schedules are not those of one run."""
    step = session.state.step
    if any(w["kind"] == "extended" and w["step"] == step for w in warnings):
        return  # it was killed since, before it saved a step
    epochs = session.config.train.epochs
    session.warn(
        "extended",
        f"extended from {finished_epochs} to {epochs} epochs: after step {step} the learning rate "
        f"and other schedules are those of a run of {epochs} epochs",
    )


def _check_batch_size(batch_size: int) -> None:
    """Batch norm needs two images in each process."""
    world = distributed.world_size()
    if world > 1 and batch_size < 2 * world:
        raise ValueError(
            f"train.batch_size: got {batch_size} for {world} processes, need at least 2 images "
            f"each: --train.batch_size {2 * world} or more, or fewer processes"
        )
