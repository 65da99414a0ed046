"""Many damaged checkpoints of a real run: each is named, and none is used."""

import random
import re
import shutil
import warnings
from collections import Counter

import pytest

from meanshift.models.weights import load_weights
from meanshift.runtime import checkpoint
from tests.support.processes import make_photos, pretrain_command, run_processes

COUNT = 200


def flip_a_bit(content, rng):
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def flip_64_bytes(content, rng):
    start = rng.randrange(len(content) - 64)
    for index in range(start, start + 64):
        content[index] ^= rng.randrange(1, 256)


def clear_a_block(content, rng):
    """As a disk that lost a sector."""
    start = rng.randrange(0, max(1, len(content) - 4096), 4096)
    content[start : start + 4096] = bytes(min(4096, len(content) - start))


def truncate(content, rng):
    del content[rng.randrange(len(content)) :]


def cut_the_end(content, rng):
    del content[-rng.randrange(1, 40) :]


def extend(content, rng):
    content += rng.randbytes(rng.randrange(1, 4096))


BYTES = [flip_a_bit, flip_64_bytes, clear_a_block, truncate, cut_the_end, extend]


def swap_parts(files, *_):
    one, other = files[1:3]
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return one


def take_an_older_file(files, older, rng):
    index = rng.randrange(len(files))
    files[index].write_bytes(older[index].read_bytes())
    return files[index]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two processes, each with a part of the memory bank, and its last two checkpoints."""
    folder = tmp_path_factory.mktemp("damage")
    photos = make_photos(folder / "photos")
    command = pretrain_command(photos, folder / "run", method__bank_layout="sharded")
    codes, group = run_processes(2, command, folder)
    assert codes == [0, 0], group.output
    return folder / "run"


def checkpoint_files(run, age):
    """The files of the newest checkpoint (age 0) or of one before: itself, then its parts."""
    folder = run / "checkpoints"
    path = sorted(file for file in folder.glob("step-*.pt") if "part" not in file.name)[-1 - age]
    return [path, *sorted(folder.glob(f"{path.stem}.part-*"))]


def damage_newest(run, kind, rng):
    """Damage a file of the newest checkpoint, so that it differs; return it."""
    files = checkpoint_files(run, 0)
    if kind not in BYTES:
        return kind(files, checkpoint_files(run, 1), rng)
    file = rng.choice(files)
    before = file.read_bytes()
    content = bytearray(before)
    while content == before:
        kind(content, rng)
    file.write_bytes(content)
    return file


@pytest.mark.campaign
def test_no_damaged_checkpoint_is_used_silently(run, tmp_path, capsys):
    rng = random.Random(0)
    newest, *parts = checkpoint_files(run, 0)
    before = checkpoint.latest(run / "checkpoints")[0]["step"]
    assert len(parts) == 2
    tried = Counter()
    silent = []
    for number in range(COUNT):
        kind = [*BYTES, swap_parts, take_an_older_file][number % (len(BYTES) + 2)]
        copy = shutil.copytree(run, tmp_path / "copy")
        damaged = damage_newest(copy, kind, rng)
        tried[kind.__name__] += 1
        state, errors = checkpoint.latest(copy / "checkpoints")  # what `pretrain` continues from
        if state["step"] >= before or not any(str(damaged) in error for error in errors):
            silent.append((number, kind.__name__, "pretrain"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            title = load_weights(copy).title  # what `evaluate RUN` and `export RUN` use
        if title.endswith(f"step {before}") or not any(
            str(damaged) in str(warning.message) for warning in caught
        ):
            silent.append((number, kind.__name__, "run"))
        if damaged.name == newest.name:  # what they use for this file
            with pytest.raises(ValueError, match=re.escape(str(damaged))):
                load_weights(damaged)
        shutil.rmtree(copy)
    with capsys.disabled():
        counts = ", ".join(f"{name} {count}" for name, count in tried.items())
        print(f"\n{COUNT} damaged checkpoints ({counts}): {len(silent)} used silently")
    assert not silent
