"""The training loop: from a config to a finished run directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import torch

from meanshift.config import Config
from meanshift.data import Source
from meanshift.methods import Batch
from meanshift.methods.finite import first_with_nan
from meanshift.models.features import evaluation_batches
from meanshift.ops import collapse
from meanshift.runtime import distributed, rng, signals
from meanshift.runtime.device import autocast, pick_device
from meanshift.runtime.errors import SharedError
from meanshift.runtime.output import survive_closed_output
from meanshift.training.session import MakeMonitor, Session, open_session
from meanshift.training.snapshot import snapshot_epochs, take_snapshot
from meanshift.training.step import TrainStep


def pretrain(
    config: Config,
    out: Path | str,
    *,
    data: Mapping[str, Source] | None = None,
    make_monitor: MakeMonitor | None = None,
) -> Path:
    """Train the run in `out`, or continue it. Interruptions do not change a bit of the result.

    Under `torchrun` all processes train one model, each on its part of every batch.

    Args:
        config: every setting of the run.
        out: folder of the run.
        data: the splits to train on where they are no SOURCE that could be opened by its name.
        make_monitor: makes what measures the encoder while it trains, such as k-NN accuracy, from
            the config and the two splits; None for nothing.

    Returns:
        The folder of the run.

    >>> from meanshift.config.recipes import recipe
    >>> pretrain(recipe("small").with_overrides({"data.source": "photos"}), "runs/photos")
    """
    device = distributed.local_device(pick_device(config.train.device))
    with (
        survive_closed_output(),
        distributed.process_group(device, timeout=config.train.timeout),
        open_session(config, Path(out), device, make_monitor, data) as session,
    ):
        train(session)
    return session.run_directory.folder


def train(session: Session) -> None:
    """Take the steps that are left; log, evaluate and save between them."""
    settings = session.config.train
    state = session.state
    schedule = session.schedule
    console = session.console
    train_step = TrainStep(session)
    with (
        signals.catch_signals(patience=_signal_patience()) as received,
        _stop_request(session) as requested,
        console,
        closing(session.batches()) as batches,
    ):
        if state.step < schedule.total:
            with autocast(session.device, session.precision):  # as in a step
                session.method.begin_session(lambda: announced_pass(session))
        if state.step == 0:
            console.end_epoch(0, observe(session, 0, evaluate=settings.monitor_every > 0))
        save_pending = False
        for images in batches:
            now = schedule.progress(images.step)
            epoch = now.epoch + 1
            epoch_ends = schedule.ends_epoch(now.step)
            if schedule.begins_epoch(now.step):
                torch.manual_seed(rng.derive_seed(settings.seed, now.step, rng.NETWORK))
                session.method.begin_epoch(now, lambda: announced_pass(session))
            scheduled: dict[str, float | int] = {"lr": schedule.set_lr(state.optimizer, now.step)}
            scheduled |= session.method.set_progress(now)

            output = train_step(images, now)

            state.step += 1
            state.averages.add(output)
            state.embeddings.add(output.embeddings)
            console.advance()
            # One exchange per step: whether any process was asked to stop, or could not read.
            own_signal = received[0] if received else requested()
            stop_signal, unreadable = distributed.all_max(own_signal, len(images.bad))
            if unreadable:
                report_bad_files(session, images.bad)
            if epoch_ends or state.step % settings.log_every == 0:
                log_metrics(session, epoch, scheduled)
            if epoch_ends:
                check_weights(session)
                check_rank(session, epoch)
                evaluate = schedule.is_due(epoch, settings.monitor_every)
                console.end_epoch(epoch, observe(session, epoch, evaluate=evaluate))
            keep = epoch_ends and schedule.is_due(epoch, settings.keep_every)
            save_pending |= keep or stop_signal > 0 or schedule.save_due(state.step)
            # Gradients are not saved: a checkpoint waits until they have become an update.
            if save_pending and schedule.updates_after(now.step):
                check_weights(session)
                session.save()
                save_pending = False
                if stop_signal and state.step < schedule.total:
                    distributed.barrier()  # a launcher ends the others when the first one exits
                    raise signals.Stopped(stop_signal, state.step)
        console.print(state.bad_files.summary())


def observe(session: Session, epoch: int, *, evaluate: bool) -> dict[str, float]:
    """Evaluate the present weights with the monitor, and take a snapshot if one is due.

    Returns the metrics of the monitor, none if they were not evaluated.
    """
    # Batch norm has statistics of its own in each process; those of the first one count.
    local = tuple(f"{name}." for name in session.method.process_local())
    distributed.broadcast(
        buffer for name, buffer in session.method.named_buffers() if not name.startswith(local)
    )
    train_settings = session.config.train
    snapshot_due = epoch in snapshot_epochs(train_settings.epochs, train_settings.snapshots)
    if epoch > 0 and (evaluate or snapshot_due or epoch == train_settings.epochs):
        session.fit_output()
    metrics: dict[str, float] = {}
    if evaluate and session.monitor is not None:
        metrics = session.monitor(session.backbone)
        session.log("monitor", epoch, metrics)
    if snapshot_due:
        session.log("snapshot", epoch, take_snapshot(session, epoch))
    return metrics


def log_metrics(session: Session, epoch: int, scheduled: dict[str, float | int]) -> None:
    """Log the averages since the last line, warn of a collapse, stop if the loss is not finite."""
    metrics = scheduled | session.state.averages.compute()
    if not math.isfinite(metrics["loss"]):
        raise SharedError(
            f"the loss is {metrics['loss']} at step {session.state.step} and the run cannot "
            f"continue; start another one with an --optim.lr below {session.config.optim.lr:g}"
        )
    embeddings = session.state.embeddings.gather()
    metrics["effective_rank"] = collapse.effective_rank(embeddings)
    metrics["rankme"] = collapse.rankme(embeddings)
    metrics["spread"] = collapse.spread(embeddings)
    session.log("train", epoch, metrics | session.console.speed())
    session.console.show(metrics)
    warning = collapse.collapse_warning(
        agreement=metrics.get("agreement"),
        rank=metrics["effective_rank"],
        spread=metrics["spread"],
        shape=(len(embeddings), embeddings.shape[1]),
        hint=session.method.collapse_hint(),
    )
    if warning and not session.collapsed:
        session.collapsed = True
        session.warn("collapse", warning)


def check_rank(session: Session, epoch: int) -> None:
    """Warn of embeddings that have been in few dimensions for a quarter of the run so far."""
    own = session.state.embeddings.own
    assert own is not None
    if session.collapsed or epoch < 2 or not session.run_directory.writes:
        return
    if collapse.effective_rank(own) >= collapse.PARTIAL_RANK:  # then its history need not be read
        return
    since = epoch - max(1, epoch // 4)
    lines = session.run_directory.read("metrics.jsonl")
    ranks = [line["effective_rank"] for line in lines if line["epoch"] > since and "loss" in line]
    warning = collapse.partial_collapse_warning(
        ranks,
        shape=(len(own) * distributed.world_size(), own.shape[1]),
        hint=session.method.collapse_hint(),
    )
    if warning:
        session.collapsed = True
        session.warn("collapse", warning)


def check_weights(session: Session) -> None:
    """Stop before weights with NaN are evaluated or saved; the last checkpoint is without."""
    name = first_with_nan(session.method)
    (found,) = distributed.all_max(int(name is not None))
    if found:
        raise SharedError(
            f"NaN in {name or 'the weights'} after step {session.state.step} and the run cannot "
            f"continue; start another one with an --optim.lr below {session.config.optim.lr:g}"
        )


def report_bad_files(session: Session, found: list[tuple[str, str]]) -> None:
    """Report images that could not be read, once each; too many end the run."""
    bad_files = session.state.bad_files
    new = bad_files.add(distributed.all_gather_list(found))
    for message in bad_files.messages(new):
        session.console.print(f"warning: {message}")
    for title, reason in new:
        session.run_directory.warn(session.state.step, "bad image", reason, file=title)
    bad_files.check()


def announced_pass(session: Session) -> Iterator[Batch]:
    """`training_data` after a line that says so, since it may take minutes."""
    images = f"{len(session.source):,} training images"
    session.console.print(f"{session.config.method.name}: one pass over the {images}")
    return training_data(session)


def training_data(session: Session) -> Iterator[Batch]:
    """One pass over the training data in evaluation views, in order; each process has its part."""
    labels = session.source.labels
    batches = evaluation_batches(
        session.source,
        image_size=session.config.data.image_size,
        device=session.device,
        workers=session.config.data.workers,
    )
    for ids, images in batches:
        yield Batch(
            views=(images,),
            ids=ids.to(session.device),
            labels=None if labels is None else labels[ids].to(session.device),
        )


def _stop_request(session: Session) -> AbstractContextManager[Callable[[], int]]:
    """Whether the explorer asked the run to stop; only the process that writes looks."""
    if not session.run_directory.writes:
        return nullcontext(lambda: 0)
    return signals.watch_stop_request(session.run_directory.stop_request)


def _signal_patience() -> float:
    """Seconds in which a second signal counts as the first one, which launchers may repeat."""
    return 5.0 if distributed.world_size() > 1 else 2.0
