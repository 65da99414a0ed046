"""Labels in a real browser: given by keys, saved before they are shown, exported and used."""

import csv
import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.browser import assert_accessible, wait_until
from tests.support.explorer import serving_explorer, write_arrays, write_live_run

pytestmark = pytest.mark.slow

DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
TONES = {"red": (220, 40, 40), "green": (40, 200, 40), "<b>blue</b>": (40, 40, 220)}


def write_colors(folder, count, seed=0):
    """Images of three colors, whose names do not tell the color."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for number in range(count):
        tone = list(TONES.values())[number % 3]
        pixels = np.clip(np.array(tone) + rng.integers(-30, 30, (16, 16, 3)), 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03d} <i>.png")
    return folder


def color_of(title):
    return list(TONES)[int(title[:3]) % 3]


@pytest.fixture
def run(tmp_path):
    """A run on images without labels, of which two thirds are on the map."""
    photos = write_colors(tmp_path / "photos", 60)
    return write_live_run(tmp_path / "run", photos, validation="none", snapshot_images=40)


@pytest.fixture
def serve(run):
    """Start `meanshift explore` as a process; gives it and its address."""
    started = []

    def start():
        command = [sys.executable, "-m", "meanshift", "explore", run, "--no-browser", "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, re.search(r"http://\S+", process.stdout.readline())[0]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def visit(chromium):
    messages = []
    contexts = []

    def open_page(address, view=DESKTOP, scheme="light"):
        context = chromium.new_context(viewport=view, color_scheme=scheme, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(f"{address}#label")
        expect(page.locator(".label-image").first).to_be_visible()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert messages == []


def current_title(page):
    return page.inner_text(".label-image.current > b")


def label_current(page, known):
    """Label the current image by keys alone: a number if its class has one, else its name."""
    name = color_of(current_title(page))
    before = int(page.evaluate("label.given.size"))
    if name in known:
        page.keyboard.press(str(known.index(name) + 1))
    else:
        known.append(name)
        page.keyboard.press("Enter")
        page.keyboard.type(name)
        page.keyboard.press("Enter")
    expect(page.locator("#label-status")).to_contain_text(f"{before + 1} label")
    return name


def test_by_keys_alone_to_a_classifier_and_nothing_is_lost_in_a_kill(serve, visit, run, tmp_path):
    process, address = serve()
    page = visit(address)
    assert "Too few labels to tell" in page.inner_text("#label-accuracy")
    known = []
    labeled = set()
    for _ in range(12):  # more than one batch of proposals
        expect(page.locator(".label-image.current")).to_contain_text(re.compile("no label|%"))
        labeled.add(current_title(page))
        label_current(page, known)
    assert len(labeled) == 12 and set(known) == set(TONES)
    expect(page.locator("#label-accuracy")).to_contain_text("over 12 labels (95% interval")
    expect(page.locator("#label-accuracy")).to_contain_text("Label 8 more to learn")
    assert "<b>blue</b>" in page.inner_text("#label-classes")  # markup in names is text

    last = page.evaluate("label.state.undoable.label")
    page.keyboard.press("u")
    expect(page.locator("#label-status")).to_have_text("11 labels, all saved.")
    page.keyboard.press("u")
    expect(page.locator("#label-status")).to_have_text("10 labels, all saved.")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    expect(page.locator(".label-image[aria-selected=true]")).to_have_count(2)
    chosen = page.locator(".label-image[aria-selected=true] > b").all_inner_texts()
    page.keyboard.press("2")  # two images in one action
    expect(page.locator("#label-status")).to_have_text("12 labels, all saved.")
    assert page.inner_text("#label-undo") == f"Undo {known[1]} (2 images)"
    given = page.evaluate("label.state.given.length")

    process.send_signal(signal.SIGKILL)
    process.wait()
    page.keyboard.press("1")
    expect(page.locator("#label-status")).to_contain_text("Not saved: the server does not answer")
    assert page.evaluate("label.given.size") == given == 12
    records = [json.loads(line) for line in (run / "labels/labels.jsonl").read_text().splitlines()]
    assert len(records) == 15 and records[11]["label"] == last
    assert [title for _, title in records[-1]["images"]] == chosen

    _, address = serve()
    page = visit(address)
    expect(page.locator(".label-class")).to_have_count(3)
    assert page.evaluate("label.given.size") == 12
    with page.expect_download() as download:
        page.get_by_role("link", name="Export labels as CSV").click()
    table = tmp_path / "labels.csv"
    download.value.save_as(table)
    with table.open(newline="") as file:
        rows = dict(csv.reader(file))
    assert rows.pop("file") == "label" and len(rows) == 12
    assert all(rows[title] == known[1] for title in chosen)
    expect(page.locator("#label-accuracy")).to_contain_text("over 12 labels")

    command = page.inner_text("#label-command").split()
    assert command[:2] == ["meanshift", "predict"]
    inbox = write_colors(tmp_path / "inbox", 6, seed=5)
    done = subprocess.run(
        [sys.executable, "-m", *command[:3], inbox], capture_output=True, text=True, check=True
    )
    predicted = list(csv.DictReader(done.stdout.splitlines()))
    assert len(predicted) == 6 and {row["label"] for row in predicted} <= set(known)


def test_two_tabs_selections_predictions_and_the_map(visit, run):
    with serving_explorer(Explorer(Run(run))) as port:
        address = f"http://127.0.0.1:{port}/"
        first = visit(address)
        second = visit(address, PHONE, "dark")
        title = current_title(first)
        assert current_title(second) == title
        second.evaluate("pollLabels = () => {}")  # it has not seen what the first one does
        known = []
        label_current(first, known)
        second.fill("#label-name", "other")
        second.get_by_role("button", name="Label", exact=True).click()
        expect(second.locator("#label-status")).to_contain_text(
            f"{title} was labeled {known[0]} on another page meanwhile, so nothing was saved"
        )
        expect(second.locator(".label-image").first).to_contain_text(known[0])  # now it is seen
        second.locator(".label-image").first.click()
        second.fill("#label-name", "other")
        second.get_by_role("button", name="Label", exact=True).click()
        expect(first.locator(".label-image").first).to_contain_text("other")  # by asking again
        expect(first.locator("#label-status")).to_have_text("Changed on another page.")

        # Neighbors of an image, and all of them at once.
        first.locator(".label-image").nth(3).click()
        name = color_of(current_title(first))
        first.keyboard.press("n")
        expect(first.locator("#label-explanation")).to_have_text("Nearest first.")
        expect(first.locator(".label-image")).to_have_count(24)
        first.keyboard.press("a")
        first.keyboard.press("Enter")
        first.keyboard.type(name)
        first.keyboard.press("Enter")
        expect(first.locator("#label-status")).to_have_text(re.compile(r"2[45] labels, all saved."))
        expect(first.locator(".label-class").last).to_contain_text("Show")

        # Images that are not on the map.
        first.select_option("#label-in", "train")
        wait_until(first, "Object.values(label.probe.predicted).reduce((a, b) => a + b, 0) === 60")
        first.select_option("#label-list", f"predicted {name}")
        expect(first.locator("#label-explanation")).to_contain_text("least confident first")
        assert first.locator(".label-image").count() > 1
        first.keyboard.press("u")
        expect(first.locator("#label-status")).to_contain_text("1 label, all saved.")

        # From the map: what is selected there is labeled in one action, and colors follow.
        first.get_by_role("tab", name="Map").click()
        expect(first.locator("#map-status")).not_to_have_text("")
        first.focus("#canvas")
        first.keyboard.press("n")
        first.wait_for_selector(".strip")
        first.keyboard.press("s")  # an image and its ten neighbors
        first.get_by_role("button", name="Label these").click()
        expect(first.locator(".label-image[aria-selected=true]")).to_have_count(11)
        first.fill("#label-name", "red")
        first.keyboard.press("Enter")
        expect(first.locator("#label-status")).to_have_text(re.compile("1[12] labels, all saved."))
        first.select_option("#label-list", "proposed")
        expect(first.locator("#label-explanation")).to_contain_text("Typical images")
        first.fill("#label-name", "another")
        first.keyboard.press("Enter")
        expect(first.locator("#label-status")).to_have_text(re.compile("1[23] labels, all saved."))
        first.get_by_role("tab", name="Map").click()
        first.select_option("#color", "predicted")
        expect(first.locator("#legend")).to_contain_text("red")
        first.select_option("#color", "given")
        expect(first.locator("#legend")).to_contain_text("without a value")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_wide_and_narrow(visit, tmp_path, scheme):
    """With labels of the source, which are shown and prefill nothing."""
    folder = write_live_run(tmp_path / "run", write_arrays(tmp_path / "images.npz"))
    with serving_explorer(Explorer(Run(folder))) as port:
        page = visit(f"http://127.0.0.1:{port}/", scheme=scheme)
        assert "label of the source: " in page.inner_text("#label-current")
        assert page.evaluate("label.given.size") == 0
        assert_accessible(page)
        for name in ("one", "two"):
            page.keyboard.press("Enter")
            page.keyboard.type(name)
            page.keyboard.press("Enter")
        expect(page.locator(".label-image").last).to_contain_text("%")
        for view in (DESKTOP, PHONE):
            page.set_viewport_size(view)
            assert_accessible(page)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= view["width"]
