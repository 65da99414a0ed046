"""Checkpoints appear whole or not at all, survive cut files, and never run what they hold."""

import pickle

import pytest
import torch

from meanshift.runtime import checkpoint


class Trap:
    """Unpickled by a careless reader, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def state(step, **more):
    return {"step": step, "weights": {"a": torch.arange(6.0).view(2, 3) + step}, **more}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def steps(folder):
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.iterdir())


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def fail_half_way(_, file):
    file.write(b"half of it")
    raise OSError("no space left on device")


def test_round_trip(tmp_path):
    bits = torch.tensor([0.1, -0.0, float("inf")], dtype=torch.float64)
    path = checkpoint.save(tmp_path, state(3, bits=bits, bad=[("x.jpg", "cut")], rate=0.5))
    held = checkpoint.read(path)
    assert held["step"] == 3 and held["bad"] == [("x.jpg", "cut")] and held["rate"] == 0.5
    assert torch.equal(held["weights"]["a"], state(3)["weights"]["a"])
    assert held["bits"].dtype == torch.float64
    assert held["bits"].view(torch.int64).tolist() == bits.view(torch.int64).tolist()


def test_what_was_saved_is_not_tied_to_what_is_changed_later(tmp_path):
    first = state(1)
    path = checkpoint.save(tmp_path, first)
    first["weights"]["a"].zero_()
    assert checkpoint.read(path)["weights"]["a"].sum() > 0


def test_saving_leaves_only_the_checkpoint(tmp_path):
    checkpoint.save(tmp_path, state(12))
    assert names(tmp_path) == ["step-000000012.pt"]


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch, error):
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
    assert path.read_bytes() == before and names(tmp_path) == ["state.pt"]


def test_an_interrupted_write_leaves_no_part(tmp_path, monkeypatch):
    def interrupt(_, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, state(1))
    assert names(tmp_path) == []


def test_a_failed_save_drops_no_older_checkpoint(tmp_path, monkeypatch):
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


def test_every_nth_is_kept_too(tmp_path):
    for step in range(1, 12):
        checkpoint.save(tmp_path, state(step), keep_steps=4)
    assert steps(tmp_path) == [4, 8, 10, 11]


def test_the_newest_is_the_latest(tmp_path):
    for step in (9, 10):
        checkpoint.save(tmp_path, state(step))
    newest, wrong = checkpoint.latest(tmp_path)
    assert newest is not None and newest["step"] == 10 and wrong == []


def test_an_empty_folder_has_no_state(tmp_path):
    assert checkpoint.latest(tmp_path) == (None, [])


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_cut_newest_is_reported_and_the_one_before_is_used(tmp_path, share):
    checkpoint.save(tmp_path, state(1))
    newest = checkpoint.save(tmp_path, state(2))
    cut(newest, int(share * newest.stat().st_size))
    used, wrong = checkpoint.latest(tmp_path)
    assert used is not None and used["step"] == 1
    assert len(wrong) == 1 and str(newest) in wrong[0]


def test_when_all_are_broken_the_error_lists_them(tmp_path):
    paths = [checkpoint.save(tmp_path, state(step)) for step in (1, 2)]
    for path in paths:
        cut(path, 40)
    with pytest.raises(ValueError, match="none of its checkpoints") as caught:
        checkpoint.latest(tmp_path)
    assert all(str(path) in str(caught.value) for path in paths)


@pytest.mark.parametrize("dump", [torch.save, pickle.dump])
def test_a_foreign_pickle_is_refused_and_runs_nothing(tmp_path, dump):
    path, left = tmp_path / "foreign.pt", tmp_path / "left-behind"
    with path.open("wb") as file:
        dump({"format": checkpoint.FORMAT, "step": 1, "trap": Trap(left)}, file)
    with pytest.raises(ValueError, match=r"foreign\.pt"):
        checkpoint.read(path)
    assert not left.exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_trap_works(tmp_path):
    with (tmp_path / "trap.pt").open("wb") as file:
        torch.save(Trap(tmp_path / "left-behind"), file)
    torch.load(tmp_path / "trap.pt", weights_only=False).close()
    assert (tmp_path / "left-behind").exists()


@pytest.mark.parametrize("held", [[1, 2], torch.zeros(3), {"step": 1}, {"format": -1}])
def test_a_file_that_is_not_ours_is_refused(tmp_path, held):
    torch.save(held, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt.*not a meanshift file"):
        checkpoint.read(tmp_path / "other.pt")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02."])
def test_a_file_that_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / "step-000000001.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a whole meanshift file"):
        checkpoint.read(path)
