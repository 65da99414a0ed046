"""What a run saves and restores: the buffers of each process, in any number of processes."""

import copy

import pytest
import torch

from meanshift.runtime import checkpoint, distributed
from meanshift.training import loop
from meanshift.training.session import open_session
from tests.support.exact import assert_same
from tests.support.forked import in_processes
from tests.support.toy_method import Toy, make_arrays, toy_config

CPU = torch.device("cpu")
BUFFERS = ("rows", "ids", "labels")


@pytest.fixture
def arrays(tmp_path):
    return make_arrays(tmp_path)


def banks_after(config, out, train):
    """Both memory banks of this process, after training or as they were restored."""
    with open_session(config, out, CPU) as session:
        if train:
            loop.train(session)
        method = session.method
        return [
            {name: getattr(bank, name) for name in BUFFERS} | {"written": bank.written}
            for bank in (method.first_bank, method.second_bank)
        ]


def joined(banks):
    """The buffers of a sharded bank in the order of their processes."""
    return {name: torch.cat([bank[name] for bank in banks]) for name in BUFFERS}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_two_banks_one_of_them_sharded_are_restored_in_any_number_of_processes(
    arrays, tmp_path, world
):
    config = toy_config(arrays, method__sharded=True, train__batch_size=6)
    trained = in_processes(2, banks_after, config, tmp_path / "run", True)
    state, unreadable = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert not unreadable and len(state["parts"]) == 2
    names = {name for name in state["method"] if name.split(".")[-1] in BUFFERS}
    assert names == {f"second_bank.{name}" for name in BUFFERS}
    restored = in_processes(world, banks_after, config, tmp_path / "run", False)
    whole = joined([first for first, _ in trained])
    assert_same(joined([first for first, _ in restored]), whole)
    for first, second in restored:
        assert_same(second, trained[0][1])
        assert first["written"] == trained[0][0]["written"] > 0


def test_the_first_process_overwrites_no_process_local_buffer(arrays, tmp_path):
    """Every observation broadcasts buffers: the assignments, but no bank."""
    config = toy_config(arrays, method__own_banks=True, train__monitor_every=1)
    first, second = in_processes(2, observed, config, tmp_path / "run")
    steps = 3 * 10
    start = first["initial"]
    torch.testing.assert_close(first["rows"], start + steps * 1)
    torch.testing.assert_close(second["rows"], start + steps * 2)
    assert torch.equal(first["assignments"], second["assignments"])


def observed(config, out):
    with open_session(config, out, CPU) as session:
        initial = copy.deepcopy(session.method.second_bank.rows)
        session.method.assignments += distributed.rank()
        loop.train(session)
        session.method.assignments += distributed.rank()
        loop.observe(session, 1, evaluate=False)
        method = session.method
        return {
            "initial": initial,
            "rows": method.second_bank.rows,
            "assignments": method.assignments,
        }


def test_a_checkpoint_without_the_rows_of_a_whole_bank_is_refused(arrays, tmp_path):
    config = toy_config(arrays)
    loop.pretrain(config, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    newest = max(folder.glob("step-*.pt"))
    state = checkpoint.read(newest)
    del state["method"]["first_bank.rows"]
    checkpoint.write(newest, state)
    with pytest.raises(ValueError, match=r"missing: first_bank\.rows"):
        loop.pretrain(config, tmp_path / "run")


def test_what_a_method_draws_before_an_epoch_is_the_same_after_a_restart(
    arrays, tmp_path, monkeypatch
):
    draws = []
    monkeypatch.setattr(
        Toy, "begin_epoch", lambda _, now, __: draws.append((now.step, torch.rand(1).item()))
    )
    config = toy_config(arrays, train__save_every=1.0)
    loop.pretrain(config, tmp_path / "run")
    assert [step for step, _ in draws] == [0, 10, 20] and len({value for _, value in draws}) == 3
    max((tmp_path / "run" / "checkpoints").glob("step-*.pt")).unlink()
    torch.rand(5)
    loop.pretrain(config, tmp_path / "run")
    assert draws[3:] == draws[2:3]
