"""The documentation site: a strict build, nothing from elsewhere, and pages in a real browser."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from playwright.sync_api import expect

import meanshift
from tests.support.pages import ROOT

INPUTS = ["mkdocs.yml", "docs", "tools", "notebooks", "CONTRIBUTING.md", "CHANGELOG.md"]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}


def build(folder, out):
    """Build the site of a folder strictly."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


class Loaded(HTMLParser):
    """The addresses of what a browser loads for a page without a click."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "link" and values.get("rel") not in ("prev", "next", "canonical"):
            self.addresses.append(values.get("href"))
        if tag in LOADED:
            self.addresses.append(values.get(LOADED[tag]))


def test_nothing_is_loaded_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        parser = Loaded()
        parser.feed(page.read_text())
        local = [address for address in parser.addresses if address]
        assert local and not any(re.match(r"(https?:)?//", each) for each in local), page
        for address in local:
            if not address.startswith("data:") and page.name != "404.html":
                assert (page.parent / re.split(r"[?#]", address)[0]).exists(), (page, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style


def test_the_reference_has_every_public_name(site):
    text = (site / "api.html").read_text()
    headings = set(re.findall(r'<h3 id="([\w.]+)"', text))
    for name in set(meanshift.__all__) - {"__version__", "methods"}:
        assert f"{meanshift._MODULES[name]}.{name}" in headings, name
    assert "methods" in headings
    for argument in ("recipe", "y", "batch_size", "n_neighbors", "chunk_bytes"):
        assert f"<code>{argument}</code>" in text, argument


def test_files_outside_docs_are_pages(site):
    msf = (site / "source/meanshift/methods/msf.py.html").read_text()
    assert "MomentumTarget" in msf
    assert 'href="source/meanshift/methods/msf.py.html"' in (site / "methods.html").read_text()
    assert 'href="notebooks/quickstart.html"' in (site / "getting-started.html").read_text()
    article = (site / "changelog.html").read_text().partition("<article")[2]
    assert 'href="labels.html"' in article
    assert 'href="architecture.html"' in (site / "contributing.html").read_text()
    for name in ("quickstart", "own_data"):
        page = (site / f"notebooks/{name}.html").read_text()
        images = re.findall(rf'src="({name}-[\w-]+\.\w+)"', page)
        assert len(images) >= 3 and all((site / "notebooks" / image).exists() for image in images)
        assert (site / f"notebooks/{name}.ipynb").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "text", "message"),
    [
        ("index.md", "[a](nowhere.md)", "nowhere.md"),
        ("index.md", "[a](data.md#nowhere)", "nowhere"),
        ("index.md", "[a](../meanshift/nowhere.py)", "nowhere.py"),
        ("orphan.md", "# An orphan", "orphan.md"),
        ("api.md", "::: meanshift.api.nothing", "meanshift.api.nothing"),
    ],
)
def test_the_build_refuses(page, text, message, tmp_path):
    for name in INPUTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for name in ("meanshift", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / page).open("a") as file:
        file.write(f"\n{text}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and message in done.stderr


@pytest.fixture
def visit(chromium, site):
    """Open a page as a file; a message in its console or a request elsewhere fails the test."""
    found = []
    contexts = []

    def open_page(name, width=1280, scheme="light"):
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: found.append(message.text))
        page.on("pageerror", lambda error: found.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or found.append(r.url))
        page.goto((site / name).as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", "guides/medical-images", "api", "data", "methods"])
def test_a_page_fits_a_phone_and_a_desktop(visit, name):
    for width in (390, 1280):
        page = visit(f"{name}.html", width)
        expect(page.locator("h1")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_colors_follow_the_system(visit):
    brightness = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit("index.html", scheme=s).evaluate(brightness) for s in ("light", "dark"))
    assert sum(map(int, re.findall(r"\d+", light)[:3])) > 700
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 200


@pytest.mark.slow
def test_the_search_works_without_a_server(visit):
    page = visit("index.html")
    page.locator("input.md-search__input").click()
    page.keyboard.type("whitening")
    expect(page.locator(".md-search-result__item").first).to_be_visible()
    results = page.locator(".md-search-result__item").all_inner_texts()
    assert any("whitened targets" in text.lower() for text in results)
    page.locator(".md-search-result__link").first.click()
    expect(page.locator("h1")).not_to_have_text(re.compile("^meanshift"))
