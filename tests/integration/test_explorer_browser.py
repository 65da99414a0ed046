"""The live page in a real browser, used as a person uses it."""

import csv
import io
import re

import pytest
from playwright.sync_api import expect

from meanshift.runtime.run_directory import RunDirectory
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
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
def visit(chromium, run):
    """Open the page of a run; any message in its console or request elsewhere fails the test."""
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


def wait_until(page, condition):
    """Ask from outside: the page's policy allows no script that is given as text."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def wait_for_map(page):
    expect(page.locator("#map-status")).not_to_have_text("")


def wait_for_tsne(page):
    expect(page.locator("#map-status")).to_have_text("t-SNE", timeout=20_000)


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
    page.wait_for_selector(".strip")
    title = page.inner_text("#detail h2")
    assert title in (f"#{ORIGINAL}", f"#{COPY}")  # which lie at the same place
    assert page.locator(".strip").count() == 2 and page.locator(".neighbor").count() == 20
    near = sources(page, ".strip >> nth=1 >> img")
    assert near[0] == f"/thumbnail/train/{COPY if title == f'#{ORIGINAL}' else ORIGINAL}"
    assert page.locator(".strip.current").get_attribute("data-epoch") == "2"
    assert 0 < page.locator(".neighbor.kept").count() < 10
    assert page.locator(".neighbor.same").count() > 0
    page.click(".strip >> nth=1 >> .neighbor >> nth=1")
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
    page.wait_for_selector("#search-epoch option >> nth=1", state="attached")
    given = {"name": "mine.png", "mimeType": "image/png", "buffer": encode_png(read_pixels(run, 9))}
    page.set_input_files("#file", given)
    page.wait_for_selector("#found .card >> nth=23")
    assert sources(page, "#found img")[0] == "/thumbnail/train/9"
    assert page.inner_text("#found .card >> nth=0").split() == ["#9", "0", "0"]
    assert "mine.png" in page.inner_text("#query")
    before = sources(page, "#found img")
    page.select_option("#search-epoch", "0")
    expect(page.locator("#search-status")).to_contain_text("epoch 0")
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
    expect(page.locator("#search-epoch option")).to_have_count(2)
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"text"})
    expect(page.locator("#search-status .error")).to_contain_text("no image was recognized")
    (tmp_path / "b.png").write_bytes(bytes(20 * 2**20 + 1))
    page.set_input_files("#file", tmp_path / "b.png")
    expect(page.locator("#search-status .error")).to_contain_text("b.png is larger than 20 MB")


def test_a_selected_image_can_be_searched_with_and_shown_on_the_map(visit):
    page = visit()
    wait_for_map(page)
    page.focus("#canvas")
    page.keyboard.press("n")
    page.click("#detail >> text=Search with it")
    page.wait_for_selector("#found .card >> nth=23")
    assert sources(page, "#found img")[0] == "/thumbnail/train/0"
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
    assert header == ["file", "label", "kind", "score", "nearest", "source"] and len(rows) == 5
    assert rows[0][:3] == [f"#{COPY}", "1", "duplicate"]
    assert float(rows[0][3]) < 1e-5 and rows[0][4:] == [f"#{ORIGINAL}", "train"]
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
    expect(page.locator("#clean-status")).to_have_text("60 of 60 images")


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
    expect(page.locator("#clean-epoch option")).to_have_count(3)
    wait_until(page, "() => !state.stale")
    assert page.locator("#clean-epoch").input_value() == "2"
    page.click("#more")
    expect(page.locator("#clean-status")).to_have_text("100 of 100 images")
    shown = sources(page, "#cards img")
    assert shown[:60] == before and len(set(shown)) == len(shown) == 100


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
    page.focus("#canvas")
    page.keyboard.press("n")
    page.wait_for_selector(".strip")
    for tab in ("map", "search", "clean", "curves"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], tab


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
