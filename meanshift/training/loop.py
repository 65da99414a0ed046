"""The training loop: from a config to a finished run directory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from meanshift.config import Config
from meanshift.methods import Batch, StepOutput
from meanshift.models.features import evaluation_batches
from meanshift.ops import collapse
from meanshift.runtime import distributed, signals
from meanshift.runtime.device import pick_device
from meanshift.training.session import MakeMonitor, Session, open_session
from meanshift.training.snapshot import snapshot_epochs, take_snapshot
from meanshift.training.step import TrainStep


def pretrain(config: Config, out: Path | str, *, monitor: MakeMonitor | None = None) -> Path:
    """Train, or continue, the run in `out`; however interrupted, the same config gives the same bits.

    Under `torchrun` all processes work on it together, each on its part of every batch.

    >>> from meanshift.config.recipes import recipe
    >>> pretrain(recipe("small").with_overrides({"data.source": "photos"}), "runs/photos")
    """
    device = distributed.local_device(pick_device(config.train.device))
    with (
        distributed.process_group(device, timeout=config.train.timeout),
        open_session(config, Path(out), device, monitor) as session,
    ):
        train(session)
    return session.run_directory.folder


def train(session: Session) -> None:
    """Take the steps that are left, with everything that happens between them."""
    state, schedule, console = session.state, session.schedule, session.console
    train_step = TrainStep(session)
    if state.step == 0:
        observe(session, 0, evaluate=session.config.train.monitor_every > 0)
    with (
        signals.catch_signals(patience=_signal_patience()) as received,
        console,
        closing(session.batches()) as batches,
    ):
        save_pending = False
        for images in batches:
            now = schedule.progress(images.step)
            epoch, epoch_ends = now.epoch + 1, (now.step + 1) % schedule.steps_per_epoch == 0
            if now.step % schedule.steps_per_epoch == 0:
                session.method.begin_epoch(now, lambda: _passes(session))
            scheduled = {"lr": schedule.set_lr(state.optimizer, now.step)}
            scheduled |= session.method.set_progress(now)

            output = train_step(images, now)

            state.step += 1
            state.averages.add(output)
            console.step()
            stop, unread = distributed.all_max(*received[:1] or [0], len(images.bad))
            if unread:
                report_bad_files(session, images.bad)
            if state.step % session.config.train.log_every == 0 or epoch_ends:
                log_metrics(session, epoch, scheduled, output)
            if epoch_ends:
                due = schedule.is_due(epoch, session.config.train.monitor_every)
                observe(session, epoch, evaluate=due)
                console.end_epoch(epoch)
            keep = epoch_ends and schedule.is_due(epoch, session.config.train.keep_every)
            save_pending |= keep or bool(stop) or schedule.save_due(state.step)
            if save_pending and schedule.updates_after(now.step):  # no gradient is pending
                session.save()
                save_pending = False
                if stop and state.step < schedule.total:
                    distributed.barrier()  # a launcher ends the rest when the first leaves
                    raise signals.Stopped(stop, state.step)
        console.print(state.bad_files.summary())
        session.trackers.close()


def observe(session: Session, epoch: int, *, evaluate: bool) -> None:
    """Evaluate the weights as they are, and take a snapshot where one is due."""
    local = tuple(f"{name}." for name in session.method.process_local())
    distributed.broadcast(
        buffer for name, buffer in session.method.named_buffers() if not name.startswith(local)
    )
    if evaluate and session.monitor is not None:
        metrics = session.monitor(session.backbone)
        session.log("monitor", epoch, metrics)
        session.console.show(metrics)
    train_settings = session.config.train
    if epoch in snapshot_epochs(train_settings.epochs, train_settings.snapshots):
        session.log("snapshot", epoch, take_snapshot(session, epoch))


def log_metrics(
    session: Session, epoch: int, scheduled: dict[str, float], output: StepOutput
) -> None:
    """Write the averages since the last line; stop on a loss that is no number."""
    metrics = scheduled | session.state.averages.compute()
    if not math.isfinite(metrics["loss"]):
        raise distributed.SharedError(
            f"the loss is {metrics['loss']} at step {session.state.step}: the run cannot go on; "
            f"begin another with a lower --optim.lr than {session.config.optim.lr:g}"
        )
    embeddings = distributed.all_gather_rows(output.embeddings)
    metrics["effective_rank"] = collapse.effective_rank(embeddings)
    metrics["spread"] = collapse.spread(embeddings)
    session.log("train", epoch, metrics | session.console.speed())
    session.console.show(metrics)
    warning = collapse.collapse_warning(
        agreement=metrics.get("agreement"),
        rank=metrics["effective_rank"],
        spread=metrics["spread"],
        dim=embeddings.shape[1],
        hint=session.method.collapse_hint(),
    )
    if warning and not session.collapsed:
        session.collapsed = True
        session.warn("collapse", warning)


def report_bad_files(session: Session, found: list[tuple[str, str]]) -> None:
    """Report images that could not be read, once each; too many end the run."""
    bad_files = session.state.bad_files
    for title, reason in bad_files.add(distributed.all_gather_list(found)):
        message = f"{title} cannot be read ({reason}); replaced by another image"
        session.console.print(f"warning: {message}")
        session.run_directory.warn(session.state.step, "bad image", reason, file=title)
    bad_files.check()


def _passes(session: Session) -> Iterator[Batch]:
    """The training data once, in evaluation views and in order."""
    batches = evaluation_batches(
        session.source,
        image_size=session.config.data.image_size,
        device=session.device,
        workers=session.config.data.workers,
    )
    for ids, images in batches:
        labels = session.source.labels
        yield Batch((images,), ids, None if labels is None else labels[ids])


def _signal_patience() -> float:
    """Seconds in which a second signal is the first one again: launchers pass signals on."""
    return 5.0 if distributed.world_size() > 1 else 2.0
