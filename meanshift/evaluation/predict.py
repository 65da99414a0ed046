"""Sort new samples by a classifier that was fitted to few labels: as CSV or into class folders."""

from __future__ import annotations

import contextlib
import csv
import filecmp
import io
import itertools
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from meanshift.data import Source, UnreadableSample, open_source
from meanshift.data.folder import FolderSource
from meanshift.evaluation.label_probe import Probe
from meanshift.models.features import feature_batches
from meanshift.models.weights import Weights, fingerprint, load_snapshot
from meanshift.runtime import checksum
from meanshift.runtime.device import pick_device
from meanshift.runtime.files import atomic_writer

FILE = "classifier.safetensors"
UNSURE = "unsure"
"""folder of the samples whose confidence is too low"""
_METADATA_KEY = "classifier"
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # on Windows


@dataclass(frozen=True)
class Classifier:
    """A probe, the names of its classes, and the encoder whose features it takes."""

    probe: Probe
    classes: list[str]
    run: Path
    """the run directory of the encoder"""
    epoch: int
    """the snapshot of the encoder"""
    weights: str = ""
    """fingerprint of the encoder; empty if it cannot be loaded, so nothing can be predicted"""
    labels: int = 0
    version: int = 0
    """the last record of the labels that it was fitted to"""

    def save(self, folder: Path) -> None:
        """Write it into the folder of the labels."""
        from safetensors.torch import save

        metadata = asdict(self) | {
            "run": str(self.run.resolve()),
            "relative": os.path.relpath(self.run.resolve(), folder.resolve()),
        }
        del metadata["probe"]
        header = json.dumps({"checksum": checksum.PLACEHOLDER, **metadata})
        tensors = {"weight": self.probe.weight.contiguous(), "bias": self.probe.bias.contiguous()}
        with atomic_writer(folder / FILE, shared=True) as file:
            file.write(checksum.fill(save(tensors, {_METADATA_KEY: header})))

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """Read it from the folder of the labels."""
        from safetensors import safe_open

        path = folder / FILE
        if not path.is_file():
            raise ValueError(
                f"{folder}: has no {FILE}; need the folder of labels of a run (RUN/labels): label "
                f"images of two classes with meanshift explore RUN"
            )
        checksum.verify(path, required=True)
        with safe_open(path, "pt") as file:
            metadata = json.loads(file.metadata()[_METADATA_KEY])
            probe = Probe(file.get_tensor("weight"), file.get_tensor("bias"))
        del metadata["checksum"]
        beside = (
            folder / metadata.pop("relative")
        ).resolve()  # the run may have been moved with its labels
        run = beside if (beside / "config.json").is_file() else Path(metadata["run"])
        classifier = cls(**metadata | {"probe": probe, "run": run})
        newest = _last_record(folder / "labels.jsonl")
        if newest > classifier.version:
            warnings.warn(
                f"{path}: was fitted before the last {newest - classifier.version} changes of "
                f"the labels; open meanshift explore {run}, tab Label, to fit it again",
                stacklevel=2,
            )
        return classifier

    def load_encoder(self) -> Weights:
        """The encoder; refuse one with other weights than those of the labels."""
        if not self.weights:
            raise ValueError(
                f"{self.run}: its method has an encoder of its own, so new samples cannot be "
                f"predicted; export the labels as CSV on the page instead"
            )
        weights = load_snapshot(self.run, self.epoch)
        if fingerprint(weights.backbone) != self.weights:
            raise ValueError(
                f"{weights.spec}: has other weights than the classifier was fitted to; open "
                f"meanshift explore {self.run}, tab Label, to fit it again"
            )
        return weights


def _last_record(log: Path) -> int:
    """The number of the last complete record of the labels; 0 without any."""
    lines = log.read_bytes().rpartition(b"\n")[0].splitlines() if log.is_file() else []
    with contextlib.suppress(ValueError, KeyError, IndexError):
        return int(json.loads(lines[-1])["id"])
    return 0


@dataclass(frozen=True)
class Prediction:
    """The class of a sample, and how likely it is."""

    file: str
    label: str
    confidence: float
    path: Path | None
    """the file, where the sample is one"""


def predict(
    classifier: Classifier,
    source: str,
    *,
    workers: int = 0,
    device: str = "auto",
    bad: list[UnreadableSample],
) -> list[Prediction]:
    """Classify all samples of a source; those that cannot be read are added to `bad`."""
    weights = classifier.load_encoder()
    torch_device = pick_device(device)
    predictions = []
    for split in open_source(source).values():
        unreadable: dict[int, UnreadableSample] = {}
        batches = feature_batches(
            weights.backbone.to(torch_device),
            weights.adapted(split),
            image_size=weights.image_size,
            device=torch_device,
            workers=workers,
            bad=unreadable,
            show_progress=True,
        )
        probabilities = torch.cat([classifier.probe.probabilities(rows) for rows in batches])
        predictions += _describe(classifier, split, probabilities, unreadable)
        bad += unreadable.values()
    if not predictions:
        raise ValueError(f"{source}: none of the {len(bad)} samples can be read")
    return predictions


def _file(split: Source, index: int) -> Path | None:
    """The file of an image; none where it is no file on a disk."""
    if isinstance(split, FolderSource) and isinstance(split.root, Path):
        return split.root / split.files[index]
    return None


def _describe(
    classifier: Classifier,
    split: Source,
    probabilities: Tensor,
    unreadable: dict[int, UnreadableSample],
) -> list[Prediction]:
    prefix = next(iter(getattr(split, "prefixes", ())), "")  # the folder of the split
    confidences, labels = probabilities.max(1)
    return [
        Prediction(
            file=prefix + split.title(index),
            label=classifier.classes[label],
            confidence=confidence,
            path=_file(split, index),
        )
        for index, (label, confidence) in enumerate(
            zip(labels.tolist(), confidences.tolist(), strict=True)
        )
        if index not in unreadable
    ]


def as_csv(predictions: Sequence[Prediction], *, min_confidence: float) -> str:
    """The lines file,label,confidence; the label is empty where the confidence is too low."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "label", "confidence"])
    for one in predictions:
        name = one.file.encode(errors="backslashreplace").decode()
        label = one.label if one.confidence >= min_confidence else ""
        writer.writerow([name, label, f"{one.confidence:.4f}"])
    return text.getvalue()


def copy_files(
    predictions: Sequence[Prediction], out: Path, *, min_confidence: float
) -> Counter[str]:
    """Copy each file into the folder of its class; return how many were copied to each folder.

    A file that is there already is not copied again; one of the same name with other content is
    never replaced, but the copy gets a number. A file of several samples goes by its first one.
    """
    folders = folder_names([one.label for one in predictions])
    counts = Counter[str]()
    done = set[Path]()
    for one in predictions:
        if one.path is None:
            raise ValueError(f"--copy-to: {one.file} is no file of its own; need --out CSV")
        if one.path in done:
            continue
        done.add(one.path)
        folder = folders[one.label] if one.confidence >= min_confidence else UNSURE
        counts[folder] += _copy(one.path, out / folder)
    return counts


def folder_names(labels: Sequence[str]) -> dict[str, str]:
    """A folder for each label, with no characters that a path cannot have; no two are the same."""
    names: dict[str, str] = {}
    taken = {UNSURE}
    for label in sorted(set(labels)):
        safe = re.sub(r'[\x00-\x1f\x7f/\\:*?"<>|]', "_", label).strip(". ")[:80] or "_"
        safe = f"_{safe}" if _RESERVED.match(safe) else safe
        candidates = (safe if i == 1 else f"{safe}-{i}" for i in itertools.count(1))
        names[label] = next(name for name in candidates if name.lower() not in taken)
        taken.add(names[label].lower())  # some disks do not tell A from a
    return names


def _copy(file: Path, folder: Path) -> int:
    """Copy a file under a name that is free; 0 if it is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        target = folder / (file.name if number == 1 else f"{file.stem}-{number}{file.suffix}")
        if not target.exists() and not target.is_symlink():
            with file.open("rb") as content, atomic_writer(target) as copy:
                shutil.copyfileobj(content, copy)
            shutil.copystat(file, target)
            return 1
        if target.is_file() and filecmp.cmp(file, target, shallow=False):
            return 0
    raise AssertionError("unreachable")
