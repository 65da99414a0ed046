"""Third-party checkpoints: read without executing code, recognized by their keys or refused."""

from __future__ import annotations

import argparse
import difflib
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meanshift import config
from meanshift.config.samples import RGB
from meanshift.models import timm_networks
from meanshift.models.encoder import build_backbone, resnet_from_shapes
from meanshift.models.heads import mlp_from_state
from meanshift.runtime import checksum

# What a checkpoint may contain besides tensors and plain values: the options of the program that
# wrote it, and numpy scalars. Neither can execute code.
_NUMPY_SCALAR: Any = np.float64(0).__reduce__()[0]
_SAFE_GLOBALS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *((_NUMPY_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i4", "i8", "?")),
]

# (program, pattern of the prefix of its online backbone, pattern of a key that only it has)
_PROGRAMS = (
    ("authors' MSF", r"(state_dict/)?encoder_q\.(module\.)?", r"encoder_t\."),
    ("MoCo v2", r"(state_dict/)?(module\.)?encoder_q\.", r"encoder_q\.fc\.0\."),
    ("MoCo v1", r"(state_dict/)?(module\.)?encoder_q\.", r"encoder_k\."),
    ("SimSiam", r"(state_dict/)?(module\.)?encoder\.", r"(^|/|module\.)predictor\."),
    ("BYOL", r"(\w+/)?(module\.)?online_encoder\.net\.", r"online_predictor\."),
    ("BYOL", r"online_network(_state_dict)?/(module\.)?(\w+\.)?", r"^target_network"),
    ("BYOL", r"(\w+/)?(module\.)?online_(network|net)\.(\w+\.)*", r"target_(network|net)"),
    ("torchvision or timm", r"(state_dict|model|model_state_dict)?/?(module\.|model\.)?", r""),
)
_TARGETS = re.compile(r"(?i)(?<![a-z])((encoder_[kt]|ema)(?![a-z])|target|momentum|teacher)")
"""prefixes of momentum encoders, which are not the online backbone"""
_HEADS = re.compile(
    r"(fc|classifiers?|heads?|head_dist|last_linear|aux\w*|AuxLogits|proj\w*|pred\w*|prototypes|queue\w*|labels)(\.|$)"
)
"""keys that may stand beside those of a backbone"""
_COUNTER = "num_batches_tracked"  # the only key that may be missing
_SEQUENTIAL = {"0": "conv1", "1": "bn1"} | {str(i + 3): f"layer{i}" for i in range(1, 5)}
"""names of the parts of a ResNet by their position in `nn.Sequential(*resnet.children())`"""


@dataclass(frozen=True)
class RecognizedWeights:
    """A backbone that was found in a file, and its description."""

    backbone: nn.Module
    settings: config.Encoder
    """what `build_backbone` builds this backbone from"""
    title: str
    image_size: int
    projector: nn.Module | None = None
    samples: config.SampleSpec = RGB
    """the input that the weights were trained with"""


@dataclass(frozen=True)
class _Match:
    """The keys of a file behind a prefix, compared with those of a backbone."""

    prefix: str
    settings: config.Encoder
    expected: Mapping[str, Tensor]
    """the backbone's state dict, without values"""
    found: Mapping[str, Tensor]
    """the file's tensors under the backbone's keys"""
    missing: list[str]
    wrong_shape: list[str]
    unexpected: list[str]

    @property
    def errors(self) -> int:
        """The number of keys that do not fit."""
        return len(self.missing) + len(self.wrong_shape) + len(self.unexpected)

    @property
    def is_target(self) -> bool:
        """Whether the prefix is that of a momentum encoder."""
        return _TARGETS.search(self.prefix) is not None

    def has_weights_of(self, other: _Match) -> bool:
        """Whether both matches are copies of the same weights."""
        return self.found.keys() == other.found.keys() and all(
            torch.equal(tensor, other.found[key]) for key, tensor in self.found.items()
        )


class _MetaParameters(TorchFunctionMode):
    """Puts parameters on the meta device, without memory; other tensors can be computed with.

    Some networks compute with tensors while they are built, so `torch.device("meta")` is no option.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **device})


def read_file(path: Path) -> Any:
    """Return the contents of a .safetensors or torch file; refuse a pickle that executes code.

    A file that has a checksum of ours is compared with it.
    """
    if path.is_file():
        checksum.verify(path)
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return {**tensors, **(file.metadata() or {})}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a complete safetensors file ({error})") from None
    try:
        with torch.serialization.safe_globals(_SAFE_GLOBALS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats, which are read or refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a truncated or unknown file fails in many ways
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused:
            raise ValueError(
                f"{path}: asks for the Python object {refused[1]}, which is refused because a "
                f"pickle can run anything; if you trust it, load it and save its state_dict() alone"
            ) from None
        message = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        reason = f"{type(error).__name__} {message.partition('. ')[0]}".strip()
        raise ValueError(f"{path}: no weights that can be read ({reason})") from None


def recognize(contents: Any, path: Path) -> RecognizedWeights:
    """Find the online backbone in the contents of a file; a partial match is an error."""
    tensors = dict(_flatten(contents))
    match = _find_backbone(tensors, path)
    program = _program(tensors, match.prefix)
    small = match.settings.stem == "small"
    description = [
        program or f"weights of an unknown program under {match.prefix!r}",
        _title(match.settings),
    ]
    if small:
        description.append("3x3 stem of stride 1 assumed")
    epoch = contents.get("epoch") if isinstance(contents, Mapping) else None
    if isinstance(epoch, int):
        description.append(f"epoch {epoch}")
    return RecognizedWeights(
        backbone=_load_backbone(match.settings, match.found),
        settings=match.settings,
        title=", ".join(description),
        image_size=32 if small else 224,
        projector=_projector(tensors, match.prefix) if program == "authors' MSF" else None,
    )


def from_torchvision(spec: str) -> RecognizedWeights:
    """Build `NAME:WEIGHTS` (torchvision's own), `NAME:random`, or `NAME=FILE`."""
    network, _, file = spec.partition("=")
    name, _, weights_name = network.partition(":")
    settings = config.Encoder(name=name)
    title = f"torchvision's {_title(settings)}"
    if file:
        match = _find_backbone(dict(_flatten(read_file(Path(file)))), Path(file), settings)
        backbone = _load_backbone(settings, match.found)
        return RecognizedWeights(backbone, settings, f"{file} as {title}", 224)
    if weights_name == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            backbone, _ = build_backbone(settings)
        return RecognizedWeights(backbone.eval(), settings, f"{title}, random weights", 224)
    from torchvision import models  # slow to import

    trained = models.get_model_weights(name) if name in models.list_models() else []
    available = {str(w).rpartition(".")[2]: w for w in trained}
    if weights_name not in available:
        _meta_backbone(settings)  # a name that is no network has an error of its own
        choices = ", ".join(f"torchvision:{name}:{each}" for each in [*available, "random"])
        raise ValueError(f"torchvision:{network}: names no weights; type one of {choices}")
    weights = available[weights_name]
    try:
        state = weights.get_state_dict(check_hash=True, weights_only=True)
    except Exception as error:  # unreachable, truncated, or no weights at all
        raise ValueError(
            f"torchvision:{name}:{weights_name}: the download failed ({error})"
        ) from None
    image_size = weights.transforms().crop_size[0]
    backbone = _load_backbone(settings, state, image_size)
    if isinstance(backbone, models.GoogLeNet | models.Inception3):
        backbone.transform_input = True  # their weights were trained with another normalization
    return RecognizedWeights(backbone, settings, f"{title}, {weights_name}", image_size)


def from_timm(spec: str) -> RecognizedWeights:
    """Build `NAME` or `NAME.TAG` with timm's own weights, or `NAME=FILE` with those of a file.

    Image size and normalization are those that timm knows of the weights with this tag, or of the
    network's default ones.
    """
    name, _, file = spec.partition("=")
    known = timm_networks.find_pretrained(name)
    settings = config.Encoder(name=timm_networks.PREFIX + known.name)
    size = known.image_size
    if file:
        contents = read_file(Path(file))
        if isinstance(contents, Mapping) and "meanshift" in contents:
            raise ValueError(
                f"timm:{spec}: this file was exported by meanshift and knows its network and its "
                f"normalization; type {file} alone"
            )
        match = _find_backbone(dict(_flatten(contents)), Path(file), settings, size)
        backbone = _load_backbone(settings, match.found, size)
        title = f"{file} as timm's {known.title}"
    else:
        backbone = timm_networks.load_pretrained(known)
        title = f"timm's {known.title}"
    if known.samples != RGB:
        mean, std = (",".join(f"{v:g}" for v in getattr(known.samples, n)) for n in ("mean", "std"))
        title += f" (mean {mean}, std {std})"
    return RecognizedWeights(backbone, settings, title, size, samples=known.samples)


def _flatten(contents: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of nested dictionaries by path, such as `state_dict/conv1.weight`."""
    if isinstance(contents, Tensor):
        yield prefix, contents
    elif isinstance(contents, Mapping):
        for key, value in contents.items():
            if isinstance(key, str) and key != "optimizer":
                yield from _flatten(value, f"{prefix}/{key}" if prefix else key)


def _find_backbone(
    tensors: Mapping[str, Tensor],
    path: Path,
    settings: config.Encoder | None = None,
    image_size: int = 224,
) -> _Match:
    """Return the one complete backbone of a file: the online one if there are momentum encoders.

    With `settings`, only that network is searched for, as it is for images of a size.
    """
    if not tensors:
        raise ValueError(f"{path}: contains no tensors; need a checkpoint or a state dict")
    resnets = _resnet_keys(tensors).keys()
    matches: list[_Match] = []
    complete: list[_Match] = []
    for candidate in [settings] if settings else _candidates(tensors):
        matches += _compare(tensors, candidate, image_size)
        complete = [match for match in matches if not match.errors]
        if complete and resnets <= {match.prefix for match in complete}:
            break
    online = [match for match in complete if not match.is_target]
    partial = _partial_matches(matches, complete, resnets)
    # The complete ones may only be the momentum encoders of one that is damaged.
    if not complete or (partial and not (settings and online)):
        closest = min(partial or matches, key=lambda match: match.errors, default=None)
        raise _no_match_error(closest, tensors, path)
    ordered = sorted(online or complete, key=lambda match: _program(tensors, match.prefix) is None)
    distinct: list[_Match] = []
    for match in ordered:  # some programs save the same weights twice
        if not any(match.has_weights_of(other) for other in distinct):
            distinct.append(match)
    if len(distinct) > 1:
        prefixes = ", ".join(repr(match.prefix) for match in distinct)
        raise ValueError(
            f"{path}: contains {len(distinct)} backbones, under {prefixes}; save the one to "
            f"evaluate alone"
        )
    return distinct[0]


def _partial_matches(
    matches: list[_Match], complete: list[_Match], resnets: Collection[str]
) -> list[_Match]:
    """The incomplete backbones that a user may have meant, momentum encoders left out."""
    networks = {match.settings for match in complete}
    prefixes = tuple(match.prefix for match in complete)
    return [
        match
        for match in matches
        if (match.settings in networks or match.prefix in resnets)
        and not match.is_target
        and not match.prefix.startswith(prefixes)
    ]


def _candidates(tensors: Mapping[str, Tensor]) -> list[config.Encoder]:
    """List the ResNets that the shapes show, then torchvision's networks of a possible size."""
    resnets = _resnet_keys(tensors)
    shown = [
        resnet_from_shapes({name: tuple(tensors[prefix + key].shape) for name, key in keys.items()})
        for prefix, keys in resnets.items()
    ]
    from torchvision import models  # slow to import

    # A classifier has at most 3/4 of a network's parameters.
    most = 5 * sum(tensor.numel() for tensor in tensors.values())
    others = [
        config.Encoder(name=name)
        for name in models.list_models(module=models, exclude="squeezenet*")
        if models.get_model_weights(name).DEFAULT.meta["num_params"] <= most
        and (not resnets or "resne" in name)
    ]
    return [settings for settings in dict.fromkeys([*shown, *others]) if settings is not None]


def _resnet_keys(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """Map the prefix of each ResNet in a file to its keys, {torchvision's key: the file's key}."""
    resnets: dict[str, dict[str, str]] = {}
    for key in tensors:
        for end, sequential in (("layer1.0.conv1.weight", False), ("4.0.conv1.weight", True)):
            prefix = key.removesuffix(end)
            if key.endswith(end) and prefix[-1:] in ("", ".", "/"):
                names = _names_behind(prefix, tensors)
                resnets[prefix] = {_rename(n) if sequential else n: n for n in names}
    return resnets


def _names_behind(prefix: str, tensors: Mapping[str, Tensor]) -> list[str]:
    return [key.removeprefix(prefix) for key in tensors if key.startswith(prefix)]


def _rename(key: str) -> str:
    """torchvision's name of a key of `nn.Sequential(*resnet.children())`."""
    first, dot, rest = key.partition(".")
    return _SEQUENTIAL.get(first, first) + dot + rest


@cache
def _meta_backbone(settings: config.Encoder, image_size: int = 224) -> nn.Module:
    # timm's networks are tried with an image when they are built.
    in_memory = timm_networks.is_timm(settings.name)
    with nullcontext() if in_memory else _MetaParameters():
        return build_backbone(settings, image_size=image_size)[0]


def _compare(
    tensors: Mapping[str, Tensor], settings: config.Encoder, image_size: int
) -> list[_Match]:
    """Compare a file with one network, at every prefix where its keys could begin."""
    backbone = _meta_backbone(settings, image_size)
    expected = backbone.state_dict()
    places = _resnet_keys(tensors) if hasattr(backbone, "layer1") else {}
    first = next(iter(expected))
    for key in tensors:
        prefix = key.removesuffix(first)
        if key.endswith(first) and prefix[-1:] in ("", ".", "/"):
            places.setdefault(prefix, {name: name for name in _names_behind(prefix, tensors)})
    matches = []
    for prefix, keys in places.items():
        found = {name: tensors[prefix + key] for name, key in keys.items() if name in expected}
        matches.append(
            _Match(
                prefix=prefix,
                settings=settings,
                expected=expected,
                found=found,
                missing=[k for k in expected if k not in found and not k.endswith(_COUNTER)],
                wrong_shape=[k for k, t in found.items() if t.shape != expected[k].shape],
                unexpected=[k for k in keys if k not in expected and not _HEADS.match(k)],
            )
        )
    return matches


def _load_backbone(
    settings: config.Encoder, found: Mapping[str, Tensor], image_size: int = 224
) -> nn.Module:
    backbone, _ = build_backbone(settings, image_size=image_size)
    state = backbone.state_dict()  # includes torchvision's version metadata
    state.update({k: found[k] for k in state if k in found or not k.endswith(_COUNTER)})
    backbone.load_state_dict(state)
    return backbone.eval()


def _no_match_error(match: _Match | None, tensors: Mapping[str, Tensor], path: Path) -> ValueError:
    """The error for a file that is refused; names the keys nearest to those that are missing."""
    if match is None:
        return ValueError(
            f"{path}: no known network in its {len(tensors)} tensors "
            f"({', '.join(list(tensors)[:5])}); need torchvision's keys (conv1.weight, "
            f"layer1.0.conv1.weight, ...) behind one prefix"
        )
    names = _names_behind(match.prefix, tensors)
    expected = {key: tuple(tensor.shape) for key, tensor in match.expected.items()}

    def nearest(key: str, keys: list[str]) -> str:
        return ", ".join(difflib.get_close_matches(key, keys, n=2)) or "nothing like it"

    lines = [f"{k} is missing; nearest there: {nearest(k, names)}" for k in match.missing[:4]]
    lines += [
        f"{key} has the shape {tuple(match.found[key].shape)}, need {expected[key]}"
        for key in match.wrong_shape[:4]
    ]
    lines += [
        f"{key} is unknown; nearest known: {nearest(key, list(expected))}"
        for key in match.unexpected[:4]
    ]
    return ValueError(
        f"{path}: is {_title(match.settings)} behind {match.prefix!r} only in part, "
        f"{match.errors} keys do not fit its {len(expected)}:\n  " + "\n  ".join(lines)
    )


def _program(tensors: Mapping[str, Tensor], prefix: str) -> str | None:
    """The program whose checkpoints have a backbone behind this prefix."""
    for name, prefix_pattern, key_pattern in _PROGRAMS:
        if re.fullmatch(prefix_pattern, prefix) and any(
            re.search(key_pattern, key) for key in tensors
        ):
            return name
    return None


def _projector(tensors: Mapping[str, Tensor], prefix: str) -> nn.Module | None:
    """The authors' projector, which takes the place of a classifier."""
    start = f"{prefix}fc."
    state = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
    projector = mlp_from_state(state)
    return None if projector is None else projector.eval()


def _title(settings: config.Encoder) -> str:
    width = "" if settings.width == 1 else f" of width {settings.width:g}"
    return re.sub(r"^resnet(\d+)$", r"ResNet-\1", settings.name) + width
