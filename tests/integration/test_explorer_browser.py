"""The live page in a real browser, used as a person uses it."""

import csv
import io
import re
import statistics

import numpy as np
import pytest
from playwright.sync_api import expect

from benchmarks.hover import POINTS, hover_points, write_large_run
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import RunDirectory
from meanshift.viz.explorer import model
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.browser import assert_accessible, wait_until
from tests.support.explorer import (
    COPY,
    ORIGINAL,
    encode_png,
    log,
    read_pixels,
    serving_explorer,
    write_arrays,
    write_live_run,
    write_live_snapshot,
)
from tests.support.processes import make_photos, pretrain_command, start_processes, wait_for_lines

pytestmark = pytest.mark.slow

DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}


@pytest.fixture
def run(tmp_path, request):
    count = getattr(request, "param", 60)
    source = write_arrays(tmp_path / "images.npz", count=count)
    folder = write_live_run(tmp_path / "run", source, snapshot_images=count)
    for step in (5, 10, 20):
        log(folder, step, loss=1 / step, agreement=0.5, images_per_second=100.0)
    return folder


@pytest.fixture
def visit(chromium, request):
    """Open the page of a run, which is the fixture that the parameter names, or `run`.

    Any message in its console or request elsewhere fails the test.
    """
    run = request.getfixturevalue(getattr(request, "param", "run"))
    messages = []
    requests = []
    contexts = []
    with serving_explorer(Explorer(Run(run))) as port:

        def open_page(view=DESKTOP, scheme="light", hash=""):
            context = chromium.new_context(
                viewport=view, color_scheme=scheme, reduced_motion="reduce"
            )
            contexts.append(context)
            page = context.new_page()
            page.set_default_timeout(15_000)
            page.on("console", lambda message: messages.append(message.text))
            page.on("pageerror", lambda error: messages.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(f"http://127.0.0.1:{port}/{hash}")
            expect(page.locator("#progress")).not_to_have_text("")
            return page

        open_page.allowed = None
        open_page.run = run
        yield open_page
        for context in contexts:
            context.close()
        assert [text for text in messages if (open_page.allowed or "\0") not in text] == []
        own = re.compile(rf"http://127\.0\.0\.1:{port}/|data:|blob:")
        assert [url for url in requests if not own.match(url)] == []


def pixels_of_map(page):
    """The pixels of the map, once it does not move any more."""
    shot = "document.querySelector('#canvas').toDataURL()"
    before = page.evaluate(shot)
    for _ in range(50):
        page.wait_for_timeout(60)
        now = page.evaluate(shot)
        if now == before:
            return now
        before = now
    raise AssertionError("the map keeps moving")


def wait_for_map(page):
    expect(page.locator("#map-status")).not_to_have_text("")


def wait_for_tsne(page):
    expect(page.locator("#map-status")).to_have_text(re.compile("^t-SNE"), timeout=20_000)


def sources(page, selector):
    return page.eval_on_selector_all(selector, "all => all.map(one => new URL(one.src).pathname)")


def test_a_snapshot_that_is_taken_again_is_shown(visit, run):
    page = visit()
    wait_for_tsne(page)
    assert "60" in page.locator(".source-select option").first.inner_text()
    write_live_snapshot(run, 2, seed=9, count=30)
    expect(page.locator(".source-select option").first).to_have_text("the map's images (30)")
    wait_for_tsne(page)
    assert page.evaluate("state.map.rows.length") == 30


def test_the_slider_moves_the_map_and_a_point_shows_its_neighbors(visit):
    page = visit()
    assert page.inner_text("#name") == "run" and "epoch 2.0 of 4" in page.inner_text("#progress")
    wait_for_tsne(page)
    last = pixels_of_map(page)
    page.focus("#epoch")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#epoch-text") == "epoch 0 of 4"
    first = pixels_of_map(page)
    assert first != last
    page.keyboard.press("ArrowRight")
    assert pixels_of_map(page) == last

    box = page.locator("#canvas").bounding_box()
    x, y = page.evaluate("mapView.position(4)")
    page.mouse.move(box["x"] + x, box["y"] + y)
    page.wait_for_selector("#hover img")
    page.mouse.click(box["x"] + x, box["y"] + y)
    either = re.compile(f"^#({ORIGINAL}|{COPY})$")  # which lie at the same place
    expect(page.locator("#detail h2")).to_have_text(either)
    title = page.inner_text("#detail h2")
    assert page.locator(".strip").count() == 2 and page.locator(".neighbor").count() == 20
    assert page.locator(".strip >> nth=0").get_attribute("data-epoch") == "2"  # the newest first
    near = sources(page, ".strip >> nth=0 >> img")
    assert near[0] == f"/thumbnail/train/{COPY if title == f'#{ORIGINAL}' else ORIGINAL}"
    assert page.locator(".strip.current").get_attribute("data-epoch") == "2"
    assert 0 < page.locator(".neighbor.kept").count() < 10
    assert page.locator(".neighbor.same").count() > 0
    page.click(".strip >> nth=0 >> .neighbor >> nth=1")
    index = near[1].rpartition("/")[2]
    expect(page.locator("#detail h2")).to_have_text(f"#{index}")
    wait_until(page, "() => document.querySelector('.selected-image img').naturalWidth === 16")


def test_the_map_zooms_and_works_by_keyboard(visit):
    page = visit()
    wait_for_tsne(page)
    whole = pixels_of_map(page)
    page.focus("#canvas")
    for key in ("+", "+", "ArrowLeft"):
        page.keyboard.press(key)
    assert pixels_of_map(page) != whole
    page.click("#reset-map")
    page.mouse.move(5, 5)
    assert pixels_of_map(page) == whole
    page.focus("#canvas")
    page.keyboard.press("n")
    page.wait_for_selector("#detail h2")
    page.focus("#tab-map")
    page.keyboard.press("ArrowRight")
    assert page.locator("#search").is_visible() and page.locator("#map").is_hidden()


def test_rows_are_selected_by_lasso_and_by_keyboard(visit):
    page = visit()
    wait_for_tsne(page)
    page.evaluate("addEventListener('rows-selected', e => window.told = e.detail.rows, true)")
    none = pixels_of_map(page)
    box = page.locator("#canvas").bounding_box()

    def drag_around_left_half():
        left, top, bottom = box["x"] + 2, box["y"] + 2, box["y"] + box["height"] - 3
        middle = box["x"] + box["width"] / 2
        page.mouse.move(left, top)
        page.mouse.down()
        for corner in ((middle, top), (middle, bottom), (left, bottom)):
            page.mouse.move(*corner)
        page.mouse.up()

    def selected():
        rows = page.evaluate("[...state.selectedRows]")
        assert page.evaluate("window.told") == rows
        return sorted(rows)

    at_left = """
        state.map.rows.filter((row, i) => mapView.position(i)[0] < canvas.clientWidth / 2)
    """
    wanted = sorted(page.evaluate(at_left.replace("canvas.", "document.querySelector('#canvas').")))
    assert 0 < len(wanted) < 60
    page.keyboard.down("Shift")
    drag_around_left_half()
    page.keyboard.up("Shift")
    assert selected() == wanted
    expect(page.locator("#rows-selected")).to_have_text(f"{len(wanted)} images selected")
    page.mouse.move(5, 5)
    assert pixels_of_map(page) != none

    page.click("#clear-rows")
    assert selected() == []
    page.mouse.move(5, 5)
    page.click(".legend button >> nth=1")  # now only the images of one class are selected
    page.click("#lasso")
    drag_around_left_half()
    assert selected() == [row for row in wanted if row % 3 == 1]
    page.click("#lasso")
    page.click(".legend button >> nth=1")

    page.evaluate("selectRow(7)")
    expect(page.locator("#detail h2")).to_have_text("#7")
    page.focus("#canvas")
    page.keyboard.press("c")
    assert selected() == list(range(1, 60, 3))
    page.keyboard.press("s")
    assert len(selected()) == 11 and 7 in selected()
    page.keyboard.press("Escape")
    assert selected() == []
    page.click("text=Select all of 1")
    assert selected() == list(range(1, 60, 3))


def test_colors_by_label_purity_and_cluster(visit):
    page = visit()
    wait_for_tsne(page)
    seen = {pixels_of_map(page)}
    assert page.locator(".legend li").count() == 3
    page.click(".legend button >> nth=0")
    seen.add(pixels_of_map(page))
    page.select_option("#color", "purity")
    page.wait_for_selector(".scale")
    seen.add(pixels_of_map(page))
    page.select_option("#color", "cluster")
    page.wait_for_selector("text=cluster 3")
    seen.add(pixels_of_map(page))
    assert len(seen) == 4


def test_the_coloring_that_was_chosen_last_is_shown(visit):
    page = visit()
    wait_for_map(page)
    delayed = []
    page.route("**/api/colors?by=purity*", lambda route: delayed.append(route))
    page.select_option("#color", "purity")
    page.select_option("#color", "cluster")
    page.wait_for_selector("text=cluster 3")
    with page.expect_response("**/api/colors?by=purity*") as late:
        delayed[0].continue_()
    late.value.finished()
    page.wait_for_timeout(100)
    assert page.locator(".scale").count() == 0
    assert "cluster 3" in page.inner_text("#legend")


def test_an_uploaded_image_finds_itself_first(visit, run):
    page = visit(hash="#search")
    page.wait_for_selector("#search-epoch option >> nth=2", state="attached")
    given = {"name": "mine.png", "mimeType": "image/png", "buffer": encode_png(read_pixels(run, 9))}
    page.set_input_files("#file", given)
    page.wait_for_selector("#found .card >> nth=23")
    assert sources(page, "#found img")[0] == "/thumbnail/train/9"
    assert page.inner_text("#found .card >> nth=0").split() == ["#9", "0", "0"]
    assert "mine.png" in page.inner_text("#query")
    before = sources(page, "#found img")
    expect(page.locator("#search-status")).to_contain_text("features after epoch 2 (newest)")
    page.evaluate("changeEpoch(0)")  # of the map, which the search does not follow
    assert page.locator("#search-epoch").input_value() == ""
    page.select_option("#search-epoch", "0")
    expect(page.locator("#search-status")).to_have_text(
        "24 images, nearest first; features after epoch 0"
    )
    assert (
        sources(page, "#found img")[0] == "/thumbnail/train/9"
        and sources(page, "#found img") != before
    )
    page.select_option("#search-in", "validation")
    page.wait_for_selector("#found .card >> nth=19")
    assert all(path.startswith("/thumbnail/validation/") for path in sources(page, "#found img"))


def test_a_file_that_is_no_image_is_refused_with_a_message(visit, tmp_path):
    visit.allowed = "status of 400"  # a message of the browser itself
    page = visit(hash="#search")
    expect(page.locator("#search-epoch option")).to_have_count(3)
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"text"})
    expect(page.locator("#search-status .error")).to_contain_text("no image was recognized")
    (tmp_path / "b.png").write_bytes(bytes(20 * 2**20 + 1))
    page.set_input_files("#file", tmp_path / "b.png")
    expect(page.locator("#search-status .error")).to_contain_text("b.png is larger than 20 MB")


def test_a_selected_image_can_be_searched_with_and_shown_on_the_map(visit):
    page = visit()
    wait_for_map(page)
    page.click("#detail >> text=Search with it")
    page.wait_for_selector("#found .card >> nth=23")
    typical = page.evaluate("state.images.typical")
    assert sources(page, "#found img")[0] == f"/thumbnail/train/{typical}"
    page.click("#found .card >> nth=3")
    title = page.inner_text("#enlarged figcaption").split(",")[0]
    page.click("#enlarged >> text=Show on the map")
    expect(page.locator("#detail h2")).to_have_text(title)
    assert page.locator("#map").is_visible()


def exported(page):
    with page.expect_download() as waiting:
        page.click("#export")
    text = waiting.value.path().read_text()
    return list(csv.reader(io.StringIO(text)))


def test_duplicates_are_selected_and_exported(visit):
    page = visit()
    page.click("#tab-clean")
    page.click("#duplicates")
    page.wait_for_selector(".cards.pairs .card")
    assert "exact copy" in page.inner_text(".card >> nth=0")
    page.focus("#threshold")
    page.keyboard.press("Home")
    expect(page.locator(".card")).to_have_count(1)
    assert page.inner_text("#threshold-text").startswith("1 pair below ")
    assert page.locator("#histogram .below").count() == 1
    page.keyboard.press("End")
    total = page.evaluate("state.pairs.below.at(-1)")
    expect(page.locator(".card")).to_have_count(total)
    expect(page.locator("#clean-status")).to_have_text(
        f"{total} of {total} pairs; features after epoch 2 (newest)"
    )
    assert page.locator("#histogram :not(.below)").count() == 0
    assert "exact copy" not in page.inner_text(".card >> nth=1")
    assert page.locator("#export").is_disabled()
    assert sources(page, ".card >> nth=0 >> img") == [
        f"/thumbnail/train/{COPY}",
        f"/thumbnail/train/{ORIGINAL}",
    ]
    page.click(".card >> nth=0")
    page.click(".card >> nth=2", modifiers=["Shift"])
    assert page.inner_text("#export") == "Export selection (3) as CSV"
    page.keyboard.press("Shift+ArrowRight")  # from the checkbox that was clicked
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    header, *rows = exported(page)
    columns = ["file", "label", "kind", "score", "nearest", "source", "suggested"]
    assert header == columns and len(rows) == 5
    assert rows[0][:3] == [f"#{COPY}", "1", "duplicate"]
    assert float(rows[0][3]) < 1e-5 and rows[0][4:] == [f"#{ORIGINAL}", "train", ""]
    page.click("#outliers")
    page.wait_for_selector(".cards:not(.pairs) .card >> nth=59")
    page.click(".card >> nth=0")
    assert [row[2] for row in exported(page)[1:]] == ["duplicate"] * 5 + ["outlier"]
    page.click("#clear-selection")
    assert page.locator("#export").is_disabled() and page.locator("input:checked").count() == 0
    page.click(".enlarge >> nth=0")
    assert page.locator("#enlarged img").count() == 2
    page.keyboard.press("Escape")
    assert page.locator("#enlarged").is_hidden()
    page.select_option("#clean-in", "train")
    expect(page.locator("#clean-status")).to_have_text(
        "60 of 60 images; features after epoch 2 (newest)"
    )


def test_cells_are_quoted_and_formulas_are_disarmed(visit):
    page = visit()
    given = [
        '=HYPERLINK("x")',
        "+1",
        "-1",
        "@a",
        "\tb",
        'say "hi", you',
        "a\nb",
        "plain.jpg",
        None,
        3,
    ]
    wanted = [
        "\"'=HYPERLINK(\"\"x\"\")\"", '"\'+1"', '"\'-1"', '"\'@a"', '"\'\tb"', '"say ""hi"", you"',
        '"a\nb"', '"plain.jpg"', '""', '"3"',
    ]  # fmt: skip
    assert page.evaluate("values => values.map(csvCell)", given) == wanted


def test_a_new_snapshot_and_a_collapse_appear_while_the_page_is_open(visit, run):
    page = visit()
    wait_for_tsne(page)
    assert page.locator(".alarm").count() == 0
    log(run, 40, loss=0.01)
    RunDirectory(run).warn(40, "collapse", "collapse: the embeddings have lost their variety")
    write_live_snapshot(run, 4)
    expect(page.locator("#epoch-text")).to_have_text("epoch 4 of 4")
    assert "lost their variety" in page.inner_text(".alarm")
    assert page.inner_text("#progress") == "finished, 4 epochs"
    wait_until(page, "() => state.map.points[4] !== undefined")
    page.click("#tab-curves")
    assert page.locator(".curve").count() == 3 and page.locator(".curve .mark").count() == 3
    assert "lost their variety" in page.inner_text("#warnings")


@pytest.mark.parametrize("run", [100], indirect=True)
def test_a_new_snapshot_does_not_change_the_list_that_is_being_cleaned(visit, run):
    page = visit()
    page.click("#tab-clean")
    page.wait_for_selector(".card >> nth=59")
    before = sources(page, "#cards img")
    write_live_snapshot(run, 4)
    expect(page.locator("#clean-epoch option")).to_have_count(4)
    wait_until(page, "() => !state.stale")
    page.click("#more")
    expect(page.locator("#clean-status")).to_contain_text("100 of 100 images; features after")
    expect(page.locator("#clean-status")).to_contain_text("after epoch 2 Use epoch 4")
    shown = sources(page, "#cards img")
    assert shown[:60] == before and len(set(shown)) == len(shown) == 100
    page.click("text=Use epoch 4")
    expect(page.locator("#clean-status")).to_have_text(
        "60 of 100 images; features after epoch 4 (newest)"
    )
    assert sources(page, "#cards img") != before


def test_a_run_without_snapshots_waits_for_the_first(visit, run):
    for snapshot in (run / "snapshots").iterdir():
        snapshot.unlink()
    page = visit()
    assert "Waiting for the first snapshot" in page.inner_text("#waiting")
    page.click("#tab-clean")
    page.click("#tab-curves")
    assert page.locator(".curve").count() == 3
    write_live_snapshot(run, 0)
    page.click("#tab-map")
    page.wait_for_selector("#canvas")
    expect(page.locator("#map-status")).not_to_have_text("")
    assert page.locator("#waiting").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(visit, scheme):
    page = visit(PHONE, scheme)
    wait_for_map(page)
    page.wait_for_selector(".strip")
    for tab in ("map", "search", "curves", "clean"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], tab
        if scheme == "dark":
            assert_accessible(page)
    page.click("#duplicates")
    page.wait_for_selector(".cards.pairs .card")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert_accessible(page)


def test_every_control_has_a_name(visit):
    page = visit()
    wait_for_map(page)
    page.focus("#canvas")
    page.keyboard.press("n")
    page.wait_for_selector(".strip")
    nameless = """
        () => [...document.querySelectorAll("button, input, select, canvas, progress")]
          .filter(one => !one.getAttribute("aria-label") && !one.textContent.trim() && !one.title)
          .filter(one => !(one.labels && one.labels.length) && !one.querySelector("img[alt]"))
          .map(one => one.outerHTML)
    """
    assert page.evaluate(nameless) == []
    assert page.eval_on_selector_all("img:not([alt])", "all => all.length") == 0


def test_the_page_reports_that_the_server_is_gone(chromium, run):
    with serving_explorer(Explorer(Run(run))) as port:
        page = chromium.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#progress")).not_to_have_text("")
    page.wait_for_selector("#banner-offline")
    assert "does not answer" in page.inner_text("#banner-offline")
    page.close()


# The first view, labels, many images, training


def test_the_first_view_shows_a_typical_image_and_its_newest_neighbors(visit):
    page = visit()
    page.wait_for_selector(".strip")
    typical = page.evaluate("state.images.typical")
    expect(page.locator("#detail h2")).to_have_text(f"#{typical}")
    assert page.eval_on_selector_all(".strip", "all => all.map(one => one.dataset.epoch)") == [
        "2",
        "0",
    ]
    wait_for_tsne(page)
    canvas = page.locator("#canvas").bounding_box()
    detail = page.locator("#detail").bounding_box()
    assert canvas["width"] > 700 and detail["x"] > canvas["x"] + canvas["width"]
    assert_accessible(page)
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(100)
    canvas = page.locator("#canvas").bounding_box()
    detail = page.locator("#detail").bounding_box()
    assert canvas["width"] > 330 and detail["y"] > canvas["y"] + canvas["height"]


def test_labels_that_differ_from_their_neighbors_are_listed_and_exported(visit):
    page = visit(scheme="dark")
    page.click("#tab-clean")
    page.focus("#labels")
    page.keyboard.press("Enter")
    expect(page.locator("#clean-status")).to_contain_text("doubtful labels; features after epoch 2")
    count = page.locator(".card").count()
    assert count == page.evaluate("state.items.length") > 0
    first = page.evaluate("state.items[0]")
    assert first["label"] != first["suggested"]
    assert f"{first['label']} → {first['suggested']}" in page.inner_text(".card >> nth=0")
    assert_accessible(page)
    page.focus(".card >> nth=0 >> input")
    page.keyboard.press("Space")
    _, row = exported(page)
    assert row[1:3] == [first["label"], "label"] and row[6] == first["suggested"]


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "LANDMARKS", 400)  # t-SNE of 5,000 takes a minute
    return write_large_run(tmp_path / "large", POINTS)


@pytest.mark.parametrize("visit", ["large"], indirect=True)
def test_fifty_thousand_images_of_two_hundred_classes(visit):
    page = visit()
    expect(page.locator("#map-status")).to_have_text(
        "t-SNE of 400 images; the other 49,600 lie at their nearest among them", timeout=60_000
    )
    assert page.evaluate("state.map.rows.length") == 50_000
    assert page.locator(".legend li").count() == 21  # the last one for 180 classes
    page.click("text=Select all of 0")
    expect(page.locator("#rows-selected")).to_have_text("250 images selected")
    hovers = hover_points(page, range(0, 50_000, 2500))
    milliseconds = statistics.median(time for time, _ in hovers)
    assert milliseconds < 150  # 50 by `make bench`; here the cores may be busy
    assert all(re.fullmatch(r"#\d+, \d+", text) for _, text in hovers)

    before = pixels_of_map(page)
    sheets = []
    page.on("request", lambda request: sheets.append(request.url))
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for _ in range(9):
        page.mouse.wheel(0, -400)
    wait_until(page, "() => thumbnails.sheets.length > 0 && thumbnails.loading === 0")
    assert pixels_of_map(page) != before
    requested = [url for url in sheets if "/sheet?" in url]
    thumbnails = page.evaluate("thumbnails.places.size")
    assert thumbnails > 20 and len(requested) <= thumbnails / 64 + 4
    row, place = page.evaluate("[...thumbnails.places].map(([row, {x, y}]) => [row, [x, y]])[5]")
    color = page.evaluate(
        """([row, [x, y]]) => {
            const canvas = document.createElement("canvas");
            canvas.getContext("2d").drawImage(thumbnails.places.get(row).image, -x, -y);
            return [...canvas.getContext("2d").getImageData(32, 32, 1, 1).data].slice(0, 3);
        }""",
        [row, place],
    )
    expected = read_pixels(visit.run, row)[4, 4].astype(int)
    assert np.abs(expected - color).max() < 12


@pytest.fixture
def unlabeled(tmp_path, make_images):
    """Photographs without labels whose names are markup."""
    root = make_images(tmp_path / "photos", {"": 40}, size=(16, 16))
    for number, path in enumerate(sorted(root.iterdir())):
        path.rename(root / f'<img src=x onerror=alert({number})> & "q".jpg')
    return write_live_run(tmp_path / "run", root, validation="none")


@pytest.mark.parametrize("visit", ["unlabeled"], indirect=True)
def test_without_labels_and_with_markup_in_the_names(visit):
    page = visit()
    page.wait_for_selector(".strip")
    assert page.inner_text("#detail h2").startswith("<img src=x onerror=alert(")
    assert page.input_value("#color") == "cluster"
    assert page.locator(".neighbor.same").count() == 0
    page.focus("#canvas")
    page.keyboard.press("c")
    assert "selected" in page.inner_text("#rows-selected")
    page.click("#tab-clean")
    page.click("#labels")
    expect(page.locator("#clean-status")).to_contain_text("These images have no labels")
    page.click("#duplicates")
    page.wait_for_selector(".card")
    assert "<img src=x" in page.inner_text(".card >> nth=0")


def test_a_training_is_followed_and_stopped_by_a_button(visit, run):
    log(run, 21, loss=0.04, effective_rank=12.3)
    RunDirectory(run).append(
        "metrics.jsonl", {"kind": "monitor", "step": 20, "epoch": 2, "20-NN": 61.5}
    )
    page = visit()
    expect(page.locator("#live")).to_be_visible()
    assert page.inner_text("#live-metrics").split("\n") == [
        "Loss", "0.04", "20-NN, %", "61.5", "Effective rank", "12.3",
    ]  # fmt: skip
    assert page.locator("#live polyline").count() == 3
    log(run, 22, loss=0.03, effective_rank=13.0)
    expect(page.locator("#live-metrics")).to_contain_text("0.03")
    request = run / "stop-requested"
    page.focus("#stop-training")
    page.keyboard.press("Enter")
    expect(page.locator("#confirm-stop")).to_be_visible()
    assert_accessible(page)
    page.keyboard.press("Enter")  # the first choice is to go on
    expect(page.locator("#confirm-stop")).to_be_hidden()
    assert not request.exists()
    page.click("#stop-training")
    page.click("#confirm-stop >> text=Stop and save")
    expect(page.locator("#banner-stop")).to_have_text(
        "Stopping: the training finishes its step and saves."
    )
    assert request.exists() and page.locator("#stop-training").is_disabled()
    checkpoint.write(run / "checkpoints" / "step-00000023.pt", {"format": checkpoint.FORMAT})
    request.unlink()
    expect(page.locator("#banner-stop")).to_have_text(
        "Stopped and saved at step 23; the same command continues."
    )
    expect(page.locator("#live")).to_be_hidden()
    assert "stopped at epoch 2.2 of 4" in page.inner_text("#progress")


def test_the_button_stops_a_real_training(chromium, tmp_path):
    out = tmp_path / "run"
    command = pretrain_command(make_photos(tmp_path / "photos"), out, train__epochs=2000)
    page = chromium.new_page()
    with start_processes(1, command, tmp_path, fresh=True) as group:
        wait_for_lines(out, 12, group)
        with serving_explorer(Explorer(Run(out))) as port:
            page.goto(f"http://127.0.0.1:{port}/")
            expect(page.locator("#live-metrics")).to_contain_text("Effective rank")
            page.click("#stop-training")
            page.click("#confirm-stop >> text=Stop and save")
            assert group.wait() == [130], group.output
            expect(page.locator("#banner-stop")).to_contain_text("Stopped and saved at step")
            shown = page.inner_text("#banner-stop")
    page.close()
    state, _ = checkpoint.latest(out / "checkpoints")
    assert shown == f"Stopped and saved at step {state['step']:,}; the same command continues."
    assert f"stopped and saved at step {state['step']}; the same command" in group.output
    assert not (out / "stop-requested").exists()
