"""Groups: from a CSV, folders, names and arrays, and splits that keep them whole."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meanshift.config import Config
from meanshift.data import (
    evaluation_splits,
    open_source,
    stratified_split,
    train_and_validation,
)
from meanshift.data.arrays import ArraySource
from meanshift.data.groups import draw_groups
from meanshift.data.packed import pack
from meanshift.data.transfer_datasets import task_from_source
from meanshift.runtime import rng
from meanshift.runtime.errors import Note
from tests.support.sources import titles


def groups_of(source):
    """The images of a source by their groups, as sets of titles."""
    members = {}
    for title, group in zip(titles(source), source.groups.tolist(), strict=True):
        members.setdefault(group, set()).add(title)
    return sorted(members.values(), key=sorted)


def save_arrays(path, groups, **more):
    """An .npz of images that are all different, of two classes, with a group for each image."""
    count = len(groups)
    pixels = np.arange(count, dtype=np.uint16).view(np.uint8).reshape(count, 1, 2)
    np.savez(path, x_train=pixels, y_train=np.arange(count) % 2, groups_train=groups, **more)
    return str(path)


def grouped(sizes, labels=None):
    """An array source with groups of these sizes, in mixed order."""
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
    labels = None if labels is None else np.asarray(labels)[order]
    source = ArraySource(np.zeros((len(groups), 2, 2), np.uint8), labels, name="toy")
    source.groups = groups[order]
    return source


# Rules


@pytest.fixture
def patients(tmp_path, make_images):
    """Two classes with three patients of two images each; one patient has images of both."""
    counts = {f"{kind}/p{patient}": 2 for kind, patient in ("a1", "a2", "b2", "b3")}
    return make_images(tmp_path / "scans", counts, size=(6, 6))


BY_PATIENT = [
    {"a/p1/000.jpg", "a/p1/001.jpg"},
    {"a/p2/000.jpg", "a/p2/001.jpg", "b/p2/000.jpg", "b/p2/001.jpg"},
    {"b/p3/000.jpg", "b/p3/001.jpg"},
]


@pytest.mark.parametrize(
    "rule", ["folder:2", "folder:-1", r"re:/p(\d)/", r"re:(a|b)/(?P<patient>p.)"]
)
def test_groups_by_folder_and_by_name(patients, rule):
    source = open_source(str(patients), group=rule)["train"]
    assert groups_of(source) == BY_PATIENT
    assert source.groups.dtype == torch.int64
    part = source.subset(torch.tensor([7, 0]))
    assert part.groups.tolist() == [source.groups[7], source.groups[0]]


def test_the_first_folder(patients):
    groups = open_source(str(patients), group="folder:1")["train"].groups
    assert groups.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("place", ["given", "inside", "automatic"])
def test_groups_by_csv(patients, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    rows = "".join(
        f"{kind}/p{n}/{i:03d}.jpg,{n}\n" for kind, n in ("a1", "a2", "b2", "b3") for i in (0, 1)
    )
    path = (tmp_path if place == "given" else patients) / "groups.csv"
    path.write_text("file,group\n" + rows)
    if place == "automatic":
        with pytest.warns(Note, match="its 3 groups are kept whole in splits"):
            source = open_source(str(patients))["train"]
        assert open_source(str(patients), group="none")["train"].groups is None
    else:
        source = open_source(str(patients), group="groups.csv")["train"]
    assert groups_of(source) == BY_PATIENT


def test_a_csv_of_groups_knows_the_splits(tmp_path, make_images):
    root = make_images(tmp_path / "scans", {"train": 2, "Testing": 1}, size=(6, 6))
    table = tmp_path / "table.csv"
    table.write_text("file,group\ntrain/000.jpg,x\ntrain/001.jpg,y\nTesting/000.jpg,z\n")
    with pytest.warns(Note, match="taken as splits"):
        splits = open_source(str(root), group=str(table))
    assert [part.groups.tolist() for part in splits.values()] == [[0, 1], [2]]


@pytest.mark.parametrize("groups", [[7, 7, -3, 9, 9, 9], ["p1", "p1", "p0", "x", "x", "x"]])
@pytest.mark.parametrize("rule", ["", "array"])
def test_groups_of_arrays(tmp_path, groups, rule):
    path = save_arrays(tmp_path / "a.npz", groups)
    if rule:
        source = open_source(path, group=rule)["train"]
    else:
        with pytest.warns(Note, match="its 3 groups are kept whole"):
            source = open_source(path)["train"]
    assert groups_of(source) == [{"#0", "#1"}, {"#2"}, {"#3", "#4", "#5"}]


def test_a_store_keeps_the_groups(patients, tmp_path):
    pack(open_source(str(patients), group="folder:2"), tmp_path / "store", name="scans", side=6)
    with pytest.warns(Note, match="3 groups"):
        source = open_source(str(tmp_path / "store"))["train"]
    assert groups_of(source) == BY_PATIENT
    with pytest.raises(ValueError, match="from other images, labels or groups"):
        pack(open_source(str(patients), group="folder:1"), tmp_path / "store", name="s", side=6)


def test_images_without_a_group_are_counted_and_alone(patients):
    with pytest.warns(UserWarning, match=r"6 of 8 images have no group .* first is a/p1/001.jpg;"):
        source = open_source(str(patients), group=r"re:(a|b)/p[13]/000")["train"]
    assert len(source.groups.unique()) == 8


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ("folder:4", r"folder:4 gives none of the 8 images .* first is a/p1/000.jpg: need a rule"),
        ("re:patient(.)", r"gives none of the 8 images"),
        ("missing.csv", r"missing.csv is no file, neither here nor in .*; need a CSV"),
        ("array", r"got array, but .* has no groups; need an .npz with the array groups"),
    ],
)
def test_rules_that_fit_nothing_are_refused(patients, rule, error):
    with pytest.raises(ValueError, match=error):
        open_source(str(patients), group=rule)


@pytest.mark.parametrize(
    "rule",
    "folder:0 folder:x folder: folder:1.5 re:patient re:(a)(b) re:(a re: patient 1".split(),
)
def test_what_is_no_rule_is_refused_at_once(patients, rule):
    error = r"data\.group: got .*, need a CSV \(file,group\), folder:1, .* or none"
    with pytest.raises(ValueError, match=error):
        Config().with_overrides({"data.group": rule})
    with pytest.raises(ValueError, match=error):
        open_source(str(patients), group=rule)


def test_arrays_have_no_folders_and_need_a_group_for_each_image(tmp_path):
    path = save_arrays(tmp_path / "a.npz", [1, 2, 3])
    with pytest.raises(ValueError, match=r"none of the 3 images of .*; the first is #0"):
        open_source(path, group="folder:1")
    for wrong in ([1, 2], [1.5, 2, 3], [[1], [2], [3]]):
        np.savez(tmp_path / "b.npz", x=np.zeros((3, 2, 2), np.uint8), groups=wrong)
        with pytest.raises(ValueError, match=r"groups has the shape .* for 3 images; need an"):
            open_source(str(tmp_path / "b.npz"))


def test_groups_in_several_splits_are_warned_of(tmp_path, make_images):
    layout = {"train/p1": 1, "train/p2": 1, "train/p3": 2, "val/p3": 1, "test/p2": 1, "test/p4": 1}
    root = make_images(tmp_path / "scans", layout, size=(6, 6))
    leak = r"2 of 4 groups have images in more than one of train, val, test \(p2, p3\); results"
    with pytest.warns(UserWarning, match=leak):
        splits = open_source(str(root), group="folder:1")
    assert splits["train"].groups.tolist() == [0, 1, 2, 2]
    assert splits["test"].groups.tolist() == [1, 3]


# Splits


def sides(source, fraction, seed):
    """The groups of both sides of a split."""
    parts = stratified_split(source, fraction, seed=seed)
    assert sorted(torch.cat([part.indices for part in parts]).tolist()) == [*range(len(source))]
    return [set(part.groups.tolist()) for part in parts]


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=40),
    st.integers(0, 3),
    st.sampled_from([0.1, 0.25, 0.5, 0.8]),
    st.integers(0, 2**31),
)
def test_no_group_is_on_both_sides_and_the_size_is_near(sizes, classes, fraction, seed):
    labels = np.arange(sum(sizes)) % (classes + 1)
    source = grouped(sizes, labels if classes else None)
    try:
        rest, drawn = sides(source, fraction, seed)
    except ValueError:  # only if each group has all images of a class
        for group in range(len(sizes)):
            inside = source.labels[source.groups == group]
            assert any(
                (source.labels == label).sum() == (inside == label).sum() for label in inside
            )
        return
    assert rest and drawn and not rest & drawn and rest | drawn == set(range(len(sizes)))
    if not classes:
        size = sum(sizes[group] for group in drawn)
        alone = len(drawn) == 1 or len(rest) == 1
        assert alone or abs(size - fraction * sum(sizes)) <= max(sizes) / 2


def naive_draw(labels, groups, fraction, seed):
    """The rule of `draw_groups` on dense counts of all classes, with the distances themselves."""
    classes = labels.unique()
    counts = {
        g: [(labels[groups == g] == c).sum() for c in classes] for g in groups.unique().tolist()
    }
    counts = {g: np.array([*each, sum(each)], float) for g, each in counts.items()}
    total = sum(counts.values())
    target = fraction * total
    drawn = np.zeros_like(target)
    chosen = []
    rank = [
        float(rng.uniform(seed, 0, torch.tensor([i]), rng.SPLIT, 1)) for i in range(len(counts))
    ]
    visits = sorted(zip(rank, counts, strict=True))
    for weight, (_, group) in itertools.product((0, 1, 1e9), visits):
        weights = np.array([1.0] * len(classes) + [weight]) / target
        now, then = (
            (weights * (each - target) ** 2).sum() for each in (drawn, drawn + counts[group])
        )
        left = total - drawn - counts[group]
        if group not in chosen and then < now and (left[counts[group] > 0] > 0).all():
            drawn += counts[group]
            chosen.append(group)
    return chosen


@pytest.mark.parametrize("seed", range(20))
def test_a_draw_of_groups_is_the_naive_one(seed):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 25, (200,), generator=generator) * 3
    labels = torch.randint(0, 4, (200,), generator=generator)
    drawn = draw_groups(labels, groups, 0.23, seed=seed)
    assert groups[drawn].unique().tolist() == sorted(naive_draw(labels, groups, 0.23, seed))


def test_groups_of_one_class_each_keep_the_proportions():
    """30, 12 and 6 patients of three classes with 5 images each: the usual case in medicine."""
    labels = np.repeat([0, 1, 2], [150, 60, 30])
    source = grouped([5] * 48, labels)
    for seed in range(30):
        rest, drawn = stratified_split(source, 0.2, seed=seed)
        assert not set(rest.groups.tolist()) & set(drawn.groups.tolist())
        counts = drawn.labels.bincount(minlength=3)
        assert ((counts - torch.tensor([30, 12, 6])).abs() <= 5).all()
        assert abs(len(drawn) - 48) <= 8


def test_a_split_of_groups_is_seeded_and_visits_all():
    source = grouped([3] * 40, np.arange(120) % 2)
    chosen = [sides(source, 0.25, seed)[1] for seed in (0, 0, *range(1, 60))]
    assert chosen[0] == chosen[1] != chosen[2]
    assert set.union(*chosen) == set(range(40))


def test_a_class_of_one_group_stays_in_training():
    source = grouped([10] * 6, np.repeat([0, 0, 0, 0, 0, 1], 10))
    for seed in range(20):
        rest, drawn = stratified_split(source, 0.3, seed=seed)
        assert rest.labels.bincount().tolist()[1] == 10 and set(drawn.labels.tolist()) == {0}


def test_the_smallest_of_large_groups_is_drawn():
    _, drawn = stratified_split(grouped([30, 50, 20]), 0.05, seed=0)
    assert len(drawn) == 20


@pytest.mark.parametrize("labels", [None, [0, 0, 1, 1]])
def test_groups_that_cannot_be_split_are_refused(labels):
    source = grouped([4] if labels is None else [2, 2], labels)
    with pytest.raises(ValueError, match=r"toy: got . groups, and each has all images of a class;"):
        stratified_split(source, 0.5, seed=0)


def test_groups_of_one_image_give_the_sizes_of_a_split_without_groups():
    source = grouped([1] * 100, np.repeat([0, 1, 2], [50, 30, 20]))
    assert stratified_split(source, 0.1, seed=0)[1].labels.bincount().tolist() == [5, 3, 2]


# Training and evaluation


def run_config(source, group, validation=0.2):
    overrides = {"data.source": source, "data.validation": validation, "data.group": group}
    return Config().with_overrides(overrides)


def test_validation_images_and_an_evaluation_keep_groups_whole(tmp_path, make_images):
    root = make_images(
        tmp_path / "more", {f"{'ab'[n % 2]}/p{n}": 10 for n in range(20)}, size=(2, 2)
    )
    train, validation = train_and_validation(str(root), "auto", seed=1, group="folder:2")
    assert not set(train.groups.tolist()) & set(validation.groups.tolist())
    assert len(validation) == 20
    run = run_config(str(root), "folder:2")
    expected = train_and_validation(str(root), 0.2, seed=0, group="folder:2")
    for group in (None, "folder:2"):
        splits = evaluation_splits(str(root), run=run, group=group)
        assert titles(splits.test) == titles(expected[1])
        assert "validation images of the run" in splits.description
    trained_on = expected[0].fingerprint()
    splits = evaluation_splits(str(root), run=run, group=r"re:p(\d)\d*/", trained_on=trained_on)
    assert "groups kept whole" in splits.description
    assert splits.seen == "the run has seen them unlabeled"
    assert not set(splits.train.groups.tolist()) & set(splits.test.groups.tolist())
    inner = stratified_split(splits.train, 0.1, seed=0)
    assert not set(inner[0].groups.tolist()) & set(inner[1].groups.tolist())


def test_a_run_that_cannot_find_its_groups_has_changed(patients):
    run = run_config(str(patients), "lost.csv")
    with pytest.warns(UserWarning, match="training images have changed since the run"):
        evaluation_splits(str(patients), run=run, trained_on="0", group="folder:2")


@pytest.mark.filterwarnings("ignore:.*groups are kept whole")
def test_a_transfer_task_keeps_groups_whole(tmp_path):
    task = task_from_source("mine", save_arrays(tmp_path / "a.npz", np.arange(80) // 4))
    parts = [set(part.groups.tolist()) for part in (task.train, task.val, task.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20
    assert "groups kept whole" in task.split
