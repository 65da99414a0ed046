"""One straight loop from a config to a finished run directory."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meanshift import checkpoint, distributed, health, keyed
from meanshift.augment import TwoViews
from meanshift.config import Config
from meanshift.console import Console
from meanshift.data import train_and_held_out
from meanshift.data.loader import batches, steps_an_epoch
from meanshift.encoder import Encoder, memory_format
from meanshift.journal import Journal
from meanshift.machine import autocast, pick_device, pick_precision
from meanshift.methods import MeanShift, build
from meanshift.optim import Schedule, build_optimizer
from meanshift.snapshot import snapshot_epochs, take_snapshot
from meanshift.tally import BadPictures, Tally

Monitor = Callable[[nn.Module], dict[str, float]]
"""Judges the online backbone while it trains: the network in, named figures out."""


class Stopped(Exception):
    """A signal asked the run to stop, and it has saved itself."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped and saved at step {step}; the same command continues from there")
        self.signal_number = signal_number


def pretrain(config: Config, out: Path | str, *, monitor: Monitor | None = None) -> Path:
    """Train or continue the run in `out`; the same config gives the same bits, however interrupted.

    >>> from meanshift.recipes import recipe
    >>> pretrain(recipe("small").with_overrides({"data.source": "photos"}), "runs/photos")
    """
    _refuse_many_processes()
    train = config.train
    source, _ = train_and_held_out(config.data.source, config.data.held_out, seed=train.seed)
    device = pick_device(train.device)
    precision = pick_precision(train.precision, device)
    method = build_method(config).to(device).train()
    backbone, layout = method.online.get_submodule("backbone"), memory_format(method)
    method.to(memory_format=layout)
    optimizer = build_optimizer(train, method)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    schedule = Schedule(config, steps=steps_an_epoch(source, train.batch_size))
    two_views = TwoViews(config.views, train.seed, config.data.image_size)
    moments = snapshot_epochs(train.epochs, train.snapshots)
    fingerprint = source.fingerprint()

    # Begin the run, or continue it from its newest whole checkpoint.
    machine = {
        "device": str(device),
        "precision": str(precision),
        "threads": torch.get_num_threads(),
    }
    about = {"source": fingerprint, "pictures": len(source), "steps": schedule.total}
    journal = Journal(Path(out))
    journal.refuse_other(config)
    state, unreadable = checkpoint.latest(journal.checkpoints)
    if state is not None:  # before a word is written: what is refused stays as it was
        _refuse_other_pictures(journal, state["source"], fingerprint, len(source))
    Journal.begin(journal.folder, config, extra={**machine, **about})
    tally, bad, start = Tally(), BadPictures(config.data.bad_share, len(source)), 0
    noted = list[tuple[str, str]]()
    if state is not None:
        method.load_state_dict(state["method"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        tally.sums, tally.count, bad.known = state["sums"], state["count"], dict(state["bad"])
        start = state["step"]
        noted = [("checkpoint", f"{wrong}; going back to step {start}") for wrong in unreadable]
        if state["machine"] != machine and start < schedule.total:
            was, now = (", ".join(f"{k} {v}" for k, v in m.items())
                        for m in (state["machine"], machine))  # fmt: skip
            noted += [("machine", f"continues with {now} after {was}: not bit for bit the same")]
    journal.rewind(start if state is not None else -1)
    console = Console(schedule, start, train.batch_size)
    for kind, message in noted:
        console.say(f"warning: {message}")
        journal.warn(start, kind, message)
    alarmed = any(warning["kind"] == "collapse" for warning in journal.read("warnings.jsonl"))
    events = _tensorboard(journal, start) if train.tensorboard else None

    def record(kind: str, step: int, epoch: int, figures: dict[str, Any]) -> None:
        journal.append("metrics.jsonl", {"kind": kind, "step": step, "epoch": epoch, **figures})
        if events is not None:
            for name, value in figures.items():
                events.add_scalar(f"{kind}/{name}", value, step)

    def keep_moment(step: int, epoch: int) -> None:
        told = take_snapshot(journal, method, source, config, epoch, precision)
        record("snapshot", step, epoch, told)

    def save(step: int) -> None:
        state = {
            "step": step,
            "config": config.to_dict(),
            "source": fingerprint,
            "machine": machine,
            "method": method.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "sums": tally.sums,
            "count": tally.count,
            "bad": list(bad.known.items()),
        }
        journal.settle()
        checkpoint.save(journal.checkpoints, state, keep_steps=train.keep_every * schedule.steps)

    if start == 0 and 0 in moments:
        keep_moment(0, 0)
    if start == 0 and monitor is not None and train.monitor_every:
        record("monitor", 0, 0, monitor(backbone))
    if 0 < start < schedule.total:
        console.say(f"continues after step {start} of {schedule.total}")
    with _signals() as asked, console:
        for batch in batches(
            source,
            two_views.crop,
            batch_size=train.batch_size,
            seed=train.seed,
            start=start,
            stop=schedule.total,
            workers=config.data.workers,
            pin_memory=device.type == "cuda",
        ):
            step, done, epoch = batch.step, batch.step + 1, batch.epoch + 1
            epoch_ends = done % schedule.steps == 0
            bad.count(batch.bad, done, journal, console)
            optimizer.param_groups[0]["lr"] = schedule.lr(step)
            method.k, method.momentum = schedule.k(step), schedule.momentum(step)
            torch.manual_seed(keyed.seed_of(train.seed, step, keyed.NETWORK))  # dropout's address

            batch = batch.to(device)
            target_view, online_view = two_views.finish(batch.pictures, batch.epoch, batch.ids)
            with autocast(device, precision):
                told = method(
                    online_view.contiguous(memory_format=layout),
                    target_view.contiguous(memory_format=layout),
                    ids=batch.ids.to(device, non_blocking=True),
                    labels=batch.labels,
                )
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(told.loss).backward()
            scaler.step(optimizer)
            scaler.update()
            method.follow()
            tally.add(told)
            console.step()

            if done % train.log_every == 0 or epoch_ends:
                figures = {"lr": schedule.lr(step), "k": method.k, "momentum": method.momentum}
                figures |= tally.means()
                _refuse_nonsense(figures["loss"], done, train.lr)
                if "purity" in figures:  # as the authors' program counts it, beside the paper's
                    others = (method.k - 1) * figures["purity"]
                    figures["purity_with_self"] = (1 + others) / method.k
                figures["effective_rank"] = health.effective_rank(told.embeddings)
                figures["spread"] = health.spread(told.embeddings)
                record("train", done, epoch, figures | console.speed())
                console.show(figures)
                alarm = health.collapse(
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
                if monitor is not None and _due(epoch, train.monitor_every, train.epochs):
                    judged = monitor(backbone)
                    record("monitor", done, epoch, judged)
                    console.show(judged)
                if epoch in moments:
                    keep_moment(done, epoch)
                console.end_epoch(epoch)
            keep = epoch_ends and _due(epoch, train.keep_every, train.epochs)
            if keep or asked or _save_due(done, train.save_every * schedule.steps):
                save(done)
            if asked and done < schedule.total:
                raise Stopped(asked[0], done)
        bad.report(console)
        if events is not None:
            events.close()
    return journal.folder


def build_method(config: Config) -> MeanShift:
    """The method of a config with the initial weights that its seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed.seed_of(config.train.seed, 0, keyed.INITIAL))
        encoder = Encoder(config.encoder, dim=config.method.dim, image_size=config.data.image_size)
        return build(config.method, encoder, seed=config.train.seed)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that a step is finished and saved before the run leaves."""
    asked: list[int] = []
    caught = (signal.SIGINT, signal.SIGTERM)

    def ask(number: int, _: object) -> None:
        asked.append(number)
        print("stopping after this step, to save it; once more stops at once", file=sys.stderr)
        signal.signal(number, signal.SIG_DFL)

    try:
        before = [signal.signal(number, ask) for number in caught]
    except ValueError:  # not the main thread: whoever owns it decides
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)


def _due(epoch: int, every: int, last: int) -> bool:
    return epoch == last or bool(every and epoch % every == 0)


def _save_due(done: int, every: float) -> bool:
    """Whether a multiple of `every` steps (which may be a fraction) was passed just now."""
    return math.floor(done / every + 1e-9) > math.floor((done - 1) / every + 1e-9)


def _refuse_nonsense(loss: float, step: int, lr: float) -> None:
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss} at step {step}: the run cannot go on; "
            f"begin another with a lower --train.lr than {lr:g}"
        )


def _refuse_other_pictures(journal: Journal, was: str, now: str, size: int) -> None:
    if was != now:
        raise ValueError(
            f"{journal.folder}: was trained on other pictures than the {size} that are there now "
            f"(fingerprint {was}, now {now}); restore them or choose another --out"
        )


def _refuse_many_processes() -> None:
    if distributed.world_size() > 1:
        raise ValueError(
            f"{distributed.world_size()} processes were started; this version trains in one: "
            f"start it without torchrun"
        )


def _tensorboard(journal: Journal, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "train.tensorboard needs TensorBoard; type: pip install 'meanshift[tensorboard]'"
        ) from None
    return SummaryWriter(journal.folder / "tensorboard", purge_step=start + 1)
