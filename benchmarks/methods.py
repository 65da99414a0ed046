"""Time and memory of a training step of every method, relative to Mean Shift's, in one run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import resnet18

from benchmarks.memory import size_of
from benchmarks.table import Row, alternate, ratios, timed
from meanshift.config import METHODS, Config
from meanshift.config.recipes import recipe
from meanshift.data import Source, open_source
from meanshift.methods import Batch, Progress, view_specs
from meanshift.models.encoder import memory_format
from meanshift.training.optim import build_optimizer
from meanshift.training.session import build_method
from meanshift.transforms.augment import MultiViewTransform

STEP: dict[str, object] = {
    "data.source": "sample",
    "encoder.width": 0.5,
    "encoder.stem": "small-stride2",
    "train.batch_size": 128,
    "train.precision": "float32",
}


class MethodStep:
    """A method with its own views and optimizer, and one batch of images."""

    def __init__(self, config: Config, source: Source) -> None:
        self.method = build_method(config, source).train()
        self.layout = memory_format(self.method)
        self.method.to(memory_format=self.layout)
        self.optimizer = build_optimizer(config.optim, self.method)
        self.source = source
        self.ids = torch.arange(config.train.batch_size)
        self.images = source.read_batch(self.ids)
        assert source.labels is not None
        self.labels = torch.as_tensor(source.labels)[self.ids]
        size = config.data.image_size
        self.transform = MultiViewTransform(view_specs(config), config.train.seed, size)
        self.now = Progress(0, 100, 100)
        self.method.begin_session(self.batches)
        self.method.begin_epoch(self.now, self.batches)
        self.method.set_progress(self.now)

    def batches(self) -> Iterator[Batch]:
        """What a method sees before an epoch; a part of the images, since only steps are timed."""
        for ids in torch.arange(1024).split(128):
            views = self.transform.finish(self.source.read_batch(ids), 0, ids)
            yield Batch(views, ids, self.labels[:0])

    def step(self) -> None:
        """One step: views, loss, gradients, update."""
        views = self.transform.finish(self.images, 0, self.ids)
        views = tuple(
            view.contiguous(memory_format=self.layout) if view.ndim == 4 else view for view in views
        )
        self.method.before_forward(self.now)
        output = self.method.step(Batch(views, self.ids, self.labels))
        self.optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        self.method.before_update(self.now)
        self.optimizer.step()
        self.method.after_update(self.now)

    def memory(self) -> int:
        """Bytes of weights, buffers, gradients and of what is saved for the backward pass."""
        method = self.method
        weights = size_of(method.parameters()) + size_of(method.buffers())
        gradients = size_of(p for p in method.parameters() if p.requires_grad)
        known = {p.untyped_storage().data_ptr() for p in method.parameters()}
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self.step()
        return weights + gradients + sum(saved.values())


def rows(rounds: int, settings: dict[str, object] | None = None) -> Iterator[Row]:
    source = open_source("sample")["train"]
    base = recipe("cifar10-r18").with_overrides({**STEP, **(settings or {})})
    with tempfile.TemporaryDirectory() as folder:
        steps = {name: MethodStep(config, source) for name, config in _configs(base, Path(folder))}
        seconds = alternate({name: timed(each.step) for name, each in steps.items()}, rounds)
        memory = {name: each.memory() for name, each in steps.items()}
    for name in METHODS:
        if name != "msf":
            yield Row(
                f"a step of {name} / of msf",
                ratios(seconds[name], seconds["msf"]),
                note=f"memory / msf's: {memory[name] / memory['msf']:.2g}",
            )


def _configs(base: Config, folder: Path) -> Iterator[tuple[str, Config]]:
    """Every method with its own settings; the teacher is a ResNet-18 of full width."""
    for name in METHODS:
        changes: dict[str, object] = {} if name == "msf" else {"method.name": name}
        if name == "compress":
            changes["method.teacher"] = str(_teacher(folder))
        yield name, base.with_overrides(changes)


def _teacher(folder: Path) -> Path:
    """Random weights of a ResNet-18: only their cost counts."""
    torch.save(resnet18().state_dict(), folder / "teacher.pth")
    return folder / "teacher.pth"
