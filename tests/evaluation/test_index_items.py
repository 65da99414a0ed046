"""The items of an index: rows anywhere in the parts, and damage."""

import numpy as np
import pytest
import torch

from meanshift.data.arrays import ArraySource
from meanshift.data.unreadable import UnreadableSample
from meanshift.evaluation import index_items
from meanshift.evaluation.embed import EmbeddedSplit
from meanshift.evaluation.index_items import Items, read_part, write_part
from meanshift.runtime.checksum import DamagedFile

DIM = 6


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Three parts of 10 images in row groups of 4; two images cannot be read."""
    monkeypatch.setattr(index_items, "ROW_GROUP", 4)
    pixels = np.zeros((30, 2, 2, 3), np.uint8)
    source = ArraySource(pixels, np.arange(30) % 2 - 1, name="x", classes=["ant"])
    rows = torch.randn(30, DIM, generator=torch.Generator().manual_seed(0))
    kept = [i for i in range(30) if i not in (3, 17)]
    parts = []
    for number in range(3):
        ids = torch.tensor([i for i in kept if i // 10 == number])
        bad = {i: UnreadableSample(f"#{i}", "torn") for i in (3, 17) if i // 10 == number}
        path = tmp_path / f"part-{number}.parquet"
        write_part(path, EmbeddedSplit("train", source, rows[ids], ids), bad)
        parts.append(read_part(path))
    return Items(tmp_path, parts, DIM), rows[kept].numpy(), kept


def test_rows_are_read_in_any_order(table):
    items, rows, kept = table
    assert len(items) == 28
    some = np.array([27, 0, 9, 10, 10, 3, 26])
    assert np.array_equal(items.embeddings(some), rows[some])
    found = items.items(some)
    assert [item.id for item in found] == [kept[row] for row in some]
    assert [item.file for item in found] == [f"#{kept[row]}" for row in some]
    assert [item.label for item in found] == ["ant" if kept[row] % 2 else None for row in some]
    assert {item.split for item in found} == {"train"}
    starts = [start for start, _ in items.chunks()]
    assert starts == [0, 9, 18]
    assert np.array_equal(np.concatenate([chunk for _, chunk in items.chunks()]), rows)


def test_a_part_names_its_unreadable_images(table):
    items, _, _ = table
    assert [list(part.bad) for part in items.parts] == [[3], [17], []]
    assert items.parts[1].bad[17].reason == "torn"


def test_a_part_that_is_no_table_is_named(tmp_path):
    path = tmp_path / "part-00000.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DamagedFile, match=r"part-00000\.parquet: damaged .*delete it"):
        read_part(path)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_named(table, damage):
    items, _, _ = table
    path = items.folder / "part-1.parquet"
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[100] ^= 1
        path.write_bytes(content[:-1] if damage == "truncated" else content)
    fresh = Items(items.folder, items.parts, DIM)
    assert len(fresh.items(np.array([0]))) == 1  # the other parts are whole
    with pytest.raises(DamagedFile, match=r"part-1\.parquet: damaged"):
        fresh.embeddings(np.array([12]))
    if damage != "flipped":  # seen without reading
        with pytest.raises(DamagedFile, match="missing" if damage == "missing" else "need "):
            fresh.check_sizes()
    else:
        fresh.check_sizes()
