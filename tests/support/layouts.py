"""Tiny copies of the ten transfer datasets in their real layouts.

The color of an image encodes its class (red) and its number in the class (green), so that labels
can be checked against pixels. Numbers 0 to 7 are training images (6 and 7 validation images where a
validation set is given), 8 to 11 are test images, later ones belong to no part.
"""

import json
import pickle
from dataclasses import replace
from itertools import product

import numpy as np
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from meanshift.data.transfer_datasets import DATASETS

SERIES = {"train": range(6), "val": range(6, 8), "trainval": range(8), "test": range(8, 12)}


def pixels(label, serial, size=8):
    return np.full((size, size, 3), (40 + 60 * label, 20 + 12 * serial, 90), np.uint8)


def paint(path, label, serial):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(label, serial)).save(path, quality=95)


def shuffled(part, seed=0):
    """The images of a part in random order."""
    every = list(product(range(3), SERIES[part]))
    return [every[index] for index in np.random.default_rng(seed).permutation(len(every))]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# The layouts, as the archives unpack and torchvision expects them; each returns the classes' names


def make_food101(root, _):
    names = ["apple_pie", "pho", "waffles"]
    home = root / "food-101"
    for part, series in (("train", SERIES["trainval"]), ("test", SERIES["test"])):
        listed = {names[label]: [f"{names[label]}/{s}" for s in series] for label in (2, 0, 1)}
        write(home / "meta" / f"{part}.json", json.dumps(listed))
        for label, serial in product(range(3), series):
            paint(home / "images" / names[label] / f"{serial}.jpg", label, serial)
    write(home / "meta" / "classes.txt", "\n".join(names))
    write(home / "meta" / "labels.txt", "\n".join(["Apple pie", "Pho", "Waffles"]))
    return names


def batch(listed, key):
    rows = [pixels(*code, size=32).transpose(2, 0, 1).ravel() for code in listed]
    return pickle.dumps({"data": np.stack(rows), key: [label for label, _ in listed]})


def make_cifar10(root, monkeypatch):
    home = root / "cifar-10-batches-py"
    every = shuffled("trainval")
    home.mkdir(parents=True)
    for number in range(5):
        (home / f"data_batch_{number + 1}").write_bytes(batch(every[number::5], "labels"))
    (home / "test_batch").write_bytes(batch(shuffled("test"), "labels"))
    names = ["airplane", "automobile", "bird"]
    (home / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    trust(monkeypatch, datasets.CIFAR10)
    return names


def make_cifar100(root, monkeypatch):
    home = root / "cifar-100-python"
    home.mkdir(parents=True)
    (home / "train").write_bytes(batch(shuffled("trainval"), "fine_labels"))
    (home / "test").write_bytes(batch(shuffled("test"), "fine_labels"))
    names = ["apple", "aquarium_fish", "baby"]
    (home / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))
    trust(monkeypatch, datasets.CIFAR100)
    return names


def trust(monkeypatch, kind):
    """Accept the tiny batches, whose checksums are not torchvision's."""
    for listed in ("train_list", "test_list"):
        unsigned = [[file, None] for file, _ in getattr(kind, listed)]
        monkeypatch.setattr(kind, listed, unsigned)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})


def make_sun397(root, _, lists="SUN397"):
    names = ["abbey", "apartment_building/outdoor", "bakery/shop"]
    home = root / "SUN397"
    file = "/{}/{}/sun_{:04d}.jpg".format
    for label, serial in product(range(3), range(14)):
        paint(home / file(names[label][0], names[label], serial)[1:], label, serial)
    write(home / "ClassName.txt", "".join(f"/{name[0]}/{name}\n" for name in names))
    for part, listed in (("Training", "trainval"), ("Testing", "test")):
        lines = [file(names[label][0], names[label], s) for label, s in shuffled(listed)]
        write(root / lists / f"{part}_01.txt", "\r\n".join(lines) + "\r\n")
        write(root / lists / f"{part}_02.txt", "\n".join(lines[:1]))
    return names


def make_cars(root, _):
    names = ["Acura TL Sedan 2012", "BMW M3 Coupe 2012", "Tesla S 2012"]
    home = root / "stanford_cars"
    fields = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")
    for part, folder, path in (
        ("trainval", "cars_train", "devkit/cars_train_annos.mat"),
        ("test", "cars_test", "cars_test_annos_withlabels.mat"),
    ):
        rows = []
        for number, (label, serial) in enumerate(shuffled(part), start=1):
            paint(home / folder / f"{number:05d}.jpg", label, serial)
            rows.append((1, 1, 7, 7, label + 1, f"{number:05d}.jpg"))
        (home / "devkit").mkdir(parents=True, exist_ok=True)
        table = np.array([rows], dtype=[(field, object) for field in fields])
        savemat(home / path, {"annotations": table})
    savemat(home / "devkit" / "cars_meta.mat", {"class_names": np.array([names], dtype=object)})
    return names


def make_aircraft(root, _):
    names = ["707-320", "Cessna 172", "DR-400"]
    home = root / "fgvc-aircraft-2013b" / "data"
    families = ["Boeing 707", "Cessna 172", "DR-400"]
    write(home / "variants.txt", "\n".join(names) + "\n")
    write(home / "families.txt", "\n".join(families) + "\n")
    for part, series in SERIES.items():
        listed = shuffled(part)
        lines = [f"{1000 * (label + 1) + serial} {names[label]}" for label, serial in listed]
        write(home / f"images_variant_{part}.txt", "\n".join(lines) + "\n")
        for label, serial in product(range(3), series):
            paint(home / "images" / f"{1000 * (label + 1) + serial}.jpg", label, serial)
    return names


def make_dtd(root, _):
    names = ["banded", "dotted", "zigzagged"]
    home = root / "dtd" / "dtd"
    for label, serial in product(range(3), range(12)):
        paint(home / "images" / names[label] / f"{names[label]}_{serial:04d}.jpg", label, serial)
    for part in ("train", "val", "test"):
        for partition in (1, 2):  # the second one is another split of the same images
            lines = [(names[label], (s + 5 * partition - 5) % 12) for label, s in shuffled(part)]
            text = "".join(f"{name}/{name}_{serial:04d}.jpg\n" for name, serial in lines)
            write(home / "labels" / f"{part}{partition}.txt", text)
    return names


def make_pets(root, _):
    files = ["Abyssinian", "american_bulldog", "yorkshire_terrier"]
    home = root / "oxford-iiit-pet"
    for part in ("trainval", "test"):
        listed = shuffled(part)
        for label, serial in listed:
            paint(home / "images" / f"{files[label]}_{serial}.jpg", label, serial)
        lines = [f"{files[label]}_{s} {label + 1} {1 + (label > 0)} 1" for label, s in listed]
        write(home / "annotations" / f"{part}.txt", "\n".join(lines) + "\n")
    return ["Abyssinian", "American Bulldog", "Yorkshire Terrier"]


def make_caltech101(root, _):
    names = ["BACKGROUND_Google", "Faces", "airplanes"]
    home = root / "caltech101"
    for label, serial in product(range(3), range(12)):
        file = f"image_{serial + 1:04d}.jpg"
        paint(home / "101_ObjectCategories" / names[label] / file, label, serial)
    write(home / "101_ObjectCategories" / "BACKGROUND_Google" / "tmp", "as in the archive")
    return names


def make_flowers102(root, monkeypatch):
    home = root / "flowers-102"
    every = []
    for part in ("train", "val", "test"):
        every += shuffled(part)
    for number, code in enumerate(every, start=1):
        paint(home / "jpg" / f"image_{number:05d}.jpg", *code)
    savemat(home / "imagelabels.mat", {"labels": np.array([[label + 1 for label, _ in every]])})
    numbers = np.arange(1, 37)
    ids = {"trnid": numbers[None, :18], "valid": numbers[None, 18:24], "tstid": numbers[None, 24:]}
    savemat(home / "setid.mat", ids)
    unsigned = {key: (file, None) for key, (file, _) in datasets.Flowers102._file_dict.items()}
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", unsigned)
    return datasets.Flowers102.classes[:3]


def write_copy(name, root, monkeypatch, **changes):
    """Write a tiny copy and adapt its entry of the table to it; return the classes' names."""
    tiny = {"classes": 3, "sizes": (18, 6, 12)}
    if DATASETS[name].val_per_class:
        tiny |= {"val_per_class": 2}
    if DATASETS[name].train_per_class:
        tiny |= {"train_per_class": 8}
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], **{**tiny, **changes}))
    return globals()[f"make_{name}"](root, monkeypatch)
