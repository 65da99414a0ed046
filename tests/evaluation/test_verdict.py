"""The verdict: better or worse than what, still improving, and what to type next."""

import json
import shlex

import numpy as np
import pytest
from scipy import stats

from meanshift.evaluation import verdict
from meanshift.evaluation.accuracy import Accuracy
from meanshift.evaluation.verdict import Training, compare, of_monitor, of_results, trend
from tests.support.runs import BASE, write_run

PLACES = np.arange(1000)
EPOCHS = [float(epoch) for epoch in range(21)]


def training(accuracies=(30, 40, 50, 60, 70), *, collapsed=False, steps=40, **settings):
    """A run of four epochs of ten steps with this k-NN accuracy before and after each."""
    records = [
        {"kind": "monitor", "step": 10 * epoch, "epoch": epoch, "20-NN": float(value)}
        for epoch, value in enumerate(accuracies)
    ]
    folder = verdict.Path("runs/mine")
    config = BASE.with_overrides({"data.source": "photos", **settings})
    return Training(folder, config, records, collapsed, steps, images=1000)


def correct(value):
    """The first of 1,000 images are classified correctly: so many percent."""
    return np.less(PLACES, 10 * value)


def of(value, name="other"):
    return Accuracy.of_rows(name, value, correct(value))


def test_it_names_each_baseline_with_its_interval():
    found = compare("20-NN", of(40.0), [of(30.0, "raw pixels"), of(40.5, "its start"), of(50.0)])
    assert found.summary == (
        "better than raw pixels; worse than other; not distinguishable from its start"
    )
    assert found.details[0].startswith("20-NN 40.0% on 1,000 test samples; raw pixels 30.0% (+10.0")
    assert "95% interval +8.1 to +11.9" in found.details[0]
    assert found.text.splitlines()[0] == f"verdict: {found.summary}"
    assert 2 <= len(found.text.splitlines()) <= 4


def test_an_unpaired_interval_is_called_so():
    found = compare("20-NN", of(40.0), [Accuracy("raw pixels", 30.0, 1000)])
    assert "(+10.0 points, unpaired 95% interval +5.8 to +14.1)" in found.details[0]


@pytest.mark.parametrize(
    ("accuracies", "others", "words"),
    [
        ((30, 40, 50, 60, 70), [60.0], "train longer: meanshift pretrain"),
        ((30, 60, 60, 60, 60), [30.0], "meanshift explore runs/mine; or train longer"),
        ((30, 60, 60, 60, 60), [60.2], "train longer: meanshift pretrain"),
        (
            (30, 60, 60, 60, 60),
            [30.0, 80.0],
            "another recipe, as advised by: meanshift doctor photos",
        ),
        ((30, 60, 60, 60, 60), [], "meanshift evaluate knn runs/mine --compare untrained: pixels"),
    ],
)
def test_the_next_step_depends_on_both(accuracies, others, words):
    found = compare("20-NN", of(60.0), list(map(of, others)), training(accuracies))
    assert words in found.next_step


def test_a_collapse_and_an_unfinished_run_come_first():
    assert "collapsed" in compare("20-NN", of(60.0), [], training(collapsed=True)).next_step
    early = compare("20-NN", of(60.0), [of(30.0)], training(steps=80))
    assert early.next_step.endswith(
        "meanshift pretrain --config runs/mine/config.json --out runs/mine"
    )


def test_the_command_for_a_longer_training_continues_the_run(call, tmp_path, make_images):
    from tests.support.commands import TINY

    photos = make_images(tmp_path / "ph otos", {"train/a": 6, "train/b": 6, "val/a": 2, "val/b": 2})
    run = tmp_path / "a run"
    code, out, err = call("pretrain", "small", "--data", photos, "--out", run, *TINY)
    assert code == 0, err
    assert "verdict: " in out and "raw pixels" in out and "next: " in out
    longer = verdict._next_step([], None, Training.read(run))
    assert shlex.split(longer)[2:6] == ["meanshift", "evaluate", "knn", str(run)]
    better = verdict.difference(of(90.0), of(10.0))
    _, _, command = verdict._next_step([better], None, Training.read(run)).rpartition("longer: ")
    before = len(Training.read(run).records)
    code, _, err = call(*shlex.split(command)[1:])
    assert code == 0, err
    assert len(Training.read(run).records) > before and Training.read(run).finished


def test_a_trend_is_the_slope_of_the_second_half_with_its_error():
    x = np.array(EPOCHS)
    y = 50 + 0.3 * x + np.random.default_rng(0).standard_normal(21)
    found = trend("20-NN", EPOCHS, y.tolist())
    late = x >= 10
    fit = stats.linregress(x[late], y[late])
    assert found.change == pytest.approx(10 * fit.slope)
    quantile = stats.t.ppf(0.975, late.sum() - 2)
    assert found.error == pytest.approx(10 * fit.stderr * quantile, rel=2e-3)
    assert (found.first, found.last) == (10, 20)


def test_few_epochs_are_compared_by_the_noise_of_a_proportion():
    rising = trend("20-NN", EPOCHS[:3], [30.0, 40.0, 50.0], images=1000)
    assert rising.sign == 1 and rising.change == pytest.approx(20)
    assert rising.error == pytest.approx(1.96 * 100 * np.sqrt(0.4 * 0.6 / 1000) * 2 / np.sqrt(2))
    assert trend("20-NN", EPOCHS[:3], [30.0, 31.0, 32.0], images=100).sign == 0


def test_a_falling_loss_is_an_improvement():
    falling = trend("loss", EPOCHS[:9], [2 - 0.1 * epoch for epoch in EPOCHS[:9]])
    assert falling.sign == 1 and falling.in_words.startswith("the loss is still falling: loss -0.4")
    rising = trend("loss", EPOCHS[:9], [1 + 0.1 * epoch for epoch in EPOCHS[:9]])
    assert rising.sign == -1 and "the loss is rising" in rising.in_words


def test_the_k_nn_while_training_is_compared_with_the_start():
    run = training((30, 60, 60, 60, 60))
    found = of_monitor(run, baselines={"raw pixels": {"20-NN": correct(70)}})
    assert found.summary == "better than the untrained encoder; worse than raw pixels"
    assert not found.differences[0].paired  # a continued run does not know its first rows
    newest, first = {"20-NN": correct(60)}, {"20-NN": correct(30)}
    assert of_monitor(run, newest=newest, first=first).differences[0].paired
    assert not of_monitor(run, newest=newest, first=newest).differences[0].paired
    pca = training((30, 60, 60, 60, 60), **{"encoder.init": "pca"})
    assert of_monitor(pca).summary == "better than its PCA start"
    assert of_monitor(training(())) is None


def write_results(folder, accuracies, *, rows=True, data="photos"):
    """Stored results of k-NN: {name of the file: (encoder, accuracy)}."""
    results = {}
    for name, (encoder, value) in accuracies.items():
        card = {
            "protocol": "knn", "data": data, "encoder": encoder,
            "sizes": {"test": 1000}, "test images": "same",
        }  # fmt: skip
        results[name] = {"metrics": {"20-NN": value}, "card": card}
        if rows:
            np.savez(folder / f"{name}.npz", **{"correct 20-NN": correct(value)})
    return results


def test_stored_results_are_paired_and_in_a_fixed_order(tmp_path):
    stored = {
        "knn-pixels": ("pixels: raw pixels", 45.0),
        "knn": ("runs/mine: msf, step 40", 50.0),
        "knn-untrained": ("untrained:runs/mine: msf", 30.0),
        "knn-net": ("net.pth: third-party", 99.0),
    }
    results = write_results(tmp_path, stored)
    found = of_results(training(), results, tmp_path)
    assert found.summary == "better than the untrained encoder and raw pixels"
    assert all(each.paired for each in found.differences) and found.result == "knn"
    results["knn-pixels"]["card"]["data"] = "others"
    assert len(of_results(training(), results, tmp_path).differences) == 1
    results["knn-untrained"]["card"]["test images"] = "others"
    assert not of_results(training(), results, tmp_path).differences[0].paired
    del results["knn"]
    assert of_results(training(), results, tmp_path) is None


def test_a_run_without_labels_has_what_can_be_known(tmp_path):
    lines = [
        {"kind": "train", "step": 10 * i, "epoch": i, "loss": 2.0 - 0.1 * i, "effective_rank": 9.0}
        for i in range(1, 5)
    ]
    lines.append({"kind": "snapshot", "step": 40, "epoch": 4, "neighbors_kept": 0.875})
    run = write_run(tmp_path / "run", "photos", lines=lines, method__dim=64)
    found = verdict.without_accuracy(Training.read(run), labeled=False)
    assert found.summary == "no accuracy, since there are no labels to evaluate with"
    assert found.details[0] == (
        "effective rank 9.0 of 64; 88% of the neighbors are those of the snapshot before"
    )
    assert f"evaluate knn {run} --labels FILE.csv" in found.next_step
    warning = {"kind": "collapse", "step": 40, "message": "collapse: ..."}
    (run / "warnings.jsonl").write_text(json.dumps(warning) + "\n")
    collapsed = verdict.without_accuracy(Training.read(run), labeled=False)
    assert collapsed.summary.startswith("collapsed; ") and "warning" in collapsed.next_step
