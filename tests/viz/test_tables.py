"""The tables of results: rows, baselines, stds, order."""

from meanshift.viz.report.tables import format_number, format_value, headline, result_tables
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
        assert headline(run) == (
            f"20-NN on photos: 50.0% ({title} 40.0, random weights 28.0, raw pixels 25.0)."
        )


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


def test_the_headline_compares_with_the_baselines_on_the_same_data(make):
    results = evaluated("a", 50.0)
    (run,) = open_runs([make("a", results=results)])
    expected = "20-NN on photos: 50.0% (the untrained encoder 30.0, raw pixels 25.0)."
    assert headline(run) == expected
    results["knn-pixels"]["card"]["data"] = "others"
    (run,) = open_runs([make("b", results=results)])
    assert headline(run) == "20-NN on photos: 50.0% (the untrained encoder 30.0)."
    (run,) = open_runs([make("c")])
    assert headline(run) == ""


def test_numbers_and_values_are_readable():
    assert [format_number(x) for x in (12345.6, 12.34, 0.12345)] == ["12,346", "12.3", "0.123"]
    assert format_value({"a": 1, "b": "", "c": [0.5, None]}) == "a 1, c 0.5 –"
