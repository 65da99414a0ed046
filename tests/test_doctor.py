"""The doctor: what it says about data of many kinds, its advice, its trial, its page."""

import json
import shlex
import shutil
import wave
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift import doctor
from meanshift.cli import parse_arguments
from meanshift.cli.settings import configure
from meanshift.config import Data
from meanshift.data import open_source
from meanshift.data.arrays import ArraySource
from meanshift.doctor import advice, inspection, page, trial
from tests.support.browser import assert_accessible
from tests.support.commands import TINY

FAST = [*TINY, "--encoder.name", "conv3"]
TINY_SETTINGS = dict(zip([word[2:] for word in FAST[::2]], FAST[1::2], strict=True))


@pytest.fixture
def diagnose(monkeypatch):
    """Look at a source without the trial, which other tests take."""
    monkeypatch.setattr(doctor, "_try", lambda *_: None)
    return lambda source, **options: doctor.diagnose(str(source), **options)


@pytest.fixture(autouse=True)
def short_trial(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 0.05)
    monkeypatch.setattr(trial, "_STEPS", 3)


def chosen(diagnosis, name):
    """The value of a part of the advice."""
    (value,) = [choice.value for choice in diagnosis.advice.choices if choice.name == name]
    return value


def typed_config(command):
    """The configuration that an advised command gives."""
    return configure(parse_arguments(shlex.split(command)[1:]))


def write_gray(root, count, dtype, seed=0):
    rng = np.random.default_rng(seed)
    root.mkdir(parents=True)
    for index in range(count):
        pixels = rng.integers(0, 256 if dtype == np.uint8 else 4096, (40, 40)).astype(dtype)
        Image.fromarray(pixels).save(root / f"{index}.png")
    return root


# The five situations


def test_tiny(tmp_path, make_images, diagnose):
    photos = make_images(tmp_path / "photos", {"": 12})
    found = diagnose(photos)
    assert found.exit_code == 0
    assert "12 training samples are enough to try the program" in found.warnings[0]
    config = typed_config(found.advice.command)
    assert (chosen(found, "recipe"), chosen(found, "batch")) == ("small", "4")
    assert config.train.batch_size == 4
    assert config.data.image_size == 40
    as_typed = diagnose(photos, recipe_name="small")
    assert as_typed.exit_code == 1
    assert "12 training samples do not fill a batch of 64" in as_typed.problems[0]
    assert diagnose(photos, settings={"train.batch_size": "8"}).exit_code == 0
    assert diagnose(photos, settings={"train.batch_size": "16"}).exit_code == 1


def test_huge_arrays_are_not_read_as_a_whole(tmp_path, diagnose, monkeypatch):
    path = tmp_path / "huge.npy"
    np.lib.format.open_memmap(path, "w+", np.uint8, (1_000_000, 8, 8, 3)).flush()  # sparse
    rows = []

    def read_batch(_, indices):
        rows.extend(indices.tolist())
        noise = [np.random.default_rng(int(i)).integers(0, 256, (8, 8, 3)) for i in indices]
        return torch.from_numpy(np.stack(noise).astype(np.uint8))

    monkeypatch.setattr(ArraySource, "read_batch", read_batch)
    found = diagnose(path, samples=300)
    assert found.exit_code == 0
    assert 300 <= len(rows) < 1000
    assert max(rows) > 900_000  # from all over the array
    assert "looked at 300 of 1,000,000, chosen at random" in page.text(found)
    assert chosen(found, "bank") == "131072"
    assert chosen(found, "workers") == "0"
    assert chosen(found, "recipe") == "cifar10-cpu"
    assert found.inspection.duplicates.count == 0


def test_gray(tmp_path, diagnose):
    found = diagnose(write_gray(tmp_path / "gray", 30, np.uint8))
    config = typed_config(found.advice.command)
    assert (config.method.target_view, config.method.online_view) == ("weak", "weak")
    assert "one channel of 8 bits" in page.text(found)
    assert found.inspection.spec.channels == 1


def test_gray_that_is_stored_as_rgb(tmp_path, diagnose):
    gray = write_gray(tmp_path / "gray", 30, np.uint8)
    for file in gray.iterdir():
        Image.open(file).convert("RGB").save(file)
    found = diagnose(gray)
    config = typed_config(found.advice.command)
    assert (config.data.channels, config.method.online_view) == (1, "weak")
    assert "all of them gray" in page.text(found)
    rgb = diagnose(gray, settings={"data.channels": "3", "method.online_view": "strong"})
    assert typed_config(rgb.advice.command).data.channels == 3
    assert chosen(rgb, "views") == "strong"


def test_16_bit(tmp_path, diagnose):
    found = diagnose(write_gray(tmp_path / "scans", 30, np.uint16), recipe_name="small",
                     settings={"train.batch_size": "4"})  # fmt: skip
    assert found.exit_code == 0
    assert chosen(found, "views") == "weak/weak"
    assert chosen(found, "batch") == "4"
    low, high = found.inspection.spec.range
    assert 0 <= low < 50
    assert 4000 < high < 4096
    ranged = diagnose(tmp_path / "scans", settings={"data.range": "-100,5000"})
    assert ranged.inspection.spec.range == (-100.0, 5000.0)
    assert typed_config(ranged.advice.command).data.range == (-100.0, 5000.0)


def test_leaking(tmp_path, make_images, diagnose):
    root = make_images(tmp_path / "photos" / "train", {"a": 10, "b": 10})
    make_images(tmp_path / "photos" / "test", {"a": 5, "b": 5}, seed=1)
    shutil.copy(root / "a" / "003.jpg", tmp_path / "photos" / "test" / "b" / "copy.jpg")
    smooth = Image.fromarray(np.random.default_rng(2).integers(0, 256, (6, 6, 3), np.uint8))
    smooth.resize((90, 80)).save(root / "b" / "smooth.jpg")
    smooth.resize((90, 80)).resize((45, 40)).save(
        tmp_path / "photos" / "test" / "a" / "smaller.jpg", quality=60
    )
    shutil.copy(root / "a" / "001.jpg", root / "a" / "again.jpg")
    found = diagnose(tmp_path / "photos")
    assert found.exit_code == 1
    seen = found.inspection
    assert seen.leaks == inspection.Finding(1, ["train: a/003.jpg = test: b/copy.jpg"])
    assert seen.near_leaks == inspection.Finding(1, ["train: b/smooth.jpg = test: a/smaller.jpg"])
    assert (seen.duplicates.count, seen.near_duplicates.count) == (1, 0)
    assert {*seen.duplicates.examples[0].split(" = ")} == {"train: a/001.jpg", "train: a/again.jpg"}
    assert "1 sample is in two splits" in found.problems[0]
    assert any("nearly the same in two splits" in warning for warning in found.warnings)
    (tmp_path / "photos" / "test" / "b" / "copy.jpg").unlink()
    assert diagnose(tmp_path / "photos").exit_code == 0


# Other data


def test_unreadable_files_and_unknown_extensions(tmp_path, make_images, diagnose):
    photos = make_images(tmp_path / "photos", {"": 20})
    (photos / "broken.jpg").write_bytes(b"no image")
    (photos / "notes.txt").write_text("x")
    found = diagnose(photos)
    assert found.exit_code == 1
    assert "1 of 21 samples cannot be read, more than the 1%" in found.problems[0]
    assert "broken.jpg" in found.inspection.unreadable.examples[0]
    assert any("1 .txt" in note for note in found.notes)
    assert diagnose(photos, settings={"data.max_bad_fraction": "0.1"}).exit_code == 0


def test_nothing_to_read(tmp_path, diagnose, call):
    (tmp_path / "empty").mkdir()
    code, output, _ = call("doctor", tmp_path / "empty")
    assert (code, "no image found" in output) == (1, True)
    (tmp_path / "empty" / "broken.png").write_bytes(b"x")
    found = diagnose(tmp_path / "empty")
    assert found.exit_code == 1
    assert "none of the 1 samples" in found.problems[0]
    assert found.advice is None
    assert "broken.png" in page.text(found)
    code, _, error = call("doctor", tmp_path / "nowhere")
    assert (code, "nothing there" in error) == (2, True)


def test_constant_images(tmp_path, diagnose):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 12, 12, 3), dtype=np.uint8)
    pixels[7] = 5
    np.save(tmp_path / "images.npy", pixels)
    found = diagnose(tmp_path / "images.npy")
    assert found.exit_code == 0
    assert found.inspection.constant == inspection.Finding(1, ["#7"])
    assert any("constant" in warning and "#7" in warning for warning in found.warnings)


def write_signals(root, count=24):
    root.mkdir()
    for index in range(count):
        tone = np.sin(np.arange(1600 + 10 * index) * (0.05 + 0.01 * index))
        with wave.open(str(root / f"{index:02d}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes((9000 * tone).astype("<i2").tobytes())
    return root


def test_signals(tmp_path, diagnose):
    found = diagnose(write_signals(tmp_path / "sound"))
    config = typed_config(found.advice.command)
    assert (chosen(found, "recipe"), config.encoder.name) == ("signal", "conv1d")
    assert config.data.image_size == 1720  # the median length
    assert found.inspection.near_duplicates.count == 0
    wrong = diagnose(tmp_path / "sound", recipe_name="small")
    assert (wrong.exit_code, wrong.advice.recipe) == (1, "signal")


def test_vectors(tmp_path, diagnose):
    rows = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32)
    rows[9] = rows[3]
    np.savez(tmp_path / "rows.npz", x_train=rows, y_train=np.arange(300) % 3)
    found = diagnose(tmp_path / "rows.npz")
    assert chosen(found, "recipe") == "vector"
    assert {*found.inspection.duplicates.examples[0].split(" = ")} == {"#3", "#9"}
    assert found.inspection.splits["train"].classes == {"0": 100, "1": 100, "2": 100}
    assert "image size" not in page.text(found)


# Its parts


def test_splits_share_the_samples_and_parts_of_train_are_no_leaks():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    splits = {
        "train": ArraySource(pixels[:30], None, name="made"),
        "train_small": ArraySource(pixels[:5], None, name="made"),
        "labeled": ArraySource(pixels[:4], None, name="made"),
        "test": ArraySource(pixels[30:], None, name="made"),
    }
    found = inspection.inspect(splits, Data(), samples=27)
    looked_at = {name: split.looked_at for name, split in found.splits.items()}
    assert looked_at == {"train": 9, "train_small": 5, "labeled": 4, "test": 9}
    assert (found.leaks.count, found.duplicates.count) == (0, 0)
    splits["test"] = ArraySource(pixels[:30], None, name="made")
    assert inspection.inspect(splits, Data(), samples=1000).leaks.count == 30


def test_near_copies_are_those_of_the_definition():
    """Against the correlation of every pair, also over the border of a block of rows."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (1100, 8, 8, 1)).astype(np.uint8)
    pixels[1050] = np.clip(pixels[20].astype(int) + rng.integers(-3, 4, (8, 8, 1)), 0, 255)
    pixels[70] = pixels[60]  # exact, so it is not near
    source = ArraySource(pixels, None, name="made")
    found = inspection.inspect({"train": source}, Data(), samples=1100)
    correlation = np.tril(np.corrcoef(pixels.reshape(1100, -1)), -1)
    rows = {tuple(pair) for pair in np.argwhere(correlation >= inspection.NEAR).tolist()}
    assert rows == {(1050, 20), (70, 60)}
    (near,) = found.near_duplicates.examples
    assert {*near.split(" = ")} == {"#1050", "#20"}
    assert found.duplicates.count == 1


def test_reading_ends_with_its_time(tmp_path, make_images, monkeypatch):
    source = open_source(str(make_images(tmp_path / "photos", {"": 30})))
    monkeypatch.setattr(inspection, "SECONDS", 1e-9)
    assert inspection.inspect(source, Data()).splits["train"].looked_at == 1
    assert inspection.inspect(source, Data(), samples=30).splits["train"].looked_at == 30


@pytest.mark.parametrize(("count", "bank"), [(600, 4096), (50_000, 16_384), (1_281_167, 131_072)])
def test_the_bank_grows_with_the_samples(count, bank):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 80, 80, 3), dtype=np.uint8)
    found = inspection.inspect({"train": ArraySource(pixels, None, name="made")}, Data())
    advised = advice.advise("made", found, train=count, uniform=True, typed={})
    assert advised.config.method.bank_size == bank
    (size,) = [choice for choice in advised.choices if choice.name == "image size"]
    assert (size.value, advised.config.data.image_size) == ("64", 64)


def test_a_bank_that_keeps_views_of_the_same_image_is_no_larger_than_the_data():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 80, 80, 3), dtype=np.uint8)
    found = inspection.inspect({"train": ArraySource(pixels, None, name="made")}, Data())
    for count, batch, bank in ((600, 128, 1024), (12, 4, 512)):
        advised = advice.advise(
            "made", found, train=count, uniform=True, recipe_name="imagenet-r50", typed={}
        )
        assert advised.config.method.bank_size == bank
        assert advised.config.train.batch_size == batch
    paper = advice.advise(
        "made", found, train=10**6, uniform=True, recipe_name="imagenet-r50", typed={}
    )
    assert paper.config.method.bank_size == 128_000


def test_workers_are_one_for_each_core(monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 80, 80, 3), dtype=np.uint8)
    found = inspection.inspect({"train": ArraySource(pixels, None, name="made")}, Data())
    for cores, workers in ((1, 0), (4, 4), (64, 8)):
        monkeypatch.setattr(advice, "cores", lambda cores=cores: cores)
        advised = advice.advise("made", found, train=600, uniform=False, typed={})
        assert advised.config.data.workers == workers


# The trial


def test_the_trial_and_the_advised_command_run(tmp_path, make_images, call):
    photos = make_images(tmp_path / "photos", {"a": 10, "b": 10})
    found = doctor.diagnose(str(photos), settings=TINY_SETTINGS)
    measured = found.trial
    assert measured.run_steps == 2 * 5
    assert measured.run_seconds == pytest.approx(10 * 4 / measured.samples_per_second)
    assert measured.checkpoint > 10_000
    assert measured.disk == 3 * measured.checkpoint
    assert measured.memory > 50e6
    sheet = measured.sheet
    assert sheet.columns == ["sample", *["target (weak)", "online (strong)"] * 2]
    assert [len(row) for row in sheet.rows] == [5] * 6
    assert all(image.dtype == torch.uint8 for row in sheet.rows for image in row)
    words = shlex.split(found.advice.command)[1:]
    words[words.index("--out") + 1] = str(tmp_path / "run")
    code, _, error = call(*words)
    assert (code, (tmp_path / "run" / "config.json").is_file()) == (0, True), error


@pytest.mark.parametrize("kind", ["signal", "vector"])
def test_the_trial_of_other_kinds(tmp_path, kind):
    source = write_signals(tmp_path / "sound")
    if kind == "vector":
        source = tmp_path / "rows.npy"
        np.save(source, np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32))
    settings = {"encoder.width": 0.125, "data.workers": 0, "train.batch_size": 4}
    found = doctor.diagnose(str(source), settings=settings)
    assert found.problems == []
    assert found.trial.run_steps == 600
    assert page.write_sheet(found.trial.sheet, tmp_path / "views.png").stat().st_size > 1000


def test_a_batch_that_would_take_too_long_is_not_tried(tmp_path, make_images, monkeypatch):
    photos = make_images(tmp_path / "photos", {"": 40})
    monkeypatch.setattr(trial, "SECONDS", 1e-6)
    settings = {**TINY_SETTINGS, "train.batch_size": 32, "method.bank_size": 64}
    found = doctor.diagnose(str(photos), settings=settings)
    assert found.trial.batch_size == 16
    assert found.trial.run_steps == 2
    assert found.trial.run_seconds == pytest.approx(2 * 32 / found.trial.samples_per_second)


def test_what_pretrain_would_refuse_is_a_problem(tmp_path, make_images):
    photos = make_images(tmp_path / "photos", {"": 20})
    settings = {**TINY_SETTINGS, "method.name": "supervised"}
    del settings["method.bank_size"]
    found = doctor.diagnose(str(photos), settings=settings)
    assert found.exit_code == 1
    assert "label" in found.problems[0]


def test_a_full_disk_is_a_problem(tmp_path, make_images, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    photos = make_images(tmp_path / "photos", {"": 20})
    found = doctor.diagnose(str(photos), settings=TINY_SETTINGS)
    assert found.exit_code == 1
    assert "give an --out on another disk" in found.problems[0]


# The command


@pytest.mark.slow
def test_the_page_is_accessible(tmp_path, make_images, call, chromium):
    names = {f"a <b>class</b> with a long name, number {i}": 4 for i in range(6)}
    photos = make_images(tmp_path / "photos", names)
    code, _, error = call("doctor", photos, "small", "--html", tmp_path / "page.html", *FAST)
    assert code == 0, error
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto((tmp_path / "page.html").as_uri())
            assert_accessible(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.close()


def test_the_command_writes_text_json_page_and_sheet(tmp_path, make_images, call):
    photos = make_images(tmp_path / "<b>photos", {"a": 10, "b": 10})
    files = {"--html": tmp_path / "doctor.html", "--png": tmp_path / "views.png"}
    options = [word for option in files.items() for word in option]
    code, output, error = call("doctor", photos, "small", *options, *FAST)
    assert code == 0, error
    assert len(output.splitlines()) < 40
    assert max(map(len, output.splitlines()[:-1])) <= 100
    assert "meanshift pretrain small" in output.splitlines()[-1]
    html = files["--html"].read_text()
    assert "data:image/png;base64," in html
    assert "<b>photos" not in html
    assert "http" not in html.replace("http-equiv", "")
    with Image.open(files["--png"]) as image:
        assert image.size > (600, 600)
    code, output, _ = call("doctor", photos, "--json", *FAST)
    values = json.loads(output)
    assert code == 0
    assert values["inspection"]["splits"]["train"]["classes"] == {"a": 10, "b": 10}
    assert values["advice"]["command"].startswith("meanshift pretrain small --data")
    assert values["trial"]["run_steps"] == 10


def test_own_views_are_drawn(tmp_path, make_images, call):
    (tmp_path / "mine.py").write_text(
        "from meanshift.transforms.augment import MultiViewTransform\n"
        "class Black(MultiViewTransform):\n"
        "    def finish(self, images, epoch, ids):\n"
        "        return tuple(0 * v - 9 for v in super().finish(images, epoch, ids))\n"
    )
    photos = make_images(tmp_path / "photos", {"": 20})
    module = f"{tmp_path / 'mine.py'}:Black"
    found = doctor.diagnose(str(photos), settings={**TINY_SETTINGS, "views.module": module})
    assert chosen(found, "views") == "your own"
    for sample, *views in found.trial.sheet.rows:
        assert int(sample.max()) > 0
        assert all(int(view.max()) == 0 for view in views)
    code, output, _ = call("doctor", photos, "--views.module", "nowhere.py:Mine", *FAST)
    assert (code, "views.module: " in output) == (1, True)


def test_wrong_arguments_are_refused(tmp_path, make_images, call):
    photos = make_images(tmp_path / "photos", {"": 20})
    code, _, error = call("doctor", photos, "smal")
    assert (code, "did you mean small" in error) == (2, True)
    code, _, error = call("doctor", photos, "--method.kk", "5")
    assert (code, "method.k" in error) == (2, True)
    code, _, error = call("doctor", photos, "--samples", "-1")
    assert (code, "--samples" in error) == (2, True)
    code, _, error = call("doctor", photos, "--html", tmp_path)
    assert (code, "is a folder" in error) == (2, True)
