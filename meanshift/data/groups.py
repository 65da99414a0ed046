"""Groups of images (of a patient, a video, a site), which a split must not divide."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from meanshift.config.schema import check_group
from meanshift.data.file_access import split_name
from meanshift.data.folder import AnyPath, FolderSource, find_table
from meanshift.data.labels import look_up, read_table
from meanshift.data.remote_folder import RemotePath
from meanshift.data.source import Source
from meanshift.runtime import rng
from meanshift.runtime.errors import Note

_KEYS = {  # the arrays of an .npz that hold a group for each image, by split
    "train": ("groups_train", "train_groups", "groups"),
    "val": ("groups_val", "val_groups"),
    "test": ("groups_test", "test_groups"),
}
_ALL = -2  # beside the labels, of which -1 is unknown: all images together
_FULL = 1e9  # a weight beside which no other counts


def assign_groups(spec: str, splits: Mapping[str, Source], rule: str) -> None:
    """Set the `groups` of all splits by the setting `data.group`.

    A group has one number in all splits. An image without a group is a group of its own. Without
    a rule, the groups that the source brings are used: arrays of an .npz, or `groups.csv`.
    """
    check_group(rule)
    if rule == "none":
        for source in splits.values():
            source.groups = None
        return
    names = _given_names(spec, splits) if rule in ("", "array") else _names(spec, splits, rule)
    if not names:
        need = "an .npz with the array groups (or groups_train, groups_test)"
        if rule == "array":
            raise ValueError(f"data.group: got array, but {spec} has no groups; need {need}")
        return
    known = sorted({name for part in names.values() for name in part} - {""})
    number = {name: index for index, name in enumerate(known)}
    own = itertools.count(len(known))
    for split, part in names.items():
        ids = [number[name] if name else next(own) for name in part]
        splits[split].groups = torch.tensor(ids, dtype=torch.int64)
    if not rule:
        note = f"{spec}: its {len(known)} groups are kept whole in splits; --data.group none: not"
        warnings.warn(note, Note, stacklevel=3)
    _report_ungrouped(spec, splits, names, rule)
    _report_leaks(spec, names)


def draw_groups(
    labels: Int[Tensor, " n"], groups: Int[Tensor, " n"], fraction: float, *, seed: int
) -> Bool[Tensor, " n"]:
    """A mask of whole groups with about this fraction of the images, and of those of each class.

    The groups are visited in random order. A group is drawn if it brings the numbers of images
    that are drawn of its classes nearer to the wanted ones (in squares, each divided by the wanted
    number), and if images of each of its classes are left. Two more rounds do the same with the
    number of all images, first with equal and then with full weight, as small classes may give too
    few. If no group is drawn, the one that misses the fraction least is; if no group leaves images
    of all its classes, none is.
    """
    of_image = groups.unique(return_inverse=True)[1].tolist()
    sizes: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for group, label in zip(of_image, labels.tolist(), strict=True):
        sizes[group].update((label, _ALL))
    left = Counter(labels.tolist()) + Counter({_ALL: len(labels)})
    wanted = {label: fraction * size for label, size in left.items()}
    missing = dict(wanted)

    def gain(group: int, weight: float) -> float:
        return sum(
            size * (2 * missing[label] - size) / wanted[label] * (weight if label == _ALL else 1)
            for label, size in sizes[group].items()
        )

    def leaves_all_classes(group: int) -> bool:
        return all(left[label] > size for label, size in sizes[group].items() if label != -1)

    drawn = set[int]()
    order = rng.uniform(seed, 0, torch.arange(len(sizes)), rng.SPLIT, 1)[:, 0].argsort(stable=True)
    for weight, group in itertools.product((0.0, 1.0, _FULL), order.tolist()):
        if group not in drawn and leaves_all_classes(group) and gain(group, weight) > 0:
            drawn.add(group)
            for label, size in sizes[group].items():
                left[label] -= size
                missing[label] -= size
    if not drawn:
        possible = filter(leaves_all_classes, order.tolist())
        drawn = {max(possible, key=lambda group: gain(group, 1.0), default=-1)}
    return torch.tensor([group in drawn for group in of_image], dtype=torch.bool)


def _names(
    spec: str, splits: Mapping[str, Source], rule: str, table_path: AnyPath | None = None
) -> dict[str, list[str]]:
    """The name of each image's group by a rule, empty for none; an error if none has any."""
    kind, _, value = rule.partition(":")
    table: dict[str, str] = {}
    if kind not in ("folder", "re"):
        table_path = table_path or _find_table(_root(spec, splits), rule)
        table = read_table(table_path, "group")

    def name_of(title: str, prefixes: Iterable[str]) -> str:
        if kind == "folder":
            return _folder_at(title, int(value))
        if kind == "re":
            return _match(re.compile(value), title)
        return look_up(table, title, prefixes)

    names: dict[str, list[str]] = {}
    for split, source in splits.items():
        prefixes = source.prefixes if isinstance(source, FolderSource) else (f"{split}/",)
        titles: Iterable[str] = map(source.title, range(len(source)))
        if isinstance(source, FolderSource):
            titles = source.paths
        names[split] = [name_of(title, prefixes) for title in titles]
    if not any(itertools.chain(*names.values())):
        images = sum(map(len, splits.values()))
        raise ValueError(
            f"data.group: {rule} gives none of the {images} images of {spec} a group; the first is "
            f"{next(iter(splits.values())).title(0)}: need a rule for such names, or "
            f"--data.group none"
        )
    return names


def _root(spec: str, splits: Mapping[str, Source]) -> AnyPath:
    """The path of a source, or its address where its folder is at one."""
    train = splits["train"]
    if isinstance(train, FolderSource) and isinstance(train.root, RemotePath):
        return train.root.top
    return Path(spec).expanduser()


def _find_table(root: AnyPath, rule: str) -> AnyPath:
    """The CSV of groups: a path, or else one inside the source, which moves with it."""
    path = Path(rule).expanduser()
    inside = root / path
    if not path.is_file() and not inside.is_file():
        raise ValueError(
            f"data.group: {rule} is no file, neither here nor in {root}; need a CSV with the "
            f"columns file,group"
        )
    return path if path.is_file() else inside


def _folder_at(title: str, level: int) -> str:
    """The name of the folder at a level: 1 is the first, -1 the last; empty if there is none."""
    folders = title.split("/")[:-1]
    return folders[level - 1 if level > 0 else level] if abs(level) <= len(folders) else ""


def _match(pattern: re.Pattern[str], title: str) -> str:
    """What the one group of a pattern matches, or its named group; empty where it is not found."""
    found = pattern.search(title)
    group = next(iter(pattern.groupindex), 1)
    return (found[group] or "") if found else ""


def _given_names(spec: str, splits: Mapping[str, Source]) -> dict[str, list[str]]:
    """The groups that a source brings: its own, those of an .npz, or those of groups.csv."""
    path = _root(spec, splits)
    given = {
        split: list(map(str, source.groups.tolist()))
        for split, source in splits.items()
        if source.groups is not None
    }
    if given:
        return given
    if isinstance(path, Path) and path.suffix == ".npz" and path.is_file():
        return _array_names(path, splits)
    train = splits["train"]
    table = find_table("group", path, train.root) if isinstance(train, FolderSource) else None
    return _names(spec, splits, str(table), table) if table else _stacks(splits)


def _stacks(splits: Mapping[str, Source]) -> dict[str, list[str]]:
    """The stacks and patients of folders; none where no two images have one in common."""
    folders = {
        split: source for split, source in splits.items() if isinstance(source, FolderSource)
    }
    counts = Counter(whole for source in folders.values() for whole in source.wholes if whole)
    if max(counts.values(), default=0) < 2:
        return {}
    return {
        split: [
            f"{split}/{path}" if whole in ("", path) else whole  # files of one name are not one
            for whole, path in zip(source.wholes, source.paths, strict=True)
        ]
        for split, source in folders.items()
    }


def _array_names(path: Path, splits: Mapping[str, Source]) -> dict[str, list[str]]:
    """The groups in the arrays of an .npz: numbers or texts, one for each image."""
    names: dict[str, list[str]] = {}
    with np.load(path) as arrays:
        for split, source in splits.items():
            key = next((key for key in _KEYS.get(split, ()) if key in arrays.files), None)
            if key is None:
                continue
            groups = arrays[key]
            if groups.shape != (len(source),) or groups.dtype.kind not in "iuUS":
                raise ValueError(
                    f"{path}: {key} has the shape {groups.shape} and type {groups.dtype} for "
                    f"{len(source)} images; need an integer or a text for each image"
                )
            names[split] = list(map(str, groups.tolist()))
    return names


def _report_ungrouped(
    spec: str, splits: Mapping[str, Source], names: Mapping[str, list[str]], rule: str
) -> None:
    alone = [
        (split, index)
        for split, part in names.items()
        for index, name in enumerate(part)
        if not name
    ]
    if alone:
        split, index = alone[0]
        images = sum(map(len, names.values()))
        warnings.warn(
            f"{spec}: {len(alone)} of {images} images have no group ({rule or 'groups.csv'}), the "
            f"first is {splits[split].title(index)}; each counts as a group of its own",
            stacklevel=4,
        )


def _report_leaks(spec: str, names: Mapping[str, list[str]]) -> None:
    """Warn of groups with images in several splits; `train_small` is a part of `train`."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for split, part in names.items():
        for name in set(part) - {""}:
            found[name].add(split_name(split) or split)
    leaks = sorted(name for name, inside in found.items() if len(inside) > 1)
    if leaks:
        more = ", ..." if len(leaks) > 3 else ""
        warnings.warn(
            f"{spec}: {len(leaks)} of {len(found)} groups have images in more than one of "
            f"{', '.join(names)} ({', '.join(leaks[:3])}{more}); results on them are too good: "
            f"move each group to one split",
            stacklevel=4,
        )
