"""Take the screenshots of README and docs: figures, the report and the explorer of a run.

Called by `make screenshots`, which trains the demo first if it is missing.
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

MAX_WIDTH = 1200  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("make screenshots: no chromium; install it with: apt-get install chromium")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meanshift("figures", args.run, "--only", "neighbors", "tsne", "--out", folder)
        meanshift("report", args.run, "--out", folder / "report.html")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
            )
            capture_report(browser, folder)
            capture_explorer(browser, args.run, folder)
            browser.close()
        for image in sorted(folder.glob("*.png")):
            target = args.out / f"{image.stem}.jpg"
            compress(image, target)
            print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def meanshift(*arguments: object) -> None:
    """Run a command of the program."""
    subprocess.run([sys.executable, "-m", "meanshift", *map(str, arguments)], check=True)


def capture_report(browser: Browser, folder: Path) -> None:
    """The map of the report on a desktop, and the top of the report on a phone in dark colors."""
    url = (folder / "report.html").as_uri()
    page = open_page(browser, url, width=1180, height=900)
    page.locator("#map").scroll_into_view_if_needed()
    select_a_point(page)
    page.locator("#map").screenshot(path=folder / "report.png")
    page = open_page(browser, url, width=390, height=1100, dark=True)
    page.screenshot(path=folder / "report-phone.png")


def capture_explorer(browser: Browser, run: Path, folder: Path) -> None:
    """The map of the explorer with one image selected, and its page of labels."""
    command = [sys.executable, "-m", "meanshift", "explore", str(run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address is not None
            page = open_page(browser, address[0], width=1180, height=860)
            expect(page.locator("#map-status")).to_have_text("t-SNE", timeout=300_000)
            select_a_point(page)
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / "explorer.png")
            page.locator("#tab-label").click()
            expect(page.locator("#label-images .card").first).to_be_visible(timeout=300_000)
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / "labels.png")
        finally:
            server.terminate()


def open_page(browser: Browser, url: str, *, width: int, height: int, dark: bool = False) -> Page:
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    page.goto(url)
    page.wait_for_timeout(800)
    return page


def select_a_point(page: Page) -> None:
    page.locator("canvas").first.focus()
    for _ in range(5):
        page.keyboard.press("n")  # the next image
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(300)


def compress(image: Path, target: Path) -> None:
    """Save a screenshot as a JPEG that is small enough for a page, with all of its colors."""
    with Image.open(image) as opened:
        pixels = opened.convert("RGB")
    if pixels.width > MAX_WIDTH:
        pixels = pixels.resize((MAX_WIDTH, round(pixels.height * MAX_WIDTH / pixels.width)))
    pixels.save(target, quality=85, subsampling=0, optimize=True)


if __name__ == "__main__":
    main()
