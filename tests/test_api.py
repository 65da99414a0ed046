"""The Python API: fit, load, embed, neighbors and evaluate, on every kind of data."""

import doctest
import gc
import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import meanshift as ms
from meanshift import api
from meanshift.config import recipes
from meanshift.data import UnreadableSample
from meanshift.data.arrays import ArraySource
from meanshift.data.in_memory import SampleSource, as_source
from meanshift.evaluation import knn
from meanshift.evaluation.context import EvaluationContext
from meanshift.models.weights import load_weights
from meanshift.runtime.signals import Stopped

ROOT = Path(__file__).parents[1]
TINY = {
    "image_size": 16,
    "workers": 0,
    "width": 0.125,
    "bank_size": 16,
    "dim": 16,
    "epochs": 1,
    "batch_size": 4,
    "device": "cpu",
    "precision": "float32",
}


class Items(Dataset):
    """A Dataset of the items of a list."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Flipping(Items):
    """A Dataset with a random transform."""

    def __getitem__(self, index):
        return self.items[index] + np.uint8(torch.randint(256, ()))


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3, 16, 16)


def random_images(count=12, shape=(16, 16, 3), seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of six PNG files; the first image of `a` is solid black."""
    root = tmp_path_factory.mktemp("data") / "photos"
    for name, seed in (("a", 1), ("b", 2)):
        (root / name).mkdir(parents=True)
        for index, pixels in enumerate(random_images(6, (20, 24, 3), seed)):
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def files(photos):
    return sorted(photos.rglob("*.png"))


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "photos"
    ms.fit(photos, out=folder, **TINY)
    return folder


@pytest.fixture
def model(run):
    return ms.load(run, device="cpu")


def same_weights(one, other):
    ours, theirs = one.backbone.state_dict(), other.backbone.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def same_bits(one, other):
    return one.dtype == other.dtype == np.float32 and np.array_equal(one, other)


# fit


def test_files_in_a_list_train_as_their_folder(run, files):
    model = ms.fit([str(file) for file in files], **TINY)
    assert model.config.data.source == "in-memory"
    assert same_weights(model, ms.load(run))


def test_an_array_trains_as_its_file(tmp_path):
    pixels = random_images()
    np.save(tmp_path / "x.npy", pixels)
    expected = ms.fit(tmp_path / "x.npy", out=tmp_path / "run", **TINY)
    for same in (pixels, torch.from_numpy(pixels).permute(0, 3, 1, 2), list(pixels)):
        assert same_weights(ms.fit(same, **TINY), expected)
    assert not same_weights(ms.fit(255 - pixels, **TINY), expected)


def test_pil_images_and_datasets_train_as_their_files(run, files):
    images = [Image.open(file) for file in files]
    items = Items([(image, index % 2) for index, image in enumerate(images)])
    for same in (images, items):
        assert same_weights(ms.fit(same, **TINY), ms.load(run))


def test_labels_are_for_the_monitor_only(tmp_path):
    pixels = random_images(24)
    settings = TINY | {"validation": 0.5, "monitor_every": 1}
    labels = np.arange(24) % 2
    one = ms.fit(pixels, labels, out=tmp_path / "one", **settings)
    other = ms.fit(pixels, ["cat", "dog"] * 12, out=tmp_path / "other", **settings)
    assert same_weights(one, other)
    lines = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    assert any("1-NN" in line for line in lines)


def test_a_run_continues_on_the_same_samples_only(tmp_path):
    pixels = random_images()
    ms.fit(pixels, out=tmp_path / "run", **TINY)
    more = TINY | {"epochs": 2}
    with pytest.raises(ValueError, match="other images"):
        ms.fit(255 - pixels, out=tmp_path / "run", **more)
    model = ms.fit(pixels, out=tmp_path / "run", **more)
    assert "step 6" in repr(model)


def test_settings_are_keywords():
    chosen = {"k": 3, "lr": 0.1, "optim__name": "lars", "encoder": "conv3", "train__epochs": 7}
    config = api._configure("small", chosen)
    assert (config.method.k, config.optim.lr, config.optim.name) == (3, 0.1, "lars")
    assert (config.encoder.name, config.train.epochs) == ("conv3", 7)
    assert api._configure(config, {"method": "byol"}).method.name == "byol"
    assert api._configure("small", {"method": "moco", "temperature": 0.3}).method.temperature == 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "unknown setting 'epoch'; did you mean epochs"),
        ({"name": "sgd"}, "write encoder__name or method__name or optim__name"),
        ({"optim__rate": 1}, "unknown setting 'optim.rate'; did you mean optim"),
        ({"temperature": 0.3}, "unknown setting 'temperature'"),
        ({"method": "byl"}, "did you mean byol"),
        ({"source": "photos"}, "the samples are the first argument"),
        ({"k": "many"}, "method.k: got 'many'"),
    ],
)
def test_wrong_settings_name_the_right_ones(settings, message):
    with pytest.raises(ValueError, match=message):
        ms.fit(random_images(), **settings)


def test_wrong_data_says_what_is_needed(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="got no samples"):
        ms.fit([])
    with pytest.raises(ValueError, match="no image found"):
        ms.fit(tmp_path / "empty", **TINY)
    with pytest.raises(ValueError, match="its own labels"):
        ms.fit("photos", [1, 2])
    with pytest.raises(ValueError, match="need train"):
        ms.fit({"val": random_images()})
    for wrong, name in ((3, "int"), (Endless(), "Endless"), ({1, 2}, "set")):
        with pytest.raises(TypeError, match=f"got {name}; need a folder"):
            as_source(wrong)
    with pytest.raises(TypeError, match="#1: got dict; need a path, a PIL image"):
        as_source([Image.new("RGB", (8, 8)), {}])


def test_a_temporary_run_lives_as_long_as_its_model():
    model = ms.fit(random_images(), **TINY)
    folder = model.weights.output_dir
    assert (folder / "config.json").is_file()
    copy = pickle.loads(pickle.dumps(model))
    del model
    gc.collect()
    assert not folder.exists()
    assert same_bits(copy.embed(random_images(2)), copy.embed(random_images(2)))
    assert len(copy.neighbors(random_images()[3], k=2).indices) == 2
    assert copy.weights.output_dir != folder


def test_ctrl_c_does_not_end_the_session(monkeypatch):
    def stopped(number):
        def pretrain(*_, **__):
            raise Stopped(number, 3)

        return pretrain

    monkeypatch.setattr(api, "pretrain", stopped(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="saved at step 3"):
        ms.fit(random_images(), out="run", **TINY)
    with pytest.raises(KeyboardInterrupt, match="the run was temporary"):
        ms.fit(random_images(), **TINY)
    monkeypatch.setattr(api, "pretrain", stopped(signal.SIGTERM))
    with pytest.raises(Stopped):
        ms.fit(random_images(), **TINY)


# embed


def test_embed_is_what_evaluate_sees(run, files, model):
    context = EvaluationContext(load_weights(run), device="cpu")
    expected = context.features(context.train_source.source)
    assert [expected.source.title(i) for i in range(3)] == ["a/0.png", "a/1.png", "a/2.png"]
    assert same_bits(model.embed(files), expected.features.numpy())


def test_embed_is_what_the_command_writes(run, photos, files, model, tmp_path, call):
    assert call("embed", run, photos, "--out", tmp_path / "z.npz")[0] == 0
    assert same_bits(model.embed(files), np.load(tmp_path / "z.npz")["embedding"])


def test_samples_are_embedded_alike_in_every_form(files, model):
    image = Image.open(files[0])
    alone = model.embed(str(files[0]))
    assert alone.shape == (1, len(model.embed(image)[0]))
    assert same_bits(model.embed(image), alone)
    array = np.array(image)
    assert same_bits(model.embed(array), model.embed(torch.from_numpy(array).permute(2, 0, 1)))
    assert same_bits(model.embed(array[None]), model.embed(array))
    gray = array[..., 0]
    assert same_bits(model.embed(gray), model.embed(np.stack([gray] * 3, 2)))


def test_floats_from_0_to_1_are_embedded_as_bytes(model):
    pixels = random_images(3)
    floats = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    assert np.allclose(model.embed(floats), model.embed(pixels), atol=1e-4)
    assert not np.allclose(model.embed(floats / 2), model.embed(pixels), atol=0.02)
    assert np.allclose(model.embed(floats[1]), model.embed(floats)[1:2], atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "dtype"), [(1, np.uint16), (2, np.float64), (5, np.int16), (13, np.uint16)]
)
def test_samples_of_any_depth_and_channels(channels, dtype):
    values = np.random.default_rng(0).normal(900, 300, (12, 16, 20, channels)).astype(dtype)
    model = ms.fit(values, **TINY)
    first = next(model.backbone.parameters())
    assert model.config.data.channels == first.shape[1] == channels
    rows = model.embed(values)
    assert same_bits(model.embed(torch.from_numpy(values).permute(0, 3, 1, 2)), rows)
    assert np.allclose(model.embed(values[4]), rows[4:5], atol=1e-5)  # by the range of the run
    assert model.neighbors(values[4], k=2).indices[0] == 4


def test_a_mixed_list_keeps_its_order(files, model):
    small, large = random_images(2, (16, 16, 3)), random_images(1, (30, 20, 3))[0]
    samples = [small[0], files[0], large, Image.open(files[1]), small[1]]
    mixed = model.embed(samples)
    alone = np.concatenate([model.embed(sample) for sample in samples])
    assert np.allclose(mixed, alone, atol=1e-5)
    assert len(np.unique(mixed.round(4), axis=0)) == 5


def test_batches_do_not_change_the_order(files, model):
    assert np.allclose(model.embed(files, batch_size=5), model.embed(files), atol=1e-5)


def test_samples_that_do_not_fit_are_named(tmp_path, model, files):
    (tmp_path / "torn.jpg").write_bytes(files[0].read_bytes()[:60])
    with pytest.raises(ValueError, match=r"torn\.jpg cannot be read"):
        model.embed([files[0], tmp_path / "torn.jpg"])
    with pytest.raises(ValueError, match=r"missing\.jpg cannot be read"):
        model.embed("missing.jpg")
    with pytest.raises(ValueError, match="5"):
        model.embed(random_images(2, (16, 16, 5)))
    with pytest.raises(ValueError, match="is a folder, need files"):
        model.embed(tmp_path)
    with pytest.raises(ValueError, match="got no samples"):
        model.embed([])


# neighbors


def test_neighbors_are_those_of_the_cosine(model, files):
    found = model.neighbors(files[3], k=4)
    rows = model.embed(files).astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    similarities = rows @ rows[3]
    order = np.argsort(-similarities)[:4]
    assert found.indices.tolist() == order.tolist()
    assert found.indices[0] == 3 and found.similarities[0] == pytest.approx(1, abs=1e-6)
    assert np.allclose(found.similarities, similarities[order], atol=1e-5)
    assert [Path(path) for path in found.paths] == [files[i] for i in order]


def test_neighbors_among_other_samples(model, files):
    images = [Image.open(file) for file in files[4:8]]
    found = model.neighbors(files[6], k=2, data=images)
    assert found.indices[0] == 2 and found.paths[0] == "#2"
    assert model.neighbors(files[6], k=1, data=[str(f) for f in files]).paths == [str(files[6])]


def test_indices_count_unreadable_samples(model, files, tmp_path):
    (tmp_path / "torn.png").write_bytes(b"no image")
    searched = [tmp_path / "torn.png", *files[:3]]
    with pytest.warns(UserWarning, match="1 of 4 images cannot be read"):
        found = model.neighbors(files[1], k=3, data=searched)
    assert found.indices[0] == 2 and found.paths[0] == str(files[1])


def test_an_array_finds_itself_in_a_dataset(model):
    pixels = random_images(6, (10, 10, 3))  # smaller than the views: files and arrays differ
    for collection in (pixels, Items(list(pixels)), [*pixels, Image.new("RGB", (9, 9))]):
        found = model.neighbors(pixels[4], k=1, data=collection)
        assert found.indices[0] == 4 and found.similarities[0] == pytest.approx(1, abs=1e-6)


def test_wrong_searches_are_refused(model, files):
    with pytest.raises(ValueError, match="k: got 13, need 1 to 12"):
        model.neighbors(files[0], k=13)
    with pytest.raises(TypeError, match="got 2 samples, need one"):
        model.neighbors(random_images(2))
    with pytest.raises(ValueError, match="is no run, so give samples"):
        ms.load("pixels").neighbors(files[0])


# evaluate, load, save


def test_evaluate_gives_the_metrics_of_the_command(run, photos, model, call):
    assert call("evaluate", "knn", run, "--data", photos)[0] == 0
    written = json.loads((run / "results" / "knn.json").read_text())["metrics"]
    assert ms.evaluate(model, "knn").metrics == written
    assert ms.evaluate(str(run), "knn", data=photos, ks=[2]).metrics.keys() == {"2-NN"}
    both = ms.evaluate(model, "knn", "cluster", clusters=2, ks=[1])
    assert both["knn"].metrics["1-NN"] == written["1-NN"]
    assert both["cluster"].name == "cluster"


def test_samples_in_memory_are_evaluated_with_labels(tmp_path):
    pixels, labels = random_images(24), np.arange(24) % 2
    pixels[labels == 1] //= 4
    settings = TINY | {"validation": 0.5}
    model = ms.fit(pixels, labels, out=tmp_path / "run", **settings)
    own = ms.evaluate(model, "knn", ks=[1])
    assert (tmp_path / "run/results").glob("knn-ks-1.json")
    assert ms.evaluate(tmp_path / "run", "knn", data=pixels, y=labels, ks=[1]) == own
    with pytest.raises(ValueError, match="memory of a Python program; need them again"):
        ms.evaluate(tmp_path / "run", "knn")
    other = {"train": pixels[:8], "test": pixels[8:]}
    result = ms.evaluate(model, "knn", data=other, y={"train": labels[:8], "test": labels[8:]})
    expected = knn.knn_accuracy(
        torch.from_numpy(model.embed(pixels[:8])),
        torch.from_numpy(labels[:8]),
        torch.from_numpy(model.embed(pixels[8:])),
        torch.from_numpy(labels[8:]),
        ks=[1],
    )
    assert result.metrics == expected


def test_wrong_evaluations_are_refused(model):
    with pytest.raises(ValueError, match="did you mean knn"):
        ms.evaluate(model, "kn")
    with pytest.raises(ValueError, match="unknown option 'k'; did you mean ks"):
        ms.evaluate(model, "knn", k=3)
    with pytest.raises(ValueError, match="meanshift evaluate transfer"):
        ms.evaluate(model, "transfer")
    with pytest.raises(ValueError, match="got labels without samples"):
        ms.evaluate(model, "knn", y=[1])
    with pytest.raises(ValueError, match="need a protocol"):
        ms.evaluate(model)


def test_a_saved_model_is_the_same(model, files, tmp_path):
    loaded = ms.load(model.save(tmp_path / "encoder.safetensors"), device="cpu")
    assert same_bits(loaded.embed(files), model.embed(files))
    assert "16 pixels" in repr(loaded) and "encoder.safetensors" in repr(loaded)
    assert isinstance(loaded.backbone, torch.nn.Module)


def test_shipped_weights_embed_images(files):
    assert ms.load("meanshift:cifar10-small", device="cpu").embed(files[:2]).shape[0] == 2


def test_lists_describe_methods_and_recipes():
    assert "arxiv" in ms.methods()["msf"] and "hardware" in ms.recipes()["small"]
    assert ms.recipe("small").data.image_size == 64
    assert ms.methods.MeanShift is ms.MeanShift  # still the package


# samples in memory as a source


def test_arrays_of_one_shape_become_an_array_source():
    pixels = random_images(4)
    labels = torch.tensor([0, 1, -100, 1])
    for data in (pixels, list(pixels), TensorDataset(torch.from_numpy(pixels), labels)):
        assert isinstance(as_source(data), ArraySource)
    assert as_source(TensorDataset(torch.from_numpy(pixels), labels)).labels.tolist() == [
        0, 1, -1, 1,
    ]  # fmt: skip
    assert isinstance(as_source([pixels[0], pixels[1][:8]]), SampleSource)
    assert len(as_source(iter(pixels))) == 4


def test_labels_come_from_names_items_or_targets():
    images = list(random_images(3))
    named = as_source([Image.fromarray(image) for image in images], ["dog", None, "cat"])
    assert named.labels.tolist() == [1, -1, 0] and named.classes == ["cat", "dog"]
    items = Items([(image, torch.tensor(i)) for i, image in enumerate(images)])
    assert as_source(items).labels.tolist() == [0, 1, 2]
    items.targets = [2, 2, 0]
    assert as_source(items).labels.tolist() == [2, 2, 0]
    assert as_source(items, [1, 0, 1]).labels.tolist() == [1, 0, 1]
    assert as_source(Items(images)).labels is None
    assert as_source(Items([(image, "a.jpg") for image in images])).labels is None
    with pytest.raises(ValueError, match=r"labels of shape \(2,\).* for 3 samples"):
        as_source(items, [1, 0])
    with pytest.raises(ValueError, match="need classes numbered from 0"):
        as_source(items, [1, 0, 10**12])


def test_a_dataset_with_random_transforms_is_refused():
    with pytest.raises(ValueError, match="leave random transforms out"):
        as_source(Flipping(list(random_images(3))))


def test_an_item_that_raises_is_unreadable():
    source = as_source(Items([random_images(1)[0], object()]))
    with pytest.raises(UnreadableSample, match="#1"):
        source.read(1)


def test_fingerprints_follow_the_samples(tmp_path):
    pixels = random_images(3)

    def source(images, labels=None):
        return as_source([Image.fromarray(image) for image in images], labels)

    before = source(pixels)
    assert before.fingerprint() == source(pixels.copy()).fingerprint()
    changed = pixels.copy()
    changed[2, 5, 5, 0] ^= 1
    for method in ("fingerprint", "content_fingerprint"):
        value = getattr(before, method)()
        assert value != getattr(source(changed), method)()
        assert value != getattr(source(pixels, [0, 1, 0]), method)()
        assert value != getattr(source(pixels[::-1]), method)()
    Image.fromarray(pixels[0]).save(tmp_path / "a.png")
    listed = as_source([tmp_path / "a.png", before.samples[0]])
    value = listed.content_fingerprint()
    Image.fromarray(pixels[1]).save(tmp_path / "a.png")
    assert listed.content_fingerprint() != value


def test_sources_in_memory_can_be_pickled(files):
    samples = [files[0], Image.open(files[1]), random_images(1)[0]]
    for source in (as_source(samples), as_source(Items(samples))):
        copy = pickle.loads(pickle.dumps(source))
        assert copy.fingerprint() == source.fingerprint()
        assert all(torch.equal(copy.read(i), source.read(i)) for i in range(3))


# everywhere


@pytest.fixture
def quickly(photos, tmp_path, monkeypatch):
    """A folder with the files that examples name, in which recipes are tiny."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photos)
    Image.fromarray(random_images(1, (20, 24, 3))[0]).save("a.jpg")
    tiny = api._configure("small", TINY)
    for module, name in ((api, "find_recipe"), (recipes, "recipe")):
        monkeypatch.setattr(module, name, lambda _: tiny)


@pytest.mark.usefixtures("quickly")
def test_the_examples_of_docstrings_run():
    runner = doctest.DocTestRunner()
    parts = sorted(
        doctest.DocTestFinder().find(api), key=lambda part: part.name != "meanshift.api.fit"
    )
    for part in parts:
        runner.run(part)
    assert runner.tries >= 6 and not runner.failures


SPAWN = """
import sys
from pathlib import Path
import torch
from PIL import Image
import meanshift as ms

if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    files = sorted(Path(sys.argv[1]).rglob("*.png"))
    samples = [*files[:6], *map(Image.open, files[6:])]
    model = ms.fit(samples, **eval(sys.argv[2]))
    assert torch.multiprocessing.get_start_method() == "spawn"
    model.save(sys.argv[3])
"""


@pytest.mark.slow
def test_workers_can_be_spawned(photos, tmp_path):
    (tmp_path / "script.py").write_text(SPAWN)
    settings = TINY | {"init": "random", "snapshots": 0}  # each pass over the data starts workers
    words = [tmp_path / "script.py", photos, settings | {"workers": 1}, tmp_path / "spawned.pt"]
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert same_weights(ms.load(tmp_path / "spawned.pt"), ms.fit(photos, **settings))


ELSEWHERE = """
import ctypes, os, signal, sys
import torch, torchvision, multiprocessing.queues, multiprocessing.synchronize, tqdm.auto
for module, names in ((signal, ["SIGHUP"]), (os, ["fork", "O_DIRECTORY", "set_blocking"])):
    for name in names:
        delattr(module, name)
sys.modules["fcntl"] = None
sys.platform = "win32"
from meanshift.cli import main
settings = "--train.epochs 1 --train.batch_size 4 --data.image_size 16 --encoder.width 0.125"
words = f"pretrain small --data {sys.argv[1]} --out {sys.argv[2]} --data.workers 0 {settings}"
assert main(words.split()) == 0
import meanshift as ms
assert ms.load(sys.argv[2]).neighbors(sys.argv[1] + "/a/0.png").indices[0] == 0
"""


@pytest.mark.slow
def test_nothing_needs_what_windows_lacks(photos, tmp_path):
    command = [sys.executable, "-c", ELSEWHERE, str(photos), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bars_are_shown_in_a_notebook(monkeypatch):
    from meanshift.runtime.progress import is_watched, progress

    monkeypatch.setattr(sys, "modules", {**sys.modules})
    sys.modules.pop("ipykernel", None)
    assert not is_watched()
    with progress("x", 3) as bar:
        assert bar.mininterval == 60
    sys.modules["ipykernel"] = sys
    assert is_watched()
    with progress("x", 3) as bar:
        assert bar.mininterval < 1
