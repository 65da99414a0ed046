"""Many processes are the same program as one: bank, batch norm, steps, features, by real ones."""

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


# The talk itself


def talk():
    rank, world = distributed.rank(), distributed.world_size()
    rows = torch.arange(3 * (rank + 1)).view(rank + 1, 3) + 100 * rank
    sent = [(rank + other) % 2 + 1 for other in range(world)]
    letters = torch.cat([torch.full((n, 1), 10 * rank + o) for o, n in enumerate(sent)])
    received = distributed.all_to_all_counts(sent)
    tree = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    (distributed.all_sum(tree).square() * (rank + 1)).sum().backward()
    return {
        "rows": distributed.all_gather_rows(rows),
        "none": distributed.all_gather_rows(rows[:0]),
        "received": distributed.all_to_all(letters, sent, received)[:, 0].tolist(),
        "most": distributed.all_max(rank, -rank),
        "share": distributed.shard_range(10),
        "gradient": tree.grad,
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_letters_and_sums_arrive(world):
    told = in_processes(world, talk)
    rows = torch.cat([torch.arange(3 * (r + 1)).view(r + 1, 3) + 100 * r for r in range(world)])
    for rank, one in enumerate(told):
        assert torch.equal(one["rows"], rows) and one["none"].shape == (0, 3)
        expected = [10 * r + rank for r in range(world) for _ in range((rank + r) % 2 + 1)]
        assert one["received"] == expected
        assert one["most"] == [world - 1, 0]
        # d/dx of sum_r (r + 1) (sum x)^2, which reaches every process
        total = torch.tensor([sum(1.0 + r for r in range(world)), 2.0 * world])
        torch.testing.assert_close(one["gradient"], 2 * total * sum(r + 1 for r in range(world)))
    shares = [one["share"] for one in told]
    assert shares[0][0] == 0 and shares[-1][1] == 10
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))


def shuffle(rows, seed, layout):
    mine, seen = own(rows).contiguous(memory_format=layout), []

    def function(strange):
        seen.append(strange)
        return strange.flatten(1)[:, :2] * 2 + distributed.rank() * 1000

    back = distributed.apply_shuffled(function, mine, seed)
    like = seen[0].is_contiguous(memory_format=layout)
    return seen[0], back % 1000, (back // 1000)[:, 0], like


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_shuffled_rows_are_worked_on_elsewhere_and_come_back(world, layout):
    rows = torch.arange(11 * 3 * 4, dtype=torch.float32).view(11, 3, 2, 2)
    told = in_processes(world, shuffle, rows, 5, layout)
    assert torch.equal(torch.cat([back for _, back, _, _ in told]), rows.flatten(1)[:, :2] * 2)
    seen = torch.cat([strange for strange, *_ in told])
    assert not torch.equal(seen, rows) and torch.equal(seen.sort(0).values, rows)
    assert all(like for *_, like in told)
    where = torch.cat([where for _, _, where, _ in told])
    assert len(where.unique()) == world  # worked on in every process
    homes = torch.cat([torch.full((len(s),), float(r)) for r, (s, *_) in enumerate(told)])
    assert (where != homes).any()
    other = in_processes(world, shuffle, rows, 6, layout)
    assert not torch.equal(seen, torch.cat([strange for strange, *_ in other]))
    unmoved = in_processes(world, shuffle, rows, None, layout)
    assert torch.equal(torch.cat([strange for strange, *_ in unmoved]), rows)


def fails(rank_that_fails):
    try:
        with distributed.fail_together():
            if distributed.rank() == rank_that_fails or rank_that_fails is None:
                raise OSError("the disk is gone")
    except SharedError as error:
        return str(error)
    return "nothing"


def test_what_fails_in_one_fails_in_all_with_one_message():
    assert in_processes(3, fails, 7) == ["nothing"] * 3
    assert in_processes(3, fails, 1) == ["process 1 of 3: the disk is gone"] * 3
    assert in_processes(3, fails, None) == ["the disk is gone"] * 3
    with pytest.raises(OSError, match="disk is gone"), distributed.fail_together():
        raise OSError("the disk is gone")  # in one process it is what it was


# The bank


def hard(batches, dim, seed=0):
    """Embeddings full of copies, of which some are alike to the last bit and some nearly."""
    drawn = torch.Generator().manual_seed(seed)
    few = unit(7, dim, seed)
    rows = [few[torch.randint(0, 7, (n,), generator=drawn)] for n in batches]
    for one in rows:
        fresh = torch.rand(len(one), generator=drawn) < 0.5
        one[fresh] = unit(int(fresh.sum()), dim, seed + 1)
        close = torch.rand(len(one), generator=drawn) < 0.2
        one[close] = F.normalize(one[close] + 3e-8 * torch.randn(one[close].shape, generator=drawn))
    return rows


def search_in(batches, size, dim, count, sharded, options):
    bank = MemoryBank(size, dim, seed=3, sharded=sharded)
    told = []
    for step, rows in enumerate(batches):
        ids = torch.arange(len(rows)) * 7 % 5 + step % 3
        given = {"ids": own(ids), "labels": own(ids % 4)}
        slots = bank.enqueue(own(rows), **given)
        more = {"exclude_slots": slots} if "own" in options else {}
        more |= {"exclude_ids": own(ids)} if "skip" in options else {}
        found, similarity = bank.search(own(rows), count, filled_only="filled" in options, **more)
        looked = bank.lookup(torch.where(similarity > -torch.inf, found, slots[:, None]))
        told.append((slots, found, similarity, *looked))
    return told, bank.shard_state(), bank.written


OPTIONS = [(), ("own",), ("own", "skip"), ("own", "filled"), ("skip", "filled")]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_bank_in_parts_finds_the_same_bit_for_bit_ties_included(world, options):
    """Uneven batches, smaller than the number of processes too, and around the ring twice."""
    batches = hard([13, 4, 30, 1, 17, 30, 2, 9], 16)
    given = (batches, 61, 16, 5)
    ((alone, held, written),) = in_processes(1, search_in, *given, False, options)
    for sharded in (True, False):
        told = in_processes(world, search_in, *given, sharded, options)
        for step, expected in enumerate(alone):
            parts = zip(*(one[step] for one, _, _ in told), strict=True)
            for name, whole, part in zip(NAMES, expected, parts, strict=True):
                if name == "similarity":  # of which the last bit depends on the product's shape
                    torch.testing.assert_close(torch.cat(part), whole, rtol=0, atol=1e-6)
                else:
                    assert torch.equal(torch.cat(part), whole), (name, step, sharded)
        parts = [part for _, part, _ in told]
        assert {count for _, _, count in told} == {written}
        if sharded:
            for name in ("rows", "ids", "labels"):
                assert torch.equal(torch.cat([part[name] for part in parts]), held[name])
            sizes = [len(part["rows"]) for part in parts]
            assert max(sizes) <= -(-61 // world)  # memory falls with the number of processes
        else:
            assert all(torch.equal(part["rows"], held["rows"]) for part in parts)


NAMES = ("slots", "found", "similarity", "rows", "ids", "labels")


def test_a_bank_smaller_than_the_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"bank of 3 rows for 4 processes.*bank_layout replicated"):
        MemoryBank(3, 2, sharded=True)


def load_into(state, parts):
    bank = MemoryBank(20, 4, seed=9, sharded=True)
    if state is not None:
        bank.load_state_dict(state)
    for part in parts:
        bank.load_shard_state(part)
    return bank.shard_state()


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1), (1, 4)])
def test_parts_of_any_number_of_processes_are_taken_up_by_any_other(before, after):
    batches = hard([13, 4], 4)
    parts = [part for _, part, _ in in_processes(before, search_in, batches, 20, 4, 2, True, ())]
    taken = in_processes(after, load_into, None, parts)
    whole = MemoryBank(20, 4, seed=3)
    for rows, step in zip(batches, range(2), strict=True):
        ids = torch.arange(len(rows)) * 7 % 5 + step % 3
        whole.enqueue(rows, ids=ids, labels=ids % 4)
    for name in ("rows", "ids", "labels"):
        assert torch.equal(torch.cat([part[name] for part in taken]), getattr(whole, name))
    again = in_processes(after, load_into, whole.state_dict(), [])
    assert torch.equal(torch.cat([part["rows"] for part in again]), whole.rows)


def calls_with(k, batch_norm_seed):
    counted = []
    for name in ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "all_gather_object"):
        call = getattr(torch.distributed, name)

        def count(*given, name=name, call=call, **more):
            counted.append(name)
            return call(*given, **more)

        setattr(torch.distributed, name, count)
    method = MeanShift(nn.Linear(6, 8), 8, k=k, bank_size=32, sharded=True)
    method.shuffle = batch_norm_seed
    views = torch.randn(4, 6)
    method(views, views, ids=torch.arange(4), labels=torch.arange(4))
    return counted


def test_one_neighbor_needs_no_talk_at_all():
    assert in_processes(2, calls_with, 1, None) == [[], []]
    assert in_processes(2, calls_with, 2, None) != [[], []]
    assert in_processes(2, calls_with, 1, 3) != [[], []]


# Batch norm


def normalized(norm, x, weights, sizes):
    norm, first = copy.deepcopy(norm), sum(sizes[: distributed.rank()])
    norm = convert_sync_batch_norm(nn.Sequential(norm), CPU)[0]
    mine = x[first : first + sizes[distributed.rank()]].clone().requires_grad_()
    told = []
    for _ in range(2):
        y = norm(mine)
        (y * weights[first : first + len(mine)]).sum().backward()
        told.append((y.detach(), mine.grad))
    gradients = [p.grad for p in norm.parameters()]
    norm.eval()
    judged = norm(mine).detach()
    return told, gradients, norm.state_dict(), judged, type(norm).__name__


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("shape", [(11, 5), (9, 4, 3, 3)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_over_all_is_that_of_the_whole_batch_in_value_and_gradient(
    world, shape, momentum
):
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    norm = kind(shape[1], momentum=momentum)
    drawn = torch.Generator().manual_seed(0)
    nn.init.normal_(norm.weight, generator=drawn)
    nn.init.normal_(norm.bias, generator=drawn)
    x = torch.randn(shape, generator=drawn) * 3 + 30  # a mean that drowns the variance in float32
    weights = torch.randn(shape, generator=drawn)
    sizes = {2: [shape[0] - 2, 2], 3: [1, shape[0] - 4, 3]}[world]
    whole, ((twice, gradients, state, judged, plain),) = (
        norm,
        [normalized(norm, x, weights, [shape[0]])],
    )
    assert plain == kind.__name__ and whole.training
    told = in_processes(world, normalized, norm, x, weights, sizes)
    for at in range(2):
        y = torch.cat([one[0][at][0] for one in told])
        dx = torch.cat([one[0][at][1] for one in told])
        torch.testing.assert_close(y, twice[at][0], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(dx, twice[at][1], rtol=1e-4, atol=1e-5)
    for index, expected in enumerate(gradients):
        torch.testing.assert_close(
            sum(one[1][index] for one in told), expected, rtol=1e-4, atol=1e-4
        )
    for one in told:
        assert one[4] == "SummedBatchNorm"
        for name, expected in state.items():
            torch.testing.assert_close(one[2][name], expected)
    torch.testing.assert_close(torch.cat([one[3] for one in told]), judged)


def test_a_large_mean_does_not_drown_the_variance():
    norm = nn.BatchNorm1d(2)
    norm.__class__ = SyncBatchNorm
    x = torch.tensor([[1000.0, 1e4], [1000.5, 1e4 + 2], [1001.0, 1e4 + 4]])
    expected = F.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-3, atol=5e-3)


# Whole steps


def steps(count, batch, dtype, lr, given):
    torch.manual_seed(1)
    encoder = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16),
    )  # fmt: skip
    method = MeanShift(encoder, 16, bank_size=300, **given).to(dtype).train()
    convert_sync_batch_norm(method, CPU)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr, 0.9)
    black = torch.zeros(2, 3, 12, 12, dtype=dtype)
    stepping = distributed.data_parallel(method, lambda wrapped: wrapped(black, black).loss)
    images = torch.randn(500, 3, 12, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    world, told = distributed.world_size(), []
    for step in range(count):
        ids = torch.randint(0, 500, (batch,), generator=torch.Generator().manual_seed(step))
        ids = own(ids)
        views = [images[ids] + images[(ids + way + step) % 500] / 10 for way in (1, 2)]
        one = stepping(*views, ids=ids, labels=ids % 4)
        optimizer.zero_grad(set_to_none=True)
        (one.loss * (len(ids) * world / batch)).backward()
        optimizer.step()
        method.after_update()
        figures = [torch.stack([one.loss.detach(), one.purity]) * len(ids) / batch]
        told.append([distributed.all_sum(figures[0]).tolist(), one.embeddings[:, 0]])
    losses, embeddings = zip(*told, strict=True)
    return torch.tensor(losses, dtype=torch.float64), embeddings, method.bank.shard_state()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_processes_follow_the_losses_and_purity_of_one_for_fifty_steps(world, sharded):
    """In float32 with synchronized batch norm and shares of 8 and 9 images."""
    given = (50, 35, torch.float32, 0.005, {"k": 5, "sharded": sharded})
    ((alone, _, held),) = in_processes(1, steps, *given)
    told = in_processes(world, steps, *given)
    for losses, *_ in told:
        assert (losses - alone).abs().max() < 1e-4
        assert torch.equal(losses, told[0][0])
    assert alone[0, 0] > 1.5 and alone[-1, 0] < 0.6  # it learned, so there was much to follow
    ids = torch.cat([part["ids"] for *_, part in told]) if sharded else told[0][2]["ids"]
    assert torch.equal(ids, held["ids"])


@pytest.mark.parametrize(
    "more", [{"k": 2}, {"k": 5, "sharded": True}, {"symmetric": True}, {"k": 5, "whiten": True}]
)
def test_in_float64_they_are_the_same_to_thirteen_digits_at_ten_times_the_rate(more):
    """Where no rounding is near enough to a tie to hide a mistake."""
    given = (30, 35, torch.float64, 0.05, more)
    ((alone, *_),) = in_processes(1, steps, *given)
    for told, *_ in in_processes(3, steps, *given):
        assert (told - alone)[:, 0].abs().max() < 1e-13
        assert (told - alone)[:, 1].abs().max() < 1e-6  # purity is counted in float32


# What goes over the wire


def counted(given, shuffle):
    received = []

    def counts(name):
        call = getattr(torch.distributed, name)

        def wrapped(into, *rest, **more):
            if into.shape != (distributed.world_size(),):  # numbers of rows are not counted
                received.append(into.numel() * into.element_size())
            return call(into, *rest, **more)

        setattr(torch.distributed, name, wrapped)

    for name in ("all_gather_into_tensor", "all_to_all_single"):
        counts(name)
    method = MeanShift(nn.Sequential(nn.Flatten(), nn.Linear(48, 8)), 8, bank_size=96, **given)
    method.shuffle = 7 if shuffle else None
    images = own(torch.randn(24, 3, 4, 4))
    method(images, images, ids=torch.arange(len(images)))
    return sum(received)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("k", "sharded", "shuffle", "dtype"),
    [(1, False, False, torch.float32), (1, False, True, torch.float32),
     (5, False, False, torch.float32), (5, False, True, torch.bfloat16),
     (3, True, False, torch.float32), (5, True, True, torch.bfloat16)],
)  # fmt: skip
def test_the_model_of_the_cost_counts_the_bytes_that_are_received(
    world, k, sharded, shuffle, dtype
):
    given = {"k": k, "sharded": sharded, "bank_dtype": dtype}
    load = Load(
        world, batch=24, dim=8, k=k, parameters=0, side=4, sharded=sharded,
        batch_norm="shuffle" if shuffle else "local", element=dtype.itemsize,
    )  # fmt: skip
    expected = sum(load.received().values()) * world / (world - 1)  # here one's own count as well
    told = in_processes(world, counted, given, shuffle)
    assert sum(told) / world == pytest.approx(expected, rel=0.01)
