"""Pages, figures and thumbnails of runs whose samples are not 8-bit RGB images."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.config.recipes import recipe
from meanshift.training.loop import pretrain
from meanshift.transforms.replay import to_rgb
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.explorer.search import decode_upload
from meanshift.viz.report.page import write_report
from meanshift.viz.run_reader import Run
from tests.support.explorer import encode_png, wait_for

RANDOM = np.random.default_rng(0)


def train(source, out):
    settings = {
        "data.source": str(source), "data.image_size": 16, "data.workers": 0,
        "data.validation": "none", "encoder.name": "resnet10", "encoder.width": 0.125,
        "encoder.stem": "small-stride2", "encoder.init": "random", "encoder.weights": "",
        "method.bank_size": 16, "train.batch_size": 8, "train.epochs": 1, "train.snapshots": 1,
        "optim.warmup_epochs": 0, "train.device": "cpu",
    }  # fmt: skip
    return pretrain(recipe("small-resnet18").with_overrides(settings), out)


@pytest.fixture(scope="module")
def satellite(tmp_path_factory):
    """A run on 13 bands; each band of an image has one value, which grows with the band."""
    root = tmp_path_factory.mktemp("satellite")
    levels = np.arange(24)[:, None] + 500 * np.arange(13)
    pixels = np.broadcast_to(levels[:, None, None], (24, 16, 16, 13)).astype(np.uint16)
    np.savez(root / "bands.npz", images=pixels, labels=np.arange(24) % 3)
    return train(root / "bands.npz", root / "run")


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """A run on gray files of 12 bits."""
    root = tmp_path_factory.mktemp("scans")
    (root / "scans").mkdir()
    for index in range(24):
        pixels = RANDOM.integers(0, 4096, (20, 24)).astype(np.uint16)
        Image.fromarray(pixels).save(root / "scans" / f"{index:02}.png")
    return train(root / "scans", root / "run")


@pytest.fixture
def run(request):
    return request.getfixturevalue(request.param)


def test_chosen_bands_are_shown():
    image = torch.stack([torch.full((2, 2), band / 12) for band in range(13)])
    red, green, blue = to_rgb(image, (12, 5, 0))[:, 0, 0].tolist()
    assert (red, green, blue) == (255, round(5 / 12 * 255), 0)
    assert to_rgb(image)[:, 0, 0].tolist() == [0, 21, 42]
    assert to_rgb(image, (12,))[:, 0, 0].tolist() == [255] * 3
    assert to_rgb(image[1:2])[:, 0, 0].tolist() == [21] * 3
    assert to_rgb(image[:2])[:, 0, 0].tolist() == [0] * 3
    pixels = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)
    assert torch.equal(to_rgb(pixels), pixels)


@pytest.mark.parametrize("bands", [(13, 0, 1), (0, 1), (0, 1, 2, 3), (-1,)])
def test_bands_that_are_not_there_are_refused(satellite, bands):
    with pytest.raises(ValueError, match=r"--bands: got .*, need one or three of 0 to 12"):
        Run(satellite, bands=bands)
    with pytest.raises(ValueError, match="--bands: got"):
        to_rgb(torch.zeros(13, 2, 2), bands)


def test_a_thumbnail_shows_the_chosen_bands(satellite):
    run = Run(satellite, bands=(12, 6, 0))
    low, high = run.config.data.range
    stored = np.array([500 * 12 + 3, 500 * 6 + 3, 3])
    expected = (((stored - low) / (high - low)).clip(0, 1) * 255).round()
    assert np.abs(run.thumbnail(3, 8)[0, 0].numpy() - expected).max() <= 1
    encoded, _ = Explorer(run).thumbnails.get("train", run.source, 3, 64)
    shown = np.array(Image.open(io.BytesIO(encoded)).convert("RGB"))
    assert np.abs(shown[5, 5] - expected).max() <= 3


@pytest.mark.parametrize("run", ["satellite", "scans"], indirect=True)
def test_a_page_is_written(run, tmp_path):
    page = write_report([Run(run)], tmp_path / "page.html").read_text()
    assert page.count("data:image/") > 3


def test_the_bands_of_a_page_can_be_chosen(satellite, tmp_path, call):
    pages = []
    for bands in ([], ["--bands", "12,6,0"]):
        out = tmp_path / f"{len(bands)}.html"
        code, _, error = call("report", satellite, "--out", out, *bands)
        assert code == 0, error
        pages.append(out.read_text())
    assert pages[0] != pages[1]
    code, _, error = call("report", satellite, "--bands", "13", "--out", tmp_path / "no.html")
    assert code == 2 and "need one or three of 0 to 12" in error
    code, _, error = call("explore", satellite, "--bands", "red")
    assert code == 2 and "got 'red', need numbers from 0, as 3,2,1" in error


@pytest.mark.parametrize("run", ["satellite", "scans"], indirect=True)
def test_views_are_drawn(run, tmp_path, call):
    code, printed, error = call("figures", run, "--only", "views", "--out", tmp_path)
    assert code == 0, error
    assert "views.png" in printed


def search(explorer, image):
    """The three images of a run that are nearest to an image."""
    epoch = explorer.run.snapshot_epochs[-1]
    return wait_for(lambda: explorer.search(image, name="train", epoch=epoch, count=3))


@pytest.mark.parametrize("run", ["satellite", "scans"], indirect=True)
def test_an_image_of_the_run_finds_itself(run):
    explorer = Explorer(Run(run))
    found = search(explorer, explorer.read_image("train", 5))
    assert found[0]["index"] == 5 and found[0]["distance"] < 1e-3


def test_uploads_of_other_depths_and_channels(satellite, scans):
    for pixels in (
        RANDOM.integers(0, 256, (20, 24, 3), dtype=np.uint8),
        RANDOM.integers(0, 256, (20, 24, 4), dtype=np.uint8),
        RANDOM.integers(0, 4096, (20, 24)).astype(np.uint16),
    ):
        assert len(search(Explorer(Run(scans)), decode_upload(encode_png(pixels)))) == 3
    upload = decode_upload(encode_png(np.zeros((9, 9, 3), np.uint8)))
    with pytest.raises(ValueError, match="takes images of 13 channels, and upload has images of 3"):
        search(Explorer(Run(satellite)), upload)
