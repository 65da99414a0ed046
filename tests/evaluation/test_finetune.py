"""Fine-tuning: it trains the network, chooses on labeled images only, and repeats its bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from meanshift.evaluation import finetune, semi
from meanshift.evaluation.context import EvaluationContext
from meanshift.evaluation.finetune import FinetuneSettings
from meanshift.evaluation.linear_probe import Curves, ProbeSettings
from meanshift.evaluation.result import result_name
from meanshift.models.weights import fingerprint
from tests.support.colors import make_weights

SHORT = FinetuneSettings(backbone_lrs=(0.01,), epochs=2)


def test_the_network_is_trained_too(make_context):
    """Behind features that show one color only, labels can still train the layer before them."""
    torch.manual_seed(0)
    mix = nn.Conv2d(3, 6, 1)
    with torch.no_grad():
        mix.weight.copy_(torch.tensor([1.0, 0, 0]).expand(6, 3)[..., None, None])
    backbone = nn.Sequential(mix, nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    context = make_context(backbone, train=240, test=120)
    probe = ProbeSettings(lr=0.3, batch_size=32, epochs=12)
    frozen = semi.evaluate(context, cached=True, fractions=[1.0], settings=probe)
    tuning = FinetuneSettings(lr=0.3, backbone_lrs=(0.3,), batch_size=32, epochs=12)
    tuned = finetune.evaluate(context, fractions=[1.0], settings=tuning)
    assert tuned.metrics["100% top-1"] > frozen.metrics["100% top-1"] + 20


def test_the_same_seed_gives_the_same_bits(make_context, resnet):
    context = make_context(resnet, train=60, test=300, shuffled=True)
    state = torch.get_rng_state()
    first, again = (finetune.evaluate(context, counts=[12], settings=SHORT) for _ in range(2))
    assert first.metrics == again.metrics and torch.equal(torch.get_rng_state(), state)
    several = finetune.evaluate(context, counts=[12], settings=SHORT, seeds=3)
    values = several.settings["by seed"]["12 top-1"]
    assert values[0] == first.metrics["12 top-1"] and len(set(values)) > 1
    assert several.metrics["12 top-1 std"] == pytest.approx(np.std(values, ddof=1), rel=1e-5)


def test_the_subsets_are_those_of_semi(make_context, monkeypatch):
    drawn = {}

    def watch(protocol, function, output):
        def watched(_, train, *__, **___):
            drawn.setdefault(protocol, []).append(train.source.indices.tolist())
            return output

        monkeypatch.setattr(protocol, function, watched)

    watch(finetune, "_finetune", (50.0, 90.0))
    watch(semi, "fit_layers", Curves([[50.0]], [[90.0]]))
    context = make_context()
    for protocol in (finetune, semi):
        options = {"settings": SHORT} if protocol is finetune else {}
        protocol.evaluate(context, fractions=[0.02, 0.1], counts=[30], seeds=2, **options)
    assert drawn[finetune] == drawn[semi] and len(drawn[semi]) == 6


def test_the_learning_rate_is_chosen_on_labeled_images(make_context, monkeypatch):
    calls = []
    accuracies = {0.1: 40.0, 0.2: 60.0, 0.4: 60.0}

    def train(_, train, test, __, lr, *___):
        calls.append((train.source, test.source, lr))
        return accuracies[lr], 100.0

    monkeypatch.setattr(finetune, "_finetune", train)
    context = make_context()
    settings = FinetuneSettings(backbone_lrs=(0.4, 0.1, 0.2))
    result = finetune.evaluate(context, counts=[60], settings=settings)
    *trials, (labeled, test, chosen) = calls
    assert chosen == 0.2 and test is context.test.source and len(labeled) == 60
    assert [lr for *_, lr in trials] == [0.1, 0.2, 0.4]
    for rest, validation, _ in trials:
        assert rest.source is labeled and validation.source is labeled
        assert sorted([*rest.indices.tolist(), *validation.indices.tolist()]) == list(range(60))
        assert validation.labels.bincount().tolist() == [2] * 6
    (entry,) = result.settings["chosen lrs"].values()
    assert entry["top-1 there"] == {"0.1": 40.0, "0.2": 60.0, "0.4": 60.0}
    calls.clear()
    result = finetune.evaluate(context, counts=[20], settings=settings)
    (entry,) = result.settings["chosen lrs"].values()
    assert [lr for *_, lr in calls] == [0.1] and "too few labels" in entry["chosen on"]


def test_groups_that_cannot_be_split_leave_no_choice(make_context, monkeypatch):
    monkeypatch.setattr(finetune, "_finetune", lambda *_: (50.0, 90.0))
    context = make_context()
    context.train.source.groups = context.train.labels  # each class is one group
    result = finetune.evaluate(context, counts=[60])
    (entry,) = result.settings["chosen lrs"].values()
    assert entry["backbone"] == 0.001 and "got 6 groups" in entry["chosen on"]


@pytest.mark.parametrize(("images", "steps"), [(6, 200), (640, 300), (10**6, 2000)])
def test_epochs_that_are_not_set_are_bounded_by_steps(images, steps):
    assert FinetuneSettings().steps(images) == steps
    assert FinetuneSettings(epochs=3, batch_size=4).steps(images) == 3 * (images // 4)


def test_other_settings_have_other_names(make_context, monkeypatch):
    monkeypatch.setattr(finetune, "_finetune", lambda *_: (50.0, 90.0))
    context = make_context()
    others = [
        ({}, "finetune"),
        ({"fractions": [0.01, 0.1, 1.0]}, "finetune"),
        ({"fractions": [0.01, 0.1]}, "finetune-fractions-0.01-0.1"),
        ({"counts": [60], "seeds": 2}, "finetune-counts-60-seeds-2"),
        ({"settings": FinetuneSettings(epochs=3, lr=0.1)}, "finetune-lr-0.1-epochs-3"),
        (
            {"settings": FinetuneSettings(backbone_lrs=(0.1, 0.2), batch_size=8)},
            "finetune-backbone-lrs-0.1-0.2-batch-size-8",
        ),
    ]
    for options, name in others:
        result = finetune.evaluate(context, **options)
        assert result_name(result.name, options=result.options) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"a subset of 0 images out of 20 of 6 classes; need at least one per class"),
        ({"fractions": [2.0]}, "--fractions: got 2, need above 0 and at most 1"),
        ({"seeds": 0}, "--seeds: got 0, need 1 or more"),
        ({"lists": ["one"]}, "finetune one, seed 0: got 1 labeled image, need 2 or more"),
    ],
)
def test_invalid_subsets_are_refused(make_context, tmp_path, options, message):
    context = make_context(train=20, test=12)
    if "lists" in options:
        options = {"lists": [tmp_path / "one.txt"]}
        options["lists"][0].write_text(context.train.source.title(0))
    with pytest.raises(ValueError, match=message):
        finetune.evaluate(context, **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "got --lr 0 and --backbone-lr 0.001 0.01 0.1, need above 0"),
        ({"backbone_lrs": (0.1, -1.0)}, "--backbone-lr 0.1 -1, need above 0"),
        ({"epochs": 0}, "got --epochs 0 and --batch-size 64, need 1 or more and 2"),
        ({"batch_size": 1}, "--batch-size 1, need 1 or more and 2 or more"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FinetuneSettings(**settings)


def test_images_without_labels_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", x_train=np.zeros((20, 12, 12, 3), np.uint8))
    context = EvaluationContext(make_weights(tmp_path / "out"), str(tmp_path / "x.npz"))
    with pytest.raises(ValueError, match="has no labels to evaluate with; give class folders"):
        finetune.evaluate(context)


def test_few_labels_do_not_spoil_batch_norm(make_context, resnet):
    """With six labels the layer still separates the colors, and the weights stay as they were."""
    before = fingerprint(resnet)
    context = make_context(resnet, train=60, test=60)
    settings = replace(SHORT, epochs=60)
    result = finetune.evaluate(context, counts=[6], settings=settings)
    assert result.metrics["6 top-1"] > 90
    assert fingerprint(resnet) == before
