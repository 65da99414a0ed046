"""Checkpoints appear completely or not at all, survive damage, and never execute code."""

import pickle

import pytest
import torch

from meanshift.runtime import checkpoint
from meanshift.runtime.checksum import DamagedFile


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def state(step, **values):
    return {"step": step, "weights": {"a": torch.arange(6.0).view(2, 3) + step}, **values}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def steps(folder):
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.iterdir())


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


def fail_half_way(_, file):
    file.write(b"half of it")
    raise OSError("no space left on device")


def test_round_trip(tmp_path):
    bits = torch.tensor([0.1, -0.0, float("inf")], dtype=torch.float64)
    path = checkpoint.save(tmp_path, state(3, bits=bits, bad=[("x.jpg", "cut")], lr=0.5))
    values = checkpoint.read(path)
    assert (values["step"], values["bad"], values["lr"]) == (3, [("x.jpg", "cut")], 0.5)
    assert torch.equal(values["weights"]["a"], state(3)["weights"]["a"])
    assert values["bits"].dtype == torch.float64
    assert values["bits"].view(torch.int64).tolist() == bits.view(torch.int64).tolist()


def test_a_later_change_does_not_change_the_file(tmp_path):
    first = state(1)
    path = checkpoint.save(tmp_path, first)
    first["weights"]["a"].zero_()
    assert checkpoint.read(path)["weights"]["a"].sum() > 0


def test_saving_leaves_only_the_checkpoint(tmp_path):
    checkpoint.save(tmp_path, state(12))
    assert names(tmp_path) == ["step-000000012.pt"]


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "state.pt"
    checkpoint.write(path, {"format": checkpoint.FORMAT, "step": 1})
    before = path.read_bytes()

    def fail(_, file):
        file.write(b"half of it")
        raise error("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left on device") as caught:
        checkpoint.write(path, {"format": checkpoint.FORMAT, "step": 2})
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["state.pt"]


def test_an_interrupted_write_leaves_no_part(tmp_path, monkeypatch):
    def interrupt(_, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, state(1))
    assert names(tmp_path) == []


def test_a_failed_save_deletes_no_older_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint.save(tmp_path, state(step))
    monkeypatch.setattr(torch, "save", fail_half_way)
    with pytest.raises(OSError, match="step-000000003"):
        checkpoint.save(tmp_path, state(3))
    assert steps(tmp_path) == [1, 2]


def test_the_last_two_are_kept(tmp_path):
    for step in range(1, 6):
        checkpoint.save(tmp_path, state(step))
    assert steps(tmp_path) == [4, 5]


def test_the_steps_that_are_kept_stay(tmp_path):
    for step in range(1, 12):
        checkpoint.save(tmp_path, state(step), kept=[4, 8])
    assert steps(tmp_path) == [4, 8, 10, 11]


def test_the_newest_is_the_latest(tmp_path):
    for step in (9, 10):
        checkpoint.save(tmp_path, state(step))
    newest, errors = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest["step"] == 10
    assert errors == []


def test_an_empty_folder_has_no_state(tmp_path):
    assert checkpoint.latest(tmp_path) == (None, [])


@pytest.mark.parametrize("fraction", [0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_reported_and_the_one_before_is_used(tmp_path, fraction):
    checkpoint.save(tmp_path, state(1))
    newest = checkpoint.save(tmp_path, state(2))
    truncate(newest, int(fraction * newest.stat().st_size))
    used, errors = checkpoint.latest(tmp_path)
    assert used is not None
    assert used["step"] == 1
    assert len(errors) == 1
    assert str(newest) in errors[0]


def test_when_all_are_broken_the_error_lists_them(tmp_path):
    paths = [checkpoint.save(tmp_path, state(step)) for step in (1, 2)]
    for path in paths:
        truncate(path, 40)
    with pytest.raises(ValueError, match="none of its checkpoints") as caught:
        checkpoint.latest(tmp_path)
    assert all(str(path) in str(caught.value) for path in paths)


@pytest.mark.parametrize("dump", [torch.save, pickle.dump])
def test_a_hostile_pickle_is_refused_and_executes_nothing(tmp_path, dump):
    path = tmp_path / "hostile.pt"
    created = tmp_path / "created"
    with path.open("wb") as file:
        dump({"format": checkpoint.FORMAT, "step": 1, "trap": Trap(created)}, file)
    with pytest.raises(ValueError, match=r"hostile\.pt"):
        checkpoint.read(path)
    assert not created.exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_trap_works(tmp_path):
    with (tmp_path / "trap.pt").open("wb") as file:
        torch.save(Trap(tmp_path / "created"), file)
    torch.load(tmp_path / "trap.pt", weights_only=False).close()
    assert (tmp_path / "created").exists()


@pytest.mark.parametrize("contents", [[1, 2], torch.zeros(3), {"step": 1}, {"format": "pt"}])
def test_a_third_party_file_is_refused(tmp_path, contents):
    torch.save(contents, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt.*not a meanshift file"):
        checkpoint.read(tmp_path / "other.pt")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02."])
def test_a_file_that_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / "step-000000001.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a complete meanshift file"):
        checkpoint.read(path)


NEWER = checkpoint.FORMAT + 1
OLDER = checkpoint.FORMAT_WITHOUT_CHECKSUM - 1
ACTIONS = [(NEWER, "install a newer meanshift"), (OLDER, "install the version that wrote it")]


@pytest.mark.parametrize(("version", "action"), ACTIONS)
def test_another_format_is_refused_with_what_to_do(tmp_path, version, action):
    path = tmp_path / "state.pt"
    checkpoint.write(path, {"format": version, "step": 1})
    with pytest.raises(checkpoint.FormatError, match=action) as caught:
        checkpoint.read(path)
    expected = f"{path}: has format {version}, this version reads {checkpoint.FORMAT}; "
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(("version", "action"), ACTIONS)
def test_the_latest_of_another_format_is_not_skipped(tmp_path, version, action):
    """Going back to an older file would discard what another version computed."""
    checkpoint.save(tmp_path, state(1))
    checkpoint.write(tmp_path / "step-000000002.pt", {**state(2), "format": version})
    with pytest.raises(checkpoint.FormatError, match=action):
        checkpoint.latest(tmp_path)
    assert steps(tmp_path) == [1, 2]


# Damage


def flip(path, place, count=1):
    """Change bytes from a place on: a fraction of the file."""
    content = bytearray(path.read_bytes())
    start = min(int(place * len(content)), len(content) - count)
    for index in range(start, start + count):
        content[index] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0, 0.1, 0.5, 0.9, 1])
def test_changed_bytes_are_damage_and_the_checkpoint_before_is_used(tmp_path, place):
    checkpoint.save(tmp_path, state(1))
    newest = checkpoint.save(tmp_path, state(2, bank=torch.zeros(10_000)))
    flip(newest, place)
    with pytest.raises(DamagedFile, match=r"step-000000002\.pt: damaged .*restore it from a copy"):
        checkpoint.read(newest)
    used, errors = checkpoint.latest(tmp_path)
    assert used is not None
    assert used["step"] == 1
    assert "step-000000002.pt: damaged" in errors[0]


@pytest.mark.parametrize("lost", [1, 8, 24])
def test_a_file_that_lost_its_checksum_is_damaged(tmp_path, lost):
    path = checkpoint.save(tmp_path, state(1, bank=torch.zeros(40_000)))
    truncate(path, path.stat().st_size - lost)
    with pytest.raises(DamagedFile, match=r"damaged .*checksum"):
        checkpoint.read(path)


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_a_file_under_the_name_of_another_is_damaged(tmp_path, name):
    for number in (3, 4):
        values = {"format": checkpoint.FORMAT, name: number}
        checkpoint.write(tmp_path / f"{name}-{number:04d}.pt", values)
    (tmp_path / f"{name}-0003.pt").replace(tmp_path / f"{name}-0004.pt")
    with pytest.raises(DamagedFile, match=f"it contains {name} 3"):
        checkpoint.read(tmp_path / f"{name}-0004.pt")


def write_without_checksum(path, values):
    torch.save({"format": checkpoint.FORMAT_WITHOUT_CHECKSUM, **values}, path)


def test_files_of_the_format_without_checksums_are_compared_with_those_of_zip(tmp_path):
    path = tmp_path / "step-000000001.pt"
    write_without_checksum(path, state(1, bank=torch.arange(10_000.0)))
    assert checkpoint.read(path)["bank"][-1] == 9999
    flip(path, 0.5, count=64)
    assert torch.load(path, weights_only=True)["bank"].shape == (10_000,)  # torch does not notice
    with pytest.raises(DamagedFile, match="differs from its checksum"):
        checkpoint.read(path)


def save_in_parts(folder, step, count=2, *, fill=0.0):
    checksums = [
        checkpoint.save_part(folder, step, index, count, {"rows": torch.full((9,), fill + index)})
        for index in range(count)
    ]
    checkpoint.save(folder, state(step, parts=checksums))


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def test_swapped_parts_are_damage(tmp_path):
    save_in_parts(tmp_path, 1)
    save_in_parts(tmp_path, 2, fill=5.0)
    first, second = sorted(tmp_path.glob("step-000000002.part-*"))
    swap(first, second)
    used, (error,) = checkpoint.latest(tmp_path)
    assert used is not None
    assert used["step"] == 1
    assert f"{first}: damaged (it belongs to another checkpoint)" in error
    swap(first, second)
    assert checkpoint.latest(tmp_path)[1] == []
    swap(first, tmp_path / "step-000000001.part-0000-of-0002.pt")  # of another step
    with pytest.raises(ValueError, match="none of its checkpoints can be read"):
        checkpoint.latest(tmp_path)


def test_a_damaged_part_is_named(tmp_path):
    save_in_parts(tmp_path, 1)
    save_in_parts(tmp_path, 2)
    flip(tmp_path / "step-000000002.part-0001-of-0002.pt", 0.5)
    used, (error,) = checkpoint.latest(tmp_path)
    assert used is not None
    assert used["step"] == 1
    assert "part-0001-of-0002.pt: damaged" in error


def test_parts_of_the_format_without_checksums_are_read(tmp_path):
    for index in range(2):
        name = f"step-000000001.part-{index:04d}-of-0002.pt"
        write_without_checksum(tmp_path / name, {"rows": torch.tensor([index])})
    write_without_checksum(tmp_path / "step-000000001.pt", state(1, parts=2))
    newest, errors = checkpoint.latest(tmp_path)
    assert newest is not None
    assert errors == []
    assert [int(part["rows"]) for part in checkpoint.parts(tmp_path, newest)] == [0, 1]


def test_parts_are_saved_before_and_deleted_after_their_checkpoint(tmp_path):
    for step in (1, 2, 3):
        save_in_parts(tmp_path, step, fill=step)
    newest, errors = checkpoint.latest(tmp_path)
    assert newest is not None
    assert errors == []
    rows = [part["rows"].tolist() for part in checkpoint.parts(tmp_path, newest)]
    assert rows == [[3] * 9, [4] * 9]
    assert not [name for name in names(tmp_path) if "000001" in name]


def test_a_checkpoint_with_a_missing_part_is_not_used(tmp_path):
    checkpoint.save(tmp_path, state(1))
    save_in_parts(tmp_path, 2)
    (tmp_path / "step-000000002.part-0001-of-0002.pt").unlink()
    used, errors = checkpoint.latest(tmp_path)
    assert used is not None
    assert used["step"] == 1
    assert len(errors) == 1
    assert "part-0001-of-0002" in errors[0]
