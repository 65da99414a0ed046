"""k-NN and its exact search, against scikit-learn and against plain Python."""

import collections
import math
import operator
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from torch import nn
from torch.nn import functional as F

from meanshift import config
from meanshift.data import open_source
from meanshift.data.arrays import ArraySource
from meanshift.evaluation import knn
from meanshift.evaluation.knn import KNNMonitor, knn_accuracy, knn_correct, neighbors, vote
from meanshift.models.encoder import build_backbone
from meanshift.models.features import extract_features
from meanshift.models.weights import fingerprint
from meanshift.ops.image import normalize
from tests.support.forked import in_processes


def random_rows(count, dim, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def sample_images(split, count):
    source = open_source("sample")[split]
    return source.subset(torch.arange(0, len(source), len(source) // count))


def pixels_of(source):
    return source.read_batch(torch.arange(len(source))).permute(0, 3, 1, 2).float() / 255


def winner(labels):
    """The most frequent label; of equally frequent ones the one that stands first."""
    counts = collections.Counter(labels)
    return next(label for label in labels if counts[label] == max(counts.values()))


def inner(a, b):
    return sum(map(operator.mul, a, b))


def cosine(a, b):
    return inner(a, b) / math.sqrt(inner(a, a) * inner(b, b))


def predict(train, labels, query, k):
    ranked = sorted(range(len(train)), key=lambda index: -cosine(train[index], query))
    return winner([labels[index] for index in ranked[:k]])


# Votes


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([2], 2), ([1, 0], 1), ([0, 1, 1], 1), ([2, 1, 1, 2], 2), ([0, 3, 2, 2, 3], 3)],
)
def test_ties_go_to_the_nearest_among_the_tied(labels, expected):
    assert vote(torch.tensor([labels]), 4)[:, 0].tolist() == [expected]


@given(
    st.integers(1, 9).flatmap(
        lambda k: st.lists(st.lists(st.integers(0, 4), min_size=k, max_size=k), min_size=1)
    )
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_votes_match_plain_counting(rows):
    assert vote(torch.tensor(rows), 5)[:, 0].tolist() == [winner(row) for row in rows]


@given(
    st.integers(1, 9).flatmap(
        lambda k: st.lists(
            st.lists(st.tuples(st.integers(0, 7), st.integers(1, 16)), min_size=k, max_size=k),
            min_size=1,
            max_size=5,
        )
    )
)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_weighted_votes_and_their_ranking_match_plain_counting(rows):
    labels = torch.tensor([[label for label, _ in row] for row in rows])
    weights = torch.tensor([[weight / 16 for _, weight in row] for row in rows])
    for got, row in zip(vote(labels, 8, weights).tolist(), rows, strict=True):
        total = collections.Counter()
        for label, weight in row:
            total[label] += weight
        first = list(dict.fromkeys(label for label, _ in row))
        ranked = sorted(first, key=lambda label: (-total[label], first.index(label)))[:5]
        assert got == ranked + [-1] * (len(got) - len(ranked))


# Neighbors


@pytest.fixture(scope="module")
def real_features():
    """Features of real images: (training rows, labels, test rows, labels)."""
    torch.manual_seed(0)
    backbone, _ = build_backbone(config.Encoder(name="resnet10", width=0.5))
    parts = []
    for part in (sample_images("train", 2000), sample_images("test", 400)):
        parts += [
            extract_features(backbone, part, image_size=32, device=torch.device("cpu")),
            part.labels,
        ]
    return parts


def test_neighbors_of_real_features_are_those_of_scikit_learn(real_features):
    train, labels, test, truth = real_features
    indices, similarities = (
        torch.cat(parts) for parts in zip(*neighbors(train, test, 20, chunk=150), strict=True)
    )
    theirs = NearestNeighbors(n_neighbors=20, metric="cosine", algorithm="brute")
    distance, expected = theirs.fit(train.double().numpy()).kneighbors(test.double().numpy())
    np.testing.assert_allclose(1 - similarities.numpy(), distance, atol=2e-6)
    # Float32 may swap two that are equally near.
    assert (indices.numpy() == expected).mean() > 0.999
    for k in (1, 7, 20):
        voted = [winner(labels[row[:k]].tolist()) for row in expected]
        expected_accuracy = 100 * float((torch.tensor(voted) == truth).double().mean())
        got = knn_accuracy(train, labels, test, truth, ks=[k])[f"{k}-NN"]
        # At most one of 400 may differ by a swap.
        assert got == pytest.approx(expected_accuracy, abs=0.251)


def test_top_five_counts_the_labels_with_votes_only(real_features):
    train, labels, test, truth = real_features
    got = knn_accuracy(train, labels, test, truth, ks=[3, 20], top5=True)
    assert list(got) == ["3-NN", "20-NN", "20-NN top-5"]
    indices = torch.cat([indices for indices, _ in neighbors(train, test, 20)])
    right = 0
    for row, label in zip(labels[indices].tolist(), truth.tolist(), strict=True):
        counts = collections.Counter(row)
        ranked = sorted(counts, key=lambda one: (-counts[one], row.index(one)))
        right += label in ranked[:5]
    assert got["20-NN top-5"] == pytest.approx(100 * right / len(truth))
    assert got["20-NN"] < got["20-NN top-5"] < 100


@pytest.mark.parametrize(
    ("rows", "chunk"), [(7, 50), (64, 1), (64, 400), (333, 50), (5000, 1), (5000, 400)]
)
def test_neighbors_do_not_depend_on_the_chunks_of_the_search(monkeypatch, rows, chunk):
    train, test = random_rows(500, 6, 1), random_rows(90, 6, 2)
    expected = [torch.cat(parts) for parts in zip(*neighbors(train, test, 9), strict=True)]
    monkeypatch.setattr(knn, "ROWS", rows)
    got = [torch.cat(parts) for parts in zip(*neighbors(train, test, 9, chunk=chunk), strict=True)]
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_of_equally_near_images_the_first_is_nearer():
    train = torch.eye(4).repeat(3, 1)[:, [0, 1, 2, 3]]
    ((indices, similarities),) = neighbors(train, torch.eye(4), 3)
    assert indices.tolist() == [[i, i + 4, i + 8] for i in range(4)]
    assert similarities.eq(1).all()


@pytest.mark.parametrize("dim", [6, 512, 2048])
def test_of_copies_the_first_is_nearer_wherever_they_are(dim):
    """The rounding of a matrix product depends on the row; the order may not."""
    train = random_rows(5000, dim, 1)
    train[-13:] = train[:13]
    train[2500:2513] = train[:13]
    ((indices, _),) = neighbors(train, train[:13], 3)
    assert indices.tolist() == [[i, 2500 + i, 4987 + i] for i in range(13)]


@pytest.mark.parametrize("rows", [700, 65_536])
@pytest.mark.parametrize("copies", [2, 5, 100])
@pytest.mark.parametrize("dim", [6, 512])
def test_the_order_is_that_of_float64_also_among_copies(monkeypatch, rows, copies, dim):
    """Copies in several parts of the training rows, and more copies than neighbors."""
    monkeypatch.setattr(knn, "ROWS", rows)
    train = random_rows(3000, dim, 1).relu()
    train[:: 3000 // copies] = train[0].clone()
    test = train[0] + 0.1 * random_rows(50, dim, 2)
    ((indices, similarities),) = neighbors(train, test, 20)
    exact = F.normalize(test, dim=1).double() @ F.normalize(train, dim=1).double().T
    order = exact.float().argsort(dim=1, descending=True, stable=True)[:, :20]
    assert torch.equal(indices, order)
    assert torch.equal(similarities, exact.float().gather(1, order))
    ((indices, _),) = neighbors(train, test, 20, exact_similarities=False)
    assert torch.equal(indices, order)


@pytest.mark.parametrize("temperature", [0.001, 0.07])
def test_a_low_temperature_does_not_overflow(temperature):
    (train, labels), (test, truth) = clusters(300, 0), clusters(100, 1)
    assert knn_accuracy(train, labels, test, truth, ks=[5], temperature=temperature) == {
        "5-NN": 100
    }
    one = vote(torch.tensor([[0, 1, 1]]), 2, torch.tensor([[1.0, 0.6, 0.6]]).double())
    assert one[0, 0] == 1


def test_a_negative_temperature_is_refused():
    (train, labels), (test, truth) = clusters(30, 0), clusters(10, 1)
    with pytest.raises(ValueError, match="--temperature: got -1"):
        knn_accuracy(train, labels, test, truth, ks=[1], temperature=-1.0)


@pytest.mark.slow
def test_memory_is_set_by_the_chunk():
    """20,000 x 100,000 similarities would be 8 GB; the search may add 300 MB."""
    code = """
import resource, torch
from meanshift.evaluation.knn import neighbors
train, test = torch.randn(100_000, 64), torch.randn(20_000, 64)
list(neighbors(train[:5000], test[:3000], 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
list(neighbors(train, test, 20))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300


# Accuracy


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 30),
    dim=st.integers(3, 8),
    classes=st.integers(1, 5),
    chunk=st.integers(1, 6),
    data=st.data(),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_accuracy_matches_brute_force(seed, size, dim, classes, chunk, data):
    k = data.draw(st.integers(1, size))
    train, test = random_rows(size, dim, seed), random_rows(5, dim, seed + 1)
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, classes, size))
    predicted = torch.tensor(
        [predict(train.tolist(), labels.tolist(), query, k) for query in test.tolist()]
    )
    name = f"{k}-NN"
    assert knn_accuracy(train, labels, test, predicted, ks=[k], chunk=chunk) == {name: 100}
    wrong = predicted.clone()
    wrong[:2] += 1
    assert knn_accuracy(train, labels, test, wrong, ks=[k], chunk=chunk) == {name: 60}


def test_accuracy_matches_scikit_learn_on_the_sample():
    train, test = sample_images("train", 1000), sample_images("test", 200)
    mean = pixels_of(train).mean(0)
    features = [(pixels_of(part) - mean).flatten(1) for part in (train, test)]
    animal = [((part.labels >= 2) & (part.labels <= 7)).long() for part in (train, test)]
    got = knn_accuracy(features[0], animal[0], features[1], animal[1], ks=(1, 5, 21), chunk=64)
    assert list(got) == ["1-NN", "5-NN", "21-NN"]
    for k in (1, 5, 21):  # odd, with two classes: no ties
        theirs = KNeighborsClassifier(k, metric="cosine", algorithm="brute")
        theirs.fit(features[0].numpy(), animal[0].numpy())
        expected = 100 * theirs.score(features[1].numpy(), animal[1].numpy())
        assert got[f"{k}-NN"] == pytest.approx(expected, abs=1e-9)
        predicted = torch.from_numpy(theirs.predict(features[1].numpy()))
        agreed = knn_accuracy(features[0], animal[0], features[1], predicted, ks=[k])
        assert agreed == {f"{k}-NN": 100}


def clusters(count, seed):
    """Points around ten directions, with the direction as label."""
    labels = torch.arange(count) % 10
    return torch.eye(10)[labels] * 5 + 0.3 * random_rows(count, 10, seed), labels


def test_separable_classes_are_recognized_and_shuffled_ones_are_not():
    (train, labels), (test, truth) = clusters(1000, 0), clusters(500, 1)
    assert knn_accuracy(train, labels, test, truth) == {"1-NN": 100, "20-NN": 100}
    shuffled = labels[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    by_chance = knn_accuracy(train, shuffled, test, truth)
    assert all(5 < accuracy < 16 for accuracy in by_chance.values())


def test_length_does_not_matter_only_direction():
    (train, labels), (test, truth) = clusters(200, 0), clusters(100, 1)
    train, test = train + 2, test + 2
    lengths = torch.linspace(0.01, 100, 200)[:, None]
    assert knn_accuracy(train * lengths, labels, test * 7, truth, ks=(1, 3)) == knn_accuracy(
        train, labels, test, truth, ks=(1, 3)
    )
    expected = KNeighborsClassifier(1, metric="cosine").fit((train * lengths).numpy(), labels)
    got = knn_accuracy(train * lengths, labels, test, truth, ks=[1])["1-NN"]
    assert got == pytest.approx(100 * expected.score(test.numpy(), truth.numpy()))


def test_a_k_that_is_given_twice_counts_once(make_context):
    context = make_context(shuffled=True, train=60, test=60)
    once = knn.evaluate(context, ks=[20, 1])
    twice = knn.evaluate(context, ks=[20, 20, 1])
    assert "20-NN top-5" in once.metrics and twice.metrics == once.metrics
    assert twice.settings["ks"] == [20, 1] and twice.options == once.options
    rows, labels = context.train.features, context.train.labels
    accuracy = [knn_accuracy(rows, labels, rows, labels, ks=ks) for ks in ([5], [5, 5])]
    assert accuracy[0] == accuracy[1]


def test_more_neighbors_than_images_are_refused():
    train, labels = clusters(10, 0)
    with pytest.raises(ValueError, match=r"k = 1, 11 on 10 labeled images .* need k from 1 to 10"):
        knn_accuracy(train, labels, train, labels, ks=(1, 11))


def test_a_class_that_training_lacks_is_always_wrong():
    train, labels = clusters(10, 0)
    truth = torch.where(labels < 5, labels, 50)
    assert knn_accuracy(train, labels, train, truth, ks=[1]) == {"1-NN": 50}


def test_a_result_stores_which_images_were_correct(make_context):
    context = make_context(shuffled=True, train=60, test=60)
    result = knn.evaluate(context, ks=[5])
    (indices, _), *rest = neighbors(context.train.features, context.test.features, 5)
    assert not rest
    votes = [winner(row.tolist()) for row in context.train.labels[indices]]
    expected = torch.tensor(votes) == context.test.labels
    assert result.arrays["correct 5-NN"].tolist() == expected.tolist()
    assert set(result.arrays) == {f"correct {name}" for name in result.metrics}
    assert 0 < result.metrics["5-NN"] == 100 * expected.double().mean() < 100


def test_processes_put_the_correct_images_together_in_their_order(real_features):
    expected = knn_correct(*real_features, ks=[1, 5], chunk=150)
    for rows in in_processes(3, knn_correct_in_chunks, *real_features):
        assert all(torch.equal(rows[name], expected[name]) for name in expected)


def knn_correct_in_chunks(*features):
    return knn_correct(*features, ks=[1, 5], chunk=37)


# The monitor


def test_the_monitor_evaluates_the_backbone_it_gets():
    train, validation = sample_images("train", 500), sample_images("test", 100)
    features = [normalize(pixels_of(part)).flatten(1) for part in (train, validation)]
    expected = knn_accuracy(features[0], train.labels, features[1], validation.labels)
    monitor = KNNMonitor(train, validation, image_size=32)
    assert monitor(nn.Flatten()) == expected
    assert 15 < expected["20-NN"] < 60
    blind = nn.Sequential(nn.AvgPool2d(32), nn.Flatten())
    assert monitor(blind)["20-NN"] < expected["20-NN"]
    assert monitor.first["20-NN"].double().mean() == expected["20-NN"] / 100
    assert torch.equal(monitor.newest["20-NN"], monitor.correct(blind)["20-NN"])
    centered = [rows - features[0].mean(0) for rows in features]
    pixels = knn_correct(centered[0], train.labels, centered[1], validation.labels)
    assert torch.equal(monitor.raw_pixels()["20-NN"], pixels["20-NN"])


def test_the_monitor_keeps_the_features_of_the_first_and_the_newest_weights():
    train, validation = sample_images("train", 60), sample_images("test", 20)
    monitor = KNNMonitor(train, validation, image_size=32, keep_features=True)
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)) for _ in range(3)]
    for network in networks:
        monitor(network)
    monitor.raw_pixels()
    assert list(monitor.features) == [fingerprint(networks[0]), fingerprint(networks[2])]
    images = normalize(pixels_of(validation))
    for network, (rows, tested) in zip(networks[::2], monitor.features.values(), strict=True):
        assert rows.shape == (len(train), 4)
        torch.testing.assert_close(tested, network(images))
    plain = KNNMonitor(train, validation, image_size=32)
    plain(networks[0])
    assert not plain.features


def test_the_monitor_takes_a_fixed_part_of_a_large_set():
    train, validation = sample_images("train", 500), sample_images("test", 100)
    parts = [KNNMonitor(train, validation, image_size=32, max_images=50).train for _ in range(2)]
    titles = [[part.title(index) for index in range(len(part))] for part in parts]
    assert titles[0] == titles[1]
    assert len(set(titles[0])) == 50
    assert len(parts[0].labels.unique()) >= 8
    assert len(KNNMonitor(train, validation, image_size=32, max_images=500).train) == 500


def test_the_monitor_leaves_out_a_k_that_a_tiny_set_cannot_have():
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    source = ArraySource(pixels, np.arange(12) % 2, name="toy")
    assert KNNMonitor(source, source, image_size=32)(nn.Flatten()) == {"1-NN": 100}
