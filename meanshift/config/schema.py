"""Every setting as a frozen value that checks itself and goes to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meanshift.config.parsing import close, help_texts, need, parse

Strength = Literal["weak", "strong"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, and how they are read."""

    source: str = "sample"
    """a folder, an .npz or .npy file, tar shards, a Hugging Face dataset (hf:NAME), a named dataset
    (cifar10, stl10, ...) or `sample`"""
    held_out: float | str = "auto"
    """images kept for the monitor: a share cut from training, the name of a split, `none`, or
    `auto` (the source's own val or test split; without one a tenth of a labeled source)"""
    image_size: int = 224
    """side of the square views in pixels"""
    workers: int = 0
    """loader processes that decode and crop; sources that are arrays need none"""
    bad_share: float = 0.01
    """share of unreadable images above which the run stops with their list"""

    def __post_init__(self) -> None:
        need(self.image_size >= 8, "data.image_size", self.image_size, "at least 8")
        need(self.workers >= 0, "data.workers", self.workers, "0 or more")
        need(0 <= self.bad_share <= 1, "data.bad_share", self.bad_share, "between 0 and 1")
        share_or_word = isinstance(self.held_out, str) or 0 <= self.held_out < 1
        need(share_or_word, "data.held_out", self.held_out, "a share in [0, 1) or a split's name")


@dataclass(frozen=True, kw_only=True)
class Views:
    """How the two views of an image are made."""

    target: Strength = "weak"
    """the view that the target encoder sees"""
    online: Strength = "strong"
    """the view that the online encoder sees"""
    same_view: bool = False
    """give both encoders the same view (T1=T2): collapses, kept as the alarm's positive control"""
    crop_area: tuple[float, float] = (0.2, 1.0)
    """share of the image's area that a crop may cover, smallest and largest"""
    flip: float = 0.5
    """chance of a mirrored view"""
    jitter: float = 0.8
    """chance of color jitter in a strong view"""
    jitter_strength: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    """reach of brightness, contrast, saturation and hue"""
    gray: float = 0.2
    """chance of a gray strong view"""
    blur: float = 0.5
    """chance of Gaussian blur in a strong view"""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """range of the blur's deviation in pixels"""

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "gray", "blur"):
            chance = getattr(self, name)
            need(0 <= chance <= 1, f"views.{name}", chance, "a chance between 0 and 1")
        low, high = self.crop_area
        need(0 < low <= high <= 1, "views.crop_area", self.crop_area, "0 < low <= high <= 1")
        low, high = self.blur_sigma
        need(0 < low <= high, "views.blur_sigma", self.blur_sigma, "0 < low <= high")
        *blends, hue = self.jitter_strength
        reach = all(0 <= b <= 1 for b in blends) and 0 <= hue <= 0.5
        need(
            reach,
            "views.jitter_strength",
            self.jitter_strength,
            "three values in [0, 1], hue in [0, 0.5]",
        )


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The backbone; the projector follows the authors' rule."""

    name: str = "resnet50"
    """any torchvision backbone, or resnet10 (one block a stage)"""
    stem: Literal["imagenet", "small", "small-stride2"] = "imagenet"
    """first layers: 7x7 and pool; 3x3 without pool for small images; the same with stride 2"""
    width: float = 1.0
    """factor on a ResNet's channels, for small machines"""

    def __post_init__(self) -> None:
        need(0 < self.width <= 4, "encoder.width", self.width, "above 0 and at most 4")


@dataclass(frozen=True, kw_only=True)
class Method:
    """The Mean Shift step; the defaults are the paper's."""

    name: Literal["msf", "byol"] = "msf"
    """`byol` is the k=1 case: it keeps no bank"""
    k: int = 5
    """neighbors an embedding is pulled towards; the first is the other view itself"""
    k_schedule: Literal["constant", "linear"] = "constant"
    """`linear`: k grows in equal stretches of epochs from `k_start` to `k`"""
    k_start: int = 1
    """where a growing k begins"""
    bank_size: int = 128_000
    """past target embeddings that are searched"""
    bank_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """how the bank is stored"""
    bank_layout: Literal["replicated", "sharded"] = "replicated"
    """in several processes: all of the bank in each, or a part; the neighbors are the same"""
    momentum: float = 0.99
    """share of itself that the target keeps at each step"""
    momentum_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine`: momentum rises to 1 at the end of training"""
    same_image: Literal["keep", "skip"] = "keep"
    """whether an older view of the same image may be a neighbor"""
    search_filled_only: bool = False
    """leave out the random rows with which the bank begins"""
    symmetric: bool = False
    """also swap the views' roles, at twice the cost"""
    whiten: bool = False
    """whiten the target's embeddings, so that they keep their dimensions; ours, not the paper's"""
    dim: int = 0
    """size of the embedding; 0 is the authors' rule, a quarter of the backbone's features"""

    def __post_init__(self) -> None:
        need(self.k >= 1, "method.k", self.k, "1 or more")
        need(
            self.name == "msf" or self.k == 1,
            "method.k",
            self.k,
            "1 with method.name byol (add --method.k 1)",
        )
        need(1 <= self.k_start <= self.k, "method.k_start", self.k_start, f"1 to k ({self.k})")
        need(
            self.k == 1 or self.k <= self.bank_size,
            "method.k",
            self.k,
            f"at most the bank's {self.bank_size} rows (raise --method.bank_size)",
        )
        need(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1")
        need(self.dim >= 0, "method.dim", self.dim, "0 or more")


@dataclass(frozen=True, kw_only=True)
class Train:
    """The optimizer, its schedule, the machine, and how often things are written."""

    epochs: int = 200
    """passes over the images"""
    batch_size: int = 256
    """images a step, over all processes; an incomplete last batch is left to later epochs"""
    lr: float = 0.05
    """learning rate at the start"""
    lr_schedule: Literal["epoch", "step"] = "epoch"
    """cosine, changed once an epoch as the authors do, or at each step"""
    warmup_epochs: int = 0
    """epochs in which the rate rises linearly to `lr`; a short run keeps at least its last one"""
    sgd_momentum: float = 0.9
    """momentum of SGD (not of the target)"""
    weight_decay: float = 1e-4
    """on every parameter, batch norm and biases too"""
    batch_norm: Literal["shuffle", "sync", "local"] = "shuffle"
    """in several processes: the target's images permuted over them, as the authors do; one
    statistic over all of them, as in one process; or each its own"""
    seed: int = 0
    """address of all randomness"""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 where the device computes it natively, else float32"""
    device: str = "auto"
    """`auto`: cuda if there is one, else cpu"""
    compile: bool = False
    """let torch.compile translate the encoders: a start of minutes; measure whether it pays"""
    timeout: float = 600.0
    """seconds after which processes that wait for another one give up and name it"""
    save_every: float = 1.0
    """epochs (or a part of one) between checkpoints; the last two are kept"""
    keep_every: int = 0
    """also keep the checkpoint of every this many epochs (0: none)"""
    log_every: int = 20
    """steps between lines of metrics.jsonl"""
    monitor_every: int = 5
    """epochs between k-NN checks on the held-out images (0: only at the end)"""
    snapshots: int = 6
    """moments kept for figures: before training, after it, the rest between, early ones denser"""
    probe_size: int = 1000
    """training images whose embeddings a snapshot keeps"""
    tensorboard: bool = False
    """write TensorBoard events beside metrics.jsonl (needs the extra `tensorboard`)"""

    def __post_init__(self) -> None:
        for name in ("epochs", "log_every", "probe_size"):
            value = getattr(self, name)
            need(value >= 1, f"train.{name}", value, "1 or more")
        need(self.batch_size >= 2, "train.batch_size", self.batch_size, "2 or more (batch norm)")
        for name in ("lr", "save_every", "timeout"):
            value = getattr(self, name)
            need(0 < value < math.inf, f"train.{name}", value, "above 0")
        need(0 <= self.seed < 2**63, "train.seed", self.seed, "0 up to below 2^63")
        for name in (
            "sgd_momentum", "weight_decay", "keep_every", "monitor_every", "snapshots",
            "warmup_epochs",
        ):  # fmt: skip
            value = getattr(self, name)
            need(value >= 0, f"train.{name}", value, "0 or more")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, in five groups."""

    data: Data = field(default_factory=Data)
    views: Views = field(default_factory=Views)
    encoder: Encoder = field(default_factory=Encoder)
    method: Method = field(default_factory=Method)
    train: Train = field(default_factory=Train)

    def __post_init__(self) -> None:
        rows = self.train.batch_size * (2 if self.method.symmetric else 1)
        need(
            self.method.k == 1 or rows <= self.method.bank_size,
            "method.bank_size",
            self.method.bank_size,
            f"at least the {rows} rows that a step adds (lower --train.batch_size)",
        )

    def with_overrides(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with dotted fields replaced, checked as a whole: `{"method.k": 10}`."""
        groups = {group: dict(fields) for group, fields in self.to_dict().items()}
        for path, value in overrides.items():
            group, _, name = path.partition(".")
            if group not in groups or name not in groups[group]:
                raise ValueError(f"unknown setting {path!r}; did you mean {_nearest(path)}?")
            groups[group][name] = value
        return Config.from_dict(groups)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @staticmethod
    def from_dict(groups: Mapping[str, Any]) -> Config:
        """The config of nested plain values; unknown keys and wrong types are errors."""
        if not isinstance(groups, Mapping):
            raise ValueError(f"settings: got {groups!r}, need groups of settings by name")
        known = {f.name: typing.get_type_hints(Config)[f.name] for f in dataclasses.fields(Config)}
        built = {}
        for group, values in groups.items():
            if group not in known:
                raise ValueError(f"unknown group {group!r}; there are {', '.join(known)}")
            if not isinstance(values, Mapping):
                raise ValueError(f"{group}: got {values!r}, need its settings by name")
            hints = typing.get_type_hints(known[group])
            for name in values:
                if name not in hints:
                    path = f"{group}.{name}"
                    raise ValueError(f"unknown setting {path!r}; did you mean {_nearest(path)}?")
            built[group] = known[group](
                **{
                    name: parse(value, hints[name], f"{group}.{name}")
                    for name, value in values.items()
                }
            )
        return Config(**built)

    @staticmethod
    def from_json(text: str) -> Config:
        return Config.from_dict(json.loads(text))


HARMLESS = frozenset(
    "data.source data.workers data.bad_share method.bank_layout train.device train.save_every "
    "train.keep_every train.log_every train.monitor_every train.tensorboard train.compile "
    "train.timeout".split()
)
"""Settings that may change when a run is continued. The images have a fingerprint of their own,
and a change of device or precision is told."""


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two configs differ, as (old, new)."""
    before, after = old.to_dict(), new.to_dict()
    return {
        f"{group}.{name}": (before[group][name], value)
        for group, fields in after.items()
        for name, value in fields.items()
        if before[group][name] != value
    }


def settings() -> Iterator[tuple[str, Any, Any, str]]:
    """Every setting as (dotted name, type, default, help)."""
    for group in dataclasses.fields(Config):
        kind = typing.get_type_hints(Config)[group.name]
        hints, helps = typing.get_type_hints(kind), help_texts(kind)
        for one in dataclasses.fields(kind):
            yield f"{group.name}.{one.name}", hints[one.name], one.default, helps[one.name]


def _nearest(path: str) -> str:
    names = [name for name, *_ in settings()]
    return close(path, names, [n for n in names if n.startswith(path.partition(".")[0])] or names)
