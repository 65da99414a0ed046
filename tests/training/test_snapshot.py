"""Snapshots: when they are taken, what they contain, and their metrics."""

import copy

import pytest
import torch

from meanshift.config import Config
from meanshift.models.features import extract_features
from meanshift.runtime import checkpoint
from meanshift.training.loop import pretrain
from meanshift.training.session import open_session
from meanshift.training.snapshot import snapshot_epochs, take_snapshot
from tests.support.exact import assert_same
from tests.support.processes import read_lines
from tests.support.toy_method import make_arrays, toy_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("epochs", "count", "expected"),
    [
        (100, 0, []),
        (100, 1, [100]),
        (100, 2, [0, 100]),
        (100, 6, [0, 4, 16, 36, 64, 100]),
        (2, 6, [0, 1, 2]),
    ],
)
def test_snapshots_are_denser_at_the_start(epochs, count, expected):
    assert sorted(snapshot_epochs(epochs, count)) == expected


@pytest.fixture
def arrays(tmp_path):
    return make_arrays(tmp_path)


def test_a_snapshot_has_features_and_weights(arrays, tmp_path):
    config = toy_config(arrays)
    with open_session(config, tmp_path / "run", CPU) as session:
        metrics = take_snapshot(session, 0)
        snapshot = checkpoint.read(tmp_path / "run" / "snapshots" / "epoch-0000.pt")
        source = session.source.subset(snapshot["indices"])
        features = extract_features(session.backbone, source, image_size=8, device=CPU)
        weights = session.backbone.state_dict()
    assert len(snapshot["indices"].unique()) == 10 and snapshot["epoch"] == 0
    assert torch.equal(snapshot["features"], features.half())
    assert_same({name: value.half() for name, value in weights.items()}, snapshot["weights"])
    assert metrics.keys() == {"feature_rank", "feature_rankme"}
    assert all(1 < rank <= 8 for rank in metrics.values())


def test_neighbors_that_stayed_are_counted_from_the_second_snapshot_on(arrays, tmp_path):
    run = pretrain(toy_config(arrays), tmp_path / "run")
    first, last = (line for line in read_lines(run) if line["kind"] == "snapshot")
    assert "neighbors_kept" not in first and 0 < last["neighbors_kept"] <= 1
    assert (first["epoch"], last["epoch"]) == (0, 3)


def test_a_damaged_snapshot_is_named_and_the_run_goes_on(arrays, tmp_path):
    with open_session(toy_config(arrays), tmp_path / "run", CPU) as session:
        take_snapshot(session, 0)
        path = tmp_path / "run/snapshots/epoch-0000.pt"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert "neighbors_kept" not in take_snapshot(session, 1)
    (warning,) = read_lines(tmp_path / "run", "warnings.jsonl")
    assert f"{path}: damaged" in warning["message"]


@pytest.fixture
def msf(arrays):
    overrides = {
        "data.source": str(arrays), "data.image_size": 16, "encoder.name": "resnet10",
        "encoder.stem": "small-stride2", "encoder.width": 0.125, "method.bank_size": 40,
        "method.k": 3, "train.batch_size": 8, "train.epochs": 1, "train.snapshots": 2,
        "train.device": "cpu", "train.precision": "float32",
    }  # fmt: skip
    return Config().with_overrides(overrides)


def test_msf_adds_the_purity_of_weak_and_strong_views(msf, tmp_path):
    run = pretrain(msf, tmp_path / "run")
    first, last = (line for line in read_lines(run) if line["kind"] == "snapshot")
    assert "purity_weak" not in first  # the bank is empty
    assert 0 <= last["purity_weak"] <= 1 and 0 <= last["purity_strong"] <= 1


def test_a_snapshot_changes_nothing_that_the_next_step_depends_on(msf, tmp_path):
    with open_session(msf, tmp_path / "run", CPU) as session:
        session.method.bank.written = 40
        before = copy.deepcopy(session.state.state_dict())
        take_snapshot(session, 0)
        assert_same(session.state.state_dict(), before)
        assert session.method.training
