"""Images with boxes, in Pascal VOC's layout."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import torch
from jaxtyping import Bool, Float, Int, UInt8
from PIL import ExifTags, Image
from torch import Tensor

from meanshift.data.decode import read_image
from meanshift.data.source import file_signature

LAYOUT = """need VOCdevkit/VOC2007 with Annotations, JPEGImages, ImageSets/Main/trainval.txt and \
test.txt (and VOC2012 beside it, to train on both): unpack VOCtrainval_06-Nov-2007.tar, \
VOCtest_06-Nov-2007.tar and VOCtrainval_11-May-2012.tar of host.robots.ox.ac.uk/pascal/VOC there"""
BAD_SHARE = 0.05  # of a set that may be unreadable
SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")


@dataclass(frozen=True, eq=False)
class Annotated:
    """An image's file and the objects in it; `size` is (height, width) as `Boxes.read` gives it.

    Boxes are (x0, y0, x1, y1) and half-open: VOC counts pixels from 1 and its corners lie inside,
    so that the plain overlap of these is the devkit's overlap of those.
    """

    title: str
    file: Path
    size: tuple[int, int]
    boxes: Float[Tensor, "n 4"]
    labels: Int[Tensor, " n"]
    difficult: Bool[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class Boxes:
    """A set of annotated images; a label is a place in `classes`."""

    name: str
    classes: list[str]
    images: list[Annotated]
    root: Path = Path()
    asked: bool = False
    """whether the classes were asked for, rather than all that there are"""

    @property
    def place(self) -> str:
        """What people call the folder that holds it all."""
        layout = ("VOCdevkit", "VOC2007", "")
        folders = (self.root.absolute(), *self.root.absolute().parents)
        return next((folder.name for folder in folders if folder.name not in layout), "VOC")

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        """One image in RGB; raises `Unreadable`."""
        return read_image(self.images[index].file, title=self.images[index].title)

    def fingerprint(self) -> str:
        """Changes when images, names, boxes or labels do, or a file is written anew."""
        digest = hashlib.sha256(repr((self.name, self.classes)).encode("utf-8", "replace"))
        for one in self.images:
            told = (one.title, one.size, one.labels.tolist(), one.difficult.tolist())
            digest.update(repr(told).encode("utf-8", "replace") + one.boxes.numpy().tobytes())
        digest.update(file_signature([one.file for one in self.images]).encode())
        return digest.hexdigest()[:16]


# title, file, size, and of each object its name, its corners and whether it is difficult
_Seen = tuple[str, Path, tuple[int, int], list[tuple[str, list[float], bool]]]


def read_voc(root: Path, *, classes: Sequence[str] = ()) -> tuple[Boxes, Boxes]:
    """(to train on, to judge on): 2007's trainval, with 2012's where it is there; 2007's test.

    `root` is VOCdevkit, the folder that holds it, or VOC2007 itself, which then stands alone.
    Without `classes` they are the names found in training; boxes of other names are left out.
    """
    years = _years(root.expanduser())
    lists, to_judge = [_listed(year, "trainval") for year in years], _listed(years[0], "test")
    if shared := set(lists[0]) & set(to_judge):
        raise ValueError(
            f"{years[0]}: {len(shared)} images are in both trainval.txt and test.txt, the first "
            f"is {min(shared)}; what is judged on must not be trained on: take it from one of them"
        )
    name, judged = f"VOC {'+'.join(['07', '12'][: len(years)])} trainval", "VOC 07 test"
    train, test = _read_set(name, years, lists), _read_set(judged, years[:1], [to_judge])
    met = {label for *_, objects in train for label, _, _ in objects}
    unmet = [label for label in classes if label not in met]
    if unmet or len(set(classes)) < len(classes):
        raise ValueError(
            f"classes {', '.join(classes)}: need each once and all in the annotations of {name}, "
            f"which lack {', '.join(unmet) or 'none'} and have {', '.join(sorted(met)[:30])}"
        )
    known = list(classes) or sorted(met)
    parts = (
        _numbered(name, known, train, bare=False),
        _numbered(judged, known, test, bare=True),
    )
    first, second = (replace(part, root=root, asked=bool(classes)) for part in parts)
    return first, second


def _years(root: Path) -> list[Path]:
    """The folder of 2007 and that of 2012 where there is one."""
    if (root / "ImageSets").is_dir():
        return [root]
    for devkit in (root, root / "VOCdevkit"):
        if (devkit / "VOC2007").is_dir():
            return [year for year in (devkit / "VOC2007", devkit / "VOC2012") if year.is_dir()]
    raise ValueError(f"{root}: {'no VOC2007 in it' if root.is_dir() else 'no folder'}; {LAYOUT}")


def _listed(year: Path, split: str) -> list[str]:
    """The names in a list, each once; those that a list for one class marks with -1 are not in."""
    path = year / "ImageSets" / "Main" / f"{split}.txt"
    try:
        names = [name.strip() for name in path.read_text("utf-8-sig").splitlines() if name.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); {LAYOUT}") from None
    cells = [name.rsplit(None, 1) for name in names]
    if all(len(cell) == 2 and cell[1] in ("-1", "0", "1") for cell in cells):
        names = [name for name, mark in cells if mark != "-1"]
    if not names:
        raise ValueError(f"{path}: lists no image; need one name a line, as 000012")
    again = [name for name, count in Counter(names).items() if count > 1]
    _warn(str(path), {"images listed more than once are taken once": again})
    return list(dict.fromkeys(names))


def _read_set(name: str, years: list[Path], lists: list[list[str]]) -> list[_Seen]:
    """Every image of the lists that can be read; what is wrong is counted and told at the end."""
    seen, bad, told = list[_Seen](), list[str](), defaultdict[str, list[str]](list)
    listed = [(year, item) for year, items in zip(years, lists, strict=True) for item in items]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # of odd metadata
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for year, item in listed:
            try:
                seen.append(_read_one(year, item, told))
            except Exception as error:  # decoders raise anything from OSError to struct.error
                bad.append(f"{year.name}/{item} ({type(error).__name__}: {error})")
    if len(bad) > BAD_SHARE * len(listed):
        raise ValueError(
            f"{name}: {len(bad)} of {len(listed)} images lack a readable image or annotation, "
            f"first {bad[0]}; at most {BAD_SHARE:.0%} may: mend them, or unlist them; {LAYOUT}"
        )
    _warn(name, {**told, "images without a readable image or annotation are left out": bad})
    return seen


def _read_one(year: Path, item: str, told: dict[str, list[str]]) -> _Seen:
    """One image's size and objects; raises whatever makes it useless."""
    title, images = f"{year.name}/{item}", year / "JPEGImages"
    file = next((f for end in SUFFIXES if (f := images / f"{item}{end}").is_file()), None)
    if file is None:
        raise ValueError("no .jpg, .jpeg or .png in JPEGImages")
    with Image.open(file) as image:
        width, height = image.size
        if image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8):  # lies on its side
            width, height = height, width
    text = (year / "Annotations" / f"{item}.xml").read_bytes()
    if b"<!DOCTYPE" in text.replace(b"\0", b""):  # the only place for entities; also in UTF-16
        raise ValueError("its XML has a DTD, which could be a bomb of entities")
    tree = ElementTree.fromstring(text)
    if tree.tag != "annotation":
        raise ValueError(f"its XML begins with <{tree.tag}>, need <annotation>")
    said = [_number(tree.find("size"), side) for side in ("width", "height")]
    if said != [width, height] and not any(map(math.isnan, said)):
        told["images have another size than annotated, their boxes may lie wrong"].append(
            f"{title}, {said[0]:g} x {said[1]:g} in its XML and {width} x {height} when read"
        )
    objects, most = [], (float(width), float(height)) * 2
    for thing in tree.iterfind("object"):
        label = " ".join((thing.findtext("name") or "").split())
        corners = thing.find("bndbox")
        raw = [_number(corners, side) for side in ("xmin", "ymin", "xmax", "ymax")]
        box = [raw[0] - 1, raw[1] - 1, raw[2], raw[3]]
        inside = [min(max(x, 0.0), edge) for x, edge in zip(box, most, strict=True)]
        finite = all(map(math.isfinite, raw))
        good = bool(label) and finite and inside[0] < inside[2] and inside[1] < inside[3]
        if good:
            difficult = (thing.findtext("difficult") or "").strip() not in ("", "0", "false")
            objects.append((label, inside, difficult))
        if inside != box or not good:
            what = "boxes that reach out of their image are clipped"
            if not good:
                what = "objects without name or box inside their image are left out"
            where = " ".join(f"{x:g}" for x in raw)
            told[what].append(f"{title}, {label or 'without name'} at {where}")
    return title, file, (height, width), objects


def _number(parent: ElementTree.Element | None, name: str) -> float:
    try:
        return math.nan if parent is None else float(parent.findtext(name) or "nan")
    except ValueError:
        return math.nan


def _numbered(name: str, classes: list[str], seen: list[_Seen], *, bare: bool) -> Boxes:
    """Names become places in `classes`; images without an object stay only where `bare`."""
    number = {label: place for place, label in enumerate(classes)}
    images, other = [], []
    for title, file, size, objects in seen:
        kept = [thing for thing in objects if thing[0] in number]
        other += [label for label, _, _ in objects if label not in number]
        boxes = torch.tensor([box for _, box, _ in kept]).reshape(-1, 4)
        labels = torch.tensor([number[label] for label, _, _ in kept], dtype=torch.int64)
        difficult = torch.tensor([hard for _, _, hard in kept], dtype=torch.bool)
        images.append(Annotated(title, file, size, boxes, labels, difficult))
    empty = [one.title for one in images if not len(one.labels)]
    if len(empty) == len(images):
        raise ValueError(
            f"{name}: {len(images)} images without any object ({', '.join(classes)}); need "
            f"<object> with <name> and <bndbox> in the annotations"
        )
    counts = ", ".join(f"{label} ({count})" for label, count in Counter(other).most_common())
    _warn(name, {f"boxes of classes that are not asked for are left out, {counts}": other})
    if not bare:
        _warn(name, {"images without an object are left out": empty})
        images = [one for one in images if len(one.labels)]
    return Boxes(name, classes, images)


def _warn(name: str, told: dict[str, list[str]]) -> None:
    """One warning a kind, with its count and the first that it met."""
    for what, cases in told.items():
        if cases:
            warnings.warn(f"{name}: {len(cases)} {what}; the first is {cases[0]}", stacklevel=4)
