"""The scales of a reproduction: the data, the network and the epochs that all its runs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meanshift.config import Config
from meanshift.config.recipes import recipe

_PAPER_STEP = {"method.same_image": "keep", "method.search_filled_only": False}
_VALIDATION = {"data.validation": 0.1}  # settings are chosen on it, never on the test images
_ONE_PROCESS = {"data.workers": 0, "train.snapshots": 3}  # CPU time of workers is not counted
_CONV7_COSTS = {
    "byol": 1.74,
    "co2": 1.03,
    "compress": 9.9,
    "deepcluster-v2": 1.42,
    "invp": 1.77,
    "isd": 1.45,
    "moco": 0.96,
    "pirl": 3.3,
    "sela-v2": 1.7,
    "simclr": 1.36,
    "simsiam": 2.15,
    "supervised": 0.79,
    "swav": 1.34,
}
"""CPU time of an epoch of CIFAR-10 / that of MSF: beside such a small encoder, heads, memories and
the teacher of CompRess cost more than passes through the encoder tell"""
_CONV4_COSTS = {
    "byol": 1.3,
    "co2": 0.8,
    "compress": 3.3,
    "deepcluster-v2": 1.1,
    "invp": 0.7,
    "isd": 1.4,
    "moco": 0.8,
    "pirl": 2.5,
    "sela-v2": 1.2,
    "simclr": 1.3,
    "simsiam": 1.7,
    "supervised": 1.0,
    "swav": 1.1,
}
"""the same with conv4 and 540 photographs at 64 pixels, measured beside other work"""


@dataclass(frozen=True)
class Scale:
    """A recipe with changes, the banks that are compared, and how a linear layer is trained."""

    description: str
    recipe: str
    changes: Mapping[str, Any]
    bank_sizes: tuple[int, ...]
    linear_options: tuple[str, ...] = ("--cached",)
    """options of `meanshift evaluate linear` and `semi`"""
    needs_data: bool = False
    teacher: str = "meanshift:cifar10-small"
    """weights that CompRess distills, unless others are given; "": none"""
    own_optimizers: bool = True
    """False: other methods have the optimizer and schedule of the recipe, not their papers'"""
    relative_costs: Mapping[str, float] = field(default_factory=dict)
    """measured costs of an epoch of other methods / of MSF; by default passes are counted"""
    archive: str = ""
    """a folder of finished runs that is used where it exists; in it, one for each dataset"""
    document: str = ""
    """a document whose tables are updated where it exists"""

    @property
    def config(self) -> Config:
        return recipe(self.recipe).with_overrides(self.changes)


SCALES = {
    "paper": Scale(
        "ImageNet, ResNet-50, 200 epochs: the paper's own; needs --data; not run here",
        "imagenet-r50",
        {"method.bank_size": 1_024_000},
        (256, 1_024, 4_096, 16_384, 65_536, 128_000, 1_024_000),
        linear_options=(),
        needs_data=True,
        teacher="",
    ),
    "cifar10": Scale(
        "CIFAR-10, ResNet-18, 200 epochs: hours per run on a GPU; not run here",
        "cifar10-r18",
        {**_PAPER_STEP, **_VALIDATION},
        (256, 1_024, 4_096, 16_384),
    ),
    "cpu": Scale(
        "CIFAR-10, the recipe cifar10-cpu, 10 epochs; its optimizer for all methods: about 5 "
        "minutes per run on one core with bfloat16",
        "cifar10-cpu",
        {**_VALIDATION, **_ONE_PROCESS, "train.epochs": 10, "train.monitor_every": 2},
        (256, 2_048, 16_384),
        own_optimizers=False,
        relative_costs=_CONV7_COSTS,
        archive="docs/reproduced",
        document="docs/results.md",
    ),
    "cpu-paper": Scale(
        "as cpu, 20 epochs with the paper's own settings: SGD, slow target, equal weights, random "
        "start",
        "cifar10-r18",
        {
            **_PAPER_STEP,
            **_VALIDATION,
            "encoder.name": "conv7",
            "encoder.width": 0.75,
            "encoder.stem": "imagenet",
            "method.momentum_batch": 256,
            "train.epochs": 20,
            "train.batch_size": 128,
            "train.monitor_every": 4,
            **_ONE_PROCESS,
        },
        (256, 2_048, 16_384),
        relative_costs=_CONV7_COSTS,
        archive="docs/reproduced",
        document="docs/results.md",
    ),
    "small": Scale(
        "a folder of a few hundred to some ten thousand images, such as your own: the recipe "
        "small, 50 epochs; its optimizer for all methods: about 3 minutes per run for 600 "
        "photographs on one core with bfloat16; needs --data",
        "small",
        {**_VALIDATION, **_ONE_PROCESS, "train.epochs": 50, "train.monitor_every": 10},
        (256, 1_024, 4_096, 16_384),
        needs_data=True,
        own_optimizers=False,
        relative_costs=_CONV4_COSTS,
        archive="docs/reproduced",
        document="docs/results.md",
    ),
    "cpu-resnet18": Scale(
        "CIFAR-10, ResNet-18 of half width with a stride-2 stem, 3 epochs: 15 minutes per run on "
        "one core without bfloat16",
        "cifar10-r18",
        {
            **_PAPER_STEP,
            **_VALIDATION,
            "encoder.width": 0.5,
            "encoder.stem": "small-stride2",
            "train.epochs": 3,
            "train.batch_size": 128,
            "optim.warmup_epochs": 0,
            "train.monitor_every": 0,
        },
        (256, 2_048, 16_384),
    ),
    "smoke": Scale(
        "the shipped images at 16 pixels, one epoch of a tiny network: seconds per run, to test "
        "the program; its metrics mean nothing",
        "sample-resnet10",
        {
            **_PAPER_STEP,
            **_VALIDATION,
            "data.image_size": 16,
            "encoder.width": 0.125,
            "train.epochs": 1,
            "train.batch_size": 64,
            "train.snapshots": 2,
            "train.snapshot_images": 100,
            "method.k_schedule": "constant",
            "method.bank_size": 1_024,
        },
        (256, 1_024),
    ),
}


def find_scale(name: str) -> Scale:
    """A scale by its name."""
    if name not in SCALES:
        raise ValueError(f"--scale: got {name!r}, need one of {', '.join(SCALES)}")
    return SCALES[name]
