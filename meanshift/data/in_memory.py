"""Samples that a Python program holds: lists of files, PIL images and arrays, torch Datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from meanshift.config.samples import Kind
from meanshift.data.arrays import ArraySource
from meanshift.data.decode import as_channels_first, read_image, to_array
from meanshift.data.signals import SUFFIXES as SIGNAL_SUFFIXES
from meanshift.data.signals import common_rate, read_signal
from meanshift.data.source import Source, file_signature
from meanshift.data.unreadable import UnreadableSample
from meanshift.runtime.progress import progress

IN_MEMORY = "in-memory"
"""what config.json of a run has as `data.source`: its samples were given in Python"""

_SAMPLES = "a path, a PIL image, a numpy array or a tensor"
_FINGERPRINT_SAMPLES = 256


def as_source(
    data: Any, labels: Any = None, *, name: str = IN_MEMORY, kind: Kind | None = None
) -> Source:
    """A source of samples in memory; `labels` has one number or class name for each.

    An array (n, ...), a list of arrays of one shape, and a `TensorDataset` become an `ArraySource`.
    Arrays of two dimensions are vectors, other ones images, unless a `kind` is given.
    """
    if isinstance(data, Source):
        if labels is not None:
            raise ValueError(f"{data.name}: a source has its own labels; leave y out")
        return data
    if isinstance(data, TensorDataset):
        tensors = data.tensors
        if labels is None and len(tensors) > 1 and _is_class(tensors[1][:1].squeeze()):
            labels = tensors[1]
        data = tensors[0]
    if isinstance(data, Iterator):
        data = list(data)
    if hasattr(data, "tolist") and not is_array(data):  # a column of paths
        data = data.tolist()
    stack: np.ndarray | None
    if is_array(data):
        stack = _as_array(data)
    elif isinstance(data, (Sequence, Dataset)) and not isinstance(data, (str, IterableDataset)):
        if not len(data):  # type: ignore[arg-type]
            raise ValueError(f"{name}: got no samples; need at least one")
        stack = _stack(data)
    else:
        raise TypeError(
            f"got {type(data).__name__}; need a folder or another SOURCE as text, a list of "
            f"samples (each {_SAMPLES}), an array (n, ...), or a torch Dataset with a length"
        )
    if stack is None:
        return SampleSource(data, labels, name=name, kind=kind)
    numbers, classes = _numbered(labels, len(stack), name)
    return ArraySource(stack, numbers, name=name, classes=classes, kind=kind)


class SampleSource(Source):
    """The samples of a list, or of a torch Dataset, whose items may also be (sample, label).

    The labels of a Dataset are its `targets`, or those of its items, which are then all read once.
    """

    def __init__(
        self,
        samples: Sequence[Any] | Dataset[Any],
        labels: Any = None,
        *,
        name: str = IN_MEMORY,
        kind: Kind | None = None,
    ) -> None:
        self.name = name
        self.kind = kind or "image"
        self.samples: Any = samples
        self.size = len(samples)  # type: ignore[arg-type]
        if isinstance(samples, Dataset):
            self._check_first()
            labels = self._labels_of_items() if labels is None else labels
        else:
            self.samples = [prepare(each, f"#{i}", kind) for i, each in enumerate(samples)]
            if kind is None and all(map(_is_sound, self.samples)):
                self.kind = "signal"
            if self.kind == "signal":
                files = [each.expanduser() for each in self.samples if isinstance(each, Path)]
                self.sampling_rate = common_rate(files)
        numbers, classes = _numbered(labels, self.size, name)
        self.labels = None if numbers is None else torch.from_numpy(numbers)
        self.classes = classes or []

    def __len__(self) -> int:
        return self.size

    def title(self, index: int) -> str:
        is_path = isinstance(self.samples, list) and isinstance(self.samples[index], Path)
        return str(self.samples[index]) if is_path else f"#{index}"

    def read(self, index: int) -> Shaped[Tensor, "channels *size"]:
        title = self.title(index)
        try:
            sample = self.samples[index]
            if not isinstance(self.samples, list):
                sample = prepare(_without_label(sample), title, self.kind)
        except Exception as error:  # whatever the Dataset of a user raises
            raise UnreadableSample(title, f"{type(error).__name__}: {error}") from None
        if isinstance(sample, Path) and self.kind == "signal":
            return read_signal(sample.expanduser(), rate=self.sampling_rate)
        if isinstance(sample, Path):
            return read_image(sample.expanduser(), title=title)
        return _image_values(sample) if isinstance(sample, Image.Image) else sample.read(0)

    def fingerprint(self) -> str:
        """Titles of samples in memory are only numbers, so some hundred are read as well."""
        in_memory = self._in_memory()
        return self._digest(in_memory[:: 1 + len(in_memory) // _FINGERPRINT_SAMPLES])

    def content_fingerprint(self) -> str:
        stored = self.samples if isinstance(self.samples, list) else []
        files = [sample.expanduser() for sample in stored if isinstance(sample, Path)]
        content = self._digest(self._in_memory()) + file_signature(files)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _digest(self, indices: Sequence[int]) -> str:
        """A fingerprint of the titles, the labels, and the values of some samples."""
        digest = hashlib.sha256(super().fingerprint().encode())
        for index in indices:
            try:
                values = self.read(index)
            except UnreadableSample as error:
                digest.update(error.reason.encode())
            else:
                digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
                digest.update(values.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _in_memory(self) -> list[int]:
        """The samples that are no files; of a Dataset all."""
        if not isinstance(self.samples, list):
            return list(range(len(self)))
        return [i for i, sample in enumerate(self.samples) if not isinstance(sample, Path)]

    def _check_first(self) -> None:
        """Refuse a Dataset whose items are no samples, and one with random transforms."""
        first = prepare(_without_label(self.samples[0]), f"{self.name}, item 0")
        if not isinstance(first, Path) and not torch.equal(self.read(0), self.read(0)):
            raise ValueError(
                f"{self.name}: item 0 is another image each time that it is read; leave random "
                f"transforms out of the Dataset: training makes its own views"
            )

    def _labels_of_items(self) -> Any:
        """One label an item, or None where an item has none."""
        first = self.samples[0]
        if not (isinstance(first, (tuple, list)) and len(first) > 1 and _is_class(first[1])):
            return None
        targets = getattr(self.samples, "targets", None)
        if targets is not None and len(targets) == len(self):
            return targets
        labels = []
        with progress("labels", len(self), unit="img") as bar:
            for index in range(len(self)):
                labels.append(int(self.samples[index][1]))
                bar.update()
        return labels


def is_array(data: Any) -> bool:
    """Whether something is an array or a tensor of numbers."""
    return isinstance(data, Tensor) or (isinstance(data, np.ndarray) and data.dtype.kind in "biuf")


def _is_class(label: Any) -> bool:
    """Whether the second part of an item is a class."""
    if isinstance(label, (Tensor, np.ndarray, np.generic)):
        return label.ndim == 0 and str(label.dtype).removeprefix("torch.").startswith(("int", "ui"))
    return isinstance(label, int)


def _as_array(data: Tensor | np.ndarray) -> np.ndarray:
    if not isinstance(data, Tensor):
        return data
    values = data.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _stack(samples: Any) -> np.ndarray | None:
    """Arrays of one shape and type as one array; None for other samples."""
    if isinstance(samples, Dataset) or not all(map(is_array, samples)):
        return None
    arrays = [_as_array(sample) for sample in samples]
    alike = len({(array.shape, array.dtype) for array in arrays}) == 1
    return np.stack(arrays) if alike else None


def _without_label(item: Any) -> Any:
    """The sample of an item of a Dataset."""
    return item[0] if isinstance(item, (tuple, list)) and item else item


def _is_sound(sample: Any) -> bool:
    return isinstance(sample, Path) and sample.suffix.lower() in SIGNAL_SUFFIXES


def prepare(sample: Any, title: str, kind: Kind | None = None) -> Path | Image.Image | ArraySource:
    """A sample that can be read, also in another process; TypeError for anything else."""
    if isinstance(sample, (str, Path)):
        return Path(sample)
    if isinstance(sample, Image.Image):
        try:
            sample.load()  # processes must not share an open file
        except Exception as error:  # decoders raise anything from OSError to struct.error
            raise ValueError(f"{title}: the image cannot be read ({error}); leave it out") from None
        return sample
    if is_array(sample):
        return ArraySource(_as_array(sample)[None], None, name=title, kind=kind)
    raise TypeError(f"{title}: got {type(sample).__name__}; need {_SAMPLES}")


def _image_values(image: Image.Image) -> Shaped[Tensor, "channels height width"]:
    """The values of a PIL image, as those of its file."""
    pixels, alpha = to_array(ImageOps.exif_transpose(image))
    return as_channels_first(pixels, alpha=alpha)


def _numbered(
    labels: Any, count: int, name: str
) -> tuple[Int[np.ndarray, " n"] | None, list[str] | None]:
    """Labels as numbers from 0 (-1 is unknown), and the names of the classes."""
    if labels is None:
        return None, None
    array = np.asarray(_as_array(labels) if isinstance(labels, Tensor) else labels)
    if array.size != count or array.dtype.kind not in "biuUO":
        raise ValueError(
            f"{name}: got labels of shape {array.shape} and type {array.dtype} for {count} "
            f"samples; need one whole number or class name each"
        )
    array = array.reshape(-1)
    if array.dtype.kind in "biu":
        numbers = np.maximum(array.astype(np.int64), -1)
        if numbers.max(initial=-1) > 1_000_000:
            raise ValueError(
                f"{name}: got a label of {numbers.max()}, need classes numbered from 0: "
                f"np.unique(labels, return_inverse=True)[1], or names: list(map(str, labels))"
            )
        return numbers, [str(number) for number in range(int(numbers.max(initial=-1)) + 1)]
    names = ["" if label is None else str(label) for label in array]
    classes = sorted(set(names) - {""})
    number = {name: i for i, name in enumerate(classes)}
    return np.array([number.get(name, -1) for name in names]), classes
