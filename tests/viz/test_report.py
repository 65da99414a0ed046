"""The report: one file that needs nothing else, says what is true, and works in a real browser."""

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
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import RunDirectory
from meanshift.viz.report.page import write_report
from meanshift.viz.run_reader import Run, open_runs
from meanshift.viz.style import thinned

SETTINGS = {
    "data.image_size": 16, "encoder.name": "resnet10", "encoder.width": 0.125,
    "method.bank_size": 64, "train.batch_size": 8, "train.epochs": 3, "train.snapshots": 4,
    "train.monitor_every": 1, "train.snapshot_images": 40, "train.device": "cpu",
    "data.validation": 0.2, "data.workers": 0, "train.log_every": 2,
}  # fmt: skip
HUES = {"ant": 0.0, "bee": 0.33, "<b>cow</b>": 0.66}


def paint(folder, counts):
    """Images of one color each, no two alike, so that a color names its image."""
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
def made(tmp_path_factory):
    """Two small trained runs, the first one judged."""
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
def page(made):
    return write_report([Run(made / "one")], made / "page.html")


@pytest.fixture
def opened(chromium):
    """Opens a file as a person would; whatever goes wrong there fails the test."""
    contexts, wrong = [], []

    def open_page(path, **how):
        context = chromium.new_context(**{"viewport": {"width": 1200, "height": 900}, **how})
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else 0)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
        url = path.resolve().as_uri()
        tab.on("request", lambda asked: wrong.append(asked.url)
               if asked.url != url and not asked.url.startswith("data:") else 0)  # fmt: skip
        tab.goto(url)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def words(path):
    return re.sub(r"\s+", " ", path.read_text())


def drawn(path):
    held = re.search(r'id="drawn">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(held[1])


def bare_run(folder, source, *, size, epochs=(0,), width=8, overrides=None):
    """A run directory without a training: only what a report reads."""
    config = recipe("small").with_overrides({"data.source": str(source), **(overrides or {})})
    journal = RunDirectory(folder).begin(config, extra={"steps": 10 * config.train.epochs})
    for epoch in epochs:
        features = torch.randn(size, width, generator=torch.Generator().manual_seed(epoch))
        state = {"format": checkpoint.FORMAT, "epoch": epoch, "indices": torch.arange(size)}
        checkpoint.write(
            journal.snapshots / f"epoch-{epoch:04d}.pt", {**state, "features": features.half()}
        )
    return journal


# What the file holds


def test_it_is_one_file_that_asks_nothing_of_a_network(page):
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
    named = {a["for"] for a in elements.all("label")}
    assert {a["id"] for a in elements.all("input")} <= named
    linked = [a["href"][1:] for a in elements.all("a") if a["href"].startswith("#")]
    assert set(linked) <= set(ids)


def test_figures_stand_beside_their_cards(made, page):
    result = json.loads((made / "one/results/knn.json").read_text())
    text = words(page)
    assert f"{result['figures']['20-NN']:.1f}" in text
    assert result["card"]["weights"] in text and "plain majority" in text


def test_a_figure_of_older_weights_says_so(made, tmp_path):
    shutil.copytree(made / "one", tmp_path / "one")
    run = Run(tmp_path / "one")
    assert run.older(run.results["knn"]) == "" == run.older(run.results["cluster"])
    step = {"kind": "train", "step": 99, "epoch": 9, "loss": 1.0}
    run.journal.append("metrics.jsonl", step)  # it was continued after it was judged
    told = run.older(run.results["knn"])
    assert re.fullmatch(r"judged after step \d+ of 99", told)
    text = words(write_report([run], tmp_path / "page.html"))
    assert text.count(told) == 6  # the headline, both tables and their cards, the clusters


def test_an_image_that_lies_beside_a_result_is_shown_with_its_words(made, tmp_path):
    shutil.copytree(made / "one", tmp_path / "run")
    results, told = tmp_path / "run" / "results", PngInfo()
    told.add_text("Description", '2 of 3 "objects" found')
    card = {"protocol": "detect", "data": "boxes", "judged": "one"}
    for name in ("detect", "detect-torn"):
        held = {"figures": {"AP50": 12.5}, "card": card}
        (results / f"{name}.json").write_text(json.dumps(held))
    Image.new("RGB", (2000, 100), (0, 160, 0)).save(results / "detect.png", pnginfo=told)
    (results / "detect-torn.png").write_bytes(b"torn")
    text = write_report([Run(tmp_path / "run")], tmp_path / "page.html").read_text()
    shown = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]*objects[^"]*)"', text)
    [(image, words)] = shown
    assert html.unescape(words) == '2 of 3 "objects" found'
    with Image.open(BytesIO(base64.b64decode(image))) as drawn:
        assert drawn.size == (1400, 70) and drawn.getpixel((700, 35))[1] > 150


def test_it_is_made_alike_twice(made, page):
    again = write_report([Run(made / "one")], made / "again.html")
    assert again.read_bytes() == page.read_bytes()


def test_several_runs_stand_side_by_side_with_what_differs(made):
    both = write_report(open_runs([made / "one", made / "two"]), made / "both.html")
    text = words(both)
    table = re.search(r"What differs</h2>(.*?)</section>", text)[1]
    rows = re.findall(r'class="mono">([\w.]+)</th><td>(.*?)</td><td>(.*?)</td>', table)
    assert sorted(rows) == [("method.k", "5", "3"), ("train.epochs", "3", "2")]
    curves = {curve["title"]: curve for curve in drawn(both)["curves"]}
    assert [one["name"] for one in curves["Loss"]["series"]] == ["one", "two"]
    sheets = [run["sheet"] for run in drawn(both)["runs"]]
    assert len(drawn(both)["sheets"]) == len(set(sheets)) == 1  # the same probe is kept once


def test_two_runs_share_no_id(made):
    both = write_report(open_runs([made / "one", made / "two"]), made / "ids.html")
    ids = [a["id"] for _, a in Elements(both.read_text()).found if "id" in a]
    assert ids and len(ids) == len(set(ids))


def test_the_commands_it_shows_make_the_same_run(made, page):
    from meanshift.cli import _parser
    from meanshift.cli.settings import configure

    shown = re.findall(r"<pre>(meanshift pretrain .*?)</pre>", page.read_text())
    assert len(shown) == 2
    for command in shown:
        asked = shlex.split(command.replace("&lt;", "<").replace("&gt;", ">"))[1:]
        parsed = _parser().parse_args(asked)
        assert configure(parsed, recipe(parsed.recipe)) == Run(made / "one").config
    assert str(_parser().parse_args(shlex.split(shown[0])[1:]).out) == str(made / "one")


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
def test_any_configuration_has_its_command(chosen):
    from meanshift.cli import _parser
    from meanshift.cli.settings import configure

    config = Config().with_overrides(chosen)
    parsed = _parser().parse_args(shlex.split(command_for(config, "runs/a b"))[1:])
    assert configure(parsed, recipe(parsed.recipe)) == config and str(parsed.out) == "runs/a b"


def test_curves_hold_what_the_metrics_hold(made, page):
    run = Run(made / "one")
    curves = {curve["title"]: curve["series"][0] for curve in drawn(page)["curves"]}
    epochs, loss = run.series("loss")
    assert curves["Loss"]["x"] == pytest.approx(epochs, abs=1e-3)
    assert curves["Loss"]["y"] == pytest.approx(loss, rel=1e-4)
    assert curves["20-NN while training, %"]["x"] == [0, 1, 2, 3]


def test_a_long_curve_is_thinned_by_means_and_keeps_its_ends():
    x = [float(v) for v in range(10_000)]
    some, values = thinned(x, [2.0 * v for v in x], most=100)
    assert len(some) == 100 and some[0] == 0 and some[-1] == 9999
    assert values == pytest.approx([2 * v for v in some], rel=1e-3)
    assert thinned([0.0, 1.0], [5.0, 6.0]) == ([0, 1], [5.0, 6.0])


def test_neighbors_and_sheet_are_those_of_the_snapshots(made, page):
    run, held = Run(made / "one"), drawn(page)
    shown = held["runs"][0]
    assert shown["epochs"] == run.epochs and len(shown["points"]) == len(run.epochs)
    for at, epoch in enumerate(run.epochs):
        features = run.moment(epoch).features
        similar = (features @ features.T).fill_diagonal_(-2)
        for row in shown["queries"]:
            found = shown["near"][at][row]
            assert similar[row][found].tolist() == pytest.approx(
                similar[row].topk(8).values.tolist(), abs=1e-5
            )
    sheet = held["sheets"][shown["sheet"]].partition(",")[2]
    import base64

    pixels = np.array(Image.open(BytesIO(base64.b64decode(sheet))))
    side, columns = shown["side"], shown["columns"]
    for row, index in enumerate(run.moment(run.epochs[-1]).indices.tolist()):
        top, left = row // columns * side + side // 2, row % columns * side + side // 2
        truth = run.source.read(index)[:, 8, 8].numpy()
        assert np.abs(pixels[top, left].astype(int) - truth).max() < 40, shown["titles"][row]


def test_each_query_is_of_another_class(page):
    shown = drawn(page)["runs"][0]
    assert sorted(shown["groups"][row] for row in shown["queries"]) == [0, 1, 2]


# What it says when something is missing or wrong


def test_images_that_are_gone_are_named_and_the_rest_is_shown(made, tmp_path):
    shutil.copytree(made / "one", tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    config["data"]["source"] = str(tmp_path / "gone")
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    text = words(write_report([Run(tmp_path / "run")], tmp_path / "page.html"))
    assert "its images cannot be found" in text and "--data SOURCE" in text
    assert "Loss" in text and "20-NN" in text


def test_images_that_are_others_are_refused(made, tmp_path):
    other = paint(tmp_path / "other", 23)
    text = words(write_report([Run(made / "one", data=str(other))], tmp_path / "page.html"))
    assert "was trained on other images than the 54 in" in text


def test_a_run_with_no_snapshot_no_results_and_no_labels(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    bare_run(tmp_path / "run", photos, size=12, epochs=())
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    text = words(page)
    assert "no snapshots; they are taken while training" in text
    assert "not clustered yet" in text and "0.0 of" in text
    assert f"meanshift evaluate cluster {tmp_path / 'run'} --clusters 10" in text
    assert "30 x 20 pixels" in text


def test_without_labels_points_are_colored_by_cluster(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 30}, size=(20, 30))
    bare_run(tmp_path / "run", photos, size=30)
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    shown = drawn(page)["runs"][0]
    assert shown["by"] == "cluster" and "colored by cluster, since there are no labels" in words(
        page
    )
    assert set(shown["groups"]) == set(range(10)) and shown["pure"] == []


def test_warnings_stand_where_they_are_seen(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 30})
    journal = bare_run(tmp_path / "run", photos, size=30)
    journal.append("metrics.jsonl", {"kind": "train", "step": 20, "epoch": 2, "loss": 0.5})
    journal.warn(20, "collapse", "collapse: the embeddings have lost their variety")
    journal.warn(3, "bad image", "cannot identify <image>", file="c/broken & bent.jpg")
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    text = words(page)
    assert '<p class="alarm" role="alert"><b>run</b> collapse: the embeddings have lost' in text
    assert "1 image could not be read" in text and "c/broken &amp; bent.jpg" in text
    assert drawn(page)["curves"][0]["marks"] == [{"x": 2.0, "text": "collapse"}]


def test_the_same_view_twice_is_called_what_it_is(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    bare_run(tmp_path / "run", photos, size=12, overrides={"method.same_view": True})
    text = html.unescape(words(write_report([Run(tmp_path / "run")], tmp_path / "page.html")))
    assert "the target's view (strong)" in text and "the online view (strong, the same)" in text


@pytest.mark.parametrize("known", ["one cluster", "no image of the probe"])
def test_few_labels_are_enough_for_a_page(tmp_path, known):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)
    labels = np.full(30, -1)
    labels[slice(0, 5) if known == "one cluster" else slice(20, 30)] = 0
    np.savez(tmp_path / "few.npz", x_train=pixels, y_train=labels)
    held_out = {"data.validation": "none"}
    journal = bare_run(tmp_path / "run", tmp_path / "few.npz", size=20, overrides=held_out)
    titles = np.array([f"#{i}" for i in range(30)])
    np.savez(journal.results / "cluster.npz", assigned=np.arange(30) // 10, image=titles)
    page = write_report([Run(journal.folder)], tmp_path / "page.html")
    assert drawn(page)["runs"][0]["by"] == ("label" if known == "one cluster" else "cluster")
    told = [image["alt"] for image in Elements(page.read_text()).all("img")]
    common = ["50%", "", ""] if known == "one cluster" else ["", "", "100%"]
    assert [f"10 images, {share} 0" if share else "10 images" for share in common] == told[:3]


@pytest.mark.parametrize("damage", ["truncated", "stray", "no numbers"])
def test_a_damaged_snapshot_is_named_and_the_rest_is_shown(tmp_path, make_images, damage):
    photos = make_images(tmp_path / "flat", {"": 12}, size=(20, 30))
    journal = bare_run(tmp_path / "run", photos, size=12, epochs=(0, 1))
    journal.append("metrics.jsonl", {"kind": "train", "step": 20, "epoch": 2, "loss": 0.5})
    last = journal.snapshots / "epoch-0001.pt"
    if damage == "no numbers":
        state = checkpoint.read(last)
        checkpoint.write(last, {**state, "features": state["features"] * torch.nan})
    else:
        last.write_bytes(last.read_bytes()[:1000])
    if damage == "stray":
        last = last.rename(journal.snapshots / "epoch-best.pt")
    page = write_report([Run(journal.folder)], tmp_path / "page.html")
    assert drawn(page)["curves"] and "30 x 20 pixels" in words(page)
    assert (str(last) in words(page)) == (damage != "stray")
    assert drawn(page)["runs"][0].get("epochs") == ([0] if damage == "stray" else None)


def test_a_damaged_result_does_not_spoil_the_page(made, tmp_path):
    shutil.copytree(made / "one", tmp_path / "run")
    (tmp_path / "run/results/linear.json").write_text("{")
    (tmp_path / "run/results/cluster.npz").write_bytes(b"PK\x03\x04 no archive")
    text = words(write_report([Run(tmp_path / "run")], tmp_path / "page.html"))
    assert "cluster.npz: cannot be read" in text and "knn on" in text


def test_names_cannot_become_code(tmp_path, opened):
    evil = "</script><img src=x onerror=alert(1)>"
    for index in range(12):
        folder = tmp_path / "data" / (evil.replace("/", "\u2215") if index % 2 else "b<i>")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{index}<!--<script>.png" if index < 6 else f"{index}<u>'\".png"
        Image.new("RGB", (16, 16), (index * 20, 0, 0)).save(folder / name)
    journal = bare_run(tmp_path / "a<script>alert(2)<", tmp_path / "data", size=12, epochs=(0, 1))
    journal.warn(1, "collapse", evil)
    journal.save_result(
        "knn", {"figures": {"20-NN": 5.0}, "card": {"protocol": "knn", "data": evil}}
    )
    page = write_report([Run(journal.folder)], tmp_path / "page.html")
    tab = opened(page)
    assert tab.locator("h1").inner_text() == "a<script>alert(2)<"
    assert "onerror" in tab.locator("[role=alert]").inner_text()
    assert tab.locator(".neighbors .thumb").count() > 0


def test_names_that_are_no_text_are_shown_all_the_same(tmp_path, opened):
    odd = os.fsdecode(b"caf\xe9")
    for index in range(12):
        folder = tmp_path / "data" / (odd if index % 2 else "plain")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            pytest.skip("this file system takes only names that are text")
        Image.new("RGB", (16, 16), (index * 20, 0, 0)).save(folder / f"{odd} {index}.png")
    journal = bare_run(tmp_path / "run", tmp_path / "data", size=8, epochs=(0, 1))
    tab = opened(write_report([Run(journal.folder)], tmp_path / "page.html"))
    assert tab.locator(".neighbors .thumb").count() > 0
    assert "caf" in tab.locator(".neighbors .thumb").first.get_attribute("aria-label")


def test_the_page_of_a_thousand_images_stays_small(tmp_path):
    bare_run(tmp_path / "run", "sample", size=1000, width=32, overrides={"data.image_size": 32})
    page = write_report([Run(tmp_path / "run")], tmp_path / "page.html")
    assert len(drawn(page)["runs"][0]["titles"]) == 1000
    assert page.stat().st_size < 8e6


def test_the_command_line_writes_it_into_the_run(made, call):
    code, out, err = call("report", made / "two")
    assert code == 0, err
    assert str(made / "two/report.html") in out and (made / "two/report.html").exists()
    code, out, _ = call("report", made / "one", made / "two")
    assert code == 0 and (made / "report-one-two.html").exists()
    code, _, err = call("report", made / "nothing")
    assert code == 2 and "not a run directory" in err and "meanshift pretrain" in err


# In a real browser


def background(tab, selector):
    return tab.eval_on_selector_all(selector, "all => all.map(one => +one.dataset.row)")


def test_the_slider_changes_the_neighbors(page, opened):
    shown, tab = drawn(page)["runs"][0], opened(page)
    slider = tab.get_by_label("Epoch", exact=True)
    for at in range(len(shown["epochs"]) - 1, -1, -1):
        name = f"epoch {shown['epochs'][at]}" if shown["epochs"][at] else "untrained"
        assert tab.locator("#epoch-now").inner_text() == name
        expected = [row for query in shown["queries"] for row in (query, *shown["near"][at][query])]
        assert background(tab, ".neighbors .thumb") == expected
        slider.focus()
        tab.keyboard.press("ArrowLeft")
    cell = tab.locator(".neighbors .thumb").nth(1)
    assert shown["titles"][shown["near"][0][shown["queries"][0]][0]] in cell.get_attribute(
        "aria-label"
    )


def test_a_step_of_the_slider_carries_no_images(page, opened):
    tab = opened(page)
    tab.get_by_label("Epoch", exact=True).focus()
    tab.keyboard.press("ArrowLeft")
    cells = tab.locator(".neighbors .thumb")
    seen = "all => all.map(one => getComputedStyle(one).backgroundImage.slice(0, 16))"
    assert set(cells.evaluate_all(seen)) == {'url("data:image/'}
    assert tab.locator("[style*='data:image']").count() == 0


def test_thumbs_show_the_images_they_name(made, page, opened):
    run, tab = Run(made / "one"), opened(page)
    indices = run.moment(run.epochs[-1]).indices
    for cell in tab.locator(".neighbors .thumb").all()[:12]:
        pixels = np.array(Image.open(BytesIO(cell.screenshot())).convert("RGB"))
        middle = pixels[pixels.shape[0] // 2, pixels.shape[1] // 2].astype(int)
        index = int(indices[int(cell.get_attribute("data-row"))])
        assert np.abs(middle - run.source.read(index)[:, 8, 8].numpy()).max() < 40


def test_a_click_on_a_point_shows_its_image_and_neighbors(page, opened):
    shown, tab = drawn(page)["runs"][0], opened(page)
    canvas = tab.locator("canvas")
    canvas.scroll_into_view_if_needed()
    size = canvas.bounding_box()["width"]
    row = 7
    x, y = shown["points"][-1][2 * row : 2 * row + 2]
    canvas.click(position={"x": (x * 0.95 + 1) / 2 * size, "y": (y * 0.95 + 1) / 2 * size})
    picked = background(tab, ".picked .thumb")
    places = np.array(shown["points"][-1]).reshape(-1, 2)
    assert np.hypot(*(places[picked[0]] - places[row])) < 0.03  # it, or one that lies on it
    assert picked[1:] == shown["near"][-1][picked[0]]
    assert shown["titles"][picked[0]] in tab.locator(".picked p").inner_text()
    canvas.focus()
    tab.keyboard.press("n")
    assert background(tab, ".picked .thumb")[0] == (picked[0] + 1) % len(shown["titles"])


def test_a_wheel_zooms_the_map_and_a_drag_moves_it(page, opened):
    tab = opened(page)
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
    assert tab.locator(".picked .thumb").count() == 0  # a drag is no click


def test_a_curve_tells_its_values_under_the_pointer_and_the_arrows(page, opened):
    tab = opened(page)
    curve = tab.locator(".curve").first
    loss = next(c for c in drawn(page)["curves"] if c["title"] == "Loss")["series"][0]
    readout = curve.locator("output")
    svg = curve.locator("svg")
    svg.focus()
    tab.keyboard.press("ArrowLeft")
    assert readout.inner_text() == f"epoch {round(loss['x'][-2], 2):g}: {loss['y'][-2]:.2f}"
    box = svg.bounding_box()
    svg.hover(position={"x": box["width"] * 0.13, "y": box["height"] / 2})
    assert re.fullmatch(r"epoch [\d.]+: [\d.]+", readout.inner_text())
    assert readout.inner_text().startswith(f"epoch {round(loss['x'][0], 2):g}")


def test_a_curve_that_grows_keeps_the_epoch_that_is_read(page, opened):
    read = """([before, after]) => {
      const series = y => [{name: "", x: y.map((_, i) => i + 1), y, color: "red"}];
      const box = document.createElement("div");
      document.body.append(box);
      const chart = meanshiftCurves(box, {title: "Loss", series: series(before)});
      const told = () => box.querySelector("output").textContent, seen = [told()];
      const press = new KeyboardEvent("keydown", {key: "ArrowLeft"});
      box.querySelector("svg").dispatchEvent(press);
      seen.push(told());
      chart.update({series: series(after)});
      seen.push(told());
      box.querySelector("svg").dispatchEvent(new Event("blur"));
      return [...seen, told()];
    }"""
    seen = opened(page).evaluate(read, [[5, 4, 3], [5, 4, 3, 2]])
    assert seen == ["3.00", "epoch 2: 4.00", "epoch 2: 4.00", "2.00"]


def test_play_walks_through_the_epochs(page, opened):
    from playwright.sync_api import expect

    tab = opened(page)
    tab.get_by_role("button", name="Play").click()
    assert tab.locator("#epoch-now").inner_text() == "untrained"
    expect(tab.locator("#epoch-now")).not_to_have_text("untrained")
    tab.get_by_role("button", name="Stop").click()


@pytest.mark.parametrize("width", [360, 390, 800, 1280])
def test_nothing_is_wider_than_the_screen(made, opened, width):
    both = write_report(open_runs([made / "one", made / "two"]), made / "wide.html")
    tab = opened(both, viewport={"width": width, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def luminance(color):
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(page, opened, scheme):
    tab = opened(page, color_scheme=scheme)
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


def test_the_button_switches_light_and_dark(page, opened):
    tab = opened(page, color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(paper)
    tab.get_by_role("button", name="Switch between light and dark").click()
    assert luminance(tab.evaluate(paper)) < 0.1 < luminance(light)


def test_paper_is_white_after_the_dark_button(page, opened):
    tab = opened(page, color_scheme="light")
    tab.get_by_role("button", name="Switch between light and dark").click()
    tab.emulate_media(media="print")
    seen = "[document.body, document.querySelector('.panel')].map(one => getComputedStyle(one))"
    back = tab.evaluate(f"{seen}.map(style => style.backgroundColor)")
    front = tab.evaluate(f"{seen}.map(style => style.color)")
    assert [back, front] == [["rgb(255, 255, 255)"] * 2, ["rgb(0, 0, 0)"] * 2]


def test_on_paper_the_closed_parts_are_open(page, opened):
    tab = opened(page)
    pages = tab.pdf()
    assert pages.startswith(b"%PDF")
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("details:not([open])").count() == 0
    assert not tab.locator("nav").is_visible() and not tab.locator("#slider").is_visible()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("details[open]").count() == 0


# Runs as they are read


def test_the_monitor_looks_before_the_first_step_and_the_page_shows_it(made, page):
    first = Run(made / "one").records("monitor")[0]
    assert (first["step"], first["epoch"]) == (0, 0) and first["20-NN"] > 0
    assert "at epoch 0" in words(page) or "epoch 0</small>" in words(page)


def test_unreadable_images_have_no_row_in_a_snapshot(tmp_path, capsys):
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
    for epoch in run.epochs:
        assert run.moment(epoch).indices.tolist() == readable
    text = words(write_report([run], tmp_path / "page.html"))
    assert "1 image could not be read" in text and "ant/000.png" in text


def test_a_probe_that_lost_an_image_is_read_by_those_it_kept(tmp_path, make_images):
    photos = make_images(tmp_path / "flat", {"": 12})
    journal = bare_run(tmp_path / "run", photos, size=12, epochs=(0, 1))
    path = journal.snapshots / "epoch-0001.pt"
    state = checkpoint.read(path)
    kept = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    later = {**state, "indices": state["indices"][kept], "features": state["features"][kept]}
    checkpoint.write(path, later)
    before, after = (Run(tmp_path / "run").moment(epoch) for epoch in (0, 1))
    assert before.indices.tolist() == after.indices.tolist() == kept
    whole = checkpoint.read(journal.snapshots / "epoch-0000.pt")["features"].float()
    expected = torch.nn.functional.normalize(whole, dim=1)[kept]
    assert torch.allclose(before.features, expected)


def test_folders_that_are_no_runs_are_left_out_of_many_and_a_run_counts_once(made):
    (made / "figures").mkdir(exist_ok=True)
    with pytest.warns(UserWarning, match="figures: not a run directory, left out"):
        runs = open_runs([made / "one", made / "figures", made / "two", made / "one"])
    assert [run.name for run in runs] == ["one", "two"]
    with pytest.raises(ValueError, match="not a run directory"):
        open_runs([made / "figures"])
    with pytest.raises(ValueError, match="not a run directory"):
        open_runs([made / "one", made / "missing"])


def test_a_folder_in_the_place_of_the_page_is_refused(made, call):
    code, _, err = call("report", made / "one", "--out", made)
    assert code == 2 and "is a folder; need a file" in err
    code, _, err = call("figures", made / "one", "--out", made / "one/config.json")
    assert code == 2 and "is a file; need a folder" in err


def test_gone_images_are_told_on_the_terminal_with_where_they_were(made, call, tmp_path):
    code, _, err = call("report", made / "one", "--data", tmp_path / "x", "--out", tmp_path / "p")
    assert code == 0 and "cannot be found" in err
    assert f"in training it was {made / 'photos'}" in err
