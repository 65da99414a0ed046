"""The baseline does the same work as ours, contenders take turns, and tables tell what was met."""

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
from benchmarks import authors, files, growth, judging, memory, searching, table, training, views
from benchmarks.apart import Apart
from benchmarks.run import run
from benchmarks.table import Row, by_turns, describe, over
from meanshift.cli.showing import TABLES
from meanshift.config import Views
from meanshift.data import open_source
from meanshift.data.packed import pack
from meanshift.methods import MeanShift
from meanshift.reproduce.laps import Laps
from meanshift.reproduce.step import STEP, Contender

DIM, BATCH = 8, 16
TINY = STEP.with_overrides(
    {"encoder.name": "resnet10", "encoder.width": 0.125, "encoder.stem": "small-stride2",
     "data.image_size": 16, "method.bank_size": 64, "train.batch_size": 8,
     "train.precision": "float32"}
)  # fmt: skip


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, DIM))


@pytest.fixture
def pair():
    """Ours and the baseline with the same weights and the same bank."""
    ours = MeanShift(encoder(), DIM, k=5, bank_size=64)
    theirs = authors.MeanShift(encoder(), DIM, k=5, bank_size=64, momentum=0.99)
    theirs.predictor.load_state_dict(ours.predictor.state_dict())
    theirs.queue.copy_(ours.bank.rows)
    return ours, theirs


def test_the_baseline_takes_the_same_steps(pair):
    """Its target follows before the forward pass, with the weights that ours followed after."""
    ours, theirs = pair
    labels = torch.arange(BATCH) % 4
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in pair]
    for seed in range(6):  # the bank wraps
        generator = torch.Generator().manual_seed(seed)
        weak, strong = torch.randn(2, BATCH, 3, 2, 2, generator=generator)
        told = ours(strong, weak, labels=labels)
        loss = theirs(weak, strong, labels)
        torch.testing.assert_close(told.loss, loss)
        torch.testing.assert_close((1 + 4 * told.purity) / 5, theirs.purity)
        for one, optimizer in zip((told.loss, loss), optimizers, strict=True):
            optimizer.zero_grad()
            one.backward()
            optimizer.step()
        ours.after_update()
    torch.testing.assert_close(ours.bank.rows, theirs.queue)
    theirs.after_update()
    for name, held in ours.target.named_parameters():
        torch.testing.assert_close(held, theirs.target.get_parameter(name))


def test_another_baseline_would_be_noticed(pair):
    ours, theirs = pair
    theirs.k = 4
    views = torch.randn(2, BATCH, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(BATCH, dtype=torch.int64)
    assert abs(ours(views[0], views[1], labels=labels).loss - theirs(*views, labels)) > 1e-4


def test_the_baselines_views_are_of_the_papers_kind():
    image = Image.fromarray(open_source("sample")["train"].gather(torch.arange(1))[0].numpy())
    plain = Views(crop_area=(1.0, 1.0), flip=0.0, jitter=0.0, gray=1.0, blur=0.0)
    weak, strong = authors.TwoCrops(plain, 24)(image)
    assert weak.shape == strong.shape == (3, 24, 24)
    deviation, mean = (torch.tensor(v)[:, None, None] for v in (authors.DEVIATION, authors.MEAN))
    seen = strong * deviation + mean
    assert torch.allclose(seen[0], seen[1], atol=1e-5)  # gray
    assert not torch.allclose(weak[0] * 0.229 + 0.485, weak[1] * 0.224 + 0.456, atol=1e-2)


def test_contenders_take_turns():
    called = []
    laps = {name: lambda name=name: called.append(name) or len(called) for name in "ab"}
    assert by_turns(laps, 2) == {"a": [3, 5], "b": [4, 6]} and called == list("ab" * 3)
    assert over([6.0, 8.0], [2.0, 4.0]) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("goal", "at_most", "met"),
    [(2.0, False, True), (2.1, False, False), (2.0, True, True), (1.9, True, False)],
)
def test_a_row_is_judged_by_its_median(goal, at_most, met):
    row = Row("what", (1.0, 2.0, 9.0), goal, at_most=at_most, note="why")
    assert row.ratio == 2 and row.met is met and row.to_dict()["met"] is met
    told = describe([row])
    assert ("MISSED" in told) is not met and "1 to 9" in told and "why" in told


def counting(start):
    yield "ready"
    while True:
        start += 1
        yield start


def failing():
    yield "ready"
    raise ValueError("no more")


def test_a_contender_lives_in_a_process_of_its_own():
    apart = Apart(counting, 5)
    assert (apart.ask(), apart.lap()) == (6, 7.0)
    apart.end()
    lost = Apart(failing)
    with pytest.raises(RuntimeError, match="ended before its turn"):
        lost.ask()


def test_exponents_are_those_of_a_power():
    assert math.isclose(growth.exponent([(x, 3 * x**1.5) for x in (1, 2, 8, 64)]), 1.5)


def first(laps):
    next(laps)
    return next(laps)


@pytest.mark.parametrize("name", ["ours", "authors"])
def test_search_and_loss_of_either(name, monkeypatch):
    monkeypatch.setattr(searching, "QUERIES", 8)
    assert first(searching.search_and_loss(name, 512)) > 0


def test_a_large_bank_is_measured_beside_its_product(monkeypatch):
    monkeypatch.setattr(searching, "QUERIES", 8)
    told = first(searching.large_bank(2048))
    assert min(told["search"], told["bare"], told["half"]) > 0 and 0 <= told["changed"] < 0.5


def test_a_large_bank_tells_what_was_searched(monkeypatch):
    """The search is on the clock, in both types; its memory is that of the peak."""
    calls, peaks, search = [], iter([10, 35]), searching.MemoryBank.search

    def noted(self, *of):
        calls.append(self.rows.dtype)
        return search(self, *of)

    def others(queries, rows, count):
        calls.append(rows.dtype)
        return torch.full((len(queries), count), -1), torch.zeros(len(queries), count)

    monkeypatch.setattr(searching, "QUERIES", 8)
    monkeypatch.setattr(searching.MemoryBank, "search", noted)
    monkeypatch.setattr(searching, "nearest", others)
    monkeypatch.setattr(searching, "resident", lambda _: next(peaks))
    told = first(searching.large_bank(2048))
    assert told["extra"] == 25 and told["changed"] == 1
    assert calls == [torch.float32, torch.bfloat16] * 2  # once for the neighbors, once on the clock


@pytest.mark.parametrize("name", ["ours", "torchvision"])
@pytest.mark.parametrize("size", [32, 224])
def test_views_of_either(name, size, monkeypatch):
    monkeypatch.setattr(views, "BATCH", 3)
    assert first(views.one_thread(name, size)) > 0


def test_photographs_to_views_in_three_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BATCH", 4)
    files.write_photographs(tmp_path / "photos", 5)
    pack(open_source(str(tmp_path / "photos")), tmp_path / "packed", name="photos")
    with Image.open(tmp_path / "photos" / "class0" / "0000.jpg") as image:
        assert image.size == (224, 224)
    assert first(files.their_views(tmp_path / "photos", 9, 0)) > 0
    for folder in ("photos", "packed"):
        assert first(files.our_views(tmp_path / folder, 9, 0)) > 0


def test_each_way_makes_two_views_of_every_photograph(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BATCH", 4)
    files.write_photographs(tmp_path / "photos", 5)
    theirs, ours, call, finish = [], [], authors.TwoCrops.__call__, files.TwoViews.finish

    def one(self, image):
        theirs.append(call(self, image))
        return theirs[-1]

    def batch(self, *of):
        ours.append(finish(self, *of))
        return ours[-1]

    monkeypatch.setattr(authors.TwoCrops, "__call__", one)
    monkeypatch.setattr(files.TwoViews, "finish", batch)
    first(files.their_views(tmp_path / "photos", 9, 0))
    first(files.our_views(tmp_path / "photos", 9, 0))
    assert [[view.shape for view in pair] for pair in theirs] == [[(3, 224, 224)] * 2] * 9
    assert [view.shape for pair in ours for view in pair] == [
        (size, 3, 224, 224) for size in (4, 4, 1) for _ in range(2)
    ]


@pytest.mark.parametrize(("size", "cut"), [(32, 0), (224, 4)])
def test_large_views_are_cut_as_loader_workers_do(size, cut, monkeypatch):
    calls, crop = [], views.TwoViews.crop
    monkeypatch.setattr(views, "BATCH", 3)
    monkeypatch.setattr(views.TwoViews, "crop", lambda *of: calls.append(of) or crop(*of))
    first(views.one_thread("ours", size))
    assert len(calls) == cut  # three laps to be warm, one to count


COST = {
    "views": 1, "online forward": 2, "target forward": 3, "search and loss": 4, "backward": 5,
    "optimizer": 6, "target follows": 7, "bare": 8, "search": 9,
}  # fmt: skip


class Told(Laps):
    """Laps of given lengths."""

    def time(self, name, work):
        self.taken[name] = [float(COST[name])]
        return work()


def test_ratios_of_a_step_are_of_its_phases(monkeypatch):
    monkeypatch.setattr(training, "Laps", Told)
    assert first(training.step_and_bare(TINY)) == (28, 8, 4)
    # Batches of 8 stand for one of 32: the encoders' time counts four times, the search's once.
    assert first(training.share_of_search(TINY, 32)) == 9 / (4 * (28 - 4) + 9)
    assert first(growth.points([TINY], 1))[0][0] > 0
    monkeypatch.setattr(growth, "Laps", Told)
    assert first(growth.points([TINY, TINY], 2)) == [(28, 4)] * 2


def test_a_lap_is_all_steps_but_not_the_first_batch(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(training, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def spend(seconds):
        now[0] += seconds

    def feed():
        while True:
            spend(5)
            yield lambda: spend(2)

    laps = training._laps(feed, 3)
    assert [next(laps) for _ in range(3)] == [0, (3 * 2 + 2 * 5) / 3, (3 * 2 + 2 * 5) / 3]


def test_a_step_of_either_and_of_the_bare_encoders():
    assert first(training.our_steps(TINY, 1)) > 0
    assert first(training.authors_steps(TINY, 1, 0)) > 0
    whole, bare, search = first(training.step_and_bare(TINY))
    assert whole > search > 0 and bare > 0


def test_the_parts_of_a_process_are_bytes_of_what_it_holds():
    told = first(memory.peak_and_parts(TINY, False))
    assert told["peak"] > told["Python and torch"] > 0
    assert told["bank"] == 64 * 16 * 4 + 2 * 64 * 8  # rows of 16 values, ids and labels
    assert told["gradients"] == told["optimizer"] < told["weights"]
    assert told["views"] == 8 * 3 * 16**2 * (1 + 3 * 4)  # bytes, and three batches of floats


def test_weights_are_counted_once_and_without_the_bank():
    method = Contender(TINY).method
    held = {*method.parameters(), *method.buffers()} - set(method.bank.buffers())
    told = first(memory.peak_and_parts(TINY, False))
    assert told["weights"] == sum(one.nbytes for one in held)


def test_activations_are_what_autograd_keeps_besides_the_weights_and_the_batch():
    online, target = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    method = types.SimpleNamespace(
        parameters=online.parameters, predict=lambda x: online(x).exp(), target=target,
        project=target,
    )  # fmt: skip
    contender = types.SimpleNamespace(method=method, fixed=torch.ones(7, 4))
    assert memory.activations(contender) == (7 * 3 * 4, 3 * 7 * 5 * 4)


def test_growth_is_measured_and_drawn(tmp_path):
    points = first(growth.points([TINY, TINY], 1))
    assert len(points) == 2 and all(step > search > 0 for step, search in points)
    held = [(x, x * 1.0, x * 0.1) for x in (1, 2, 4, 8)]
    growth.draw(dict.fromkeys(growth.AXES, held), tmp_path)
    with Image.open(tmp_path / "growth.png") as image:
        assert image.width > 1000


@pytest.mark.parametrize("decaying", [True, False])
def test_features_are_unit_rows_with_or_without_structure(decaying, monkeypatch):
    monkeypatch.setattr(judging, "IMAGES", 400)
    monkeypatch.setattr(judging, "QUERIES", 100)
    train, test = judging.features(decaying=decaying)
    assert train.shape == (400, 512) and test.shape == (100, 512)
    torch.testing.assert_close(torch.cat([train, test]).norm(dim=1), torch.ones(500))
    energy = torch.linalg.svdvals(train) ** 2
    assert bool(energy[:50].sum() / energy.sum() > 0.8) is decaying


def embedded(place, splits, *, width=12):
    """A file such as `meanshift embed` writes."""
    rows = 7 * torch.randn(len(splits), width, generator=torch.Generator().manual_seed(0))
    with place.open("wb") as file:
        np.savez(file, embedding=rows.numpy(), split=np.array(splits))
    return rows


def test_features_of_a_file_are_searched_alone(tmp_path, capsys):
    pytest.importorskip("faiss")
    rows = embedded(tmp_path / "mine.npz", ["train"] * 40 + ["val"] * 9)
    train, test = judging.read_features(tmp_path / "mine.npz")
    assert torch.equal(torch.cat([train, test]), nn.functional.normalize(rows)) and len(test) == 9
    told = run(["judging"], rounds=2, out=tmp_path, features=tmp_path / "mine.npz")
    assert [row.what for row in told] == [
        "20-NN, 40 x 9 x 12, features of mine.npz: / faiss flat"
    ] and len(told[0].ratios) == 2 and told[0].goal is None  # fmt: skip
    assert "100.000% of the neighbors" in capsys.readouterr().out


def test_the_speed_of_a_search_is_a_ratio_to_that_of_faiss(tmp_path, monkeypatch):
    pytest.importorskip("faiss")
    embedded(tmp_path / "mine.npz", ["train"] * 40 + ["val"] * 9)

    def turns(laps, rounds):
        return {"ours": [1.0, 2.0], "faiss": [4.0, 5.0]} if by_turns(laps, rounds) else {}

    monkeypatch.setattr(judging, "by_turns", turns)
    (row,) = judging.rows(2, embedded=tmp_path / "mine.npz")
    assert row.ratios == (4.0, 2.5)


def test_features_of_one_split_ask_each_other(tmp_path):
    for split in ("train", "val"):
        rows = embedded(tmp_path / "one.npz", [split] * 60)
        train, test = judging.read_features(tmp_path / "one.npz")
        assert len(train) == 50 and torch.equal(test, nn.functional.normalize(rows)[5::6])


def test_files_without_features_are_refused(tmp_path, call, monkeypatch):
    place = tmp_path / "few.npz"
    embedded(place, ["train"] * 19 + ["val"])
    with pytest.raises(ValueError, match="20 rows; need 20 to search"):
        judging.read_features(place)
    np.savez(place, other=np.zeros(3))
    np.save(tmp_path / "rows.npy", np.zeros((30, 4)))
    (tmp_path / "text.npz").write_text("nothing")
    (tmp_path / "zip.npz").write_bytes(b"PK\x03\x04 and no more")
    for name in ("few.npz", "rows.npy", "text.npz", "zip.npz"):
        with pytest.raises(ValueError, match="made by `meanshift embed`"):
            judging.read_features(tmp_path / name)
    monkeypatch.setattr(judging, "installed", lambda _: False)
    assert "install faiss" in call("bench", "judging", "--features", place)[2]
    assert "is for judging" in call("bench", "views", "--features", place)[2]
    assert "no such file" in call("bench", "judging", "--features", tmp_path / "none")[2]
    assert "--features" in call("bench", "step", "--features", place)[2]


def test_the_baseline_learns_by_the_settings(monkeypatch):
    seen = {}
    sgd, model = torch.optim.SGD, authors.MeanShift
    monkeypatch.setattr(
        torch.optim, "SGD", lambda held, lr, **of: seen.update(lr=lr, **of) or sgd(held, lr, **of)
    )
    monkeypatch.setattr(
        authors, "MeanShift", lambda *of, **also: seen.update(also=also) or model(*of, **also)
    )
    given = {"optim.lr": 0.02, "optim.momentum": 0.8, "optim.weight_decay": 0.001,
             "method.momentum": 0.9, "method.k": 3}  # fmt: skip
    next(training.authors_steps(TINY.with_overrides(given), 1, 0))
    assert seen == {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.001,
                    "also": {"k": 3, "bank_size": 64, "momentum": 0.9}}  # fmt: skip


def test_a_run_prints_and_keeps_every_row_with_the_machine(tmp_path, monkeypatch, capsys):
    fake = types.SimpleNamespace(rows=lambda rounds: iter([Row("made up", (1.0,) * rounds, 0.5)]))
    monkeypatch.setitem(sys.modules, "benchmarks.fake", fake)
    run(["fake"], rounds=3, out=tmp_path)
    told = json.loads((tmp_path / "bench.json").read_text())
    assert told["rows"][0]["ratios"] == [1.0, 1.0, 1.0] and told["rows"][0]["met"] is True
    assert told["machine"]["threads"] == torch.get_num_threads() and told["versions"]["torch"]
    assert "made up" in capsys.readouterr().out


def test_the_front_door_knows_the_tables_and_refuses_the_rest(call):
    assert list(benchmarks.NAMES) == TABLES
    assert all((Path(table.__file__).parent / f"{name}.py").exists() for name in TABLES)
    assert "need any of training" in call("bench", "nonsense")[2]
    assert "alone" in call("bench", "transfer", "views")[2]
    assert "leave them out" in call("bench", "views", "--method.k", "3")[2]
    assert "--rounds" in call("bench", "views", "--rounds", "0")[2]


def test_only_the_front_door_knows_the_benchmarks():
    package = Path(sys.modules["meanshift"].__file__).parent
    using = [p for p in package.rglob("*.py") if "from benchmarks" in p.read_text()]
    assert [path.relative_to(package).as_posix() for path in using] == ["cli/showing.py"]
