"""The supervised baseline against a cross entropy written in loops."""

import copy
import math

import pytest
import torch
from torch import nn

from meanshift.config.recipes import recipe
from meanshift.methods import BuildContext
from meanshift.methods.supervised import Supervised
from meanshift.models.encoder import Encoder
from meanshift.runtime import distributed
from meanshift.training.session import build_method
from tests.support.forked import in_processes

CLASSES, DIM = 3, 5
LABELS = torch.tensor([0, 2, -1, 1, 1, -1])


def method(seed=0):
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, DIM))
    return Supervised(encoder, DIM, classes=CLASSES).double()


def view(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 7, generator=generator, dtype=torch.float64)


def naive_loss(network, classifier, images, labels):
    total, count = 0, 0
    for image, label in zip(images, labels.tolist(), strict=True):
        if label < 0:
            continue
        scores = classifier(network(image[None]))[0]
        total = total - torch.log(scores[label].exp() / sum(score.exp() for score in scores))
        count += 1
    return total / count


def test_three_steps_are_those_of_the_naive_reference():
    ours = method()
    network, classifier = copy.deepcopy(ours.online), copy.deepcopy(ours.classifier)
    theirs = [*network.parameters(), *classifier.parameters()]
    optimizers = [torch.optim.SGD(p, 0.1, momentum=0.9) for p in (ours.parameters(), theirs)]
    for step in range(3):
        output = ours(view(step), labels=LABELS)
        expected = naive_loss(network, classifier, view(step), LABELS)
        for optimizer, loss in zip(optimizers, (output.loss, expected), strict=True):
            optimizer.zero_grad()
            loss.backward()
        torch.testing.assert_close(output.loss, expected, atol=1e-12, rtol=0)
        for one, other in zip(ours.parameters(), theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=1e-12, rtol=0)
        for optimizer in optimizers:
            optimizer.step()


def test_the_accuracy_is_that_of_the_labeled_images():
    ours = method()
    output = ours(view(), labels=LABELS)
    predicted = ours.classifier(ours.online(view())).argmax(1)
    right = sum(int(p == q) for p, q in zip(predicted, LABELS, strict=True) if q >= 0)
    accuracy, weight = output.metrics["accuracy"]
    assert float(accuracy) == pytest.approx(right / 4) and int(weight) == 4
    torch.testing.assert_close(output.embeddings.norm(dim=1), torch.ones(6, dtype=torch.float64))
    assert not output.embeddings.requires_grad


def test_a_step_along_the_gradient_lowers_the_loss_and_moves_everything():
    ours = method()
    before = ours(view(), labels=LABELS).loss
    before.backward()
    for parameter in ours.parameters():
        assert parameter.grad.abs().max() > 1e-4
        parameter.data -= 0.01 * parameter.grad
    assert ours(view(), labels=LABELS).loss < before


def test_a_batch_without_labels_changes_nothing():
    ours = method()
    output = ours(view(), labels=torch.full((6,), -1))
    output.loss.backward()
    assert output.loss == 0
    assert all(not parameter.grad.any() for parameter in ours.parameters())
    with pytest.raises(ValueError, match="pass labels"):
        ours(view())
    assert ours.eval()(view()).loss == 0  # as the warm-up of several processes needs it


def test_two_processes_give_the_gradient_of_the_whole_batch():
    def part(rank_of):
        chosen = rank_of[distributed.rank()] if distributed.world_size() > 1 else slice(None)
        ours = method()
        output = ours(view()[chosen], labels=LABELS[chosen])
        # what the loop and DDP do: weighted by the images of a process, then added
        (output.loss * len(output.embeddings) / 6).backward()
        weighted = output.loss.detach() * len(output.embeddings) / 6
        return weighted, [parameter.grad for parameter in ours.parameters()]

    ((loss, gradients),) = in_processes(1, part, None)
    parts = in_processes(2, part, [slice(0, 2), slice(2, 6)])
    torch.testing.assert_close(sum(part[0] for part in parts), loss, atol=1e-12, rtol=0)
    for whole, *pieces in zip(gradients, *(part[1] for part in parts), strict=True):
        torch.testing.assert_close(sum(pieces), whole, atol=1e-12, rtol=0)


def test_settings():
    config = recipe("cifar10-r18").with_overrides({"method.name": "supervised"})
    assert (config.optim.lr, config.optim.weight_decay, config.views.blur) == (0.1, 5e-4, 0.0)
    large = recipe("imagenet-r50").with_overrides({"method.name": "supervised"})
    assert (large.optim.lr, large.optim.weight_decay, large.views.blur) == (0.1, 1e-4, 0.5)
    (spec,) = Supervised.views(config.method, config.views)
    assert spec.has_color
    with pytest.raises(ValueError, match=r"at least 2 classes, got 0.*subfolder"):
        build_method(config)


def test_it_is_built_with_as_many_classes_as_the_images_have():
    config = recipe("cifar10-r18").with_overrides(
        {"method.name": "supervised", "encoder.width": 0.125}
    )
    context = BuildContext(
        encoder=lambda **heads: Encoder(config.encoder, image_size=32, **heads), classes=4
    )
    built = Supervised.build(config.method, context)
    output = built(torch.randn(4, 3, 32, 32), labels=torch.tensor([0, 1, 2, 3]))
    assert built.classifier.out_features == 4
    assert 0 < float(output.loss.detach()) < 4 * math.log(4)
