"""Pre-training against the baseline, and a step against its bare encoders."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import authors
from benchmarks.apart import Apart
from benchmarks.table import Row, by_turns, over
from meanshift.config import Config
from meanshift.data import Source, open_source
from meanshift.data.loader import Batch, batches
from meanshift.models.encoder import Encoder
from meanshift.reproduce.laps import Laps
from meanshift.reproduce.step import STEP, Contender
from meanshift.runtime.device import autocast, pick_precision
from meanshift.runtime.malloc import keep_memory

HALF = replace(STEP, encoder=replace(STEP.encoder, stem="small-stride2", width=0.5))
LARGE = STEP.with_overrides(
    {"encoder.name": "resnet50", "encoder.stem": "imagenet", "data.image_size": 224,
     "method.bank_size": 128_000, "train.batch_size": 16}
)  # fmt: skip
"""ResNet-50 at 224 pixels; a batch of 16, since the activations of 256 need some 25 GB"""

Feed = Generator[Callable[[], None]]


def rows(rounds: int) -> Iterator[Row]:
    native = pick_precision("auto", torch.device("cpu"))
    for config, name, goal, float_goal, steps, turns in (
        (STEP, "ResNet-18, small stem", 2.4, 1.2, 1, max(2, rounds - 1)),
        (HALF, "ResNet-18, half width, stride-2 stem", 3.0, 1.8, 4, rounds),
    ):
        contenders = {
            "authors": Apart(authors_steps, config, steps, 2),
            "float32": Apart(our_steps, _in(config, "float32"), steps),
        }
        if native != torch.float32:
            contenders["native"] = Apart(our_steps, config, steps)
        laps = {key: one.lap for key, one in contenders.items()}
        took = by_turns(laps, turns, warm=False)
        for one in contenders.values():
            one.end()
        best = took["native"] if "native" in took else took["float32"]
        without = "" if native != torch.float32 else "no native bfloat16 here, so float32 as well"
        yield Row(f"training, {name}: images a second / the baseline's",
                  over(took["authors"], best), goal, note=without)  # fmt: skip
        yield Row(f"training, {name}: the same, both in float32",
                  over(took["authors"], took["float32"]), float_goal)  # fmt: skip
    yield from _steps(rounds)


def _steps(rounds: int) -> Iterator[Row]:
    for config, name, share, turns in (
        (STEP, "ResNet-18, small stem", 0.02, max(2, rounds - 1)),
        (HALF, "ResNet-18, half width, stride-2 stem", None, 3 * rounds),
    ):
        apart = Apart(step_and_bare, config)
        told = [apart.ask() for _ in range(turns)]
        apart.end()
        ratios = tuple(whole / bare for whole, bare, _ in told)
        yield Row(f"step, {name}: / two bare encoders, optimizer", ratios, 1.08, at_most=True)
        shares = tuple(search / whole for whole, _, search in told)
        yield Row(f"step, {name}: share of search and loss", shares, share, at_most=True)
    large = Apart(share_of_search, LARGE, 256)
    yield Row("step, ResNet-50, 224 px, bank 128,000: share of search and loss", (large.ask(),),
              0.005, at_most=True, note="256 queries beside sixteen batches of 16")  # fmt: skip
    large.end()


def our_steps(config: Config, steps: int) -> Iterator[float]:
    """Seconds a step of our loop, from the source to the followed target."""
    keep_memory()
    source, ready = _images(), Contender(config)

    def train_on(batch: Batch) -> None:
        target_view, online_view = ready.views.finish(batch.images, batch.epoch, batch.ids)
        with autocast(ready.device, ready.precision):
            told = ready.method(
                online_view.contiguous(memory_format=ready.layout),
                target_view.contiguous(memory_format=ready.layout),
                ids=batch.ids,
                labels=batch.labels,
            )
        ready.optimizer.zero_grad(set_to_none=True)
        told.loss.backward()
        ready.optimizer.step()
        ready.method.after_update()

    def feed() -> Feed:
        for batch in batches(
            source, ready.views.crop, batch_size=config.train.batch_size, seed=0, start=0,
            stop=steps + 1,
        ):  # fmt: skip
            yield functools.partial(train_on, batch)

    return _laps(feed, steps)


def authors_steps(config: Config, steps: int, workers: int) -> Iterator[float]:
    """Seconds a step of the baseline's loop, with its loader workers."""
    source, size = _images(), config.data.image_size
    pixels = source.gather(torch.arange(len(source))).numpy()
    assert source.labels is not None
    dataset = authors.Images(pixels, source.labels.numpy(), authors.TwoCrops(config.views, size))
    encoder = Encoder(config.encoder, dim=config.method.dim, image_size=size)
    method, train = config.method, config.train
    model = authors.MeanShift(
        encoder, encoder.dim, k=method.k, bank_size=method.bank_size, momentum=method.momentum
    )
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        optim.lr,
        momentum=optim.momentum,
        weight_decay=optim.weight_decay,
    )

    def train_on(views: list[Tensor], labels: Tensor) -> None:
        loss = model(views[0], views[1], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def feed() -> Feed:
        for views, labels in authors.forever(dataset, config.train.batch_size, workers):
            yield functools.partial(train_on, views, labels)

    return _laps(feed, steps)


def _laps(feed: Callable[[], Feed], steps: int) -> Iterator[float]:
    """Steps on the clock once the first batch is there; between laps nothing runs."""
    warm = feed()
    next(warm)()  # the first step allocates
    warm.close()
    yield 0.0
    while True:
        steady = feed()
        ready = next(steady)
        begun = time.perf_counter()
        ready()
        for _ in range(steps - 1):
            next(steady)()
        yield (time.perf_counter() - begun) / steps
        steady.close()


def step_and_bare(config: Config) -> Iterator[tuple[float, float, float]]:
    """(a step, the two bare encoders with their optimizer, search and loss) in seconds."""
    keep_memory()
    contender = Contender(config)
    contender.bare_step(Laps())
    contender.step(Laps())
    yield 0.0, 0.0, 0.0
    while True:
        bare, whole = Laps(), Laps()
        contender.bare_step(bare)
        contender.step(whole)
        phases = whole.medians()
        yield sum(phases.values()), sum(bare.medians().values()), phases["search and loss"]


def share_of_search(config: Config, batch: int) -> Iterator[float]:
    """The search's share of a step whose encoders are measured by smaller batches."""
    keep_memory()
    contender, whole = Contender(config), Laps()
    contender.step(Laps())
    yield 0.0
    contender.step(whole)
    phases = whole.medians()
    rest = (sum(phases.values()) - phases["search and loss"]) * batch / config.train.batch_size
    v, u = F.normalize(torch.randn(2, batch, contender.method.dim), dim=2)
    laps = Laps()
    for _ in range(3):
        laps.time("search", lambda: contender.method.compare(v, u, ids=torch.arange(batch)).loss)
    search = laps.medians()["search"]
    yield search / (rest + search)


def _images() -> Source:
    return open_source("sample")["train"]


def _in(config: Config, precision: str) -> Config:
    return config.with_overrides({"train.precision": precision})
