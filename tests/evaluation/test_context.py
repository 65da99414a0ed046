"""Contexts: which images are evaluated, which features are shared, and what a card contains."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from meanshift import config
from meanshift.data import train_and_validation
from meanshift.data.arrays import ArraySource
from meanshift.evaluation import cluster, knn
from meanshift.evaluation.context import EncoderContext, EvaluationContext
from meanshift.evaluation.result import Result, short_hash
from meanshift.models.weights import fingerprint, load_weights
from tests.support.colors import make_weights
from tests.support.sources import open_one, titles


def run_weights(output_dir, source, seed, validation="auto", directory=Path()):
    """Weights like those of a run that was started in a directory and trained on a source."""
    settings = {"data.source": str(source), "train.seed": seed, "data.validation": validation}
    run_config = config.Config().with_overrides(settings)
    train, _ = train_and_validation(str(directory / source), validation, seed=seed)
    weights = make_weights(output_dir)
    return replace(weights, config=run_config, trained_on=train.fingerprint(), directory=directory)


# Which images


def test_a_source_with_one_split_is_split_and_the_card_says_so(tmp_path, make_images):
    source = make_images(tmp_path / "all", {"a": 60, "b": 40}, size=(14, 14))
    weights = make_weights(tmp_path / "out")
    contexts = [EvaluationContext(weights, str(source), seed=seed) for seed in (0, 1)]
    assert contexts[0].split == "10% split off for testing, stratified, seed 0"
    tested = titles(contexts[0].test_source)
    assert sorted(title[0] for title in tested) == ["a"] * 6 + ["b"] * 4
    # The seed is that of layers, subsets and clusters.
    assert titles(contexts[1].test_source) == tested
    assert [context.name for context in contexts] == ["all", "all-seed1"]


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_a_run_is_tested_on_its_validation_images_whatever_the_seed(tmp_path, make_images, seed):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    for setting in ("auto", 0.3):
        weights = run_weights(tmp_path / "out", source, 3, setting)
        _, validation = train_and_validation(str(source), setting, seed=3)
        context = EvaluationContext(weights, seed=seed)
        assert titles(context.test_source) == titles(validation)


def test_a_run_is_tested_on_its_validation_images_in_any_spelling(
    tmp_path, make_images, monkeypatch
):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    weights = run_weights(tmp_path / "out", "all", 3, directory=tmp_path)
    _, validation = train_and_validation(str(source), "auto", seed=3)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for data in (None, str(source), "../all", f"{source}/../all", "../link"):
        context = EvaluationContext(weights, data)
        assert titles(context.test_source) == titles(validation)
        assert context.split.startswith("validation images of the run") and not context.name


def test_images_of_a_run_are_held_out_of_a_copy_too_and_its_result_has_a_name_of_its_own(
    tmp_path, make_images
):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    weights = run_weights(tmp_path / "out", source, 3)
    copied = shutil.copytree(source, tmp_path / "copied")
    context = EvaluationContext(weights, str(copied))
    assert context.split.startswith("validation images of the run")
    assert context.name == "copied" and context.options == {"data": str(copied)}


def test_the_card_says_that_a_changed_source_was_seen_also_beside_other_weights(
    tmp_path, make_images
):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    weights = run_weights(tmp_path / "out", source, 0)
    make_images(source, {"a/0": 1}, size=(14, 14))
    first = EvaluationContext(replace(weights, trained_on=""))  # as untrained:RUN
    assert not first.seen
    for like in (None, first):
        with pytest.warns(UserWarning, match="have changed since the run"):
            context = EvaluationContext(weights, like=like)
        assert context.card()["split"].endswith("the run has seen them unlabeled")


def test_partial_labels_do_not_change_the_validation_images_of_a_run(tmp_path, make_images):
    source = make_images(tmp_path / "all", {"": 120}, size=(14, 14))
    rows = "".join(f"{i:03d}.jpg,{'ab'[i % 2]}\n" for i in range(0, 120, 3))
    (tmp_path / "labels.csv").write_text("file,label\n" + rows)
    weights = run_weights(tmp_path / "out", source, 0, 0.3)
    _, validation = train_and_validation(str(source), 0.3, seed=0)
    with pytest.warns(UserWarning, match="40 of them among the 120"):
        context = EvaluationContext(weights, labels=tmp_path / "labels.csv")
    assert 0 < len(context.test_source) < len(validation)
    assert set(titles(context.test_source)) < set(titles(validation))


def test_the_card_says_that_a_run_without_validation_images_has_seen_all(tmp_path, make_images):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    weights = run_weights(tmp_path / "out", source, 0, "none")
    assert EvaluationContext(weights).split.endswith("the run has seen them unlabeled")


def test_compared_runs_with_other_validation_images_are_warned_of(tmp_path, make_images):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    first = EvaluationContext(run_weights(tmp_path / "out", source, 0))
    with pytest.warns(UserWarning, match="this run has other validation images"):
        second = EvaluationContext(run_weights(tmp_path / "out", source, 1), like=first)
    assert titles(second.test_source) == titles(first.test_source)
    assert "compared" in second.name and "compared" not in first.name
    third = EvaluationContext(run_weights(tmp_path / "out", source, 0), like=first)
    assert third.split == first.split and third.name == first.name == ""


def test_an_unlabeled_split_cannot_be_tested_on(tmp_path, make_images):
    counts = {"train/a": 3, "train/b": 3, "val/a": 2, "val/b": 2, "test": 2}
    source = make_images(tmp_path / "all", counts)
    with pytest.raises(ValueError, match="no labeled split 'test'; it has val"):
        EvaluationContext(make_weights(tmp_path), str(source), split="test")


def test_the_split_can_be_chosen(tmp_path, make_images):
    sizes = {"train": 6, "val": 2, "test": 3}
    counts = {f"{split}/{name}": size for split, size in sizes.items() for name in "ab"}
    source = str(make_images(tmp_path / "all", counts, size=(14, 14)))
    weights = make_weights(tmp_path / "out")
    assert len(EvaluationContext(weights, source).test.source) == 4
    assert len(EvaluationContext(weights, source, split="test").test.source) == 6
    with pytest.raises(ValueError, match="no labeled split 'tset'; it has val, test"):
        EvaluationContext(weights, source, split="tset")


def test_weights_without_images_are_refused_with_what_to_type(tmp_path):
    with pytest.raises(ValueError, match="--data SOURCE"):
        EvaluationContext(make_weights(tmp_path))


def test_batch_norm_of_random_weights_is_measured_on_the_training_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    labels = np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=pixels[:30], y_train=labels[:30],
             x_test=pixels[30:], y_test=labels[30:])  # fmt: skip
    first = nn.BatchNorm2d(4)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), first, nn.Flatten()).eval()
    untouched = fingerprint(backbone)
    weights = replace(make_weights(tmp_path), backbone=backbone, unmeasured=True, image_size=16)
    seen = []
    handle = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    context = EvaluationContext(weights, str(tmp_path / "a.npz"))
    handle.remove()
    assert context.fingerprint != untouched
    (batch,) = seen
    assert len(batch) == 30
    torch.testing.assert_close(first.running_mean, batch.mean((0, 2, 3)))
    assert not first.training and first.momentum == 0.1


# Features of parts


def test_parts_are_rows_of_their_origin_without_the_unreadable(tmp_path, make_images):
    root = make_images(tmp_path / "photos", {"a": 10, "b": 10, "c": 10})
    (root / "b" / "003.jpg").write_bytes(b"torn")
    weights = load_weights("pixels")
    context = EncoderContext(weights, output_dir=tmp_path / "out", image_size=16)
    source = open_one(root)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    subsets = [source.subset(indices) for indices in order.split([15, 5, 10])]
    with pytest.warns(UserWarning, match=r"1 of 30 images cannot be read .*b/003.jpg"):
        parts = context.features_of_parts(*subsets, resize=16, bicubic=True)
    assert sum(len(part.source) for part in parts) == 29
    other = EncoderContext(weights, output_dir=tmp_path / "other", image_size=16)
    for part in parts:
        alone = other.features(part.source, resize=16, bicubic=True)
        assert torch.equal(alone.features, part.features)
        assert alone.labels.tolist() == part.labels.tolist()


def test_a_small_part_of_a_large_source_is_extracted_alone(tmp_path):
    source = ArraySource(np.zeros((100, 32, 32, 3), np.uint8), np.arange(100) % 2, name="large")
    context = EncoderContext(make_weights(tmp_path), output_dir=tmp_path)
    subsets = [source.subset(torch.arange(5)), source.subset(torch.arange(5, 9))]
    context.features_of_parts(*subsets)
    sizes = [len(np.load(file)) for file in (tmp_path / "features").glob("*.npy")]
    assert sorted(sizes) == [4, 5]


def test_the_pixels_of_a_small_array_are_not_copied_to_a_file(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 32, 32, 3), np.uint8)
    source = ArraySource(pixels, np.arange(9) % 2, name="small")
    context = EncoderContext(load_weights("pixels"), output_dir=tmp_path)
    in_memory = context.features(source).features
    assert not (tmp_path / "features").exists()
    monkeypatch.setattr("meanshift.evaluation.context.PIXEL_ROWS", 8)
    mapped = context.features(source).features
    assert len(list((tmp_path / "features").glob("*.npy"))) == 1
    assert torch.equal(in_memory, mapped)


# The card


@pytest.mark.filterwarnings("ignore:.*cannot be read")
def test_unreadable_images_are_left_out_and_counted_in_the_card(photos, tmp_path):
    (photos / "train" / "a" / "003.jpg").write_bytes(b"no")
    (photos / "val" / "b" / "001.jpg").write_bytes(b"")
    context = EvaluationContext(make_weights(tmp_path / "out"), str(photos))
    knn.evaluate(context, ks=[1])
    card = context.card()
    assert card["sizes"] == {"train": 15, "test": 15} and card["unreadable"] == 2
    assert "a/003.jpg" not in titles(context.train.source)
    assert len(context.train.features) == len(context.train.labels) == 15
    assert context.train.labels.bincount().tolist() == [7, 8]


def test_a_result_of_other_images_does_not_replace_the_runs_own(make_context, tmp_path):
    path = make_context().save(Result("knn", {"1-NN": 1.0}, {}))
    word = short_hash([("data", str(tmp_path / "colors.npz"))])
    assert path == tmp_path / "out" / "results" / f"knn-colors-{word}.json"
    content = json.loads(path.read_text())
    assert content["metrics"] == {"1-NN": 1.0}
    entries = {"protocol", "settings", "data", "split", "sizes", "weights", "encoder", "seed"}
    entries |= {"image_size", "precision", "versions", "command", "date"}
    assert entries <= set(content["card"])


def test_results_that_differ_have_names_that_differ(make_images, tmp_path):
    one = tmp_path / "one"
    splits = {f"{split}/{name}": 8 for split in ("train", "val") for name in "ab"}
    sources = [make_images(tmp_path / place / "val", splits, size=(12, 12)) for place in "xy"]
    (tmp_path / "labels.csv").write_text("file,label\n")
    contexts = [
        *(EvaluationContext(make_weights(one), str(source)) for source in sources),
        *(
            EvaluationContext(make_weights(one), str(sources[0]), **options)
            for options in (
                {"image_size": 16},
                {"resize": 16},
                {"precision": "bfloat16"},
                {"seed": 5},
                {"split": "val"},
                {"output_dir": tmp_path / "out"},
            )
        ),
        EvaluationContext(make_weights(tmp_path / "two"), str(sources[0]), output_dir=one),
    ]
    results = [
        *(knn.evaluate(contexts[0], ks=ks) for ks in (None, [3], [1, 3])),
        *(knn.evaluate(contexts[0], temperature=temperature) for temperature in (0.07, 0.1)),
        *(cluster.evaluate(contexts[0], clusters=clusters) for clusters in (0, 3, 4)),
    ]
    assert not results[0].options and not results[5].options
    paths = [contexts[0].save(result) for result in results]
    paths += [context.save(results[0]) for context in contexts[1:]]
    assert len(set(paths)) == len(results) + len(contexts) - 1
    names = [path.stem for path in paths]
    end = short_hash([("data", str(sources[0]))])
    assert names[:3] == [f"knn-val-{end}", f"knn-val-ks-3-{end}", f"knn-val-ks-1-3-{end}"]
    assert f"knn-val-image-size-16-{end}" in names
    assert f"knn-val-precision-bfloat16-{end}" in names


def test_a_baseline_beside_two_runs_has_two_results(tmp_path, make_images):
    source = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    names = set()
    for seed in (0, 1, 2):
        run = EvaluationContext(run_weights(tmp_path / "out", source, seed))
        baseline = EvaluationContext(make_weights(tmp_path / "baseline"), like=run)
        names.add(baseline.save(Result("knn", {}, {})))
    assert len(names) == 3


def test_a_result_replaces_entries_of_the_card_and_stores_its_arrays(make_context):
    arrays = {"numbers": np.arange(3)}
    path = make_context().save(Result("own", {}, {"k": 1}, arrays, {"data": "other images"}))
    card = json.loads(path.read_text())["card"]
    assert (card["protocol"], card["settings"], card["data"]) == ("own", {"k": 1}, "other images")
    with np.load(path.with_suffix(".npz")) as stored:
        assert stored["numbers"].tolist() == [0, 1, 2]
