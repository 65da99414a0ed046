"""The window of the newest embeddings: in any number of processes, saved and restored."""

import pytest
import torch

from meanshift.runtime import distributed
from meanshift.training import embedding_window
from meanshift.training.embedding_window import EmbeddingWindow
from tests.support.exact import assert_same
from tests.support.forked import in_processes


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(embedding_window, "ROWS", 12)


def step(at, size=6):
    """The embeddings of one batch, each row with the number of its image."""
    return (torch.arange(size) + at * size)[:, None].expand(size, 2).float()


def add_steps(first, last, saved=None):
    """The rows and the saved state after this process's part of some batches."""
    window = EmbeddingWindow()
    if saved is not None:
        window.load_state_dict(saved)
    for at in range(first, last):
        window.add(step(at)[slice(*distributed.shard_range(6))])
    return window.gather(), window.state_dict()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_has_the_newest_rows_of_all_processes(world):
    for rows, _ in in_processes(world, add_steps, 0, 5):
        assert sorted(rows[:, 0].tolist()) == list(range(18, 30))


def test_a_batch_may_be_larger_and_the_first_one_smaller():
    window = EmbeddingWindow()
    window.add(step(0, size=5))
    assert torch.equal(window.gather(), step(0, size=5))
    window.add(step(1, size=30))
    assert torch.equal(window.gather(), step(1, size=30)[-12:])


def test_it_keeps_no_gradient_and_saves_only_its_rows():
    window = EmbeddingWindow()
    for at in range(4):
        window.add(step(at).requires_grad_())
    (saved,) = window.state_dict()
    assert not window.gather().requires_grad
    assert saved.untyped_storage().nbytes() == 12 * 2 * 4


@pytest.mark.parametrize("world", [1, 2])
def test_a_restored_window_goes_on_with_the_same_bits(world):
    straight = in_processes(world, add_steps, 0, 5)
    halfway = in_processes(world, add_steps, 0, 3)[0][1]
    assert_same(in_processes(world, add_steps, 3, 5, halfway), straight)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_processes_shares_the_saved_rows(before, after):
    saved = in_processes(before, add_steps, 0, 3)[0][1]
    for rows, _ in in_processes(after, add_steps, 0, 0, saved):
        assert sorted(rows[:, 0].tolist()) == list(range(6, 18))


def test_an_empty_window_is_restored():
    window = EmbeddingWindow()
    window.load_state_dict(EmbeddingWindow().state_dict())
    window.add(step(0))
    assert torch.equal(window.gather(), step(0))
