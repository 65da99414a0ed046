"""Images that are placed on a map by their nearest landmarks."""

import pytest
import torch
from torch.nn import functional as F

from meanshift.viz.explorer.landmarks import _NEAREST, _TEMPERATURE, place_others
from meanshift.viz.run_reader import Run
from meanshift.viz.tsne import EpochMap
from tests.support.explorer import COPY, ORIGINAL


@pytest.fixture(scope="module")
def maps():
    rows = torch.arange(0, 60, 2)  # with the original and its copy
    points = torch.rand(2, 30, 2, generator=torch.Generator().manual_seed(0))
    return [EpochMap(0, rows, points[0]), EpochMap(2, rows, points[1])]


def test_each_other_image_is_at_the_weighted_mean_of_its_nearest_landmarks(run, maps):
    asked = []
    placed = place_others(Run(run), maps, torch.arange(50), lambda: asked.append(1))
    assert len(asked) == 2
    for before, after in zip(maps, placed, strict=True):
        assert after.epoch == before.epoch
        assert after.rows.tolist() == sorted({*range(50), *range(0, 60, 2)})
        features = Run(run).snapshot(after.epoch).features
        known = dict(zip(before.rows.tolist(), before.points, strict=True))
        for row, point in zip(after.rows.tolist(), after.points, strict=True):
            if row in known:
                assert torch.equal(point, known[row])
                continue
            near = sorted(known, key=lambda one: -float(features[row] @ features[one]))[:_NEAREST]
            similarities = torch.tensor([float(features[row] @ features[one]) for one in near])
            weights = F.softmax(similarities / _TEMPERATURE, dim=0)
            expected = sum(w * known[one] for w, one in zip(weights, near, strict=True))
            torch.testing.assert_close(point, expected, atol=1e-3, rtol=0)


def test_a_copy_of_a_landmark_is_where_the_landmark_is(run):
    rows = torch.tensor([row for row in range(60) if row != COPY])
    points = torch.rand(59, 2, generator=torch.Generator().manual_seed(0))
    (placed,) = place_others(Run(run), [EpochMap(2, rows, points)], torch.arange(60), lambda: None)
    distance = (placed.points[COPY] - placed.points[ORIGINAL]).norm()
    others = (placed.points - placed.points[ORIGINAL]).norm(dim=1).median()
    assert distance < 0.3 * others


def test_maps_of_all_images_are_left_as_they_are(run, maps):
    assert place_others(Run(run), maps, torch.arange(0, 60, 2), lambda: None) == maps


def test_what_progress_raises_ends_it(run, maps):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place_others(Run(run), maps, torch.arange(60), stop)
