"""DeepCluster-v2 against an independent, naive reading of its code."""

import copy

import pytest
import torch

from meanshift.config.methods.clustering import DeepClusterV2 as Settings
from meanshift.config.recipes import recipe
from meanshift.methods import Batch, Progress, method_class, view_specs
from meanshift.methods.base import BuildContext
from meanshift.methods.deepcluster_v2 import DeepClusterV2
from meanshift.runtime import distributed, rng
from tests.support.forked import in_processes
from tests.support.method_steps import assert_step_lowers
from tests.support.multi_crop import BATCH, DIM, CropEncoder, crops, unit_rows

SAMPLES, PROTOTYPES, CLUSTERINGS = 20, 4, 3


def build(**options):
    encoder = CropEncoder()
    torch.manual_seed(1)
    sizes = {"samples": SAMPLES, "prototypes": PROTOTYPES, "clusterings": CLUSTERINGS}
    return DeepClusterV2(encoder, DIM, seed=3, **sizes, **options).double()


def images():
    return crops(50, batch=SAMPLES)[0]


def pass_over_the_data(left_out=0):
    """Batches of 3 images in evaluation views, each process with its part, unequal in number."""
    parts = torch.arange(SAMPLES - left_out).split(3)
    first, last = distributed.shard_range(len(parts))
    return (Batch(views=(images()[ids],), ids=ids) for ids in parts[first:last])


def batch_ids(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randperm(SAMPLES, generator=generator)[:BATCH]


def optimizer_of(parameters):
    return torch.optim.SGD(list(parameters), 0.1, momentum=0.9, weight_decay=1e-3)


class Naive:
    """The code in plain loops: memories as dictionaries, k-means one row at a time."""

    def __init__(self, method):
        self.encoder = copy.deepcopy(method.online)
        self.optimizer = optimizer_of(self.encoder.parameters())
        with torch.no_grad():
            outputs = self.encoder(images())
            rows = unit_rows(outputs - sum(outputs) / SAMPLES)
        self.memories = [dict(enumerate(rows)), dict(enumerate(rows))]

    def cluster(self, epoch):
        self.centers, self.labels = [], []
        for number in range(CLUSTERINGS):
            memory = self.memories[number % 2]
            seed = rng.derive_seed(3, epoch * CLUSTERINGS + number, rng.SAMPLE)
            chosen = rng.choice(seed, SAMPLES, PROTOTYPES, rng.SAMPLE)
            centers = [memory[int(i)] for i in chosen]
            for _ in range(10):
                labels = self.nearest(memory, centers)
                for k in range(PROTOTYPES):
                    members = [memory[i] for i in memory if labels[i] == k]
                    if members:
                        centers[k] = unit_rows(sum(members))
            self.labels.append(self.nearest(memory, centers))
            self.centers.append(torch.stack(centers))

    @staticmethod
    def nearest(memory, centers):
        def cosine(i, k):
            return float(memory[i] @ centers[k])

        return {i: max(range(PROTOTYPES), key=lambda k: cosine(i, k)) for i in memory}

    def step(self, views, ids):
        z = [unit_rows(self.encoder(view)) for view in views]
        loss = 0
        for centers, labels in zip(self.centers, self.labels, strict=True):
            for crop in z:
                for row, i in zip(crop, ids.tolist(), strict=True):
                    p = torch.softmax(row @ centers.T / 0.1, 0)[labels[i]]
                    loss = loss - p.log() / len(z) / len(ids) / CLUSTERINGS
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for j, i in enumerate(ids.tolist()):
            for crop in (0, 1):
                self.memories[crop][i] = z[crop][j].detach()
        return loss.detach()


def test_two_epochs_follow_the_naive_reference():
    method = build()
    naive = Naive(method)
    optimizer = optimizer_of(method.online.parameters())
    for step in range(6):
        now = Progress(step, 3, 2)
        if step % 3 == 0:
            method.begin_epoch(now, pass_over_the_data)
            naive.cluster(now.epoch)
            expected = [[labels[i] for i in range(SAMPLES)] for labels in naive.labels]
            assert method.assignments.tolist() == expected
            for found, centers in zip(method.prototypes, naive.centers, strict=True):
                torch.testing.assert_close(found.data, centers)
        views, ids = crops(step), batch_ids(step)
        output = method(*views, ids=ids)
        optimizer.zero_grad()
        output.loss.backward()
        loss = naive.step(views, ids)
        torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-9, atol=0)
        pairs = zip(method.online.parameters(), naive.encoder.parameters(), strict=True)
        for ours, theirs in pairs:  # the naive gradients stay until its next step
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12)
        assert all(prototypes.grad is None for prototypes in method.prototypes)
        optimizer.step()
        method.after_update(now)
    for crop, memory in enumerate(naive.memories):
        expected = torch.stack([memory[i] for i in range(SAMPLES)])
        torch.testing.assert_close(method.memory.rows[:, crop * DIM :][:, :DIM], expected)


def test_only_the_first_epoch_passes_over_the_data_and_in_eval_mode():
    method = build()
    modes = []
    method.online.register_forward_hook(lambda module, *_: modes.append(module.training))
    method.begin_epoch(Progress(0, 3, 2), pass_over_the_data)
    assert modes and not any(modes)
    assert method.online.training
    method.begin_epoch(Progress(3, 3, 2), lambda: pytest.fail("a second pass"))


def filled_from_a_cone():
    """The rows after the first pass, of an encoder whose outputs are nearly the same."""
    method = build()
    with torch.no_grad():
        method.online.layers[2].weight.mul_(1e-3)
        method.online.layers[2].bias.fill_(1.0)
    plain = unit_rows(method.online(images()).detach())
    method.begin_epoch(Progress(0, 3, 2), pass_over_the_data)
    return plain, method.memory.rows[:, :DIM]


def test_the_first_clustering_has_embeddings_without_their_mean():
    """Outputs of a random network lie in a narrow cone, which has no clusters."""
    plain, rows = filled_from_a_cone()
    assert float(plain.mean(0).norm()) > 0.99999
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(SAMPLES).double())
    assert float(rows.mean(0).norm()) < 0.5
    for _, found in in_processes(2, filled_from_a_cone):
        torch.testing.assert_close(found, rows, rtol=0, atol=1e-9)


def test_missing_ids_are_named():
    with pytest.raises(ValueError, match="DeepClusterV2 needs the ids of the samples: pass ids"):
        build()(*crops(0))


def test_clusters_are_restored_from_a_checkpoint():
    method = build()
    method.begin_epoch(Progress(0, 3, 2), pass_over_the_data)
    other = build()
    other.load_state_dict(method.state_dict())
    losses = [one(*crops(0), ids=batch_ids(0)).loss.detach() for one in (method, other)]
    assert torch.equal(*losses) and losses[0] > 0


def test_samples_without_a_row_are_ignored():
    method = build()
    method.begin_epoch(Progress(0, 3, 2), lambda: pass_over_the_data(left_out=4))
    assert (method.assignments < 0).sum(1).tolist() == [4] * CLUSTERINGS
    method.eval()
    ids = torch.tensor([18, 2, 17, 5, 9, 19])
    known = [1, 3, 4]
    views = crops(0)
    loss = method(*views, ids=ids).loss
    expected = method(*(view[known] for view in views), ids=ids[known]).loss
    torch.testing.assert_close(loss, expected)


def test_before_any_clustering_the_loss_is_0_with_gradients_of_0():
    method = build().eval()
    method(*crops(0), ids=batch_ids(0)).loss.backward()
    assert all(float(p.grad.abs().max()) == 0 for p in method.online.parameters())
    assert not method.memory.seen.any()  # nothing is written in eval mode


def test_the_step_against_the_gradient_lowers_the_loss():
    method = build()
    method.begin_epoch(Progress(0, 3, 2), pass_over_the_data)
    parameters = list(method.online.parameters())
    assert_step_lowers(lambda: method(*crops(0), ids=batch_ids(0)).loss, parameters)


def test_every_crop_and_every_clustering_is_trained():
    method = build()
    method.begin_epoch(Progress(0, 3, 2), pass_over_the_data)
    views = [view.requires_grad_() for view in crops(0)]
    method(*views, ids=batch_ids(0)).loss.backward()
    assert all(float(view.grad.abs().min()) > 0 for view in views)
    for number in range(CLUSTERINGS):
        before = method(*views, ids=batch_ids(0)).loss.detach()
        method.assignments[number] = (method.assignments[number] + 1) % PROTOTYPES
        assert method(*views, ids=batch_ids(0)).loss.detach() != before


def steps(sizes, left_out):
    """Losses and gradients of four steps in two epochs, each process with its part."""
    method = build()
    optimizer = optimizer_of(method.online.parameters())
    found = []
    for step in range(4):
        if step % 2 == 0:
            method.begin_epoch(Progress(step, 2, 2), lambda: pass_over_the_data(left_out))
        ids, *parts = (
            tensor.split(sizes)[distributed.rank()] for tensor in (batch_ids(step), *crops(step))
        )
        loss = method(*parts, ids=ids).loss * len(ids) / BATCH
        optimizer.zero_grad()
        loss.backward()
        for parameter in method.online.parameters():
            parameter.grad = distributed.all_sum(parameter.grad)
        gradients = [p.grad.clone() for p in method.online.parameters()]
        found += [distributed.all_sum(loss.detach()), *gradients]
        optimizer.step()
    return [*found, method.memory.rows, method.assignments, *(p.data for p in method.prototypes)]


def test_two_processes_take_the_steps_of_one():
    alone = steps([BATCH], 5)
    for found in in_processes(2, steps, [4, 2], 5):
        torch.testing.assert_close(found, alone, rtol=1e-8, atol=1e-12)


def test_a_recipe_takes_the_settings_of_the_paper():
    config = recipe("imagenet-r50").with_overrides({"method.name": "deepcluster-v2"})
    assert method_class(config.method) is DeepClusterV2
    assert (config.method.prototypes, config.method.clusterings) == (3000, 3)
    assert (config.optim.name, config.optim.warmup_epochs) == ("lars", 10)
    assert config.train.batch_norm == "sync"
    assert [view.count for view in view_specs(config)] == [2, 6]
    small = recipe("cifar10-r18").with_overrides({"method.name": "deepcluster-v2"})
    assert (small.optim.name, small.optim.warmup_epochs, small.method.prototypes) == (
        "adamw",
        0,
        512,
    )
    assert [view.count for view in view_specs(small)] == [2]


@pytest.mark.parametrize(("name", "value"), [("clusterings", 0), ("iterations", 0)])
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"method\.{name}: got .*, need 1 or more"):
        Settings(**{name: value})


def built(dataset_size):
    class Encoder(CropEncoder):
        dim = DIM

    context = BuildContext(encoder=lambda **_: Encoder(), dataset_size=dataset_size)
    return DeepClusterV2.build(Settings(iterations=7), context)


def test_it_has_a_row_for_each_sample_and_states_their_memory():
    method = built(40_000)
    assert method.memory.rows.shape == (40_000, 2 * DIM)
    assert method.iterations == 7
    assert len(method.prototypes) == 3 and method.prototypes[0].shape == (2500, DIM)
    rows, clusters = method.memory_use(8).values()
    assert rows == 40_000 * (2 * DIM * 4 + 1)
    assert clusters == 40_000 * 3 * 8
    assert "each of 40,000 samples, also in each checkpoint: 2 MB;" in method.memory_report(8)


def test_without_the_number_of_images_it_is_refused():
    with pytest.raises(ValueError, match=r"got 'deepcluster-v2', need the number of images"):
        built(0)
