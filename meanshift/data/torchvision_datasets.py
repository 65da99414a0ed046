"""torchvision's datasets by name; they are downloaded if there is a network."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from meanshift.data.arrays import ArraySource
from meanshift.data.decode import to_array
from meanshift.data.source import Source, file_signature
from meanshift.data.unreadable import UnreadableSample

# name: (torchvision's class, its arguments for the train split, for the test split)
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
    kind, train_arguments, test_arguments = _DATASETS[name]
    root = Path(os.environ.get("MEANSHIFT_DATA", Path.home() / ".cache" / "meanshift"))
    splits = {"train": adapt(_open(kind, root, train_arguments, name), name)}
    if test_arguments != train_arguments:
        splits["test"] = adapt(_open(kind, root, test_arguments, name), name)
    if name == "stl10":  # its training images have no labels; those with labels are others
        splits["labeled"] = adapt(_open(kind, root, {"split": "train"}, name), name)
    return splits


def load(kind: str, root: Path, **arguments: Any) -> Any:
    """torchvision's dataset of this class and these arguments, as it is under `root`."""
    from torchvision import datasets

    return getattr(datasets, kind)(root, **arguments)


def _open(kind: str, root: Path, arguments: dict[str, Any], name: str) -> Any:
    """Load a dataset, and download it first if it is not there."""
    try:
        try:
            return load(kind, root, download=False, **arguments)
        except RuntimeError:
            root.mkdir(parents=True, exist_ok=True)
            return load(kind, root, download=True, **arguments)
    except Exception as error:  # no network, a full disk, a moved file: all need the same advice
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{name}: not found under {root} and the download failed ({reason}); put torchvision's "
            f"{kind} files there, or set MEANSHIFT_DATA to the folder that has them"
        ) from None


def adapt(dataset: Any, name: str) -> Source:
    """An array source where the dataset is one array, else a source that decodes one by one."""
    pixels = getattr(dataset, "data", None)
    if isinstance(pixels, (np.ndarray, torch.Tensor)):
        targets = getattr(dataset, "targets", getattr(dataset, "labels", None))
        labels = None if targets is None else np.asarray(targets).astype(np.int64)
        labels = None if labels is None or (labels < 0).all() else labels
        classes = getattr(dataset, "classes", None)
        return ArraySource(np.asarray(pixels), labels, name=name, classes=classes)
    return _DecodingSource(dataset, name)


def files_of(dataset: Any) -> list[Path]:
    """The files of a dataset's images in its order; empty where torchvision has no list."""
    names = ("_image_files", "_images", "samples", "_samples")
    lists = (getattr(dataset, name, None) for name in names)
    entries: list[Any] = next(filter(None, lists), [])
    return [Path(entry[0] if isinstance(entry, tuple) else entry) for entry in entries]


class _DecodingSource(Source):
    """A dataset of image files, decoded one by one."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.name = name
        lists = (getattr(dataset, key, None) for key in ("targets", "_labels", "labels"))
        targets = next((labels for labels in lists if labels is not None), None)
        if targets is None and hasattr(dataset, "_samples"):  # StanfordCars
            targets = [int(label) for _, label in dataset._samples]
        self.labels = None if targets is None else torch.as_tensor(targets, dtype=torch.int64)
        count = 0 if self.labels is None else int(self.labels.max()) + 1
        self.classes = list(getattr(dataset, "classes", None) or map(str, range(count)))

    def __len__(self) -> int:
        return len(self.dataset)

    def title(self, index: int) -> str:
        return f"#{index}"

    def content_fingerprint(self) -> str:
        """Titles are only numbers: two splits can have as many images with the same labels."""
        files = files_of(self.dataset)
        content = self.fingerprint() + (file_signature(files) if files else repr(self.dataset))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def read(self, index: int) -> Shaped[Tensor, "channels height width"]:
        try:
            image, _ = self.dataset[index]
            return torch.from_numpy(to_array(image)[0]).permute(2, 0, 1)
        except Exception as error:  # as for files: decoders raise anything
            files = files_of(self.dataset)
            title = str(files[index]) if files else self.title(index)
            raise UnreadableSample(title, f"{type(error).__name__}: {error}") from None
