"""Every changed byte of a file with a checksum is found, wherever the checksum is in it."""

import json

import pytest
import torch
from safetensors.torch import save

from meanshift.runtime import checksum
from meanshift.runtime.checksum import DamagedFile


def write_binary(path):
    with path.open("w+b") as file:
        file.write(bytes(range(256)) * 3)
        return checksum.append(file)


def write_json(path):
    checksum.write_json(path, {"bad": {"3": ["a", "b"]}, "size": 7})
    return checksum.recorded(path)


def write_safetensors(path):
    header = json.dumps({"checksum": checksum.PLACEHOLDER, "title": "x"})
    path.write_bytes(checksum.fill(save({"a": torch.arange(9.0)}, {"meanshift": header})))
    return checksum.recorded(path)


@pytest.mark.parametrize("write", [write_binary, write_json, write_safetensors])
def test_no_changed_byte_is_overlooked(tmp_path, write):
    path = tmp_path / "file"
    digits = write(path)
    assert len(digits) == 8
    assert checksum.verify(path) == digits
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 4]) + content[index + 1 :])
        with pytest.raises(DamagedFile, match="file: damaged"):
            checksum.verify(path, required=True)


@pytest.mark.parametrize("write", [write_binary, write_json, write_safetensors])
def test_a_truncated_or_extended_file_is_damaged(tmp_path, write):
    path = tmp_path / "file"
    write(path)
    content = path.read_bytes()
    for other in [*(content[:size] for size in range(len(content))), content + b"more"]:
        path.write_bytes(other)
        with pytest.raises(DamagedFile):
            checksum.verify(path, required=True)


def test_a_large_file_is_read_in_blocks(tmp_path, monkeypatch):
    digits = write_binary(tmp_path / "file")
    whole = checksum.compute(tmp_path / "file")
    monkeypatch.setattr(checksum, "_BLOCK_BYTES", 7)
    assert checksum.verify(tmp_path / "file") == digits
    assert checksum.compute(tmp_path / "file") == whole


def test_a_file_without_a_checksum_is_no_error_unless_it_needs_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"of another program")
    assert checksum.verify(path) is None
    with pytest.raises(DamagedFile, match="its checksum is missing"):
        checksum.verify(path, required=True)


def test_json_round_trip(tmp_path):
    checksum.write_json(tmp_path / "a.json", {"b": [1, 2]}, indent=2)
    assert checksum.read_json(tmp_path / "a.json") == {"b": [1, 2]}
    assert json.loads((tmp_path / "a.json").read_text())["checksum"].startswith("meanshift-crc32:")
