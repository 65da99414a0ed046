"""Views of one's own: the class in docs/views.md, and what is refused."""

import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from meanshift.config import Config, Views
from meanshift.config.methods import _load_class
from meanshift.data.arrays import ArraySource
from meanshift.data.folder import FolderSource
from meanshift.models.fit_whitening import fit_view_whitening
from meanshift.transforms.augment import Address
from meanshift.transforms.replay import replay_views
from meanshift.transforms.views import view_transform

PAGE = (Path(__file__).parents[2] / "docs" / "views.md").read_text()
SPECS = (
    Views().spec("target", "weak", index=0),
    Views().spec("online", "strong", index=1),
)
IDS = torch.arange(6)


@pytest.fixture
def mine(tmp_path):
    """The example of the page as `FILE.py:CLASS`."""
    (code,) = re.findall(r"^```python\n# mine.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    return f"{tmp_path / 'mine.py'}:MyViews"


@pytest.fixture
def folder(tmp_path, make_images):
    return FolderSource(make_images(tmp_path / "images", {"": 6}))


def views_of(source, module, ids=IDS):
    transform = view_transform(SPECS, source, seed=3, size=16, module=module)
    return replay_views(source, ids, transform, epoch=2).views


def test_the_example_rotates_and_lights_the_usual_views(folder, mine):
    for spec, plain, own in zip(SPECS, views_of(folder, ""), views_of(folder, mine), strict=True):
        address = Address(3, 2, IDS, spec.stream)
        quarters = (4 * address.many(1, use=100)[:, 0]).long().tolist()
        gain = (0.8 + 0.4 * address.many(1, use=101)).float()[:, :, None, None]
        assert len(set(quarters)) > 1
        if not spec.is_strong:  # color is applied after the rotation, noise to nothing
            expected = torch.stack(
                [view.rot90(n, (1, 2)) for view, n in zip(plain, quarters, strict=True)]
            )
            torch.testing.assert_close(own, expected * gain)
        assert not torch.allclose(own, plain)


def test_a_view_depends_on_its_address_alone(folder, mine):
    whole = views_of(folder, mine)
    alone = views_of(folder, mine, IDS[4:5])
    for together, single in zip(whole, alone, strict=True):
        torch.testing.assert_close(together[4:5], single, rtol=0, atol=1e-5)


def test_crop_is_called_for_arrays_too(mine):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 20, 3), dtype=np.uint8)
    source = ArraySource(pixels, None, name="made")
    quarters = 4 * Address(3, 2, IDS, SPECS[0].stream).many(1, use=100)[:, 0]
    assert len(quarters.long().unique()) > 1
    file = Path(mine.rpartition(":")[0])
    file.write_text(file.read_text().replace("0.8 + 0.4 * random", "0 * random + 1"))
    plain, own = (views_of(source, module)[0] for module in ("", mine))
    for view, turned, n in zip(plain, own, quarters.long().tolist(), strict=True):
        # The kernel for bytes rounds to whole values, the one for arrays does not.
        torch.testing.assert_close(turned, view.rot90(n, (1, 2)), rtol=0, atol=0.05)


def test_a_worker_that_has_not_loaded_the_file_unpickles_the_transform(folder, mine):
    transform = view_transform(SPECS, folder, seed=3, size=16, module=mine)
    content = pickle.dumps(transform.crop)
    del sys.modules[type(transform).__module__]
    _load_class.cache_clear()
    crop = pickle.loads(content)
    images = [folder.sample(index) for index in range(6)]
    assert type(crop.__self__) is not type(transform)
    for ours, theirs in zip(crop(images, 1, IDS), transform.crop(images, 1, IDS), strict=True):
        assert torch.equal(ours, theirs)


def test_the_path_of_the_module_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config().with_overrides({"views.module": "mine.py:MyViews"})
    assert config.views.module == f"{tmp_path / 'mine.py'}:MyViews"
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("class MyViews: pass", "MyViews", "need a subclass of .*augment.MultiViewTransform"),
        (
            "from meanshift.transforms.vectors import VectorTransform",
            "VectorTransform",
            "does not fit these samples",
        ),
        ("import nothing_of_that_name", "MyViews", "views.module: .* cannot be imported"),
        ("x = 1", "MyViews", "views.module: .* has no class MyViews"),
    ],
)
def test_what_is_no_transform_of_these_samples_is_refused(folder, tmp_path, code, name, message):
    (tmp_path / "other.py").write_text(code)
    with pytest.raises(ValueError, match=message):
        views_of(folder, f"{tmp_path / 'other.py'}:{name}")


def test_whitening_is_fitted_to_the_own_views_but_not_to_own_whole_images(folder, tmp_path):
    """An operator that blackens its views must not blacken the images that are evaluated."""
    from torch import nn

    from meanshift.models.view_whitening import ViewWhitening

    (tmp_path / "black.py").write_text(
        "from meanshift.transforms.augment import MultiViewTransform\n"
        "class Black(MultiViewTransform):\n"
        "    def finish(self, images, epoch, ids):\n"
        "        return tuple(0 * v for v in super().finish(images, epoch, ids))\n"
    )
    seen = []

    class Network(nn.Flatten):
        def forward(self, images):
            seen.append(float(images.abs().max()))
            return super().forward(images)[:, :4]

    fit_view_whitening(
        ViewWhitening(Network(), 4),
        folder,
        Views(module=f"{tmp_path / 'black.py'}:Black"),
        image_size=8,
        seed=0,
        device=torch.device("cpu"),
    )
    assert [value > 0 for value in seen] == [True, False, False]
