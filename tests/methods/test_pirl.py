"""PIRL against NCE in plain loops, as its definition with probabilities reads."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from meanshift.config.recipes import recipe
from meanshift.data.arrays import ArraySource
from meanshift.methods import view_specs
from meanshift.methods.nce import NCELoss
from meanshift.methods.pirl import PIRL
from meanshift.runtime import distributed
from meanshift.training import session as session_module
from meanshift.transforms.augment import MultiViewTransform
from tests.support.forked import in_processes

DIM, FEATURES, BATCH, SAMPLES, NEGATIVES = 5, 4, 6, 15, 7
TEMPERATURE, WEIGHT, MEMORY_MOMENTUM = 0.4, 0.3, 0.4


class TinyEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 2, FEATURES), nn.Tanh())
        self.projector = nn.Linear(FEATURES, DIM)

    def forward(self, images):
        return self.projector(self.backbone(images))


def method(seed=0, **options):
    torch.manual_seed(seed)
    settings = {
        "features": FEATURES,
        "samples": SAMPLES,
        "temperature": TEMPERATURE,
        "negatives": NEGATIVES,
        "patch_weight": WEIGHT,
        "memory_momentum": MEMORY_MOMENTUM,
    }
    return PIRL(TinyEncoder(), DIM, **(settings | options)).double()


def views(step=0):
    generator = torch.Generator().manual_seed(10 + step)
    image = torch.randn(BATCH, 3, 2, 2, generator=generator, dtype=torch.float64)
    return image, torch.randn(BATCH, 9, 3, 2, 2, generator=generator, dtype=torch.float64)


def ids(step=0):
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH]


class Naive:
    def __init__(self, method):
        self.encoder = copy.deepcopy(method.online)
        self.patch = copy.deepcopy(method.patch_projector)
        self.patches = copy.deepcopy(method.patches_projector)
        self.rows = [row.clone() for row in method.memory.rows]
        self.z = None
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def parameters(self):
        return [p for part in (self.encoder, self.patch, self.patches) for p in part.parameters()]

    def embed(self, images, patches):
        of_images, of_patches = [], []
        for image, nine in zip(images, patches, strict=True):
            of_images.append(self.encoder(image[None])[0])
            each = [self.patch(self.encoder.backbone(patch[None]))[0] for patch in nine]
            of_patches.append(self.patches(torch.cat(each)[None])[0])
        return [[row / row.norm() for row in rows] for rows in (of_images, of_patches)]

    def nce(self, embeddings, samples, negatives):
        compared = [
            [((e * self.rows[i]).sum() / TEMPERATURE).exp() for i in (sample, *negatives)]
            for e, sample in zip(embeddings, samples, strict=True)
        ]
        if self.z is None:
            flat = [value.item() for row in compared for value in row]
            self.z = SAMPLES * sum(flat) / len(flat)
        noise = len(negatives) / SAMPLES  # m times the probability of a row under the noise
        loss = 0
        for own, *others in compared:
            loss = loss - (own / self.z / (own / self.z + noise)).log()
            for other in others:
                loss = loss - (noise / (other / self.z + noise)).log()
        return loss / len(compared)

    def step(self, images, patches, samples, negatives):
        of_images, of_patches = self.embed(images, patches)
        parts = [self.nce(rows, samples, negatives) for rows in (of_patches, of_images)]
        loss = WEIGHT * parts[0] + (1 - WEIGHT) * parts[1]
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in self.parameters()]
        self.optimizer.step()
        for sample, embedding in zip(samples, of_images, strict=True):
            mixed = MEMORY_MOMENTUM * self.rows[sample]
            mixed = mixed + (1 - MEMORY_MOMENTUM) * embedding.detach()
            self.rows[sample] = mixed / mixed.norm()
        return loss, gradients


def trained(method):
    parts = (method.online, method.patch_projector, method.patches_projector)
    return [parameter for part in parts for parameter in part.parameters()]


def test_three_steps_are_those_of_the_naive_reference():
    ours = method()
    naive = Naive(ours)
    optimizer = torch.optim.SGD(trained(ours), 0.1, momentum=0.9)
    drawn = []
    for step in range(3):
        negatives = ours._draw_negatives().tolist()
        drawn.append(negatives)
        output = ours(*views(step), ids=ids(step))
        optimizer.zero_grad()
        output.loss.backward()
        loss, gradients = naive.step(*views(step), ids(step).tolist(), negatives)
        torch.testing.assert_close(output.loss, loss, atol=1e-12, rtol=0)
        for parameter, gradient in zip(trained(ours), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-12, rtol=0)
        optimizer.step()
        ours.after_update()
        torch.testing.assert_close(ours.memory.rows, torch.stack(naive.rows), atol=1e-12, rtol=0)
    assert float(ours.nce.log_normalizer.exp()) == pytest.approx(naive.z)
    assert drawn[0] != drawn[1] != drawn[2]


@pytest.mark.parametrize("weight", [1.0, 0.0], ids=["patches", "image"])
def test_each_term_moves_its_head_and_is_lowered_by_its_gradient(weight):
    ours = method(patch_weight=weight).eval()
    ours.nce.log_normalizer.fill_(math.log(20.0))
    before = ours(*views(), ids=ids()).loss
    before.backward()
    heads = {
        "patches": [*ours.patch_projector.parameters(), *ours.patches_projector.parameters()],
        "image": list(ours.online.projector.parameters()),
    }
    for name, parameters in heads.items():
        moved = [p.grad is not None and p.grad.abs().max() > 1e-4 for p in parameters]
        assert moved == [(name == "patches") == bool(weight)] * len(parameters)
    for parameter in ours.online.backbone.parameters():
        assert parameter.grad.abs().max() > 1e-4
    for parameter in trained(ours):
        if parameter.grad is not None:
            parameter.data -= 0.01 * parameter.grad
    assert ours(*views(), ids=ids()).loss < before


def test_the_order_of_the_patches_counts():
    ours = method().eval()
    _, patches = views()
    one, other = (ours.embed_patches(p) for p in (patches, patches.flip(1)))
    assert (one - other).abs().max() > 0.01


def test_in_eval_mode_nothing_is_written_and_negatives_belong_to_the_step():
    ours = method().eval()
    before = copy.deepcopy(ours.state_dict())
    ours(*views(), ids=ids())
    after = ours.state_dict()
    assert after.pop("_extra_state") == before.pop("_extra_state") == {"steps": 0}
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    ours.train()(*views(), ids=ids())
    again = method()
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again._draw_negatives(), ours._draw_negatives())
    assert not torch.equal(method()._draw_negatives(), ours._draw_negatives())
    with pytest.raises(ValueError, match="pass ids"):
        ours(*views())
    with pytest.raises(ValueError, match="number of samples of the dataset"):
        method(samples=0)


def test_two_processes_give_the_gradient_and_the_memory_of_the_whole_batch():
    def part():
        low, high = distributed.shard_range(BATCH)
        ours = method()
        optimizer = torch.optim.SGD(trained(ours), 0.1)
        losses = []
        for step in range(2):
            image, patches = views(step)
            output = ours(image[low:high], patches[low:high], ids=ids(step)[low:high])
            optimizer.zero_grad()
            output.loss.backward()
            for parameter in trained(ours):
                distributed.all_mean_(parameter.grad)
            losses.append(output.loss.detach())
            gradients = [parameter.grad.clone() for parameter in trained(ours)]
            optimizer.step()
        return torch.stack(losses), gradients, ours.memory.rows, ours.nce.log_normalizer

    (whole,) = in_processes(1, part)
    parts = in_processes(2, part)
    mean_loss = sum(result[0] for result in parts) / 2
    torch.testing.assert_close(mean_loss, whole[0], atol=1e-12, rtol=0)
    for result in parts:
        torch.testing.assert_close(result[1:], whole[1:], atol=1e-12, rtol=0)


def random_rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True)


def normalizer_of_parts(*sizes):
    """log Z of a first batch of which each process has its part."""
    nce = NCELoss(SAMPLES, 0.05).double()
    embeddings, rows = (
        random_rows(BATCH, seed).split(sizes)[distributed.rank()] for seed in (1, 2)
    )
    nce(embeddings, rows, random_rows(NEGATIVES, 3))
    return nce.log_normalizer


def test_the_normalizer_is_that_of_all_rows_also_in_unequal_parts():
    alone = normalizer_of_parts(BATCH)
    for found in in_processes(2, normalizer_of_parts, 5, 1):
        torch.testing.assert_close(found, alone, atol=1e-12, rtol=0)


def test_low_temperatures_do_not_overflow():
    nce = NCELoss(SAMPLES, 0.002)
    embeddings = random_rows(BATCH, 1).float().requires_grad_()
    loss = nce(embeddings, embeddings.detach(), random_rows(NEGATIVES, 3).float())
    loss.backward()
    assert loss.isfinite() and embeddings.grad.isfinite().all()
    assert 480 < nce.log_normalizer < 520  # 1 / temperature; exp of it is no float32


def test_settings():
    large = recipe("imagenet-r50").with_overrides({"method.name": "pirl"})
    assert (large.optim.lr, large.optim.decay_norms, large.views.blur) == (0.03, False, 0.0)
    transform = MultiViewTransform(view_specs(large), 0, 224)
    assert [transform.shape(v) for v in transform.views] == [(3, 224, 224), (9, 3, 64, 64)]
    assert transform.crop_side(transform.views[1]) == 255
    assert transform.views[1].crop_area == (0.6, 1.0)
    for name, value in {"negatives": 0, "patch_weight": 2, "patch_area": (0.5, 0.1)}.items():
        with pytest.raises(ValueError, match=f"method.{name}: got"):
            large.with_overrides({f"method.{name}": value})

    small = recipe("cifar10-r18").with_overrides({"method.name": "pirl", "encoder.width": 0.125})
    pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    source = ArraySource(pixels, None, name="noise")
    built = session_module.build_method(small, source)
    assert built.negatives == 8 and built.nce.temperature == 0.07
    transform = MultiViewTransform(view_specs(small), 0, 32)
    image, patches = transform.finish(source.read_batch(torch.arange(8)), 0, torch.arange(8))
    output = built(image, patches, ids=torch.arange(8))
    output.loss.backward()
    assert patches.shape == (8, 9, 3, 9, 9)
    assert all(parameter.grad is not None for parameter in built.parameters())
