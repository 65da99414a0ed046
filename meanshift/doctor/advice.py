"""Which recipe and settings to take for a source, and why."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meanshift.config import Config, SampleSpec
from meanshift.config.parsing import setting_text
from meanshift.config.recipes import recipe
from meanshift.doctor.inspection import Inspection

PAPER_BANK = 131_072
"""the largest bank that is advised: about that of the paper, for 1.28 million images"""
SHORTEST_SIGNAL = 1024
"""values that the network for signals needs; shorter ones are padded"""
_ENCODERS = {"vector": "mlp", "signal": "conv1d"}


@dataclass(frozen=True)
class Choice:
    """A part of the advice: its value, the settings that give it, and the reason."""

    name: str
    value: str
    reason: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Advice:
    """The run to start."""

    recipe: str
    choices: list[Choice]
    config: Config
    command: str


def advise(
    source: str,
    inspection: Inspection,
    *,
    train: int,
    uniform: bool,
    recipe_name: str = "",
    typed: Mapping[str, Any],
) -> Advice:
    """Advise settings for `train` training samples; what was `typed` stays as it is.

    `uniform` is whether the samples are arrays, which need no loader workers.
    """
    spec = inspection.spec
    name, reason = _choose_recipe(inspection, train, recipe_name, typed)
    base = recipe(name).with_overrides({**typed, "data.source": source})
    choices = [
        Choice("recipe", name, reason, {}),
        _image_size(base, inspection),
        _batch_size(base, train),
        _bank(base, train),
        _views(base, inspection),
        _workers(uniform=uniform),
    ]
    if spec.kind == "vector":
        choices = [choice for choice in choices if choice.name != "image size"]
    changed = dict[str, Any]()
    before = base.to_dict()
    for number, choice in enumerate(choices):
        set_by_user = choice.settings.keys() & typed.keys() - {"data.channels"}
        if set_by_user:
            value = ", ".join(setting_text(typed[path]) for path in sorted(set_by_user))
            choices[number] = Choice(choice.name, value, "as you have set it", {})
            continue
        for path, value in choice.settings.items():
            group, _, field = path.partition(".")
            if path not in typed and before[group].get(field, value) != value:
                changed[path] = value
    words = ["meanshift", "pretrain", name, "--data", source, "--out", f"runs/{_run_name(source)}"]
    for path, value in {**typed, **changed}.items():
        shown = setting_text(value)  # after a blank, -1000,1000 would be taken for an option
        words += [f"--{path}={shown}"] if shown.startswith("-") else [f"--{path}", shown]
    return Advice(name, choices, base.with_overrides(changed), shlex.join(words))


def fits_kind(config: Config, spec: SampleSpec) -> bool:
    """Whether the network of a configuration takes samples of this kind."""
    needed = _ENCODERS.get(spec.kind)
    if needed is None:
        return config.encoder.name not in _ENCODERS.values()
    return config.encoder.name == needed


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _choose_recipe(
    inspection: Inspection, train: int, given: str, typed: Mapping[str, Any]
) -> tuple[str, str]:
    spec = inspection.spec
    if given and fits_kind(recipe(given).with_overrides(typed), spec):
        return given, "as you have named it"
    if spec.kind != "image":
        return spec.kind, f"the recipe for {spec.kind}s"
    height_width = inspection.sizes[1]
    if torch.cuda.is_available() and train >= 100_000 and min(height_width) >= 128:
        return "imagenet-r50", f"{train:,} images of {_size(height_width)} pixels and a GPU"
    if max(inspection.sizes[2]) <= 40 and train >= 20_000 and spec == SampleSpec():
        return "cifar10-cpu", f"{train:,} small RGB images, as CIFAR-10"
    return "small", "learns most in minutes on a CPU, from the data's own principal components"


def _image_size(base: Config, inspection: Inspection) -> Choice:
    """The recipe's, or less where the samples are smaller: larger views would show no more."""
    size = base.data.image_size
    name = "length" if inspection.spec.kind == "signal" else "image size"
    if inspection.spec.kind == "signal":
        median = inspection.sizes[1][-1]
        length = min(size, max(SHORTEST_SIGNAL, median))
        reason = f"the median signal has {median:,} values" if length < size else "the recipe's"
        return Choice(name, str(length), reason, {"data.image_size": length})
    short = min(inspection.sizes[1]) if inspection.sizes[1] else size
    if short >= size:
        more = f"; the median image has {_size(inspection.sizes[1])}" if short > size else ""
        reason = f"the recipe's{more}"
        if short >= 4 * size:
            reason += f": try --data.image_size {2 * size} for fine detail, at 4 times the cost"
        return Choice(name, str(size), reason, {"data.image_size": size})
    smaller = max(8, short // 8 * 8)
    reason = f"the median image has {_size(inspection.sizes[1])} pixels"
    return Choice(name, str(smaller), reason, {"data.image_size": smaller})


def _batch_size(base: Config, train: int) -> Choice:
    """The recipe's where it gives 4 steps an epoch or more, else a smaller power of two."""
    batch = base.train.batch_size
    if train >= 4 * batch or base.encoder.batch_groups > 1:
        reason = f"the recipe's; {train // batch:,} steps an epoch"
        return Choice("batch", str(batch), reason, {"train.batch_size": batch})
    smaller = 2
    while smaller * 2 <= min(batch, train // 3):
        smaller *= 2
    reason = f"{train} training samples give {train // smaller} steps an epoch"
    return Choice("batch", str(smaller), reason, {"train.batch_size": smaller})


def _bank(base: Config, train: int) -> Choice:
    """The recipe's, or more where there are far more samples than it is made for."""
    size = getattr(base.method, "bank_size", 0)
    if not size:
        return Choice("bank", "none", f"{base.method.name} has no memory bank", {})
    larger = size
    while larger * 2 <= min(PAPER_BANK, train // 3):
        larger *= 2
    if larger > size:
        reason = f"up to a third of the {train:,} training samples"
        return Choice("bank", str(larger), reason, {"method.bank_size": larger})
    same_image = getattr(base.method, "same_image", "")
    if size > train and same_image == "keep":
        rows = max(2 * base.train.batch_size, getattr(base.method, "k", 1))  # that it must have
        smaller = min(size, max(rows, 1 << (train - 1).bit_length()))
        reason = f"a larger one would hold several views of each of the {train} samples"
        return Choice("bank", str(smaller), reason, {"method.bank_size": smaller})
    reason = "the recipe's"
    if size > train and same_image == "skip":
        reason += "; views of the same sample are no neighbors"
    return Choice("bank", str(size), reason, {"method.bank_size": size})


def _views(base: Config, inspection: Inspection) -> Choice:
    """Weak views for images that are no 8-bit RGB photographs."""
    spec = inspection.spec
    if base.views.module:
        return Choice("views", "your own", base.views.module, {})
    if not hasattr(base.method, "target_view"):
        return Choice("views", "the method's", f"{base.method.name} declares them", {})
    names = ("method.target_view", "method.online_view")
    value = f"{base.method.target_view}/{getattr(base.method, 'online_view', '')}"
    if spec.kind != "image":
        return Choice("views", value, f"the recipe's operators for {spec.kind}s", {})
    weak = dict.fromkeys(names, "weak")
    if inspection.gray_as_rgb:
        reason = "gray images stored as RGB: crop and flip only, one channel"
        channels = {} if base.encoder.weights else {"data.channels": 1}
        return Choice("views", "weak/weak", reason, weak | channels)
    if spec.is_rgb and spec.is_bytes:
        return Choice("views", value, "8-bit RGB photographs take color jitter", {})
    kind = "one channel" if spec.channels == 1 else f"{spec.channels} channels"
    depth = spec.depth
    reason = f"{kind} of {depth}: no strong augmentation is known to suit, so crop and flip only"
    return Choice("views", "weak/weak", reason, weak)


def _workers(*, uniform: bool) -> Choice:
    if uniform:
        return Choice("workers", "0", "arrays need no loader processes", {"data.workers": 0})
    count = min(cores(), 8)
    reason = "one for each core, to decode files" if count > 1 else "there is one core"
    count = count if count > 1 else 0
    return Choice("workers", str(count), reason, {"data.workers": count})


def _run_name(source: str) -> str:
    """A name for the run: that of the source, as a file name."""
    name = Path(source.rstrip("/")).name.partition(".")[0]
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "mine"


def _size(height_width: tuple[int, ...]) -> str:
    return " x ".join(map(str, height_width))
