"""Sources of pictures behind one contract: folder, store, arrays, named dataset, sample."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from meanshift.data import arrays, folder, named, packed, sample
from meanshift.data.labels import is_table, read_labels
from meanshift.data.source import Cut, Source, Unreadable, hold_out, known, stratified

__all__ = [
    "Cut",
    "Source",
    "Unreadable",
    "hold_out",
    "known",
    "open_source",
    "same_classes",
    "stratified",
    "train_and_held_out",
]


def open_source(spec: str, *, labels: Path | None = None) -> Mapping[str, Source]:
    """The splits of a SOURCE by name; the first is the one to train on.

    A folder's labels are its subfolders' names, or those of a CSV (`file,label`): the one that is
    given, or `labels.csv` at its top.

    >>> open_source("photos/")["train"]
    """
    path = Path(spec).expanduser()
    if path.is_dir() and spec != "sample":
        store = packed.read_packed(path)
        if store is None:
            return _open_folder(path, labels)
        if labels is None:
            return store
    if labels is not None:
        raise ValueError(f"{labels}: a CSV of labels is for folders of pictures, not for {spec}")
    if spec == "sample":
        return sample.read_sample()
    if path.suffix in (".npy", ".npz") and path.is_file():
        return arrays.read_arrays(path)
    if spec.lower() in named.NAMES:
        return named.read_named(spec.lower())
    what = "a file that is neither .npz nor .npy" if path.exists() else "nothing there"
    raise ValueError(
        f"{spec}: {what}; need a folder of pictures, an .npz or .npy file, `sample`, or one of "
        f"{', '.join(named.NAMES)}"
    )


def _open_folder(root: Path, labels: Path | None) -> dict[str, Source]:
    beside = root / "labels.csv"
    path = labels or (beside if beside.is_file() and is_table(beside) else None)
    table = None if path is None else read_labels(path)
    sources = {
        name: folder.FolderSource(part, table, "" if part == root else f"{name}/")
        for name, part in folder.splits(root).items()
    }
    if table is not None:
        bare = Counter(
            title
            for name, source in sources.items()
            for title in map(source.title, range(len(source)))
            if title in table and f"{name}/{title}" not in table
        )
        twice = next((title for title, count in bare.items() if count > 1), None)
        if twice is not None:
            raise ValueError(
                f"{path}: {twice} is in more than one of {', '.join(sources)}; write the split's "
                f"name in front, as train/{twice}"
            )
        pictures = sum(map(len, sources.values()))
        known = sum(
            0 if source.labels is None else int((source.labels >= 0).sum())
            for source in sources.values()
        )
        listed = sum(label != "" for label in table.values())
        if not known:
            raise ValueError(
                f"{path}: none of the {listed} files that it labels is in {root}, the first is "
                f"{next(filter(table.get, table), 'missing')}; need paths inside the folder, as "
                f"a/b.jpg"
            )
        if known < max(listed, pictures):
            warnings.warn(
                f"{path}: labels {listed} files, {known} of them among the {pictures} pictures of "
                f"{root}; the other pictures are unlabelled",
                stacklevel=3,
            )
    return {**sources}


def train_and_held_out(
    spec: str, held_out: float | str, *, seed: int
) -> tuple[Source, Source | None]:
    """What to train on, and the pictures kept for judging it (None when there are none)."""
    splits = dict(open_source(spec))
    train = splits.pop("train")
    if held_out == "auto":
        if splits:
            return train, same_classes(next(iter(splits.values())), train)
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
    return train, same_classes(splits[held_out], train)


def same_classes(held: Source, train: Source) -> Source:
    """The held-out part with its labels numbered as in training, by the classes' names."""
    if held.labels is None or train.labels is None or held.classes == train.classes:
        return held
    unknown = sorted(set(held.classes) - set(train.classes))
    if unknown:
        raise ValueError(
            f"{held.name}: has classes that {train.name} lacks: {', '.join(unknown[:5])}; "
            f"name the classes alike in both"
        )
    number = torch.tensor([train.classes.index(name) for name in held.classes])
    held.labels = torch.where(held.labels < 0, -1, number[held.labels])
    held.classes = train.classes
    return held
