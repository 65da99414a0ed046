"""Initialization from the data: every convolution starts as the principal components of its input.

No labels and no gradients: one forward pass over a few hundred training images sets the filters,
another one measures the statistics of batch norm. Related: PCANet (Chan et al. 2015),
data-dependent initialization (Krähenbühl et al. 2016), and the whitened first layers of fast
CIFAR-10 programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from meanshift.data import Source, UnreadableSample
from meanshift.models.features import BATCH_SIZE, evaluation_batches
from meanshift.models.split_batch_norm import SplitBatchNorm2d
from meanshift.runtime import rng

PCA_IMAGES = 256
"""images whose patches the components are computed from"""
STATISTICS_IMAGES = 1000
"""other images that batch norm is measured on"""
MIN_IMAGES = 8
"""images that an initialization needs"""
FEW_IMAGES = 200
"""images below which the statistics of batch norm are reported as rough"""
PATCHES = 20_000
"""most patches that the components of a layer are computed from"""
PATCHES_PER_VALUE = 50
"""fewer are enough for small patches: so many for each value of a patch, at least 2,500"""
SHRINKAGE = 0.1
"""fraction of the mean eigenvalue that is added to each eigenvalue before filters are scaled"""

_CHUNK = 2_500  # patches in memory at a time
_FULL_DECOMPOSITION = 700  # values of a patch up to which all components are computed
_SUBSPACE_ROUNDS = 6
_SUBSPACE_EXTRA = 32  # components that are computed beyond those that are used


@dataclass(frozen=True)
class Initialization:
    """What was initialized from the data, and what was not."""

    images: int
    """images that the components are computed from"""
    statistics_images: int | None
    """other images that batch norm is measured on; None for a network without it"""
    layers: list[str]
    random_layers: list[str]
    """layers with weights that stay random"""

    def card(self) -> dict[str, Any]:
        """The entries of a run's card."""
        return {"init": "pca", **asdict(self)}

    def warnings(self) -> list[str]:
        """What a user should know about this initialization."""
        messages = []
        if self.random_layers:
            shown = ", ".join(self.random_layers[:6])
            more = len(self.random_layers) - 6
            messages.append(
                f"initialization: {len(self.layers)} convolutions start from principal components; "
                f"these layers stay random: {shown}{f' and {more} more' if more > 0 else ''}"
            )
        if self.statistics_images is not None and self.statistics_images < FEW_IMAGES:
            messages.append(
                f"initialization: batch norm was measured on only {self.statistics_images} images, "
                f"so the start is rough; with {FEW_IMAGES} or more it is better"
            )
        return messages


def initialize_from_images(
    network: nn.Module,
    source: Source,
    *,
    image_size: int,
    seed: int,
    device: torch.device,
    workers: int = 0,
) -> Initialization:
    """Set every convolution to the principal components of its input, then measure batch norm.

    Late layers have few positions, so their components fit the images closely: batch norm is
    measured on other images. On the same ones the gain is lost. Images that cannot be read are left
    out: training reports them when it meets them. Only this process works.
    """
    if len(source) < MIN_IMAGES:
        raise ValueError(
            f"encoder.init: pca needs at least {MIN_IMAGES} images, got {len(source)}: add images "
            f"or type --encoder.init random"
        )
    order = source.order(rng.derive_seed(seed, 0, rng.INITIAL_IMAGES), 0)
    count = min(PCA_IMAGES, len(source) // 2)
    parts = order[:count], order[count : count + STATISTICS_IMAGES]
    batches = [
        readable_batches(
            source.subset(part.sort().values),
            image_size=image_size,
            device=device,
            workers=workers,
        )
        for part in parts
    ]
    images = torch.cat([torch.empty(0), *map(Tensor.cpu, batches[0])])
    if len(images) < 2:
        raise ValueError(
            f"{source.name}: only {len(images)} of {count} images can be read; need more to "
            f"initialize the encoder, or --encoder.init random"
        )
    generator = torch.Generator().manual_seed(rng.derive_seed(seed, 1, rng.INITIAL_IMAGES))
    layers = set_principal_components(network, images.to(device), generator)
    return Initialization(
        images=len(images),
        statistics_images=measure_batch_norm(network, batches[1]),
        layers=layers,
        random_layers=_random_layers(network, layers),
    )


@torch.no_grad()
def set_principal_components(
    network: nn.Module,
    images: Float[Tensor, "n channels height width"],
    generator: torch.Generator,
) -> list[str]:
    """Set every convolution that the images reach; return their names in the order of execution.

    A single forward pass does it: just before a convolution is applied, its weights are computed
    from its input, which the layers before it have computed with their new weights. A convolution
    that is applied several times is set by its first input.
    """
    names: list[str] = []

    def initialize(name: str, layer: nn.Conv2d, inputs: tuple[Tensor, ...]) -> None:
        if name not in names:
            names.append(name)
            _set_filters(layer, inputs[0], generator)

    handles = [
        module.register_forward_pre_hook(partial(initialize, name))
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d)
    ]
    try:
        with _batch_statistics(network):
            network(images)
    finally:
        for handle in handles:
            handle.remove()
    return names


@torch.no_grad()
def measure_batch_norm(network: nn.Module, batches: Iterable[Tensor]) -> int | None:
    """Set the statistics of every batch norm to their mean over batches; return how many images.

    None for a network without batch norm.
    """
    count = 0
    with _batch_statistics(network) as norms:
        if not norms:
            return None
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the average of all batches
        for images in batches:
            if len(images) > 1:  # one image has no variance
                network(images)
                count += len(images)
    return count


def readable_batches(
    source: Source, *, image_size: int, resize: int = 0, device: torch.device, workers: int = 0
) -> Iterator[Float[Tensor, "batch channels _ _"]]:
    """Yield normalized evaluation views in batches of similar size, without unreadable images.

    Every process gets all of them.
    """
    bad: dict[int, UnreadableSample] = {}
    count = -(-len(source) // BATCH_SIZE)
    for indices, images in evaluation_batches(
        source,
        image_size=image_size,
        resize=resize,
        device=device,
        batch_size=-(-len(source) // max(1, count)),
        workers=workers,
        bad=bad,
        shared=False,
    ):
        yield images[[index not in bad for index in indices.tolist()]]


@contextmanager
def _batch_statistics(network: nn.Module) -> Iterator[list[_BatchNorm]]:
    """Let batch norm use the statistics of its batch and everything else, as dropout, be inactive.

    The batch is not split into groups. Modes, momentum and groups are restored.
    """
    modes = {module: module.training for module in network.modules()}
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    groups = {norm: norm.groups for norm in norms if isinstance(norm, SplitBatchNorm2d)}
    network.eval()
    try:
        for norm in norms:
            norm.train()
        for split in groups:
            split.groups = 1
        yield norms
    finally:
        for module, training in modes.items():
            module.training = training
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for split, count in groups.items():
            split.groups = count


def _set_filters(layer: nn.Conv2d, inputs: Tensor, generator: torch.Generator) -> None:
    covariance = patch_covariance(layer, inputs, generator)
    filters = principal_filters(covariance, layer.out_channels // layer.groups, generator)
    layer.weight.copy_(filters.reshape(layer.weight.shape))
    if layer.bias is not None:
        layer.bias.zero_()


def patch_covariance(
    layer: nn.Conv2d, inputs: Float[Tensor, "n channels _ _"], generator: torch.Generator
) -> Float[Tensor, "groups values values"]:
    """The covariance of a sample of the patches that a convolution sees, for each of its groups.

    Only the sampled patches are copied, a part at a time: all patches would not fit into memory.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    padded = padded.permute(0, 2, 3, 1)
    y_offsets, x_offsets = (
        torch.arange(size) * dilation
        for size, dilation in zip(layer.kernel_size, layer.dilation, strict=True)
    )
    rows = (padded.shape[1] - int(y_offsets[-1]) - 1) // layer.stride[0] + 1
    columns = (padded.shape[2] - int(x_offsets[-1]) - 1) // layer.stride[1] + 1
    values = layer.weight[0].numel()
    count = min(PATCHES, max(_CHUNK, PATCHES_PER_VALUE * values))
    sample = torch.randperm(len(inputs) * rows * columns, generator=generator)[:count]
    origin = inputs.new_zeros(layer.groups, 1, values)  # near the mean, for precision
    total = torch.zeros_like(origin)
    products = inputs.new_zeros(layer.groups, values, values)
    for part, chunk in enumerate(sample.split(_CHUNK)):
        image = chunk // (rows * columns)
        y = (chunk // columns % rows * layer.stride[0])[:, None, None] + y_offsets[:, None]
        x = (chunk % columns * layer.stride[1])[:, None, None] + x_offsets
        patches = padded[image[:, None, None], y, x]  # n, kernel height, kernel width, channels
        patches = patches.unflatten(3, (layer.groups, -1)).permute(3, 0, 4, 1, 2)
        patches = patches.flatten(2).contiguous()
        if part == 0:
            origin = patches.mean(1, keepdim=True)
        patches = patches - origin
        total += patches.sum(1, keepdim=True)
        products.baddbmm_(patches.mT, patches)
    mean = total / len(sample)
    return products / len(sample) - mean.mT @ mean


def principal_filters(
    covariance: Float[Tensor, "groups values values"], count: int, generator: torch.Generator
) -> Float[Tensor, "groups count values"]:
    """The leading components of each group with unit variance, each with both signs.

    Where there are more filters than components, the others are random.
    """
    groups, size, _ = covariance.shape
    half = (count + 1) // 2
    values, vectors = _leading_components(covariance, min(half, size), generator)
    mean_value = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None]
    variances = values.clamp_min(0) + SHRINKAGE * mean_value
    variances = torch.where(mean_value > 1e-12, variances, 1.0)  # a constant input stays one
    filters = vectors * variances.rsqrt()[:, :, None]
    if half > size:
        extra = torch.randn(groups, half - size, size, generator=generator).to(filters)
        filters = torch.cat([filters, extra * filters.std(dim=(1, 2), keepdim=True)], 1)
    return torch.cat([filters, -filters], 1)[:, :count]


def _leading_components(
    covariance: Float[Tensor, "groups values values"], count: int, generator: torch.Generator
) -> tuple[Float[Tensor, "groups count"], Float[Tensor, "groups count values"]]:
    """The largest eigenvalues and their eigenvectors, in descending order, with a fixed sign.

    Large matrices take subspace iteration: seconds where a full decomposition takes a minute.
    """
    size = covariance.shape[1]
    width = count + _SUBSPACE_EXTRA
    if size <= _FULL_DECOMPOSITION or 2 * width > size:
        values, vectors = torch.linalg.eigh(covariance.double())
    else:
        start = torch.randn(len(covariance), size, width, generator=generator).to(covariance)
        basis = torch.linalg.qr(start)[0]
        for _ in range(_SUBSPACE_ROUNDS):
            basis = torch.linalg.qr(covariance @ basis)[0]
        values, rotation = torch.linalg.eigh(basis.mT @ covariance @ basis)
        vectors = basis @ rotation
    values = values.flip(1)[:, :count].to(covariance)
    vectors = vectors.mT.flip(1)[:, :count].to(covariance)
    largest = vectors.abs().argmax(2, keepdim=True)
    return values, vectors * vectors.gather(2, largest).sign()


def _random_layers(network: nn.Module, initialized: list[str]) -> list[str]:
    """The layers with weights that were not initialized: linear ones, and those not executed."""
    names = []
    for name, parameter in network.named_parameters():
        layer, _, kind = name.rpartition(".")
        if kind.endswith("weight") and parameter.ndim > 1 and layer not in initialized:
            names.append(layer)
    return names
