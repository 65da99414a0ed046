"""A campaign of damaged files: each is read or named, and none ends a run."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from meanshift.data import open_source
from meanshift.data.loader import iterate
from meanshift.transforms.eval import EvalDataset
from tests.support.sources import load_batches

COUNT = 1000
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "tiff": "TIFF", "gif": "GIF", "bmp": "BMP"}


def encode(image, suffix, **options):
    content = io.BytesIO()
    image.save(content, FORMATS[suffix], **options)
    return content.getvalue()


def photo(random):
    """Smooth colors, so that every format can store them well."""
    small = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    size = tuple(random.integers(24, 80, 2).tolist())
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def flip(content, random):
    """The same bytes with some flipped."""
    content = bytearray(content)
    for place in random.integers(0, len(content), random.integers(1, 9)):
        content[place] ^= int(random.integers(1, 256))
    return bytes(content)


def huge(random):
    """A few bytes that promise an image of many gigabytes."""
    width, height = random.integers(20_000, 60_000, 2).tolist()
    if random.integers(2):
        return b"BM" + struct.pack(
            "<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, *[0] * 6
        )
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + header + flip(bytes(64), random)


def sixteen_bit(random):
    gray = np.asarray(photo(random).convert("L")).astype(np.uint16) * 257
    return encode(Image.fromarray(gray), "png" if random.integers(2) else "tiff")


def several(random, suffix):
    first = photo(random)
    pages = [first, *(photo(random).resize(first.size) for _ in range(2))]
    return encode(pages[0], suffix, save_all=True, append_images=pages[1:])


def any_suffix(random):
    return str(random.choice(list(FORMATS)))


def any_photo(random):
    return encode(photo(random), any_suffix(random))


def truncated(random):
    content = any_photo(random)
    return content[: random.integers(1, len(content))]


def no_image(random):
    contents = (b"%PDF-1.7\n", b"<html><img></html>", b"PK\x03\x04", b"{}", random.bytes(999))
    return contents[random.integers(len(contents))]


INTACT = {  # must be read; half of them are damaged by flipped bytes, and may be named instead
    "16-bit": (sixteen_bit, "png"),
    "CMYK": (lambda random: encode(photo(random).convert("CMYK"), "jpg"), "jpg"),
    "animated": (lambda random: several(random, str(random.choice(["gif", "webp"]))), "gif"),
    "multi-page": (lambda random: several(random, "tiff"), "tif"),
    "WebP": (lambda random: encode(photo(random), "webp"), "webp"),
    "TIFF": (lambda random: encode(photo(random), "tiff", compression="tiff_lzw"), "tiff"),
}
DAMAGED = {
    "truncated": truncated,
    "flipped": lambda random: flip(any_photo(random), random),
    "wrong extension": any_photo,
    "zero length": lambda _: b"",
    "huge header": huge,
    "non-image": no_image,
}
READ = ("wrong extension",)
NAMED = ("zero length", "huge header", "non-image")


def write_files(root):
    """The files of all kinds in turn; the outcome that each must have, by name, if only one may."""
    root.mkdir()
    expected = {}
    for number in range(COUNT):
        random = np.random.default_rng(number)
        kind = [*INTACT, *DAMAGED][number % 12]
        if kind in INTACT:
            make, suffix = INTACT[kind]
            content = make(random)
            intact = number // 12 % 2 == 0
            content = content if intact else flip(content, random)
            outcome = "read" if intact else ""
        else:
            content = DAMAGED[kind](random)
            suffix = any_suffix(random)
            outcome = "read" if kind in READ else "named" if kind in NAMED else ""
        name = f"{kind}-{number:04d}.{suffix}"
        (root / name).write_bytes(content)
        expected[name] = outcome
    return expected


@pytest.mark.campaign
def test_damaged_files_are_read_or_named(tmp_path):
    start = time.monotonic()
    expected = write_files(tmp_path / "files")
    source = open_source(str(tmp_path / "files"))["train"]
    assert len(source) == COUNT
    bad = {}
    seen = []
    dataset = EvalDataset(source, 32, resize=0, bicubic=False, batch_size=20)
    for indices, images, unreadable in iterate(dataset, workers=2):
        assert images.shape == (20, 3, 32, 32)
        seen += indices.tolist()
        bad |= {source.title(index): error.reason for index, error in unreadable.items()}
    assert seen == list(range(COUNT))
    for name, outcome in expected.items():
        assert outcome in ("", "named" if name in bad else "read"), (name, bad.get(name))
    assert all(len(reason) > 10 for reason in bad.values())
    # Training replaces exactly these, and reports each by its path.
    batches = load_batches(source, 0, COUNT // 20, batch_size=20, workers=2)
    assert {title for batch in batches for title, _ in batch.bad} == {
        str(tmp_path / "files" / name) for name in bad
    }
    print(f"\n{COUNT} files in {time.monotonic() - start:.0f} s, 0 crashes")
    for kind in (*INTACT, *DAMAGED):
        names = [name for name in expected if name.startswith(f"{kind}-")]
        named = sum(name in bad for name in names)
        print(f"{kind:16} {len(names):4} files: {len(names) - named:4} read, {named:4} named")
