"""Features of samples that a program holds: paths, PIL images, arrays, a Dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from meanshift.config.samples import Kind
from meanshift.data import Source, Subset, UnreadableSample
from meanshift.data.folder import FolderSource
from meanshift.data.in_memory import as_source, is_array, prepare
from meanshift.evaluation.context import EncoderContext
from meanshift.models.features import BATCH_SIZE, extract_features

_DIMENSIONS = {"image": 3, "signal": 2, "vector": 1}  # of one sample

Sample = str | Path | Image.Image | np.ndarray | Tensor
"""one image: a path, a PIL image, or an array with the channels first or last"""


@dataclass(frozen=True)
class Neighbors:
    """The samples that are most similar to another one, the most similar first."""

    indices: Int[np.ndarray, " k"]
    """in the samples that were searched"""
    similarities: Float[np.ndarray, " k"]
    """cosine of the angle between the embeddings: 1 is the same direction"""
    paths: list[str]
    """files, or the titles of samples that have none"""
    labels: list[str | None] = field(default_factory=list)
    """class of each, where it is known"""


def embed_samples(
    context: EncoderContext,
    samples: Sample | Iterable[Sample] | Dataset[Any] | Source,
    *,
    batch_size: int = BATCH_SIZE,
) -> Float[Tensor, "n features"]:
    """The features of samples, one row each; one that cannot be read raises a ValueError."""
    kind = context.kind
    several = as_several(samples, kind)
    if not isinstance(several, list):
        return extract_readable(context, as_source(several, kind=kind), batch_size)
    # Arrays are enlarged and files are not, also where they are in one list.
    groups: dict[Any, list[int]] = {}
    for index, sample in enumerate(several):
        prepare(sample, f"sample {index}", kind)
        groups.setdefault(getattr(sample, "shape", None), []).append(index)
    parts = [
        extract_readable(
            context, as_source([several[i] for i in indices], kind=kind), batch_size, indices
        )
        for indices in groups.values()
    ]
    if not parts:
        raise ValueError("embed: got no samples; need at least one")
    order = torch.tensor([index for indices in groups.values() for index in indices])
    return torch.cat(parts)[order.argsort()]


def extract_readable(
    context: EncoderContext,
    source: Source,
    batch_size: int = BATCH_SIZE,
    indices: Sequence[int] = (),
) -> Float[Tensor, "n features"]:
    """The features of a source, or an error that names a sample that cannot be read."""
    bad: dict[int, UnreadableSample] = {}
    rows = extract_features(
        context.backbone,
        context.adapted(source),
        image_size=context.image_size,
        resize=context.resize,
        device=context.device,
        precision=context.precision,
        batch_size=batch_size,
        bad=bad,
    )
    for index, error in bad.items():
        place = indices[index] if indices else index
        title = error.title if error.title != f"#{index}" else f"sample {place}"
        raise ValueError(f"{title} cannot be read ({error.reason}); repair it or leave it out")
    return rows


def as_several(samples: Any, kind: Kind) -> Any:
    """Samples as a list, or as one array or Dataset; one sample alone becomes a list of one."""
    if isinstance(samples, (str, Path)) and Path(samples).is_dir():
        raise ValueError(
            f"{samples}: is a folder, need files: sorted(Path({str(samples)!r}).glob('*.jpg'))"
        )
    if is_array(samples):
        return [samples] if samples.ndim <= _DIMENSIONS[kind] else samples
    if isinstance(samples, (Dataset, Source)):
        return samples
    alone = isinstance(samples, (str, Path, Image.Image)) or not isinstance(samples, Iterable)
    return [samples] if alone else list(samples)


def path_of(source: Source, index: int) -> str:
    """The file of a sample, or its title where it has none."""
    title = source.title(index)
    while isinstance(source, Subset):
        source = source.source
    return str(source.root / title) if isinstance(source, FolderSource) else title


def label_of(source: Source, index: int) -> str | None:
    """The class of a sample, where it is known."""
    if source.labels is None or source.labels[index] < 0:
        return None
    return source.classes[int(source.labels[index])]
