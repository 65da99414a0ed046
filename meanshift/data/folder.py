"""A folder of files of images or signals, with class subfolders or flat and unlabeled."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor

from meanshift.data import signals
from meanshift.data.decode import SUFFIXES, read_image
from meanshift.data.file_access import DiskTimeout, is_split_name, split_name, with_timeout
from meanshift.data.labels import is_table, look_up
from meanshift.data.remote_folder import RemotePath
from meanshift.data.signals import common_rate, read_signal
from meanshift.data.source import Source, file_signature
from meanshift.data.stacks import find_images, hold_volumes

_ENDINGS = tuple(SUFFIXES)
_SIGNAL_ENDINGS = tuple(signals.SUFFIXES)
AnyPath = Path | RemotePath
"""a file or a folder, on a disk or at an address"""
TABLES = ("labels.csv", "groups.csv")
"""files that are no images and belong to a folder"""


class FolderSource(Source):
    """Every image below `root`, in the order of their names.

    If all of them lie in two or more subfolders, these are the classes; an image at the top means
    that the subfolders are mere storage and nothing is labeled. A table of labels by path (inside
    `root`, or with one of `prefixes` before it) replaces the names of the subfolders.
    """

    labels: Tensor | None

    def __init__(
        self,
        root: AnyPath,
        table: Mapping[str, str] | None = None,
        prefixes: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.prefixes = prefixes
        self.name = str(root)
        self.files, others = _find_files(root, _ENDINGS)
        if not self.files and any(name.lower().endswith(_SIGNAL_ENDINGS) for name in others):
            self.files, others = _find_files(root, _SIGNAL_ENDINGS)
            self.kind = "image" if hold_volumes(root, self.files) else "signal"
        left_out = by_extension(others)
        if not self.files:
            raise ValueError(
                f"{root}: no image found{left_out and f', but {left_out}'}; need files ending in "
                f"{' '.join(sorted(SUFFIXES))}, or signals ({' '.join(sorted(signals.SUFFIXES))}), "
                f"at the top or in subfolders"
            )
        if left_out:
            warnings.warn(f"{root}: left out {left_out}: not known as {self.kind}s", stacklevel=4)
        images = find_images(root, self.files)
        self.files = [image.file for image in images]
        self.pages = [image.page for image in images]
        self.wholes = [image.whole for image in images]
        """the stack or the patient that each image belongs to; empty for none"""
        if self.kind == "signal":  # files of another sampling rate count as unreadable
            self.sampling_rate = common_rate([root / file for file in self.files])
        if table is not None:
            self.classes = sorted(set(table.values()) - {""})
            number = {name: i for i, name in enumerate(self.classes)}
            names = [
                look_up(table, self.title(index), prefixes) or look_up(table, path, prefixes)
                for index, path in enumerate(self.paths)
            ]
            self.labels = torch.tensor([number.get(name, -1) for name in names])
            return
        self.classes = []
        self.labels = None
        if len(self.subfolders) > 1:
            self.label_by_subfolder()

    @property
    def paths(self) -> list[str]:
        """The file of each image, inside the folder."""
        return [file.as_posix() for file in self.files]

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
        file, page = self.files[index].as_posix(), self.pages[index]
        return file if page < 0 else f"{file}#{page}"

    def content_fingerprint(self) -> str:
        files = list(dict.fromkeys(self.files))
        if isinstance(self.root, RemotePath):
            signature = self.root.signature(files)
        else:
            signature = file_signature([self.root / file for file in files])
        return hashlib.sha256((self.fingerprint() + signature).encode()).hexdigest()[:16]

    def prefetch(self, indices: Sequence[int]) -> None:
        if isinstance(self.root, RemotePath):
            self.root.prefetch([self.files[index] for index in indices])

    def read(self, index: int) -> Shaped[Tensor, "channels *size"]:
        file = self.root / self.files[index]
        if self.kind == "signal":
            return read_signal(file, rate=self.sampling_rate)
        return read_image(file, page=max(0, self.pages[index]))


def splits(root: AnyPath) -> dict[str, AnyPath]:
    """The folders of the splits: `train` with `val` or `test` inside, or else the folder itself.

    Other spellings (Training, Valid) count too, and a single folder may hold them, as archives do.
    """
    inside, beside = _split_folders(root)
    if "train" in inside and (len(inside) > 1 or not beside):  # else `train` is a class
        if beside:
            warnings.warn(
                f"{root}: has the splits {', '.join(inside)}; {len(beside)} folders and images "
                f"beside them are left out, the first is {beside[0]}",
                stacklevel=4,
            )
        return inside
    only = root / beside[0] if len(beside) == 1 and not inside else root
    is_link = isinstance(only, Path) and only.is_symlink()  # it may lead back
    if only != root and only.is_dir() and not is_link:
        deeper = splits(only)
        if len(deeper) > 1:
            return deeper
    return {"train": root}


def _split_folders(root: AnyPath) -> tuple[dict[str, AnyPath], list[str]]:
    """The folders that are named as splits, and the names of other folders and images, sorted."""
    folders, files = root.entries() if isinstance(root, RemotePath) else _entries(root)
    images = filter(_is_image, files)
    inside: dict[str, AnyPath] = {}
    for split in ("train", "val", "test"):
        named = [name for name in folders if is_split_name(name) and split_name(name) == split]
        if named:
            inside[split] = root / min(named, key=lambda name: (name != split, name))
    used = {path.name for path in inside.values()}
    return inside, sorted({*folders, *images} - used)


def _entries(root: Path) -> tuple[list[str], list[str]]:
    """The names of the folders, also linked ones, and of the files in a folder."""
    folders = list[str]()
    files = list[str]()
    with os.scandir(root) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                (folders if entry.is_dir() else files).append(entry.name)
    return folders, files


def find_table(column: str, root: AnyPath, train: AnyPath) -> AnyPath | None:
    """The `labels.csv` or `groups.csv` at the top of a folder, or beside its splits."""
    for top in dict.fromkeys((root, root if train == root else train.parent)):
        path = top / f"{column}s.csv"
        if path.is_file() and is_table(path, column):
            return path
    return None


def _find_files(root: AnyPath, endings: tuple[str, ...]) -> tuple[list[Path], list[str]]:
    """The files below a folder that end so, sorted, as paths inside it; and the names of others."""
    images = list[Path]()
    others = list[str]()
    seen = set[tuple[int, int] | str]()
    repeated = list[Path]()
    unreadable = list[OSError]()
    for inside, identity, files in _folders(root, unreadable):
        fitting = [name for name in files if name.lower().endswith(endings)]
        found = [inside / name for name in fitting]
        others += sorted({*files} - {*fitting, *TABLES})
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


def _folders(
    root: AnyPath, unreadable: list[OSError]
) -> Iterator[tuple[Path, tuple[int, int] | str, list[str]]]:
    """Every folder below a root: its path inside, its identity, and the names of its files."""
    if isinstance(root, RemotePath):
        for remote_folder, files in root.walk():
            yield Path(remote_folder.relative_to(root)), str(remote_folder), files
        return
    for folder, identity, files in _walk(root, unreadable):
        yield folder.relative_to(root), identity, files  # once per folder: slow for each file


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
