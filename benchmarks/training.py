"""Pre-training against the baseline, and a step against its bare encoders."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import baseline
from benchmarks.step import HALF_WIDTH, STEP, BareStep
from benchmarks.table import Row, alternate, ratios
from benchmarks.worker import Worker
from meanshift.config import MSF, Config
from meanshift.data import Source, open_source
from meanshift.data.loader import Batch, batches
from meanshift.models.encoder import Encoder
from meanshift.reproduce.cost import PhaseTimer, TimedStep
from meanshift.runtime.device import autocast, pick_precision
from meanshift.runtime.malloc import keep_memory

RESNET50 = STEP.with_overrides(
    {
        "encoder.name": "resnet50",
        "encoder.stem": "imagenet",
        "data.image_size": 224,
        "method.bank_size": 128_000,
        "train.batch_size": 16,
    }
)
"""224 pixels; a batch of 16, since the activations of 256 need some 25 GB"""

Steps = Generator[Callable[[], None]]
"""training steps whose batches are ready, to be called"""


def rows(rounds: int) -> Iterator[Row]:
    few_rounds = max(2, rounds - 1)
    yield from _training_rows("ResNet-18, small stem", STEP, 1, few_rounds, (2.4, 1.2))
    half_width = "ResNet-18, half width, stride-2 stem"
    yield from _training_rows(half_width, HALF_WIDTH, 4, rounds, (3.0, 1.8))
    yield from _step_rows("ResNet-18, small stem", STEP, few_rounds, 1.08, 0.02)
    yield from _step_rows(half_width, HALF_WIDTH, 3 * rounds, 1.06, None)
    worker = Worker(search_fraction, RESNET50, 256)
    yield Row(
        "step, ResNet-50, 224 px, bank 128,000: fraction of search and loss",
        (worker.next(),),
        0.005,
        at_most=True,
        note="256 queries beside sixteen batches of 16",
    )
    worker.close()


def _training_rows(
    name: str, config: Config, steps: int, rounds: int, goals: tuple[float, float]
) -> Iterator[Row]:
    has_native = pick_precision("auto", torch.device("cpu")) != torch.float32
    float32 = config.with_overrides({"train.precision": "float32"})
    workers = {
        "baseline": Worker(baseline_steps, config, steps, 2),
        "float32": Worker(our_steps, float32, steps),
    }
    if has_native:
        workers["native"] = Worker(our_steps, config, steps)
    contenders = {key: worker.seconds for key, worker in workers.items()}
    seconds = alternate(contenders, rounds, warm_up=False)
    for worker in workers.values():
        worker.close()
    best = seconds["native"] if has_native else seconds["float32"]
    yield Row(
        f"training, {name}: images per second / the baseline's",
        ratios(seconds["baseline"], best),
        goals[0],
        note="" if has_native else "no native bfloat16 here, so float32 as well",
    )
    yield Row(
        f"training, {name}: the same, both in float32",
        ratios(seconds["baseline"], seconds["float32"]),
        goals[1],
    )


def _step_rows(
    name: str, config: Config, rounds: int, bare_goal: float, goal: float | None
) -> Iterator[Row]:
    worker = Worker(step_and_bare, config)
    measured = [worker.next() for _ in range(rounds)]
    worker.close()
    to_bare = tuple(whole / bare for whole, bare, _ in measured)
    yield Row(f"step, {name}: / two bare encoders, optimizer", to_bare, bare_goal, at_most=True)
    fractions = tuple(search / whole for whole, _, search in measured)
    yield Row(f"step, {name}: fraction of search and loss", fractions, goal, at_most=True)


def our_steps(config: Config, steps: int) -> Iterator[float]:
    """Seconds per step of our loop, from the source to the moving average."""
    keep_memory()
    source = _sample()
    timed_step = TimedStep(config)

    def train_on(batch: Batch) -> None:
        views = timed_step.transform.finish(batch.images, batch.epoch, batch.ids)
        target_view, online_view = (
            view.contiguous(memory_format=timed_step.layout) for view in views
        )
        with autocast(timed_step.device, timed_step.precision):
            output = timed_step.method(online_view, target_view, ids=batch.ids, labels=batch.labels)
        timed_step.optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        timed_step.optimizer.step()
        timed_step.method.after_update()

    def make_steps() -> Steps:
        for batch in batches(
            source,
            timed_step.transform.crop,
            batch_size=config.train.batch_size,
            seed=0,
            start=0,
            stop=steps + 1,
        ):
            yield functools.partial(train_on, batch)

    return _time_steps(make_steps, steps)


def baseline_steps(config: Config, steps: int, workers: int) -> Iterator[float]:
    """Seconds per step of the baseline's loop, with its loader workers."""
    source = _sample()
    size = config.data.image_size
    method = config.method
    assert source.labels is not None
    assert isinstance(method, MSF)
    dataset = baseline.Images(
        source.read_batch(torch.arange(len(source))).numpy(),
        source.labels.numpy(),
        baseline.TwoCrops(config.views, size),
    )
    encoder = Encoder(config.encoder, dim=method.dim, image_size=size)
    model = baseline.MeanShift(
        encoder, encoder.dim, k=method.k, bank_size=method.bank_size, momentum=method.momentum
    )
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        config.optim.lr,
        momentum=config.optim.momentum,
        weight_decay=config.optim.weight_decay,
    )

    def train_on(views: list[Tensor], labels: Tensor) -> None:
        loss = model(views[0], views[1], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def make_steps() -> Steps:
        endless = baseline.endless_batches(dataset, config.train.batch_size, workers)
        for views, labels in endless:
            yield functools.partial(train_on, views, labels)

    return _time_steps(make_steps, steps)


def _time_steps(make_steps: Callable[[], Steps], count: int) -> Iterator[float]:
    """Seconds per step, from when the first batch is ready; between the values nothing runs."""
    warm_up = make_steps()
    next(warm_up)()  # the first step allocates memory
    warm_up.close()
    yield 0.0
    while True:
        steps = make_steps()
        first = next(steps)
        start = time.perf_counter()
        first()
        for _ in range(count - 1):
            next(steps)()
        yield (time.perf_counter() - start) / count
        steps.close()


def step_and_bare(config: Config) -> Iterator[tuple[float, float, float]]:
    """(a step, the two bare encoders with their optimizer, search and loss) in seconds."""
    keep_memory()
    timed_step = BareStep(config)
    timed_step.bare_step(PhaseTimer())
    timed_step.step(PhaseTimer())
    yield 0.0, 0.0, 0.0
    while True:
        bare = PhaseTimer()
        whole = PhaseTimer()
        timed_step.bare_step(bare)
        timed_step.step(whole)
        phases = whole.medians()
        yield sum(phases.values()), sum(bare.medians().values()), phases["search and loss"]


def search_fraction(config: Config, batch_size: int) -> Iterator[float]:
    """The search's fraction of a step whose encoders are measured with smaller batches."""
    keep_memory()
    timed_step = TimedStep(config)
    timed_step.step(PhaseTimer())
    yield 0.0
    whole = PhaseTimer()
    timed_step.step(whole)
    phases = whole.medians()
    smaller = sum(phases.values()) - phases["search and loss"]
    rest = smaller * batch_size / config.train.batch_size
    method = timed_step.method
    v, u = F.normalize(torch.randn(2, batch_size, method.dim), dim=2)
    timer = PhaseTimer()
    for _ in range(3):
        timer.time("search", lambda: method.compare(v, u, ids=torch.arange(batch_size)).loss)
    search = timer.medians()["search"]
    yield search / (rest + search)


def _sample() -> Source:
    return open_source("sample")["train"]
