"""The paper's ten transfer datasets: where they lie, how they are split, what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from meanshift.data import open_source, same_classes, torchvision_datasets
from meanshift.data.arrays import read_arrays
from meanshift.data.source import Source, labeled_only
from meanshift.runtime import rng

Measure = Literal["top-1", "mean per class"]


class DatasetNotFound(ValueError):
    """A dataset that is not under the root: says what to fetch, from where, and where to put it."""


@dataclass(frozen=True)
class Task:
    """One dataset to transfer to: three parts that share no image, and the paper's measure."""

    name: str
    title: str
    train: Source
    val: Source
    test: Source
    measure: Measure
    split: str


@dataclass(frozen=True)
class Entry:
    """A dataset of the paper's appendix: its sizes, its rule, and where torchvision looks for it.

    `parts` are torchvision's arguments for train, (val,) test. Without val `count` images or a
    `share` of each class of train validate; without test `drawn` of each class are train.
    """

    title: str
    classes: int
    sizes: tuple[int, int, int]
    measure: Measure
    split: str
    kind: str
    folder: str
    holds: str
    archives: str
    page: str
    parts: tuple[dict[str, Any], ...] = ({"split": "train"}, {"split": "test"})
    count: int = 0
    share: float = 0.0
    drawn: int = 0


_TRAINVAL = ({"split": "trainval"}, {"split": "test"})
_GIVEN = ({"split": "train"}, {"split": "val"}, {"split": "test"})
_OXFORD, _TORONTO = "https://www.robots.ox.ac.uk/~vgg/data", "https://www.cs.toronto.edu/~kriz"
# fmt: off
TABLE: dict[str, Entry] = {  # in the order of the paper's columns
    "food101": Entry(
        "Food-101", 101, (68_175, 7_575, 25_250), "top-1", "validation 75 a class of train",
        "Food101", "food-101", "images and meta", "food-101.tar.gz",
        "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/", count=75),
    "cifar10": Entry(
        "CIFAR-10", 10, (49_500, 500, 10_000), "top-1", "validation 50 a class of train",
        "CIFAR10", "cifar-10-batches-py", "data_batch_1 to _5, test_batch and batches.meta",
        "cifar-10-python.tar.gz", f"{_TORONTO}/cifar.html", ({}, {"train": False}), count=50),
    "cifar100": Entry(
        "CIFAR-100", 100, (45_000, 5_000, 10_000), "top-1", "validation 50 a class of train",
        "CIFAR100", "cifar-100-python", "train, test and meta",
        "cifar-100-python.tar.gz", f"{_TORONTO}/cifar.html", ({}, {"train": False}), count=50),
    "sun397": Entry(
        "SUN397", 397, (15_880, 3_970, 19_850), "top-1", "split 1, validation 10 a class of train",
        "SUN397", "SUN397", "ClassName.txt, Training_01.txt, Testing_01.txt, a to z",
        "SUN397.tar.gz and Partitions.zip", "https://vision.princeton.edu/projects/2010/SUN/",
        ({},), count=10),
    "cars": Entry(
        "Cars", 196, (6_509, 1_635, 8_041), "top-1", "validation 20% a class of train",
        "StanfordCars", "stanford_cars",
        "devkit, cars_train, cars_test and cars_test_annos_withlabels.mat",
        "cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat",
        "a copy of what https://ai.stanford.edu/~jkrause/cars/car_dataset.html held", share=0.2),
    "aircraft": Entry(
        "Aircraft", 100, (5_367, 1_300, 3_333), "mean per class",
        "variants, validation 20% a class of trainval", "FGVCAircraft", "fgvc-aircraft-2013b",
        "data", "fgvc-aircraft-2013b.tar.gz", f"{_OXFORD}/fgvc-aircraft/", _TRAINVAL, share=0.2),
    "dtd": Entry(
        "DTD", 47, (1_880, 1_880, 1_880), "top-1", "split 1, validation as given", "DTD",
        "dtd/dtd", "images and labels", "dtd-r1.0.1.tar.gz", f"{_OXFORD}/dtd/", _GIVEN),
    "pets": Entry(
        "Pets", 37, (2_940, 740, 3_669), "mean per class", "validation 20 a class of trainval",
        "OxfordIIITPet", "oxford-iiit-pet", "images and annotations",
        "images.tar.gz and annotations.tar.gz", f"{_OXFORD}/pets/", _TRAINVAL, count=20),
    "caltech101": Entry(
        "Caltech-101", 102, (2_550, 510, 6_084), "mean per class",
        "30 a class drawn, validation 5 of them, the rest is test", "ImageFolder",
        "caltech101/101_ObjectCategories", "a folder for each class and BACKGROUND_Google",
        "caltech-101.zip (101_ObjectCategories.tar.gz is in it)",
        "https://data.caltech.edu/records/mzrjq-6wc02", ({},), count=5, drawn=30),
    "flowers102": Entry(
        "Flowers-102", 102, (1_020, 1_020, 6_149), "mean per class", "validation as given",
        "Flowers102", "flowers-102", "jpg, imagelabels.mat and setid.mat",
        "102flowers.tgz, imagelabels.mat and setid.mat", f"{_OXFORD}/flowers/102/", _GIVEN),
}
# fmt: on
NAMES: tuple[str, ...] = tuple(TABLE)


def open_task(name: str, root: Path, *, seed: int = 0) -> Task:
    """One of the ten as it lies under `root`; nothing is ever downloaded.

    >>> open_task("flowers102", Path("datasets")).test
    """
    if name not in TABLE:
        raise ValueError(f"{name}: not one of the ten; need one of {', '.join(NAMES)}")
    entry = TABLE[name]
    place = _place(name, entry, root)
    try:
        train, *val, test = _parts(name, entry, root, place, seed)
        if not val:
            train, *val = _drawn(train, count=entry.count, share=entry.share, seed=seed)
        _count(entry, (train, *val, test))
    except Exception as error:  # torchvision's loaders raise anything on a damaged copy
        told = str(error) if isinstance(error, (ValueError, RuntimeError, OSError)) else repr(error)
        reason = told.partition("\n")[0].partition(" You can use download")[0].rstrip(".")
        raise ValueError(
            f"{name}: {reason}: the copy under {place} is damaged or not whole; get "
            f"{entry.archives} anew from {entry.page}, or leave it out with --only"
        ) from error
    seeded = f", seed {seed}" if entry.count or entry.share else ""
    return Task(name, entry.title, train, val[0], test, entry.measure, entry.split + seeded)


def task_of(name: str, spec: str, *, seed: int = 0) -> Task:
    """Any other labeled SOURCE; what it does not bring of val and test is drawn from train."""
    splits = dict(open_source(spec))
    whole = splits.pop("labeled", splits.pop("train"))
    if not whole.labeled:
        raise ValueError(f"{spec}: no labels; need a folder for each class, labels.csv or y_train")
    given = [part for part in ("val", "test") if part in splits and splits[part].labeled]
    held = [labeled_only(same_classes(splits[part], whole)) for part in given]
    train = labeled_only(whole)
    classes, sizes = _labels(train).unique(return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"{spec}: all images are of one class; need two classes or more")
    for part, source in zip(given, held, strict=True):
        if strange := set(_labels(source).tolist()) - set(classes.tolist()):
            what = whole.classes[min(strange)]
            raise ValueError(f"{spec}: {part} has images of {what}, train has none; add some")
    if len(held) == 2:
        return Task(name, name, train, held[0], held[1], "top-1", "train, val and test as given")
    most, least = 3 if held else 4, whole.classes[int(classes[sizes.argmin()])]
    if int(sizes.min()) < 2 or int(sizes.max()) < most:
        raise ValueError(
            f"{spec}: got {int(sizes.min())} of {least} and at most {int(sizes.max())} of a class; "
            f"need 2 of each class and {most} of one to draw from: add images or drop the class"
        )
    told = "validation 20% a class of train, test is its own " + "".join(given)
    if not held:
        train, *held = _drawn(train, share=0.2, seed=seed)
        told = "test 20% a class, validation 20% a class of the rest"
    train, val = _drawn(train, share=0.2, seed=seed)
    return Task(name, name, train, val, held[0], "top-1", f"{told}, seed {seed}")


def validation(
    labels: Int[Tensor, " n"], *, count: int = 0, share: float = 0.0, seed: int
) -> tuple[Int[Tensor, " rest"], Int[Tensor, " drawn"]]:
    """(The rest, `count` or a rounded `share` of each class drawn at random), in rising order."""
    assert (count > 0) != (0 < share < 1), "either a count or a share"
    rank = rng.uniform(seed, 0, torch.arange(len(labels)), rng.SPLIT, 1)[:, 0]
    drawn = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        wanted = count or round(share * len(members))
        if wanted >= len(members):
            raise ValueError(f"got a class of {len(members)}, need more to draw {wanted} from it")
        drawn[members[rank[members].argsort(stable=True)[:wanted]]] = True
    return (~drawn).nonzero()[:, 0], drawn.nonzero()[:, 0]


def _drawn(source: Source, *, count: int = 0, share: float = 0.0, seed: int) -> list[Source]:
    cuts = validation(_labels(source), count=count, share=share, seed=seed)
    return [source.take(indices) for indices in cuts]


def _place(name: str, entry: Entry, root: Path) -> Path:
    folder, arrays = root / entry.folder, root / f"{name}.npz"
    small = entry.kind.startswith("CIFAR")
    if folder.is_dir() or (small and arrays.is_file()):
        return folder if folder.is_dir() else arrays
    also = f", or that {arrays} holds x_train, y_train, x_test and y_test" if small else ""
    raise DatasetNotFound(
        f"{name}: nothing at {folder}; get {entry.archives} from {entry.page} and unpack so that "
        f"{folder} holds {entry.holds}{also}; nothing is downloaded by itself"
    )


def _parts(name: str, entry: Entry, root: Path, place: Path, seed: int) -> list[Source]:
    """Train, (val,) test, before any validation is drawn."""
    if place.suffix == ".npz":
        arrays = read_arrays(place)
        if "test" not in arrays:
            raise ValueError("got no x_test, need x_train, y_train, x_test and y_test")
        return [arrays["train"], arrays["test"]]
    home = place if entry.kind == "ImageFolder" else root
    opened = [torchvision_datasets.load(entry.kind, home, **given) for given in entry.parts]
    files = [file for dataset in opened for file in torchvision_datasets.files_of(dataset)]
    if absent := [file for file in files if not file.is_file()]:
        raise ValueError(f"{len(absent):,} of {len(files):,} images are absent, as {absent[0]}")
    sources = [torchvision_datasets.adapt(dataset, name) for dataset in opened]
    if entry.kind == "SUN397":
        number = {file.relative_to(place).as_posix(): i for i, file in enumerate(files)}
        return [sources[0].take(_listed(part, root, number)) for part in ("Training", "Testing")]
    if entry.drawn:
        return _drawn(sources[0], count=entry.drawn, seed=seed)[::-1]
    return sources


def _listed(part: str, root: Path, number: dict[str, int]) -> Int[Tensor, " n"]:
    """The images of SUN397's first partition, in the order of its list."""
    folders = (root / "SUN397", root / "SUN397" / "Partitions", root / "Partitions")
    path = next((file for at in folders if (file := at / f"{part}_01.txt").is_file()), None)
    if path is None:
        raise ValueError(f"{part}_01.txt is in none of {', '.join(map(str, folders))}")
    lines = [line.strip().lstrip("/") for line in path.read_text().splitlines() if line.strip()]
    if absent := [line for line in lines if line not in number]:
        raise ValueError(f"{len(absent):,} of {len(lines):,} in {path} are absent, as {absent[0]}")
    return torch.tensor([number[line] for line in lines])


def _count(entry: Entry, parts: tuple[Source, ...]) -> None:
    sizes, classes = tuple(map(len, parts)), [len(_labels(part).unique()) for part in parts]
    if sizes != entry.sizes or set(classes) != {entry.classes}:
        got, need = (" / ".join(f"{size:,}" for size in told) for told in (sizes, entry.sizes))
        raise ValueError(
            f"got {got} images (train / val / test) of {' / '.join(map(str, classes))} classes, "
            f"need {need} of {entry.classes}"
        )


def _labels(source: Source) -> Int[Tensor, " n"]:
    if source.labels is None:
        raise ValueError("got no labels, need one an image")
    return source.labels
