"""Other people's weights: read without executing anything, recognized by their keys or refused."""

from __future__ import annotations

import argparse
import difflib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision import models

from meanshift import config
from meanshift.models.encoder import build_backbone, mlp, resnet_of

# Besides tensors and plain values, what a checkpoint may hold: the options of the program that
# wrote it, and numpy's numbers. Neither can execute anything.
_SCALAR: Any = np.float64(0).__reduce__()[0]
_ALLOWED: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i4", "i8", "?")),
]

# (who writes so, where their online backbone's keys begin, keys that only they have)
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
_FOLLOWERS = re.compile(r"(?i)(?<![a-z])((encoder_[kt]|ema)(?![a-z])|target|momentum|teacher)")
_HEADS = re.compile(r"(fc|classifiers?|heads?|proj\w*|pred\w*|prototypes|queue\w*|labels)(\.|$)")
_COUNTER = "num_batches_tracked"  # all that may be missing
_SEQUENTIAL = {"0": "conv1", "1": "bn1"} | {str(i + 3): f"layer{i}" for i in range(1, 5)}


@dataclass(frozen=True)
class RecognizedWeights:
    """A backbone found in a file, and what can be said of it."""

    backbone: nn.Module
    title: str
    image_size: int
    projector: nn.Module | None = None


@dataclass(frozen=True)
class _Match:
    """How well a file fits a backbone whose keys are expected behind a prefix."""

    prefix: str
    settings: config.Encoder
    outline: nn.Module
    found: dict[str, Tensor]
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return len(self.missing) + len(self.misshapen) + len(self.surplus)


class _Shapes(TorchFunctionMode):
    """Parameters made inside have a shape and no memory; the rest is left to be computed with."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


def read_file(path: Path) -> Any:
    """What a .safetensors or torch file holds; a pickle that wants to run anything is refused."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return {**tensors, **(file.metadata() or {})}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from None
    try:
        with torch.serialization.safe_globals(_ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a format that is then read, or refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a cut or foreign file fails in many ways
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked:
            raise ValueError(
                f"{path}: asks for the Python object {asked[1]}, which is refused because a pickle "
                f"can run anything; if you trust it, load it and save its state_dict() alone"
            ) from None
        told = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        reason = f"{type(error).__name__} {told.partition('. ')[0]}".strip()
        raise ValueError(f"{path}: no weights that can be read ({reason})") from None


def recognize(held: Any, path: Path) -> RecognizedWeights:
    """The online backbone in what a file holds; a partial match is an error, never a guess."""
    flat = dict(_flatten(held))
    match = _choose(flat, path)
    program, small = _program(flat, match.prefix), match.settings.stem == "small"
    told = [program or f"weights of an unknown program under {match.prefix!r}"]
    told += [_title(match.settings)]
    told += ["3x3 stem of stride 1 assumed"] if small else []
    epoch = held.get("epoch") if isinstance(held, Mapping) else None
    told += [f"epoch {epoch}"] if isinstance(epoch, int) else []
    projector = _projector(flat, match.prefix) if program == "authors' MSF" else None
    backbone = _filled(match.settings, match.found)
    return RecognizedWeights(backbone, ", ".join(told), 32 if small else 224, projector)


def from_torchvision(spec: str) -> RecognizedWeights:
    """`NAME` is untrained, `NAME:WEIGHTS` torchvision's own, `NAME=FILE` a file of that network."""
    known, _, file = spec.partition("=")
    name, _, weights = known.partition(":")
    settings = config.Encoder(name=name)
    title = f"torchvision's {_title(settings)}"
    if file:
        match = _choose(dict(_flatten(read_file(Path(file)))), Path(file), settings)
        return RecognizedWeights(_filled(settings, match.found), f"{file} as {title}", 224)
    if not weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            backbone, _ = build_backbone(settings)
        return RecognizedWeights(backbone.eval(), f"{title}, UNTRAINED", 224)
    trained = {str(one).rpartition(".")[2]: one for one in models.get_model_weights(name)}
    if weights not in trained:
        raise ValueError(f"torchvision:{name}:{weights}: need one of {', '.join(trained)}")
    try:
        state = trained[weights].get_state_dict(check_hash=True, weights_only=True)
    except Exception as error:  # unreachable, cut, or no weights at all
        raise ValueError(f"torchvision:{name}:{weights}: the download failed ({error})") from None
    size = trained[weights].transforms().crop_size[0]
    backbone = _filled(settings, state, size)
    if isinstance(backbone, models.GoogLeNet | models.Inception3):
        backbone.transform_input = True  # their weights came from another program
    return RecognizedWeights(backbone, f"{title}, {weights}", size)


def _flatten(held: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of nested dictionaries by its path, `state_dict/layer1.0.conv1.weight`."""
    if isinstance(held, Tensor):
        yield prefix, held
    elif isinstance(held, Mapping):
        for key, value in held.items():
            if isinstance(key, str) and key != "optimizer":
                yield from _flatten(value, f"{prefix}/{key}" if prefix else key)


def _choose(flat: dict[str, Tensor], path: Path, named: config.Encoder | None = None) -> _Match:
    """The one whole backbone in a file: the online one where others follow it."""
    if not flat:
        raise ValueError(f"{path}: holds no tensors; need a checkpoint or a state dict")
    places, tried, whole = _resnet_prefixes(flat).keys(), list[_Match](), list[_Match]()
    for settings in [named] if named else _candidates(flat):
        tried += _matches(flat, settings)
        whole = [match for match in tried if not match.wrong]
        if whole and places <= {match.prefix for match in whole}:
            break
    known, taken = {match.settings for match in whole}, tuple(match.prefix for match in whole)
    leading = [match for match in whole if not _FOLLOWERS.search(match.prefix)]
    broken = [m for m in tried if m.settings in known or m.prefix in places]
    broken = [m for m in broken if not (_FOLLOWERS.search(m.prefix) or m.prefix.startswith(taken))]
    if not whole or (broken and not (named and leading)):  # whole ones may only be followers
        raise _refusal(min(broken or tried, key=lambda m: m.wrong, default=None), flat, path)
    found = sorted(leading or whole, key=lambda match: _program(flat, match.prefix) is None)
    leading = [m for i, m in enumerate(found) if not any(_same(m, past) for past in found[:i])]
    if len(leading) > 1:
        shown = ", ".join(repr(match.prefix) for match in leading)
        raise ValueError(
            f"{path}: holds {len(leading)} backbones, under {shown}; save the one to judge alone"
        )
    return leading[0]


def _same(one: _Match, two: _Match) -> bool:  # some programs save the same weights twice
    both = one.found.keys() == two.found.keys()
    return both and all(torch.equal(one.found[key], two.found[key]) for key in one.found)


def _candidates(flat: dict[str, Tensor]) -> list[config.Encoder]:
    """The ResNets that the file's own shapes tell, then others of torchvision with a last layer."""
    prefixes = _resnet_prefixes(flat)
    told = [
        resnet_of({key: tuple(flat[prefix + held].shape) for key, held in keys.items()})
        for prefix, keys in prefixes.items()
    ]
    most = 5 * sum(tensor.numel() for tensor in flat.values())  # a classifier is 3/4 at the most
    names = models.list_models(module=models, exclude="squeezenet*")
    names = [n for n in names if models.get_model_weights(n).DEFAULT.meta["num_params"] <= most]
    rest = [config.Encoder(name=name) for name in names if not prefixes or "resne" in name]
    return [settings for settings in dict.fromkeys([*told, *rest]) if settings is not None]


def _resnet_prefixes(flat: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """Where ResNets begin in a file, each with its keys in torchvision's names to those it has."""
    found: dict[str, dict[str, str]] = {}
    for key in flat:
        for end, numbered in (("layer1.0.conv1.weight", False), ("4.0.conv1.weight", True)):
            if key.endswith(end) and (key == end or key[-len(end) - 1] in "./"):
                prefix = key.removesuffix(end)
                inside = [k.removeprefix(prefix) for k in flat if k.startswith(prefix)]
                found[prefix] = {_renamed(k) if numbered else k: k for k in inside}
    return found


def _renamed(key: str) -> str:
    first, dot, rest = key.partition(".")
    return _SEQUENTIAL.get(first, first) + dot + rest


@cache
def _outline(settings: config.Encoder) -> nn.Module:
    with _Shapes():
        return build_backbone(settings)[0]


def _matches(flat: dict[str, Tensor], settings: config.Encoder) -> list[_Match]:
    """The file against one network, at every place where its keys could begin."""
    outline = _outline(settings)
    expected = outline.state_dict()
    places = _resnet_prefixes(flat) if hasattr(outline, "layer1") else {}
    first = next(iter(expected))
    for key in flat:
        if key.endswith(first) and key.removesuffix(first)[-1:] in ("", ".", "/"):
            prefix = key.removesuffix(first)
            inside = [k.removeprefix(prefix) for k in flat if k.startswith(prefix)]
            places.setdefault(prefix, {k: k for k in inside})
    matches = []
    for prefix, keys in places.items():
        found = {key: flat[prefix + held] for key, held in keys.items() if key in expected}
        gone = [k for k in expected if k not in found and not k.endswith(_COUNTER)]
        bad = [key for key, tensor in found.items() if tensor.shape != expected[key].shape]
        surplus = [key for key in keys if key not in expected and not _HEADS.match(key)]
        matches.append(_Match(prefix, settings, outline, found, gone, bad, surplus))
    return matches


def _filled(settings: config.Encoder, found: Mapping[str, Tensor], size: int = 224) -> nn.Module:
    backbone, _ = build_backbone(settings, image_size=size)
    state = backbone.state_dict()  # with torchvision's notes of its version
    state.update({k: found[k] for k in state if k in found or not k.endswith(_COUNTER)})
    backbone.load_state_dict(state)
    return backbone.eval()


def _refusal(match: _Match | None, flat: dict[str, Tensor], path: Path) -> ValueError:
    """Why a file is refused, with the keys nearest to those that it lacks."""
    if match is None:
        return ValueError(
            f"{path}: no known network in its {len(flat)} tensors ({', '.join(list(flat)[:5])}); "
            f"need torchvision's keys (conv1.weight, layer1.0.conv1.weight, ...) behind one prefix"
        )
    inside = [key.removeprefix(match.prefix) for key in flat if key.startswith(match.prefix)]
    expected = {key: tuple(tensor.shape) for key, tensor in match.outline.state_dict().items()}

    def near(key: str, among: list[str]) -> str:
        return ", ".join(difflib.get_close_matches(key, among, n=2)) or "nothing like it"

    lines = [f"{k} is missing; nearest there: {near(k, inside)}" for k in match.missing[:4]]
    lines += [
        f"{key} has the shape {tuple(match.found[key].shape)}, need {expected[key]}"
        for key in match.misshapen[:4]
    ]
    lines += [
        f"{k} is unknown; nearest known: {near(k, list(expected))}" for k in match.surplus[:4]
    ]
    return ValueError(
        f"{path}: is {_title(match.settings)} behind {match.prefix!r} only in part, "
        f"{match.wrong} keys do not fit its {len(expected)}:\n  " + "\n  ".join(lines)
    )


def _program(flat: dict[str, Tensor], prefix: str) -> str | None:
    for name, begins, proof in _PROGRAMS:
        if re.fullmatch(begins, prefix) and any(re.search(proof, key) for key in flat):
            return name
    return None


def _projector(flat: dict[str, Tensor], prefix: str) -> nn.Module | None:
    """The authors' projector, which sits where a classifier would."""
    start = f"{prefix}fc."
    state = {k.removeprefix(start): v for k, v in flat.items() if k.startswith(start)}
    if state.keys() != mlp(1, 1, 1).state_dict().keys():  # another head than theirs
        return None
    projector = mlp(state["0.weight"].shape[1], len(state["0.weight"]), len(state["3.weight"]))
    projector.load_state_dict(state)
    return projector.eval()


def _title(settings: config.Encoder) -> str:
    wide = "" if settings.width == 1 else f" of width {settings.width:g}"
    return re.sub(r"^resnet(\d+)$", r"ResNet-\1", settings.name) + wide
