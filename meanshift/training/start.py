"""The backbone that a run starts with, where its seed alone does not give it.

Such a run keeps its start in `start.safetensors`: `untrained:RUN` needs neither the images that it
was initialized from nor the weights that it was given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meanshift.config import Config, SampleSpec, ViewSpec
from meanshift.data import Source
from meanshift.data.measure import measure
from meanshift.models.initialization import initialize_from_images
from meanshift.models.timm_networks import resize_input
from meanshift.models.view_whitening import without_whitening
from meanshift.models.weights import (
    Weights,
    fingerprint,
    has_start_file,
    load_given_weights,
    read_start,
    write_start,
)
from meanshift.runtime import distributed
from meanshift.runtime.run_directory import RunDirectory


def resolve_weights(config: Config, run_directory: RunDirectory) -> tuple[Config, Weights | None]:
    """The config with the architecture of the weights that it names, and these weights.

    A run that has begun knows the architecture and has a copy: the weights may be gone since.
    """
    spec = config.encoder.weights
    if not spec:
        return config, None
    begun = run_directory.start.is_file() or run_directory.has_checkpoints
    if begun and run_directory.config.encoder.weights == spec:
        return replace(config, encoder=run_directory.config.encoder), None
    weights, encoder = load_given_weights(spec)
    ours = config.encoder
    encoder = replace(
        encoder,
        output=ours.output,
        batch_norm=ours.batch_norm,
        batch_groups=ours.batch_groups,
    )
    return replace(config, encoder=encoder), weights


def recall_samples(config: Config, run_directory: RunDirectory) -> Config:
    """The config with what a run that has begun found out about its samples."""
    if not (run_directory.folder / "config.json").is_file():
        return config
    return replace(config, data=config.data.recalling(run_directory.config.data))


def resolve_samples(config: Config, source: Source, given: Weights | None) -> Config:
    """The config with what the samples of its source are, unless it says so already.

    Given weights keep their own channels and normalization.
    """
    data = config.data
    if data.channels and not {"auto", "minmax"} & {data.dtype, data.range, data.mean, data.std}:
        return config
    if given is not None and given.sample_spec is not None:
        network = given.sample_spec
        data = data.recalling(replace(data, channels=network.channels))
        if network.channels == 3 or given.config is not None:
            data = data.recalling(replace(data, mean=network.mean, std=network.std))
    return replace(config, data=data.with_samples(measure(source, data)))


def describe_samples(config: Config, views: Sequence[ViewSpec]) -> list[str]:
    """What to say at the start about samples that are not 8-bit RGB images."""
    spec = config.data.sample_spec
    if spec == SampleSpec():
        return []
    lines = [f"data: {spec.describe()}"]
    if spec.kind == "image" and not spec.is_bytes:
        lines[0] += "; type --data.range LOW,HIGH for another range"
    colored = any(view.gray or (view.jitter and any(view.jitter_strength[2:])) for view in views)
    if spec.kind == "image" and not spec.is_rgb and colored:
        lines.append(
            "views: saturation, hue and grayscale are for RGB images, so they are left out"
        )
    return lines


@dataclass
class Start:
    """Sets the backbone of a run to its start, in each encoder that the method builds.

    The principal components are computed in the first process only; `broadcast` sends them.
    """

    config: Config
    run_directory: RunDirectory
    source: Source
    device: torch.device
    given: Weights | None = None
    card: dict[str, Any] = field(default_factory=dict)
    """what environment.json records"""
    messages: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _state: dict[str, Tensor] | None = None

    def __call__(self, backbone: nn.Module) -> None:
        """Initialize a backbone that has its random weights."""
        if self._state is None:
            self._state = {name: value.clone() for name, value in self._compute(backbone).items()}
        backbone.load_state_dict(self._state)

    def broadcast(self, method: nn.Module, local: tuple[str, ...]) -> None:
        """Give all processes the weights of the first one, without what is `local` to each."""
        if has_start_file(self.config):
            distributed.broadcast(parameter.data for parameter in method.parameters())
            distributed.broadcast(
                buffer for name, buffer in method.named_buffers() if not name.startswith(local)
            )

    def save(self, backbone: nn.Module) -> None:
        """Write the file of a run that begins."""
        if has_start_file(self.config) and self.run_directory.writes:
            write_start(self.run_directory, backbone, self.config)

    def _compute(self, backbone: nn.Module) -> dict[str, Tensor]:
        stored = self.run_directory.start
        if self.given is not None:
            return self._from_weights(self.given, backbone)
        if self.config.encoder.weights or self.run_directory.has_checkpoints:  # it has begun
            self.card = self._recorded_card()
            # Without its file a run continues too: the checkpoint replaces these weights.
            return read_start(stored) if stored.is_file() else backbone.state_dict()
        if self.config.encoder.init == "pca" and distributed.rank() == 0:
            self._from_images(backbone)
        return backbone.state_dict()

    def _from_weights(self, given: Weights, backbone: nn.Module) -> dict[str, Tensor]:
        origin = {"title": given.title, "fingerprint": fingerprint(given.backbone)}
        self.card = {"weights": given.spec, **origin}
        self.messages = [f"encoder: starts from {given.spec}: {given.title}"]
        network = without_whitening(given.backbone)
        size = self.config.data.image_size
        if given.image_size != size and resize_input(network, size):
            self.messages[0] += f", resized from {given.image_size} to {size} pixels by timm"
        try:
            without_whitening(backbone).load_state_dict(network.state_dict())
        except RuntimeError:
            raise ValueError(
                f"encoder.weights: {given.spec} was trained with images of {given.image_size} "
                f"pixels, and {self.config.encoder.name} has other weights for "
                f"{size}: type --data.image_size {given.image_size}"
            ) from None
        return backbone.state_dict()

    def _from_images(self, backbone: nn.Module) -> None:
        result = initialize_from_images(
            backbone.to(self.device),
            self.source,
            image_size=self.config.data.image_size,
            seed=self.config.train.seed,
            device=self.device,
            workers=self.config.data.workers,
        )
        backbone.cpu()
        self.card = result.card()
        message = (
            f"encoder: {len(result.layers)} convolutions start from the principal components of "
            f"{result.images} images"
        )
        if result.statistics_images is not None:
            message += f"; batch norm is measured on {result.statistics_images} others"
        self.messages = [message]
        self.warnings = result.warnings()

    def _recorded_card(self) -> dict[str, Any]:
        """What the first session of this run recorded."""
        environment = self.run_directory.folder / "environment.json"
        if not environment.is_file():
            return {}
        card: dict[str, Any] = json.loads(environment.read_text()).get("start", {})
        return card
