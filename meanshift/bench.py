"""The speed figures: ratios of contenders that take turns in one run, never bare seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meanshift.augment import TwoViews
from meanshift.bank import MemoryBank
from meanshift.config import Config, Data, Encoder, Method, Train, Views
from meanshift.encoder import memory_format
from meanshift.journal import environment
from meanshift.machine import autocast, pick_device, pick_precision
from meanshift.methods import MeanShift
from meanshift.optim import build_optimizer
from meanshift.train import build_method

STEP = Config(
    data=Data(image_size=32),
    views=Views(blur=0.0),
    encoder=Encoder(name="resnet18", stem="small"),
    method=Method(bank_size=65_536),
    train=Train(batch_size=256),
)
"""What `meanshift bench step` measures unless told otherwise."""


def bench_step(config: Config, *, rounds: int) -> str:
    """The share of each phase of a step, and its cost against its two bare encoders."""
    if rounds < 1:
        raise ValueError(f"--rounds: got {rounds}, need 1 or more")
    if config.method.symmetric:
        raise ValueError("bench step measures the asymmetric step; leave --method.symmetric out")
    contender = _Contender(config)
    bare, whole = _Laps(), _Laps()
    contender.step(_Laps())  # the first step allocates
    for _ in range(rounds):  # turn by turn, so that a noisy machine is noisy to both
        contender.bare_step(bare)
        contender.step(whole)
    lines = [
        f"{config.encoder.name} {config.encoder.stem} x{config.encoder.width:g}, "
        f"{config.data.image_size} px, batch {config.train.batch_size}, "
        f"bank {config.method.bank_size}, "
        f"k {config.method.k}, {str(contender.precision).removeprefix('torch.')}, "
        f"{contender.device}, {torch.get_num_threads()} threads, median of {rounds} rounds",
        "",
    ]
    phases = whole.medians()
    total = sum(phases.values())
    lines += [f"  {name:22}{value / total:7.1%}" for name, value in phases.items()]
    ratio = total / sum(bare.medians().values())
    lines += ["", f"step / two bare encoders with their optimiser: {ratio:.3f}"]
    return "\n".join(lines)


def bench_judge(
    *, rounds: int, pictures: int = 50_000, queries: int = 10_000, width: int = 512
) -> str:
    """Exact k-NN, k-means and the cached linear layer against the libraries people use for them."""
    from sklearn.cluster import KMeans

    from meanshift.evaluate.cluster import kmeans
    from meanshift.evaluate.knn import neighbours
    from meanshift.probe import Recipe, Standardise, cached_stream, train_layers

    if rounds < 1:
        raise ValueError(f"--rounds: got {rounds}, need 1 or more")
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    labels = torch.arange(pictures) % 100
    centres = torch.randn(100, width, generator=generator)
    train = centres[labels] + 2 * torch.randn(pictures, width, generator=generator)
    test, truth = (
        train[:queries] + torch.randn(queries, width, generator=generator),
        labels[:queries],
    )
    train, test = (torch.nn.functional.normalize(rows, dim=1) for rows in (train, test))
    laps, found = _Laps(), dict[str, Tensor]()

    def ours() -> None:
        found["ours"] = torch.cat([slots for slots, _ in neighbours(train, test, 20)])

    def product() -> None:
        for part in test.split(2500):
            for rows in train.split(2500):
                _ = part @ rows.T

    def linear() -> None:
        recipe = Recipe()
        train_layers(
            cached_stream(train, labels, recipe=recipe, seed=0, device=cpu),
            Standardise(train), test, truth, classes=100, recipe=recipe, lrs=[recipe.lr],
            seed=0, device=cpu, steps=-(-pictures // recipe.batch_size),
        )  # fmt: skip

    faiss = _faiss(train, test, found)
    for _ in range(rounds):
        laps.time("ours", ours)
        if faiss is not None:
            laps.time("faiss", faiss)
        laps.time("product", product)
        laps.time("kmeans", lambda: (kmeans(train, 100), None)[1])
        laps.time("their kmeans", lambda: KMeans(
            100, n_init=1, max_iter=20, tol=0, random_state=0
        ).fit(train.numpy()) and None)  # fmt: skip
        laps.time("linear", linear)
    took = laps.medians()
    lines = [
        f"{pictures} training rows, {queries} queries, {width} dimensions, "
        f"{torch.get_num_threads()} threads, median of {rounds} rounds",
        "",
        f"  20 nearest / the bare matrix product        {took['ours'] / took['product']:6.2f}",
    ]
    if faiss is not None:
        same = float((found["ours"] == found["faiss"]).double().mean())
        ratio = took["faiss"] / took["ours"]
        lines += [f"  faiss flat index / 20 nearest               {ratio:6.2f}  ({same:.4%} same)"]
    else:
        lines += ["  faiss flat index: not installed (pip install faiss-cpu)"]
    lines += [
        f"  scikit-learn k-means / ours, 100 clusters   "
        f"{took['their kmeans'] / took['kmeans']:6.2f}",
        f"  40 cached linear epochs / 20 nearest        {took['linear'] / took['ours']:6.2f}",
    ]
    return "\n".join(lines)


SIZES = (1_024, 4_096, 16_384, 65_536, 131_072)
"""banks that `meanshift bench cost` searches, beside the run's own"""


def bench_cost(config: Config, *, rounds: int, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """The search's share of a step by the size of the bank: a result with its figures and card."""
    method, batch = config.method, config.train.batch_size
    if rounds < 1:
        raise ValueError(f"--rounds: got {rounds}, need 1 or more")
    if method.k < 2 or method.symmetric:
        raise ValueError(
            f"bench cost measures the search of the asymmetric step; got k {method.k}, symmetric "
            f"{method.symmetric}: need --method.k 2 or more, without --method.symmetric"
        )
    without = replace(config, method=replace(method, k=1, k_start=1))  # the same step, no bank
    contender, laps = _Contender(without), dict[int, _Laps]()
    sizes = sorted({size for size in sizes if size >= max(batch, method.k)} | {method.bank_size})
    dim, dtype = contender.method.dim, getattr(torch, method.bank_dtype)
    bank = MemoryBank(sizes[-1], dim, dtype=dtype).to(contender.device)
    queries = torch.nn.functional.normalize(torch.randn(batch, dim, device=bank.rows.device), dim=1)
    own = torch.arange(batch, device=queries.device)

    def search() -> Tensor:
        skip = own if method.same_image == "skip" else None
        slots, _ = bank.search(
            queries, method.k - 1, leave_out=own, skip_ids=skip, filled_only=True
        )
        return bank.rows[slots].to(queries.dtype)

    rest = _Laps()
    for turn in range(rounds + 1):
        if turn == 1:  # the first turn allocates
            rest, laps = _Laps(), {}
        contender.step(rest)
        for size in sizes:
            bank.written = size  # searched as far as it is filled
            laps.setdefault(size, _Laps()).time("search", search)
    step = sum(rest.medians().values())
    table = []
    for size in sizes:
        took = laps[size].medians()["search"]
        gflops, memory = 2e-9 * size * dim * batch, size * dim * bank.rows.element_size()
        share = took / (took + step)
        table.append({"bank": size, "share": share, "gflops": gflops, "bytes": memory})
    card = {
        "protocol": "cost",
        "settings": {
            "table": table, "bank": method.bank_size, "dtype": method.bank_dtype, "dim": dim,
            "k": method.k, "batch": batch, "image_size": config.data.image_size,
            "encoder": f"{config.encoder.name} {config.encoder.stem} x{config.encoder.width:g}",
            "rounds": rounds, "share": "search and gather / (search and gather + the other phases)",
        },
        "device": str(contender.device),
        "precision": str(contender.precision),
        "threads": torch.get_num_threads(),
        **environment(),
    }  # fmt: skip
    return {
        "figures": {f"bank {row['bank']}, %": 100 * row["share"] for row in table},
        "card": card,
    }


def describe_cost(result: Mapping[str, Any]) -> str:
    """The cost table in words."""
    card, settings = result["card"], result["card"]["settings"]
    lines = [
        f"{settings['encoder']}, {settings['image_size']} px, batch {settings['batch']}, "
        f"k {settings['k']}, {settings['dim']} dimensions, {card['device']}, "
        f"{card['threads']} threads, median of {settings['rounds']} rounds",
        "",
        f"  {'bank':>9}{'share of the step':>20}{'GFLOPs a batch':>17}{'MB':>9}",
    ]
    lines += [
        f"  {row['bank']:>9,}{row['share']:>20.2%}{row['gflops']:>17.2f}{row['bytes'] / 1e6:>9.1f}"
        for row in settings["table"]
    ]
    return "\n".join(lines)


def _faiss(train: Tensor, test: Tensor, found: dict[str, Tensor]) -> Callable[[], None] | None:
    try:
        import faiss
    except ImportError:
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(train.shape[1])
    index.add(train.numpy())

    def search() -> None:
        found["faiss"] = torch.from_numpy(index.search(test.numpy(), 20)[1])

    return search


@dataclass
class _Laps:
    """Seconds of each phase, one entry a round."""

    taken: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], Tensor | None]) -> Tensor | None:
        _wait()
        begun = time.perf_counter()
        result = work()
        _wait()
        self.taken.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.taken.items()}


class _Contender:
    """One model and one batch of pictures, on which both contenders work in turn."""

    def __init__(self, config: Config) -> None:
        self.device = pick_device(config.train.device)
        self.precision = pick_precision(config.train.precision, self.device)
        self.method: MeanShift = build_method(config).to(self.device).train()
        self.layout = memory_format(self.method)
        self.method.to(memory_format=self.layout)
        self.optimizer = build_optimizer(config.train, self.method)
        self.views = TwoViews(config.views, config.train.seed, config.data.image_size)
        size, batch = config.data.image_size, config.train.batch_size
        self.ids = torch.arange(batch)
        self.pictures = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8)
        self.fixed = torch.randn(batch, 3, size, size).to(self.device, memory_format=self.layout)

    def bare_step(self, laps: _Laps) -> None:
        """Online forward and backward, target forward, optimiser; nothing else."""

        def work() -> None:
            with autocast(self.device, self.precision):
                v = self.method.predict(self.fixed)
                u = self.method.project(self.fixed)
            self.optimizer.zero_grad(set_to_none=True)
            (2 - 2 * (v * u).sum(1)).mean().backward()
            self.optimizer.step()

        laps.time("bare", work)

    def step(self, laps: _Laps) -> None:
        """The phases of a training step in their order, each on the clock."""
        method, device = self.method, self.device
        made: dict[str, Tensor] = {}

        def make_views() -> None:
            pictures = self.pictures.to(device, non_blocking=True)
            target, online = self.views.finish(pictures, 0, self.ids)
            made["target"] = target.contiguous(memory_format=self.layout)
            made["online"] = online.contiguous(memory_format=self.layout)

        def online() -> None:
            with autocast(device, self.precision):
                made["v"] = method.predict(made["online"])

        def target() -> None:
            with autocast(device, self.precision):
                made["u"] = method.project(made["target"])

        def search_and_loss() -> None:
            made["loss"] = method.compare(made["v"], made["u"], ids=self.ids.to(device)).loss

        def backward() -> None:
            self.optimizer.zero_grad(set_to_none=True)
            made["loss"].backward()

        laps.time("views", make_views)
        laps.time("online forward", online)
        laps.time("target forward", target)
        laps.time("search and loss", search_and_loss)
        laps.time("backward", backward)
        laps.time("optimiser", lambda: self.optimizer.step())
        laps.time("target follows", method.follow)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
