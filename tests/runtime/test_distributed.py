"""Communication in one process, and in several real ones."""

import pytest
import torch

from meanshift.runtime import distributed
from tests.support.forked import in_processes


def test_one_process_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (distributed.world_size(), distributed.rank()) == (1, 0)
    own = [1, "two"]
    with distributed.process_group(torch.device("cpu")):
        assert distributed.all_gather_list(own) == own
        assert not torch.distributed.is_initialized()
        tensor = torch.tensor([1.0, 3.0])
        distributed.all_mean_(tensor)
        assert tensor.tolist() == [1, 3]
    for name in ("cpu", "cuda", "cuda:1"):
        assert distributed.local_device(torch.device(name)) == torch.device(name)


def test_each_of_several_processes_uses_its_own_gpu_unless_one_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert distributed.world_size() == 4
    for setting, device in {"cuda": "cuda:3", "cuda:1": "cuda:1", "cpu": "cpu"}.items():
        assert distributed.local_device(torch.device(setting)) == torch.device(device)


def test_one_process_permutes_rows_and_returns_them_in_order():
    images = torch.arange(48.0).view(6, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    seen = []

    def function(rows):
        seen.append(rows)
        return rows.flatten(1) * 2

    for seed in (None, 3, 3, 4):
        output = distributed.apply_shuffled(function, images, seed)
        assert torch.equal(output, images.flatten(1) * 2)
    assert seen[0] is images
    orders = [(rows[:, 0, 0, 0] / 8).int().tolist() for rows in seen]
    assert orders[1] == orders[2] != orders[3] and orders[1] != sorted(orders[1]) == orders[0]
    assert all(rows.is_contiguous(memory_format=torch.channels_last) for rows in seen)


def communicate():
    rank = distributed.rank()
    mean = torch.tensor([1.0, 10.0]) * (rank + 1)
    distributed.all_mean_(mean)
    copied = torch.tensor([5.0, 6.0]) + rank
    distributed.broadcast(iter([copied]))
    devices = [distributed.local_device(torch.device(name)) for name in ("cpu", "cuda", "cuda:0")]
    return {
        "process": (distributed.world_size(), rank),
        "list": distributed.all_gather_list([rank] * (rank + 1) + ["end"]),
        "empty": distributed.all_gather_list([]),
        "lengths": distributed.all_lengths(rank + 7),
        "mean": mean.tolist(),
        "copied": copied.tolist(),
        "devices": [str(device) for device in devices],
    }


def test_collective_calls_give_all_processes_the_same_result():
    first, second = in_processes(2, communicate)
    assert (first.pop("process"), second.pop("process")) == ((2, 0), (2, 1))
    assert first.pop("devices") == ["cpu", "cuda:0", "cuda:0"]
    assert second.pop("devices") == ["cpu", "cuda:1", "cuda:0"]
    expected = {
        "list": [0, "end", 1, 1, "end"],
        "empty": [],
        "lengths": [7, 8],
        "mean": [1.5, 15.0],
        "copied": [5.0, 6.0],
    }
    assert first == second == expected


@pytest.mark.parametrize("count", [0, 1, 5, 12])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shards_are_consecutive_and_of_nearly_the_same_size(monkeypatch, count, world):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    ranges = []
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        ranges.append(distributed.shard_range(count))
    items = [item for first, end in ranges for item in range(first, end)]
    assert items == list(range(count))
    sizes = [end - first for first, end in ranges]
    assert max(sizes) - min(sizes) <= 1


def gather_with_gradient(counts):
    """The gathered rows, and the gradient of a weight by which all processes multiply theirs."""
    rank, world = distributed.rank(), distributed.world_size()
    every = torch.arange(2.0 * sum(counts)).view(-1, 2).double() / 10
    first = sum(counts[:rank])
    own = every[first : first + counts[rank]] if world > 1 else every
    weight = torch.nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64))
    rows = (own * weight).sin()
    gathered = distributed.all_gather_with_gradient(rows)
    # The mean over own rows of a function of all rows, scaled for parts of different sizes.
    loss = (rows @ gathered.T).square().sum(1).mean() * len(own) * world / sum(counts)
    loss.backward()
    distributed.all_mean_(weight.grad)  # as DDP does
    return gathered.detach(), weight.grad


@pytest.mark.parametrize("counts", [(3, 3), (2, 5)])
def test_gathered_rows_have_the_gradient_of_the_whole_batch(counts):
    rows, gradient = gather_with_gradient(counts)
    for found_rows, found_gradient in in_processes(2, gather_with_gradient, counts):
        assert torch.equal(found_rows, rows)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=0)
