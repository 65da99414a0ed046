"""Random numbers are a pure function of their address, uniform, and frozen."""

import pytest
import torch
from scipy import stats

from meanshift.runtime import rng

IDS = torch.tensor([0, 1, 12345])
WORD = 2**64


def finalizer(word):
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def unsigned_bits(seed, epoch, sample, stream, column):
    golden = 0x9E3779B97F4A7C15
    key = finalizer(finalizer(finalizer(seed % WORD ^ golden) ^ epoch) ^ stream)
    return finalizer((finalizer(key ^ sample) + golden * (column + 1)) % WORD)


def test_the_mapping_is_frozen():
    assert rng.bits(0, 0, IDS, rng.TARGET, 2).tolist() == [
        [-984608479130546696, -4347719385730987918],
        [-7941226334951223102, -5763827836919185764],
        [8231579601504049320, 9131811399291626560],
    ]
    assert rng.uniform(7, 3, IDS, rng.ONLINE, 2).tolist() == [
        [0.7113331820815527, 0.6726349994306914],
        [0.07707101936594041, 0.0676387576512919],
        [0.12180007116598279, 0.3280578973886086],
    ]
    assert rng.permutation(1, 2, 10).tolist() == [2, 5, 6, 0, 7, 9, 1, 3, 4, 8]
    assert rng.derive_seed(5, 6, rng.INITIAL) == 3081971055728523594


def test_the_streams_are_frozen():
    names = "TARGET ONLINE ORDER SPLIT SAMPLE REPLACEMENT NETWORK INITIAL SHUFFLE".split()
    assert [getattr(rng, name) for name in names] == list(range(9))


@pytest.mark.parametrize("seed", [0, 1, 2**62, -1])
def test_bits_are_splitmix64_in_unsigned_arithmetic(seed):
    ids = torch.tensor([0, 3, 2**40])
    words = rng.bits(seed, 5, ids, rng.SPLIT, 3)
    expected = [[unsigned_bits(seed, 5, i, rng.SPLIT, c) for c in range(3)] for i in ids.tolist()]
    assert [[word % WORD for word in row] for row in words.tolist()] == expected


def test_the_bits_of_an_id_do_not_depend_on_the_other_ids():
    ids = torch.arange(100)
    whole = rng.bits(3, 4, ids, rng.TARGET, 6)
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rng.bits(3, 4, ids[shuffled], rng.TARGET, 6), whole[shuffled])
    assert torch.equal(rng.bits(3, 4, ids[17:18], rng.TARGET, 6), whole[17:18])
    assert torch.equal(rng.bits(3, 4, ids[[9, 9]], rng.TARGET, 6), whole[[9, 9]])


def test_more_columns_do_not_change_the_first_ones():
    many = rng.bits(3, 4, IDS, rng.TARGET, 64)
    assert torch.equal(rng.bits(3, 4, IDS, rng.TARGET, 5), many[:, :5])


def test_the_global_generator_is_neither_used_nor_changed():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = rng.uniform(3, 4, IDS, rng.TARGET, 2), rng.permutation(3, 4, 50)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = rng.uniform(3, 4, IDS, rng.TARGET, 2), rng.permutation(3, 4, 50)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_every_part_of_the_address_matters():
    ids = torch.arange(50)
    addresses = [
        (seed, epoch, stream) for seed in (0, 1, 2) for epoch in (0, 1, 2) for stream in (0, 1, 2)
    ]
    words = [rng.bits(s, e, ids, stream, 4) for s, e, stream in addresses]
    assert torch.stack(words).unique().numel() == len(addresses) * 50 * 4


def test_numbers_are_in_the_unit_interval_and_double():
    numbers = rng.uniform(0, 0, torch.arange(10_000), rng.TARGET, 10)
    assert numbers.dtype == torch.float64
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1


@pytest.mark.parametrize("along", ["ids", "columns", "epochs", "seeds"])
def test_numbers_are_uniform_along(along):
    one = torch.tensor([7])
    numbers = {
        "ids": lambda: rng.uniform(1, 2, torch.arange(20_000), rng.ONLINE, 1),
        "columns": lambda: rng.uniform(1, 2, one, rng.ONLINE, 20_000),
        "epochs": lambda: torch.cat([rng.uniform(1, e, one, rng.ONLINE, 1) for e in range(600)]),
        "seeds": lambda: torch.cat([rng.uniform(s, 2, one, rng.ONLINE, 1) for s in range(600)]),
    }[along]().flatten()
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > 0.01


@pytest.mark.parametrize("shift", [0, 31, 60])
def test_bits_high_and_low_are_balanced(shift):
    words = rng.bits(1, 2, torch.arange(20_000), rng.ONLINE, 1)
    counts = ((words >> shift) & 15).flatten().bincount(minlength=16)
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_neighboring_ids_columns_and_epochs_are_independent():
    def pairs_are_uniform(a, b):
        cells = ((a * 8).long() * 8 + (b * 8).long()).flatten().bincount(minlength=64)
        return stats.chisquare(cells.numpy()).pvalue > 0.01

    ids = torch.arange(20_000)
    now = rng.uniform(1, 2, ids, rng.ONLINE, 2)
    assert pairs_are_uniform(now[:-1, 0], now[1:, 0])
    assert pairs_are_uniform(now[:, 0], now[:, 1])
    assert pairs_are_uniform(now[:, 0], rng.uniform(1, 3, ids, rng.ONLINE, 2)[:, 0])
    assert not pairs_are_uniform(now[:, 0], now[:, 0])


def test_each_epoch_is_another_permutation():
    orders = [rng.permutation(0, epoch, 1000) for epoch in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(1000))
    for a, b in [(0, 1), (1, 2), (0, 2)]:
        assert (orders[a] == orders[b]).float().mean() < 0.02
    assert not torch.equal(orders[0], rng.permutation(1, 0, 1000))


def test_every_id_is_equally_likely_to_be_first():
    first = torch.stack([rng.permutation(0, epoch, 10)[0] for epoch in range(600)])
    assert stats.chisquare(first.bincount(minlength=10).numpy()).pvalue > 0.01


def test_seeds_for_libraries_are_valid_and_differ():
    seeds = {
        rng.derive_seed(s, step, stream) for s in range(5) for step in range(5) for stream in (6, 7)
    }
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))


def test_a_choice_is_a_sorted_subset_of_the_indices():
    chosen = rng.choice(3, 1000, 50, rng.SAMPLE)
    assert len(chosen.unique()) == 50
    assert torch.equal(chosen, chosen.sort().values)
    assert not torch.equal(chosen, rng.choice(4, 1000, 50, rng.SAMPLE))
    assert rng.choice(3, 5, 50, rng.SAMPLE).tolist() == [0, 1, 2, 3, 4]
