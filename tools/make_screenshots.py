"""The images of README and docs: figures, the report and the explorer, of a run, by a browser.

Typed as `make images`, which trains the demo first where it is missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

WIDEST = 1200  # pixels of an image in the docs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("make images: no chromium here; install it with: apt-get install chromium")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        meanshift("figures", given.run, "--only", "neighbors", "tsne", "--out", made)
        meanshift("report", given.run, "--out", made / "report.html")
        with sync_playwright() as playwright:
            opened = playwright.chromium.launch(
                executable_path=browser, args=["--no-sandbox", "--disable-gpu"]
            )
            photograph_report(opened, made)
            photograph_explorer(opened, given.run, made)
            opened.close()
        for image in sorted(made.glob("*.png")):
            print(keep(image, given.out / f"{image.stem}.jpg"))


def meanshift(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "meanshift", *map(str, words)], check=True)


def photograph_report(browser: Browser, made: Path) -> None:
    url = (made / "report.html").as_uri()
    page = tab(browser, url, width=1180, height=900)
    page.locator("#map").scroll_into_view_if_needed()
    click_a_point(page)
    page.locator("#map").screenshot(path=made / "report.png")
    page = tab(browser, url, width=390, height=1100, dark=True)
    page.screenshot(path=made / "report-phone.png")


def photograph_explorer(browser: Browser, run: Path, made: Path) -> None:
    command = [sys.executable, "-m", "meanshift", "explore", str(run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            address = re.search(r"http://\S+", serving.stdout.readline())
            assert address is not None
            page = tab(browser, address[0], width=1180, height=860)
            expect(page.locator("#drawn")).to_have_text("t-SNE", timeout=300_000)
            click_a_point(page)
            page.wait_for_timeout(1500)
            page.screenshot(path=made / "explore.png")
        finally:
            serving.terminate()


def tab(browser: Browser, url: str, *, width: int, height: int, dark: bool = False) -> Page:
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    page.goto(url)
    page.wait_for_timeout(800)
    return page


def click_a_point(page: Page) -> None:
    page.locator("canvas").first.focus()
    for _ in range(5):
        page.keyboard.press("n")  # the next image
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(300)


def keep(image: Path, target: Path) -> str:
    """Small enough for a page, and all colors of the photographs."""
    with Image.open(image) as opened:
        whole = opened.convert("RGB")
    if whole.width > WIDEST:
        whole = whole.resize((WIDEST, round(whole.height * WIDEST / whole.width)))
    whole.save(target, quality=85, subsampling=0, optimize=True)
    return f"{target}: {target.stat().st_size / 1000:.0f} kB"


if __name__ == "__main__":
    main()
