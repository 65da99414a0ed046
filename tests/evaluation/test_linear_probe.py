"""The linear probe: the paper's settings, the same bits after a kill, no look at test images."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meanshift.evaluation import linear_probe
from meanshift.evaluation.context import EvaluationContext
from meanshift.evaluation.linear_probe import (
    SWEEP,
    Curves,
    ProbeSettings,
    Standardize,
    augmented_stream,
    cached_stream,
    train_layers,
)
from meanshift.evaluation.result import result_name
from meanshift.models.weights import load_weights
from meanshift.runtime import rng
from meanshift.transforms.augment import MultiViewTransform
from tests.support.colors import make_weights, write_colors

CPU = torch.device("cpu")
SHORT = ProbeSettings(lr=0.1, batch_size=64, epochs=8, milestones=(3, 6))


# The layer


def naive_layer(features, labels, test, truth, settings, seed, classes):
    """The paper's recipe written a second time, plainly: accuracy in percent after each epoch."""
    unit = features / features.norm(dim=1, keepdim=True)
    variance, mean = torch.var_mean(unit, dim=0)

    def standardize(rows):
        rows = rows / rows.norm(dim=1, keepdim=True)
        return (rows - mean) / (variance + 1e-5).sqrt()

    torch.manual_seed(rng.derive_seed(seed, 0, rng.INITIAL))
    layer = nn.Linear(features.shape[1], classes)
    weight = layer.weight.detach().clone()
    bias = layer.bias.detach().clone()
    velocity = [torch.zeros_like(weight), torch.zeros_like(bias)]
    accuracies = []
    for epoch in range(settings.epochs):
        lr = settings.lr * 0.1 ** sum(epoch >= m for m in settings.milestones)
        for chosen in rng.permutation(seed, epoch, len(labels)).split(settings.batch_size):
            x, y = standardize(features[chosen]), labels[chosen]
            error = (x @ weight.T + bias).softmax(1) - F.one_hot(y, classes)
            gradients = [error.T @ x / len(y), error.mean(0)]
            for value, gradient, moving in zip((weight, bias), gradients, velocity, strict=True):
                moving.mul_(0.9).add_(gradient + 1e-4 * value)
                value.sub_(lr * moving)
        correct = (standardize(test) @ weight.T + bias).argmax(1) == truth
        accuracies.append(100 * correct.double().mean().item())
    return accuracies


def noisy_classes(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 7
    return torch.eye(7, 20)[labels] + 0.6 * torch.randn(count, 20, generator=generator), labels


def fit(features, labels, test, truth, settings, lrs, seed=0):
    return train_layers(
        cached_stream(features, labels, settings=settings, seed=seed, device=CPU),
        Standardize(features),
        test,
        truth,
        classes=7,
        settings=settings,
        lrs=lrs,
        seed=seed,
        device=CPU,
        steps=-(-len(labels) // settings.batch_size),
    )


def test_the_layer_follows_the_papers_recipe():
    (features, labels), (test, truth) = noisy_classes(500, 0), noisy_classes(1000, 1)
    settings = ProbeSettings(batch_size=64, epochs=12, milestones=(5, 9))
    curves = fit(features, labels, test, truth, settings, [0.01], seed=3)
    expected = naive_layer(features, labels, test, truth, settings, 3, 7)
    assert [row[0] for row in curves.top1] == pytest.approx(expected, abs=0.11)  # one in 1000
    assert 40 < expected[-1] < 95 and len(set(expected)) > 3


def test_the_defaults_are_the_papers():
    settings = ProbeSettings()
    assert (settings.lr, settings.momentum, settings.weight_decay) == (0.01, 0.9, 1e-4)
    assert (settings.batch_size, settings.epochs) == (256, 40)
    factors = [settings.lr_factor(epoch) for epoch in range(40)]
    assert factors == pytest.approx([1] * 15 + [0.1] * 15 + [0.01] * 10)
    assert linear_probe.VIEW.crop_area == (0.08, 1.0) and linear_probe.VIEW.flip == 0.5


def test_layers_side_by_side_are_the_same_as_alone():
    data = (*noisy_classes(300, 0), *noisy_classes(300, 1))
    settings = ProbeSettings(batch_size=64, epochs=3)
    both = fit(*data, settings, [0.003, 0.3])
    alone = [fit(*data, settings, [lr]) for lr in (0.003, 0.3)]
    for which in (0, 1):
        assert both.last(which) == alone[which].last()
    assert alone[0].last() != alone[1].last()


@pytest.mark.parametrize("chunk", [7, 1000])
def test_standardized_features_have_zero_mean_and_unit_variance(chunk):
    features = 3 + torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    standardized = Standardize(features, chunk=chunk)(features)
    variance = F.normalize(features, dim=1).var(0)
    torch.testing.assert_close(standardized.mean(0), torch.zeros(5), atol=1e-4, rtol=0)
    expected = variance / (variance + 1e-5)
    torch.testing.assert_close(standardized.var(0), expected, atol=1e-4, rtol=1e-4)


# The views


def stream_of(context, settings, seed=0):
    return augmented_stream(
        context.backbone,
        context.train.source,
        settings=settings,
        image_size=context.image_size,
        seed=seed,
        device=CPU,
        precision=torch.float32,
        workers=0,
    )


def test_each_epoch_has_every_image_once_in_a_new_view(make_context, resnet):
    context = make_context(resnet, train=100, test=30)
    stream = list(stream_of(context, replace(SHORT, batch_size=32, epochs=2), seed=5))
    assert [(epoch, len(labels)) for epoch, _, labels in stream] == [
        (epoch, size) for epoch in range(2) for size in (32, 32, 32, 4)
    ]
    orders = [rng.permutation(5, epoch, 100) for epoch in range(2)]
    labels = torch.cat([labels for _, _, labels in stream])
    assert torch.equal(labels, context.train.labels[torch.cat(orders)])
    transform = MultiViewTransform((linear_probe.VIEW,), 5, 12)
    ids = orders[1][:32]
    (view,) = transform.finish(context.train.source.read_batch(ids), 1, ids)
    with torch.no_grad():
        expected = resnet.eval()(view.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(stream[4][1], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", [32, 48])
def test_views_of_raw_pixels_are_centered_like_the_features(tmp_path, side):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (90, side, side, 3), dtype=np.uint8) // 2 + 90
    labels = np.arange(90) % 6
    file = tmp_path / "x.npz"
    np.savez(file, x_train=pixels[:60], y_train=labels[:60], x_test=pixels[60:], y_test=labels[60:])
    context = EvaluationContext(load_weights("pixels"), str(file), output_dir=tmp_path / "px")
    assert context.train.features.shape == (60, 3072)
    torch.testing.assert_close(context.train.features.mean(0), torch.zeros(3072), atol=1e-5, rtol=0)
    assert context.test.features.mean(0).abs().max() > 1e-3
    settings = replace(SHORT, epochs=1)
    for cached in (False, True):
        linear_probe.evaluate(context, settings=settings, cached=cached)
    features = torch.cat([features for _, features, _ in stream_of(context, settings)])
    assert features.mean().abs() < 0.05 * features.abs().mean()


# The result


def test_linear_reports_the_last_epoch_and_names_the_best(make_context, monkeypatch):
    curves = Curves([[50.0], [70.0], [60.0]], [[90.0], [91.0], [92.0]])
    monkeypatch.setattr(linear_probe, "fit_layers", lambda *_, **__: curves)
    result = linear_probe.evaluate(make_context())
    assert result.metrics == {"top-1": 60, "top-5": 92, "best top-1, chosen on test": 70}
    assert result.settings["best epoch"] == 2


def test_linear_stores_which_images_were_correct(make_context):
    context = make_context(shuffled=True, train=60, test=60)
    result = linear_probe.evaluate(context, settings=ProbeSettings.scaled(4, 0.01), cached=True)
    correct = result.arrays["correct top-1"]
    assert len(correct) == 60 and 100 * correct.mean() == pytest.approx(result.metrics["top-1"])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "linear"),
        ({"cached": True}, "linear-cached"),
        ({"cached": True, "sweep": SWEEP}, "linear-cached-swept"),
        ({"sweep": (0.1,)}, "linear-swept-sweep-0.1"),
        (
            {"sweep": SWEEP, "settings": ProbeSettings.scaled(10, 0.3)},
            "linear-swept-10-epochs",
        ),
        ({"settings": ProbeSettings.scaled(10, 0.01)}, "linear-10-epochs"),
        ({"settings": ProbeSettings.scaled(40, 0.3), "cached": True}, "linear-cached-lr-0.3"),
    ],
)
def test_only_the_papers_settings_are_called_linear(make_context, monkeypatch, options, name):
    curves = Curves([[50.0] * len(SWEEP)], [[90.0] * len(SWEEP)])
    monkeypatch.setattr(linear_probe, "fit_layers", lambda *_, **__: curves)
    result = linear_probe.evaluate(make_context(train=60, test=30), **options)
    assert result_name(result.name, options=result.options) == name
    views = "none: features extracted once" if "cached" in name else "crop 0.08-1, flip"
    assert result.settings["views"] == views


@pytest.mark.parametrize(
    ("epochs", "expected"), [(1, [1]), (2, [1, 0.1]), (4, [1, 1, 0.1, 0.01]), (3, [1, 0.1, 0.01])]
)
def test_short_schedules_begin_with_the_given_learning_rate(epochs, expected):
    settings = ProbeSettings.scaled(epochs, 0.5)
    assert [settings.lr_factor(epoch) for epoch in range(epochs)] == pytest.approx(expected)
    assert ProbeSettings.scaled(40, 0.01) == ProbeSettings()


@pytest.mark.parametrize("values", [(0, 0.1), (3, 0.0), (3, math.nan)])
def test_invalid_settings_are_refused(values):
    with pytest.raises(ValueError, match=r"--epochs .* --lr"):
        ProbeSettings.scaled(*values)


def test_the_sweep_never_looks_at_the_test_images(tmp_path):
    chosen = []
    for shuffle in (False, True):
        path = tmp_path / f"{shuffle}.npz"
        write_colors(path)
        arrays = dict(np.load(path))
        if shuffle:
            arrays["y_test"] = np.random.default_rng(1).permutation(arrays["y_test"])
            arrays["x_test"] = arrays["x_test"][::-1].copy()
        np.savez(path, **arrays)
        context = EvaluationContext(make_weights(tmp_path / "out"), str(path))
        sweep = (1e-5, 0.03, 0.1)
        result = linear_probe.evaluate(context, settings=SHORT, cached=True, sweep=sweep)
        chosen.append((result.settings["lr"], result.settings["sweep"]))
    assert chosen[0] == chosen[1]
    assert chosen[0][0] > 1e-5
    assert chosen[0][1]["chosen on"] == "60 training images"


# After a kill


def test_a_killed_linear_probe_continues_to_the_same_metrics(make_context, resnet, monkeypatch):
    context = make_context(resnet, train=120, test=60, shuffled=True)
    uninterrupted = linear_probe.evaluate(context, settings=SHORT)
    assert len(set(uninterrupted.settings["top-1 by epoch"])) > 2
    finish = MultiViewTransform.finish
    epochs = []

    def interrupted(self, images, epoch, ids):
        if epoch == 4:
            raise KeyboardInterrupt
        return finish(self, images, epoch, ids)

    def recorded(self, images, epoch, ids):
        epochs.append(epoch)
        return finish(self, images, epoch, ids)

    state_files = (context.output_dir / "features").glob
    monkeypatch.setattr(MultiViewTransform, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        linear_probe.evaluate(context, settings=SHORT)
    assert list(state_files("layers-*.pt"))
    monkeypatch.setattr(MultiViewTransform, "finish", recorded)
    continued = linear_probe.evaluate(context, settings=SHORT)
    assert continued.settings == uninterrupted.settings
    assert continued.metrics == uninterrupted.metrics
    assert min(epochs) == 4
    assert not list(state_files("layers-*.pt"))


def test_a_damaged_state_file_means_a_new_start(make_context, resnet, monkeypatch):
    context = make_context(resnet, train=120, test=60)
    expected = linear_probe.evaluate(context, settings=SHORT).settings
    unlink = linear_probe.Path.unlink
    monkeypatch.setattr(linear_probe.Path, "unlink", lambda *_, **__: None)
    linear_probe.evaluate(context, settings=SHORT)
    monkeypatch.setattr(linear_probe.Path, "unlink", unlink)
    (file,) = (context.output_dir / "features").glob("layers-*.pt")
    file.write_bytes(file.read_bytes()[:500])
    with pytest.warns(UserWarning, match="the layers are trained from the start"):
        assert linear_probe.evaluate(context, settings=SHORT).settings == expected
    assert not file.exists()


def test_a_stopped_layer_is_not_continued_with_another_transform(photos, tmp_path, monkeypatch):
    finish = MultiViewTransform.finish
    epochs = []

    def interrupted(self, images, epoch, ids):
        epochs.append(epoch)
        if epoch == 2 and len(epochs) < 20:
            raise KeyboardInterrupt
        return finish(self, images, epoch, ids)

    monkeypatch.setattr(MultiViewTransform, "finish", interrupted)
    weights = make_weights(tmp_path / "out")
    context = EvaluationContext(weights, str(photos), resize=14)
    with pytest.raises(KeyboardInterrupt):
        linear_probe.evaluate(context, settings=SHORT)
    epochs[:] = [9] * 20
    context = EvaluationContext(weights, str(photos), resize=13)
    linear_probe.evaluate(context, settings=SHORT)
    assert epochs[20] == 0
