"""A training step against its two bare encoders, phase by phase."""

from __future__ import annotations

import torch
from torch import Tensor

from meanshift.config import Config, Data, Encoder, Method, Train, Views
from meanshift.methods import MeanShift
from meanshift.models.encoder import memory_format
from meanshift.reproduce.laps import Laps
from meanshift.runtime.device import autocast, pick_device, pick_precision
from meanshift.training.loop import build_method
from meanshift.training.optim import build_optimizer
from meanshift.transforms.augment import TwoViews

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
    contender = Contender(config)
    bare, whole = Laps(), Laps()
    contender.step(Laps())  # the first step allocates
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
    lines += ["", f"step / two bare encoders with their optimizer: {ratio:.3f}"]
    return "\n".join(lines)


class Contender:
    """One model and one batch of images, on which both contenders work in turn."""

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
        self.images = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8)
        self.fixed = torch.randn(batch, 3, size, size).to(self.device, memory_format=self.layout)

    def bare_step(self, laps: Laps) -> None:
        """Online forward and backward, target forward, optimizer; nothing else."""

        def work() -> None:
            with autocast(self.device, self.precision):
                v = self.method.predict(self.fixed)
                u = self.method.project(self.fixed)
            self.optimizer.zero_grad(set_to_none=True)
            (2 - 2 * (v * u).sum(1)).mean().backward()
            self.optimizer.step()

        laps.time("bare", work)

    def step(self, laps: Laps) -> None:
        """The phases of a training step in their order, each on the clock."""
        method, device = self.method, self.device
        made: dict[str, Tensor] = {}

        def make_views() -> None:
            images = self.images.to(device, non_blocking=True)
            target, online = self.views.finish(images, 0, self.ids)
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
        laps.time("optimizer", lambda: self.optimizer.step())
        laps.time("target follows", method.after_update)
