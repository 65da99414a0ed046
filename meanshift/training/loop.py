"""One straight loop from a config to a finished run directory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meanshift.config import Config
from meanshift.data import train_and_validation
from meanshift.data.loader import batches, steps_per_epoch
from meanshift.methods import MeanShift, build
from meanshift.models.encoder import Encoder, memory_format
from meanshift.models.sync_batch_norm import convert_sync_batch_norm
from meanshift.ops import collapse
from meanshift.runtime import checkpoint, distributed, rng, signals
from meanshift.runtime.device import autocast, pick_device, pick_precision
from meanshift.runtime.run_directory import RunDirectory
from meanshift.training import resume
from meanshift.training.console import Console
from meanshift.training.metrics import BadFiles, MetricAverages
from meanshift.training.optim import Schedule, build_optimizer
from meanshift.training.snapshot import snapshot_epochs, take_snapshot
from meanshift.transforms.augment import TwoViews

Monitor = Callable[[nn.Module], dict[str, float]]
"""Judges the online backbone while it trains: the network in, named figures out."""


def pretrain(config: Config, out: Path | str, *, monitor: Monitor | None = None) -> Path:
    """Train or continue the run in `out`; the same config gives the same bits, however interrupted.

    Under `torchrun` all processes work on it together, each on its part of every batch.

    >>> from meanshift.config.recipes import recipe
    >>> pretrain(recipe("small").with_overrides({"data.source": "photos"}), "runs/photos")
    """
    device = distributed.local_device(pick_device(config.train.device))
    journal = RunDirectory(Path(out), writes=distributed.rank() == 0)
    with distributed.process_group(device, timeout=config.train.timeout), ExitStack() as held:
        return _pretrain(config, journal, device, monitor, held)


def _pretrain(
    config: Config,
    journal: RunDirectory,
    device: torch.device,
    monitor: Monitor | None,
    held: ExitStack,
) -> Path:
    train, world = config.train, distributed.world_size()
    with distributed.fail_together():
        _refuse_small_shares(train.batch_size)
        journal.refuse_other(config)
        source, _ = train_and_validation(config.data.source, config.data.held_out, seed=train.seed)
        precision = pick_precision(train.precision, device)
        method = build_method(config).to(device).train()
        if train.batch_norm == "sync":
            convert_sync_batch_norm(method, device)
        backbone, layout = method.online.get_submodule("backbone"), memory_format(method)
        method.to(memory_format=layout)
        optimizer = build_optimizer(train, method)
        scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
        schedule = Schedule(config, steps=steps_per_epoch(source, train.batch_size))
        two_views = TwoViews(config.views, train.seed, config.data.image_size)
        moments = snapshot_epochs(train.epochs, train.snapshots)
        fingerprint = source.fingerprint()
    resume.refuse_different(journal, "images", fingerprint)
    with distributed.fail_together():
        held.enter_context(journal.alone())
        state, unreadable = checkpoint.latest(journal.checkpoints)
        if state is not None:  # before a word is written: what is refused stays as it was
            resume.refuse_other_images(journal, state["source"], fingerprint, len(source))
    resume.refuse_different(journal, "checkpoints", -1 if state is None else state["step"])

    # Begin the run, or continue it from its newest whole checkpoint.
    machine = {
        "device": device.type,
        "precision": str(precision),
        "threads": torch.get_num_threads(),
        "processes": world,
    } | ({"compiled": True} if train.compile else {})
    about = {"source": fingerprint, "images": len(source), "steps": schedule.total}
    tally, bad, start = MetricAverages(), BadFiles(config.data.bad_share, len(source)), 0
    noted = list[tuple[str, str]]()
    with distributed.fail_together():
        journal.begin(config, extra={**machine, **about})
        if state is not None:
            resume.load(method, state, journal)
            optimizer.load_state_dict(state["optimizer"])
            scaler.load_state_dict(state["scaler"])
            tally.load(state.get("tally", []))
            bad.known, start = dict(state["bad"]), state["step"]
            noted = [("checkpoint", f"{wrong}; going back to step {start}") for wrong in unreadable]
            was = {"processes": 1, **state["machine"]}
            if was != machine and start < schedule.total:
                noted += [("machine", resume.describe_change(was, machine))]
        journal.rewind(start if state is not None else -1)
    del state  # as large as what was made of it
    console = Console(schedule, start, train.batch_size, shown=journal.writes)
    for kind, message in noted:
        console.say(f"warning: {message}")
        journal.warn(start, kind, message)
    alarmed = any(warning["kind"] == "collapse" for warning in journal.read("warnings.jsonl"))
    events = _tensorboard(journal, start) if train.tensorboard and journal.writes else None
    if train.compile:
        method.online.compile()
        method.target.compile()
    stepping = distributed.data_parallel(method, functools.partial(_warm_up, config, device))

    def record(kind: str, step: int, epoch: int, figures: dict[str, Any]) -> None:
        journal.append("metrics.jsonl", {"kind": kind, "step": step, "epoch": epoch, **figures})
        if events is not None:
            for name, value in figures.items():
                events.add_scalar(f"{kind}/{name}", value, step)

    def look(step: int, epoch: int, *, monitored: bool) -> None:
        """Judge the weights as they are, and keep the moment where it is one to keep."""
        distributed.broadcast(_statistics(method))
        if monitored and monitor is not None:
            judged = monitor(backbone)
            record("monitor", step, epoch, judged)
            console.show(judged)
        if epoch in moments:
            told = take_snapshot(journal, method, source, config, epoch, precision)
            record("snapshot", step, epoch, told)

    def save(step: int) -> None:
        journal.settle()
        resume.save(
            journal,
            {
                "step": step,
                "config": config.to_dict(),
                "source": fingerprint,
                "machine": machine,
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "tally": tally.of_all(),
                "bad": list(bad.known.items()),
            },
            method,
            keep_steps=train.keep_every * schedule.steps,
        )

    if start == 0:
        look(0, 0, monitored=train.monitor_every > 0)
    if 0 < start < schedule.total:
        console.say(f"continues after step {start} of {schedule.total}")
    feed = batches(
        source,
        two_views.crop,
        batch_size=train.batch_size,
        seed=train.seed,
        start=start,
        stop=schedule.total,
        workers=config.data.workers,
        pin_memory=device.type == "cuda",
    )
    patience = 5.0 if world > 1 else 2.0  # a launcher may hand on a signal that the run has had
    with signals.catch_signals(patience=patience) as asked, console, closing(feed):
        for batch in feed:
            step, done, epoch = batch.step, batch.step + 1, batch.epoch + 1
            epoch_ends = done % schedule.steps == 0
            optimizer.param_groups[0]["lr"] = schedule.lr(step)
            method.k, method.momentum = schedule.k(step), schedule.momentum(step)
            if train.batch_norm == "shuffle":
                method.shuffle = rng.derive_seed(train.seed, step, rng.SHUFFLE)
            dropout = rng.derive_seed(train.seed, step, rng.NETWORK)
            torch.manual_seed(dropout + distributed.rank())

            batch = batch.to(device)
            target_view, online_view = two_views.finish(batch.images, batch.epoch, batch.ids)
            with autocast(device, precision):
                told = stepping(
                    online_view.contiguous(memory_format=layout),
                    target_view.contiguous(memory_format=layout),
                    ids=batch.ids.to(device, non_blocking=True),
                    labels=batch.labels,
                )
            optimizer.zero_grad(set_to_none=True)
            share = len(batch.ids) * world / train.batch_size  # gradients are means over processes
            scaler.scale(told.loss * share).backward()
            scaler.step(optimizer)
            scaler.update()
            method.after_update()
            tally.add(told, batch.labels)
            console.step()

            stop, unread = distributed.all_max(*asked[:1] or [0], len(batch.bad))
            if unread:
                bad.count(distributed.all_gather_list(batch.bad), done, journal, console)
            if done % train.log_every == 0 or epoch_ends:
                figures = {"lr": schedule.lr(step), "k": method.k, "momentum": method.momentum}
                figures |= tally.means()
                _refuse_nonsense(figures["loss"], done, train.lr)
                if "purity" in figures:  # as the authors' program counts it, beside the paper's
                    others = (method.k - 1) * figures["purity"]
                    figures["purity_with_self"] = (1 + others) / method.k
                embeddings = distributed.all_gather_rows(told.embeddings)
                figures["effective_rank"] = collapse.effective_rank(embeddings)
                figures["spread"] = collapse.spread(embeddings)
                record("train", done, epoch, figures | console.speed())
                console.show(figures)
                alarm = collapse.collapse_warning(
                    agreement=figures["agreement"],
                    rank=figures["effective_rank"],
                    spread=figures["spread"],
                    dim=method.dim,
                    same_view=config.views.same_view,
                )
                if alarm and not alarmed:
                    alarmed = True
                    console.say(f"warning: {alarm}")
                    journal.warn(done, "collapse", alarm)
            if epoch_ends:
                look(done, epoch, monitored=_due(epoch, train.monitor_every, train.epochs))
                console.end_epoch(epoch)
            keep = epoch_ends and _due(epoch, train.keep_every, train.epochs)
            if keep or stop or _save_due(done, train.save_every * schedule.steps):
                save(done)
            if stop and done < schedule.total:
                distributed.barrier()  # a launcher ends the rest when the first leaves
                raise signals.Stopped(stop, done)
        bad.report(console)
        if events is not None:
            events.close()
    return journal.folder


def build_method(config: Config) -> MeanShift:
    """The method of a config with the initial weights that its seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive_seed(config.train.seed, 0, rng.INITIAL))
        encoder = Encoder(config.encoder, dim=config.method.dim, image_size=config.data.image_size)
        return build(config.method, encoder, seed=config.train.seed)


def _due(epoch: int, every: int, last: int) -> bool:
    return epoch == last or bool(every and epoch % every == 0)


def _save_due(done: int, every: float) -> bool:
    """Whether a multiple of `every` steps (which may be a fraction) was passed just now."""
    return math.floor(done / every + 1e-9) > math.floor((done - 1) / every + 1e-9)


def _refuse_nonsense(loss: float, step: int, lr: float) -> None:
    if not math.isfinite(loss):
        raise distributed.SharedError(
            f"the loss is {loss} at step {step}: the run cannot go on; "
            f"begin another with a lower --train.lr than {lr:g}"
        )


def _refuse_small_shares(batch_size: int) -> None:
    world = distributed.world_size()
    if world > 1 and batch_size < 2 * world:
        raise ValueError(
            f"train.batch_size: got {batch_size} for {world} processes, need at least 2 images "
            f"each: --train.batch_size {2 * world} or more, or fewer processes"
        )


def _statistics(method: MeanShift) -> Iterator[torch.Tensor]:
    """The running figures of batch norm, of which each process has its own unless it is `sync`."""
    return (held for name, held in method.named_buffers() if not resume.in_bank(name))


def _warm_up(config: Config, device: torch.device, stepping: nn.Module) -> torch.Tensor:
    """The loss of two black images; nothing is remembered in eval mode."""
    black = torch.zeros(2, 3, config.data.image_size, config.data.image_size, device=device)
    loss: torch.Tensor = stepping(black, black, ids=torch.arange(2, device=device)).loss
    return loss


def _tensorboard(journal: RunDirectory, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "train.tensorboard needs TensorBoard; type: pip install 'meanshift[tensorboard]'"
        ) from None
    return SummaryWriter(journal.folder / "tensorboard", purge_step=start + 1)
