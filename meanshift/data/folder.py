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

    When all of them lie in two or more subfolders, those are the classes; an image at the top
    means that the subfolders are mere storage and nothing is labeled. A table of labels by path
    (inside `root`, or with `prefix` before it) takes the place of the subfolders' names.
    """

    labels: Tensor | None

    def __init__(
        self, root: Path, table: Mapping[str, str] | None = None, prefix: str = ""
    ) -> None:
        self.root, self.name = root, str(root)
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
            told = [table.get(prefix + path, table.get(path, "")) for path in paths]
            self.labels = torch.tensor([number.get(label, -1) for label in told])
            return
        tops = [file.parts[0] if len(file.parts) > 1 else "" for file in self.files]
        names = sorted(set(tops))
        self.classes = names if "" not in names and len(names) > 1 else []
        index = {name: i for i, name in enumerate(names)}
        self.labels = torch.tensor([index[top] for top in tops]) if self.classes else None

    def __len__(self) -> int:
        return len(self.files)

    def title(self, index: int) -> str:
        return self.files[index].as_posix()

    def contents(self) -> str:
        told = self.fingerprint() + file_signature([self.root / file for file in self.files])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        return read_image(self.root / self.files[index])


def splits(root: Path) -> dict[str, Path]:
    """A folder with `train` and a `val` or `test` inside is those splits; otherwise it is one."""
    inside = {name: root / name for name in ("train", "val", "test") if (root / name).is_dir()}
    beside = [held.name for held in root.iterdir() if not held.name.startswith(".")]
    alone = set(beside) <= {"train", "labels.csv"}
    return inside if "train" in inside and (len(inside) > 1 or alone) else {"train": root}


def _images(root: Path) -> list[Path]:
    found, seen, endings = [], set[str](), tuple(SUFFIXES)
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        inside = Path(folder).relative_to(root)  # once a folder: of 100,000 files it would be felt
        for name in files:
            if name.lower().endswith(endings) and not name.startswith("."):
                found.append(inside / name)
    return found
