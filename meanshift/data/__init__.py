"""Sources of images behind one contract: folder, store, arrays, shards, datasets, sample."""

from __future__ import annotations

import glob
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meanshift.data import (
    arrays,
    folder,
    huggingface,
    packed,
    sample,
    shards,
    torchvision_datasets,
)
from meanshift.data.labels import is_table, read_labels
from meanshift.data.source import (
    Source,
    Subset,
    UnreadableSample,
    labeled_only,
    split_off,
    stratified,
)

__all__ = [
    "Subset",
    "Source",
    "UnreadableSample",
    "split_off",
    "labeled_only",
    "open_source",
    "same_classes",
    "stratified",
    "train_and_validation",
]


def open_source(spec: str, *, labels: Path | None = None) -> Mapping[str, Source]:
    """The splits of a SOURCE by name; the first is the one to train on.

    A folder's labels are its subfolders' names, or those of a CSV (`file,label`): the one that is
    given, or `labels.csv` at its top.

    >>> open_source("photos/")["train"]
    """
    path, beyond = Path(spec).expanduser(), spec.startswith(("hf:", "hf+stream:"))
    if path.is_dir() and spec != "sample" and not beyond:
        store = packed.read_packed(path) or _open_shards(spec)
        if store is None:
            return _open_folder(path, labels)
        if labels is None:
            return store
    if labels is not None:
        raise ValueError(f"{labels}: a CSV of labels is for folders of images, not for {spec}")
    if spec == "sample":
        return sample.read_sample()
    if beyond:
        return _open_streamed(spec) if spec.startswith("hf+stream:") else _open_mapped(spec)
    if found := _open_shards(spec):
        return found
    if path.suffix in (".npy", ".npz") and path.is_file():
        return arrays.read_arrays(path)
    if spec.lower() in torchvision_datasets.NAMES:
        return torchvision_datasets.read_named(spec.lower())
    what = "a file that is neither .npz nor .npy nor .tar" if path.exists() else "nothing there"
    raise ValueError(
        f"{spec}: {what}; need a folder of images, an .npz or .npy file, tar shards (a folder, "
        f"photos-*.tar, https://host/photos-{{000..012}}.tar), a Hugging Face dataset (hf:NAME, "
        f"hf:PATH, hf+stream:NAME, hf+stream:FILES.parquet), `sample`, or one of "
        f"{', '.join(torchvision_datasets.NAMES)}"
    )


def _open_shards(spec: str) -> dict[str, Source] | None:
    """The splits of a folder, file, pattern or address of shards; None where it is none of them."""
    root, found, below = Path(spec).expanduser(), list[str](), None
    if not shards.is_remote(spec) and root.is_dir():
        found, below = shards.in_folder(root), root
    elif shards.base_name(spec).endswith((".tar", *shards.ZIPPED)):
        found = _matching(spec)
    parts = _by_split(found, spec, below=below)
    return {split: shards.ShardSource(part, name=spec) for split, part in parts.items()} or None


def _open_mapped(spec: str) -> dict[str, Source]:
    """The splits of what the `datasets` library opens."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{spec}: {huggingface.missing('datasets')}") from None
    rest = spec.partition(":")[2]
    path = Path(rest).expanduser()
    try:
        if any((path / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            found: Any = datasets.load_from_disk(str(path))
        elif files := _parquet_files(spec):
            found = datasets.load_dataset("parquet", data_files=files)
        elif path.exists():
            raise ValueError("neither made by save_to_disk nor Parquet")
        else:
            name, _, config = rest.partition(":")
            found = datasets.load_dataset(name, config or None)
    except Exception as error:  # no network, no such dataset, several configs, damaged files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{spec}: could not be opened ({reason}); need hf:NAME or hf:NAME:CONFIG of a dataset, "
            f"or the path of a folder made by save_to_disk or of Parquet files"
        ) from None
    parts = dict(found) if isinstance(found, dict) else {"train": found}
    by_split = {shards.split_of(split) or split: part for split, part in parts.items()}
    if len(by_split) == 1:
        by_split = {"train": next(iter(by_split.values()))}
    if "train" not in by_split:
        raise ValueError(f"{spec}: has the splits {', '.join(parts)}; need one named train")
    first = [split for split in ("train", "val", "test") if split in by_split]
    return {
        split: huggingface.HubSource(by_split[split], name=spec)
        for split in dict.fromkeys([*first, *by_split])
    }


def _open_streamed(spec: str) -> dict[str, Source]:
    """The splits of Parquet files on a disk, at an address or on the Hub, read by row group."""
    rest, reach = spec.partition(":")[2], shards.reach
    parts = _parquet_files(spec)
    if not parts:
        if shards.is_remote(rest) or rest.endswith(".parquet") or Path(rest).expanduser().exists():
            raise ValueError(f"{spec}: no Parquet file there; need files that end in .parquet")
        name, _, config = rest.partition(":")
        parts, reach = (
            _by_split(huggingface.hub_files(name, config, spec), spec, below=Path()),
            huggingface.HubFile,
        )
    return {
        split: huggingface.StreamedSource([reach(file) for file in files], name=spec)
        for split, files in parts.items()
    }


def _parquet_files(spec: str) -> dict[str, list[str]]:
    """Parquet files by split, of a path, a pattern or an address; none where there are none."""
    rest = spec.partition(":")[2]
    root, found, below = Path(rest).expanduser(), list[str](), None
    if not shards.is_remote(rest) and root.is_dir():
        found, below = sorted(str(file) for file in root.rglob("*.parquet")), root
    elif shards.base_name(rest).endswith(".parquet"):
        found = _matching(rest)
    return _by_split(found, spec, below=below)


def _matching(pattern: str) -> list[str]:
    """The files that a path, an address, or a pattern of either means; none where nothing is.

    `{000..012}` and `{a,b}` are a shell's; `*` and its like only find files on a disk.
    """
    path = pattern if shards.is_remote(pattern) else str(Path(pattern).expanduser())
    if Path(path).is_file():
        return [path]
    pieces, at = list[list[str]](), 0
    for braces in re.finditer(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", path):
        first, last, words = braces.groups()
        if words is None and not 0 <= int(last) - int(first) < 100_000:
            raise ValueError(f"{pattern}: need a range of 1 to 100000 files, as {{000..012}}")
        width = len(first or "") if (first or "").startswith("0") else 0
        numbers = range(0) if words is not None else range(int(first), int(last) + 1)
        pieces += [[path[at : braces.start()]], [f"{number:0{width}d}" for number in numbers]]
        pieces[-1] += words.split(",") if words is not None else []
        at = braces.end()
    found = list[str]()
    for each in map("".join, itertools.product(*pieces, [path[at:]])):
        if shards.is_remote(each) or Path(each).is_file():
            found.append(each)
        elif glob.has_magic(each):
            found += glob.glob(each)  # noqa: PTH207
        elif pieces:
            raise ValueError(f"{pattern}: {each} is missing; restore it, or change the pattern")
    return sorted(found)


def _by_split(
    files: Sequence[str], spec: str, *, below: Path | None = None
) -> dict[str, list[str]]:
    """Files by the split that begins their name, or the name of their folder `below` another."""
    parts: dict[str, list[str]] = {}
    for file in files:
        folders = () if below is None else Path(file).relative_to(below).parts[:-1]
        told = filter(None, map(shards.split_of, (shards.base_name(file), *reversed(folders))))
        parts.setdefault(next(told, ""), []).append(file)
    if "train" not in parts:
        return {"train": list(files)} if files else {}
    if "" in parts:
        raise ValueError(
            f"{spec}: some names begin with train, but {shards.base_name(parts[''][0])} with none "
            f"of train, val and test; rename it, or give a pattern of the files to train on"
        )
    return {split: parts[split] for split in ("train", "val", "test") if split in parts}


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
        images = sum(map(len, sources.values()))
        labeled_only = sum(
            0 if source.labels is None else int((source.labels >= 0).sum())
            for source in sources.values()
        )
        listed = sum(label != "" for label in table.values())
        if not labeled_only:
            raise ValueError(
                f"{path}: none of the {listed} files that it labels is in {root}, the first is "
                f"{next(filter(table.get, table), 'missing')}; need paths inside the folder, as "
                f"a/b.jpg"
            )
        if labeled_only < max(listed, images):
            warnings.warn(
                f"{path}: labels {listed} files, {labeled_only} of them among the {images} images of "
                f"{root}; the other images are unlabeled",
                stacklevel=3,
            )
    return {**sources}


def train_and_validation(
    spec: str, held_out: float | str, *, seed: int
) -> tuple[Source, Source | None]:
    """What to train on, and the images kept for judging it (None when there are none)."""
    splits = dict(open_source(spec))
    train = splits.pop("train")
    if held_out == "auto":
        if splits:
            return train, same_classes(next(iter(splits.values())), train)
        held_out = 0.1 if train.labels is not None and len(train) >= 100 else "none"
    if held_out in ("none", 0.0):
        return train, None
    if isinstance(held_out, float):
        return split_off(train, held_out, seed=seed)
    if held_out not in splits:
        raise ValueError(
            f"data.validation: {spec} has no split {held_out!r}; it has "
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
