"""torchvision's datasets by name; they download themselves where there is a network."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from meanshift.data.arrays import ArraySource
from meanshift.data.decode import to_rgb
from meanshift.data.source import Source, UnreadableSample, file_signature

# name: (torchvision's class, its arguments for training, for judging)
_DATASETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mnist": ("MNIST", {"train": True}, {"train": False}),
    "fashion-mnist": ("FashionMNIST", {"train": True}, {"train": False}),
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "stl10": ("STL10", {"split": "unlabeled"}, {"split": "test"}),
    "food101": ("Food101", {"split": "train"}, {"split": "test"}),
    "flowers102": ("Flowers102", {"split": "train"}, {"split": "test"}),
    "pets": ("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}),
    "dtd": ("DTD", {"split": "train"}, {"split": "test"}),
    "aircraft": ("FGVCAircraft", {"split": "trainval"}, {"split": "test"}),
    "eurosat": ("EuroSAT", {}, {}),
}
NAMES = tuple(_DATASETS)


def read_named(name: str) -> dict[str, Source]:
    """The splits of a torchvision dataset under `MEANSHIFT_DATA` (default `~/.cache/meanshift`)."""
    kind, *arguments = _DATASETS[name]
    root = Path(os.environ.get("MEANSHIFT_DATA", Path.home() / ".cache" / "meanshift"))
    found: dict[str, Source] = {}
    for split, given in zip(("train", "test"), arguments, strict=True):
        if split == "test" and given == arguments[0]:
            break
        found[split] = adapt(_open(kind, root, given, name), name)
    if name == "stl10":  # its images to train on have no labels; those with labels are others
        found["labeled"] = adapt(_open(kind, root, {"split": "train"}, name), name)
    return found


def load(kind: str, root: Path, **given: Any) -> Any:
    """torchvision's dataset of this class and these arguments, as it lies under `root`."""
    from torchvision import datasets

    return getattr(datasets, kind)(root, **given)


def _open(kind: str, root: Path, given: dict[str, Any], name: str) -> Any:
    try:
        try:
            return load(kind, root, download=False, **given)
        except RuntimeError:
            root.mkdir(parents=True, exist_ok=True)
            return load(kind, root, download=True, **given)
    except Exception as error:  # no network, a full disk, a moved file: all need the same advice
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{name}: not found under {root} and the download failed ({reason}); put torchvision's "
            f"{kind} files there, or set MEANSHIFT_DATA to the folder that holds them"
        ) from None


def adapt(dataset: Any, name: str) -> Source:
    """An array source where the dataset is one array, else a source that decodes one by one."""
    pixels = getattr(dataset, "data", None)
    if isinstance(pixels, (np.ndarray, torch.Tensor)):
        raw = getattr(dataset, "targets", getattr(dataset, "labels", None))
        labels = None if raw is None else np.asarray(raw).astype(np.int64)
        labels = None if labels is None or (labels < 0).all() else labels
        classes = getattr(dataset, "classes", None)
        return ArraySource(np.asarray(pixels), labels, name=name, classes=classes)
    return _DecodingSource(dataset, name)


def files_of(dataset: Any) -> list[Path]:
    """The files of a dataset's images in its order; none where torchvision keeps no list."""
    keys = ("_image_files", "_images", "samples", "_samples")
    held: list[Any] = next((found for key in keys if (found := getattr(dataset, key, None))), [])
    return [Path(file[0] if isinstance(file, tuple) else file) for file in held]


class _DecodingSource(Source):
    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name
        held = [getattr(dataset, key, None) for key in ("targets", "_labels", "labels")]
        raw = next((labels for labels in held if labels is not None), None)
        if raw is None and hasattr(dataset, "_samples"):  # StanfordCars
            raw = [int(label) for _, label in dataset._samples]
        self.labels = None if raw is None else torch.as_tensor(raw, dtype=torch.int64)
        count = 0 if self.labels is None else int(self.labels.max()) + 1
        self.classes = list(getattr(dataset, "classes", None) or map(str, range(count)))

    def __len__(self) -> int:
        return len(self.dataset)

    def title(self, index: int) -> str:
        return f"#{index}"

    def contents(self) -> str:
        """Numbers are no names: two splits can have as many images with the same labels."""
        files = files_of(self.dataset)
        told = file_signature(files) if files else repr(self.dataset)
        return hashlib.sha256((self.fingerprint() + told).encode()).hexdigest()[:16]

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        try:
            image, _ = self.dataset[index]
            return torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1)
        except Exception as error:  # as for files: decoders raise anything
            files = files_of(self.dataset)
            title = str(files[index]) if files else self.title(index)
            raise UnreadableSample(title, f"{type(error).__name__}: {error}") from None
