"""Sources of pictures behind one contract: folder, arrays, named dataset, shipped sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from meanshift.data import arrays, folder, named, sample
from meanshift.data.source import Cut, Source, Unreadable, hold_out

__all__ = ["Cut", "Source", "Unreadable", "hold_out", "open_source", "train_and_held_out"]


def open_source(spec: str) -> Mapping[str, Source]:
    """The splits of a SOURCE by name; the first is the one to train on.

    >>> open_source("photos/")["train"]
    """
    path = Path(spec).expanduser()
    if spec == "sample":
        return sample.read_sample()
    if path.is_dir():
        return {name: folder.FolderSource(part) for name, part in folder.splits(path).items()}
    if path.suffix in (".npy", ".npz") and path.is_file():
        return arrays.read_arrays(path)
    if spec.lower() in named.NAMES:
        return named.read_named(spec.lower())
    what = "a file that is neither .npz nor .npy" if path.exists() else "nothing there"
    raise ValueError(
        f"{spec}: {what}; need a folder of pictures, an .npz or .npy file, `sample`, or one of "
        f"{', '.join(named.NAMES)}"
    )


def train_and_held_out(
    spec: str, held_out: float | str, *, seed: int
) -> tuple[Source, Source | None]:
    """What to train on, and the pictures kept for judging it (None when there are none)."""
    splits = dict(open_source(spec))
    train = splits.pop("train")
    if held_out == "auto":
        if splits:
            return train, _same_classes(next(iter(splits.values())), train)
        held_out = 0.1 if train.labels is not None and len(train) >= 100 else "none"
    if held_out in ("none", 0.0):
        return train, None
    if isinstance(held_out, float):
        return hold_out(train, held_out, seed=seed)
    if held_out not in splits:
        raise ValueError(
            f"data.held_out: {spec} has no split {held_out!r}; it has "
            f"{', '.join(splits) or 'only train'}: give one of them, a share such as 0.1, or none"
        )
    return train, _same_classes(splits[held_out], train)


def _same_classes(held: Source, train: Source) -> Source:
    """The held-out part with its labels numbered as in training, by the classes' names."""
    if held.labels is None or train.labels is None or held.classes == train.classes:
        return held
    unknown = sorted(set(held.classes) - set(train.classes))
    if unknown:
        raise ValueError(
            f"{held.name}: has classes that {train.name} lacks: {', '.join(unknown[:5])}; "
            f"name its class folders alike"
        )
    number = torch.tensor([train.classes.index(name) for name in held.classes])
    held.labels = torch.where(held.labels < 0, -1, number[held.labels])
    held.classes = train.classes
    return held
