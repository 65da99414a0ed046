"""Open a SOURCE: find out what a specification means and return its splits."""

from __future__ import annotations

import glob
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meanshift.data import (
    arrays,
    file_access,
    folder,
    huggingface,
    packed,
    parquet,
    sample,
    shards,
    torchvision_datasets,
)
from meanshift.data.file_access import (
    LocalFile,
    base_name,
    is_http,
    is_remote,
    is_split_name,
    split_name,
)
from meanshift.data.folder import AnyPath, FolderSource
from meanshift.data.groups import assign_groups
from meanshift.data.in_memory import IN_MEMORY
from meanshift.data.labels import read_table
from meanshift.data.remote import find_remote, open_remote
from meanshift.data.remote_folder import list_remote
from meanshift.data.source import Source
from meanshift.runtime.errors import Note
from meanshift.runtime.extras import require

SourceSpec = str | Mapping[str, Source]
"""a SOURCE: what a user types, or splits that are open already, as those of samples in memory"""


def source_name(spec: SourceSpec) -> str:
    """What messages call a SOURCE."""
    return spec if isinstance(spec, str) else spec["train"].name


def open_source(
    spec: SourceSpec, *, labels: Path | None = None, group: str = ""
) -> Mapping[str, Source]:
    """The splits of a SOURCE by name; the first is the one to train on.

    The labels of a folder are the names of its subfolders, or those of a CSV (`file,label`): the
    given one, or `labels.csv` at its top. `group` is the setting `data.group`.

    >>> open_source("photos/")["train"]
    """
    splits = _open(spec, labels)
    if group or isinstance(spec, str):
        assign_groups(source_name(spec), splits, group)
    return splits


def _open(spec: SourceSpec, labels: Path | None) -> Mapping[str, Source]:
    if not isinstance(spec, str):
        if labels is not None:
            raise ValueError(f"{labels}: a CSV of labels is for folders, not for samples in memory")
        return spec
    if spec == IN_MEMORY:
        raise ValueError(
            "the samples of this run were in the memory of a Python program; need them again: "
            "--data SOURCE of a saved copy, or meanshift.evaluate(model, data=SAMPLES)"
        )
    if not spec:  # as a path it would be the current folder
        raise ValueError(
            "no images are named; type --data SOURCE: a folder of images, an .npz file, a named "
            "dataset such as cifar10, or sample for the shipped images"
        )
    if is_remote(spec):
        return _open_remote(spec, labels)
    path = Path(spec).expanduser()
    from_hub = spec.startswith(("hf:", "hf+stream:"))
    if file_access.with_timeout(path.is_dir, path) and spec != "sample" and not from_hub:
        splits = packed.read_packed(path) or _open_shard_folder(path, spec)
        if splits is None:
            return _open_folder(path, labels)
        if labels is None:
            return splits
    if labels is not None:
        raise ValueError(f"{labels}: a CSV of labels is for folders of images, not for {spec}")
    if spec == "sample":
        return sample.read_sample()
    if from_hub:
        return _open_streamed(spec) if spec.startswith("hf+stream:") else _open_mapped(spec)
    if splits := _open_shards(spec):
        return splits
    if path.suffix in (".npy", ".npz") and path.is_file():
        return arrays.read_arrays(path)
    if path.suffix == ".parquet" and path.is_file():
        return parquet.read_vectors(path)
    if spec.lower() in torchvision_datasets.NAMES:
        return torchvision_datasets.read_named(spec.lower())
    found = "neither .npz nor .npy nor .parquet nor .tar" if path.exists() else "nothing there"
    raise ValueError(
        f"{spec}: {found}; need a folder of images or signals, an .npz or .npy file, vectors in a "
        f".parquet file, tar shards (a folder, photos-*.tar, "
        f"https://host/photos-{{000..012}}.tar), a folder at an address (s3://bucket/photos), a "
        f"Hugging Face dataset (hf:NAME, "
        f"hf:PATH, hf+stream:NAME, hf+stream:FILES.parquet), `sample`, or one of "
        f"{', '.join(torchvision_datasets.NAMES)}"
    )


def _open_remote(spec: str, labels: Path | None) -> dict[str, Source]:
    """The splits of shards or of a folder at an address."""
    splits = _open_shards(spec)
    if splits is None:
        root = list_remote(spec)
        splits = _open_shard_folder(root, spec)
        if splits is None:
            return _open_folder(root, labels)
    if labels is not None:
        raise ValueError(f"{labels}: a CSV of labels is for folders of images, not for {spec}")
    return splits


def _open_folder(root: AnyPath, labels: Path | None) -> dict[str, Source]:
    """The splits of a folder of images, labeled by its subfolders or by a CSV."""
    parts = folder.splits(root)
    table_path: AnyPath | None = labels or folder.find_table("label", root, parts["train"])
    table = None if table_path is None else read_table(table_path)
    sources = {
        name: FolderSource(part, table, _prefixes(root, name, part)) for name, part in parts.items()
    }
    for source in sources.values():
        source.sampling_rate = sources["train"].sampling_rate or source.sampling_rate
    if any(part not in (root, root / name) for name, part in parts.items()):
        listed = (
            f"{sources[name].prefixes[0]} is {name} ({len(sources[name])} images)" for name in parts
        )
        note = f"{root}: its folders are taken as splits, not as classes: {', '.join(listed)}"
        warnings.warn(note, Note, stacklevel=4)
    if table is None:
        _label_single_classes(sources)
    else:
        assert table_path is not None
        _refuse_ambiguous(table_path, table, sources)
        _check_coverage(table_path, table, sources, root)
    return {**sources}


def _prefixes(root: AnyPath, split: str, part: AnyPath) -> list[str]:
    """What a CSV may write in front of the files of a split: the path, or the split's name."""
    if part == root:
        return []
    inside = part.relative_to(root)  # type: ignore[arg-type]  # both are of one kind
    return [f"{name}/" for name in (inside.as_posix(), part.name, split)]


def _label_single_classes(sources: Mapping[str, FolderSource]) -> None:
    """Label a split with a single subfolder that is a class of another split."""
    known = {name for source in sources.values() for name in source.classes}
    for source in sources.values():
        if source.labels is None and known.issuperset(source.subfolders or {""}):
            source.label_by_subfolder()


def _refuse_ambiguous(
    table_path: AnyPath, table: Mapping[str, str], sources: Mapping[str, FolderSource]
) -> None:
    """Refuse a table that names a file of several splits without saying which split it means."""
    without_split = Counter(
        title
        for source in sources.values()
        for title in set(source.paths)
        if title in table and not any(prefix + title in table for prefix in source.prefixes)
    )
    ambiguous = next((title for title, count in without_split.items() if count > 1), None)
    if ambiguous is not None:
        raise ValueError(
            f"{table_path}: {ambiguous} is in more than one of {', '.join(sources)}; write the "
            f"split's name in front, as {sources['train'].prefixes[0]}{ambiguous}"
        )


def _check_coverage(
    table_path: AnyPath,
    table: Mapping[str, str],
    sources: Mapping[str, FolderSource],
    root: AnyPath,
) -> None:
    """Refuse a table that labels no image of the folder; warn of one that labels only some."""
    images = sum(map(len, sources.values()))
    labeled = sum(
        int((source.labels >= 0).sum()) for source in sources.values() if source.labels is not None
    )
    listed = sum(label != "" for label in table.values())
    if not labeled:
        raise ValueError(
            f"{table_path}: none of the {listed} files that it labels is in {root}, the first is "
            f"{next(filter(table.get, table), 'missing')}; need paths inside the folder, as "
            f"a/b.jpg"
        )
    if labeled < max(listed, images):
        warnings.warn(
            f"{table_path}: labels {listed} files, {labeled} of them among the {images} images of "
            f"{root}; the other images are unlabeled",
            stacklevel=4,
        )


def _open_shards(spec: str) -> dict[str, Source] | None:
    """The splits of a file, pattern or address of shards; None where it is none of them."""
    if not base_name(spec).endswith((".tar", *shards.COMPRESSED)):
        return None
    return _shard_splits(_by_split(_matching(spec), spec), spec)


def _open_shard_folder(root: AnyPath, spec: str) -> dict[str, Source] | None:
    """The splits of a folder of shards; None where it is none."""
    return _shard_splits(_by_split(shards.shards_in_folder(root), spec, below=str(root)), spec)


def _shard_splits(splits: Mapping[str, Sequence[str]], spec: str) -> dict[str, Source] | None:
    return {split: shards.ShardSource(files, name=spec) for split, files in splits.items()} or None


def _open_mapped(spec: str) -> dict[str, Source]:
    """The splits of what the `datasets` library opens."""
    opened = _load_dataset(spec)
    from datasets import concatenate_datasets

    parts = dict(opened) if isinstance(opened, dict) else {"train": opened}
    by_split = _group_by_split({name: name for name in parts})
    if len(by_split) == 1:
        by_split = {"train": list(parts)}
    if "train" not in by_split:
        raise ValueError(f"{spec}: has the splits {', '.join(parts)}; need one named train")
    return {
        split: huggingface.HubSource(
            concatenate_datasets([parts[name] for name in names]), name=spec
        )
        for split, names in by_split.items()
    }


def _load_dataset(spec: str) -> Any:
    """The dataset, or dictionary of datasets, behind `hf:NAME`, `hf:NAME:CONFIG` or `hf:PATH`."""
    require("datasets", extra="huggingface", what=f"{spec}: Hugging Face datasets")
    import datasets

    rest = spec.partition(":")[2]
    path = Path(rest).expanduser()
    try:
        if any((path / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(str(path))
        if files := _parquet_files(spec):
            return datasets.load_dataset("parquet", data_files=files)
        if path.exists():
            raise ValueError("neither written by save_to_disk nor Parquet")
        name, _, config = rest.partition(":")
        return datasets.load_dataset(name, config or None)
    except Exception as error:  # no network, no such dataset, several configs, damaged files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{spec}: could not be opened ({reason}); need hf:NAME or hf:NAME:CONFIG of a dataset, "
            f"or the path of a folder written by save_to_disk or of Parquet files"
        ) from None


def _open_streamed(spec: str) -> dict[str, Source]:
    """The splits of Parquet files on a disk, at an address or on the Hub, read by row group."""
    rest = spec.partition(":")[2]
    splits = _parquet_files(spec)
    if not splits:
        if is_remote(rest) or rest.endswith(".parquet") or Path(rest).expanduser().exists():
            raise ValueError(f"{spec}: no Parquet file there; need files that end in .parquet")
        name, _, config = rest.partition(":")
        files = huggingface.hub_files(name, config, spec)
        splits = _by_split(files, spec, below=f"hf://datasets/{name}")
    return {
        split: huggingface.StreamedSource(
            open_remote(files) if is_remote(files[0]) else list(map(LocalFile, files)), name=spec
        )
        for split, files in splits.items()
    }


def _parquet_files(spec: str) -> dict[str, list[str]]:
    """Parquet files by split, of a path, a pattern or an address; empty where there are none."""
    rest = spec.partition(":")[2]
    if base_name(rest).endswith(".parquet") and not Path(rest).expanduser().is_dir():
        return _by_split(_matching(rest), spec)
    if is_remote(rest):
        remote_root = list_remote(rest)
        walked = ((folder, name) for folder, names in remote_root.walk() for name in names)
        files = [str(folder / name) for folder, name in walked if name.endswith(".parquet")]
        return _by_split(sorted(files), spec, below=str(remote_root))
    root = Path(rest).expanduser()
    files = sorted(str(file) for file in root.rglob("*.parquet")) if root.is_dir() else []
    return _by_split(files, spec, below=str(root))


def _matching(pattern: str) -> list[str]:
    """The files that a path, an address, or a pattern of either means; empty where none exists.

    `{000..012}` and `{a,b}` mean what they mean to a shell; `*` and the like find files, at an
    address only where its server lists them.
    """
    path = pattern if is_remote(pattern) else str(Path(pattern).expanduser())
    if Path(path).is_file():
        return [path]
    expanded = _expand_braces(path, pattern)
    found = list[str]()
    for file in expanded:
        if is_remote(file):
            found += _matching_remote(file, pattern)
        elif Path(file).is_file():
            found.append(file)
        elif glob.has_magic(file):
            found += glob.glob(file)  # noqa: PTH207
        elif expanded != [path]:
            raise ValueError(f"{pattern}: {file} is missing; restore it, or change the pattern")
    return sorted(found)


def _matching_remote(address: str, pattern: str) -> list[str]:
    if not re.search(r"[*\[]" if is_http(address) else r"[*?\[]", address):  # http: `?` is a query
        return [address]
    found = find_remote(address)
    if not found:
        raise ValueError(
            f"{pattern}: no file matches, or its server lists no files; check the pattern, or "
            f"name the files as photos-{{000..012}}.tar"
        )
    return found


def _expand_braces(path: str, pattern: str) -> list[str]:
    """Every path that `{000..012}` and `{a,b}` in a path give; `pattern` is what the user typed."""
    pieces = list[list[str]]()
    start = 0
    for braces in re.finditer(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", path):
        first, last, words = braces.groups()
        pieces.append([path[start : braces.start()]])
        if words is not None:
            pieces.append(words.split(","))
        else:
            if not 0 <= int(last) - int(first) < 100_000:
                raise ValueError(f"{pattern}: need a range of 1 to 100000 files, as {{000..012}}")
            width = len(first) if first.startswith("0") else 0
            pieces.append([f"{n:0{width}d}" for n in range(int(first), int(last) + 1)])
        start = braces.end()
    return ["".join(parts) for parts in itertools.product(*pieces, [path[start:]])]


def _by_split(files: Sequence[str], spec: str, *, below: str | None = None) -> dict[str, list[str]]:
    """Files by the split that begins their name, or the name of one of their folders `below`."""
    names = dict[str, str]()
    for file in files:
        folders = [] if below is None else file.removeprefix(below).split("/")[:-1]
        parts = (base_name(file), *reversed(folders))
        name = next(filter(split_name, parts), "")
        stem = re.split(r"[-_.]?\d|\.", name)[0]  # train-00000-of-00002.parquet: train
        names[file] = re.sub(r"\W", "_", stem)
    splits = _group_by_split(names)
    if "train" not in splits:
        return {"train": list(files)} if files else {}
    if "" in splits:
        raise ValueError(
            f"{spec}: some names begin with train, but {base_name(splits[''][0])} with none "
            f"of train, val and test; rename it, or give a pattern of the files to train on"
        )
    return splits


def _group_by_split(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Keys by the split that begins their names; train, val and test come first.

    Beside a plain `train`, a name such as `train_small` is a split of its own.
    """
    plain = {split_name(name) for name in names.values() if is_split_name(name)}
    splits: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for key, name in names.items():
        split = split_name(name)
        if split is None or (split in plain and not is_split_name(name)):
            split = name
        splits.setdefault(split, []).append(key)
    return {split: keys for split, keys in splits.items() if keys}
