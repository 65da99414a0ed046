"""The report: one file that needs nothing else, shows what is true, and works in a real browser."""

import base64
import colorsys
import html
import json
import os
import re
import shlex
import shutil
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from meanshift.config import Config
from meanshift.config.recipes import command_for, recipe
from meanshift.runtime import checkpoint, rng
from meanshift.runtime.run_directory import RunDirectory
from meanshift.viz.report.page import write_report
from meanshift.viz.report.tables import format_number
from meanshift.viz.run_reader import Run, open_runs
from tests.support.browser import assert_accessible
from tests.support.packages import hide_packages
from tests.support.three_views import MODULE

SETTINGS = {
    "data.image_size": 16, "encoder.name": "resnet10", "encoder.width": 0.125,
    "method.bank_size": 64, "train.batch_size": 8, "train.epochs": 3, "train.snapshots": 4,
    "train.monitor_every": 1, "train.snapshot_images": 40, "train.device": "cpu",
    "data.validation": 0.2, "data.workers": 0, "train.log_every": 2,
}  # fmt: skip
HUES = {"ant": 0.0, "bee": 0.33, "<b>cow</b>": 0.66}


def paint(folder, counts):
    """Images of one color each, all different, so that a color identifies its image."""
    number = 0
    for name, hue in HUES.items():
        (folder / name.replace("/", "-")).mkdir(parents=True)
        for index in range(counts):
            value = 0.4 + 0.6 * index / counts
            color = [int(255 * c) for c in colorsys.hsv_to_rgb(hue, 1 - index / counts / 2, value)]
            image = Image.new("RGB", (16, 16), tuple(color))
            image.save(folder / name.replace("/", "-") / f"{number:03d}.png")
            number += 1
    return folder


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    """Two small trained runs, the first one evaluated."""
    from meanshift.cli import main

    root = tmp_path_factory.mktemp("report")
    photos = paint(root / "photos", 24)
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    for name, more in {"one": [], "two": ["--method.k", "3", "--train.epochs", "2"]}.items():
        command = ["pretrain", "small", "--data", str(photos), "--out", str(root / name), *flags]
        assert main([*command, *more]) == 0
    assert main(["evaluate", "knn", "cluster", str(root / "one"), "--device", "cpu"]) == 0
    return root


@pytest.fixture(scope="module")
def page(runs_folder):
    return write_report([Run(runs_folder / "one")], runs_folder / "page.html")


@pytest.fixture
def open_tab(chromium):
    """Open a file as a person does; any error or request of the page fails the test."""
    contexts = []
    errors = []

    def open_page(path, **how):
        context = chromium.new_context(**{"viewport": {"width": 1200, "height": 900}, **how})
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else 0)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
        url = path.resolve().as_uri()
        tab.on("request", lambda asked: errors.append(asked.url)
               if asked.url != url and not asked.url.startswith("data:") else 0)  # fmt: skip
        tab.goto(url)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def text_of(path):
    return re.sub(r"\s+", " ", path.read_text())


def data_of(path):
    content = re.search(r'id="report-data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(content[1])


def write_bare_run(folder, source, *, size, epochs=(0,), width=8, overrides=None):
    """A run directory without a training: only what a report reads."""
    config = recipe("small").with_overrides({"data.source": str(source), **(overrides or {})})
    directory = RunDirectory(folder).begin(config, extra={"steps": 10 * config.train.epochs})
    for epoch in epochs:
        features = torch.randn(size, width, generator=torch.Generator().manual_seed(epoch))
        state = {"format": checkpoint.FORMAT, "epoch": epoch, "indices": torch.arange(size)}
        checkpoint.write(
            directory.snapshots / f"epoch-{epoch:04d}.pt", {**state, "features": features.half()}
        )
    return directory


# What the file contains


def test_it_is_one_file_that_needs_no_network(page):
    text = page.read_text()
    elements = Elements(text)
    addresses = [a[key] for _, a in elements.found for key in ("src", "href") if key in a]
    assert addresses and all(a.startswith(("data:", "#")) for a in addresses)
    assert not elements.all("link")
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", text)
    assert not re.search(r"https?://|@import|url\((?!\$\{)", outside)


def test_it_can_be_read_by_a_screen_reader(page):
    elements = Elements(page.read_text())
    assert elements.all("html")[0]["lang"] == "en"
    assert elements.all("img") and all(image["alt"] for image in elements.all("img"))
    assert all(head.get("scope") for head in elements.all("th"))
    assert all(c.get("aria-label") for c in elements.all("canvas"))
    ids = [a["id"] for _, a in elements.found if "id" in a]
    assert len(ids) == len(set(ids))
    sections = elements.all("section")
    assert sections and {section["aria-labelledby"] for section in sections} <= set(ids)
    named = {a["for"] for a in elements.all("label")}
    assert {a["id"] for a in elements.all("input")} <= named
    linked = [a["href"][1:] for a in elements.all("a") if a["href"].startswith("#")]
    assert set(linked) <= set(ids)


def test_metrics_are_shown_with_their_cards(runs_folder, page):
    result = json.loads((runs_folder / "one/results/knn.json").read_text())
    text = text_of(page)
    assert f"{result['metrics']['20-NN']:.1f}" in text
    assert result["card"]["weights"] in text and "plain majority" in text


def test_a_result_of_older_weights_is_marked(runs_folder, tmp_path):
    shutil.copytree(runs_folder / "one", tmp_path / "one")
    run = Run(tmp_path / "one")
    assert run.outdated(run.results["knn"]) == "" == run.outdated(run.results["cluster"])
    step = {"kind": "train", "step": 99, "epoch": 9, "loss": 1.0}
    run.directory.append("metrics.jsonl", step)  # it was continued after the evaluation
    note = run.outdated(run.results["knn"])
    assert re.fullmatch(r"evaluated after step \d+ of 99", note)
    text = text_of(write_report([run], tmp_path / "page.html"))
    assert text.count(note[1:]) == 6  # the verdict, both tables and their cards, the clusters


def write_detections(results, name):
    """A result of `evaluate detect` with the boxes of one image."""
    Image.new("RGB", (120, 80), (0, 160, 0)).save(results / "photo.png")
    box = np.array([[10, 10, 60, 60]], np.float32)
    one = np.ones(1, np.int64)
    np.savez(
        results / f"{name}.npz",
        titles=np.array(["VOC2007/photo"]),
        files=np.array([str(results / "photo.png")]),
        classes=np.array(["cat"]),
        truth_counts=one,
        truth_boxes=box,
        truth_labels=0 * one,
        truth_difficult=np.zeros(1, bool),
        detection_counts=one,
        detection_boxes=box,
        detection_scores=np.array([0.9], np.float32),
        detection_labels=0 * one,
    )
    card = {"protocol": "detect", "data": "boxes", "encoder": "one: a, step 3"}
    result = {"metrics": {"AP50": 12.5, "AP50 std": 0.5}, "card": card}
    (results / f"{name}.json").write_text(json.dumps(result))


def test_stored_detections_are_drawn_and_shown_with_their_description(runs_folder, tmp_path):
    shutil.copytree(runs_folder / "one", tmp_path / "run")
    results = tmp_path / "run" / "results"
    for name in ("detect", "detect-torn", "detect-gone"):
        write_detections(results, name)
    (results / "detect-torn.npz").write_bytes(b"PK\x03\x04 no archive")
    (results / "detect-gone.npz").unlink()
    text = write_report([Run(tmp_path / "run")], tmp_path / "page.html").read_text()
    [(image, words)] = re.findall(
        r'<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]*objects[^"]*)"', text
    )
    assert words == "1 of 1 objects found, 0 false positives"
    with Image.open(BytesIO(base64.b64decode(image))) as shown:
        pixels = np.asarray(shown.convert("RGB")).astype(int)
    assert (np.abs(pixels - [0, 160, 0]).sum(2) < 30).mean() > 0.2
    assert text.count("12.5 ± 0.5") == 3


def test_an_image_beside_a_result_is_shown_at_a_limited_size(runs_folder, tmp_path):
    shutil.copytree(runs_folder / "one", tmp_path / "run")
    results = tmp_path / "run" / "results"
    description = PngInfo()
    description.add_text("Description", '2 of 3 "objects" found')
    card = {"protocol": "detect", "data": "boxes", "encoder": "one"}
    result = {"metrics": {"AP50": 12.5}, "card": card}
    (results / "detect.json").write_text(json.dumps(result))
    Image.new("RGB", (2000, 100), (0, 160, 0)).save(results / "detect.png", pnginfo=description)
    text = write_report([Run(tmp_path / "run")], tmp_path / "page.html").read_text()
    [(image, words)] = re.findall(
        r'<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]*objects[^"]*)"', text
    )
    assert html.unescape(words) == '2 of 3 "objects" found'
    with Image.open(BytesIO(base64.b64decode(image))) as shown:
        assert shown.size == (1400, 70)


def test_it_is_reproducible(runs_folder, page):
    again = write_report([Run(runs_folder / "one")], runs_folder / "again.html")
    assert again.read_bytes() == page.read_bytes()


def test_several_runs_are_shown_side_by_side_with_the_settings_that_differ(runs_folder):
    both = write_report(
        open_runs([runs_folder / "one", runs_folder / "two"]), runs_folder / "both.html"
    )
    text = text_of(both)
    table = re.search(r"What differs between the runs(.*?)</section>", text)[1]
    rows = re.findall(r'class="mono">([\w.]+)</th><td>(.*?)</td><td>(.*?)</td>', table)
    assert sorted(rows) == [("method.k", "5", "3"), ("train.epochs", "3", "2")]
    curves = {curve["title"]: curve for curve in data_of(both)["curves"]}
    assert [one["name"] for one in curves["Loss"]["series"]] == ["one", "two"]
    sheets = [run["sheet"] for run in data_of(both)["runs"]]
    assert len(data_of(both)["sheets"]) == len(set(sheets)) == 1  # the same images are stored once


def test_two_runs_share_no_id(runs_folder):
    both = write_report(
        open_runs([runs_folder / "one", runs_folder / "two"]), runs_folder / "ids.html"
    )
    ids = [a["id"] for _, a in Elements(both.read_text()).found if "id" in a]
    assert ids and len(ids) == len(set(ids))


def test_the_commands_it_shows_make_the_same_run(runs_folder, page):
    from meanshift.cli import parse_arguments
    from meanshift.cli.settings import configure

    shown = re.findall(r"<pre>(meanshift pretrain .*?)</pre>", page.read_text())
    assert len(shown) == 2
    for command in shown:
        asked = shlex.split(command.replace("&lt;", "<").replace("&gt;", ">"))[1:]
        assert configure(parse_arguments(asked)) == Run(runs_folder / "one").config
    assert str(parse_arguments(shlex.split(shown[0])[1:]).out) == str(runs_folder / "one")


@settings(max_examples=30, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "method.k": st.integers(1, 50),
            "views.crop_area": st.sampled_from([(0.1, 0.9), (0.08, 1.0)]),
            "method.same_view": st.booleans(),
            "data.validation": st.sampled_from([0.25, "none", "val"]),
            "optim.lr": st.floats(1e-4, 1.0),
            "data.source": st.sampled_from(["a folder", "it's", "x.npz"]),
        },
    )
)
@pytest.mark.slow
def test_any_configuration_has_its_command(chosen):
    from meanshift.cli import parse_arguments
    from meanshift.cli.settings import configure

    config = Config().with_overrides(chosen)
    args = parse_arguments(shlex.split(command_for(config, "runs/a b"))[1:])
    assert configure(args) == config and str(args.out) == "runs/a b"


def test_curves_show_the_logged_metrics(runs_folder, page):
    run = Run(runs_folder / "one")
    curves = {curve["title"]: curve["series"][0] for curve in data_of(page)["curves"]}
    epochs, loss = run.series("loss")
    assert curves["Loss"]["x"] == pytest.approx(epochs, abs=1e-3)
    assert curves["Loss"]["y"] == pytest.approx(loss, rel=1e-4)
    assert curves["20-NN while training, %"]["x"] == [0, 1, 2, 3]


def test_neighbors_and_sheet_are_those_of_the_snapshots(runs_folder, page):
    run = Run(runs_folder / "one")
    data = data_of(page)
    shown = data["runs"][0]
    assert shown["epochs"] == run.snapshot_epochs
    assert len(shown["points"]) == len(run.snapshot_epochs)
    for at, epoch in enumerate(run.snapshot_epochs):
        features = run.snapshot(epoch).features
        similar = (features @ features.T).fill_diagonal_(-2)
        for row in shown["queries"]:
            found = shown["neighbors"][at][row]
            assert similar[row][found].tolist() == pytest.approx(
                similar[row].topk(8).values.tolist(), abs=1e-5
            )
    sheet = data["sheets"][shown["sheet"]].partition(",")[2]
    pixels = np.array(Image.open(BytesIO(base64.b64decode(sheet))))
    side, columns = shown["side"], shown["columns"]
    for row, index in enumerate(run.snapshot(run.snapshot_epochs[-1]).indices.tolist()):
        top, left = row // columns * side + side // 2, row % columns * side + side // 2
        truth = run.source.read(index)[:, 8, 8].numpy()
        assert np.abs(pixels[top, left].astype(int) - truth).max() < 40, shown["titles"][row]


def test_each_query_is_of_another_class(page):
    shown = data_of(page)["runs"][0]
    assert sorted(shown["groups"][row] for row in shown["queries"]) == [0, 1, 2]


def test_it_begins_with_the_verdict_and_ends_with_what_is_folded(page):
    text = page.read_text()
    sections = re.findall(r'<section id="(\w+)"', text)
    assert sections == [
        "verdict", "map", "curves", "metrics", "clusters", "views", "data", "settings", "commands",
    ]  # fmt: skip
    folded = re.findall(r'<details><summary><h2 id="(\w+)-title"', text)
    assert folded == ["settings", "commands"]
    assert "Not compared" not in text and "not compared with a baseline yet" in text
    assert "<code>meanshift evaluate knn" in text and "--compare untrained: pixels</code>" in text


def test_loss_and_purity_are_means_of_the_last_epoch(runs_folder, page):
    run = Run(runs_folder / "one")
    lines = [record for record in run.records("train") if record["epoch"] == 3]
    steps = np.diff([max(r["step"] for r in run.records("train") if r["epoch"] == 2)]
                    + [line["step"] for line in lines])  # fmt: skip
    assert len(set(steps)) == 2  # the last line of an epoch is of fewer steps
    mean = np.average([line["loss"] for line in lines], weights=steps)
    assert f"<b>{format_number(mean)}</b><small>mean of epoch 3; epoch 1: " in text_of(page)


def test_charts_have_baselines_and_a_band_of_collapse(tmp_path, make_images):
    photos = make_images(tmp_path / "photos", {"a": 8, "b": 4}, size=(16, 16))
    overrides = {"method.dim": 30, "data.validation": 0.25}
    directory = write_bare_run(tmp_path / "run", photos, size=8, overrides=overrides)
    for step in range(0, 301, 10):
        line = {"kind": "train", "step": step, "epoch": step // 10, "effective_rank": step % 30}
        directory.append("metrics.jsonl", {**line, "loss": 1.0 + step % 20})
    for step in (0, 300):
        line = {"kind": "monitor", "step": step, "epoch": step // 10, "20-NN": 50.0 + step / 30}
        directory.append("metrics.jsonl", line)
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    curves = {curve["title"]: curve for curve in data_of(page)["curves"]}
    bands = curves["Effective rank of the targets"]["bands"]
    assert [(band["from"], band["to"], band["kind"]) for band in bands] == [
        (0, 4, "bad"),
        (4, 10, "poor"),
        (10, 30, "good"),
    ]
    assert not curves["Loss"]["bands"] and not curves["Loss"]["lines"]
    knn = curves["20-NN while training, %"]
    assert [line["text"] for line in knn["lines"]] == ["start 50.0", "chance 66.7"]
    assert "mean" not in knn["series"][0]
    (loss,) = curves["Loss"]["series"]
    assert set(loss["y"]) == {1.0, 11.0}  # as it was logged
    assert np.ptp(loss["mean"][5:-5]) < 5


# Missing and damaged data


def test_images_that_are_gone_are_named_and_the_rest_is_shown(runs_folder, tmp_path):
    shutil.copytree(runs_folder / "one", tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    config["data"]["source"] = str(tmp_path / "gone")
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    text = text_of(write_report([Run(tmp_path / "run")], tmp_path / "page.html"))
    assert "its images cannot be found" in text and "--data SOURCE" in text
    assert "Loss" in text and "20-NN" in text


def test_images_that_are_others_are_refused(runs_folder, tmp_path):
    other = paint(tmp_path / "other", 23)
    text = text_of(
        write_report([Run(runs_folder / "one", data=str(other))], tmp_path / "page.html")
    )
    assert "was trained on other images than the 54 in" in text


def test_a_run_with_no_snapshot_no_results_and_no_labels(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    write_bare_run(tmp_path / "run", photos, size=12, epochs=())
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    text = text_of(page)
    assert "no snapshots; they are taken while training" in text
    assert "not clustered yet" in text and "0.0 of" in text
    assert f"meanshift evaluate cluster {tmp_path / 'run'} --clusters 10" in text
    assert "30 x 20 pixels" in text


def test_without_labels_points_are_colored_by_cluster(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 30}, size=(20, 30))
    write_bare_run(tmp_path / "run", photos, size=30)
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    shown = data_of(page)["runs"][0]
    assert shown[
        "colored_by"
    ] == "cluster" and "colored by cluster, since none of them has a label" in text_of(page)
    assert set(shown["groups"]) == set(range(10)) and shown["purity"] == []


def test_warnings_are_shown(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 30})
    directory = write_bare_run(tmp_path / "run", photos, size=30)
    directory.append("metrics.jsonl", {"kind": "train", "step": 20, "epoch": 2, "loss": 0.5})
    directory.warn(20, "collapse", "collapse: the embeddings have lost their variety")
    directory.warn(3, "bad image", "cannot identify <image>", file="c/broken & bent.jpg")
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    text = text_of(page)
    assert '<p class="alarm" role="alert"><b>run</b> collapse: the embeddings have lost' in text
    assert "1 image could not be read" in text and "c/broken &amp; bent.jpg" in text
    assert data_of(page)["curves"][0]["marks"] == [{"x": 2.0, "text": "collapse"}]


@pytest.mark.parametrize(
    ("settings", "titles"),
    [
        ({}, ["target (weak)", "online (strong)"]),
        ({"method.same_view": True}, ["online (strong)"]),
        ({"method.module": MODULE}, ["global (weak)", "local 1 (strong)", "local 2 (strong)"]),
    ],
)
def test_each_view_of_the_method_has_a_strip_with_its_name(tmp_path, make_images, settings, titles):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    write_bare_run(tmp_path / "run", photos, size=12, overrides=settings)
    text = write_report([Run(tmp_path / "run")], tmp_path / "page.html").read_text()
    section = re.search(r'<section id="views"(.*?)</section>', text, re.DOTALL)[1]
    assert [image["alt"] for image in Elements(section).all("img")] == ["image", *titles]


def test_a_method_without_neighbors_has_a_page_with_its_own_metrics(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    settings = {"method.module": MODULE}
    directory = write_bare_run(tmp_path / "run", photos, size=12, overrides=settings)
    for step in (10, 20):
        line = {"kind": "train", "step": step, "epoch": step // 10, "loss": 1 / step}
        directory.append("metrics.jsonl", {**line, "local_distance": step / 7, "fixed": 1.0})
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    text = text_of(page)
    assert "three-views, views global (weak), local (strong), conv4" in text
    curves = {curve["title"]: curve["main"] for curve in data_of(page)["curves"]}
    assert curves == {"Loss": True, "local distance": False}
    assert "method.k<" not in text and "method.dim<" in text


def test_without_jinja_the_extra_is_named(tmp_path, make_images, monkeypatch):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    write_bare_run(tmp_path / "run", photos, size=12)
    hide_packages(monkeypatch, "jinja2")
    with pytest.raises(ValueError, match=r"^pages need jinja2; .*meanshift\[report\]"):
        write_report([Run(tmp_path / "run")], tmp_path / "page.html")


@pytest.mark.parametrize("known", ["one cluster", "no snapshot image"])
def test_few_labels_are_enough_for_a_page(tmp_path, known):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)
    labels = np.full(30, -1)
    labels[slice(0, 5) if known == "one cluster" else slice(20, 30)] = 0
    np.savez(tmp_path / "few.npz", x_train=pixels, y_train=labels)
    overrides = {"data.validation": "none"}
    directory = write_bare_run(tmp_path / "run", tmp_path / "few.npz", size=20, overrides=overrides)
    titles = np.array([f"#{i}" for i in range(30)])
    np.savez(directory.results / "cluster.npz", clusters=np.arange(30) // 10, titles=titles)
    page = write_report([Run(directory.folder)], tmp_path / "page.html")
    assert data_of(page)["runs"][0]["colored_by"] == (
        "label" if known == "one cluster" else "cluster"
    )
    captions = [image["alt"] for image in Elements(page.read_text()).all("img")]
    common = ["50%", "", ""] if known == "one cluster" else ["", "", "100%"]
    assert [
        f"10 images, {percentage} 0" if percentage else "10 images" for percentage in common
    ] == captions[:3]


def test_images_without_a_label_are_colored_by_cluster_though_others_have_one(tmp_path):
    drawn = rng.choice(0, 30, 10, rng.SAMPLE).tolist()
    labels = np.array([-1 if index in drawn else 0 for index in range(30)])
    pixels = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "few.npz", x_train=pixels, y_train=labels)
    overrides = {"data.validation": "none"}
    directory = write_bare_run(tmp_path / "run", tmp_path / "few.npz", size=30, overrides=overrides)
    page = write_report([Run(directory.folder)], tmp_path / "page.html", max_images=10)
    (shown,) = data_of(page)["runs"]
    assert (shown["colored_by"], shown["purity"]) == ("cluster", [])
    assert "10 training images, colored by cluster, since none of them has a label" in text_of(page)


def test_a_late_epoch_is_written_out(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    overrides = {"train.epochs": 200}
    directory = write_bare_run(tmp_path / "run", photos, size=12, overrides=overrides)
    for step, epoch in ((1234, 124), (2000, 200)):
        directory.append(
            "metrics.jsonl",
            {"kind": "train", "step": step, "epoch": epoch, "effective_rank": 9},
        )
    (directory.folder / "environment.json").write_text(json.dumps({"steps": 2000}))
    text = text_of(write_report([Run(directory.folder)], tmp_path / "page.html"))
    assert "epoch 200; epoch 123.4: 9" in text


@pytest.mark.parametrize("damage", ["truncated", "stray", "no numbers"])
def test_a_damaged_snapshot_is_named_and_the_rest_is_shown(tmp_path, make_images, damage):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    directory = write_bare_run(tmp_path / "run", photos, size=12, epochs=(0, 1))
    directory.append("metrics.jsonl", {"kind": "train", "step": 20, "epoch": 2, "loss": 0.5})
    last = directory.snapshots / "epoch-0001.pt"
    if damage == "no numbers":
        state = checkpoint.read(last)
        checkpoint.write(last, {**state, "features": state["features"] * torch.nan})
    else:
        last.write_bytes(last.read_bytes()[:1000])
    if damage == "stray":
        last = last.rename(directory.snapshots / "epoch-best.pt")
    page = write_report([Run(directory.folder)], tmp_path / "page.html")
    assert data_of(page)["curves"] and "30 x 20 pixels" in text_of(page)
    assert (str(last) in text_of(page)) == (damage != "stray")
    assert data_of(page)["runs"][0].get("epochs") == ([0] if damage == "stray" else None)


def test_a_damaged_result_does_not_spoil_the_page(runs_folder, tmp_path):
    shutil.copytree(runs_folder / "one", tmp_path / "run")
    (tmp_path / "run/results/linear.json").write_text("{")
    (tmp_path / "run/results/cluster.npz").write_bytes(b"PK\x03\x04 no archive")
    text = text_of(write_report([Run(tmp_path / "run")], tmp_path / "page.html"))
    assert "cluster.npz: cannot be read" in text and "knn on" in text


@pytest.mark.slow
def test_names_cannot_become_code(tmp_path, open_tab):
    evil = "</script><img src=x onerror=alert(1)>"
    for index in range(12):
        folder = tmp_path / "data" / (evil.replace("/", "\u2215") if index % 2 else "b<i>")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{index}<!--<script>.png" if index < 6 else f"{index}<u>'\".png"
        Image.new("RGB", (16, 16), (index * 20, 0, 0)).save(folder / name)
    directory = write_bare_run(
        tmp_path / "a<script>alert(2)<", tmp_path / "data", size=12, epochs=(0, 1)
    )
    directory.warn(1, "collapse", evil)
    directory.save_result(
        "knn", {"metrics": {"20-NN": 5.0}, "card": {"protocol": "knn", "data": evil}}
    )
    page = write_report([Run(directory.folder)], tmp_path / "page.html")
    tab = open_tab(page)
    assert tab.locator("h1").inner_text() == "a<script>alert(2)<"
    assert "onerror" in tab.locator("[role=alert]").inner_text()
    assert tab.locator(".neighbors .thumb").count() > 0


def test_names_that_are_not_unicode_are_shown(tmp_path, open_tab):
    odd = os.fsdecode(b"caf\xe9")
    for index in range(12):
        folder = tmp_path / "data" / (odd if index % 2 else "plain")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            pytest.skip("this file system takes only unicode names")
        Image.new("RGB", (16, 16), (index * 20, 0, 0)).save(folder / f"{odd} {index}.png")
    directory = write_bare_run(tmp_path / "run", tmp_path / "data", size=8, epochs=(0, 1))
    tab = open_tab(write_report([Run(directory.folder)], tmp_path / "page.html"))
    assert tab.locator(".neighbors .thumb").count() > 0
    assert "caf" in tab.locator(".neighbors .thumb").first.get_attribute("aria-label")


@pytest.mark.slow
def test_the_page_of_a_thousand_images_stays_small(tmp_path):
    write_bare_run(
        tmp_path / "run", "sample", size=1000, width=32, overrides={"data.image_size": 32}
    )
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    assert len(data_of(page)["runs"][0]["titles"]) == 1000
    assert page.stat().st_size < 8e6


def test_the_command_line_writes_it_into_the_run(runs_folder, call):
    code, out, err = call("report", runs_folder / "two")
    assert code == 0, err
    assert (
        str(runs_folder / "two/report.html") in out and (runs_folder / "two/report.html").exists()
    )
    code, out, _ = call("report", runs_folder / "one", runs_folder / "two")
    assert code == 0 and (runs_folder / "report-one-two.html").exists()
    code, _, err = call("report", runs_folder / "nothing")
    assert code == 2 and "not a run directory" in err and "meanshift pretrain" in err


# In a real browser


def rows_of(tab, selector):
    return tab.eval_on_selector_all(selector, "all => all.map(one => +one.dataset.row)")


def test_the_slider_changes_the_neighbors(page, open_tab):
    shown = data_of(page)["runs"][0]
    tab = open_tab(page)
    slider = tab.get_by_label("Epoch", exact=True)
    for at in range(len(shown["epochs"]) - 1, -1, -1):
        name = f"epoch {shown['epochs'][at]}" if shown["epochs"][at] else "before training"
        assert tab.locator("#epoch-text").inner_text() == name
        expected = [
            row for query in shown["queries"] for row in (query, *shown["neighbors"][at][query])
        ]
        assert rows_of(tab, ".neighbors .thumb") == expected
        slider.focus()
        tab.keyboard.press("ArrowLeft")
    cell = tab.locator(".neighbors .thumb").nth(1)
    assert shown["titles"][shown["neighbors"][0][shown["queries"][0]][0]] in cell.get_attribute(
        "aria-label"
    )


def test_a_step_of_the_slider_carries_no_images(page, open_tab):
    tab = open_tab(page)
    tab.get_by_label("Epoch", exact=True).focus()
    tab.keyboard.press("ArrowLeft")
    cells = tab.locator(".neighbors .thumb")
    seen = "all => all.map(one => getComputedStyle(one).backgroundImage.slice(0, 16))"
    assert set(cells.evaluate_all(seen)) == {'url("data:image/'}
    assert tab.locator("[style*='data:image']").count() == 0


def test_thumbs_show_the_images_they_name(runs_folder, page, open_tab):
    run = Run(runs_folder / "one")
    tab = open_tab(page)
    indices = run.snapshot(run.snapshot_epochs[-1]).indices
    for cell in tab.locator(".neighbors .thumb").all()[:12]:
        pixels = np.array(Image.open(BytesIO(cell.screenshot())).convert("RGB"))
        middle = pixels[pixels.shape[0] // 2, pixels.shape[1] // 2].astype(int)
        index = int(indices[int(cell.get_attribute("data-row"))])
        assert np.abs(middle - run.source.read(index)[:, 8, 8].numpy()).max() < 40


def test_a_click_on_a_point_shows_its_image_and_neighbors(page, open_tab):
    shown = data_of(page)["runs"][0]
    tab = open_tab(page)
    canvas = tab.locator("canvas")
    canvas.scroll_into_view_if_needed()
    size = canvas.bounding_box()["width"]
    row = 7
    x, y = shown["points"][-1][2 * row : 2 * row + 2]
    canvas.click(position={"x": (x * 0.95 + 1) / 2 * size, "y": (y * 0.95 + 1) / 2 * size})
    selected = rows_of(tab, ".selected .thumb")
    places = np.array(shown["points"][-1]).reshape(-1, 2)
    assert np.hypot(*(places[selected[0]] - places[row])) < 0.03  # or one at the same place
    assert selected[1:] == shown["neighbors"][-1][selected[0]]
    assert shown["titles"][selected[0]] in tab.locator(".selected p").inner_text()
    canvas.focus()
    tab.keyboard.press("n")
    assert rows_of(tab, ".selected .thumb")[0] == (selected[0] + 1) % len(shown["titles"])


def test_a_wheel_zooms_the_map_and_a_drag_moves_it(page, open_tab):
    tab = open_tab(page)
    canvas = tab.locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    tab.wait_for_timeout(100)
    before = canvas.screenshot()
    tab.mouse.move(box["x"] + 100, box["y"] + 100)
    tab.mouse.wheel(0, -600)
    tab.wait_for_timeout(100)
    zoomed = canvas.screenshot()
    tab.mouse.down()
    tab.mouse.move(box["x"] + 180, box["y"] + 160, steps=4)
    tab.mouse.up()
    tab.wait_for_timeout(100)
    assert len({before, zoomed, canvas.screenshot()}) == 3
    assert tab.locator(".selected .thumb").count() == 0  # a drag is no click


def test_a_curve_shows_its_values_by_pointer_and_arrow_keys(page, open_tab):
    tab = open_tab(page)
    curve = tab.locator(".curve").first
    loss = next(c for c in data_of(page)["curves"] if c["title"] == "Loss")["series"][0]
    readout = curve.locator("output")
    svg = curve.locator("svg")
    svg.focus()
    tab.keyboard.press("ArrowLeft")
    assert readout.inner_text() == f"epoch {round(loss['x'][-2], 2):g}: {loss['y'][-2]:.2f}"
    box = svg.bounding_box()
    svg.hover(position={"x": box["width"] * 0.13, "y": box["height"] / 2})
    assert re.fullmatch(r"epoch [\d.]+: [\d.]+", readout.inner_text())
    assert readout.inner_text().startswith(f"epoch {round(loss['x'][0], 2):g}")


def test_each_map_says_which_epoch_it_shows(tmp_path, make_images, open_tab):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    for name, epochs in {"a": (0, 2), "b": (1, 2)}.items():
        write_bare_run(tmp_path / name, photos, size=12, epochs=epochs)
    runs = open_runs([tmp_path / "a", tmp_path / "b"])
    tab = open_tab(write_report(runs, tmp_path / "page.html"))
    shown = tab.locator(".shown-epoch")
    assert shown.all_inner_texts() == [", epoch 2", ", epoch 2"]
    tab.get_by_label("Epoch", exact=True).focus()
    tab.keyboard.press("Home")
    assert tab.locator("#epoch-text").inner_text() == "before training"
    assert shown.all_inner_texts() == [", before training", ", epoch 1"]


def test_a_growing_curve_keeps_the_selected_epoch(page, open_tab):
    read = """([before, after]) => {
      const series = y => [{name: "", x: y.map((_, i) => i + 1), y, color: "red"}];
      const box = document.createElement("div");
      document.body.append(box);
      const chart = meanshiftCurves(box, {title: "Loss", series: series(before)});
      const readout = () => box.querySelector("output").textContent;
      const seen = [readout()];
      const press = new KeyboardEvent("keydown", {key: "ArrowLeft"});
      box.querySelector("svg").dispatchEvent(press);
      seen.push(readout());
      chart.update({series: series(after)});
      seen.push(readout());
      box.querySelector("svg").dispatchEvent(new Event("blur"));
      return [...seen, readout()];
    }"""
    seen = open_tab(page).evaluate(read, [[5, 4, 3], [5, 4, 3, 2]])
    assert seen == ["3.00", "epoch 2: 4.00", "epoch 2: 4.00", "2.00"]


@pytest.mark.slow
def test_play_walks_through_the_epochs(page, open_tab):
    from playwright.sync_api import expect

    tab = open_tab(page)
    tab.get_by_role("button", name="Play").click()
    assert tab.locator("#epoch-text").inner_text() == "before training"
    expect(tab.locator("#epoch-text")).not_to_have_text("before training")
    tab.get_by_role("button", name="Stop").click()


@pytest.mark.slow
def test_the_verdict_can_be_read_by_everyone(runs_folder, tmp_path, open_tab):
    from meanshift.cli import main

    for name in ("one", "two"):
        shutil.copytree(runs_folder / name, tmp_path / name)
        words = ["evaluate", "knn", str(tmp_path / name), "--compare", "untrained:", "pixels"]
        assert main([*words, "--device", "cpu"]) == 0
    folders = [tmp_path / "one", tmp_path / "two"]
    single = write_report([Run(folders[0])], tmp_path / "single.html")
    both = write_report(open_runs(folders), tmp_path / "both.html")
    for path in (single, both):
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                size = {"width": width, "height": 900}
                tab = open_tab(path, viewport=size, color_scheme=scheme)
                assert_accessible(tab)
                shown = tab.locator(".verdict-summary").first
                assert shown.is_visible() and (path == both or shown.bounding_box()["y"] < 900)
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
                whiskers = tab.locator(".whisker")
                assert whiskers.count() == 3 * (1 if path == single else 2)
                for box in (each.bounding_box() for each in whiskers.all()):
                    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    tab.get_by_text("Settings", exact=True).last.click()
    assert tab.locator("#settings table").first.is_visible()
    texts = tab.locator(".curve .line-text").all_text_contents()
    assert any(text.startswith("raw pixels ") for text in texts)
    best = tab.locator("#metrics td.best")
    assert best.count() and all("(best)" in text for text in best.all_inner_texts())


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390, 800, 1280])
def test_nothing_is_wider_than_the_screen(runs_folder, open_tab, width):
    both = write_report(
        open_runs([runs_folder / "one", runs_folder / "two"]), runs_folder / "wide.html"
    )
    tab = open_tab(both, viewport={"width": width, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def luminance(color):
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(page, open_tab, scheme):
    tab = open_tab(page, color_scheme=scheme)
    seen = tab.evaluate("""() => [...document.querySelectorAll(
      "p, dt, dd, th, td, a, summary, h4, button"
    )].filter(one => one.innerText && one.innerText.trim() && one.offsetParent).map(one => {
      const back = node => getComputedStyle(node).backgroundColor;
      let under = one;
      while (back(under) === "rgba(0, 0, 0, 0)" && under.parentElement) under = under.parentElement;
      return [getComputedStyle(one).color, back(under), one.innerText];
    })""")
    assert len(seen) > 50
    for front, back, text in seen:
        light, dark = sorted([luminance(front), luminance(back)], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (front, back, text)


def test_the_button_switches_light_and_dark(page, open_tab):
    tab = open_tab(page, color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(paper)
    tab.get_by_role("button", name="Switch between light and dark").click()
    assert luminance(tab.evaluate(paper)) < 0.1 < luminance(light)


def test_paper_is_white_after_the_dark_button(page, open_tab):
    tab = open_tab(page, color_scheme="light")
    tab.get_by_role("button", name="Switch between light and dark").click()
    tab.emulate_media(media="print")
    seen = "[document.body, document.querySelector('.panel')].map(one => getComputedStyle(one))"
    back = tab.evaluate(f"{seen}.map(style => style.backgroundColor)")
    front = tab.evaluate(f"{seen}.map(style => style.color)")
    assert [back, front] == [["rgb(255, 255, 255)"] * 2, ["rgb(0, 0, 0)"] * 2]


def test_on_paper_the_closed_parts_are_open(page, open_tab):
    tab = open_tab(page)
    pages = tab.pdf()
    assert pages.startswith(b"%PDF")
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("details:not([open])").count() == 0
    assert not tab.locator("nav").is_visible() and not tab.locator("#slider").is_visible()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("details[open]").count() == 0


# Runs that are read for the page


def test_the_monitor_evaluates_before_the_first_step_and_the_page_shows_it(runs_folder, page):
    first = Run(runs_folder / "one").records("monitor")[0]
    assert (first["step"], first["epoch"]) == (0, 0) and first["20-NN"] > 0
    assert f"epoch 3; epoch 0: {format_number(first['20-NN'])}</small>" in text_of(page)


@pytest.mark.slow
def test_unreadable_images_are_not_in_a_snapshot(tmp_path, capsys):
    from meanshift.cli import main

    photos = paint(tmp_path / "photos", 16)
    (photos / "ant" / "000.png").write_bytes(b"no image")
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    flags += [
        "--data.validation",
        "none",
        "--data.max_bad_fraction",
        "0.1",
        "--train.snapshot_images",
        "1000",
    ]
    command = ["pretrain", "small", "--data", str(photos), "--out", str(tmp_path / "run")]
    assert main([*command, *flags, "--train.epochs", "1"]) == 0
    assert "gray" not in capsys.readouterr().err  # it is warned of once, as what it is
    run = Run(tmp_path / "run")
    readable = [i for i in range(48) if run.source.title(i) != "ant/000.png"]
    for epoch in run.snapshot_epochs:
        assert run.snapshot(epoch).indices.tolist() == readable
    text = text_of(write_report([run], tmp_path / "page.html"))
    assert "1 image could not be read" in text and "ant/000.png" in text


def test_snapshots_of_different_images_are_aligned_to_the_newest(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 12})
    directory = write_bare_run(tmp_path / "run", photos, size=12, epochs=(0, 1))
    path = directory.snapshots / "epoch-0001.pt"
    state = checkpoint.read(path)
    readable = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    later = {
        **state,
        "indices": state["indices"][readable],
        "features": state["features"][readable],
    }
    checkpoint.write(path, later)
    before, after = (Run(tmp_path / "run").snapshot(epoch) for epoch in (0, 1))
    assert before.indices.tolist() == after.indices.tolist() == readable
    whole = checkpoint.read(directory.snapshots / "epoch-0000.pt")["features"].float()
    expected = torch.nn.functional.normalize(whole, dim=1)[readable]
    assert torch.allclose(before.features, expected)


def test_folders_that_are_no_runs_are_left_out_and_a_run_counts_once(runs_folder):
    (runs_folder / "figures").mkdir(exist_ok=True)
    with pytest.warns(UserWarning, match="figures: not a run directory, left out"):
        runs = open_runs(
            [runs_folder / "one", runs_folder / "figures", runs_folder / "two", runs_folder / "one"]
        )
    assert [run.name for run in runs] == ["one", "two"]
    with pytest.raises(ValueError, match="not a run directory"):
        open_runs([runs_folder / "figures"])
    with pytest.raises(ValueError, match="not a run directory"):
        open_runs([runs_folder / "one", runs_folder / "missing"])


def test_a_folder_in_the_place_of_the_page_is_refused(runs_folder, call):
    code, _, err = call("report", runs_folder / "one", "--out", runs_folder)
    assert code == 2 and "is a folder; need a file" in err
    code, _, err = call("figures", runs_folder / "one", "--out", runs_folder / "one/config.json")
    assert code == 2 and "is a file; need a folder" in err


def test_missing_images_are_reported_on_the_terminal_with_their_place(runs_folder, call, tmp_path):
    code, _, err = call(
        "report", runs_folder / "one", "--data", tmp_path / "x", "--out", tmp_path / "p"
    )
    assert code == 0 and "cannot be found" in err
    assert f"in training it was {runs_folder / 'photos'}" in err
