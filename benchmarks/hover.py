"""Time from a move of the mouse to the frame that shows the point below it, in a real browser."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.table import Row, installed
from meanshift.config import Config
from meanshift.data import train_and_validation
from meanshift.runtime import checkpoint
from meanshift.runtime.run_directory import RunDirectory

if TYPE_CHECKING:
    from playwright.sync_api import Page

POINTS = 50_000
HOVERS = 40
MILLISECONDS = 50.0
"""until a hover is felt as a delay"""
_RECORD_HOVERS = """() => {
    window.hovers = [];
    const canvas = document.querySelector("#canvas");
    canvas.addEventListener("pointermove", event => {
        const shown = () => {  // after the frame that draws the hover
            const text = document.querySelector("#hover").textContent;
            hovers.push([performance.now() - event.timeStamp, text]);
        };
        requestAnimationFrame(() => requestAnimationFrame(shown));
    });
}"""


def rows(rounds: int) -> Iterator[Row]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or not installed("playwright"):
        what = "chromium" if chromium is None else "playwright"
        print(f"hover: not measured, since {what} is not installed", file=sys.stderr)
        return
    measured = _measure(chromium, HOVERS * rounds)
    yield Row(
        f"hover over one of {POINTS:,} points of the explorer / {MILLISECONDS:g} ms",
        tuple(each / MILLISECONDS for each in measured),
        1.0,
        at_most=True,
    )


def _measure(chromium: str, count: int) -> list[float]:
    """Milliseconds of each hover."""
    from playwright.sync_api import sync_playwright

    from meanshift.viz.explorer import model, server
    from meanshift.viz.run_reader import Run

    model.LANDMARKS = 400  # how points are placed does not matter here
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = write_large_run(Path(folder) / "run", POINTS)
        app, _ = server.build_app(model.Explorer(Run(run)))
        instance = server.make_server(app)
        sock = server.listen("127.0.0.1", 0)
        thread = threading.Thread(target=instance.run, kwargs={"sockets": [sock]})
        thread.start()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            page.goto(f"http://127.0.0.1:{sock.getsockname()[1]}/")
            page.wait_for_selector("#map-status:has-text('t-SNE of')", timeout=120_000)
            page.wait_for_timeout(1000)  # until the points have come to rest
            found = hover_points(page, range(0, POINTS, POINTS // count))
        finally:
            browser.close()
            instance.should_exit = True
            thread.join()
    return [milliseconds for milliseconds, _ in found]


def hover_points(page: Page, points: Iterable[int]) -> list[tuple[float, str]]:
    """Move the mouse to points of the map: milliseconds until each is shown, and its title."""
    page.evaluate(_RECORD_HOVERS)
    box = page.locator("#canvas").bounding_box()
    assert box is not None
    for count, point in enumerate(points, 1):
        x, y = page.evaluate("i => mapView.position(i)", point)
        page.mouse.move(box["x"] + x + 1, box["y"] + y + 1)
        while page.evaluate("hovers.length") < count:
            page.wait_for_timeout(5)
    return [(milliseconds, title) for milliseconds, title in page.evaluate("hovers")]


def write_large_run(folder: Path, count: int, *, classes: int = 200) -> Path:
    """A run with `count` snapshot images in `classes` groups, whose features are random numbers."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % classes
    tones = rng.integers(0, 256, (classes, 1, 1, 3))[labels]
    images = np.broadcast_to(tones, (count, 8, 8, 3)).astype(np.uint8)
    source = str(folder.with_suffix(".npz"))
    np.savez(source, x_train=images, y_train=labels, x_test=images[:200], y_test=labels[:200])
    config = Config().with_overrides({"data.source": source, "data.image_size": 8})
    train, _ = train_and_validation(source, "auto", seed=0)
    RunDirectory(folder).begin(config, extra={"source": train.fingerprint(), "steps": 1000})
    centers = rng.normal(size=(classes, 16))
    for epoch, noise in ((0, 0.6), (2, 0.3)):
        features = centers[labels] + noise * rng.normal(size=(count, 16))
        content = {
            "format": checkpoint.FORMAT,
            "epoch": epoch,
            "indices": torch.arange(count),
            "weights": {},
            "features": torch.from_numpy(features).half(),
        }
        checkpoint.write(folder / "snapshots" / f"epoch-{epoch:04d}.pt", content)
    return folder
