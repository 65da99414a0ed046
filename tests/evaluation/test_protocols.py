"""What all protocols on features share: known answers, and no change of the model."""

import importlib
from dataclasses import replace

import pytest
import torch

from meanshift.evaluation import PROTOCOLS, cluster, finetune, knn, linear_probe, semi
from meanshift.evaluation.finetune import FinetuneSettings
from meanshift.evaluation.linear_probe import ProbeSettings
from meanshift.models.weights import fingerprint

SHORT = ProbeSettings(lr=0.1, batch_size=64, epochs=8, milestones=(3, 6))
TUNING = FinetuneSettings(lr=0.1, backbone_lrs=(0.01, 0.1), epochs=8)

VARIANTS = {
    "knn": (knn, {"ks": [1, 20]}),
    "weighted knn": (knn, {"ks": [1, 20], "temperature": 0.1}),
    "linear": (linear_probe, {"settings": SHORT}),
    "cached linear": (linear_probe, {"settings": SHORT, "cached": True}),
    "swept linear": (linear_probe, {"settings": SHORT, "cached": True, "sweep": (0.1, 0.3)}),
    "semi": (semi, {"settings": SHORT, "fractions": [0.5], "cached": True}),
    "augmented semi": (semi, {"settings": SHORT, "fractions": [0.5], "seeds": 2}),
    "finetune": (finetune, {"settings": TUNING, "fractions": [0.5]}),
    "cluster": (cluster, {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_separable_classes_are_all_recognized(make_context, name):
    protocol, options = VARIANTS[name]
    metrics = protocol.evaluate(make_context(), **options).metrics
    accuracies = {
        key: value
        for key, value in metrics.items()
        if not any(word in key for word in ("distance", "empty", "std"))
    }
    assert accuracies
    assert all(value == pytest.approx(100) for value in accuracies.values()), metrics
    assert all(metrics[key] == 0 for key in metrics if "std" in key or "empty" in key)


@pytest.mark.parametrize("name", VARIANTS)
def test_shuffled_labels_are_only_guessed(make_context, name):
    protocol, options = VARIANTS[name]
    metrics = protocol.evaluate(make_context(shuffled=True), **options).metrics
    accuracies = {
        key: value
        for key, value in metrics.items()
        if key.endswith(("NN", "top-1", "Hungarian accuracy"))
    }
    assert accuracies and all(8 < value < 29 for value in accuracies.values()), metrics
    for key, limit in {"NMI": 6, "ARI": 3}.items():
        assert abs(metrics.get(key, 0)) < limit


def test_every_protocol_on_features_is_tested_here():
    others = {"transfer", "detect", "rank"}  # have tests of their own
    modules = {importlib.import_module(PROTOCOLS[name]) for name in set(PROTOCOLS) - others}
    assert {protocol for protocol, _ in VARIANTS.values()} == modules


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_has_a_module_with_an_evaluate_function(name):
    assert callable(importlib.import_module(PROTOCOLS[name]).evaluate)


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_changes_no_bit_of_the_model(make_context, resnet, training):
    resnet.train(training)
    with torch.no_grad():
        for buffer in resnet.buffers():
            buffer.add_(1 if buffer.dtype == torch.int64 else 0.25)
    context = make_context(resnet, train=120, test=60)
    before = fingerprint(resnet)
    for protocol, options in VARIANTS.values():
        if "settings" in options:
            options = options | {"settings": replace(options["settings"], epochs=2)}
        protocol.evaluate(context, **options)
    assert fingerprint(resnet) == before
    assert all(module.training == training for module in resnet.modules())
    assert all(p.grad is None and p.requires_grad for p in resnet.parameters())
