"""The baseline does the same work as ours, contenders take turns, and tables tell what was met."""

import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import benchmarks
from benchmarks import authors, files, growth, judging, memory, searching, table, training, views
from benchmarks.apart import Apart
from benchmarks.run import run
from benchmarks.table import Row, by_turns, describe, over
from meanshift.bench.step import STEP
from meanshift.cli.showing import TABLES
from meanshift.config import Views
from meanshift.data import open_source
from meanshift.data.packed import pack
from meanshift.methods import MeanShift

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
        ours.follow()
    torch.testing.assert_close(ours.bank.rows, theirs.queue)
    theirs.follow()
    for name, held in ours.target.named_parameters():
        torch.testing.assert_close(held, theirs.target.get_parameter(name))


def test_another_baseline_would_be_noticed(pair):
    ours, theirs = pair
    theirs.k = 4
    views = torch.randn(2, BATCH, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(BATCH, dtype=torch.int64)
    assert abs(ours(views[0], views[1], labels=labels).loss - theirs(*views, labels)) > 1e-4


def test_the_baselines_views_are_of_the_papers_kind():
    picture = Image.fromarray(open_source("sample")["train"].gather(torch.arange(1))[0].numpy())
    plain = Views(crop_area=(1.0, 1.0), flip=0.0, jitter=0.0, gray=1.0, blur=0.0)
    weak, strong = authors.TwoCrops(plain, 24)(picture)
    assert weak.shape == strong.shape == (3, 24, 24)
    deviation, mean = (torch.tensor(v)[:, None, None] for v in (authors.DEVIATION, authors.MEAN))
    seen = strong * deviation + mean
    assert torch.allclose(seen[0], seen[1], atol=1e-5)  # grey
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


@pytest.mark.parametrize("name", ["ours", "torchvision"])
@pytest.mark.parametrize("size", [32, 224])
def test_views_of_either(name, size, monkeypatch):
    monkeypatch.setattr(views, "BATCH", 3)
    assert first(views.one_thread(name, size)) > 0


def test_photographs_to_views_in_three_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BATCH", 4)
    files.write_photographs(tmp_path / "photos", 5)
    pack(open_source(str(tmp_path / "photos")), tmp_path / "packed", name="photos")
    with Image.open(tmp_path / "photos" / "class0" / "0000.jpg") as picture:
        assert picture.size == (224, 224)
    assert first(files.their_views(tmp_path / "photos", 9, 0)) > 0
    for folder in ("photos", "packed"):
        assert first(files.our_views(tmp_path / folder, 9, 0)) > 0


def test_a_step_of_either_and_of_the_bare_encoders():
    assert first(training.our_steps(TINY, 1)) > 0
    assert first(training.authors_steps(TINY, 1, 0)) > 0
    whole, bare, search = first(training.step_and_bare(TINY))
    assert whole > search > 0 and bare > 0


def test_the_parts_of_a_process_are_bytes_of_what_it_holds():
    told = first(memory.peak_and_parts(TINY, False))
    assert told["peak"] > told["Python and torch"] > 0
    assert told["bank"] == 64 * 16 * 4 + 2 * 64 * 8  # rows of 16 values, ids and labels
    assert told["gradients"] == told["optimiser"] < told["weights"]


def test_growth_is_measured_and_drawn(tmp_path):
    points = first(growth.points([TINY, TINY], 1))
    assert len(points) == 2 and all(step > search > 0 for step, search in points)
    held = [(x, x * 1.0, x * 0.1) for x in (1, 2, 4, 8)]
    growth.draw(dict.fromkeys(growth.AXES, held), tmp_path)
    with Image.open(tmp_path / "growth.png") as picture:
        assert picture.width > 1000


@pytest.mark.parametrize("decaying", [True, False])
def test_features_are_unit_rows_with_or_without_structure(decaying, monkeypatch):
    monkeypatch.setattr(judging, "PICTURES", 400)
    monkeypatch.setattr(judging, "QUERIES", 100)
    train, test = judging.features(decaying=decaying)
    assert train.shape == (400, 512) and test.shape == (100, 512)
    energy = torch.linalg.svdvals(train) ** 2
    assert bool(energy[:50].sum() / energy.sum() > 0.8) is decaying


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
