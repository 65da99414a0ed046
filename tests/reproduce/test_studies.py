"""Studies and scales: every study at every scale, the paper's metrics, and their plots."""

import csv
import re
from dataclasses import replace

import numpy as np
import pytest

from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.experiment import Experiment
from meanshift.reproduce.label_free import MEASURES
from meanshift.reproduce.plots import draw
from meanshift.reproduce.reproduction import Reproduction
from meanshift.reproduce.results import StudyResult, protocols
from meanshift.reproduce.scales import SCALES
from meanshift.reproduce.studies import STUDIES
from tests.support.reproductions import make_reproduction

MAIN = ["BYOL-asym s/s", "MSF s/s", "MSF w/s", "BYOL-asym w/w", "MSF w/w"]


def without_data(scale, images=2_000_000):
    """A scale on images that do not exist."""
    return Experiment(scale, SCALES[scale], SCALES[scale].config, images, 10, "test")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_built_at_every_scale(scale, name, tmp_path):
    reproduction = Reproduction([name], without_data(scale), tmp_path, 2)
    study = reproduction.studies[name]
    titles = [variant.title for variant in study.variants]
    jobs = reproduction.jobs
    assert len(set(titles)) == len(titles)
    trained = [variant for variant in study.variants if not variant.weights]
    assert len(jobs) == (2 * len(trained) if study.trains else 0)
    assert len({job.folder for job in jobs}) == len(jobs)
    empty = {title: {column: Measurement() for column in study.columns} for title in titles}
    assert study.claims
    for claim in study.claims:
        assert claim.decide(empty, study.columns).outcome == "cannot be told"


def test_the_metrics_of_the_paper_refute_none_of_its_claims():
    for make in STUDIES.values():
        study = make((128_000, 1_024_000))
        table = {
            variant.title: {
                column: Measurement((variant.paper[column],) * 2 if column in variant.paper else ())
                for column in study.columns
            }
            for variant in study.variants
        }
        outcomes = [claim.decide(table, study.columns).outcome for claim in study.claims]
        assert "does not hold" not in outcomes, study.title


def test_the_metrics_are_those_of_the_paper():
    def paper(name):
        study = STUDIES[name]((128_000, 1_024_000))
        return {variant.title: tuple(variant.paper.values()) for variant in study.variants}

    assert paper("main") == {
        "Supervised": (76.2, 71.4, 74.8),
        "SeLa-v2 (sym.)": (67.2,),
        "SimCLR (sym.)": (68.3,),
        "SwAV (sym.)": (69.1,),
        "DeepCluster-v2 (sym.)": (70.2,),
        "SimSiam (sym.)": (70.0,),
        "BYOL (sym.)": (70.6,),
        "MoCo v2": (67.5, 50.9, 54.3),
        "CO2": (68.0,),
        "ISD": (69.8, 59.2, 62.0),
        "InvP": (71.3,),
        "PIRL": (),
        "CompRess": (71.9, 63.3, 66.8),
        "BYOL-asym s/s": (69.3, 55.0, 59.2),
        "MSF s/s": (71.4, 60.6, 64.0),
        "BYOL-asym w/s": (69.5, 55.8, 59.1),
        "MSF w/s": (72.4, 62.0, 64.9),
        "BYOL-asym w/w": (60.1,),
        "MSF w/w": (66.3, 54.6, 57.4),
        "Random weights": (5.1, 1.5, 2.0),
    }
    assert paper("k") == {
        "k=1": (55.8, 59.1),
        "k=2": (61.0, 64.2),
        "k=5": (62.0, 64.9),
        "k=10": (62.5, 65.7),
        "k=20": (62.0, 65.4),
        "k=50": (61.5, 64.9),
    }
    assert paper("few-labels") == {
        "BYOL-asym s/s": (47.9, 61.3),
        "MSF s/s": (53.5, 65.2),
        "MSF w/s": (55.5, 66.5),
    }
    assert paper("cost") == {"128,000 rows": (0.72, 0.13), "1,024,000 rows": (6.78, 1.05)}
    columns = {tuple(variant.paper) for variant in STUDIES["main"](()).variants}
    assert columns == {("linear", "1-NN", "20-NN"), ("linear",), ()}


def test_the_variants_of_a_study_differ_in_what_they_are_named_for(tmp_path):
    reproduction = Reproduction(["main", "k", "same-view"], without_data("cpu"), tmp_path, 1)
    by_title = {job.title.removesuffix(", seed 0"): job.config for job in reproduction.jobs}
    views = {
        title: (config.method.target_view, config.method.online_view)
        for title, config in by_title.items()
        if title in MAIN
    }
    strengths = {"s": "strong", "w": "weak"}
    assert views == {title: (strengths[title[-3]], strengths[title[-1]]) for title in MAIN}
    for title, config in by_title.items():
        if config.method.name != "msf":
            assert re.sub(r"[^a-z]", "", config.method.name) in re.sub(r"[^a-z]", "", title.lower())
            continue
        k = re.match(r"k=(\d+)", title)
        assert config.method.k == (int(k[1]) if k else 1 if "BYOL" in title else 5)
        assert config.method.same_view == ("same" in title)


def test_byol_differs_from_msf_in_k_only(tmp_path):
    reproduction = Reproduction(["main"], without_data("cpu"), tmp_path, 1)
    configs = {job.title.removesuffix(", seed 0"): job.config for job in reproduction.jobs}
    for views in ("s/s", "w/w"):
        byol, msf = configs[f"BYOL-asym {views}"], configs[f"MSF {views}"]
        constant = {"method.k_schedule": "constant", "method.k_start": 1}
        assert byol == msf.with_overrides({"method.k": 1, **constant})


@pytest.mark.parametrize("equal_epochs", [False, True])
def test_methods_have_equal_cost_or_equal_epochs(tmp_path, equal_epochs):
    experiment = replace(without_data("cifar10"), equal_epochs=equal_epochs)
    experiment = replace(experiment, config=experiment.config.with_overrides({"train.epochs": 90}))
    configs = [job.config for job in Reproduction(["main"], experiment, tmp_path, 1).jobs]
    epochs = {config.method.name: config.train.epochs for config in configs}
    assert epochs["msf"] == epochs["moco"] == 90
    assert epochs["byol"] == (90 if equal_epochs else 45)
    assert epochs["swav"] == epochs["simsiam"] == (90 if equal_epochs else 60)
    assert epochs["supervised"] == (90 if equal_epochs else 120)


@pytest.mark.parametrize("scale", ["cpu", "cpu-paper", "small"])
def test_methods_have_equal_cost_by_the_measured_time_of_an_epoch(tmp_path, scale):
    experiment = replace(without_data(scale), teacher="torchvision:resnet18:random")
    configs = [job.config for job in Reproduction(["main"], experiment, tmp_path, 1).jobs]
    epochs = {config.method.name: config.train.epochs for config in configs}
    costs = SCALES[scale].relative_costs
    assert set(costs) == set(epochs) - {"msf"}
    whole = epochs.pop("msf")
    for name, count in epochs.items():
        assert abs(count * costs[name] - whole) <= costs[name] / 2, name


def test_random_weights_are_those_of_a_run_before_training(tmp_path):
    reproduction = Reproduction(["main"], without_data("smoke"), tmp_path, 1)
    (job,) = [job for job in reproduction.jobs if ("random", "knn") in job.evaluations]
    assert job.title == "MSF w/s, seed 0"
    train, evaluate, random = job.commands()
    assert (train[0], evaluate[:3]) == ("pretrain", ["evaluate", "knn", "linear"])
    assert random[:4] == ["evaluate", "knn", "linear", f"random:{job.folder}"]


def test_compress_distills_the_given_teacher_or_is_left_out(tmp_path):
    def teachers(**changes):
        experiment = replace(without_data("smoke"), **changes)
        methods = [
            job.config.method for job in Reproduction(["main"], experiment, tmp_path, 1).jobs
        ]
        return [method.teacher for method in methods if method.name == "compress"]

    assert teachers() == []
    assert teachers(teacher="pixels") == ["pixels"]
    smoke = Experiment.open("smoke", data=None, overrides={})
    assert smoke.teacher == "meanshift:cifar10-small"


def test_columns_determine_the_protocols():
    assert protocols(["1-NN", "purity", "20-NN", "linear"]) == ["knn", "linear"]
    assert protocols(["rank", "collapse at epoch"]) == []


@pytest.mark.parametrize("name", STUDIES)
def test_a_plot_is_drawn_of_what_is_measured(name):
    study = STUDIES[name]((256, 128_000, 1_024_000))

    def result(*values_of_variants):
        missing = [()] * (len(study.variants) - len(values_of_variants))
        table = {
            variant.title: {
                column: Measurement(values, variant.paper.get(column)) for column in study.columns
            }
            for variant, values in zip(study.variants, [*values_of_variants, *missing], strict=True)
        }
        return StudyResult(name, study, table, {})

    assert draw(result()) is None
    drawing = draw(result((50.25,), (61.0, 63.0)))
    assert "50.2" in drawing.text and "62.0 ± 1.4" in drawing.text
    assert ("–" in drawing.text) == (len(study.variants) > 2)
    assert drawing.title == study.title


# Scales


@pytest.fixture
def unlabeled(tmp_path):
    np.savez(tmp_path / "unlabeled.npz", x_train=np.zeros((40, 16, 16, 3), np.uint8))
    return tmp_path / "unlabeled.npz"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "main --scale huge",
            "--scale: got 'huge', need one of paper, cifar10, cpu, cpu-paper, small, cpu-resnet18, "
            "smoke",
        ),
        ("main --scale paper", "--data SOURCE"),
        ("main --scale smoke --data DATASET --data.validation none", "--data.validation 0.1"),
        (
            "mean --scale smoke --data DATASET",
            "need one or more of main, baseline, k, equal-weights",
        ),
        ("main --scale smoke --data DATASET --seeds 0", "--seeds: got 0, need 1"),
        ("bank --scale smoke --data DATASET", "lower --train.batch_size"),
        ("main --scale smoke --data DATASET --train.batch_size 0", "train.batch_size: got 0"),
        ("main --scale smoke --data DATASET --method.name byol-asym", "leave --method.name out"),
        ("main --scale smoke --data DATASET --method.kk 3", "did you mean method.k"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_type(call, dataset, tmp_path, words, message):
    arguments = [dataset if word == "DATASET" else word for word in words.split()]
    code, _, err = call("reproduce", *arguments, "--out", tmp_path / "out")
    assert code == 2 and message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_the_last_bank_is_as_large_as_the_dataset(dataset):
    experiment = Experiment.open("smoke", data=str(dataset), overrides={"train.batch_size": 16})
    assert experiment.images == 179 and experiment.bank_sizes == (179,)
    assert without_data("cpu", 45_000).bank_sizes == (*SCALES["cpu"].bank_sizes, 45_000)
    assert without_data("cpu", 256).bank_sizes == (256,)
    assert without_data("paper", 1_281_167).bank_sizes == SCALES["paper"].bank_sizes
    assert without_data("paper", 600).bank_sizes == (256, 600)


@pytest.mark.parametrize("sizes", [(256, 1_024), (256, 1_024, 4_096), (256, 512, 1_024, 4_096)])
def test_no_bank_is_compared_with_itself(sizes):
    study = STUDIES["bank"](sizes)
    titles = [variant.title for variant in study.variants]
    table = {
        title: {column: Measurement((float(place), place + 0.1)) for column in study.columns}
        for place, title in enumerate(titles)
    }
    verdicts = [claim.decide(table, study.columns) for claim in study.claims]
    assert len(verdicts) == min(len(sizes) - 1, 2) and verdicts[0].outcome == "holds"


def test_the_csv_has_a_column_for_each_run():
    study = STUDIES["same-view"](())
    values = {title: (1.0, 2.0, 3.0)[:count] for count, title in
              enumerate((variant.title for variant in study.variants), start=2)}  # fmt: skip
    table = {
        title: {column: Measurement(row) for column in study.columns}
        for title, row in values.items()
    }
    text = StudyResult("same-view", study, table, {}).csv()
    header, *rows = csv.reader(text.splitlines())
    assert header[3:] == ["mean", "std", "paper", "run 1", "run 2", "run 3"]
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][6:] == ["1", "2", ""] and rows[-1][6:] == ["1", "2", "3"]


def test_few_labels_are_at_least_one_per_class(tmp_path):
    def options(images):
        reproduction = Reproduction(["few-labels"], without_data("cpu", images), tmp_path, 1)
        return reproduction.jobs[0].evaluations["", "semi"]

    assert options(1_000) == ("--cached",)
    assert options(999) == ("--cached", "--fractions", "0.1")
    with pytest.raises(ValueError, match="less than one of each of the 10 classes"):
        options(99)


def test_the_first_seed_of_all_variants_comes_first(dataset, tmp_path):
    reproduction = make_reproduction("same-view", dataset, tmp_path, 2, **{"train.seed": 7})
    assert [job.config.train.seed for job in reproduction.jobs] == [7, 7, 8, 8]
    titles = [job.title.rpartition(",")[0] for job in reproduction.jobs]
    assert titles == ["MSF w/s", "MSF, the same weak view"] * 2


def test_without_labels_the_variants_are_compared_by_measures_that_need_none(unlabeled, tmp_path):
    experiment = Experiment.open("smoke", data=str(unlabeled), overrides={"train.batch_size": 16})
    reproduction = Reproduction(["main"], experiment, tmp_path / "out", 1)
    study = reproduction.studies["main"]
    assert tuple(study.columns) == MEASURES and not study.claims
    titles = [variant.title for variant in study.variants]
    assert "MSF w/s" in titles and not {"Supervised", "Random weights"} & set(titles)
    for job in reproduction.jobs:
        assert job.evaluations == {("", "rank"): ()} and job.split == ""


def test_training_with_all_labels_is_not_named_as_the_best_variant():
    accuracies = {"Supervised": (90.0, 91.0), "MSF s/s": (60.0, 61.0), "MSF w/s": (50.0, 51.0)}
    validation = {title: Measurement(values) for title, values in accuracies.items()}
    without_labels = {title: {} for title in accuracies if title != "Supervised"}
    result = StudyResult("main", STUDIES["main"](()), {}, validation, without_labels)
    assert "On the validation images MSF s/s is best (20-NN 60.5 ± 0.7)" in result.best()


def test_only_the_jobs_of_the_named_variants_are_selected(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(
        "meanshift.reproduce.reproduction.run_jobs", lambda jobs, *_: trained.extend(jobs)
    )
    reproduction = Reproduction(["baseline", "k"], without_data("cpu"), tmp_path, 2)
    reproduction.run(["cpu"], only=["MSF w/s", "k=1"])  # which other rows have too
    titles = [job.title for job in trained]
    assert titles == [f"{title}, seed {seed}" for seed in (0, 1)
                      for title in ("BYOL-asym w/s", "MSF w/s")]  # fmt: skip
    with pytest.raises(ValueError, match="--only: got 'k=3', need one or more of 'BYOL-asym s/s'"):
        reproduction.run(["cpu"], only=["k=3"])
