"""The reproduction: what it claims, and that its runs are found, resumed and reported."""

import contextlib
import csv
import html
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meanshift.cli import _parser, main
from meanshift.cli.settings import chosen, configure
from meanshift.config.recipes import recipe
from meanshift.reproduce import SCALES, STUDIES, Reproduction, jobs
from meanshift.reproduce.claims import Cell, alike, below, higher, warned
from meanshift.reproduce.drawing import draw
from meanshift.reproduce.scales import Base
from meanshift.reproduce.sheet import Sheet, figure, protocols
from meanshift.runtime import checkpoint, signals
from tests.support.exact import assert_same
from tests.support.processes import grown, lines, outcome, together

SETTINGS = {
    "data.image_size": 16, "encoder.stem": "small-stride2", "train.batch_size": 16,
    "train.epochs": 3, "optim.warmup_epochs": 0, "train.save_every": 0.5, "train.log_every": 1,
    "train.device": "cpu",
}  # fmt: skip
MAIN = ["BYOL-asym s/s", "MSF s/s", "MSF w/s", "BYOL-asym w/w", "MSF w/w"]
SAME = ["MSF w/s", "MSF, the same weak view"]
FIRST, SECOND = "msf-w-s-seed0", "msf-the-same-weak-view-seed0"


def command(names, data, out, *more):
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    words = ["reproduce", *names.split(), "--scale", "smoke", "--data", str(data), "--seeds", "1"]
    return [*words, "--devices", "cpu", "--out", str(out), *flags, *more]


def reproduction(names, data, out, seeds=1, **changed):
    base = Base.of("smoke", data=str(data), overrides=SETTINGS | changed)
    return Reproduction(names.split(), base, out, seeds)


def said(words):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main([str(word) for word in words]) == 0
    return told.getvalue()


def files(folder):
    kept = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p.relative_to(folder): (p.stat().st_mtime_ns, p.read_bytes()) for p in kept}


def table(path):
    """Cells by variant and column, as the .csv holds them."""
    with path.open(newline="") as file:
        return {(row["variant"], row["figure"]): row["mean"] for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """200 red, green and blue images to train on and 60 to judge with."""
    random, arrays = np.random.default_rng(0), {}
    for part, count in {"train": 200, "test": 60}.items():
        labels = np.arange(count) % 3
        pixels = random.integers(0, 60, (count, 16, 16, 3))
        pixels[np.arange(count), :, :, labels] += 180
        arrays |= {f"x_{part}": pixels.astype(np.uint8), f"y_{part}": labels}
    path = tmp_path_factory.mktemp("images") / "a <i>leaning name.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def made(images, tmp_path_factory):
    """Two studies whose runs were typed by hand, as the plan says."""
    out = tmp_path_factory.mktemp("made") / "out"
    words = command("main same-view", images, out)
    plan = said([*words, "--plan"])
    untouched = not out.exists()
    for line in plan.splitlines():
        if not line.startswith("#"):
            said(shlex.split(line)[1:])
    tables = said(words)
    return SimpleNamespace(out=out, words=words, plan=plan, untouched=untouched, tables=tables)


@pytest.fixture
def halfway(made, tmp_path):
    """A copy of the runs of one study, to do harm to."""
    out = tmp_path / "out"
    for name in (FIRST, SECOND):
        shutil.copytree(made.out / "runs" / name, out / "runs" / name)
    return out


# Claims


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((), "–"),
        ((61.25,), "61.2"),
        ((60.0, 62.0), "61.0 ± 1.4"),
        ((0.5, 0.75), "0.625 ± 0.177"),
        ((0.00105, 0.00105), "0.00105"),
        ((math.inf, math.inf), "in 0 of 2"),
        ((3.0, math.inf), "in 1 of 2"),
    ],
)
def test_a_cell_says_what_the_seeds_gave(values, text):
    assert str(Cell(values)) == text


def test_what_did_not_happen_in_some_seed_has_no_deviation():
    assert math.isnan(Cell((3.0, math.inf)).deviation)
    assert math.isnan(Cell((math.inf, math.inf)).deviation)
    assert Cell((math.inf, math.inf)).mean == math.inf


def test_a_cell_without_two_seeds_has_no_deviation():
    assert math.isnan(Cell().mean) and math.isnan(Cell((1.0,)).deviation)
    assert Cell((1.0, 3.0)).mean == 2 and Cell((1.0, 3.0)).deviation == pytest.approx(2**0.5)


def ruling(claim, **rows):
    """Of a table in which each variant has a tuple of values by column."""
    cells = {
        title: {f"c{at}": Cell(values) for at, values in enumerate(columns)}
        for title, columns in rows.items()
    }
    return claim.decide(cells, [f"c{at}" for at in range(len(next(iter(rows.values()))))])


HIGH, LOW, WIDE, ONE, NONE = (70.0, 71.0), (60.0, 61.0), (50.0, 80.0), (70.0,), ()


@pytest.mark.parametrize(
    ("more", "less", "verdict", "why"),
    [
        ([HIGH], [LOW], "holds", "c0"),
        ([LOW], [HIGH], "does not hold", "c0"),
        ([WIDE], [LOW], "cannot be told", "overlap"),
        ([HIGH], [HIGH], "cannot be told", "overlap"),
        ([ONE], [LOW], "cannot be told", "seed"),
        ([HIGH], [NONE], "cannot be told", "not run"),
        ([HIGH, HIGH], [LOW, LOW], "holds", "c1"),
        ([HIGH, LOW], [LOW, HIGH], "cannot be told", "c1"),
        ([HIGH, HIGH], [LOW, WIDE], "cannot be told", "overlap"),
        ([LOW, NONE], [HIGH, HIGH], "cannot be told", "not run"),
    ],
)
def test_a_claim_of_more_holds_where_deviations_do_not_overlap(more, less, verdict, why):
    found = ruling(higher("more", "a", "b"), a=more, b=less)
    assert found.verdict == verdict and why in found.why


def test_a_claim_of_more_looks_at_its_own_columns_alone():
    rows = {"a": [HIGH, LOW], "b": [LOW, HIGH]}
    assert ruling(higher("more", "a", "b", "c0"), **rows).verdict == "holds"
    assert ruling(higher("more", "a", "b", "c1"), **rows).verdict == "does not hold"
    assert ruling(higher("more", "a", "a", "c0", "c1", across=True), **rows).verdict == "holds"
    found = ruling(higher("more", "b", "b", "c0", "c1", across=True), **rows)
    assert found.verdict == "does not hold"


@pytest.mark.parametrize(
    ("one", "other", "verdict", "why"),
    [
        ([(60.0, 60.2)], [(60.5, 60.7)], "holds", "c0"),
        ([(60.0, 60.2)], [(64.0, 64.2)], "does not hold", "c0"),
        ([(60.0, 60.2)], [(61.9, 62.1)], "cannot be told", "c0"),
        ([WIDE], [LOW], "cannot be told", "c0"),
        ([ONE], [HIGH], "cannot be told", "seed"),
        ([NONE], [HIGH], "cannot be told", "not run"),
        ([(60.0, 60.2), (60.0, 60.2)], [(60.5, 60.7), HIGH], "cannot be told", "c1"),
    ],
)
def test_a_claim_of_likeness_needs_deviations_that_allow_it(one, other, verdict, why):
    found = ruling(alike("alike", "a", "b", 2.0), a=one, b=other)
    assert found.verdict == verdict and why in found.why


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.5, 0.6), "holds"),
        ((0.5,), "holds"),
        ((1.5,), "does not hold"),
        ((1.5, 1.6), "does not hold"),
        ((0.5, 1.1), "cannot be told"),
        ((), "cannot be told"),
    ],
)
def test_a_claim_of_a_limit_holds_below_it(values, verdict):
    assert ruling(below("below", "a", "c0", 1.0), a=[values]).verdict == verdict


@pytest.mark.parametrize(
    ("epochs", "verdict", "why"),
    [
        ((0.5, 2.0), "holds", "2 of 2"),
        ((0.5, math.inf), "cannot be told", "1 of 2"),
        ((math.inf, math.inf), "does not hold", "0 of 2"),
        ((), "cannot be told", "not run"),
    ],
)
def test_a_claim_of_collapse_needs_the_alarm_in_every_seed(epochs, verdict, why):
    found = ruling(warned("collapses", "a", "c0"), a=[epochs])
    assert found.verdict == verdict and why in found.why


# Studies


def somewhere(scale, images=2_000_000):
    """A scale on images that need not be there."""
    config = recipe(SCALES[scale].recipe).with_overrides(SCALES[scale].changes)
    return Base(scale, SCALES[scale], config, images, 10, "test")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_built_at_every_scale(scale, name, tmp_path):
    whole = Reproduction([name], somewhere(scale), tmp_path, 2)
    study = whole.studies[name]
    titles = [variant.title for variant in study.variants]
    assert len(set(titles)) == len(titles)
    assert len(whole.jobs) == (0 if study.measured else 2 * len(titles))
    assert len({job.folder for job in whole.jobs}) == len(whole.jobs)
    empty = {title: {column: Cell() for column in study.columns} for title in titles}
    assert study.claims
    for claim in study.claims:
        assert claim.decide(empty, study.columns).verdict == "cannot be told"


def test_no_claim_is_refuted_by_the_figures_of_the_paper():
    for make in STUDIES.values():
        study = make((128_000, 1_024_000))
        told = {
            variant.title: {
                column: Cell((variant.paper[column],) * 2) if column in variant.paper else Cell()
                for column in study.columns
            }
            for variant in study.variants
        }
        verdicts = [claim.decide(told, study.columns).verdict for claim in study.claims]
        assert "does not hold" not in verdicts, study.title


def test_the_figures_are_those_of_the_paper():
    def paper(name):
        return {
            v.title: tuple(v.paper.values()) for v in STUDIES[name]((128_000, 1_024_000)).variants
        }

    assert paper("main") == {
        "BYOL-asym s/s": (69.3, 55.0, 59.2), "MSF s/s": (71.4, 60.6, 64.0),
        "MSF w/s": (72.4, 62.0, 64.9), "BYOL-asym w/w": (60.1,), "MSF w/w": (66.3, 54.6, 57.4),
    }  # fmt: skip
    assert paper("k") == {
        "k=1": (55.8, 59.1), "k=2": (61.0, 64.2), "k=5": (62.0, 64.9), "k=10": (62.5, 65.7),
        "k=20": (62.0, 65.4), "k=50": (61.5, 64.9),
    }  # fmt: skip
    assert paper("few-labels") == {
        "BYOL-asym s/s": (47.9, 61.3), "MSF s/s": (53.5, 65.2), "MSF w/s": (55.5, 66.5)
    }  # fmt: skip
    assert paper("cost") == {"128,000 rows": (0.72, 0.13), "1,024,000 rows": (6.78, 1.05)}
    named = {tuple(v.paper) for v in STUDIES["main"](()).variants}
    assert named == {("linear", "1-NN", "20-NN"), ("linear",)}


def test_the_rows_of_a_study_differ_in_what_they_are_named_for(tmp_path):
    whole = Reproduction(["main", "k", "same-view"], somewhere("cpu"), tmp_path, 1)
    by_title = {job.title.removesuffix(", seed 0"): job.config for job in whole.jobs}
    views = {
        t: (c.method.target_view, c.method.online_view) for t, c in by_title.items() if t in MAIN
    }
    words = {"s": "strong", "w": "weak"}
    assert views == {t: (words[t[-3]], words[t[-1]]) for t in MAIN}
    for title, config in by_title.items():
        k = re.match(r"k=(\d+)", title)
        assert config.method.name == ("byol-asym" if config.method.k == 1 else "msf")
        assert config.method.k == (int(k[1]) if k else 1 if "BYOL" in title else 5)
        assert config.method.same_view == ("same" in title)


def test_every_column_of_a_study_is_found_in_a_run(made, images):
    job = reproduction("main", images, made.out).jobs[2]
    for make in STUDIES.values():
        study = make((128_000, 1_024_000))
        for column in [] if study.measured else study.columns:
            told = figure(job, column)
            assert isinstance(told, float) or protocols([column]) == ["semi"], column


def test_columns_say_what_must_be_judged():
    assert protocols(["1-NN", "purity", "20-NN", "linear"]) == ["knn", "linear"]
    assert protocols(["rank", "collapse at epoch"]) == []


@pytest.mark.parametrize("name", STUDIES)
def test_an_image_is_drawn_of_what_is_there(name):
    study = STUDIES[name]((256, 128_000, 1_024_000))

    def sheet(*given):
        cells = {
            v.title: {c: Cell(values, v.paper.get(c)) for c in study.columns}
            for v, values in zip(study.variants, [*given, *[()] * 9], strict=False)
        }
        return Sheet(name, study, cells, {})

    assert draw(sheet()) is None
    drawing = draw(sheet((50.25,), (61.0, 63.0)))
    assert "50.2" in drawing.text and "62.0 ± 1.4" in drawing.text
    assert ("–" in drawing.text) == (len(study.variants) > 2)
    assert drawing.title == study.title


# Scales


@pytest.fixture
def unlabeled(tmp_path):
    np.savez(tmp_path / "bare.npz", x_train=np.zeros((40, 16, 16, 3), np.uint8))
    return str(tmp_path / "bare.npz")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("main --scale huge", "--scale: got 'huge', need one of paper, cifar10, cpu, smoke"),
        ("main --scale paper", "--data SOURCE"),
        ("main --scale smoke --data BARE", "labels.csv"),
        ("main --scale smoke --data HERE --data.validation none", "--data.validation 0.1"),
        ("mean --scale smoke --data HERE", "need one or more of main, k, bank"),
        ("main --scale smoke --data HERE --seeds 0", "--seeds: got 0, need 1"),
        ("bank --scale smoke --data HERE", "lower --train.batch_size"),
        ("main --scale smoke --data HERE --train.batch_size 0", "train.batch_size: got 0"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_type(
    call, images, unlabeled, tmp_path, words, told
):
    known = {"HERE": images, "BARE": unlabeled}
    given = [known.get(word, word) for word in words.split()]
    code, _, wrong = call("reproduce", *given, "--out", tmp_path / "out")
    assert code == 2 and told in wrong and "Traceback" not in wrong
    assert not (tmp_path / "out").exists()


def test_the_last_bank_is_as_large_as_the_data(images):
    base = Base.of("smoke", data=str(images), overrides={"train.batch_size": 16})
    assert base.images == 179 and base.banks == (179,)
    assert somewhere("cpu", 45_000).banks == (*SCALES["cpu"].banks, 45_000)
    assert somewhere("cpu", 256).banks == (256,)
    assert somewhere("paper", 1_281_167).banks == SCALES["paper"].banks
    assert somewhere("paper", 600).banks == (256, 600)


def test_few_labels_are_those_that_there_are(tmp_path):
    def words(images):
        whole = Reproduction(["few-labels"], somewhere("cpu", images), tmp_path, 1)
        return whole.jobs[0].judge["semi"]

    assert words(1_000) == ("--cached",)
    assert words(999) == ("--cached", "--fractions", "0.1")
    with pytest.raises(ValueError, match="less than one of each of the 10 classes"):
        words(99)


def test_all_seeds_of_a_study_are_runs_and_the_first_of_all_comes_first(images, tmp_path):
    whole = reproduction("same-view", images, tmp_path, 2, **{"train.seed": 7})
    assert [job.config.train.seed for job in whole.jobs] == [7, 7, 8, 8]
    assert [job.title.rpartition(",")[0] for job in whole.jobs] == SAME * 2


# A whole reproduction


def test_the_plan_is_a_command_a_run_with_its_very_settings(made, images):
    assert made.untouched
    typed = [shlex.split(line) for line in made.plan.splitlines() if not line.startswith("#")]
    trained = [words for words in typed if words[1] == "pretrain"]
    whole = reproduction("main same-view", images, made.out)
    assert len(trained) == len(whole.jobs) == 6
    for words, job in zip(trained, whole.jobs, strict=True):
        given = _parser().parse_args(words[1:])
        assert configure(given, recipe(given.recipe)) == job.config
        assert given.out == job.folder
    assert len(typed) == 12 and {words[0] for words in typed} == {"meanshift"}


def test_the_runs_of_both_studies_are_trained_once(made, images):
    whole = reproduction("main same-view", images, made.out)
    assert [job.title for job in whole.jobs] == [f"{t}, seed 0" for t in [*MAIN, *SAME[1:]]]
    assert len(list((made.out / "runs").iterdir())) == 6
    assert all(job.trained and not list(job.commands()) for job in whole.jobs)
    both = [table(made.out / f"{name}.csv") for name in ("main", "same-view")]
    assert both[0]["MSF w/s", "20-NN"] == both[1]["MSF w/s", "20-NN"] != ""


def test_the_tables_hold_what_the_runs_gave(made):
    cells = table(made.out / "main.csv")
    assert [title for title, column in cells if column == "linear"] == MAIN
    for title in MAIN:
        run = made.out / "runs" / (re.sub("[ /]", "-", title.lower()) + "-seed0")
        for column, (name, told) in {
            "1-NN": ("knn-test", "1-NN"), "20-NN": ("knn-test", "20-NN"),
            "linear": ("linear-cached-test", "top-1"),
        }.items():  # fmt: skip
            held = json.loads((run / "results" / f"{name}.json").read_text())["figures"][told]
            assert float(cells[title, column]) == pytest.approx(held, rel=1e-5)
    last = [line for line in lines(made.out / "runs" / SECOND) if line["kind"] == "train"][-1]
    cells = table(made.out / "same-view.csv")
    assert float(cells[SAME[1], "agreement"]) == pytest.approx(last["agreement"], rel=1e-5)
    assert cells[SAME[1], "collapse at epoch"] == "inf"
    told = (made.out / "main.md").read_text()
    assert "| MSF w/s | " in told and "(72.4)" in told and "validation 20-NN" in told
    assert told in made.tables and (made.out / "same-view.md").read_text() in made.tables


def test_every_figure_stands_in_its_own_column(made, images, tmp_path):
    run = shutil.copytree(made.out / "runs" / FIRST, tmp_path / "out" / "runs" / FIRST)
    told = {"knn-test": {"1-NN": 1.5, "20-NN": 2.5}, "linear-cached-test": {"top-1": 3.5}}
    for name, figures in told.items():
        path = run / "results" / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"figures": figures}))
    job = reproduction("main", images, tmp_path / "out").jobs[2]
    assert [figure(job, column) for column in ("1-NN", "20-NN", "linear")] == [1.5, 2.5, 3.5]
    last = {
        kind: [r for r in lines(run) if r["kind"] == kind][-1] for kind in ("train", "snapshot")
    }
    assert figure(job, "purity") == last["train"]["purity"]
    assert figure(job, "rank") == last["train"]["effective_rank"]
    assert figure(job, "purity, weak views") == last["snapshot"]["purity_weak"]
    assert figure(job, "purity, strong views") == last["snapshot"]["purity_strong"]


def test_everything_is_written(made):
    names = {path.name for path in made.out.iterdir() if path.is_file()} - {".lock"}
    ends = ("md", "csv", "png", "svg")
    assert names == {f"{n}.{end}" for n in ("main", "same-view") for end in ends} | {
        "reproduce.html"
    }


def test_the_same_command_again_changes_nothing(made, monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    before = files(made.out)
    assert said(made.words) == made.tables
    after = files(made.out)
    assert {p: held for p, (_, held) in after.items()} == {
        p: held for p, (_, held) in before.items()
    }
    runs = [path for path in before if path.parts[0] == "runs"]
    assert len(runs) > 6 * 6 and all(before[path] == after[path] for path in runs)


def test_renamed_runs_are_recognized(halfway, images):
    runs = halfway / "runs"
    (runs / FIRST).rename(runs / "mine")
    (runs / SECOND).rename(runs / FIRST)
    whole = reproduction("same-view", images, halfway)
    assert [job.folder.name for job in whole.jobs] == ["mine", FIRST]
    assert all(job.trained for job in whole.jobs)


def test_a_damaged_run_does_not_hide_the_others(halfway, images):
    (halfway / "runs" / FIRST / "config.json").write_text("{")
    whole = reproduction("same-view", images, halfway)
    assert [job.folder.name for job in whole.jobs] == [f"{FIRST}-2", SECOND]


@pytest.mark.parametrize("changed", ["optim.lr", "data.source", "data.validation"])
def test_other_settings_and_images_make_new_runs_beside_the_old(halfway, images, tmp_path, changed):
    data, more = images, {}
    if changed == "data.source":
        data = shutil.copy(images, tmp_path / "others.npz")
    else:
        more = {changed: "0.2"}
    whole = reproduction("same-view", data, halfway, **more)
    assert [job.folder.name for job in whole.jobs] == [f"{n}-2" for n in (FIRST, SECOND)]
    if changed == "optim.lr":
        told = command("same-view", data, halfway, "--optim.lr", "0.2", "--plan")
        plan = said(told).splitlines()
        said(shlex.split(plan[1])[1:])
        assert said(told).splitlines()[0] == "# MSF w/s, seed 0, trained"
        again = reproduction("same-view", data, halfway, **more)
        assert [job.trained for job in again.jobs] == [True, False]
    assert all(job.trained for job in reproduction("same-view", images, halfway).jobs)


@pytest.mark.parametrize(
    ("name", "value"),
    [("train.save_every", "0.5"), ("train.log_every", "9"), ("data.workers", "2")],
)
def test_harmless_settings_make_no_new_runs(made, images, name, value):
    whole = reproduction("same-view", images, made.out, **{name: value})
    assert all(job.trained for job in whole.jobs)


def test_a_result_of_earlier_weights_is_judged_again(halfway, images):
    path = halfway / "runs" / FIRST / "results" / "knn-test.json"
    held = json.loads(path.read_text())
    held["card"]["judged"] = re.sub(r"step \d+$", "step 1", held["card"]["judged"])
    path.write_text(json.dumps(held))
    missing = [list(job.commands()) for job in reproduction("same-view", images, halfway).jobs]
    assert [len(each) for each in missing] == [1, 0]
    assert missing[0][0][:3] == ["evaluate", "knn", str(halfway / "runs" / FIRST)]


def test_a_study_whose_runs_are_partly_there_shows_those(made, images, tmp_path):
    out = tmp_path / "out"
    for name in (FIRST, "msf-s-s-seed0"):
        shutil.copytree(made.out / "runs" / name, out / "runs" / name)
    whole = reproduction("purity", images, out)
    assert [job.trained for job in whole.jobs] == [False, True, False, False, False, True]
    page = whole.write().read_text()
    cells = table(out / "purity.csv")
    for column in ("purity", "purity, weak views", "purity, strong views"):
        assert 0 < float(cells["w/s, k=5", column]) <= 1 and cells["w/s, k=2", column] == ""
    assert "2 of 6 runs are trained" in page and "data:image/png" in page
    assert (out / "purity.png").exists() and "| w/s, k=2 | – | – | – |" in whole.sheets()[
        0
    ].markdown()


# The page


class Page(HTMLParser):
    """What a page refers to, and what it says."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.tags, self.text = [], set(), ""
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        given = {"src", "href", "srcset", "data", "action", "poster"}
        self.addresses += [value for name, value in attrs if name in given]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(made):
    return Page((made.out / "reproduce.html").read_text())


def test_the_page_needs_nothing_from_outside(made, page):
    assert page.addresses and all(a.startswith(("#", "data:image/png;")) for a in page.addresses)
    text = (made.out / "reproduce.html").read_text()
    assert "url(http" not in text and "@import" not in text
    assert sum(a.startswith("data:") for a in page.addresses) == 2


def test_the_page_shows_every_claim_and_verdict(made, images, page):
    for sheet in reproduction("main same-view", images, made.out).sheets():
        assert sheet.rulings()
        for claim, found in sheet.rulings():
            assert f"{found.verdict}{claim.text}{found.why}" in page.text
        for title, cells in sheet.table.items():
            for cell in cells.values():
                beside = "" if cell.paper is None else f"paper {cell.paper}"
                assert f"{cell}{beside}" in page.text and title in page.text


def test_a_path_with_markup_in_it_is_text_on_the_page(images, page):
    assert str(images) in page.text and "i" not in page.tags


def test_the_commands_on_the_page_make_the_same_again(made, images):
    text = (made.out / "reproduce.html").read_text()
    shown = [html.unescape(code) for code in re.findall("<code>(.*?)</code>", text)]
    again = [shlex.split(line) for line in shown if line.startswith("meanshift reproduce")]
    assert [words[2:4] for words in again[:2]] == [["main", "--scale"], ["same-view", "--scale"]]
    given = _parser().parse_args(again[-1][1:])
    assert (given.names, given.out, given.seeds) == (["main", "same-view"], made.out, 1)
    base = Base.of(given.scale, data=given.data, overrides=chosen(given))
    assert vars(base) == vars(reproduction("main", images, made.out).base)
    assert sum(line.startswith("meanshift pretrain") for line in shown) == 6


# Cost


def test_the_cost_is_measured_once_and_nothing_is_trained(images, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    out = tmp_path / "out"
    words = command("cost", images, out)
    told = said(words)
    assert not (out / "runs").exists()
    cells = table(out / "cost.csv")
    assert {title for title, _ in cells} == {"179 rows", "128,000 rows"}
    assert all(float(value) > 0 for value in cells.values())
    share = "share of a step, %"
    assert float(cells["179 rows", share]) < float(cells["128,000 rows", share]) < 100
    assert float(cells["128,000 rows", "MB"]) == pytest.approx(128_000 * 64 / 1e6, rel=0.01)
    assert float(cells["128,000 rows", "GFLOPs an image"]) == pytest.approx(
        2e-9 * 128_000 * 16, rel=0.01
    )
    before = files(out)
    assert said(words) == told
    assert before[Path("cost-0.json")] == files(out)[Path("cost-0.json")]
    said([*words, "--train.batch_size", "32"])
    assert before[Path("cost-0.json")] != files(out)[Path("cost-0.json")]


# Killed, stopped and taken up again


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid, within=30.0):
    """Whether a process has ended, be it waited for or not."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def step_of(run):
    state, wrong = checkpoint.latest(run / "checkpoints")
    assert not wrong
    return state["step"]


@pytest.fixture(scope="module")
def interrupted(made, images, tmp_path_factory):
    """A reproduction killed in mid-training, begun again, stopped by SIGTERM, and then finished."""
    home = tmp_path_factory.mktemp("interrupted")
    out, seen = home / "out", SimpleNamespace()
    shutil.copytree(made.out / "runs" / SECOND, out / "runs" / SECOND)
    run, words = out / "runs" / FIRST, command("same-view", images, out)
    with together(1, words, home) as group:
        grown(run, 6, group)
        seen.children = children(group.started[0].pid)
        with contextlib.redirect_stderr(io.StringIO()) as told:
            seen.second = main(words), told.getvalue()
        group.signal(signal.SIGKILL)
        group.wait()
        seen.gone = [gone(pid) for pid in seen.children]
    seen.killed = step_of(run)

    def stop():
        while len(lines(run)) < seen.lines + 4 and not ended.wait(0.01):
            pass
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    seen.lines = len(lines(run))
    kept = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody caught the signal"))
    asking, ended = threading.Thread(target=stop), threading.Event()
    try:
        with contextlib.redirect_stderr(io.StringIO()) as told:
            asking.start()
            seen.code = main(words)
    finally:
        ended.set()
        asking.join()
        signal.signal(signal.SIGTERM, kept)
    seen.told, seen.stopped = told.getvalue(), step_of(run)
    seen.page = (out / "reproduce.html").read_text()
    said(words)
    seen.out, seen.run = out, run
    return seen


def test_a_killed_reproduction_takes_its_run_with_it(interrupted):
    assert len(interrupted.children) == 1 and interrupted.gone == [True]
    assert 0 < interrupted.killed < 33


def test_two_reproductions_in_one_folder_are_refused(interrupted):
    code, told = interrupted.second
    assert code == 2 and "is at work in it" in told and "another --out" in told


def test_a_stopped_reproduction_saves_itself_and_says_how_to_go_on(interrupted):
    assert interrupted.code == signals.REQUEUE == 75
    assert "the same command goes on" in interrupted.told
    assert "failed" not in interrupted.told
    assert interrupted.killed < interrupted.stopped < 33
    assert f"step {interrupted.stopped} of 33" in interrupted.page
    assert "1 of 2 runs are trained" in interrupted.page


def test_an_interrupted_reproduction_ends_in_the_same_bits(interrupted, made):
    assert_same(outcome(interrupted.run), outcome(made.out / "runs" / FIRST))
    assert len(json.loads((interrupted.run / "environment.json").read_text())["earlier"]) == 2
    for name in ("same-view.csv", "same-view.md"):
        assert (interrupted.out / name).read_text() == (made.out / name).read_text()


# What fails


@pytest.fixture(scope="module")
def damaged(made, images, tmp_path_factory):
    """Side by side: a run to be trained and judged, and one to be judged by weights of garbage."""
    out = tmp_path_factory.mktemp("damaged") / "out"
    shutil.copytree(made.out / "runs" / SECOND, out / "runs" / SECOND)
    shutil.rmtree(out / "runs" / SECOND / "results")
    for path in (out / "runs" / SECOND / "checkpoints").iterdir():
        path.write_bytes(b"garbage")
    busy, show = [], jobs._View.show

    def watch(self, present):
        busy.append([job.title for job in present])
        show(self, present)

    words = command("same-view", images, out, "--devices", "cpu", "cpu")
    told, wrong = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs._View, "show", watch)
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(wrong):
            code = main(words)
    return SimpleNamespace(
        out=out, code=code, told=told.getvalue(), wrong=wrong.getvalue(), busy=busy
    )


def test_a_run_that_fails_is_named_with_its_log(damaged):
    assert damaged.code == 1
    told = damaged.wrong.rpartition("failed: ")[2]
    log = damaged.out / "logs" / f"{SECOND}.log"
    assert told.startswith(f"{SAME[1]}, seed 0: ") and "\n" not in told.strip()
    assert str(log) in told and "checkpoints" in told and "Traceback" not in told
    assert f"\n$ meanshift evaluate knn {damaged.out}" in log.read_text()
    assert "step-000000033.pt" in log.read_text()
    shown = Page((damaged.out / "reproduce.html").read_text()).text
    assert f"{SAME[1]}, seed 0 failed: " in shown and str(log) in shown


def test_the_other_runs_are_finished(damaged, made):
    cells, whole = table(damaged.out / "same-view.csv"), table(made.out / "same-view.csv")
    row = {key: value for key, value in whole.items() if key[0] == SAME[0]}
    assert row == {key: cells[key] for key in row} and "" not in row.values()
    assert f"| {SAME[1]} | – | – |" in damaged.told
    assert cells[SAME[1], "20-NN"] == ""


def test_runs_side_by_side_are_those_one_after_another(damaged, made):
    assert [f"{SAME[0]}, seed 0", f"{SAME[1]}, seed 0"] in damaged.busy
    assert_same(outcome(damaged.out / "runs" / FIRST), outcome(made.out / "runs" / FIRST))


@pytest.fixture
def broken(halfway, images, monkeypatch, call):
    """What is said when a process ends without a word, after one that complained."""
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    shutil.rmtree(halfway / "runs" / FIRST / "results")
    (halfway / "logs").mkdir()
    (halfway / "logs" / f"{FIRST}.log").write_text("meanshift: an earlier complaint\n")
    code, _, wrong = call(*command("same-view", images, halfway))
    assert code == 1 and f"failed: {SAME[0]}, seed 0: " in wrong and "(exit code 1;" in wrong
    return wrong


def test_a_failure_is_not_told_by_the_words_of_an_earlier_one(broken):
    assert "an earlier complaint" not in broken


def test_a_failure_is_told_on_a_line_of_its_own(broken):
    assert f"\nfailed: {SAME[0]}, seed 0: " in broken
