"""Images with boxes, in Pascal VOC's layout."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import torch
from jaxtyping import Bool, Float, Int, Shaped
from PIL import ExifTags, Image
from torch import Tensor

from meanshift.config.samples import RGB
from meanshift.data.bad_files import MAX_BAD_FRACTION_BOXES, refuse_too_many
from meanshift.data.convert import convert
from meanshift.data.decode import read_image
from meanshift.data.source import file_signature
from meanshift.data.unreadable import UnreadableSample

VOC_LAYOUT = (
    "need VOCdevkit/VOC2007 with Annotations, JPEGImages, ImageSets/Main/trainval.txt and test.txt "
    "(and VOC2012 beside it, to train on both): unpack VOCtrainval_06-Nov-2007.tar, "
    "VOCtest_06-Nov-2007.tar and VOCtrainval_11-May-2012.tar of host.robots.ox.ac.uk/pascal/VOC "
    "there"
)
SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")


@dataclass(frozen=True, eq=False)
class AnnotatedImage:
    """An image's file and the objects in it; `size` is (height, width) of the decoded image.

    Boxes are (x0, y0, x1, y1) and half-open. VOC counts pixels from 1 and includes both corners,
    so the plain overlap of half-open boxes equals the devkit's overlap of its own.
    """

    title: str
    file: Path
    size: tuple[int, int]
    boxes: Float[Tensor, "n 4"]
    labels: Int[Tensor, " n"]
    difficult: Bool[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class DetectionDataset:
    """A set of annotated images; a label is an index into `classes`."""

    name: str
    classes: list[str]
    images: list[AnnotatedImage]
    root: Path = Path()
    classes_chosen: bool = False
    """whether the user chose the classes, rather than all that there are"""

    @property
    def folder_name(self) -> str:
        """The name of the folder that contains VOCdevkit."""
        layout = ("VOCdevkit", "VOC2007", "")
        folders = (self.root.absolute(), *self.root.absolute().parents)
        return next((folder.name for folder in folders if folder.name not in layout), "VOC")

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> Shaped[Tensor, "channels height width"]:
        """Read one image as RGB; raises `UnreadableSample`."""
        title = self.images[index].title
        stored = read_image(self.images[index].file, title=title)
        try:
            return convert(stored, RGB)
        except ValueError as error:
            raise UnreadableSample(title, str(error)) from None

    def fingerprint(self) -> str:
        """Changes when images, names, boxes or labels change, or a file is rewritten."""
        digest = hashlib.sha256(repr((self.name, self.classes)).encode("utf-8", "replace"))
        for image in self.images:
            content = (image.title, image.size, image.labels.tolist(), image.difficult.tolist())
            digest.update(repr(content).encode("utf-8", "replace") + image.boxes.numpy().tobytes())
        digest.update(file_signature([image.file for image in self.images]).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Object:
    """An object as an annotation describes it."""

    label: str
    box: list[float]
    difficult: bool


@dataclass(frozen=True)
class _ParsedImage:
    title: str
    file: Path
    size: tuple[int, int]
    objects: list[_Object]


_Problems = dict[str, list[str]]
"""what is wrong, in words, and the images where it is"""


def read_voc(
    root: Path, *, classes: Sequence[str] = ()
) -> tuple[DetectionDataset, DetectionDataset]:
    """(train, test): trainval of 2007, and of 2012 if it is there; test of 2007.

    `root` is VOCdevkit, the folder that contains it, or VOC2007 itself, which is then used alone.
    Without `classes` they are the names found in training; boxes of other names are left out.
    """
    years = _year_folders(root.expanduser())
    train_lists = [_read_list(year, "trainval") for year in years]
    test_list = _read_list(years[0], "test")
    if shared := set(train_lists[0]) & set(test_list):
        raise ValueError(
            f"{years[0]}: {len(shared)} images are in both trainval.txt and test.txt, the first "
            f"is {min(shared)}; test images must not be trained on: remove it from one of them"
        )
    train_name = f"VOC {'+'.join(['07', '12'][: len(years)])} trainval"
    test_name = "VOC 07 test"
    train = _parse_images(train_name, years, train_lists)
    test = _parse_images(test_name, years[:1], [test_list])
    found = {thing.label for image in train for thing in image.objects}
    absent = [label for label in classes if label not in found]
    if absent or len(set(classes)) < len(classes):
        raise ValueError(
            f"classes {', '.join(classes)}: need each once and all in the annotations of "
            f"{train_name}, which lack {', '.join(absent) or 'none'} and have "
            f"{', '.join(sorted(found)[:30])}"
        )
    class_names = list(classes) or sorted(found)
    train_images = _number_labels(train_name, class_names, train)
    without = [image.title for image in train_images if not len(image.labels)]
    _warn(train_name, {"images without an object are left out": without}, stacklevel=3)
    train_images = [image for image in train_images if len(image.labels)]
    test_images = _number_labels(test_name, class_names, test)
    return (
        DetectionDataset(train_name, class_names, train_images, root, bool(classes)),
        DetectionDataset(test_name, class_names, test_images, root, bool(classes)),
    )


def _year_folders(root: Path) -> list[Path]:
    """The folder of 2007, and that of 2012 if there is one."""
    if (root / "ImageSets").is_dir():
        return [root]
    for devkit in (root, root / "VOCdevkit"):
        if (devkit / "VOC2007").is_dir():
            return [year for year in (devkit / "VOC2007", devkit / "VOC2012") if year.is_dir()]
    problem = "no VOC2007 in it" if root.is_dir() else "no folder"
    raise ValueError(f"{root}: {problem}; {VOC_LAYOUT}")


def _read_list(year: Path, split: str) -> list[str]:
    """The names in a list, each once, without those that a list for one class marks with -1."""
    path = year / "ImageSets" / "Main" / f"{split}.txt"
    try:
        names = [name.strip() for name in path.read_text("utf-8-sig").splitlines() if name.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); {VOC_LAYOUT}") from None
    cells = [name.rsplit(None, 1) for name in names]
    if all(len(cell) == 2 and cell[1] in ("-1", "0", "1") for cell in cells):
        names = [name for name, mark in cells if mark != "-1"]
    if not names:
        raise ValueError(f"{path}: lists no image; need one name per line, as 000012")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    _warn(str(path), {"images listed more than once are used once": repeated}, stacklevel=4)
    return list(dict.fromkeys(names))


def _parse_images(name: str, years: list[Path], lists: list[list[str]]) -> list[_ParsedImage]:
    """Every readable image of the lists; problems are counted and reported at the end."""
    images = list[_ParsedImage]()
    bad = list[str]()
    problems: _Problems = defaultdict(list)
    listed = [(year, item) for year, items in zip(years, lists, strict=True) for item in items]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # of odd metadata
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for year, item in listed:
            try:
                images.append(_parse_image(year, item, problems))
            except Exception as error:  # decoders raise anything from OSError to struct.error
                bad.append(f"{year.name}/{item} ({type(error).__name__}: {error})")
    refuse_too_many(
        len(bad),
        len(listed),
        max_fraction=MAX_BAD_FRACTION_BOXES,
        name=name,
        first=bad[0] if bad else "",
        advice=f"repair their image or annotation, or remove them from the list; {VOC_LAYOUT}",
    )
    unreadable = {"images without a readable image or annotation are left out": bad}
    _warn(name, {**problems, **unreadable}, stacklevel=4)
    return images


def _parse_image(year: Path, item: str, problems: _Problems) -> _ParsedImage:
    """One image's size and objects; raises whatever makes it useless."""
    title = f"{year.name}/{item}"
    candidates = (year / "JPEGImages" / f"{item}{suffix}" for suffix in SUFFIXES)
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise ValueError("no .jpg, .jpeg or .png in JPEGImages")
    with Image.open(file) as image:
        stored = image.size
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    width, height = stored[::-1] if orientation in (5, 6, 7, 8) else stored  # lies on its side
    annotation = _parse_xml(year / "Annotations" / f"{item}.xml")
    annotated = [_number(annotation.find("size"), side) for side in ("width", "height")]
    # Boxes count pixels of the image as it is stored, unless the annotated size is of the other.
    turned = orientation in (2, 3, 4) or (orientation in (5, 6, 7, 8) and annotated == [*stored])
    if turned:
        problems["images are turned by their EXIF, and their boxes with them"].append(title)
    elif annotated != [width, height] and not any(map(math.isnan, annotated)):
        problems["images have another size than annotated, their boxes may be wrong"].append(
            f"{title}, {annotated[0]:g} x {annotated[1]:g} in its XML and {width} x {height} when "
            f"read"
        )
    objects = [
        _parse_object(element, title, stored if turned else (width, height), problems)
        for element in annotation.iterfind("object")
    ]
    things = list(filter(None, objects))
    if turned:
        things = [replace(thing, box=_turn(thing.box, orientation, stored)) for thing in things]
    return _ParsedImage(title, file, (height, width), things)


def _turn(box: list[float], orientation: int, size: tuple[int, int]) -> list[float]:
    """A box of a stored image of (width, height), in the image turned by its EXIF orientation."""
    x, y = box[::2], box[1::2]
    if orientation in (2, 3, 7, 8):
        x = [size[0] - x[1], size[0] - x[0]]
    if orientation in (3, 4, 6, 7):
        y = [size[1] - y[1], size[1] - y[0]]
    if orientation >= 5:
        x, y = y, x
    return [x[0], y[0], x[1], y[1]]


def _parse_xml(path: Path) -> ElementTree.Element:
    text = path.read_bytes()
    if b"<!DOCTYPE" in text.replace(b"\0", b""):  # the only place for entities; also in UTF-16
        raise ValueError("its XML has a DTD, which could be a bomb of entities")
    tree = ElementTree.fromstring(text)
    if tree.tag != "annotation":
        raise ValueError(f"its XML begins with <{tree.tag}>, need <annotation>")
    return tree


def _parse_object(
    element: ElementTree.Element, title: str, size: tuple[int, int], problems: _Problems
) -> _Object | None:
    """An object with its box clipped to the image; None if it has no name or no box inside."""
    width, height = map(float, size)
    label = " ".join((element.findtext("name") or "").split())
    corners = [_number(element.find("bndbox"), side) for side in ("xmin", "ymin", "xmax", "ymax")]
    box = [corners[0] - 1, corners[1] - 1, corners[2], corners[3]]
    edges = (width, height, width, height)
    clipped = [min(max(x, 0.0), edge) for x, edge in zip(box, edges, strict=True)]
    finite = all(map(math.isfinite, corners))
    valid = bool(label) and finite and clipped[0] < clipped[2] and clipped[1] < clipped[3]
    if clipped != box or not valid:
        problem = "boxes that extend beyond their image are clipped"
        if not valid:
            problem = "objects without a name or a box inside their image are left out"
        position = " ".join(f"{x:g}" for x in corners)
        problems[problem].append(f"{title}, {label or 'without name'} at {position}")
    if not valid:
        return None
    difficult = (element.findtext("difficult") or "").strip() not in ("", "0", "false")
    return _Object(label, clipped, difficult)


def _number(parent: ElementTree.Element | None, name: str) -> float:
    try:
        return math.nan if parent is None else float(parent.findtext(name) or "nan")
    except ValueError:
        return math.nan


def _number_labels(
    name: str, classes: list[str], parsed: list[_ParsedImage]
) -> list[AnnotatedImage]:
    """Replace the names of objects by their index in `classes`; leave out those of other names."""
    number = {label: index for index, label in enumerate(classes)}
    images = []
    other_labels = []
    for image in parsed:
        objects = [thing for thing in image.objects if thing.label in number]
        other_labels += [thing.label for thing in image.objects if thing.label not in number]
        boxes = torch.tensor([thing.box for thing in objects]).reshape(-1, 4)
        labels = torch.tensor([number[thing.label] for thing in objects], dtype=torch.int64)
        difficult = torch.tensor([thing.difficult for thing in objects], dtype=torch.bool)
        images.append(AnnotatedImage(image.title, image.file, image.size, boxes, labels, difficult))
    if not any(len(image.labels) for image in images):
        raise ValueError(
            f"{name}: {len(images)} images without any object ({', '.join(classes)}); need "
            f"<object> with <name> and <bndbox> in the annotations"
        )
    counts = Counter(other_labels).most_common()
    listed = ", ".join(f"{label} ({count})" for label, count in counts)
    problem = f"boxes of classes that were not chosen are left out, {listed}"
    _warn(name, {problem: other_labels}, stacklevel=4)
    return images


def _warn(name: str, problems: Mapping[str, list[str]], *, stacklevel: int) -> None:
    """One warning per kind of problem, with its count and its first case."""
    for problem, cases in problems.items():
        if cases:
            message = f"{name}: {len(cases)} {problem}; the first is {cases[0]}"
            warnings.warn(message, stacklevel=stacklevel)
