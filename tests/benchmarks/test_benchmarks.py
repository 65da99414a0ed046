"""The baseline computes what ours computes, contenders alternate, and tables report ratios."""

import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import benchmarks
from benchmarks import (
    baseline,
    decoding,
    evaluation,
    growth,
    hover,
    large_knn,
    memory,
    search,
    table,
    training,
    views,
)
from benchmarks.__main__ import main
from benchmarks.run import run_tables
from benchmarks.step import STEP, BareStep, measure_step
from benchmarks.table import Row, alternate, format_rows, ratios
from benchmarks.worker import Worker
from meanshift.config import Views
from meanshift.config.samples import IMAGENET_MEAN as MEAN
from meanshift.config.samples import IMAGENET_STD as STD
from meanshift.data import open_source
from meanshift.data.packed import pack
from meanshift.methods import MeanShift
from meanshift.reproduce.cost import PhaseTimer

DIM, BATCH = 8, 16
TINY = STEP.with_overrides(
    {
        "encoder.name": "resnet10",
        "encoder.width": 0.125,
        "encoder.stem": "small-stride2",
        "data.image_size": 16,
        "method.bank_size": 64,
        "train.batch_size": 8,
        "train.precision": "float32",
        "train.device": "cpu",
    }
)


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, DIM))


@pytest.fixture
def pair():
    """Ours and the baseline with the same weights and the same bank."""
    ours = MeanShift(encoder(), DIM, k=5, bank_size=64)
    theirs = baseline.MeanShift(encoder(), DIM, k=5, bank_size=64, momentum=0.99)
    theirs.predictor.load_state_dict(ours.predictor.state_dict())
    theirs.queue.copy_(ours.bank.rows)
    return ours, theirs


# The baseline


def test_the_baseline_takes_the_same_steps(pair):
    """Its target is updated before the forward pass, ours after the step: the weights are equal."""
    ours, theirs = pair
    labels = torch.arange(BATCH) % 4
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in pair]
    for seed in range(6):  # the bank wraps
        generator = torch.Generator().manual_seed(seed)
        weak, strong = torch.randn(2, BATCH, 3, 2, 2, generator=generator)
        output = ours(strong, weak, labels=labels)
        loss = theirs(weak, strong, labels)
        torch.testing.assert_close(output.loss, loss)
        # The baseline counts the target itself, which is always of the right class.
        purity, _ = output.metrics["purity"]
        torch.testing.assert_close(float((1 + 4 * purity) / 5), float(theirs.purity))
        for each, optimizer in zip((output.loss, loss), optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        ours.after_update()
    torch.testing.assert_close(ours.bank.rows, theirs.queue)
    theirs.after_update()
    for name, parameter in ours.target.named_parameters():
        torch.testing.assert_close(parameter, theirs.target.get_parameter(name))


def test_another_baseline_would_be_noticed(pair):
    ours, theirs = pair
    theirs.k = 4
    both_views = torch.randn(2, BATCH, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(BATCH, dtype=torch.int64)
    loss = theirs(*both_views, labels)
    assert abs(ours(both_views[0], both_views[1], labels=labels).loss - loss) > 1e-4


def test_the_views_of_the_baseline_are_those_of_the_paper():
    image = Image.fromarray(open_source("sample")["train"].read_batch(torch.arange(1))[0].numpy())
    only_gray = Views(crop_area=(1.0, 1.0), flip=0.0, jitter=0.0, gray=1.0, blur=0.0)
    weak, strong = baseline.TwoCrops(only_gray, 24)(image)
    assert weak.shape == strong.shape == (3, 24, 24)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    pixels = strong * std + mean
    assert torch.allclose(pixels[0], pixels[1], atol=1e-5)  # gray
    assert not torch.allclose(weak[0] * 0.229 + 0.485, weak[1] * 0.224 + 0.456, atol=1e-2)


def test_the_baseline_takes_its_settings_from_the_config(monkeypatch):
    seen = {}
    sgd = torch.optim.SGD
    model = baseline.MeanShift

    def watched_sgd(parameters, lr, **settings):
        seen.update(lr=lr, **settings)
        return sgd(parameters, lr, **settings)

    def watched_model(*arguments, **settings):
        seen["method"] = settings
        return model(*arguments, **settings)

    monkeypatch.setattr(torch.optim, "SGD", watched_sgd)
    monkeypatch.setattr(baseline, "MeanShift", watched_model)
    settings = {
        "optim.lr": 0.02,
        "optim.momentum": 0.8,
        "optim.weight_decay": 0.001,
        "method.momentum": 0.9,
        "method.k": 3,
    }
    next(training.baseline_steps(TINY.with_overrides(settings), 1, 0))
    method = {"k": 3, "bank_size": 64, "momentum": 0.9}
    assert seen == {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.001, "method": method}


# Rows and workers


def test_contenders_alternate():
    called = []
    contenders = {name: lambda name=name: called.append(name) or len(called) for name in "ab"}
    assert alternate(contenders, 2) == {"a": [3, 5], "b": [4, 6]}
    assert called == list("ab" * 3)
    assert ratios([6.0, 8.0], [2.0, 4.0]) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("goal", "at_most", "met"),
    [(2.0, False, True), (2.1, False, False), (2.0, True, True), (1.9, True, False)],
)
def test_the_median_of_a_row_decides_whether_its_goal_is_met(goal, at_most, met):
    row = Row("title", (1.0, 2.0, 9.0), goal, at_most=at_most, note="a note")
    assert row.ratio == 2
    assert row.met is met and row.to_dict()["met"] is met
    text = format_rows([row])
    assert ("MISSED" in text) is not met and "1 to 9" in text and "a note" in text


def counting(start):
    yield "ready"
    while True:
        start += 1
        yield start


def failing():
    yield "ready"
    raise ValueError("no more")


@pytest.mark.slow
def test_a_contender_runs_in_a_process_of_its_own():
    worker = Worker(counting, 5)
    assert (worker.next(), worker.seconds()) == (6, 7.0)
    worker.close()
    lost = Worker(failing)
    with pytest.raises(RuntimeError, match="process ended"):
        lost.next()


def first_value(values):
    """The value after the one that means ready."""
    next(values)
    return next(values)


# Search


@pytest.mark.parametrize("name", ["ours", "baseline"])
def test_search_and_loss_are_timed(name, monkeypatch):
    monkeypatch.setattr(search, "QUERIES", 8)
    assert first_value(search.search_and_loss(name, 512)) > 0


def test_a_large_bank_is_timed_beside_its_product(monkeypatch):
    monkeypatch.setattr(search, "QUERIES", 8)
    measured = first_value(search.large_bank(2048))
    assert min(measured["search"], measured["product"], measured["bfloat16"]) > 0
    assert 0 <= measured["changed"] < 0.5


def test_what_is_timed_is_the_search_in_both_types(monkeypatch):
    """Its memory is that of the peak."""
    dtypes = []
    peaks = iter([10, 35])
    bank_search = search.MemoryBank.search

    def watched(self, *arguments):
        dtypes.append(self.rows.dtype)
        return bank_search(self, *arguments)

    def other_neighbors(queries, rows, count):
        dtypes.append(rows.dtype)
        return torch.full((len(queries), count), -1), torch.zeros(len(queries), count)

    monkeypatch.setattr(search, "QUERIES", 8)
    monkeypatch.setattr(search.MemoryBank, "search", watched)
    monkeypatch.setattr(search, "nearest_neighbors", other_neighbors)
    monkeypatch.setattr(search, "resident", lambda _: next(peaks))
    measured = first_value(search.large_bank(2048))
    assert measured["extra"] == 25 and measured["changed"] == 1
    # Once for the neighbors, once for the time.
    assert dtypes == [torch.float32, torch.bfloat16] * 2


# Views


@pytest.mark.parametrize("name", ["ours", "torchvision"])
@pytest.mark.parametrize("size", [32, 224])
def test_views_are_timed(name, size, monkeypatch):
    monkeypatch.setattr(views, "BATCH_SIZE", 3)
    assert first_value(views.one_thread(name, size)) > 0


@pytest.mark.parametrize(("size", "crops"), [(32, 0), (224, 4)])
def test_large_images_are_cropped_as_loader_workers_do(size, crops, monkeypatch):
    calls = []
    crop = views.MultiViewTransform.crop
    monkeypatch.setattr(views, "BATCH_SIZE", 3)
    monkeypatch.setattr(
        views.MultiViewTransform, "crop", lambda *given: calls.append(given) or crop(*given)
    )
    first_value(views.one_thread("ours", size))
    assert len(calls) == crops  # three to warm up, one that is timed


def test_photographs_become_views_in_three_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "BATCH_SIZE", 4)
    decoding.write_photographs(tmp_path / "photos", 5)
    pack(open_source(str(tmp_path / "photos")), tmp_path / "packed", name="photos")
    with Image.open(tmp_path / "photos" / "class0" / "0000.jpg") as image:
        assert image.size == (224, 224)
    assert min(first_value(decoding.image_folder_views(tmp_path / "photos", 9, 0))) > 0
    for folder in ("photos", "packed"):
        assert min(first_value(decoding.our_views(tmp_path / folder, 9, 0))) > 0


def test_each_way_makes_two_views_of_every_photograph(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "BATCH_SIZE", 4)
    decoding.write_photographs(tmp_path / "photos", 5)
    theirs, ours = [], []
    call = baseline.TwoCrops.__call__
    finish = decoding.MultiViewTransform.finish

    def watched_call(self, image):
        theirs.append(call(self, image))
        return theirs[-1]

    def watched_finish(self, *arguments):
        ours.append(finish(self, *arguments))
        return ours[-1]

    monkeypatch.setattr(baseline.TwoCrops, "__call__", watched_call)
    monkeypatch.setattr(decoding.MultiViewTransform, "finish", watched_finish)
    first_value(decoding.image_folder_views(tmp_path / "photos", 9, 0))
    first_value(decoding.our_views(tmp_path / "photos", 9, 0))
    assert [[view.shape for view in both] for both in theirs] == [[(3, 224, 224)] * 2] * 9
    assert [[view.shape for view in both] for both in ours] == [
        [(size, 3, 224, 224)] * 2 for size in (4, 4, 1)
    ]


# Steps

SECONDS = {
    "views": 1,
    "online forward": 2,
    "target forward": 3,
    "search and loss": 4,
    "backward": 5,
    "optimizer": 6,
    "moving average": 7,
    "bare": 8,
    "search": 9,
}


class FakeTimer(PhaseTimer):
    """Every phase takes the seconds above."""

    def time(self, name, work):
        self.seconds[name] = [float(SECONDS[name])]
        return work()


def test_the_ratios_of_a_step_are_those_of_its_phases(monkeypatch):
    monkeypatch.setattr(training, "PhaseTimer", FakeTimer)
    assert first_value(training.step_and_bare(TINY)) == (28, 8, 4)
    # Batches of 8 stand for one of 32: the encoders' time counts four times, the search's once.
    assert first_value(training.search_fraction(TINY, 32)) == 9 / (4 * (28 - 4) + 9)
    assert first_value(growth.measure_steps([TINY], 1))[0][0] > 0
    monkeypatch.setattr(growth, "PhaseTimer", FakeTimer)
    assert first_value(growth.measure_steps([TINY, TINY], 2)) == [(28, 4)] * 2


def test_the_phases_of_a_step_add_up(monkeypatch):
    monkeypatch.setattr("benchmarks.step.PhaseTimer", FakeTimer)
    text = measure_step(TINY, rounds=1)
    for name, seconds in list(SECONDS.items())[:7]:
        assert f"  {name:22}{seconds / 28:7.1%}" in text
    assert f"optimizer: {28 / 8:.3f} (" in text


def test_only_the_asymmetric_step_is_timed():
    with pytest.raises(ValueError, match=r"--method\.symmetric"):
        measure_step(TINY.with_overrides({"method.symmetric": True}), rounds=1)


def test_seconds_per_step_do_not_count_the_first_batch(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(training, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def spend(seconds):
        now[0] += seconds

    def make_steps():
        while True:
            spend(5)
            yield lambda: spend(2)

    seconds = training._time_steps(make_steps, 3)
    assert [next(seconds) for _ in range(3)] == [0, (3 * 2 + 2 * 5) / 3, (3 * 2 + 2 * 5) / 3]


def test_steps_are_timed():
    assert first_value(training.our_steps(TINY, 1)) > 0
    assert first_value(training.baseline_steps(TINY, 1, 0)) > 0
    whole, bare, search_and_loss = first_value(training.step_and_bare(TINY))
    assert whole > search_and_loss > 0 and bare > 0


# Memory


def test_the_parts_of_a_process_are_bytes_of_its_tensors():
    parts = first_value(memory.peak_and_parts(TINY, False))
    assert parts["peak"] > parts["Python and torch"] > 0
    assert parts["bank"] == 64 * 16 * 4 + 2 * 64 * 8  # rows of 16 values, ids and labels
    assert parts["gradients"] == parts["optimizer"] < parts["weights"]
    assert parts["views"] == 8 * 3 * 16**2 * (1 + 3 * 4)  # bytes, and three batches of floats


def test_weights_are_counted_once_and_without_the_bank():
    method = BareStep(TINY).method
    tensors = {*method.parameters(), *method.buffers()} - set(method.bank.buffers())
    parts = first_value(memory.peak_and_parts(TINY, False))
    assert parts["weights"] == sum(tensor.nbytes for tensor in tensors)


def test_activations_are_what_autograd_saves_without_the_weights_and_the_batch():
    online = nn.Linear(4, 3)
    target = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    method = types.SimpleNamespace(
        parameters=online.parameters,
        embed=online,
        predict=torch.exp,
        target=target,
        project=target,
    )
    timed_step = types.SimpleNamespace(method=method, view=torch.ones(7, 4))
    assert memory.activations(timed_step) == (7 * 3 * 4, 3 * 7 * 5 * 4)


# Growth


def test_exponents_are_those_of_a_power():
    values = (1, 2, 8, 64)
    assert math.isclose(growth.exponent(values, [3 * x**1.5 for x in values]), 1.5)


def test_growth_is_measured_and_drawn(tmp_path):
    measured = first_value(growth.measure_steps([TINY, TINY], 1))
    assert len(measured) == 2 and all(step > search > 0 for step, search in measured)
    points = [growth.Point(x, x * 1.0, x * 0.1) for x in (1, 2, 4, 8)]
    growth.draw(dict.fromkeys(growth.AXES, points), tmp_path)
    with Image.open(tmp_path / "growth.png") as image:
        assert image.width > 1000


# Evaluation


@pytest.mark.parametrize("decaying", [True, False])
def test_features_are_unit_rows_with_or_without_structure(decaying, monkeypatch):
    monkeypatch.setattr(evaluation, "IMAGES", 400)
    monkeypatch.setattr(evaluation, "QUERIES", 100)
    train, test = evaluation.random_features(decaying=decaying)
    assert train.shape == (400, 512) and test.shape == (100, 512)
    torch.testing.assert_close(torch.cat([train, test]).norm(dim=1), torch.ones(500))
    energy = torch.linalg.svdvals(train) ** 2
    assert bool(energy[:50].sum() / energy.sum() > 0.8) is decaying


def write_features(path, splits, *, width=12):
    """A file such as `meanshift embed` writes."""
    rows = 7 * torch.randn(len(splits), width, generator=torch.Generator().manual_seed(0))
    with path.open("wb") as file:
        np.savez(file, embedding=rows.numpy(), split=np.array(splits))
    return rows


@pytest.mark.extras
def test_features_of_a_file_are_searched_alone(tmp_path, capsys):
    pytest.importorskip("faiss")
    rows = write_features(tmp_path / "mine.npz", ["train"] * 40 + ["val"] * 9)
    train, test = evaluation.read_features(tmp_path / "mine.npz")
    assert torch.equal(torch.cat([train, test]), nn.functional.normalize(rows)) and len(test) == 9
    plain, row = run_tables(["evaluation"], rounds=2, out=tmp_path, features=tmp_path / "mine.npz")
    assert row.title == "20-NN, 40 x 9 x 12, features of mine.npz: / faiss flat"
    assert plain.title.endswith("/ faiss, without the kernel")
    assert len(row.ratios) == 6 and row.goal is None
    assert "100.000% of the neighbors" in capsys.readouterr().out


@pytest.mark.extras
def test_the_speed_of_a_search_is_a_ratio_to_that_of_faiss(tmp_path, monkeypatch):
    pytest.importorskip("faiss")
    write_features(tmp_path / "mine.npz", ["train"] * 40 + ["val"] * 9)

    def fake(contenders, rounds):
        assert alternate(contenders, rounds)
        return {
            "faiss": [4.0, 5.0],
            "operators": [2.0, 2.0],
            "kernel": [1.0, 2.0],
        }

    monkeypatch.setattr(evaluation, "alternate", fake)
    plain, row = evaluation.rows(2, features_file=tmp_path / "mine.npz")
    assert plain.ratios == (2.0, 2.5)
    assert row.ratios == (4.0, 2.5)


def test_features_of_one_split_are_queries_of_each_other(tmp_path):
    for split in ("train", "val"):
        rows = write_features(tmp_path / "one.npz", [split] * 60)
        train, test = evaluation.read_features(tmp_path / "one.npz")
        assert len(train) == 50 and torch.equal(test, nn.functional.normalize(rows)[5::6])


def test_files_without_features_are_refused(tmp_path):
    file = tmp_path / "few.npz"
    write_features(file, ["train"] * 19 + ["val"])
    with pytest.raises(ValueError, match="20 rows; need 20 to search"):
        evaluation.read_features(file)
    np.savez(file, other=np.zeros(3))
    np.save(tmp_path / "rows.npy", np.zeros((30, 4)))
    (tmp_path / "text.npz").write_text("nothing")
    (tmp_path / "zip.npz").write_bytes(b"PK\x03\x04 and no more")
    for name in ("few.npz", "rows.npy", "text.npz", "zip.npz"):
        with pytest.raises(ValueError, match="made by `meanshift embed`"):
            evaluation.read_features(tmp_path / name)


# The command


def test_a_run_prints_and_writes_every_row_with_the_machine(tmp_path, monkeypatch, capsys):
    fake = types.SimpleNamespace(rows=lambda rounds: iter([Row("invented", (1.0,) * rounds, 0.5)]))
    monkeypatch.setitem(sys.modules, "benchmarks.fake", fake)
    run_tables(["fake"], rounds=3, out=tmp_path)
    contents = json.loads((tmp_path / "bench.json").read_text())
    assert contents["rows"][0]["ratios"] == [1.0, 1.0, 1.0]
    assert contents["rows"][0]["met"] is True
    assert contents["machine"]["threads"] == torch.get_num_threads()
    assert contents["versions"]["torch"]
    assert "invented" in capsys.readouterr().out


def test_without_a_browser_the_hover_is_left_out_with_a_reason(monkeypatch, capsys):
    monkeypatch.setattr(hover.shutil, "which", lambda name: None)
    assert list(hover.rows(1)) == []
    assert "chromium is not installed" in capsys.readouterr().err


def test_every_table_is_a_module():
    folder = Path(table.__file__).parent
    assert all((folder / f"{name}.py").exists() for name in [*benchmarks.TABLES, "scale"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nonsense", "need any of training"),
        ("transfer views", "alone"),
        ("cost one two", "alone"),
        ("views --rounds 0", "--rounds: got 0, need 1"),
        ("views --features FILE", "is for evaluation"),
        ("evaluation --features none.npz", "no such file"),
        ("evaluation --features FILE", "install faiss"),
        ("cost no/run", "no/run: not a run directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, capsys, words, message):
    file = tmp_path / "mine.npz"
    write_features(file, ["train"] * 30)
    monkeypatch.setattr(evaluation, "installed", lambda _: False)
    arguments = [str(file) if word == "FILE" else word for word in words.split()]
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_package_does_not_import_the_benchmarks():
    package = Path(sys.modules["meanshift"].__file__).parent
    importing = [p.name for p in package.rglob("*.py") if "from benchmarks" in p.read_text()]
    assert importing == []


def test_a_large_search_is_extrapolated(monkeypatch):
    monkeypatch.setattr(large_knn, "ROWS", (100, 200))
    monkeypatch.setattr(large_knn, "write_features", lambda file: None)

    class FakeWorker:
        def __init__(self, *_):
            pass

        def next(self):
            return [1.0, 2.0], [10**8, 2 * 10**8]

        def close(self):
            pass

    monkeypatch.setattr(large_knn, "Worker", FakeWorker)
    exponent, first, last, extra, whole = large_knn.rows(3)
    assert exponent.ratio == pytest.approx(1.0)
    assert (first.ratio, last.ratio) == (0.1, 0.2)
    memory = 2e8 + 1e6 * (10_000_000 - 200)
    assert extra.ratio == pytest.approx(memory / 24e9)
    assert whole.ratio == pytest.approx((memory + 4 * 512 * 1e7) / 24e9)


def test_a_large_search_reads_a_mapped_file(tmp_path, monkeypatch):
    monkeypatch.setattr(large_knn, "ROWS", (100, 200))
    large_knn.write_features(tmp_path / "features.npy")
    threads = torch.get_num_threads()
    measured = large_knn.measure_searches(tmp_path / "features.npy", 1)
    assert next(measured) == ([], [])
    seconds, memory = next(measured)
    torch.set_num_threads(threads)
    assert len(seconds) == len(memory) == 2
    assert all(each > 0 for each in seconds)
    assert large_knn.anonymous_bytes() > 10**6
