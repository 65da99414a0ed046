"""One straight loop from a config to a finished run directory."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from meanshift import checkpoint, distributed, health, keyed
from meanshift.augment import TwoViews
from meanshift.bank import nearest
from meanshift.config import Config
from meanshift.data import Source, train_and_held_out
from meanshift.data.loader import batches
from meanshift.encoder import Encoder, memory_format
from meanshift.features import extract
from meanshift.journal import Journal
from meanshift.machine import autocast, pick_device, pick_precision
from meanshift.methods import MeanShift, build
from meanshift.optim import Schedule, build_optimizer

Monitor = Callable[[nn.Module], dict[str, float]]
"""Judges the online backbone while it trains: the network in, named figures out."""


class Stopped(Exception):
    """A signal asked the run to stop, and it has saved itself."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped and saved at step {step}; the same command continues from there")
        self.signal_number = signal_number


def pretrain(config: Config, out: Path | str, *, monitor: Monitor | None = None) -> Path:
    """Train, or continue, the run in `out`; the same config gives the same bits, however interrupted."""
    _one_process()
    source, _ = train_and_held_out(config.data.source, config.data.held_out, seed=config.train.seed)
    device = pick_device(config.train.device)
    precision = pick_precision(config.train.precision, device)
    seed, size = config.train.seed, config.data.image_size
    method = build_method(config).to(device).train()
    layout = memory_format(method)
    method.to(memory_format=layout)
    optimizer = build_optimizer(config.train, method)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    schedule = Schedule(config, steps=max(1, len(source) // config.train.batch_size))
    two_views = TwoViews(config.views, seed, size)
    fingerprint = source.fingerprint()

    extra = {"device": str(device), "precision": str(precision), "threads": torch.get_num_threads()}
    journal = Journal.begin(Path(out), config, extra=extra)
    state, wrong = checkpoint.latest(journal.checkpoints)
    tally, bad, start = _Tally(), _BadPictures(config.data.bad_share, len(source)), 0
    if state is not None:
        _refuse_other_pictures(journal, state["source"], fingerprint, len(source))
        method.load_state_dict(state["method"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        tally.sums, tally.count, bad.known = state["sums"], state["count"], dict(state["bad"])
        start = state["step"]
    journal.rewind(start)
    console = _Console(schedule, start, config.train.batch_size)
    for message in wrong:
        console.say(f"warning: {message}; going back to step {start}")
        journal.append("warnings.jsonl", {"step": start, "kind": "checkpoint", "message": message})
    alarmed = any(record["kind"] == "collapse" for record in journal.read("warnings.jsonl"))
    writer = _tensorboard(journal) if config.train.tensorboard else None
    moments = snapshot_epochs(config.train.epochs, config.train.snapshots)

    def save(step: int) -> None:
        saved = {
            "step": step,
            "config": config.to_dict(),
            "source": fingerprint,
            "method": method.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "sums": tally.sums,
            "count": tally.count,
            "bad": list(bad.known.items()),
        }
        checkpoint.save(journal.checkpoints, saved, keep_steps=config.train.keep_every * schedule.steps)

    def record(line: dict[str, Any]) -> None:
        journal.append("metrics.jsonl", line)
        if writer is not None:
            for name, value in line.items():
                if isinstance(value, (int, float)):
                    writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])

    if start == 0 and 0 in moments:
        record(_snapshot(journal, method, source, config, epoch=0, step=0, precision=precision))

    with _signals() as asked, console:
        loaded = batches(
            source,
            two_views.crop,
            batch_size=config.train.batch_size,
            seed=seed,
            start=start,
            stop=schedule.total,
            workers=config.data.workers,
            pin_memory=device.type == "cuda",
        )
        for batch in loaded:
            step, epoch, last_of_epoch = batch.step, batch.epoch, (batch.step + 1) % schedule.steps == 0
            bad.count(batch.bad, step, journal, console)
            optimizer.param_groups[0]["lr"] = schedule.lr(step)
            method.k, method.momentum = schedule.k(step), schedule.momentum(step)
            torch.manual_seed(keyed.seed_of(seed, step, keyed.NETWORK))  # dropout has an address too

            batch = batch.to(device)
            target_view, online_view = two_views.finish(batch.pictures, epoch, batch.ids)
            with autocast(device, precision):
                out_of_step = method(
                    online_view.contiguous(memory_format=layout),
                    target_view.contiguous(memory_format=layout),
                    ids=batch.ids.to(device, non_blocking=True),
                    labels=batch.labels,
                )
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(out_of_step.loss).backward()
            scaler.step(optimizer)
            scaler.update()
            method.follow()
            done = step + 1
            tally.add(out_of_step)

            if done % config.train.log_every == 0 or last_of_epoch:
                line: dict[str, Any] = {"kind": "train", "step": done, "epoch": epoch + 1}
                line |= {"lr": schedule.lr(step), "k": method.k, "momentum": method.momentum}
                line |= tally.means()
                line["effective_rank"] = health.effective_rank(out_of_step.embeddings)
                line["spread"] = health.spread(out_of_step.embeddings)
                record(line | console.speed())
                if not math.isfinite(line["loss"]):
                    raise ValueError(
                        f"the loss is {line['loss']} at step {done}; lower --train.lr "
                        f"({config.train.lr:g}) and use another --out"
                    )
                message = health.collapse(
                    rank=line["effective_rank"], spread=line["spread"], same_view=config.views.same_view
                )
                if message and not alarmed:
                    alarmed = True
                    console.say(f"warning: {message}")
                    journal.append("warnings.jsonl", {"step": done, "kind": "collapse", "message": message})
                console.show(line)
            if last_of_epoch:
                if monitor is not None and _due(epoch + 1, config.train.monitor_every, config.train.epochs):
                    figures = monitor(method.online.get_submodule("backbone"))
                    record({"kind": "monitor", "step": done, "epoch": epoch + 1, **figures})
                    console.show(figures)
                if epoch + 1 in moments:
                    record(
                        _snapshot(
                            journal, method, source, config, epoch=epoch + 1, step=done, precision=precision
                        )
                    )
                console.end_epoch(epoch + 1)
            console.step()
            if _save_due(done, config.train.save_every * schedule.steps) or done == schedule.total or asked:
                save(done)
            if asked and done < schedule.total:
                raise Stopped(asked[0], done)
    bad.report(console)
    return journal.folder


def build_method(config: Config) -> MeanShift:
    """The method of a config with the initial weights that its seed gives."""
    with torch.random.fork_rng():
        torch.manual_seed(keyed.seed_of(config.train.seed, 0, keyed.INITIAL))
        encoder = Encoder(config.encoder, dim=config.method.dim, image_size=config.data.image_size)
        return build(config.method, encoder, seed=config.train.seed)


def snapshot_epochs(epochs: int, count: int) -> set[int]:
    """Moments to keep: 0, the last, and the rest between with the early ones denser."""
    if count < 2:
        return {epochs} if count else set()
    return {round(epochs * (i / (count - 1)) ** 2) for i in range(count)}


def probe_indices(config: Config, size: int) -> Tensor:
    """The fixed pictures whose embeddings the snapshots keep."""
    rank = keyed.bits(config.train.seed, 0, torch.arange(size), keyed.PROBE, 1)[:, 0]
    return rank.argsort(stable=True)[: config.train.probe_size].sort().values


def _snapshot(
    journal: Journal,
    method: MeanShift,
    source: Source,
    config: Config,
    *,
    epoch: int,
    step: int,
    precision: torch.dtype,
) -> dict[str, Any]:
    """Keep the probe's features and the backbone's weights of this moment, in float16."""
    backbone = method.online.get_submodule("backbone")
    indices = probe_indices(config, len(source))
    features = extract(
        backbone,
        source.take(indices),
        image_size=config.data.image_size,
        device=next(backbone.parameters()).device,
        precision=precision,
    )
    weights = {name: w.half() if w.is_floating_point() else w for name, w in backbone.state_dict().items()}
    path = journal.snapshots / f"epoch-{epoch:04d}.pt"
    state = {"format": checkpoint.FORMAT, "epoch": epoch, "step": step, "indices": indices}
    checkpoint.write(path, {**state, "features": features.half(), "weights": weights})
    line: dict[str, Any] = {"kind": "snapshot", "step": step, "epoch": epoch}
    line["feature_rank"] = health.effective_rank(features)
    before = [old for old in sorted(journal.snapshots.glob("epoch-*.pt")) if old < path]
    if before:
        line["neighbours_kept"] = health.stability(
            _neighbours(checkpoint.read(before[-1])["features"]), _neighbours(features.half())
        )
    return line


def _neighbours(features: Tensor) -> Tensor:
    unit = nn.functional.normalize(features.float(), dim=1)
    others = min(10, len(unit) - 1)
    return nearest(unit, unit, others, leave_out=torch.arange(len(unit)))[0]


class _Tally:
    """Sums of what the steps told since the last log line, kept on the device until then."""

    NAMES = ("loss", "agreement", "purity", "purity_with_self", "same_image")

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, step: Any) -> None:
        for name in self.NAMES:
            value = getattr(step, name)
            if value is not None:
                value = value.detach().double()
                held = self.sums.get(name)
                self.sums[name] = value if held is None else held.to(value.device) + value
        self.count += 1

    def means(self) -> dict[str, float]:
        means = {name: float(total) / self.count for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


class _BadPictures:
    """Unreadable pictures: each is named once, and too many end the run."""

    def __init__(self, share: float, size: int) -> None:
        self.share, self.size, self.known = share, size, dict[str, str]()

    def count(self, found: list[tuple[str, str]], step: int, journal: Journal, console: _Console) -> None:
        for title, why in found:
            if title not in self.known:
                self.known[title] = why
                console.say(f"warning: {title} cannot be read ({why}); another picture stands in")
                journal.append(
                    "warnings.jsonl", {"step": step, "kind": "bad picture", "file": title, "message": why}
                )
        if len(self.known) > self.share * self.size:
            listed = "\n".join(f"  {title}: {why}" for title, why in self.known.items())
            raise ValueError(
                f"{len(self.known)} of {self.size} pictures cannot be read, more than the "
                f"{self.share:.1%} that are allowed:\n{listed}\n"
                f"repair or remove them, or raise --data.bad_share"
            )

    def report(self, console: _Console) -> None:
        if self.known:
            console.say(
                f"{len(self.known)} of {self.size} pictures could not be read; they are listed in "
                f"warnings.jsonl and others stood in for them"
            )


class _Console:
    """What a person watches: a bar on a terminal, else a line an epoch."""

    def __init__(self, schedule: Schedule, start: int, batch_size: int) -> None:
        self.total, self.start, self.done, self.batch_size = schedule.total, start, start, batch_size
        self.epochs, self.shown = schedule.config.train.epochs, dict[str, float]()
        self.began = self.lapped = time.perf_counter()
        self.lap = start
        self.bar = tqdm(
            total=self.total * batch_size,
            initial=start * batch_size,
            unit="pic",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            desc="pretrain",
        )

    def __enter__(self) -> _Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def say(self, text: str) -> None:
        self.bar.write(text, file=sys.stderr)

    def step(self) -> None:
        self.done += 1
        self.bar.update(self.batch_size)

    def show(self, figures: dict[str, Any]) -> None:
        self.shown |= {name: figures[name] for name in ("loss", "purity", "1-NN", "20-NN") if name in figures}
        self.bar.set_postfix({name: f"{value:.3f}" for name, value in self.shown.items()}, refresh=False)

    def speed(self) -> dict[str, float]:
        """Pictures a second since it was last asked; not part of what is reproducible."""
        now, steps = time.perf_counter(), self.done + 1 - self.lap
        rate = steps * self.batch_size / (now - self.lapped)
        self.lapped, self.lap = now, self.done + 1
        return {"pictures_per_second": round(rate, 1), "seconds": round(now - self.began, 2)}

    def end_epoch(self, epoch: int) -> None:
        if self.bar.disable:
            spent, steps = time.perf_counter() - self.began, self.done + 1 - self.start
            left = tqdm.format_interval(spent / steps * (self.total - self.done - 1))
            figures = "  ".join(f"{name} {value:.3f}" for name, value in self.shown.items())
            rate = steps * self.batch_size / spent
            self.say(f"epoch {epoch}/{self.epochs}  {figures}  {rate:.0f} pictures/s  {left} left")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, so that a step is finished and saved before the run leaves."""
    asked: list[int] = []
    caught = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, lambda got, _: asked.append(got)) for number in caught]
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
    """Whether a multiple of `every` steps (a fraction is allowed) was passed just now."""
    return math.floor(done / every) > math.floor((done - 1) / every)


def _refuse_other_pictures(journal: Journal, was: str, now: str, size: int) -> None:
    if was != now:
        raise ValueError(
            f"{journal.folder}: was trained on other pictures than the {size} that are there now "
            f"(fingerprint {was}, now {now}); restore them or choose another --out"
        )


def _one_process() -> None:
    if distributed.world_size() > 1:
        raise ValueError(
            f"{distributed.world_size()} processes were started; this version trains in one: "
            f"start it without torchrun"
        )


def _tensorboard(journal: Journal) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "train.tensorboard needs TensorBoard; type: pip install 'meanshift[tensorboard]'"
        ) from None
    return SummaryWriter(journal.folder / "tensorboard")
