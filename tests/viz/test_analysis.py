"""What is computed from a run: purity, stored clusters, views, thin curves."""

import numpy as np
import pytest
import torch

from meanshift.data import open_source
from meanshift.viz import analysis
from meanshift.viz.run_reader import MissingData, Run
from tests.support.runs import BASE, SIDE, random_features
from tests.support.three_views import MODULE
from tests.support.views import two_views


def test_unknown_labels_count_as_no_class(make, tmp_path):
    pixels = np.zeros((6, SIDE, SIDE, 3), np.uint8)
    np.savez(tmp_path / "some.npz", x_train=pixels, y_train=np.array([0, 0, 0, -1, -1, -1]))
    snapshots = {1: random_features(0, count=6)}
    run = Run(make(snapshots=snapshots, data__source=tmp_path / "some.npz"))
    assert analysis.label_purity(run, 1, 5).tolist() == pytest.approx([0.4] * 3 + [0] * 3)


def test_without_labels_there_is_no_purity(make, tmp_path):
    run = Run(make(snapshots={1: random_features(0)}, data__source=tmp_path / "unlabeled.npz"))
    with pytest.raises(MissingData, match="no labels"):
        analysis.label_purity(run, 1)


def test_epochs_are_selected_from_the_first_to_the_last(make):
    run = Run(make(snapshots={epoch: random_features(epoch) for epoch in range(5)}))
    assert analysis.select_epochs(run) == [0, 1, 2, 3, 4]
    assert analysis.select_epochs(run, count=3) == [0, 2, 4]
    assert analysis.select_epochs(run, [3, 1], count=3) == [3, 1]
    with pytest.raises(MissingData, match=r"epoch 9; there are 0, 1, 2, 3, 4"):
        analysis.select_epochs(run, [9])


def test_replayed_views_are_those_of_the_transform(make, make_images, tmp_path):
    photos = make_images(tmp_path / "photos", {"": 5}, size=(40, 56))
    source = open_source(str(photos))["train"]
    run = Run(make(data__source=photos))
    ids = torch.tensor([3, 0, 4])
    transform = two_views(seed=BASE.train.seed, size=SIDE)
    images = [source.read(index) for index in ids.tolist()]
    expected = transform.finish(transform.crop(images, 2, ids), 2, ids)
    for keep_images in (False, True):
        replayed = analysis.replay(run, ids, epoch=2, keep_images=keep_images)
        assert len(replayed.images) == (3 if keep_images else 0)
        assert replayed.ids.tolist() == [3, 0, 4] and replayed.sizes.tolist() == [[40, 56]] * 3
        assert all(map(torch.equal, replayed.views, expected))


def test_views_with_a_count_are_numbered_and_have_their_own_streams(make):
    views = [v for view in Run(make(method__module=MODULE)).views for v in view.expand()]
    titles = [analysis.view_title(view) for view in views]
    assert titles == ["global (weak)", "local 1 (strong)", "local 2 (strong)"]
    assert len({view.stream for view in views}) == 3
    assert [view.size for view in views] == [0, 8, 8]


def test_a_long_curve_is_thinned_by_means_and_keeps_its_ends():
    x = [float(value) for value in range(10_000)]
    thin_x, thin_y = analysis.thin_curve(x, [2.0 * value for value in x], points=100)
    assert len(thin_x) == 100 and thin_x[0] == 0 and thin_x[-1] == 9999
    assert thin_y == pytest.approx([2 * value for value in thin_x], rel=1e-3)
    assert analysis.thin_curve([0.0, 1.0], [5.0, 6.0]) == ([0, 1], [5.0, 6.0])
