"""One export: what is written where, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meanshift.models.export.reference import Reference
from meanshift.models.weights import Weights
from meanshift.transforms.eval import short_side


@dataclass(frozen=True)
class Job:
    """A backbone on the CPU and the file or folder that it is written to."""

    weights: Weights
    out: Path
    reference: Reference
    license: str = "unknown"
    """of the model card"""
    checks: list[str] = field(default_factory=list)
    """one line for each comparison of features that was made"""
    programs: dict[str, str] = field(default_factory=dict)
    """for each program that reads what was written, the Python code"""

    def create_parent(self) -> None:
        """Create the folder that is written to, when there is something to write."""
        self.out.parent.mkdir(parents=True, exist_ok=True)

    @property
    def state(self) -> dict[str, Tensor]:
        """The parameters and buffers of the backbone."""
        state = self.weights.backbone.state_dict()
        return {name: value.contiguous() for name, value in state.items()}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one normalized sample."""
        sides = {"image": 2, "signal": 1, "vector": 0}[self.kind]
        return (self.preprocessing["channels"], *[self.weights.image_size] * sides)

    @property
    def features(self) -> int:
        """The number of features of a sample."""
        with torch.inference_mode():
            return int(self.weights.backbone(torch.zeros(1, *self.shape)).shape[1])

    @property
    def input(self) -> str:
        """The name of the input of the network."""
        return {"image": "images", "signal": "signals", "vector": "vectors"}[self.kind]

    @property
    def kind(self) -> str:
        """What the network takes."""
        return str(self.preprocessing["kind"])

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How a stored sample becomes the input of the network, as `evaluate` does it."""
        spec = self.weights.sample_spec
        assert spec is not None
        size = self.weights.image_size
        values: dict[str, Any] = {
            "kind": spec.kind,
            "channels": spec.channels,
            "range": list(spec.range),
            "mean": list(spec.mean),
            "std": list(spec.std),
        }
        if spec.kind == "image":
            short = short_side(size, 0)
            values |= {
                "image_size": size,
                "resize": short,
                "interpolation": "bilinear",
                "crop": "center",
                "rule": f"resize the short side to {short} (bilinear, antialiased), crop the "
                f"center of {size}x{size}; images of exactly this size stay as they are if they "
                f"are arrays, or files of up to 64 pixels",
            }
        elif spec.kind == "signal":
            values |= {
                "length": size,
                "sampling_rate": spec.sampling_rate,
                "crop": "center",
                "rule": f"take the middle {size} values; a shorter signal has silence around it",
            }
        else:
            values["rule"] = "take the columns as they are"
        values["rule"] += "; scale `range` to 0 to 1, then subtract `mean` and divide by `std`"
        return values
