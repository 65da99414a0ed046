"""The map of a run looks the same in the figure, in the report and in the explorer."""

import numpy as np
import pytest
import torch
from playwright.sync_api import expect

from meanshift.viz.explorer.model import Explorer
from meanshift.viz.figures import Options, tsne
from meanshift.viz.report.page import write_report
from meanshift.viz.run_reader import Run
from meanshift.viz.tsne import tsne_maps
from tests.support.explorer import serving_explorer
from tests.support.runs import random_features

pytestmark = pytest.mark.slow


def places_in_the_figure(run):
    """Where the figure shows each image, from -1 at the left and the top, in units of the map."""
    figure = tsne.draw([run], Options()).figure
    figure.draw_without_rendering()
    (axes,) = (axes for axes in figure.axes if axes.axison)
    (points,) = axes.collections
    (epoch_map,) = tsne_maps(run)
    order = {tuple(point): at for at, point in enumerate(epoch_map.points.tolist())}
    offsets = np.asarray(points.get_offsets(), np.float32)
    rows = epoch_map.rows[[order[tuple(offset)] for offset in offsets.tolist()]].tolist()
    pixels = axes.transData.transform(offsets) - axes.bbox.min
    from_left_and_top = np.array([0, 1]) + [1, -1] * pixels / axes.bbox.size
    reach = np.abs([axes.get_xlim()[0], axes.get_ylim()[0]])
    return dict(zip(rows, (2 * from_left_and_top - 1) * reach, strict=True))


def assert_found(page, places, shown_title):
    """Move the pointer to where the figure shows the outermost images: the page names them."""
    canvas = page.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    size = min(box["width"], box["height"])
    for axis in (0, 1):
        for end in (min, max):
            row = end(places, key=lambda row: places[row][axis])
            x, y = 0.95 * places[row] * size / 2
            canvas.hover(position={"x": x + box["width"] / 2, "y": y + box["height"] / 2})
            assert (shown_title(page) or "no point").split(",")[0] == f"#{row}"


def test_the_map_has_one_orientation(make, tmp_path, chromium):
    weights = 0.8 ** torch.arange(8)  # no direction looks like another
    features = random_features(5) * weights
    run = Run(make(snapshots={4: features}))
    places = places_in_the_figure(run)
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto(write_report([run], tmp_path / "report.html").as_uri())
    page.wait_for_timeout(200)
    assert_found(page, places, lambda page: page.locator("canvas").first.get_attribute("title"))
    with serving_explorer(Explorer(run)) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#map-status")).to_have_text("t-SNE")
        page.wait_for_timeout(800)  # points glide from the principal components
        assert_found(page, places, lambda page: page.locator("#hover").inner_text())
    page.close()
