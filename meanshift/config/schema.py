"""The configuration of a run: frozen dataclasses that check themselves, to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meanshift.config.methods import (
    DEFAULT_METHOD,
    METHODS,
    MethodSettings,
    absolute_module,
    settings_class,
)
from meanshift.config.parsing import close, help_texts, need, parse
from meanshift.config.samples import SampleSpec
from meanshift.config.views import Views

FORMAT = 2
"""version of config.json and of the run directory"""


_DTYPES = ("auto", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_SAMPLE_FIELDS = ("kind", "channels", "dtype", "range", "mean", "std", "sampling_rate")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, and how they are read."""

    source: str = ""
    """a folder, an .npz or .npy file, tar shards, a Hugging Face dataset (hf:NAME), a named dataset
    (cifar10, stl10, ...) or `sample`, the shipped images; none by default"""
    validation: float | str = "auto"
    """images that the k-NN monitor tests on: a fraction taken from training, the name of a split,
    `none`, or `auto` (the source's val or test split; else a tenth of a labeled source)"""
    image_size: int = 224
    """side of the square views in pixels; of signals the length of a view in values"""
    workers: int = 0
    """loader processes that decode and crop; sources that are arrays need none"""
    max_bad_fraction: float = 0.01
    """fraction of unreadable images above which the run stops and lists them"""
    group: str = ""
    """keep images of a group (a patient, a video) in one split: a CSV (file,group), `folder:1` (the
    first folder below the source; -1: the last), `re:PATTERN` with one group, found in the name,
    `array` (`groups` of an .npz) or `none`; by default the groups that the source brings, if any"""
    kind: Literal["auto", "image", "vector", "signal"] = "auto"
    """what the samples are, as found in the source"""
    channels: int = 0
    """channels of the network's input, columns of vectors (0: as in the source); gray images are
    repeated for 3 channels, and colors are mixed for 1"""
    dtype: str = "auto"
    """type of the stored values, as found in the source"""
    range: tuple[float, float] | str = "auto"
    """stored values that become 0 and 1, as 0,4095; values beyond are clipped. `auto`: 0,255 for 8
    bits, else the 0.1 and 99.9 percentiles of some samples; `minmax`: their least and largest"""
    mean: tuple[float, ...] | str = "auto"
    """mean of each channel after that; `auto`: ImageNet's for 8-bit RGB, else measured"""
    std: tuple[float, ...] | str = "auto"
    """standard deviation of each channel; as `mean`"""
    sampling_rate: int = 0
    """sampling rate of sound in Hz (0: as in the source); files of another one are unreadable"""

    @property
    def sample_spec(self) -> SampleSpec:
        """What the network sees; what is still `auto` counts as for 8-bit RGB images."""
        known: dict[str, Any] = {
            name: value
            for name in _SAMPLE_FIELDS
            if (value := getattr(self, name)) not in ("auto", "minmax", 0)
        }
        return SampleSpec(**known)

    def with_samples(self, spec: SampleSpec) -> Data:
        """The settings of a source with such samples; 8-bit RGB images leave them as they are."""
        facts = {} if spec == SampleSpec() else dataclasses.asdict(spec)
        return dataclasses.replace(self, **facts)

    def recalling(self, run: Data) -> Data:
        """These settings with what a run has found out about its samples, where nothing is set."""
        unset = [name for name in _SAMPLE_FIELDS if getattr(self, name) in ("auto", "minmax", 0)]
        return dataclasses.replace(self, **{name: getattr(run, name) for name in unset})

    def __post_init__(self) -> None:
        self._check_samples()
        check_group(self.group)
        need(self.image_size >= 8, "data.image_size", self.image_size, "at least 8")
        need(self.workers >= 0, "data.workers", self.workers, "0 or more")
        need(
            0 <= self.max_bad_fraction <= 1,
            "data.max_bad_fraction",
            self.max_bad_fraction,
            "between 0 and 1",
        )
        need(
            isinstance(self.validation, str) or 0 <= self.validation < 1,
            "data.validation",
            self.validation,
            "a fraction in [0, 1) or a split's name",
        )

    def _check_samples(self) -> None:
        need(0 <= self.channels <= 100_000, "data.channels", self.channels, "0 to 100000")
        need(self.sampling_rate >= 0, "data.sampling_rate", self.sampling_rate, "0 or more")
        need(self.dtype in _DTYPES, "data.dtype", self.dtype, "one of " + ", ".join(_DTYPES))
        words = ("auto", "minmax")
        ordered = self.range in words or (
            not isinstance(self.range, str) and self.range[0] < self.range[1]
        )
        need(ordered, "data.range", self.range, "LOW,HIGH with LOW below HIGH, auto or minmax")
        for name in ("mean", "std"):
            value = getattr(self, name)
            numbers = bool(value) and not isinstance(value, str)
            numbers = numbers and (name == "mean" or min(value) > 0)
            wanted = "a number for each channel, as 0.5,0.4,0.4 (std: above 0), or auto"
            need(value == "auto" or numbers, f"data.{name}", value, wanted)
            fits = value == "auto" or not self.channels or len(value) == self.channels
            need(fits, f"data.{name}", value, f"{self.channels} numbers, one for each channel")


def _group(overrides: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The overrides of one group, without its name."""
    names = (path for path in overrides if path.startswith(f"{group}."))
    return {path.partition(".")[2]: overrides[path] for path in names}


def check_group(rule: str) -> None:
    """Refuse what cannot be a rule for groups; whether its CSV exists is seen with the data."""
    kind, _, value = rule.partition(":")
    fits = rule in ("", "none", "array") or rule.lower().endswith(".csv")
    if kind == "folder":
        fits = re.fullmatch(r"-?[1-9]\d*", value) is not None
    if kind == "re":
        try:
            pattern = re.compile(value)
            fits = pattern.groups == 1 or len(pattern.groupindex) == 1
        except re.error:
            fits = False
    wanted = "a CSV (file,group), folder:1, folder:-1, re:PATTERN with one group as "
    need(fits, "data.group", rule, wanted + r"re:patient(\d+)_, array or none")


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The backbone; the projector follows the authors' rule."""

    name: str = "resnet50"
    """any torchvision backbone, timm:NAME (any timm backbone, needs the extra `timm`), resnet10
    (one block per stage), or conv3, conv4 and conv7 (for CPUs, meant for `init pca`); mlp for
    vectors, conv1d for signals"""
    stem: Literal["imagenet", "small", "small-stride2"] = "imagenet"
    """first layers: 7x7 and pool; 3x3 without pool for small images; the same with stride 2 (conv3,
    conv4, conv7: 5x5 with stride 2 and pool, or `small-stride2` without it)"""
    width: float = 1.0
    """factor on the channels of a ResNet, conv3, conv4, conv7 or conv1d, or the features of mlp"""
    init: Literal["random", "pca"] = "random"
    """weights before training: random, or the principal components of each convolution's own
    input (ours, not the paper's)"""
    output: Literal["plain", "whitened"] = "plain"
    """`whitened`: a last linear layer, fitted without labels, that weakens the directions in which
    the features of two views of an image differ (ours, not the paper's)"""
    weights: str = ""
    """start from given weights: a run, a file, torchvision:NAME:WEIGHTS, timm:NAME (timm:NAME.TAG,
    timm:NAME=FILE) or meanshift:NAME, with their own architecture; lowers `optim.lr` and sets
    `optim.heads_first` and `batch_norm`"""
    batch_norm: Literal["batch", "fixed"] = "batch"
    """`fixed`: the backbone's batch norm keeps the statistics that it starts with, in both
    encoders; training on few images then does not spoil given weights"""
    batch_groups: int = 1
    """groups of the whole batch, over all processes, that the backbone's batch norm sees one by one
    in pretraining (SplitBN)"""

    def __post_init__(self) -> None:
        need(self.batch_groups >= 1, "encoder.batch_groups", self.batch_groups, "1 or more")
        need(0 < self.width <= 4, "encoder.width", self.width, "above 0 and at most 4")
        if self.weights and self.init != "random":
            raise ValueError(
                f"encoder.init: got {self.init} with encoder.weights {self.weights}, which replace "
                f"what it computes; type --encoder.init random, or leave --encoder.weights out"
            )


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its schedule."""

    name: Literal["sgd", "adamw", "lars", "muon"] = "sgd"
    """`sgd` as in the paper; `adamw` for short runs and small batches; `lars` for batches of
    thousands; `muon` for matrices and convolutions, with AdamW for the rest"""
    lr: float = 0.05
    """largest learning rate; usual values: sgd 0.05 and lars 0.3 for a batch of 256 (in proportion
    to it), adamw and muon 0.0005 to 0.002"""
    schedule: Literal["epoch", "step"] = "epoch"
    """cosine from `lr` to 0, updated once per epoch as in the authors' code, or at each step"""
    warmup_epochs: int | float = 0
    """epochs in which the learning rate rises linearly to `lr`, with `schedule=step` also a
    fraction; at most all epochs but the last"""
    heads_first: float = 0.0
    """fraction of the run in which only the heads are trained, so that random heads do not spoil
    a good backbone; at a constant `lr`, before the warm-up and the cosine"""
    momentum: float = 0.9
    """momentum of the optimizer (not of the target encoder); beta1 of AdamW"""
    weight_decay: float = 1e-4
    """weight decay; times `lr` with adamw and muon, so usually larger there (0.01 to 0.05)"""
    decay_norms: bool = True
    """also decay norms and biases, as the MSF authors do (lars never does)"""
    accumulate: int = 1
    """batches whose gradients are averaged for each update; the last update of an epoch may have
    fewer"""
    clip_norm: float = 0.0
    """largest norm of the gradient (0: no clipping)"""

    def __post_init__(self) -> None:
        need(0 < self.lr < math.inf, "optim.lr", self.lr, "above 0")
        need(
            self.lr <= 0.02 or self.name not in ("adamw", "muon"),
            "optim.lr",
            self.lr,
            f"at most 0.02 with {self.name}, whose updates have the size of lr (--optim.lr 1e-3)",
        )
        need(self.accumulate >= 1, "optim.accumulate", self.accumulate, "1 or more")
        need(0 <= self.heads_first < 1, "optim.heads_first", self.heads_first, "0 up to below 1")
        need(0 <= self.momentum < 1, "optim.momentum", self.momentum, "0 up to below 1")
        for name in ("warmup_epochs", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            need(value >= 0, f"optim.{name}", value, "0 or more")
        need(
            self.schedule == "step" or self.warmup_epochs == int(self.warmup_epochs),
            "optim.warmup_epochs",
            self.warmup_epochs,
            "a whole number, or --optim.schedule step",
        )


@dataclass(frozen=True, kw_only=True)
class Train:
    """The length of a run, the machine, and how often things are written."""

    epochs: int = 200
    """passes over the images; a higher number extends a run that is finished"""
    batch_size: int = 256
    """images per step, over all processes; an incomplete last batch is left to later epochs"""
    batch_norm: Literal["shuffle", "sync", "local"] = "shuffle"
    """in several processes, or with `encoder.batch_groups`: permute the target's images over them,
    as the authors do; synchronize the statistics of the processes, as in one; or neither"""
    seed: int = 0
    """seed of all randomness"""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 where the device computes it natively, else float32"""
    device: str = "auto"
    """`auto`: cuda if there is one, else cpu"""
    compile: bool = False
    """compile the encoders with torch.compile, which takes minutes"""
    timeout: float = 600.0
    """seconds after which processes that wait for another one stop and name it"""
    save_every: float = 1.0
    """epochs (or a fraction of one) between checkpoints; the last two are kept"""
    keep_every: int = 0
    """also keep the checkpoint of every this many epochs (0: none)"""
    log_every: int = 20
    """steps between lines of metrics.jsonl"""
    monitor_every: int = 5
    """epochs between k-NN evaluations on the validation images (0: only at the end)"""
    snapshots: int = 6
    """snapshots for figures: before training, after it, the rest between, early ones denser"""
    snapshot_images: int = 1000
    """training images whose features a snapshot stores"""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """programs that get the lines of metrics.jsonl, as tensorboard,wandb: files in the run
    directory, nothing is sent (docs/trackers.md; each needs the extra of its name)"""

    def __post_init__(self) -> None:
        for name in ("epochs", "log_every", "snapshot_images"):
            value = getattr(self, name)
            need(value >= 1, f"train.{name}", value, "1 or more")
        need(self.batch_size >= 2, "train.batch_size", self.batch_size, "2 or more (batch norm)")
        for name in ("save_every", "timeout"):
            value = getattr(self, name)
            need(0 < value < math.inf, f"train.{name}", value, "above 0")
        need(0 <= self.seed < 2**63, "train.seed", self.seed, "0 up to below 2^63")
        for name in ("keep_every", "monitor_every", "snapshots"):
            value = getattr(self, name)
            need(value >= 0, f"train.{name}", value, "0 or more")
        once = len(set(self.trackers)) == len(self.trackers)
        need(once, "train.trackers", ",".join(self.trackers), "each name once")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, in six groups."""

    data: Data = field(default_factory=Data)
    views: Views = field(default_factory=Views)
    encoder: Encoder = field(default_factory=Encoder)
    method: MethodSettings = field(default_factory=DEFAULT_METHOD)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)

    def __post_init__(self) -> None:
        for group in ("method", "views"):
            settings = getattr(self, group)
            module = absolute_module(settings.module)
            if module != settings.module:
                object.__setattr__(self, group, dataclasses.replace(settings, module=module))
        self.method.check(batch_size=self.train.batch_size)
        self._check_groups()

    def _check_groups(self) -> None:
        """The groups of batch norm are equal parts of at least 2 images, and not synchronized."""
        groups, size = self.encoder.batch_groups, self.train.batch_size
        multiple = max(2, -(-size // groups)) * groups
        need(
            groups == 1 or size == multiple,
            "train.batch_size",
            size,
            f"a multiple of encoder.batch_groups ({groups}) and 2 images in each group: "
            f"--train.batch_size {multiple}, or --encoder.batch_groups 1",
        )
        need(
            groups == 1 or self.train.batch_norm != "sync",
            "train.batch_norm",
            self.train.batch_norm,
            f"shuffle or local with {groups} groups of batch norm: --train.batch_norm shuffle, or "
            f"--encoder.batch_groups 1",
        )

    def with_overrides(self, overrides: Mapping[str, Any]) -> Config:
        """A copy with dotted fields replaced, checked as a whole: `{"method.k": 10}`.

        Another `method.name` (or `method.module`) replaces the settings of method, views and
        optimizer by those that the method declares (`MethodSettings.defaults_for`; with an encoder
        that does not start from random weights also `start_defaults`). It may also
        declare settings of other groups; those of the method before are undone. `encoder.weights`
        lowers the learning rate and keeps the statistics of batch norm. Other overrides win.
        """
        groups = self.to_dict()
        method = self._other_method(overrides)
        if method is not None:
            self._undo_method(groups)
            groups |= {
                "method": dataclasses.asdict(method),
                "views": dataclasses.asdict(self.views.without_image_operators()),
                "optim": dataclasses.asdict(Optim()),
            }
            size = self._image_size or int(overrides.get("data.image_size", self.data.image_size))
            encoder = {**groups["encoder"], **_group(overrides, "encoder")}
            started = encoder["init"] != "random" or encoder["weights"]
            declared = {**method.defaults_for(size), **(method.start_defaults if started else {})}
            overrides = {**declared, **overrides, "method.name": method.name}
        if overrides.get("encoder.weights") and not self.encoder.weights:
            _keep_given_weights(groups)
        for path, value in overrides.items():
            _check_name(path, groups)
            group, _, field_name = path.partition(".")
            groups[group][field_name] = value
        return Config.from_dict(groups)

    @property
    def _image_size(self) -> int:
        """What the settings of a method depend on: vectors and signals count as small images."""
        return 32 if self.encoder.name in ("mlp", "conv1d") else 0

    def _undo_method(self, groups: dict[str, dict[str, Any]]) -> None:
        """Set what the present method has declared to the defaults, where it still is so."""
        defaults = Config().to_dict()
        size = self._image_size or self.data.image_size
        for path, value in self.method.defaults_for(size).items():
            group, _, name = path.partition(".")
            if group != "method" and groups[group][name] == value:
                groups[group][name] = defaults[group][name]

    def _other_method(self, overrides: Mapping[str, Any]) -> MethodSettings | None:
        """The default settings of the method that the overrides choose, if it is another one."""
        name = overrides.get("method.name", self.method.name)
        default = "" if "method.name" in overrides else self.method.module
        module = absolute_module(overrides.get("method.module", default))
        if (name, module) == (self.method.name, self.method.module):
            return None
        return settings_class(name, module)(module=module)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **self.to_dict()}, indent=2) + "\n"

    @staticmethod
    def from_dict(groups: Mapping[str, Any]) -> Config:
        """The config of nested plain values; unknown keys and wrong types are errors."""
        if not isinstance(groups, Mapping):
            raise ValueError(f"settings: got {groups!r}, need groups of settings by name")
        classes = _group_classes(groups.get("method", {}))
        parsed = {}
        for group, values in groups.items():
            if group not in classes:
                raise ValueError(f"unknown group {group!r}; there are {', '.join(classes)}")
            if not isinstance(values, Mapping):
                raise ValueError(f"{group}: got {values!r}, need its settings by name")
            hints = _field_types(classes[group])
            for name in values:
                if name not in hints:
                    raise _unknown_setting(f"{group}.{name}", groups.get("method", {}))
            parsed[group] = classes[group](
                **{
                    name: parse(value, hints[name], f"{group}.{name}")
                    for name, value in values.items()
                }
            )
        return Config(**parsed)

    @staticmethod
    def from_json(text: str) -> Config:
        groups = json.loads(text)
        if not isinstance(groups, dict):
            raise ValueError(f"settings: got {groups!r}, need groups of settings by name")
        version = groups.pop("format", 1)
        if not isinstance(version, int) or version != FORMAT:
            newer = isinstance(version, int) and version > FORMAT
            action = "install a newer meanshift" if newer else "train it again with this version"
            raise ValueError(f"has format {version}, this version reads {FORMAT}; {action}")
        return Config.from_dict(groups)


def _keep_given_weights(groups: dict[str, dict[str, Any]]) -> None:
    """Change the settings of a run that starts from its own weights to those for given ones.

    They gain over ImageNet weights where the weights of the recipes lose (docs/experiments.md).
    """
    optim = groups["optim"]
    groups["encoder"] |= {"init": "random", "batch_norm": "fixed"}
    groups["optim"] |= {"lr": 0.3 * optim["lr"], "heads_first": max(0.3, optim["heads_first"])}


RESUME_SAFE = frozenset(
    "data.source data.group data.workers data.max_bad_fraction train.device train.save_every "
    "train.keep_every train.log_every train.monitor_every train.trackers train.compile "
    "train.timeout".split()
)
"""Settings that may change when a run is continued, whatever its method. The images have a
fingerprint of their own, and a change of device or precision is reported."""


def resume_safe(config: Config) -> frozenset[str]:
    """The settings that may change when a run is continued, including those of its method."""
    return RESUME_SAFE | {f"method.{name}" for name in config.method.resume_safe}


def check_setting_name(config: Config, path: str) -> None:
    """Raise ValueError with the nearest names if a configuration has no such setting."""
    _check_name(path, config.to_dict())


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two configs differ, as (old, new); None for a field it lacks."""
    before = _flat(old)
    after = _flat(new)
    return {
        name: (before.get(name), after.get(name))
        for name in {**after, **before}
        if before.get(name) != after.get(name)
    }


def settings(method: type[MethodSettings] = DEFAULT_METHOD) -> Iterator[tuple[str, Any, Any, str]]:
    """Every setting as (dotted name, type, default, help), including those of one method."""
    for group, kind in _group_classes({}, method).items():
        hints = _field_types(kind)
        helps = help_texts(kind)
        for each in dataclasses.fields(kind):
            yield f"{group}.{each.name}", hints[each.name], each.default, helps.get(each.name, "")


def _group_classes(method: Any, chosen: type[MethodSettings] | None = None) -> dict[str, type]:
    """The class of each group; that of the method is `chosen` or named by the group's values."""
    classes: dict[str, type] = typing.get_type_hints(Config)
    if chosen is None:
        given = method if isinstance(method, Mapping) else {}
        name = str(given.get("name", DEFAULT_METHOD.name))
        chosen = settings_class(name, str(given.get("module", "")))
    return {**classes, "method": chosen}


def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def _flat(config: Config) -> dict[str, Any]:
    return {
        f"{group}.{name}": value
        for group, fields in config.to_dict().items()
        for name, value in fields.items()
    }


def _check_name(path: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
    group, _, field_name = path.partition(".")
    if field_name not in groups.get(group, {}):
        raise _unknown_setting(path, groups["method"])


def _unknown_setting(path: str, method: Mapping[str, Any]) -> ValueError:
    """The error for a setting that does not exist, with the nearest ones that do."""
    chosen = _group_classes(method)["method"]
    names = [name for name, *_ in settings(chosen)]
    group, _, field_name = path.partition(".")
    others = [
        other
        for other, kind in METHODS.items()
        if group == "method" and field_name in _field_types(kind)
    ]
    if others:
        return ValueError(
            f"{path}: the method {method.get('name', DEFAULT_METHOD.name)} has no such setting; it "
            f"belongs to {', '.join(others)} (--method.name)"
        )
    near = close(path, names, [name for name in names if name.startswith(f"{group}.")] or names)
    return ValueError(f"unknown setting {path!r}; did you mean {near}?")
