"""The tables of results: rows, baselines, stds, order."""

import numpy as np

from meanshift.viz.report.tables import format_number, format_value, result_tables
from meanshift.viz.report.verdicts import baseline_lines, outcome_rows, run_verdict
from meanshift.viz.run_reader import open_runs


def result(protocol, encoder, *, data="photos", **metrics):
    card = {"protocol": protocol, "data": data, "encoder": encoder}
    return {
        "metrics": {name.replace("_", "-"): value for name, value in metrics.items()},
        "card": card,
    }


def evaluated(folder, accuracy):
    """The results of a run and of its baselines."""
    return {
        "linear": result("linear", f"{folder}: msf, step 40", top_1=70.0),
        "knn": result("knn", f"{folder}: msf, step 40", **{"20_NN": accuracy}),
        "knn-untrained": result("knn", f"untrained:{folder}: msf", **{"20_NN": 30.0}),
        "knn-pixels": result("knn", "pixels: raw pixels", **{"20_NN": 25.0}),
    }


def test_rows_are_the_runs_and_then_their_baselines(make):
    runs = open_runs([make(name, results=evaluated(name, 50.0)) for name in ("a", "b")])
    knn, linear = result_tables(runs)
    assert (knn["protocol"], linear["protocol"]) == ("knn", "linear")
    assert [(row["name"], row["own"]) for row in knn["rows"]] == [
        ("a", True),
        ("b", True),
        ("raw pixels", False),  # once, since it is the same for both
        ("a: the untrained encoder", False),
        ("b: the untrained encoder", False),
    ]
    assert knn["columns"] == ["20-NN"] and knn["rows"][0]["metrics"] == {"20-NN": "50.0"}
    assert ("encoder", "a: msf, step 40") in knn["rows"][0]["card"]


def test_the_start_of_a_run_is_named_by_what_it_is(make):
    results = evaluated("a", 50.0)
    results["knn-random"] = result("knn", "random:a: resnet10, random weights", **{"20_NN": 28.0})
    for start, title in {
        "PCA start": "its PCA start",
        "start from torchvision:resnet18:IMAGENET1K_V1": "the given weights",
    }.items():
        encoder = f"untrained:a: our msf, resnet10, {start}, before its first step"
        results["knn-untrained"] = result("knn", encoder, **{"20_NN": 40.0})
        (run,) = open_runs([make(start.split()[0], results=results)])
        compared = [(each.other.name, each.value) for each in run_verdict(run).differences]
        assert compared == [(title, 10.0), ("random weights", 22.0), ("raw pixels", 25.0)]


def test_a_row_is_named_after_the_weights_and_not_after_the_file(make):
    own = "runs/a: our msf, resnet10, step 40"
    other = {"data": "others", "20_NN": 20.0}
    results = {
        "knn-others-1f2e3d": result("knn", own, **other),
        "knn-others-ks-20-1f2e3d": result("knn", own, **other | {"20_NN": 21.0}),
        "knn-others-4c5b6a": result("knn", "net.pth: third-party, resnet18", **other),
        "knn-others-7a8b9c": result("knn", "b.pt: exported by meanshift, our msf, step 9", **other),
        "knn-others-pixels-7f": result("knn", "pixels: raw pixels", **other),
    }
    (run,) = open_runs([make("a", results=results)])
    (table,) = result_tables([run])
    assert [(row["name"], row["own"]) for row in table["rows"]] == [
        ("a (others-1f2e3d)", True),
        ("a (others-ks-20-1f2e3d)", True),
        ("net.pth", False),
        ("b.pt", False),
        ("raw pixels", False),
    ]
    del results["knn-others-ks-20-1f2e3d"]
    (run,) = open_runs([make("b", results=results)])
    assert result_tables([run])[0]["rows"][0]["name"] == "b"


def test_a_std_is_shown_with_its_metric(make):
    transfer = result("transfer", "a: msf", data="ten datasets", mean=61.25)
    transfer["metrics"]["mean std"] = 0.5
    single = result("transfer-pets", "a: msf", data="pets", accuracy=80.0)
    (run,) = open_runs([make(results={"transfer": transfer, "transfer-pets": single})])
    (table,) = result_tables([run])
    assert table["columns"] == ["mean"], "one dataset alone has no table"
    assert table["rows"][0]["metrics"] == {"mean": "61.2 ± 0.5"}


def with_images(results, images):
    for each in results.values():
        each["card"]["sizes"] = {"test": images}
    return results


def test_the_best_of_each_metric_is_marked_and_not_the_run_itself(make):
    results = evaluated("a", 50.0)
    results["knn-pixels"]["metrics"] = {"20-NN": 70.0, "1-NN": 60.0}
    results["knn"]["metrics"]["1-NN"] = 58.0
    (run,) = open_runs([make("a", results=with_images(results, 1000))])
    best = {row["name"]: row["best"] for row in result_tables([run])[0]["rows"]}
    assert best == {
        "a": {"1-NN"},  # two points of 1,000 images cannot be told apart
        "the untrained encoder": set(),
        "raw pixels": {"20-NN", "1-NN"},
    }
    assert result_tables([run])[1]["rows"][0]["best"] == set(), "one row has no best"


def test_the_rows_of_a_result_make_its_comparison_paired(make):
    results = with_images(evaluated("a", 50.0), 1000)
    results["knn-pixels"]["metrics"]["20-NN"] = 49.0
    (run,) = open_runs([make("a", results=results)])
    assert "not distinguishable from raw pixels" in run_verdict(run).summary
    for name, value in {"knn": 500, "knn-pixels": 490}.items():
        rows = np.less(np.arange(1000), value)
        np.savez(run.directory.results / f"{name}.npz", **{"correct 20-NN": rows})
    assert run_verdict(run).summary == "better than the untrained encoder and raw pixels"
    best = {row["name"]: row["best"] for row in result_tables([run])[0]["rows"]}
    assert best["a"] == {"20-NN"} and best["raw pixels"] == set()


def test_what_several_runs_achieved_is_compared_on_the_same_images_only(make):
    names = {"a": 50.0, "b": 60.0, "c": 59.0}
    lines = [
        {"kind": "train", "step": step, "epoch": epoch, "loss": loss}
        for step, epoch, loss in ((8, 1, 4.0), (10, 1, 1.0), (18, 2, 2.0), (20, 2, 1.0))
    ]
    stored = {name: with_images(evaluated(name, value), 1000) for name, value in names.items()}
    runs = open_runs([make(name, lines=lines, results=stored[name]) for name in names])
    accuracy, against, loss = outcome_rows(runs, [run_verdict(run) for run in runs])
    assert accuracy["best"] == [False, True, True]
    assert accuracy["cells"][1] == "60.0 (56.9 to 63.0)"
    assert against["cells"][1] == "the best" and against["cells"][0].startswith("-10.0 (-14.3 to")
    assert loss["name"] == "loss, mean of the last epoch" and loss["cells"] == ["1.8"] * 3
    stored["c"]["knn"]["card"]["test images"] = "others"
    runs[2].directory.save_result("knn", stored["c"]["knn"])
    rows = outcome_rows(runs, [run_verdict(run) for run in runs])
    assert rows[0]["best"] == [False] * 3 and rows[0]["cells"][2].startswith("20-NN 59.0 (")


def test_an_epochs_mean_counts_every_step_once(make):
    steps = [(20, 1, 4.0), (39, 1, 2.0), (40, 1, 9.0), (60, 2, 1.0)]
    lines = [
        {"kind": "train", "step": step, "epoch": epoch, "loss": loss} for step, epoch, loss in steps
    ]
    (run,) = open_runs([make("a", lines=lines)])
    assert run.epoch_means("loss") == {1: (20 * 4 + 19 * 2 + 9) / 40, 2: 1.0}
    assert run.epoch_means("purity") == {}


def test_a_k_nn_chart_has_the_start_raw_pixels_and_chance_as_lines(make):
    lines = [{"kind": "monitor", "step": 10 * i, "epoch": i, "20-NN": 30.0 + i} for i in range(3)]
    settings = {"lines": lines, "results": evaluated("a", 50.0), "data__validation": 0.2}
    (run,) = open_runs([make("a", **settings)])
    found = {line["text"] for line in baseline_lines([run], "20-NN")}
    assert found == {"start 30.0", "raw pixels 25.0", "chance 33.3"}
    assert {line["text"] for line in baseline_lines([run], "1-NN")} == {"chance 33.3"}
    runs = open_runs([run.folder, make("b", **settings)])
    found = sorted(line["text"] for line in baseline_lines(runs, "20-NN"))
    assert found == ["chance 33.3", "raw pixels 25.0", "start 30.0"]
    settings["lines"] = [{**line, "20-NN": line["20-NN"] + 1} for line in lines]
    runs = open_runs([run.folder, make("c", **settings)])
    found = sorted(line["text"] for line in baseline_lines(runs, "20-NN"))
    assert found == ["chance 33.3", "raw pixels 25.0", "start of a 30.0", "start of c 31.0"]


def test_numbers_and_values_are_readable():
    assert [format_number(x) for x in (12345.6, 12.34, 0.12345)] == ["12,346", "12.3", "0.123"]
    assert format_value({"a": 1, "b": "", "c": [0.5, None]}) == "a 1, c 0.5 –"
