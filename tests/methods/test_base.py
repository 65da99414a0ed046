"""The contract of a method: what its defaults do, and how a config chooses a method."""

import pytest
import torch
from torch import nn

from meanshift.config import MSF, BYOLAsym, Config, Views
from meanshift.methods import Batch, MeanShift, Progress, StepOutput, method_class, view_specs
from meanshift.methods.base import Method
from meanshift.methods.embeddings import normalize
from meanshift.methods.memory_bank import MemoryBank
from meanshift.training.session import build_method
from tests.support.toy_method import Toy, make_arrays, toy_config


class Plain(Method):
    """Nothing but what every method must define."""

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(3, 2)
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.banks = nn.ModuleList([MemoryBank(4, 2), MemoryBank(5, 2)])

    @classmethod
    def views(cls, settings, operators):
        return (operators.spec("only", "weak", index=0),)

    @classmethod
    def build(cls, settings, context):
        return cls()

    def forward(self, view, *, ids=None, labels=None):
        self.received = view, ids, labels
        return StepOutput(view.sum(), view)


def small_msf(**settings):
    method = MeanShift(nn.Linear(6, 4), 4, k=2, bank_size=8)
    method.settings = MSF(bank_size=256, **settings)
    return method


def test_a_method_without_views_or_build_cannot_be_made():
    class Incomplete(Method):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()


def test_by_default_a_step_hands_the_views_to_forward():
    batch = Batch((torch.ones(2, 3),), torch.arange(2), torch.tensor([4, 5]))
    method = Plain()
    method.step(batch)
    view, ids, labels = method.received
    assert view is batch.views[0] and ids is batch.ids and labels is batch.labels


def test_by_default_the_trained_parameters_are_one_group():
    method = Plain()
    (group,) = method.parameter_groups()
    assert {id(p) for p in group["params"]} == {id(p) for p in method.online.parameters()}
    assert group.keys() == {"params"}


def test_by_default_every_memory_bank_is_process_local_and_everything_is_saved():
    method = Plain()
    assert method.process_local() == {"banks.0": method.banks[0], "banks.1": method.banks[1]}
    assert method.not_saved() == ()


def test_by_default_the_hooks_do_nothing():
    method, now = Plain(), Progress(3, 2, 4)
    assert method.set_progress(now) == {} and method.snapshot_metrics(Views(), iter) == {}
    for hook in (method.before_forward, method.before_update, method.after_update):
        assert hook(now) is None
    assert method.begin_epoch(now, lambda: iter(())) is None


def test_progress_counts_epochs_and_the_fraction_of_the_run():
    assert (Progress(0, 5, 4).epoch, Progress(0, 5, 4).fraction) == (0, 0.0)
    assert (Progress(9, 5, 4).epoch, Progress(9, 5, 4).fraction) == (1, 0.45)


def test_hints_name_the_likely_cause_of_a_collapse():
    assert "views.crop_area" in Plain().collapse_hint() and "optim.lr" in Plain().collapse_hint()
    assert "method.momentum" in small_msf().collapse_hint()
    assert "method.same_view" in small_msf(same_view=True).collapse_hint()
    alone = MeanShift(nn.Linear(6, 4), 4, k=1)  # as a library call, without settings
    assert "method.momentum" in alone.collapse_hint()


# How a config chooses


def test_msf_and_byol_asym_are_one_class_and_a_module_brings_its_own(tmp_path):
    assert method_class(MSF()) is method_class(BYOLAsym()) is MeanShift
    assert method_class(toy_config(make_arrays(tmp_path)).method) is Toy


def test_a_module_that_is_no_method_is_refused():
    with pytest.raises(ValueError, match=r"collections:Counter is no method; need a subclass"):
        method_class(MSF(module="collections:Counter"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, [("target", False), ("online", True)]),
        ({"method.target_view": "strong"}, [("target", True), ("online", True)]),
        ({"method.online_view": "weak"}, [("target", False), ("online", False)]),
        ({"method.same_view": True}, [("online", True)]),
        ({"method.name": "byol-asym"}, [("target", False), ("online", True)]),
    ],
)
def test_the_views_of_msf_and_byol_asym(overrides, expected):
    views = view_specs(Config().with_overrides(overrides))
    assert [(view.name, view.has_color) for view in views] == expected
    assert len({view.stream for view in views}) == len(views)


def test_the_views_use_the_operators_of_the_settings():
    overrides = {"views.crop_area": (0.5, 0.9), "views.blur": 0.25, "views.flip": 0.0}
    target, online = view_specs(Config().with_overrides(overrides))
    assert target.crop_area == online.crop_area == (0.5, 0.9)
    assert (target.blur, online.blur) == (0.0, 0.25) and target.flip == online.flip == 0.0


def test_byol_asym_is_built_without_a_bank():
    overrides = {"encoder.name": "resnet10", "encoder.width": 0.125, "data.image_size": 16}
    byol = build_method(Config().with_overrides({**overrides, "method.name": "byol-asym"}))
    assert byol.bank is None and byol.k == 1
    msf = build_method(Config().with_overrides({**overrides, "method.bank_size": 300}))
    assert (msf.bank.size, msf.k) == (300, 5)


def test_unit_length_in_at_least_float32():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        rows = normalize(torch.randn(4, 8).to(dtype))
        assert rows.dtype == expected
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(4, dtype=expected))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_momentum_for_the_images_of_an_update_is_used_and_logged(schedule):
    """64 images twice per update are half of the 256 that the momentum is meant for."""
    overrides = {
        "method.momentum_batch": 256,
        "method.momentum_schedule": schedule,
        "method.bank_size": 64,
        "train.batch_size": 64,
        "optim.accumulate": 2,
        "encoder.name": "resnet10",
        "encoder.width": 0.125,
    }
    method = build_method(Config().with_overrides(overrides))
    logged = method.set_progress(Progress(0, 5, 2))["momentum"]
    assert logged == method.momentum == pytest.approx(0.99**0.5)
