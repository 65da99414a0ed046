"""The Mean Shift step against an independent, naive reading of the paper."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meanshift import MeanShift
from meanshift.training.metrics import MetricAverages

DIM, BATCH, BANK, K = 6, 8, 32, 4


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, DIM)]
    return nn.Sequential(*layers).to(dtype)


def views(step, dtype=torch.float32, batch=BATCH):
    generator = torch.Generator().manual_seed(100 + step)
    one, two = torch.randn(2, batch, 10, generator=generator, dtype=dtype)
    return (
        one,
        two,
        torch.arange(batch) + step * batch,
        torch.randint(3, (batch,), generator=generator),
    )


def purity_of(output):
    return float(output.metrics["purity"][0])


class Naive:
    """The paper in plain loops: queue as a list, neighbors by sorting, one distance at a time."""

    def __init__(self, method, lr=0.05):
        self.online, self.target = copy.deepcopy(method.online), copy.deepcopy(method.target)
        self.predictor = copy.deepcopy(method.predictor)
        self.queue = [] if method.bank is None else list(method.bank.rows.clone())
        self.labels, self.pointer = [-1] * len(self.queue), 0
        learning = [*self.online.parameters(), *self.predictor.parameters()]
        self.optimizer = torch.optim.SGD(learning, lr, momentum=0.9, weight_decay=1e-4)

    def step(self, online_view, target_view, labels, k, momentum=0.99, update_target=True):
        v = self.predictor(self.online(online_view))
        v = v / v.norm(dim=1, keepdim=True)
        if update_target:  # the authors' order: before the target's forward
            for t, o in zip(self.target.parameters(), self.online.parameters(), strict=True):
                t.data = t.data * momentum + o.data * (1 - momentum)
        u = self.target(target_view).detach()
        u = u / u.norm(dim=1, keepdim=True)
        own = []
        for row, label in zip(u, labels.tolist(), strict=True):
            self.queue[self.pointer], self.labels[self.pointer] = row, label
            own.append(self.pointer)
            self.pointer = (self.pointer + 1) % len(self.queue)
        loss, pure = 0, 0
        for i in range(len(u)):
            distances = [float(((row - u[i]) ** 2).sum()) for row in self.queue]
            distances[own[i]] = -1  # itself is the first
            chosen = sorted(range(len(distances)), key=distances.__getitem__)[:k]
            for j in chosen:
                loss = loss + ((v[i] - self.queue[j]) ** 2).sum() / k / len(u)
            pure += sum(self.labels[j] == labels[i] for j in chosen[1:]) / (k - 1) / len(u)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach(), pure


def test_twenty_steps_follow_the_naive_reference_in_float64():
    method = MeanShift(
        network(dtype=torch.float64), DIM, k=K, bank_size=BANK, bank_dtype=torch.float64
    ).double()
    method.bank.rows /= method.bank.rows.norm(dim=1, keepdim=True)  # unit in float64 as well
    naive = Naive(method)
    learning = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, 0.05, momentum=0.9, weight_decay=1e-4)
    for step in range(20):
        online_view, target_view, ids, labels = views(step, torch.float64)
        output = method(online_view, target_view, ids=ids, labels=labels)
        optimizer.zero_grad()
        output.loss.backward()
        expected, purity = naive.step(online_view, target_view, labels, K)
        pairs = zip(method.online.parameters(), naive.online.parameters(), strict=True)
        for ours, theirs in pairs:  # the naive gradients stay until its next step
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
        optimizer.step()
        method.after_update()
        torch.testing.assert_close(output.loss.detach(), expected, rtol=1e-10, atol=0)
        assert purity_of(output) == pytest.approx(float(purity), abs=1e-6)
    for ours, theirs in zip(method.online.parameters(), naive.online.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(method.bank.rows, torch.stack(naive.queue), rtol=1e-9, atol=1e-12)


def test_k_1_is_byol_to_the_bit_and_has_no_bank():
    method = MeanShift(network(), DIM, k=1)
    online, target = copy.deepcopy(method.online), copy.deepcopy(method.target)
    predictor = copy.deepcopy(method.predictor)
    ours = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], 0.05, momentum=0.9)
    theirs = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.05, momentum=0.9)
    for step in range(20):
        online_view, target_view, *_ = views(step)
        output = method(online_view, target_view)
        ours.zero_grad()
        output.loss.backward()
        ours.step()
        method.after_update()

        v = F.normalize(predictor(online(online_view)), dim=1)
        with torch.no_grad():
            u = F.normalize(target(target_view), dim=1)
        loss = (2 - 2 * (v * u).sum(dim=1)).mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.parameters(), strict=True):
                t.lerp_(o, 1 - 0.99)
        assert torch.equal(output.loss, loss)
    assert method.bank is None
    for ours_, theirs_ in [(method.online, online), (method.target, target)]:
        for a, b in zip(ours_.state_dict().values(), theirs_.state_dict().values(), strict=True):
            assert torch.equal(a, b)


def test_the_gradient_reaches_the_online_side_only():
    method = MeanShift(network(), DIM, k=K, bank_size=BANK)
    method(*views(0)[:2]).loss.backward()
    assert all(p.grad is not None for p in method.online.parameters())
    assert all(p.grad is not None for p in method.predictor.parameters())
    assert all(p.grad is None and not p.requires_grad for p in method.target.parameters())


def test_the_target_keeps_its_own_batch_norm_statistics():
    method = MeanShift(network(), DIM, k=K, bank_size=BANK)
    with torch.no_grad():
        method.online[1].weight.fill_(3.0)
    method(*views(0)[:2])
    method.after_update()
    assert not torch.equal(method.target[1].running_mean, method.online[1].running_mean)
    torch.testing.assert_close(method.target[1].weight, torch.full((16,), 0.99 * 1 + 0.01 * 3))


def test_purity_leaves_the_query_itself_out():
    method = MeanShift(network(), DIM, k=3, bank_size=BATCH, search_filled_only=True)
    online_view, target_view, ids, _ = views(0)
    alike = method(online_view, target_view, ids=ids, labels=torch.zeros(BATCH, dtype=torch.int64))
    assert purity_of(alike) == 1
    different = method(online_view, target_view, ids=ids, labels=torch.arange(BATCH))
    assert purity_of(different) == 0


def test_purity_counts_labeled_queries_only():
    method = MeanShift(network(), DIM, k=3, bank_size=BATCH, search_filled_only=True)
    labels = torch.zeros(BATCH, dtype=torch.int64)
    labels[0] = -1
    output = method(*views(0)[:2], labels=labels)
    assert 0.7 < purity_of(output) <= 1 and output.metrics["purity"][1] == BATCH - 1
    unlabeled = method(*views(0)[:2], labels=torch.full((BATCH,), -1))
    assert unlabeled.metrics["purity"][1] == 0
    assert "purity" not in method(*views(0)[:2]).metrics


def test_steps_without_a_labeled_image_do_not_lower_the_mean_purity():
    method = MeanShift(network(), DIM, k=3, bank_size=BATCH, search_filled_only=True)
    averages, unknown = MetricAverages(), torch.full((BATCH,), -1)
    for labels in (unknown, torch.zeros(BATCH, dtype=torch.int64), unknown):
        averages.add(method(*views(0)[:2], labels=labels))
    means = averages.compute()
    assert means["purity"] == 1 and means["loss"] > 0
    averages.add(method(*views(0)[:2], labels=unknown))
    assert set(averages.compute()) == {"loss", "agreement"}


def test_same_image_is_found_when_kept_and_never_when_skipped():
    online_view, target_view, ids, _ = views(0)
    for rule, fraction in (("keep", 1.0), ("skip", 0.0)):
        method = MeanShift(network(), DIM, k=2, bank_size=4 * BATCH, same_image=rule)
        method(online_view, target_view, ids=ids)
        mean, weight = method(online_view, target_view, ids=ids).metrics["same_image"]
        assert float(mean) == fraction and weight == BATCH
    with pytest.raises(ValueError, match="pass ids"):
        method(online_view, target_view)


def test_too_few_eligible_rows_are_replaced_by_u_itself():
    ids = torch.zeros(4, dtype=torch.int64)  # everything is the same image: nothing is eligible
    method = MeanShift(network(), DIM, k=3, bank_size=8, same_image="skip", search_filled_only=True)
    byol = MeanShift(network(), DIM, k=1)
    byol.load_state_dict({k: v for k, v in method.state_dict().items() if "bank" not in k})
    online_view, target_view, *_ = views(0, batch=4)
    torch.testing.assert_close(
        method(online_view, target_view, ids=ids).loss, byol(online_view, target_view).loss
    )


def test_filled_only_never_finds_a_random_row():
    method = MeanShift(network(), DIM, k=3, bank_size=4096, search_filled_only=True)
    output = method(*views(0)[:2], labels=torch.zeros(BATCH, dtype=torch.int64))
    assert purity_of(output) == 1  # random rows have label -1
    anywhere = MeanShift(network(), DIM, k=3, bank_size=4096)
    assert purity_of(anywhere(*views(0)[:2], labels=torch.zeros(BATCH, dtype=torch.int64))) < 1


def test_symmetric_searches_both_directions_before_it_enqueues():
    a, b, ids, _ = views(0)
    method = MeanShift(network(), DIM, k=2, bank_size=BANK, symmetric=True, seed=3)
    before = method.bank.rows.clone()
    twin = copy.deepcopy(method)
    output = method(a, b, ids=ids)
    v_a, v_b = (twin.predict(twin.embed(view)) for view in (a, b))
    u_a, u_b = twin.project(a), twin.project(b)
    expected = 0
    for v, u in ((v_a, u_b), (v_b, u_a)):
        found = before[(u @ before.T).argmax(1)]
        expected += (2 - 2 * (v * (u + found) / 2).sum(1)).mean() / 2
    torch.testing.assert_close(output.loss, expected)
    assert method.bank.written == 2 * BATCH


def test_eval_mode_changes_nothing():
    method = MeanShift(network(), DIM, k=K, bank_size=BANK).eval()
    before = copy.deepcopy(method.state_dict())
    method(*views(0)[:2])
    after = method.state_dict()
    assert all(
        torch.equal(before[name], after[name])
        if torch.is_tensor(before[name])
        else before[name] == after[name]
        for name in before
    )


def test_nothing_of_batch_by_bank_size_is_kept_for_autograd():
    method = MeanShift(network(), DIM, k=K, bank_size=2048)
    largest = 0

    def note(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        method(*views(0)[:2]).loss.backward()
    assert largest < BATCH * 2048


def test_any_module_and_any_input():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(20, 12), nn.Linear(12, DIM)

        def forward(self, sentence):
            return self.out(self.table(sentence["tokens"]).mean(1))

    method = MeanShift(Words(), DIM, k=2, bank_size=16)
    sentence = {"tokens": torch.randint(20, (BATCH, 5))}
    assert method(sentence, sentence).loss.isfinite()


@pytest.mark.parametrize(("k", "bank_size"), [(0, 8), (9, 8)])
def test_k_that_does_not_fit_is_refused(k, bank_size):
    with pytest.raises(ValueError, match=f"k={k}.*bank of {bank_size}"):
        MeanShift(network(), DIM, k=k, bank_size=bank_size)


def test_an_encoder_of_another_size_is_refused_with_what_to_do():
    method = MeanShift(network(), 5, k=2, bank_size=16)
    with pytest.raises(ValueError, match=r"need \(batch, 5\): pass dim=6"):
        method(*views(0)[:2])


def test_autocast_keeps_the_bank_and_the_loss_in_float32():
    method = MeanShift(network(), DIM, k=K, bank_size=BANK)
    with torch.autocast("cpu", torch.bfloat16):
        output = method(*views(0)[:2])
    assert output.loss.dtype == torch.float32 and method.bank.rows.dtype == torch.float32
    lengths = method.bank.rows.norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(BANK))
