"""Linear, few labels and clusters: known answers, independent references, and nothing changed."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch import nn
from torch.nn import functional as F

from meanshift import config
from meanshift.data import train_and_validation
from meanshift.evaluation import NAMES, cluster, knn, linear, linear_probe, semi
from meanshift.evaluation.context import EvaluationContext, Result
from meanshift.evaluation.linear_probe import (
    ProbeSettings,
    Standardize,
    augmented_stream,
    cached_stream,
    train_layers,
)
from meanshift.models.encoder import build_backbone
from meanshift.models.weights import Weights, fingerprint, load_weights
from meanshift.runtime import rng
from meanshift.transforms.augment import TwoViews

CPU = torch.device("cpu")
COLORS = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200], [190, 190, 30], [190, 30, 190],
                    [30, 190, 190]])  # fmt: skip
SHORT = ProbeSettings(lr=0.1, batch_size=64, epochs=8, milestones=(3, 6))


def arrays(path, *, shuffled=False, train=600, test=300, seed=0):
    """Images of six colors with a little noise: any crop of one shows its class."""
    random = np.random.default_rng(seed)

    def part(count):
        labels = np.arange(count) % 6
        pixels = COLORS[labels][:, None, None] + random.normal(0, 12, (count, 12, 12, 3))
        labels = random.permutation(labels) if shuffled else labels
        return np.clip(pixels, 0, 255).astype(np.uint8), labels

    (x, y), (xt, yt) = part(train), part(test)
    np.savez(path, x_train=x, y_train=y, x_test=xt, y_test=yt)
    return str(path)


def colors_only():
    """The mean color of an image, and its square: classes are apart, and no crop changes it."""

    class MeanColor(nn.Module):
        def forward(self, images):
            mean = images.mean((2, 3))
            return torch.cat([mean, mean.square()], 1)

    return MeanColor()


def weights_of(backbone, home):
    return Weights("made", backbone, "made in a test", 12, home)


@pytest.fixture
def subject(tmp_path):
    def make(backbone=None, **options):
        data = arrays(tmp_path / "colors.npz", **options)
        return EvaluationContext(weights_of(backbone or colors_only(), tmp_path / "home"), data)

    return make


@pytest.fixture
def resnet():
    torch.manual_seed(0)
    backbone, _ = build_backbone(config.Encoder(name="resnet10", stem="small", width=0.125))
    return backbone


ALL = {
    "knn": (knn, {"ks": [1, 20]}),
    "weighted knn": (knn, {"ks": [1, 20], "temperature": 0.1}),
    "linear": (linear, {"recipe": SHORT}),
    "cached linear": (linear, {"recipe": SHORT, "cached": True}),
    "swept linear": (linear, {"recipe": SHORT, "cached": True, "sweep": (0.1, 0.3)}),
    "semi": (semi, {"recipe": SHORT, "fractions": [0.5], "cached": True}),
    "augmented semi": (semi, {"recipe": SHORT, "fractions": [0.5], "seeds": 2}),
    "cluster": (cluster, {}),
}


@pytest.mark.parametrize("name", ALL)
def test_separable_classes_are_all_told_apart(subject, name):
    protocol, options = ALL[name]
    figures = protocol.evaluate(subject(), **options).figures
    shares = {
        key: value
        for key, value in figures.items()
        if not any(word in key for word in ("distance", "empty", "deviation"))
    }
    assert shares and all(value == pytest.approx(100) for value in shares.values()), figures
    assert all(figures[key] == 0 for key in figures if "deviation" in key or "empty" in key)


@pytest.mark.parametrize("name", ALL)
def test_shuffled_labels_are_only_guessed(subject, name):
    protocol, options = ALL[name]
    figures = protocol.evaluate(subject(shuffled=True), **options).figures
    guessed = {
        k: v for k, v in figures.items() if k.endswith(("NN", "top-1", "Hungarian accuracy"))
    }
    assert guessed and all(8 < value < 29 for value in guessed.values()), figures
    for key, most in {"NMI": 6, "ARI": 3}.items():
        assert abs(figures.get(key, 0)) < most


def test_every_protocol_is_tested_here():
    others = {"transfer", "detect"}  # have tests of their own: theirs are other images
    tested = {protocol.__name__.rpartition(".")[2] for protocol, _ in ALL.values()}
    assert tested == set(NAMES) - others


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_changes_no_bit_of_the_model(subject, resnet, training):
    resnet.train(training)
    with torch.no_grad():
        for buffer in resnet.buffers():
            buffer.add_(1 if buffer.dtype == torch.int64 else 0.25)
    judged, before = subject(resnet, train=120, test=60), fingerprint(resnet)
    tiny = replace(SHORT, epochs=2)
    for protocol, options in ALL.values():
        protocol.evaluate(
            judged, **{**options, **({"recipe": tiny} if "recipe" in options else {})}
        )
    semi.evaluate(judged, recipe=tiny, fractions=[0.5], fine_tune=True)
    assert fingerprint(resnet) == before
    assert all(module.training == training for module in resnet.modules())
    assert all(p.grad is None and p.requires_grad for p in resnet.parameters())


# The layer


def naive_layer(features, labels, test, truth, recipe, seed, classes):
    """The paper's recipe written a second time, plainly: accuracy in percent after each epoch."""
    unit = features / features.norm(dim=1, keepdim=True)
    variance, mean = torch.var_mean(unit, dim=0)

    def ready(rows):
        rows = rows / rows.norm(dim=1, keepdim=True)
        return (rows - mean) / (variance + 1e-5).sqrt()

    torch.manual_seed(rng.derive_seed(seed, 0, rng.INITIAL))
    layer = nn.Linear(features.shape[1], classes)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    velocity = [torch.zeros_like(weight), torch.zeros_like(bias)]
    reached = []
    for epoch in range(recipe.epochs):
        lr = recipe.lr * 0.1 ** sum(epoch >= m for m in recipe.milestones)
        for chosen in rng.permutation(seed, epoch, len(labels)).split(recipe.batch_size):
            x, y = ready(features[chosen]), labels[chosen]
            wrong = (x @ weight.T + bias).softmax(1) - F.one_hot(y, classes)
            gradients = [wrong.T @ x / len(y), wrong.mean(0)]
            for value, gradient, moving in zip((weight, bias), gradients, velocity, strict=True):
                moving.mul_(0.9).add_(gradient + 1e-4 * value)
                value.sub_(lr * moving)
        right = (ready(test) @ weight.T + bias).argmax(1) == truth
        reached.append(100 * right.double().mean().item())
    return reached


def noisy(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 7
    return torch.eye(7, 20)[labels] + 0.6 * torch.randn(count, 20, generator=generator), labels


def test_the_layer_follows_the_papers_recipe():
    (features, labels), (test, truth) = noisy(500, 0), noisy(1000, 1)
    recipe = ProbeSettings(batch_size=64, epochs=12, milestones=(5, 9))
    curves = train_layers(
        cached_stream(features, labels, recipe=recipe, seed=3, device=CPU),
        Standardize(features),
        test,
        truth,
        classes=7,
        recipe=recipe,
        lrs=[0.01],
        seed=3,
        device=CPU,
        steps=8,
    )
    expected = naive_layer(features, labels, test, truth, recipe, 3, 7)
    assert [row[0] for row in curves.top1] == pytest.approx(expected, abs=0.11)  # one in 1000
    assert 40 < expected[-1] < 95 and len(set(expected)) > 3


def test_the_defaults_are_the_papers():
    recipe = ProbeSettings()
    assert (recipe.lr, recipe.momentum, recipe.weight_decay) == (0.01, 0.9, 1e-4)
    assert (recipe.batch_size, recipe.epochs) == (256, 40)
    factors = [recipe.factor(epoch) for epoch in range(40)]
    assert factors == pytest.approx([1] * 15 + [0.1] * 15 + [0.01] * 10)
    assert linear_probe.VIEWS.crop_area == (0.08, 1.0) and linear_probe.VIEWS.flip == 0.5


def test_layers_side_by_side_are_the_same_as_alone():
    (features, labels), (test, truth) = noisy(300, 0), noisy(300, 1)
    recipe = ProbeSettings(batch_size=64, epochs=3)

    def run(lrs):
        stream = cached_stream(features, labels, recipe=recipe, seed=0, device=CPU)
        given = {"classes": 7, "recipe": recipe, "lrs": lrs, "seed": 0, "device": CPU, "steps": 5}
        return train_layers(stream, Standardize(features), test, truth, **given)

    both, alone = run([0.003, 0.3]), [run([0.003]), run([0.3])]
    for which in (0, 1):
        assert both.last(which) == alone[which].last()
    assert alone[0].last() != alone[1].last()


@pytest.mark.parametrize("chunk", [7, 1000])
def test_standardized_features_have_zero_mean_and_unit_variance(chunk):
    features = 3 + torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    ready = Standardize(features, chunk=chunk)(features)
    variance = F.normalize(features, dim=1).var(0)
    torch.testing.assert_close(ready.mean(0), torch.zeros(5), atol=1e-4, rtol=0)
    torch.testing.assert_close(ready.var(0), variance / (variance + 1e-5), atol=1e-4, rtol=1e-4)


def test_each_epoch_shows_every_image_once_in_a_new_view(subject, resnet):
    judged, recipe = subject(resnet, train=100, test=30), replace(SHORT, batch_size=32, epochs=2)
    made = list(
        augmented_stream(
            resnet,
            judged.train.source,
            recipe=recipe,
            image_size=12,
            seed=5,
            device=CPU,
            precision=torch.float32,
            workers=0,
        )
    )
    assert [(epoch, len(labels)) for epoch, _, labels in made] == [
        (epoch, size) for epoch in range(2) for size in (32, 32, 32, 4)
    ]
    orders = [rng.permutation(5, epoch, 100) for epoch in range(2)]
    labels = torch.cat([labels for _, _, labels in made])
    assert torch.equal(labels, judged.train.labels[torch.cat(orders)])
    views = TwoViews(linear_probe.VIEWS, 5, 12)
    ids = orders[1][:32]
    view, same = views.finish(judged.train.source.read_batch(ids), 1, ids)
    assert torch.equal(view, same)
    with torch.no_grad():
        expected = resnet.eval()(view.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(made[4][1], expected, atol=1e-5, rtol=1e-4)


def test_linear_reports_the_last_epoch_and_names_the_best(subject, monkeypatch):
    curves = linear_probe.Curves([[50.0], [70.0], [60.0]], [[90.0], [91.0], [92.0]])
    monkeypatch.setattr(linear, "fit_layers", lambda *_, **__: curves)
    result = linear.evaluate(subject())
    assert result.figures == {"top-1": 60, "top-5": 92, "best top-1, chosen on test": 70}
    assert result.settings["best epoch"] == 2


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "linear"),
        ({"cached": True}, "linear-cached"),
        ({"cached": True, "sweep": (0.1,)}, "linear-cached-swept"),
        ({"recipe": ProbeSettings.of(10, 0.01)}, "linear-10-epochs"),
        ({"recipe": ProbeSettings.of(40, 0.3), "cached": True}, "linear-cached-lr-0.3"),
    ],
)
def test_only_the_papers_recipe_is_called_linear(subject, monkeypatch, given, name):
    curves = linear_probe.Curves([[50.0]], [[90.0]])
    monkeypatch.setattr(linear, "fit_layers", lambda *_, **__: curves)
    result = linear.evaluate(subject(train=60, test=30), **given)
    assert result.name == name
    views = "none: features extracted once" if "cached" in name else "crop 0.08-1, flip"
    assert result.settings["views"] == views


@pytest.mark.parametrize(
    ("epochs", "expected"), [(1, [1]), (2, [1, 0.1]), (4, [1, 1, 0.1, 0.01]), (3, [1, 0.1, 0.01])]
)
def test_short_recipes_begin_at_the_rate_that_was_asked_for(epochs, expected):
    recipe = ProbeSettings.of(epochs, 0.5)
    assert [recipe.factor(epoch) for epoch in range(epochs)] == pytest.approx(expected)
    assert ProbeSettings.of(40, 0.01) == ProbeSettings()


@pytest.mark.parametrize("given", [(0, 0.1), (3, 0.0), (3, math.nan)])
def test_senseless_recipes_are_refused(given):
    with pytest.raises(ValueError, match=r"--epochs .* --lr"):
        ProbeSettings.of(*given)


def test_the_sweep_never_looks_at_the_test_images(tmp_path):
    chosen = []
    for shuffle in (False, True):
        path = tmp_path / f"{shuffle}.npz"
        arrays(path)
        held = dict(np.load(path))
        if shuffle:
            held["y_test"] = np.random.default_rng(1).permutation(held["y_test"])
            held["x_test"] = held["x_test"][::-1].copy()
        np.savez(path, **held)
        judged = EvaluationContext(weights_of(colors_only(), tmp_path / "home"), str(path))
        result = linear.evaluate(judged, recipe=SHORT, cached=True, sweep=(1e-5, 0.03, 0.1))
        chosen.append((result.settings["lr"], result.settings["sweep"]))
    assert chosen[0] == chosen[1]
    assert chosen[0][0] > 1e-5
    assert chosen[0][1]["chosen on"] == "60 training images"


def test_a_killed_linear_evaluation_goes_on_to_the_same_figures(subject, resnet, monkeypatch):
    judged = subject(resnet, train=120, test=60, shuffled=True)
    whole = linear.evaluate(judged, recipe=SHORT)
    assert len(set(whole.settings["top-1 by epoch"])) > 2
    finish, calls = TwoViews.finish, []

    def dies(self, images, epoch, ids):
        calls.append(epoch)
        if epoch == 4:
            raise KeyboardInterrupt
        return finish(self, images, epoch, ids)

    monkeypatch.setattr(TwoViews, "finish", dies)
    with pytest.raises(KeyboardInterrupt):
        linear.evaluate(judged, recipe=SHORT)
    assert list((judged.home / "features").glob("layers-*.pt"))
    calls.clear()

    def counts(self, images, epoch, ids):
        calls.append(epoch)
        return finish(self, images, epoch, ids)

    monkeypatch.setattr(TwoViews, "finish", counts)
    assert linear.evaluate(judged, recipe=SHORT).settings == whole.settings
    assert min(calls) == 4
    assert not list((judged.home / "features").glob("layers-*.pt"))


# Few labels


def test_cuts_are_drawn_by_fraction_and_count(subject):
    result = semi.evaluate(subject(), recipe=SHORT, fractions=[0.02], counts=[60], cached=True)
    assert result.settings["cuts"] == {"2%": 12, "60": 60}
    assert set(result.figures) == {"2% top-1", "2% top-5", "60 top-1", "60 top-5"}


def test_seeds_give_a_mean_and_a_deviation(subject):
    result = semi.evaluate(
        subject(shuffled=True), recipe=SHORT, fractions=[0.1], seeds=3, cached=True
    )
    found = result.settings["by seed"]["10% top-1"]
    assert len(set(found)) > 1
    assert result.figures["10% top-1"] == pytest.approx(np.mean(found))
    assert result.figures["10% top-1 deviation"] == pytest.approx(np.std(found, ddof=1), rel=1e-5)


def test_each_seed_draws_a_cut_of_its_own(subject, monkeypatch):
    judged, drawn = subject(), []

    def fit(_, part, *__, seed, **___):
        drawn.append((seed, tuple(part.source.indices.tolist())))
        return linear_probe.Curves([[50.0]], [[90.0]])

    monkeypatch.setattr(semi, "fit_layers", fit)
    semi.evaluate(judged, fractions=[0.1], seeds=3)
    assert [seed for seed, _ in drawn] == [0, 1, 2]
    assert len({cut for _, cut in drawn}) == 3 and {len(cut) for _, cut in drawn} == {60}


def test_a_seed_draws_the_same_cut_whatever_the_others_are(subject):
    judged, given = subject(shuffled=True), {"recipe": SHORT, "fractions": [0.1], "cached": True}
    three = semi.evaluate(judged, seeds=3, **given).settings["by seed"]["10% top-1"]
    assert semi.evaluate(judged, seeds=1, **given).settings["by seed"]["10% top-1"] == three[:1]


@pytest.fixture
def photos(tmp_path, make_images):
    counts = {f"{split}/{name}": 8 for split in ("train", "val") for name in "ab"}
    return make_images(tmp_path / "photos", counts, size=(16, 16))


def test_a_list_names_the_labeled_images(photos, tmp_path):
    (tmp_path / "few.txt").write_text("a/000.jpg\nb/001.jpg\n\nb/002.jpg\n")
    judged = EvaluationContext(weights_of(colors_only(), tmp_path / "home"), str(photos))
    result = semi.evaluate(
        judged, lists=[tmp_path / "few.txt"], recipe=replace(SHORT, epochs=1), cached=True
    )
    assert result.settings["cuts"] == {"few": 3} and "few top-1" in result.figures
    for text, words in (("a/000.jpg\nc/9.jpg", r"1 of its 2 names .* c/9.jpg"), ("", "0 names")):
        (tmp_path / "few.txt").write_text(text)
        with pytest.raises(ValueError, match=words):
            semi.evaluate(judged, lists=[tmp_path / "few.txt"])
    with pytest.raises(ValueError, match=r"gone\.txt: not a readable list"):
        semi.evaluate(judged, lists=[tmp_path / "gone.txt"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fractions": [0.0]}, "got 0, need above 0"),
        ({"fractions": [1.5]}, "got 1.5"),
        ({"fractions": [0.001]}, "at least one a class"),
        ({"counts": [10_000], "fractions": []}, "at most all"),
        ({"seeds": 0}, "need 1 or more"),
    ],
)
def test_senseless_cuts_are_refused(subject, given, words):
    with pytest.raises(ValueError, match=words):
        semi.evaluate(subject(), cached=True, **given)


def test_fine_tuning_trains_the_network_too(subject):
    """Behind features that show one color only, labels can still teach the layer before them."""
    torch.manual_seed(0)
    mix = nn.Conv2d(3, 6, 1)
    with torch.no_grad():
        mix.weight.copy_(torch.tensor([1.0, 0, 0]).expand(6, 3)[..., None, None])
    backbone = nn.Sequential(mix, nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    judged = subject(backbone, train=240, test=120)
    given = {"fractions": [1.0], "recipe": ProbeSettings(lr=0.3, batch_size=32, epochs=12)}
    frozen = semi.evaluate(judged, cached=True, **given).figures["100% top-1"]
    tuned = semi.evaluate(judged, fine_tune=True, **given)
    assert (
        tuned.name == "semi-fine-tuned-12-epochs-lr-0.3" and tuned.settings["way"] == "fine-tuned"
    )
    assert tuned.figures["100% top-1"] > frozen + 20


# Clusters


def test_clusters_are_compared_with_labels_as_scikit_learn_does():
    random = np.random.default_rng(0)
    labels, found = random.integers(0, 5, 300), random.integers(0, 7, 300)
    found[:150] = labels[:150]
    figures = cluster.agreement(torch.from_numpy(found), torch.from_numpy(labels))
    assert figures["NMI"] == pytest.approx(100 * normalized_mutual_info_score(labels, found))
    assert figures["ARI"] == pytest.approx(100 * adjusted_rand_score(labels, found))


def test_the_best_matching_is_found_by_trying_all():
    import itertools

    random = np.random.default_rng(1)
    labels, found = random.integers(0, 4, 60), random.integers(0, 4, 60)
    best = max(
        np.mean(np.array(renamed)[found] == labels) for renamed in itertools.permutations(range(4))
    )
    figures = cluster.agreement(torch.from_numpy(found), torch.from_numpy(labels))
    assert figures["Hungarian accuracy"] == pytest.approx(100 * best)


def test_the_assignment_is_kept_for_the_figure(subject):
    judged = subject()
    path = judged.save(cluster.evaluate(judged))
    kept, names = (np.load(path.with_suffix(".npz"))[key] for key in ("assigned", "image"))
    assert kept.shape == (600,) and names.tolist() == [f"#{i}" for i in range(600)]
    for label in range(6):
        assert len(set(kept[judged.train.labels.numpy() == label])) == 1


def test_unlabeled_images_can_be_clustered_and_nothing_else(tmp_path, make_images):
    flat = make_images(tmp_path / "flat", {"": 12}, size=(16, 16))
    judged = EvaluationContext(weights_of(colors_only(), tmp_path / "home"), str(flat))
    result = cluster.evaluate(judged, clusters=3)
    assert set(result.figures) == {"mean squared distance", "empty clusters"}
    assert judged.card(result)["sizes"] == {"train": 12}
    with pytest.raises(ValueError, match="--clusters N"):
        cluster.evaluate(judged)
    with pytest.raises(ValueError, match="no labels, so nothing to judge by"):
        knn.evaluate(judged)


# The subject


def titles(source):
    return [source.title(index) for index in range(len(source))]


def test_a_source_with_one_split_gets_a_stratified_hold_out_and_says_so(tmp_path, make_images):
    whole = make_images(tmp_path / "all", {"a": 60, "b": 40}, size=(14, 14))
    weights = weights_of(colors_only(), tmp_path / "home")
    judged = [EvaluationContext(weights, str(whole), seed=seed) for seed in (0, 1)]
    assert judged[0].split == "10% held out, stratified, seed 0"
    held = titles(judged[0].sources[1])
    assert sorted(title[0] for title in held) == ["a"] * 6 + ["b"] * 4
    assert titles(judged[1].sources[1]) == held  # the seed is that of layers, cuts and clusters
    assert [one.name for one in judged] == ["all", "all-seed1"]


def run_on(source, seed, home, **settings):
    """Weights as those of a run that trained on a source."""
    chosen = {"data.source": str(source), "train.seed": seed, **settings}
    config_ = config.Config().with_overrides(chosen)
    return replace(weights_of(colors_only(), home), config=config_)


@pytest.mark.parametrize("asked", [None, 0, 5])
def test_a_run_is_judged_on_what_it_held_out_whatever_the_seed(tmp_path, make_images, asked):
    whole = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    for held_out in ("auto", 0.3):
        weights = run_on(whole, 3, tmp_path / "home", **{"data.validation": held_out})
        _, held = train_and_validation(str(whole), held_out, seed=3)
        assert titles(EvaluationContext(weights, seed=asked).sources[1]) == titles(held)


def test_partial_labels_do_not_move_what_a_run_held_out(tmp_path, make_images):
    whole = make_images(tmp_path / "all", {"": 120}, size=(14, 14))
    rows = "".join(f"{i:03d}.jpg,{'ab'[i % 2]}\n" for i in range(0, 120, 3))
    (tmp_path / "labels.csv").write_text("file,label\n" + rows)
    weights = run_on(whole, 0, tmp_path / "home", **{"data.validation": 0.3})
    _, held = train_and_validation(str(whole), 0.3, seed=0)
    with pytest.warns(UserWarning, match="40 of them among the 120"):
        judged = EvaluationContext(weights, labels=tmp_path / "labels.csv")
    assert 0 < len(judged.sources[1]) < len(held)
    assert set(titles(judged.sources[1])) < set(titles(held))


def test_a_run_that_held_nothing_out_has_seen_the_images_and_it_is_said(tmp_path, make_images):
    whole = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    weights = run_on(whole, 0, tmp_path / "home", **{"data.validation": "none"})
    assert EvaluationContext(weights).split.endswith("the run has seen them unlabeled")


def test_runs_that_held_out_others_are_warned_of_side_by_side(tmp_path, make_images):
    whole = make_images(tmp_path / "all", {"a": 60, "b": 60}, size=(14, 14))
    first = EvaluationContext(run_on(whole, 0, tmp_path / "home"))
    with pytest.warns(UserWarning, match="this run held out others"):
        second = EvaluationContext(run_on(whole, 1, tmp_path / "home"), like=first)
    assert titles(second.sources[1]) == titles(first.sources[1])
    assert "compared" in second.name and "compared" not in first.name
    third = EvaluationContext(run_on(whole, 0, tmp_path / "home"), like=first)
    assert third.split == first.split and third.name == first.name == ""


def test_an_unlabeled_split_cannot_be_judged_on(tmp_path, make_images):
    whole = make_images(
        tmp_path / "all", {"train/a": 3, "train/b": 3, "val/a": 2, "val/b": 2, "test": 2}
    )
    with pytest.raises(ValueError, match="no labeled split 'test'; it has val"):
        EvaluationContext(weights_of(colors_only(), tmp_path), str(whole), split="test")


def test_the_split_can_be_chosen(tmp_path, make_images):
    counts = {
        f"{split}/{c}": n for split, n in (("train", 6), ("val", 2), ("test", 3)) for c in "ab"
    }
    whole = str(make_images(tmp_path / "all", counts, size=(14, 14)))
    weights = weights_of(colors_only(), tmp_path / "home")
    assert len(EvaluationContext(weights, whole).test.source) == 4
    assert len(EvaluationContext(weights, whole, split="test").test.source) == 6
    with pytest.raises(ValueError, match="no labeled split 'tset'; it has val, test"):
        EvaluationContext(weights, whole, split="tset")


@pytest.mark.filterwarnings("ignore:.*cannot be read")
def test_unreadable_images_are_left_out_and_counted_in_the_card(photos, tmp_path):
    (photos / "train" / "a" / "003.jpg").write_bytes(b"no")
    (photos / "val" / "b" / "001.jpg").write_bytes(b"")
    judged = EvaluationContext(weights_of(colors_only(), tmp_path / "home"), str(photos))
    card = judged.card(knn.evaluate(judged, ks=[1]))
    assert card["sizes"] == {"train": 15, "test": 15} and card["unreadable"] == 2
    assert "a/003.jpg" not in [judged.train.source.title(i) for i in range(15)]
    assert len(judged.train.features) == len(judged.train.labels) == 15
    assert judged.train.labels.bincount().tolist() == [7, 8]


def test_a_result_of_other_images_does_not_take_the_place_of_the_runs_own(subject, tmp_path):
    judged = subject()
    path = judged.save(Result("knn", {"1-NN": 1.0}, {}))
    assert path == tmp_path / "home" / "results" / "knn-colors.json"
    held = json.loads(path.read_text())
    assert held["figures"] == {"1-NN": 1.0}
    card = held["card"]
    assert {"protocol", "settings", "data", "split", "sizes", "weights", "judged", "seed",
            "image_size", "precision", "versions", "command", "date"} <= set(card)  # fmt: skip


def test_weights_without_images_are_asked_for_them(tmp_path):
    with pytest.raises(ValueError, match="--data SOURCE"):
        EvaluationContext(weights_of(colors_only(), tmp_path))


@pytest.mark.parametrize("side", [32, 48])
def test_raw_pixels_are_centered_on_the_training_images(tmp_path, side):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (90, side, side, 3), dtype=np.uint8) // 2 + 90
    labels = np.arange(90) % 6
    np.savez(tmp_path / "x.npz", x_train=pixels[:60], y_train=labels[:60], x_test=pixels[60:],
             y_test=labels[60:])  # fmt: skip
    judged = EvaluationContext(
        load_weights("pixels"), str(tmp_path / "x.npz"), home=tmp_path / "px"
    )
    assert judged.train.features.shape == (60, 3072)
    torch.testing.assert_close(judged.train.features.mean(0), torch.zeros(3072), atol=1e-5, rtol=0)
    assert judged.test.features.mean(0).abs().max() > 1e-3
    recipe = replace(SHORT, epochs=1)
    for cached in (False, True):  # views are centered like the features
        linear.evaluate(judged, recipe=recipe, cached=cached)
    stream = augmented_stream(
        judged.backbone, judged.train.source, recipe=recipe, image_size=32, seed=0, device=CPU,
        precision=torch.float32, workers=0,
    )  # fmt: skip
    views = torch.cat([features for _, features, _ in stream])
    assert views.mean().abs() < 0.05 * views.abs().mean()


def test_other_strides_are_other_weights(resnet):
    other, _ = build_backbone(config.Encoder(name="resnet10", stem="small-stride2", width=0.125))
    other.load_state_dict(resnet.state_dict())
    assert fingerprint(other) != fingerprint(resnet)


def test_a_stopped_layer_is_not_continued_with_another_preparation(photos, tmp_path, monkeypatch):
    finish, epochs = TwoViews.finish, []

    def dies(self, images, epoch, ids):
        epochs.append(epoch)
        if epoch == 2 and len(epochs) < 20:
            raise KeyboardInterrupt
        return finish(self, images, epoch, ids)

    monkeypatch.setattr(TwoViews, "finish", dies)
    weights = weights_of(colors_only(), tmp_path / "home")
    with pytest.raises(KeyboardInterrupt):
        linear.evaluate(EvaluationContext(weights, str(photos), resize=14), recipe=SHORT)
    epochs[:] = [9] * 20
    linear.evaluate(EvaluationContext(weights, str(photos), resize=13), recipe=SHORT)
    assert epochs[20] == 0
