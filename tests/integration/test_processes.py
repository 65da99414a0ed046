"""Several processes compute what one process computes: bank, batch norm, steps, by real ones."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.scale import Load
from meanshift import MeanShift, MemoryBank
from meanshift.models.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm
from meanshift.runtime import distributed
from meanshift.runtime.errors import SharedError
from tests.support.forked import in_processes

CPU = torch.device("cpu")


def unit(rows, dim, seed=0):
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def own(rows):
    return rows[slice(*distributed.shard_range(len(rows)))]


# Collective calls


def communicate():
    rank, world = distributed.rank(), distributed.world_size()
    rows = torch.arange(3 * (rank + 1)).view(rank + 1, 3) + 100 * rank
    sent = [(rank + other) % 2 + 1 for other in range(world)]
    messages = torch.cat([torch.full((n, 1), 10 * rank + o) for o, n in enumerate(sent)])
    received = distributed.all_to_all_counts(sent)
    leaf = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    (distributed.all_sum(leaf).square() * (rank + 1)).sum().backward()
    return {
        "rows": distributed.all_gather_rows(rows),
        "none": distributed.all_gather_rows(rows[:0]),
        "received": distributed.all_to_all(messages, sent, received)[:, 0].tolist(),
        "max": distributed.all_max(rank, -rank),
        "range": distributed.shard_range(10),
        "gradient": leaf.grad,
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_messages_and_sums_arrive(world):
    results = in_processes(world, communicate)
    rows = torch.cat([torch.arange(3 * (r + 1)).view(r + 1, 3) + 100 * r for r in range(world)])
    for rank, result in enumerate(results):
        assert torch.equal(result["rows"], rows) and result["none"].shape == (0, 3)
        expected = [10 * r + rank for r in range(world) for _ in range((rank + r) % 2 + 1)]
        assert result["received"] == expected
        assert result["max"] == [world - 1, 0]
        # d/dx of sum_r (r + 1) (sum x)^2, which reaches every process
        total = torch.tensor([sum(1.0 + r for r in range(world)), 2.0 * world])
        torch.testing.assert_close(result["gradient"], 2 * total * sum(r + 1 for r in range(world)))
    ranges = [result["range"] for result in results]
    assert ranges[0][0] == 0 and ranges[-1][1] == 10
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def shuffle(rows, seeds, layout):
    """What this process received by each seed, what came back, where it was processed."""
    mine = own(rows).contiguous(memory_format=layout)
    results = []
    for seed in seeds:
        seen = []

        def function(received, seen=seen):
            seen.append(received)
            return received.flatten(1)[:, :2] * 2 + distributed.rank() * 1000

        returned = distributed.apply_shuffled(function, mine, seed)
        assert seen[0].is_contiguous(memory_format=layout)
        results.append((seen[0], returned % 1000, (returned // 1000)[:, 0]))
    return results


@pytest.mark.parametrize(
    ("world", "layout"), [(2, torch.channels_last), (3, torch.contiguous_format)]
)
def test_shuffled_rows_are_processed_elsewhere_and_come_back(world, layout):
    rows = torch.arange(11 * 3 * 4, dtype=torch.float32).view(11, 3, 2, 2)
    results = in_processes(world, shuffle, rows, (5, 6, None), layout)
    by_seed = [
        [torch.cat(parts) for parts in zip(*ranks, strict=True)]
        for ranks in zip(*results, strict=True)
    ]
    for _, returned, _ in by_seed:
        assert torch.equal(returned, rows.flatten(1)[:, :2] * 2)
    (received, _, processed_by), (other, *_), (unmoved, *_) = by_seed
    assert not torch.equal(received, rows) and torch.equal(received.sort(0).values, rows)
    sizes = [len(result[0][0]) for result in results]
    home = torch.arange(float(world)).repeat_interleave(torch.tensor(sizes))
    assert len(processed_by.unique()) == world and (processed_by != home).any()
    assert not torch.equal(received, other)
    assert torch.equal(unmoved, rows)


def fail(failing_ranks):
    """The message of the error that this process sees, by which ranks fail."""
    messages = []
    for ranks in failing_ranks:
        try:
            with distributed.fail_together():
                if distributed.rank() in ranks:
                    raise OSError("the disk is gone")
            messages.append("no error")
        except SharedError as error:
            messages.append(str(error))
    return messages


def test_what_fails_in_one_process_fails_in_all_with_one_message():
    expected = ["no error", "process 1 of 3: the disk is gone", "the disk is gone"]
    assert in_processes(3, fail, [[], [1], [0, 1, 2]]) == [expected] * 3
    with pytest.raises(OSError, match="disk is gone"), distributed.fail_together():
        raise OSError("the disk is gone")  # a single process raises its own error


# The memory bank


def hard_batches(sizes, dim, seed=0):
    """Embeddings full of copies, some of them equal to the last bit and some nearly equal."""
    generator = torch.Generator().manual_seed(seed)
    few = unit(7, dim, seed)
    batches = [few[torch.randint(0, 7, (size,), generator=generator)] for size in sizes]
    for rows in batches:
        fresh = torch.rand(len(rows), generator=generator) < 0.5
        rows[fresh] = unit(int(fresh.sum()), dim, seed + 1)
        close = torch.rand(len(rows), generator=generator) < 0.2
        noise = torch.randn(rows[close].shape, generator=generator)
        rows[close] = F.normalize(rows[close] + 3e-8 * noise)
    return batches


def ids_of(rows, step):
    return torch.arange(len(rows)) * 7 % 5 + step % 3


NAMES = ("slots", "found", "similarity", "rows", "ids", "labels")
OPTIONS = [(), ("own",), ("own", "skip"), ("own", "filled"), ("skip", "filled")]


def search_bank(batches, size, count, sharded, options):
    """Enqueue and search batch by batch: what each step found, the bank's part, rows written."""
    bank = MemoryBank(size, batches[0].shape[1], seed=3, sharded=sharded)
    steps = []
    for step, rows in enumerate(batches):
        ids = own(ids_of(rows, step))
        slots = bank.enqueue(own(rows), ids=ids, labels=ids % 4)
        found, similarity = bank.search(
            own(rows),
            count,
            exclude_slots=slots if "own" in options else None,
            exclude_ids=ids if "skip" in options else None,
            filled_only="filled" in options,
        )
        looked_up = bank.lookup(torch.where(similarity > -torch.inf, found, slots[:, None]))
        steps.append(dict(zip(NAMES, (slots, found, similarity, *looked_up), strict=True)))
    return steps, bank.shard_state(), bank.written


def search_banks(*given):
    return [search_bank(*given, options) for options in OPTIONS]


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_bank_finds_the_same_in_any_number_of_processes_ties_included(world, sharded):
    """Uneven batches, some smaller than the number of processes, and around the ring twice."""
    given = (hard_batches([13, 4, 30, 1, 17, 30, 2, 9], 16), 61, 5)
    alone = search_banks(*given, False)
    by_rank = in_processes(world, search_banks, *given, sharded)
    for expected, ranks in zip(alone, zip(*by_rank, strict=True), strict=True):
        expected_steps, whole, written = expected
        for step, *found in zip(expected_steps, *(steps for steps, *_ in ranks), strict=True):
            joined = {name: torch.cat([part[name] for part in found]) for name in NAMES}
            # The last bit of a similarity depends on the shape of the product.
            similarity = joined.pop("similarity")
            torch.testing.assert_close(similarity, step["similarity"], rtol=0, atol=1e-6)
            assert all(torch.equal(joined[name], step[name]) for name in joined)
        parts = [part for _, part, _ in ranks]
        assert {count for *_, count in ranks} == {written}
        if sharded:
            for name in ("rows", "ids", "labels"):
                assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
            assert max(len(part["rows"]) for part in parts) <= -(-61 // world)  # memory falls
        else:
            assert all(torch.equal(part["rows"], whole["rows"]) for part in parts)


def test_a_bank_smaller_than_the_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"3 rows .*4 processes.*bank_layout replicated"):
        MemoryBank(3, 2, sharded=True)


def load_bank(parts, state):
    """The part of a bank of this process, restored from parts and from a whole bank."""
    from_parts, from_whole = (MemoryBank(20, 4, seed=9, sharded=True) for _ in range(2))
    for part in parts:
        from_parts.load_shard_state(part)
    from_whole.load_state_dict(state)
    return from_parts.shard_state(), from_whole.shard_state()


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1), (1, 4)])
def test_parts_of_any_number_of_processes_are_restored_in_any_other(before, after):
    batches = hard_batches([13, 4], 4)
    whole = MemoryBank(20, 4, seed=3)
    for step, rows in enumerate(batches):
        whole.enqueue(rows, ids=ids_of(rows, step), labels=ids_of(rows, step) % 4)
    saved = [part for _, part, _ in in_processes(before, search_bank, batches, 20, 2, True, ())]
    restored = in_processes(after, load_bank, saved, whole.state_dict())
    for parts in zip(*restored, strict=True):
        for name in ("rows", "ids", "labels"):
            assert torch.equal(torch.cat([part[name] for part in parts]), getattr(whole, name))


def count_calls(options):
    """The collective calls of a step, for each k and seed of the shuffle."""
    calls = []
    for name in ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "all_gather_object"):
        call = getattr(torch.distributed, name)

        def counted(*given, name=name, call=call, **more):
            calls.append(name)
            return call(*given, **more)

        setattr(torch.distributed, name, counted)
    counts = []
    for k, seed in options:
        method = MeanShift(nn.Linear(6, 8), 8, k=k, bank_size=32, sharded=True)
        method.shuffle_seed = seed
        views = torch.randn(4, 6)
        method(views, views, ids=torch.arange(4), labels=torch.arange(4))
        counts.append(len(calls))
        calls.clear()
    return counts


def test_one_neighbor_needs_no_communication():
    for plain, searched, shuffled in in_processes(2, count_calls, [(1, None), (2, None), (1, 3)]):
        assert plain == 0 and searched > 0 and shuffled > 0


# Batch norm


def apply_norm(norm, x, weights, sizes):
    """Two training passes with gradients, then one in eval mode, of this process's rows."""
    first = sum(sizes[: distributed.rank()])
    norm = convert_sync_batch_norm(nn.Sequential(copy.deepcopy(norm)), CPU)[0]
    mine = x[first : first + sizes[distributed.rank()]].clone().requires_grad_()
    passes = []
    for _ in range(2):
        y = norm(mine)
        (y * weights[first : first + len(mine)]).sum().backward()
        passes.append((y.detach(), mine.grad))
    gradients = [parameter.grad for parameter in norm.parameters()]
    norm.eval()
    return passes, gradients, norm.state_dict(), norm(mine).detach(), type(norm).__name__


def apply_norms(cases):
    return [apply_norm(*case) for case in cases]


def norm_cases(world):
    """Batch norms of vectors and images, with and without momentum, and uneven batches."""
    generator = torch.Generator().manual_seed(0)
    for shape, momentum in itertools.product([(11, 5), (9, 4, 3, 3)], [0.1, None]):
        kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
        norm = kind(shape[1], momentum=momentum)
        nn.init.normal_(norm.weight, generator=generator)
        nn.init.normal_(norm.bias, generator=generator)
        x = torch.randn(shape, generator=generator) * 3 + 30  # the mean is far above the variance
        weights = torch.randn(shape, generator=generator)
        sizes = {2: [shape[0] - 2, 2], 3: [1, shape[0] - 4, 3]}[world]
        yield norm, x, weights, sizes


@pytest.mark.parametrize("world", [2, 3])
def test_synchronized_batch_norm_is_that_of_the_whole_batch_in_value_and_gradient(world):
    cases = list(norm_cases(world))
    results = in_processes(world, apply_norms, cases)
    for (norm, x, weights, _), ranks in zip(cases, zip(*results, strict=True), strict=True):
        passes, gradients, state, evaluated, plain = apply_norm(norm, x, weights, [len(x)])
        assert plain == type(norm).__name__
        for index, (expected_y, expected_dx) in enumerate(passes):
            y, dx = (torch.cat(parts) for parts in zip(*(r[0][index] for r in ranks), strict=True))
            torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(dx, expected_dx, rtol=1e-4, atol=1e-5)
        for index, expected in enumerate(gradients):
            total = sum(rank[1][index] for rank in ranks)
            torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
        for rank in ranks:
            assert rank[4] == "SyncBatchNorm"
            for name, expected in state.items():
                torch.testing.assert_close(rank[2][name], expected)
        torch.testing.assert_close(torch.cat([rank[3] for rank in ranks]), evaluated)


def test_a_large_mean_does_not_drown_the_variance():
    norm = nn.BatchNorm1d(2)
    norm.__class__ = SyncBatchNorm
    x = torch.tensor([[1000.0, 1e4], [1000.5, 1e4 + 2], [1001.0, 1e4 + 4]])
    expected = F.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-3, atol=5e-3)


# Whole steps


def take_steps(count, batch_size, dtype, lr, options):
    """Losses and purity of some steps, and this process's part of the bank."""
    torch.manual_seed(1)
    encoder = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16),
    )  # fmt: skip
    method = MeanShift(encoder, 16, bank_size=300, **options).to(dtype).train()
    convert_sync_batch_norm(method, CPU)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr, 0.9)
    black = torch.zeros(2, 3, 12, 12, dtype=dtype)
    module = distributed.data_parallel(method, lambda wrapped: wrapped(black, black).loss)
    images = torch.randn(500, 3, 12, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    steps = []
    for step in range(count):
        ids = torch.randint(0, 500, (batch_size,), generator=torch.Generator().manual_seed(step))
        ids = own(ids)
        views = [images[ids] + images[(ids + offset + step) % 500] / 10 for offset in (1, 2)]
        output = module(*views, ids=ids, labels=ids % 4)
        optimizer.zero_grad(set_to_none=True)
        (output.loss * (len(ids) * distributed.world_size() / batch_size)).backward()
        optimizer.step()
        method.after_update()
        means = torch.stack([output.loss.detach(), output.metrics["purity"][0]])
        steps.append(distributed.all_sum(means * len(ids) / batch_size))
    return torch.stack(steps).double(), method.bank.shard_state()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sharded"),
    [
        (2, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
def test_processes_follow_the_losses_and_purity_of_one_for_fifty_steps(world, sharded):
    """In float32, with synchronized batch norm and parts of 8 and 9 images.

    A rounding error may swap two neighbors that are nearly tied, which a few steps show.
    """
    given = (50, 35, torch.float32, 0.005, {"k": 5, "sharded": sharded})
    alone, whole = take_steps(*given)
    results = in_processes(world, take_steps, *given)
    for losses, _ in results:
        difference = (losses - alone).abs()
        assert difference.max() < 2e-3 and difference.median() < 1e-5
        assert torch.equal(losses, results[0][0])
    assert alone[0, 0] > 1.5 and alone[-1, 0] < 0.6  # it learned, so there was much to follow
    parts = [part["ids"] for _, part in results]
    assert torch.equal(torch.cat(parts) if sharded else parts[0], whole["ids"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"k": 5, "sharded": True},
        {"symmetric": True, "whiten": True},
        pytest.param({"k": 2}, marks=pytest.mark.slow),
        pytest.param({"symmetric": True}, marks=pytest.mark.slow),
        pytest.param({"k": 5, "whiten": True}, marks=pytest.mark.slow),
    ],
)
def test_in_float64_they_agree_to_thirteen_digits_at_ten_times_the_learning_rate(options):
    """Where no rounding is near enough to a tie to hide an error."""
    given = (15, 35, torch.float64, 0.05, options)
    alone, _ = take_steps(*given)
    for losses, _ in in_processes(3, take_steps, *given):
        assert (losses - alone)[:, 0].abs().max() < 1e-13
        assert (losses - alone)[:, 1].abs().max() < 1e-6  # purity is counted in float32


# Bytes that are received


def received_bytes(cases):
    """The bytes that this process receives in a step, for each case."""
    received = []
    for name in ("all_gather_into_tensor", "all_to_all_single"):
        call = getattr(torch.distributed, name)

        def counted(output, *rest, call=call, **more):
            if output.shape != (distributed.world_size(),):  # the numbers of rows do not count
                received.append(output.numel() * output.element_size())
            return call(output, *rest, **more)

        setattr(torch.distributed, name, counted)
    totals = []
    for k, sharded, shuffled, dtype in cases:
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(48, 8))
        method = MeanShift(encoder, 8, bank_size=96, k=k, sharded=sharded, bank_dtype=dtype)
        method.shuffle_seed = 7 if shuffled else None
        images = own(torch.randn(24, 3, 4, 4))
        method(images, images, ids=torch.arange(len(images)))
        totals.append(sum(received))
        received.clear()
    return totals


@pytest.mark.parametrize("world", [2, 3])
def test_the_model_of_the_cost_counts_the_bytes_that_are_received(world):
    cases = [
        (1, False, False, torch.float32),
        (1, False, True, torch.float32),
        (5, False, False, torch.float32),
        (5, False, True, torch.bfloat16),
        (3, True, False, torch.float32),
        (5, True, True, torch.bfloat16),
    ]
    results = in_processes(world, received_bytes, cases)
    for case, received in zip(cases, zip(*results, strict=True), strict=True):
        k, sharded, shuffled, dtype = case
        load = Load(
            world, batch=24, dim=8, k=k, parameters=0, side=4, sharded=sharded,
            batch_norm="shuffle" if shuffled else "local", element=dtype.itemsize,
        )  # fmt: skip
        # The model leaves out what a process sends to itself, which is counted here.
        expected = sum(load.received().values()) * world / (world - 1)
        assert sum(received) / world == pytest.approx(expected, rel=0.01)
