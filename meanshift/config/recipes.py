"""The named configurations, each with its command, hardware, time and measured result."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meanshift.config.methods import MSF, BYOLAsym, MethodSettings
from meanshift.config.parsing import close, setting_text
from meanshift.config.schema import Config, Data, Encoder, Optim, Train, differences
from meanshift.config.views import Strength, Views

_SHORT_METHOD = MSF(  # what learns most in minutes on a CPU (docs/experiments.md)
    dim=256,
    hidden=512,
    bank_size=4096,
    k_schedule="linear",
    neighbor_weight=0.25,
    same_image="skip",
    search_filled_only=True,
    momentum=0.9,
    momentum_batch=64,
    variance=1.0,
    covariance=0.04,
)


def imagenet_r50() -> Config:
    """The paper's main model, MSF w/s with a bank of 128K: ResNet-50, 200 epochs of ImageNet.

    command: meanshift pretrain imagenet-r50 --data IMAGENET --out runs/r50 --data.workers 16
    hardware: one GPU, its memory not measured here (the authors used four of 11 GB)
    time: the authors give 7 days on four GPUs for BYOL; not run here
    result: the paper's: linear 72.1, NN 62.0, 20-NN 65.2; not run here
    """
    return _imagenet("weak", "strong", k=5)


def imagenet_r50_ss() -> Config:
    """MSF s/s, both views strong.

    command: meanshift pretrain imagenet-r50-ss --data IMAGENET --out runs/r50-ss --data.workers 16
    hardware: as imagenet-r50
    time: as imagenet-r50; not run here
    result: the paper's, with a bank of 1.024M: linear 71.4, NN 60.6, 20-NN 64.0; not run here
    """
    return _imagenet("strong", "strong", k=5)


def imagenet_r50_ww() -> Config:
    """MSF w/w, both views weak, for images that no strong augmentation suits.

    command: meanshift pretrain imagenet-r50-ww --data IMAGENET --out runs/r50-ww --data.workers 16
    hardware: as imagenet-r50
    time: as imagenet-r50; not run here
    result: the paper's, with a bank of 1.024M: linear 66.3, NN 54.6, 20-NN 57.4; not run here
    """
    return _imagenet("weak", "weak", k=5)


def imagenet_r50_byol_ss() -> Config:
    """BYOL-asym s/s: the k=1 twin of imagenet-r50-ss.

    command: meanshift pretrain imagenet-r50-byol-ss --data IMAGENET --out runs/byol-ss
    hardware: as imagenet-r50
    time: as imagenet-r50; not run here
    result: the paper's: linear 69.3, NN 55.0, 20-NN 59.2; not run here
    """
    return _imagenet("strong", "strong", k=1)


def imagenet_r50_byol_ws() -> Config:
    """BYOL-asym w/s: the k=1 twin of imagenet-r50.

    command: meanshift pretrain imagenet-r50-byol-ws --data IMAGENET --out runs/byol-ws
    hardware: as imagenet-r50
    time: as imagenet-r50; not run here
    result: the paper's: linear 69.5, NN 55.8, 20-NN 59.1; not run here
    """
    return _imagenet("weak", "strong", k=1)


def imagenet_r50_byol_ww() -> Config:
    """BYOL-asym w/w: the k=1 twin of imagenet-r50-ww.

    command: meanshift pretrain imagenet-r50-byol-ww --data IMAGENET --out runs/byol-ww
    hardware: as imagenet-r50
    time: as imagenet-r50; not run here
    result: none in the paper (it cites linear 60.1 for BYOL, batch 4096, symmetric); not run here
    """
    return _imagenet("weak", "weak", k=1)


def cifar10_r18() -> Config:
    """CIFAR-10 at 32x32: ResNet-18 with the small stem, 200 epochs.

    command: meanshift pretrain cifar10-r18 --data cifar10 --out runs/c10
    hardware: one GPU; on 2 CPU cores add --encoder.width 0.5 --encoder.stem small-stride2
    time: the whole 200 epochs were not run here; 50 of a quarter width in 90 minutes on 2 cores
    result: not run here; 50 epochs of a quarter width, 20-NN 55.6, linear 54.6
      (docs/results-resnet.md)
    """
    return Config(
        data=Data(source="cifar10", image_size=32),
        views=Views(blur=0.0),
        encoder=Encoder(name="resnet18", stem="small"),
        method=MSF(bank_size=16_384, same_image="skip", search_filled_only=True),
        optim=Optim(lr=0.06, schedule="step", warmup_epochs=5, weight_decay=5e-4),
        train=Train(save_every=0.2),
    )


def cifar10_cpu() -> Config:
    """CIFAR-10 at 32x32 on a CPU: conv7 of width 0.75 from its principal components, 64 epochs.

    command: meanshift pretrain cifar10-cpu --data cifar10 --out runs/c10
    hardware: 2 CPU cores
    time: 44 CPU minutes of one core with bfloat16, whose twin was busy
    result: 20-NN 70.0, 1-NN 67.3, linear 72.7, mean of three seeds (PCA start 63.7 and 58.2, random
      start 56.3 and 51.1, raw pixels 43.8 and 40.9); seed 0 is meanshift:cifar10-small
    """
    return _short(
        data=Data(source="cifar10", image_size=32),
        encoder="conv7",
        width=0.75,
        bank_size=16_384,
        epochs=64,
        batch_size=128,
    )


def small() -> Config:
    """A folder of a few hundred to some ten thousand images on a CPU: conv4, views of 64 pixels.

    command: meanshift pretrain small --data FOLDER --out runs/mine
    hardware: 2 CPU cores
    time: 4 to 5 minutes for 600 photographs and 50 epochs on one busy core with bfloat16; its 100
      epochs were not run here
    result: 600 photographs, 50 epochs, leave-one-out, means of 3 seeds: 20-NN 62.2, 1-NN 55.6 (PCA
      start 54.3 and 45.2, raw pixels 28.7 and 26.6)
    """
    return _short(data=Data(image_size=64, workers=2), encoder="conv4", epochs=100)


def vector() -> Config:
    """Vectors, such as the embeddings of a foundation model or a table of measurements: an MLP.

    command: meanshift pretrain vector --data embeddings.npz --out runs/vectors
    hardware: 1 CPU core
    time: about a minute for 1,300 vectors of 64 columns on one busy core, 60 epochs
    result: scikit-learn's digits, 60 epochs: 20-NN 97.0, as the raw values (docs/kinds.md)
    """
    return _other_kind(Data(), Views(noise=0.3, channel_dropout=0.2, mix=0.2), "mlp")


def signal() -> Config:
    """Signals, such as recordings of sound at 8 kHz: a small 1-D network, windows of a second.

    command: meanshift pretrain signal --data FOLDER --out runs/signals
    hardware: 2 CPU cores
    time: about a minute for 360 recordings of a second at 22 kHz and 20 epochs on one core
    result: spoken digits, 20 epochs: 20-NN 85.0 (random weights 78.3, raw values 35.0)
    """
    data = Data(image_size=8000, workers=2)
    return _other_kind(data, Views(noise=0.1, gain=6.0, mask=0.3), "conv1d")


def demo() -> Config:
    """The whole path on the 12,000 images shipped with the package, in 3 minutes on 2 cores.

    command: meanshift demo
    hardware: 2 CPU cores
    time: 3 minutes 14 to 26 seconds with evaluation and report, without bfloat16
    result: 20-NN 61.3, 1-NN 54.6, means of 3 seeds (seeds 0 and 2: PCA start 57.6 and 49.4, random
      start 50.6 and 42.9; raw pixels 39.3 and 33.7)
    """
    config = _short(data=Data(source="sample", image_size=32), epochs=18)
    # Each snapshot becomes a t-SNE map, which takes a second.
    return replace(config, train=replace(config.train, snapshots=4))


def small_resnet18() -> Config:
    """A folder of images with the paper's loss: ResNet-18 at half width, whitened targets.

    command: meanshift pretrain small-resnet18 --data FOLDER --out runs/mine
    hardware: 2 CPU cores
    time: about 100 images per second without bfloat16: an hour for 4,000 images and 100 epochs
    result: 600 photographs, 50 epochs, without whitening: 20-NN 21.5 (untrained 23.5); 3 epochs of
      CIFAR-10: 38.3 with whitened targets, 34.3 without (docs/results-resnet.md)
    """
    return Config(
        data=Data(image_size=96, workers=2),
        encoder=Encoder(name="resnet18", width=0.5),
        method=MSF(
            k_schedule="linear",
            bank_size=2048,
            same_image="skip",
            search_filled_only=True,
            whiten=True,
        ),
        optim=Optim(schedule="step", warmup_epochs=2),
        train=Train(epochs=100, batch_size=64),
    )


def small_convnext() -> Config:
    """A folder of images with networks that need AdamW and a warm-up: ConvNeXt, ViT and the like.

    command: meanshift pretrain small-convnext --data FOLDER --out runs/mine
    hardware: one GPU; on CPUs add --encoder.name timm:convnext_atto (pip install 'meanshift[timm]')
    time: about 10 CPU seconds an epoch for 600 photographs and timm:convnext_atto; convnext_tiny
      and vit_b_16 were tried for a few steps only
    result: 600 photographs, 25 epochs of timm:convnext_atto, one seed: 20-NN 25.5 on 200 others
      (untrained 23.0, raw pixels 31.0); leave-one-out over all 800: 32.2 (23.9, 29.8)
    """
    return Config(
        data=Data(image_size=64, workers=2),
        views=Views(crop_area=(0.3, 1.0), blur=0.0),
        encoder=Encoder(name="convnext_tiny", output="whitened"),
        method=_SHORT_METHOD,
        optim=Optim(
            name="adamw",
            lr=1e-3,
            schedule="step",
            warmup_epochs=5,
            heads_first=0.05,
            weight_decay=0.05,
            decay_norms=False,
        ),
        train=Train(epochs=100, batch_size=64),
    )


def sample_resnet10() -> Config:
    """The shipped images with the paper's loss: ResNet-10 at half width, SGD, a slow target.

    command: meanshift pretrain sample-resnet10 --data sample --out runs/sample
    hardware: 2 CPU cores
    time: 3 minutes without bfloat16 (18 epochs at about 1,100 images per second)
    result: 20-NN 36.8, 1-NN 30.2, means of 3 seeds (untrained 31.0 and 24.5, raw pixels 39.3, 33.7)
    """
    return Config(
        data=Data(source="sample", image_size=32),
        views=Views(
            crop_area=(0.6, 1.0), jitter_strength=(0.2, 0.2, 0.2, 0.05), gray=0.05, blur=0.0
        ),
        encoder=Encoder(name="resnet10", width=0.5),
        method=MSF(
            k_schedule="linear",
            bank_size=4096,
            momentum=0.996,
            same_image="skip",
            search_filled_only=True,
        ),
        optim=Optim(schedule="step"),
        train=Train(epochs=18, batch_size=128),
    )


def _short(
    *,
    data: Data,
    encoder: str = "conv3",
    width: float = 1.0,
    bank_size: int = 4096,
    epochs: int,
    batch_size: int = 64,
) -> Config:
    """What learns most in minutes on a CPU; the trials are in docs/experiments.md."""
    return Config(
        data=data,
        views=Views(crop_area=(0.3, 1.0), blur=0.0),
        encoder=Encoder(name=encoder, width=width, init="pca", output="whitened"),
        method=replace(_SHORT_METHOD, bank_size=bank_size),
        optim=Optim(name="adamw", lr=1e-3, schedule="step", heads_first=0.05, decay_norms=False),
        train=Train(epochs=epochs, batch_size=batch_size),
    )


def _other_kind(data: Data, views: Views, encoder: str) -> Config:
    """What is the same for vectors and signals."""
    return Config(
        data=data,
        views=views,
        encoder=Encoder(name=encoder),
        method=_SHORT_METHOD,
        optim=Optim(name="adamw", lr=1e-3, schedule="step", decay_norms=False),
        train=Train(epochs=100, batch_size=64, monitor_every=10),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        demo,
        small,
        vector,
        signal,
        cifar10_cpu,
        sample_resnet10,
        small_resnet18,
        small_convnext,
        cifar10_r18,
        imagenet_r50,
        imagenet_r50_ss,
        imagenet_r50_ww,
        imagenet_r50_byol_ss,
        imagenet_r50_byol_ws,
        imagenet_r50_byol_ww,
    )
}


def recipe(name: str) -> Config:
    """Return the configuration of a recipe.

    Args:
        name: `small`, `demo`, `vector`, ...; `meanshift recipes` lists them.

    Raises:
        ValueError: for an unknown name, with the nearest known one.
    """
    if name not in RECIPES:
        near = close(name, list(RECIPES), list(RECIPES))
        raise ValueError(
            f"recipe: got {name!r}, need one of {', '.join(RECIPES)} (did you mean {near}?)"
        )
    return RECIPES[name]()


def describe(name: str) -> str:
    """A recipe's docstring: what it is, command, hardware, time, result."""
    return inspect.cleandoc(RECIPES[name].__doc__ or "")


@functools.lru_cache(maxsize=64)  # a report asks several times for one configuration
def nearest_recipe(config: Config) -> str:
    """The recipe that differs least from a configuration."""

    def distance(name: str) -> tuple[int, bool]:
        changed = len(differences(recipe(name).with_overrides(_causes(name, config)), config))
        return changed, recipe(name).method.name != config.method.name

    return min(RECIPES, key=distance)


def command_for(config: Config, out: str) -> str:
    """The command that trains or continues exactly this: the nearest recipe and what differs."""
    name = nearest_recipe(config)
    words = ["meanshift", "pretrain", name, "--data", config.data.source, "--out", out]
    causes = _causes(name, config)
    base = recipe(name).with_overrides(causes)
    for setting, value in causes.items():
        words += [f"--{setting}", setting_text(value)]
    for setting, (_, value) in differences(base, config).items():
        if setting != "data.source":
            words += [f"--{setting}", setting_text(value)]
    return shlex.join(words)


def _causes(name: str, config: Config) -> dict[str, Any]:
    """The settings by which a configuration differs from a recipe and that change others."""
    base = recipe(name)
    causes: dict[str, Any] = {}
    if config.method.module:
        causes["method.module"] = config.method.module
    elif base.method.name != config.method.name:
        causes["method.name"] = config.method.name
    if causes and base.data.image_size != config.data.image_size:
        causes["data.image_size"] = config.data.image_size
    if base.encoder.weights != config.encoder.weights:
        causes["encoder.weights"] = config.encoder.weights
    return causes


def _imagenet(target: Strength, online: Strength, *, k: int) -> Config:
    method: MethodSettings = BYOLAsym(target_view=target, online_view=online)
    if k > 1:
        method = MSF(target_view=target, online_view=online, k=k)
    return Config(
        data=Data(source="imagenet", image_size=224), method=method, train=Train(save_every=0.1)
    )
