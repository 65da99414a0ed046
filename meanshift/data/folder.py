"""A folder of image files, with class subfolders or flat and unlabeled."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from meanshift.data.decode import SUFFIXES, read_image
from meanshift.data.file_access import DiskTimeout, with_timeout
from meanshift.data.source import Source, file_signature

_ENDINGS = tuple(SUFFIXES)


class FolderSource(Source):
    """Every image below `root`, in the order of their names.

    If all of them lie in two or more subfolders, these are the classes; an image at the top means
    that the subfolders are mere storage and nothing is labeled. A table of labels by path (inside
    `root`, or with `prefix` before it) replaces the names of the subfolders.
    """

    labels: Tensor | None

    def __init__(
        self, root: Path, table: Mapping[str, str] | None = None, prefix: str = ""
    ) -> None:
        self.root = root
        self.name = str(root)
        self.files, others = _find_images(root)
        left_out = by_extension(others)
        if not self.files:
            raise ValueError(
                f"{root}: no image found{left_out and f', but {left_out}'}; need files ending in "
                f"{' '.join(sorted(SUFFIXES))}, at the top or in subfolders"
            )
        if left_out:
            warnings.warn(f"{root}: left out {left_out}: not known as images", stacklevel=4)
        if table is not None:
            self.classes = sorted(set(table.values()) - {""})
            number = {name: i for i, name in enumerate(self.classes)}
            paths = [file.as_posix() for file in self.files]
            names = [table.get(prefix + path, table.get(path, "")) for path in paths]
            self.labels = torch.tensor([number.get(name, -1) for name in names])
            return
        self.classes = []
        self.labels = None
        if len(self.subfolders) > 1:
            self.label_by_subfolder()

    @property
    def subfolders(self) -> list[str]:
        """The folders at the top that hold images; none where an image is at the top itself."""
        names = {file.parts[0] if len(file.parts) > 1 else "" for file in self.files}
        return [] if "" in names else sorted(names)

    def label_by_subfolder(self) -> None:
        """Label each image by the folder at the top that holds it."""
        self.classes = self.subfolders
        number = {name: i for i, name in enumerate(self.classes)}
        self.labels = torch.tensor([number[file.parts[0]] for file in self.files])

    def __len__(self) -> int:
        return len(self.files)

    def title(self, index: int) -> str:
        return self.files[index].as_posix()

    def content_fingerprint(self) -> str:
        content = self.fingerprint() + file_signature([self.root / file for file in self.files])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        return read_image(self.root / self.files[index])


def splits(root: Path) -> dict[str, Path]:
    """The folders of the splits: `train` with `val` or `test` inside, or else the folder itself."""
    inside = {name: root / name for name in ("train", "val", "test") if (root / name).is_dir()}
    if "train" not in inside:
        return {"train": root}
    with os.scandir(root) as entries:
        beside = sorted(
            entry.name
            for entry in entries
            if entry.name not in inside
            and not entry.name.startswith(".")
            and (_is_image(entry.name) or entry.is_dir())
        )
    if beside and len(inside) == 1:  # `train` is a class
        return {"train": root}
    if beside:
        warnings.warn(
            f"{root}: has the splits {', '.join(inside)}; {len(beside)} folders and images beside "
            f"them are left out, the first is {beside[0]}",
            stacklevel=4,
        )
    return inside


def _find_images(root: Path) -> tuple[list[Path], list[str]]:
    """The image files below a folder, sorted, as paths inside it; and the names of other files."""
    images = list[Path]()
    others = list[str]()
    seen = set[tuple[int, int]]()
    repeated = list[Path]()
    unreadable = list[OSError]()
    for folder, identity, files in _walk(root, unreadable):
        inside = folder.relative_to(root)  # once per folder: slow for 100,000 files
        found = [inside / name for name in files if _is_image(name)]
        others += [name for name in files if not _is_image(name) and name != "labels.csv"]
        images += found
        repeated += found if identity in seen else []
        seen.add(identity)
    if repeated:
        warnings.warn(
            f"{root}: links lead to {len(repeated)} images that are in it by another path too, the "
            f"first is {min(repeated)}; they are used once for each path",
            stacklevel=5,
        )
    if unreadable:
        warnings.warn(
            f"{root}: {len(unreadable)} folders cannot be read and are left out; the first is "
            f"{unreadable[0].filename} ({unreadable[0].strerror})",
            stacklevel=5,
        )
    return sorted(images), others


def _walk(
    root: Path, unreadable: list[OSError]
) -> Iterator[tuple[Path, tuple[int, int], list[str]]]:
    """Every folder below a root: its path, its identity, and the names of its files.

    Links are followed. A folder is visited once below each subfolder of the root, first by its
    own path, so that links between classes take no image from a class. The errors of folders that
    cannot be read are added to `unreadable`.
    """
    root_identity = _identity(root)
    subfolders, links, files = _list_folder(root)
    yield root, root_identity, files
    for top in sorted(subfolders + links):
        visited = {root_identity}
        own = [top]
        linked = list[Path]()
        while own or linked:
            folder = own.pop() if own else linked.pop()
            try:
                identity = _identity(folder)
                if identity in visited:
                    continue
                subfolders, links, files = _list_folder(folder)
            except DiskTimeout:
                raise
            except OSError as error:
                unreadable.append(error)
                continue
            visited.add(identity)
            own += subfolders
            linked = sorted([*linked, *links], reverse=True)
            yield folder, identity, files


def _list_folder(folder: Path) -> tuple[list[Path], list[Path], list[str]]:
    """The subfolders, the links to folders and the names of the files in a folder."""
    subfolders = list[Path]()
    links = list[Path]()
    files = list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                subfolders.append(folder / entry.name)
            elif entry.is_symlink() and not _is_image(entry.name) and _leads_to_folder(entry.path):
                links.append(folder / entry.name)
            else:
                files.append(entry.name)
    return subfolders, links, files


def _identity(folder: Path) -> tuple[int, int]:
    """What all paths of a folder have in common."""
    status = with_timeout(folder.stat, folder)
    return status.st_dev, status.st_ino


def _leads_to_folder(link: str) -> bool:
    try:
        return stat.S_ISDIR(with_timeout(Path(link).stat, link).st_mode)
    except DiskTimeout:
        raise
    except OSError:  # it leads nowhere, or to a disk that does not answer
        return False


def _is_image(name: str) -> bool:
    return name.lower().endswith(_ENDINGS)


def by_extension(names: list[str]) -> str:
    """How many files there are of each extension, in words; empty for none."""
    counts = Counter(Path(name).suffix.lower() or "without extension" for name in names)
    listed = [f"{count} {extension}" for extension, count in counts.most_common(8)]
    if len(counts) > 8:
        listed.append(f"others of {len(counts) - 8} extensions")
    return f"{len(names)} other files ({', '.join(listed)})" if names else ""
