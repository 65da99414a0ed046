"""CompRess against a naive reading of the authors' loss, and its teacher."""

import copy
import json

import pytest
import torch
from torch import nn

from meanshift.config.methods.distillation import CompRess as Settings
from meanshift.config.recipes import recipe
from meanshift.methods import Batch, BuildContext
from meanshift.methods.compress import CompRess
from meanshift.methods.teacher import Teacher
from meanshift.runtime import checkpoint, distributed
from meanshift.training import session as session_module
from meanshift.training.loop import pretrain
from tests.support.forked import in_processes
from tests.support.method_steps import assert_parts_equal_the_whole, take_view_steps
from tests.support.toy_method import make_arrays

DIM, TEACHER_DIM, BATCH, BANK = 5, 4, 6, 16
TEMPERATURE, MOMENTUM = 0.3, 0.7


def method(seed=0, **options):
    torch.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, DIM))
    teacher = nn.Sequential(nn.Linear(7, TEACHER_DIM), nn.BatchNorm1d(TEACHER_DIM))
    settings = {"bank_size": BANK, "temperature": TEMPERATURE, "momentum": MOMENTUM}
    return CompRess(
        encoder, DIM, teacher=Teacher(teacher, TEACHER_DIM), **(settings | options)
    ).double()


def view(step=0):
    generator = torch.Generator().manual_seed(10 + step)
    return torch.randn(BATCH, 7, generator=generator, dtype=torch.float64)


def ids(step=0):
    return torch.arange(BATCH) + BATCH * step


def unit(row):
    return row / row.norm()


class Naive:
    """One image, one row of the queue at a time."""

    def __init__(self, method):
        self.student = copy.deepcopy(method.online)
        self.average = copy.deepcopy(method.online)
        self.teacher = copy.deepcopy(method.teacher.network).eval()
        self.student_queue = [row.clone() for row in method.student_queue.rows]
        self.teacher_queue = [row.clone() for row in method.teacher_queue.rows]
        self.slot = 0
        self.optimizer = torch.optim.SGD(self.student.parameters(), 0.1, momentum=0.9)

    def distribution(self, embedding, queue):
        weights = [((embedding * row).sum() / TEMPERATURE).exp() for row in queue]
        return [weight / sum(weights) for weight in weights]

    def step(self, images):
        loss, keys, teachers = 0, [], []
        for image in images:
            with torch.no_grad():
                teachers.append(unit(self.teacher(image[None])[0]))
                keys.append(unit(self.average(image[None])[0]))
            student = unit(self.student(image[None])[0])
            wanted = self.distribution(teachers[-1], self.teacher_queue)
            found = self.distribution(student, self.student_queue)
            loss = loss + sum(p * (p.log() - q.log()) for p, q in zip(wanted, found, strict=True))
        for key, teacher in zip(keys, teachers, strict=True):
            self.student_queue[self.slot] = key
            self.teacher_queue[self.slot] = teacher
            self.slot = (self.slot + 1) % BANK
        loss = loss / len(images)
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in self.student.parameters()]
        self.optimizer.step()
        pairs = zip(self.average.parameters(), self.student.parameters(), strict=True)
        for slow, fast in pairs:
            slow.data = MOMENTUM * slow.data + (1 - MOMENTUM) * fast.data
        return loss, gradients


def test_three_steps_are_those_of_the_naive_reference():
    ours = method()
    naive = Naive(ours)
    optimizer = torch.optim.SGD(ours.online.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        output = ours(view(step), ids=ids(step))
        optimizer.zero_grad()
        output.loss.backward()
        loss, gradients = naive.step(view(step))
        torch.testing.assert_close(output.loss, loss, atol=1e-12, rtol=0)
        for parameter, gradient in zip(ours.online.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-12, rtol=0)
        optimizer.step()
        ours.after_update()
        student_rows, teacher_rows = map(torch.stack, (naive.student_queue, naive.teacher_queue))
        torch.testing.assert_close(ours.student_queue.rows, student_rows, atol=1e-12, rtol=0)
        torch.testing.assert_close(ours.teacher_queue.rows, teacher_rows, atol=1e-12, rtol=0)
    for one, other in zip(ours.target.parameters(), naive.average.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
    assert torch.equal(ours.student_queue.ids[:2], torch.tensor([16, 17]))  # it is a ring


def test_a_step_along_the_gradient_lowers_the_loss_of_the_student_alone():
    ours = method()
    ours(view(1), ids=ids(1))  # something in the queues
    ours.eval()
    before = ours(view()).loss
    before.backward()
    assert all(p.grad is None for part in (ours.target, ours.teacher) for p in part.parameters())
    for parameter in ours.online.parameters():
        assert parameter.grad.abs().max() > 1e-4
        parameter.data -= 0.01 * parameter.grad
    assert ours(view()).loss < before
    perfect = method(bank_size=1)  # one row: both distributions are 1
    assert perfect.eval()(view()).loss.abs() < 1e-12


def test_in_eval_mode_nothing_is_written_and_the_teacher_is_never_in_training_mode():
    ours = method()
    assert not ours.train().teacher.network.training
    before = copy.deepcopy(ours.state_dict())
    ours.eval()(view(), ids=ids())
    for name, value in ours.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[name]), name


def test_two_processes_give_the_gradient_and_the_queues_of_the_whole_batch():
    def part():
        ours = method()
        losses, gradients = take_view_steps(ours, view, ids, 2)
        return losses, gradients, ours.student_queue.rows, ours.teacher_queue.rows

    assert_parts_equal_the_whole(part)


def test_a_cached_teacher_is_computed_once_from_evaluation_views():
    ours = method(cached_samples=2 * BATCH)
    ours.begin_session(lambda: (Batch((view(step),), ids(step)) for step in (1, 0)))
    chosen = torch.tensor([7, 0, 11, 3, 4, 5])
    expected = torch.cat([view(0), view(1)])[chosen]
    with torch.no_grad():
        expected = nn.functional.normalize(ours.teacher.network(expected), dim=1)
    ours(view(5), ids=chosen)
    torch.testing.assert_close(ours.teacher_queue.rows[:BATCH], expected)
    with pytest.raises(ValueError, match="pass ids"):
        ours(view(5))
    assert not any("cache" in name for name in ours.state_dict())
    plain = method()
    plain.begin_session(lambda: pytest.fail("without the option there is no pass"))


def test_two_processes_fill_one_cache_in_place():
    def cache():
        ours = method(cached_samples=3 * BATCH)
        first, last = distributed.shard_range(3)
        rows = torch.zeros(3 * BATCH, TEACHER_DIM, dtype=torch.float64)
        ours.teacher.fill_cache((Batch((view(s),), ids(s)) for s in range(first, last)), rows)
        return rows, ours.teacher.cache is rows

    (alone,) = in_processes(1, cache)
    assert alone[1] and (alone[0].norm(dim=1) > 0.99).all()
    for rows, in_place in in_processes(2, cache):
        assert in_place and torch.equal(rows, alone[0])


def test_the_memory_of_queues_and_cache_is_reported():
    (queues,) = method().float().memory_use(8).values()
    per_row = (DIM + TEACHER_DIM) * 4
    assert BANK * per_row <= queues <= BANK * (per_row + 2 * (8 + 8)) + 64  # ids, labels, cursor
    ours = method(cached_samples=2_000_000).float()
    assert list(ours.memory_use(8).values()) == [queues, 2_000_000 * TEACHER_DIM * 4]
    assert "the teacher's features of 2,000,000 samples: 32 MB" in ours.memory_report(8)


def test_a_cache_needs_the_number_of_images():
    settings = Settings(teacher="pixels", cached_teacher=True)
    assert settings.cached_samples(7) == 7 and Settings().cached_samples(7) == 0
    with pytest.raises(ValueError, match=r"method\.cached_teacher: got True, need the number of"):
        CompRess.build(settings, BuildContext(encoder=lambda **_: pytest.fail("too late")))


def test_settings():
    config = recipe("imagenet-r50").with_overrides({"method.name": "compress"})
    assert config.optim.lr == 0.01 and config.views.crop_area == (0.08, 1.0)
    assert (config.method.bank_size, config.method.temperature) == (128_000, 0.04)
    (spec,) = CompRess.views(config.method, config.views)
    assert not spec.has_color
    small = recipe("cifar10-r18").with_overrides({"method.name": "compress"})
    assert small.optim.lr == 0.01 and small.optim.weight_decay == 1e-4
    for name, value in {"temperature": 0, "bank_size": 8, "momentum": 2}.items():
        with pytest.raises(ValueError, match=f"method.{name}: got"):
            config.with_overrides({f"method.{name}": value})
    with pytest.raises(ValueError, match=r"method\.teacher: got none.*--method\.teacher"):
        session_module.build_method(config)
    missing = config.with_overrides({"method.teacher": "gone.pt"})
    with pytest.raises(ValueError, match=r"method\.teacher: gone\.pt: not found.*to continue"):
        session_module.build_method(missing)


def test_a_run_records_its_teacher_and_does_not_continue_with_another(
    tmp_path, monkeypatch, capsys
):
    source = make_arrays(tmp_path)
    config = recipe("cifar10-r18").with_overrides(
        {
            "method.name": "compress",
            "method.teacher": "pixels",
            "method.cached_teacher": True,
            "method.bank_size": 16,
            "data.source": str(source),
            "data.image_size": 8,
            "encoder.width": 0.125,
            "train.epochs": 2,
            "train.batch_size": 8,
            "train.snapshots": 0,
            "train.monitor_every": 0,
            "train.device": "cpu",
            "train.log_every": 1,
        }
    )
    run = pretrain(config, tmp_path / "run")
    printed = capsys.readouterr().err
    assert printed.count("compress: one pass over the 40 training images") == 1
    assert "the teacher's features of 40 samples" in printed
    card = json.loads((run / "environment.json").read_text())["method"]
    assert card["teacher"] == "pixels" and "raw pixels" in card["title"]
    state = checkpoint.latest(run / "checkpoints")[0]["method"]
    assert not any(name.startswith("teacher.network.") for name in state)
    assert state["teacher._extra_state"] == {"fingerprint": card["fingerprint"]}
    assert state["online.projector.weight"].shape == (3072, 64)  # to the teacher's size
    before = (run / "metrics.jsonl").read_text()
    monkeypatch.setattr("meanshift.methods.teacher.fingerprint", lambda _: "another")
    with pytest.raises(ValueError, match=r"fingerprint another.*--method\.teacher"):
        pretrain(config, run)
    assert (run / "metrics.jsonl").read_text() == before
