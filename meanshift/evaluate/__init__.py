"""One file a protocol: frozen encoder in, named figures and a protocol card out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meanshift.config import Config
from meanshift.journal import environment


def card(
    protocol: str, data: str, sizes: Mapping[str, int], weights: str, config: Config
) -> dict[str, Any]:
    """What must stand beside a figure: protocol, data, weights, seed, versions, date."""
    here = environment()
    return {
        "protocol": protocol,
        "data": data,
        "sizes": dict(sizes),
        "weights": weights,
        "seed": config.train.seed,
        "image_size": config.data.image_size,
        "versions": here["versions"],
        "date": here["date"],
    }
