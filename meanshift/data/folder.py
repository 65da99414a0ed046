"""A folder of image files, with class subfolders or flat and unlabeled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from meanshift.data.decode import SUFFIXES, read_image
from meanshift.data.source import Source, file_signature


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
        self.files = sorted(_images(root))
        if not self.files:
            raise ValueError(
                f"{root}: no image found; need files ending in {' '.join(sorted(SUFFIXES))}, "
                f"at the top or in subfolders"
            )
        if table is not None:
            self.classes = sorted(set(table.values()) - {""})
            number = {name: i for i, name in enumerate(self.classes)}
            paths = [file.as_posix() for file in self.files]
            names = [table.get(prefix + path, table.get(path, "")) for path in paths]
            self.labels = torch.tensor([number.get(name, -1) for name in names])
            return
        subfolders = [file.parts[0] if len(file.parts) > 1 else "" for file in self.files]
        names = sorted(set(subfolders))
        self.classes = names if "" not in names and len(names) > 1 else []
        number = {name: i for i, name in enumerate(names)}
        self.labels = torch.tensor([number[name] for name in subfolders]) if self.classes else None

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
    names = {path.name for path in root.iterdir() if not path.name.startswith(".")}
    only_train = names <= {"train", "labels.csv"}
    return inside if "train" in inside and (len(inside) > 1 or only_train) else {"train": root}


def _images(root: Path) -> list[Path]:
    """The image files below a folder, as paths inside it."""
    found = []
    visited = set[str]()
    endings = tuple(SUFFIXES)
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # a link that leads back
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        inside = Path(folder).relative_to(root)  # once per folder: slow for 100,000 files
        for name in files:
            if name.lower().endswith(endings) and not name.startswith("."):
                found.append(inside / name)
    return found
