"""Build a small network of each family of timm as an encoder; count those that take the images.

    python tools/timm_families.py --image-size 64 --channels 3

A family is a module of timm. Prints a line for each family and the summary of docs/encoders.md.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from timm.models import list_models, list_modules

from meanshift import config
from meanshift.config import SampleSpec
from meanshift.models.encoder import build_backbone

SMALL = (
    "test_ atto femto pico nano _zero xxt xt tiny xxs xs mini micro small _s _0 18 10 b0 lite 50 26"
).split()
"""parts of names that small networks have, the smallest first"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--channels", type=int, default=3)
    args = parser.parse_args()
    channels = args.channels
    samples = SampleSpec(channels=channels, mean=(0.5,) * channels, std=(0.25,) * channels)
    warnings.simplefilter("ignore")
    errors = {}
    families = [family for family in sorted(list_modules()) if list_models(module=family)]
    for family in families:
        name = min(list_models(module=family), key=_rank)
        try:
            network, features = build_backbone(
                config.Encoder(name=f"timm:{name}"), image_size=args.image_size, samples=samples
            )
            unused = _unused(network, torch.rand(2, channels, args.image_size, args.image_size))
            print(f"{family}: {name}, {features} features", *unused, flush=True)
        except ValueError as error:
            errors[family] = name
            print(f"{family}: {error}", flush=True)
    works = len(families) - len(errors)
    print(f"{works} of {len(families)} families work; not: {', '.join(errors.values())}")


def _rank(name: str) -> tuple[int, int, str]:
    small = next((i for i, part in enumerate(SMALL) if part in name), len(SMALL))
    return small, len(name), name


def _unused(network: torch.nn.Module, images: torch.Tensor) -> list[str]:
    """Parameters without a gradient, which training in several processes does not allow."""
    network(images).sum().backward()
    names = [name for name, value in network.named_parameters() if value.grad is None]
    return [f"(without gradient: {', '.join(names)})"] if names else []


if __name__ == "__main__":
    main()
