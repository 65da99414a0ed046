"""The paper's ten transfer datasets: where they are, how they are split, and their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from meanshift.data import torchvision_datasets
from meanshift.data.arrays import read_arrays
from meanshift.data.open import open_source
from meanshift.data.source import Source
from meanshift.data.splits import (
    labeled_only,
    match_classes,
    split_per_class,
    stratified_split,
)

Metric = Literal["top-1", "mean per class"]


class DatasetNotFound(ValueError):
    """A dataset that is not under the root: names what to download, from where, and to where."""


@dataclass(frozen=True)
class Task:
    """One dataset to transfer to: three parts that share no image, and the paper's metric."""

    name: str
    title: str
    train: Source
    val: Source
    test: Source
    metric: Metric
    split: str
    """how the parts were chosen, for the card of a result"""
    spec: str = ""
    """the SOURCE that a user has named; empty for a dataset of the paper"""


@dataclass(frozen=True)
class TransferDataset:
    """A dataset of the paper's appendix: its sizes, its splits, and where torchvision finds it."""

    title: str
    classes: int
    sizes: tuple[int, int, int]
    """images of train, val and test"""
    metric: Metric
    split: str
    kind: str
    """torchvision's class"""
    folder: str
    contains: str
    """what the folder must contain"""
    archives: str
    page: str
    arguments: tuple[dict[str, Any], ...] = ({"split": "train"}, {"split": "test"})
    """torchvision's arguments for train, (val,) test"""
    val_per_class: int = 0
    """images per class of train that validate, where there is no val split"""
    val_fraction: float = 0.0
    """or the fraction of each class of train"""
    train_per_class: int = 0
    """images per class that train, where there is no test split; the rest is test"""


_TRAINVAL = ({"split": "trainval"}, {"split": "test"})
_GIVEN = ({"split": "train"}, {"split": "val"}, {"split": "test"})
_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_TORONTO = "https://www.cs.toronto.edu/~kriz"
DATASETS: dict[str, TransferDataset] = {  # in the order of the paper's columns
    "food101": TransferDataset(
        title="Food-101",
        classes=101,
        sizes=(68_175, 7_575, 25_250),
        metric="top-1",
        split="validation 75 per class of train",
        kind="Food101",
        folder="food-101",
        contains="images and meta",
        archives="food-101.tar.gz",
        page="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        val_per_class=75,
    ),
    "cifar10": TransferDataset(
        title="CIFAR-10",
        classes=10,
        sizes=(49_500, 500, 10_000),
        metric="top-1",
        split="validation 50 per class of train",
        kind="CIFAR10",
        folder="cifar-10-batches-py",
        contains="data_batch_1 to _5, test_batch and batches.meta",
        archives="cifar-10-python.tar.gz",
        page=f"{_TORONTO}/cifar.html",
        arguments=({}, {"train": False}),
        val_per_class=50,
    ),
    "cifar100": TransferDataset(
        title="CIFAR-100",
        classes=100,
        sizes=(45_000, 5_000, 10_000),
        metric="top-1",
        split="validation 50 per class of train",
        kind="CIFAR100",
        folder="cifar-100-python",
        contains="train, test and meta",
        archives="cifar-100-python.tar.gz",
        page=f"{_TORONTO}/cifar.html",
        arguments=({}, {"train": False}),
        val_per_class=50,
    ),
    "sun397": TransferDataset(
        title="SUN397",
        classes=397,
        sizes=(15_880, 3_970, 19_850),
        metric="top-1",
        split="split 1, validation 10 per class of train",
        kind="SUN397",
        folder="SUN397",
        contains="ClassName.txt, Training_01.txt, Testing_01.txt, a to z",
        archives="SUN397.tar.gz and Partitions.zip",
        page="https://vision.princeton.edu/projects/2010/SUN/",
        arguments=({},),
        val_per_class=10,
    ),
    "cars": TransferDataset(
        title="Cars",
        classes=196,
        sizes=(6_509, 1_635, 8_041),
        metric="top-1",
        split="validation 20% per class of train",
        kind="StanfordCars",
        folder="stanford_cars",
        contains="devkit, cars_train, cars_test and cars_test_annos_withlabels.mat",
        archives="cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat",
        page="a copy of https://ai.stanford.edu/~jkrause/cars/car_dataset.html (no longer online)",
        val_fraction=0.2,
    ),
    "aircraft": TransferDataset(
        title="Aircraft",
        classes=100,
        sizes=(5_367, 1_300, 3_333),
        metric="mean per class",
        split="variants, validation 20% per class of trainval",
        kind="FGVCAircraft",
        folder="fgvc-aircraft-2013b",
        contains="data",
        archives="fgvc-aircraft-2013b.tar.gz",
        page=f"{_OXFORD}/fgvc-aircraft/",
        arguments=_TRAINVAL,
        val_fraction=0.2,
    ),
    "dtd": TransferDataset(
        title="DTD",
        classes=47,
        sizes=(1_880, 1_880, 1_880),
        metric="top-1",
        split="split 1, validation as given",
        kind="DTD",
        folder="dtd/dtd",
        contains="images and labels",
        archives="dtd-r1.0.1.tar.gz",
        page=f"{_OXFORD}/dtd/",
        arguments=_GIVEN,
    ),
    "pets": TransferDataset(
        title="Pets",
        classes=37,
        sizes=(2_940, 740, 3_669),
        metric="mean per class",
        split="validation 20 per class of trainval",
        kind="OxfordIIITPet",
        folder="oxford-iiit-pet",
        contains="images and annotations",
        archives="images.tar.gz and annotations.tar.gz",
        page=f"{_OXFORD}/pets/",
        arguments=_TRAINVAL,
        val_per_class=20,
    ),
    "caltech101": TransferDataset(
        title="Caltech-101",
        classes=102,
        sizes=(2_550, 510, 6_084),
        metric="mean per class",
        split="30 per class drawn, validation 5 of them, the rest is test",
        kind="ImageFolder",
        folder="caltech101/101_ObjectCategories",
        contains="a folder for each class and BACKGROUND_Google",
        archives="caltech-101.zip (101_ObjectCategories.tar.gz is in it)",
        page="https://data.caltech.edu/records/mzrjq-6wc02",
        arguments=({},),
        val_per_class=5,
        train_per_class=30,
    ),
    "flowers102": TransferDataset(
        title="Flowers-102",
        classes=102,
        sizes=(1_020, 1_020, 6_149),
        metric="mean per class",
        split="validation as given",
        kind="Flowers102",
        folder="flowers-102",
        contains="jpg, imagelabels.mat and setid.mat",
        archives="102flowers.tgz, imagelabels.mat and setid.mat",
        page=f"{_OXFORD}/flowers/102/",
        arguments=_GIVEN,
    ),
}
NAMES: tuple[str, ...] = tuple(DATASETS)


def open_task(name: str, root: Path, *, seed: int = 0) -> Task:
    """One of the ten datasets as it is under `root`; nothing is ever downloaded.

    >>> open_task("flowers102", Path("datasets")).test
    """
    if name not in DATASETS:
        raise ValueError(f"{name}: not one of the ten; need one of {', '.join(NAMES)}")
    entry = DATASETS[name]
    path = _find(name, entry, root)
    drawn = entry.val_per_class > 0 or entry.val_fraction > 0
    try:
        train, *val, test = _open_parts(name, entry, root, path, seed)
        if not val:
            train, *val = _split(
                train, count=entry.val_per_class, fraction=entry.val_fraction, seed=seed
            )
        _check_sizes(entry, (train, *val, test))
    except Exception as error:  # torchvision's loaders raise anything on a damaged copy
        known = isinstance(error, (ValueError, RuntimeError, OSError))
        message = str(error) if known else repr(error)
        reason = message.partition("\n")[0].partition(" You can use download")[0].rstrip(".")
        raise ValueError(
            f"{name}: {reason}: the copy under {path} is damaged or incomplete; download "
            f"{entry.archives} again from {entry.page}, or leave it out with --only"
        ) from error
    split = entry.split + (f", seed {seed}" if drawn else "")
    return Task(name, entry.title, train, val[0], test, entry.metric, split)


def task_from_source(name: str, spec: str, *, seed: int = 0) -> Task:
    """Any other labeled SOURCE; val and test are drawn from train where it has none."""
    splits = dict(open_source(spec))
    source = splits.pop("labeled", splits.pop("train"))
    if not source.labeled:
        raise ValueError(f"{spec}: no labels; need a folder for each class, labels.csv or y_train")
    given = [part for part in ("val", "test") if part in splits and splits[part].labeled]
    others = [labeled_only(match_classes(splits[part], source)) for part in given]
    train = labeled_only(source)
    classes, sizes = _labels(train).unique(return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"{spec}: all images are of one class; need two classes or more")
    for part, other in zip(given, others, strict=True):
        if unknown := set(_labels(other).tolist()) - set(classes.tolist()):
            label = source.classes[min(unknown)]
            raise ValueError(f"{spec}: {part} has images of {label}, train has none; add some")
    if len(others) == 2:
        val, test = others
        return Task(name, name, train, val, test, "top-1", "train, val and test as given", spec)
    needed = 3 if others else 4
    if int(sizes.min()) < 2 or int(sizes.max()) < needed:
        smallest = source.classes[int(classes[sizes.argmin()])]
        raise ValueError(
            f"{spec}: got {int(sizes.min())} of {smallest} and at most {int(sizes.max())} of a "
            f"class; need 2 of each class and {needed} of one to draw from: add images or drop the "
            f"class"
        )
    if others:
        test = others[0]
        split = f"validation 20% per class of train, test is its own {given[0]}"
    else:
        train, test = _split(train, fraction=0.2, seed=seed)
        split = "test 20% per class, validation 20% per class of the rest"
    train, val = _split(train, fraction=0.2, seed=seed)
    whole = "" if source.groups is None else ", groups kept whole"
    return Task(name, name, train, val, test, "top-1", f"{split}{whole}, seed {seed}", spec)


def _split(source: Source, *, count: int = 0, fraction: float = 0.0, seed: int) -> list[Source]:
    """(The rest, `count` images or a `fraction` of each class, drawn at random; groups whole)."""
    if source.groups is not None:
        return list(stratified_split(source, fraction, seed=seed))
    parts = split_per_class(_labels(source), count=count, fraction=fraction, seed=seed)
    return [source.subset(indices) for indices in parts]


def _find(name: str, entry: TransferDataset, root: Path) -> Path:
    """The folder or the file of arrays of a dataset."""
    folder = root / entry.folder
    arrays = root / f"{name}.npz"
    small = entry.kind.startswith("CIFAR")
    if folder.is_dir():
        return folder
    if small and arrays.is_file():
        return arrays
    alternative = f", or that {arrays} has x_train, y_train, x_test and y_test" if small else ""
    raise DatasetNotFound(
        f"{name}: nothing at {folder}; get {entry.archives} from {entry.page} and unpack so that "
        f"{folder} contains {entry.contains}{alternative}; nothing is downloaded automatically"
    )


def _open_parts(
    name: str, entry: TransferDataset, root: Path, path: Path, seed: int
) -> list[Source]:
    """Train, (val,) test, before any validation images are drawn."""
    if path.suffix == ".npz":
        arrays = read_arrays(path)
        if "test" not in arrays:
            raise ValueError("got no x_test, need x_train, y_train, x_test and y_test")
        return [arrays["train"], arrays["test"]]
    dataset_root = path if entry.kind == "ImageFolder" else root
    datasets = [
        torchvision_datasets.load(entry.kind, dataset_root, **arguments)
        for arguments in entry.arguments
    ]
    files = [file for dataset in datasets for file in torchvision_datasets.files_of(dataset)]
    if absent := [file for file in files if not file.is_file()]:
        raise ValueError(f"{len(absent):,} of {len(files):,} images are absent, as {absent[0]}")
    sources = [torchvision_datasets.adapt(dataset, name) for dataset in datasets]
    if entry.kind == "SUN397":
        number = {file.relative_to(path).as_posix(): i for i, file in enumerate(files)}
        lists = [_sun397_indices(part, root, number) for part in ("Training", "Testing")]
        return [sources[0].subset(indices) for indices in lists]
    if entry.train_per_class:
        test, train = _split(sources[0], count=entry.train_per_class, seed=seed)
        return [train, test]
    return sources


def _sun397_indices(part: str, root: Path, number: dict[str, int]) -> Int[Tensor, " n"]:
    """The images of SUN397's first partition, in the order of its list."""
    folders = (root / "SUN397", root / "SUN397" / "Partitions", root / "Partitions")
    paths = (folder / f"{part}_01.txt" for folder in folders)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ValueError(f"{part}_01.txt is in none of {', '.join(map(str, folders))}")
    lines = [line.strip().lstrip("/") for line in path.read_text().splitlines() if line.strip()]
    if absent := [line for line in lines if line not in number]:
        raise ValueError(f"{len(absent):,} of {len(lines):,} in {path} are absent, as {absent[0]}")
    return torch.tensor([number[line] for line in lines])


def _check_sizes(entry: TransferDataset, parts: tuple[Source, ...]) -> None:
    sizes = tuple(map(len, parts))
    classes = [len(_labels(part).unique()) for part in parts]
    if sizes != entry.sizes or set(classes) != {entry.classes}:
        got = " / ".join(f"{size:,}" for size in sizes)
        need = " / ".join(f"{size:,}" for size in entry.sizes)
        raise ValueError(
            f"got {got} images (train / val / test) of {' / '.join(map(str, classes))} classes, "
            f"need {need} of {entry.classes}"
        )


def _labels(source: Source) -> Int[Tensor, " n"]:
    if source.labels is None:
        raise ValueError("got no labels, need one per image")
    return source.labels
