"""Load trained encoders from runs, exported files and third-party files; export our own.

A checkpoint of any method is read by its `online.backbone.*` and, where there is one, its
`online.projector.*`: `Method.online` is an encoder with a `backbone` and a `projector`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift import config as settings
from meanshift.config import Config, MethodSettings, SampleSpec
from meanshift.config.samples import RGB
from meanshift.data import Source
from meanshift.models import hub, third_party
from meanshift.models.encoder import Encoder, build_backbone
from meanshift.models.heads import mlp_from_state
from meanshift.models.view_whitening import ViewWhitening, as_classifier, from_classifier
from meanshift.runtime import checkpoint, checksum, rng
from meanshift.runtime.files import atomic_writer
from meanshift.runtime.run_directory import RunDirectory

OUTPUT_DIR = Path("evaluations")
"""folder for the results of weights that do not belong to a run"""

EXPORT_FORMAT = 3
"""version of the metadata in exported files"""

SHIPPED_DIR = Path(__file__).parents[1] / "weights"
"""folder of the weights that are part of this package: `meanshift:NAME`"""

_LIBRARIES = {"torchvision": third_party.from_torchvision, "timm": third_party.from_timm}
_METADATA_KEY = "meanshift"  # of the metadata in an exported file
_PIXELS_SIDE = 32  # images are resized to this for the baseline of raw pixels


class RawPixels(nn.Module):
    """A baseline without an encoder: the pixels of an image minus the mean training image."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def center(self, mean: Float[Tensor, " pixels"]) -> None:
        """Subtract the mean of the training features from all later features."""
        self.mean = self.mean + mean.to(self.mean)

    def forward(self, images: Float[Tensor, "n channels *size"]) -> Float[Tensor, "n pixels"]:
        size = (_PIXELS_SIDE, _PIXELS_SIDE)
        if images.ndim == 4 and images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return images.flatten(1) - self.mean


@dataclass(frozen=True)
class Weights:
    """A frozen backbone, its description, and the folder for its results."""

    spec: str
    """what a user types to name them"""
    backbone: nn.Module
    title: str
    image_size: int
    output_dir: Path
    name: str = ""
    """added to the names of results, unless these are the newest weights of a run"""
    config: Config | None = None
    encoder: settings.Encoder | None = None
    """what `build_backbone` builds this backbone from; None for a baseline without an encoder"""
    projector: nn.Module | None = None
    trained_on: str = ""
    """fingerprint of the training images, where it is known"""
    directory: Path = Path()
    """where the run was started: its `data.source` may be relative to it"""
    unmeasured: bool = False
    """whether batch norm has no statistics yet: an evaluation measures them on its training images,
    since random weights without them are a weaker baseline than they need to be"""
    samples: SampleSpec = RGB
    """the input of weights that belong to no run"""

    def adapted(self, source: Source) -> Source:
        """A source with its samples as the backbone takes them."""
        spec = self.sample_spec
        return source if spec is None else source.adapted(spec, self.spec)

    @property
    def sample_spec(self) -> SampleSpec | None:
        """What the backbone takes; None where any number of channels will do."""
        if isinstance(self.backbone, RawPixels):
            return None
        return self.samples if self.config is None else self.config.data.sample_spec


def load_weights(spec: Path | str) -> Weights:
    """Load a run, a checkpoint, an exported encoder, a third-party file,
    `torchvision:NAME:WEIGHTS`, `timm:NAME`, weights that are part of this package
    (`meanshift:NAME`), or a folder or repository of the Hugging Face Hub that `meanshift export`
    has written: `hf:NAME`.

    There are three baselines: `untrained:RUN` is the encoder of a run before its first step,
    `random:RUN` the same encoder with random weights, and `pixels` is no encoder at all.
    """
    path = Path(spec)
    kind, _, argument = str(spec).partition(":")
    output_dir = OUTPUT_DIR / (re.sub(r"[^\w.-]+", "-", argument or path.stem) or "weights")
    if kind in _LIBRARIES and argument:
        recognized = _LIBRARIES[kind](argument)
        file = argument.partition("=")[2]
        if file:
            output_dir = _file_output_dir(Path(file), recognized.backbone)
        return _third_party_weights(spec, recognized, output_dir)
    if kind == "meanshift" and argument:
        return _load_shipped(argument, output_dir)
    if kind == "untrained" and argument:
        return _load_untrained(Path(argument))
    if kind == "random" and argument:
        return _load_random(Path(argument))
    if kind == "hf" and argument:
        return _load_huggingface(argument)
    if kind == "pixels" and not path.exists():
        title = f"raw pixels at {_PIXELS_SIDE}x{_PIXELS_SIDE}"
        return Weights("pixels", RawPixels(), title, _PIXELS_SIDE, output_dir)
    if not path.exists():
        raise ValueError(
            f"{path}: not found; need a run directory, a file of weights, "
            f"torchvision:NAME:WEIGHTS, timm:NAME, meanshift:NAME, hf:NAME, untrained:RUN, "
            f"random:RUN or pixels"
        )
    if path.is_dir():
        return _load_run(path)
    contents = third_party.read_file(path)
    if isinstance(contents, Mapping):
        if isinstance(contents.get("format"), int):  # other programs write a word
            checkpoint.check_format(path, contents["format"])
            run = path.absolute().parent.parent
            if (run / "config.json").is_file():
                usual = path.absolute().parent == RunDirectory(run).checkpoints.absolute()
                if usual:
                    checkpoint.check_name(path, contents)
                name = path.stem if usual else f"{path.absolute().parent.name}-{path.stem}"
                return _from_checkpoint(contents, path, output_dir=run, name=name)
            weights = _from_checkpoint(contents, path, output_dir=output_dir)
            return replace(weights, output_dir=_file_output_dir(path, weights.backbone))
        if _METADATA_KEY in contents:
            return _from_export(contents, path)
    recognized = third_party.recognize(contents, path)
    return _third_party_weights(spec, recognized, _file_output_dir(path, recognized.backbone))


def load_snapshot(run: Path, epoch: int) -> Weights:
    """The backbone of a run as its snapshot after an epoch holds it, in half precision."""
    directory = RunDirectory.open(run)
    path = directory.snapshots / f"epoch-{epoch:04d}.pt"
    config = directory.config
    state = {
        name: value.float() if value.is_floating_point() else value
        for name, value in checkpoint.read(path)["weights"].items()
    }
    return Weights(
        spec=str(path),
        backbone=_build(config, state, path),
        title=f"{_describe(config)}, after epoch {epoch}",
        image_size=config.data.image_size,
        output_dir=run,
        config=config,
        encoder=config.encoder,
    )


def shipped_weights() -> list[str]:
    """The specs of all weights that are part of this package."""
    return [f"meanshift:{file.stem}" for file in sorted(SHIPPED_DIR.glob("*.safetensors"))]


def writable_dir(folder: Path) -> Path:
    """The folder itself, or one below `evaluations/` if it cannot be written to."""
    if not folder.exists() or os.access(folder, os.W_OK):
        return folder
    path = str(folder.resolve())
    name = f"{Path(path).name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"
    instead = OUTPUT_DIR / name
    warnings.warn(f"{folder}: cannot be written to; {instead} is used instead", stacklevel=3)
    return instead


def load_encoder(weights: Path | str) -> nn.Module:
    """Load the online backbone of a run or of any file of weights, in evaluation mode.

    Args:
        weights: what `meanshift.load` takes.

    Returns:
        The network without heads and without preprocessing.

    >>> backbone = load_encoder("runs/demo")
    >>> features = backbone(images)  # normalized as for ImageNet, shape (n, 3, height, width)
    """
    return load_weights(weights).backbone


def export(weights: Weights, out: Path, *, half: bool = False, classifier: str = "") -> Path:
    """Write the backbone with torchvision's or timm's parameter names, for any program.

    `half` halves the file: weights are stored in float16, but norms and their statistics are not.
    `classifier` is the layer of another program's network that a whitened output is written as.
    """
    if weights.config is None:
        raise ValueError("export: need a run directory or one of its checkpoints")
    if out.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"{out}: need a name that ends in .safetensors, .pt or .pth")
    metadata = {
        "format": EXPORT_FORMAT,
        "title": weights.title,
        "config": weights.config.to_dict(),
        "source": weights.trained_on,
    }
    state = weights.backbone.state_dict()
    if classifier and isinstance(weights.backbone, ViewWhitening):
        state = as_classifier(weights.backbone, classifier)
        metadata["whitening"] = {"layer": classifier, "mean": weights.backbone.mean.tolist()}
    state = {
        key: (value.half() if half and value.ndim > 1 else value).contiguous()
        for key, value in state.items()
    }
    if out.suffix == ".safetensors":
        from safetensors.torch import save

        header = json.dumps({"checksum": checksum.PLACEHOLDER, **metadata})
        with atomic_writer(out) as file:
            file.write(checksum.fill(save(state, {_METADATA_KEY: header})))
    else:
        checkpoint.write(out, {"state_dict": state, _METADATA_KEY: json.dumps(metadata)})
    return out


def load_given_weights(spec: str) -> tuple[Weights, settings.Encoder]:
    """Load the weights that a run starts from; return them and the settings of its encoder.

    The settings describe the architecture of the weights, so that the run needs them no more once
    it has begun.
    """
    network = re.fullmatch(r"torchvision:([^:=]+)(:random)?", spec)
    if network:
        raise ValueError(
            f"encoder.weights: {spec} names no trained weights, as "
            f"torchvision:{network[1]}:IMAGENET1K_V1 does; for random ones type --encoder.name "
            f"{network[1]} instead"
        )
    weights = load_weights(spec)
    if weights.encoder is None:
        raise ValueError(f"encoder.weights: {spec} is no encoder; need a run or a file of weights")
    if getattr(weights.backbone, "transform_input", False):
        raise ValueError(
            f"encoder.weights: {spec} needs another normalization of its input, which training "
            f"does not have; choose another network, such as torchvision:resnet18:IMAGENET1K_V1"
        )
    return weights, replace(weights.encoder, init="random", weights=spec)


def has_start_file(config: Config) -> bool:
    """Whether a run keeps its starting weights in a file: its seed alone does not give them."""
    encoder = config.encoder
    return encoder.init != "random" or encoder.output != "plain" or bool(encoder.weights)


def write_start(run_directory: RunDirectory, backbone: nn.Module, config: Config) -> None:
    """Write the backbone of a run before its first step, as an exported encoder."""
    weights = Weights(
        spec=f"untrained:{run_directory.folder}",
        backbone=backbone,
        title=f"{_describe(config)}, before its first step",
        image_size=config.data.image_size,
        output_dir=run_directory.folder,
        config=config,
    )
    export(weights, run_directory.start)


def read_start(path: Path) -> dict[str, Tensor]:
    """The state dict of a backbone that `write_start` has written."""
    contents = third_party.read_file(path)
    _read_metadata(contents, path)
    return {name: value for name, value in contents.items() if isinstance(value, Tensor)}


def start_title(config: Config) -> str:
    """What the table of a comparison calls the encoder of a run before its first step."""
    if config.encoder.weights:
        return f"start from {config.encoder.weights}"
    return {"random": "random start", "pca": "PCA start"}[config.encoder.init]


def starts(run: Path) -> dict[str, str]:
    """What a run should be compared with, as {title: spec}: random weights, and its own start."""
    config = RunDirectory.open(run).config
    titles = {"random start": f"random:{run}"}
    if has_start_file(config):
        titles.setdefault(start_title(config), f"untrained:{run}")
    return titles


def source_places(weights: Weights, config: Config) -> list[str]:
    """Where the training images of a run can be: its source as it was typed, here or there."""
    source = config.data.source
    there = weights.directory / source
    if there.exists() and not Path(source).exists():
        return [str(there), source]
    return [source, str(there)] if there.exists() else [source]


def fingerprint(network: nn.Module) -> str:
    """Return a short hash of the weights, and of settings that are not part of the weights."""
    digest = hashlib.sha256()
    for name, module in network.named_modules():
        settings = [
            getattr(module, setting, None) for setting in ("stride", "padding", "transform_input")
        ]
        digest.update(f"{name} {settings}".encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _load_run(run: Path) -> Weights:
    state, errors = checkpoint.latest(RunDirectory.open(run).checkpoints)
    if state is None:
        if (run / hub.MODEL_FILE).is_file():
            raise ValueError(f"{run}: is an exported folder, no run; type hf:{run}")
        raise ValueError(f"{run}: no checkpoint yet; continue the run until it has saved one")
    for message in errors:
        warnings.warn(f"{message}; step {state['step']} is used instead", stacklevel=3)
    return _from_checkpoint(state, run, output_dir=run)


def _from_checkpoint(
    state: Mapping[str, Any], path: Path, *, output_dir: Path, name: str = ""
) -> Weights:
    if "method" not in state:
        raise ValueError(
            f"{path}: contains no complete model; need a run directory or its checkpoints/*.pt"
        )
    config = _parse_config(state["config"], path)
    projector = mlp_from_state(_below("online.projector.", state["method"]))
    return Weights(
        spec=str(path),
        backbone=_build(config, _below("online.backbone.", state["method"]), path),
        title=f"{_describe(config)}, step {state['step']}",
        image_size=config.data.image_size,
        output_dir=output_dir,
        name=name,
        config=config,
        encoder=config.encoder,
        projector=None if projector is None else projector.eval(),
        trained_on=state.get("source", ""),
        directory=_started_in(output_dir),
    )


def _started_in(run: Path) -> Path:
    """The working directory of the command that started a run; the present one if unknown."""
    try:
        return Path(RunDirectory(run).environment.get("directory", ""))
    except ValueError:  # a damaged file; the weights do not need it
        return Path()


def _load_untrained(run: Path) -> Weights:
    """The encoder before the first step, as the run began with it."""
    run_directory = RunDirectory.open(run)
    weights = _load_random(run)
    config = run_directory.config
    if has_start_file(config):
        if not run_directory.start.is_file():
            raise ValueError(
                f"{run}: has no {run_directory.start.name}, which holds its {start_title(config)}; "
                f"continue the run, or compare with random:{run}"
            )
        weights.backbone.load_state_dict(read_start(run_directory.start))
    return replace(
        weights,
        spec=f"untrained:{run}",
        title=f"{_describe(config)}, before its first step",
        name="untrained",
        unmeasured=False,
    )


def _load_random(run: Path) -> Weights:
    """The encoder of a run with the random weights that its seed gives."""
    config = RunDirectory.open(run).config
    with torch.random.fork_rng(devices=[]):  # as `training.session.build_method`
        torch.manual_seed(rng.derive_seed(config.train.seed, 0, rng.INITIAL))
        dim = getattr(config.method, "dim", 0)
        hidden = getattr(config.method, "hidden", 0)
        encoder = Encoder(
            config.encoder,
            dim=dim,
            hidden=hidden,
            image_size=config.data.image_size,
            samples=config.data.sample_spec,
        ).eval()
    return Weights(
        spec=f"random:{run}",
        backbone=encoder.backbone,
        title=f"{_architecture(config)}, random weights",
        image_size=config.data.image_size,
        output_dir=run,
        name="random",
        config=config,
        encoder=config.encoder,
        projector=encoder.projector,
        directory=_started_in(run),
        unmeasured=True,
    )


def _load_shipped(name: str, output_dir: Path) -> Weights:
    """Weights that are part of this package, compared with the checksum of their card."""
    path = SHIPPED_DIR / f"{name}.safetensors"
    spec = f"meanshift:{name}"
    specs = shipped_weights()
    if spec not in specs:
        there = f"there are {', '.join(specs)}" if specs else "there are none in this version"
        raise ValueError(f"{spec}: no such weights in this package; {there}")
    card = json.loads(path.with_suffix(".json").read_text())
    if hashlib.sha256(path.read_bytes()).hexdigest() != card["sha256"]:
        raise ValueError(f"{path}: differs from the checksum of its card; install meanshift again")
    weights = _from_export(third_party.read_file(path), path)
    return replace(weights, spec=spec, title=f"{spec}, {card['title']}", output_dir=output_dir)


def _load_huggingface(name: str) -> Weights:
    """A folder or a repository of the Hub that `meanshift export` has written."""
    path = hub.find_model(name)
    weights = _from_export(third_party.read_file(path), path)
    stem = re.sub(r"[^\w.-]+", "-", Path(name).name)
    output_dir = OUTPUT_DIR / f"{stem}-{fingerprint(weights.backbone)[:6]}"
    return replace(weights, spec=f"hf:{name}", output_dir=output_dir)


def _read_metadata(contents: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The metadata of an exported file."""
    try:
        metadata: dict[str, Any] = json.loads(contents[_METADATA_KEY])
        version = metadata.get("format", 1)
    except (KeyError, ValueError, TypeError, AttributeError):
        raise ValueError(f"{path}: the metadata of the exported file cannot be read") from None
    checkpoint.check_format(path, version, supported=EXPORT_FORMAT)
    return metadata


def _from_export(contents: Mapping[str, Any], path: Path) -> Weights:
    metadata = _read_metadata(contents, path)
    config = _parse_config(metadata.get("config"), path)
    tensors = {key: value for key, value in contents.items() if isinstance(value, Tensor)}
    state = contents.get("state_dict", tensors)
    if whitening := metadata.get("whitening"):
        state = from_classifier(state, whitening["layer"], torch.tensor(whitening["mean"]))
    backbone = _build(config, state, path)
    return Weights(
        spec=str(path),
        backbone=backbone,
        title=f"exported by meanshift, {metadata.get('title')}",
        image_size=config.data.image_size,
        output_dir=_file_output_dir(path, backbone),
        config=config,
        encoder=config.encoder,
        trained_on=metadata.get("source", ""),
    )


def _third_party_weights(
    spec: Path | str, recognized: third_party.RecognizedWeights, output_dir: Path
) -> Weights:
    return Weights(
        spec=str(spec),
        backbone=recognized.backbone,
        title=recognized.title,
        image_size=recognized.image_size,
        output_dir=output_dir,
        encoder=recognized.settings,
        projector=recognized.projector,
        samples=recognized.samples,
    )


def _build(config: Config, state: Mapping[str, Any], path: Path) -> nn.Module:
    """Build the backbone of a config with the weights of a file, in evaluation mode."""
    data = config.data
    backbone, _ = build_backbone(
        config.encoder, image_size=data.image_size, samples=data.sample_spec
    )
    try:
        backbone.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path}: not the complete encoder of its settings ({error})") from None
    return backbone.eval()


def _parse_config(settings: Any, path: Path) -> Config:
    if not isinstance(settings, Mapping):
        raise ValueError(f"{path}: contains no settings of an encoder")
    method = settings.get("method") or {}
    module = method.get("module") if isinstance(method, Mapping) else ""
    try:
        if not module:
            return Config.from_dict(settings)
        # Only the encoder is used: code from outside is neither needed nor executed.
        rest = {group: values for group, values in settings.items() if group != "method"}
        opaque = MethodSettings(name=str(method.get("name")), module=str(module))
        return replace(Config.from_dict(rest), method=opaque)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a state dict below a prefix, without the prefix."""
    return {
        key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
    }


def _file_output_dir(path: Path, backbone: nn.Module) -> Path:
    """A folder for the results of a file; many files have the same name."""
    return OUTPUT_DIR / f"{path.stem}-{fingerprint(backbone)[:6]}"


def _describe(config: Config) -> str:
    start = f", {start_title(config)}" if has_start_file(config) else ""
    return f"our {config.method.name}, {_architecture(config)}{start}"


def _architecture(config: Config) -> str:
    encoder = config.encoder
    stem = "" if encoder.stem == "imagenet" else f", {encoder.stem} stem"
    width = "" if encoder.width == 1 else f", width {encoder.width:g}"
    return f"{encoder.name}{stem}{width}"
