"""Average precision against pycocotools, against VOC's definition in loops, and by hand."""

import contextlib
import io
import math

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from meanshift.ops.average_precision import (
    Detections,
    GroundTruth,
    average_precision,
    match_detections,
)

RULES = ("voc07", "coco")


def detections(boxes, scores, labels=None):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    labels = [0] * len(boxes) if labels is None else labels
    return Detections(boxes, torch.tensor(scores), torch.tensor(labels, dtype=torch.int64))


def truth(boxes, labels=None, difficult=None):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    labels = [0] * len(boxes) if labels is None else labels
    difficult = [False] * len(boxes) if difficult is None else difficult
    return GroundTruth(
        boxes,
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(difficult, dtype=torch.bool),
    )


def random_case(seed, images=12, classes=4, most=12, ties=False):
    """Integer boxes near and far from the objects; some images and some classes are empty."""
    random = np.random.default_rng(seed)

    def boxes(count):
        corner = random.integers(0, 30, (count, 2))
        return np.concatenate([corner, corner + random.integers(1, 20, (count, 2))], 1)

    found, truths = [], []
    for _ in range(images):
        objects = boxes(random.integers(0, 5))
        kinds = random.integers(0, classes - 1, len(objects))  # the last class has no objects
        difficult = random.random(len(objects)) < 0.25
        truths.append(truth(objects, kinds.tolist(), difficult.tolist()))
        stray = boxes(random.integers(0, most))
        labels = random.integers(0, classes, len(stray))
        if len(objects):
            which = random.integers(0, len(objects), random.integers(0, most))
            near = objects[which] + random.integers(-2, 3, (len(which), 4))
            near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 1)
            stray = np.concatenate([stray, near])
            labels = np.concatenate([labels, kinds[which]])
        scores = random.integers(0, 5, len(stray)) / 4 if ties else random.random(len(stray))
        found.append(detections(stray, scores.tolist(), labels.tolist()))
    return found, truths, classes


def rows_of(fields):
    """The values of a dataclass of tensors, row by row."""
    return zip(*map(torch.Tensor.tolist, vars(fields).values()), strict=True)


def coco_box(box):
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def by_pycocotools(found, truths, classes):
    """(AP, AP50, AP75, AP50 of each class) in percent; objects of a huge area are ignored."""
    annotations, results = [], []
    for number, (image, objects) in enumerate(zip(found, truths, strict=True)):
        for box, label, difficult in rows_of(objects):
            _, _, width, height = coco_box(box)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label,
                    "bbox": coco_box(box),
                    "area": 1e11 if difficult else width * height,
                    "iscrowd": 0,
                }
            )
        for box, score, label in rows_of(image):
            result = {"image_id": number, "category_id": label, "score": score}
            results.append({**result, "bbox": coco_box(box)})
    coco = COCO()
    coco.dataset = {
        "info": {},
        "images": [{"id": number} for number in range(len(found))],
        "categories": [{"id": label} for label in range(classes)],
        "annotations": annotations,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.params.areaRng = [[0, 1e10]]
        evaluation.params.areaRngLbl = ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # threshold, recall, class
    by_class = [
        math.nan if (of := precision[0, :, k])[0] < 0 else 100 * of.mean() for k in range(classes)
    ]
    known = precision[:, :, precision[0, 0] >= 0]
    return 100 * known.mean(), 100 * known[0].mean(), 100 * known[5].mean(), by_class


def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    sizes = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return shared / (sizes - shared)


def by_definition(found, truths, classes):
    """The devkit's rule for 2007, one detection at a time."""
    table = []
    for label in range(classes):
        count = sum(int(((t.labels == label) & ~t.difficult).sum()) for t in truths)
        if not count:
            continue
        row = []
        for threshold in range(50, 100, 5):
            ordered = sorted(
                (-score, image, index)
                for image, image_detections in enumerate(found)
                for index, score in enumerate(image_detections.scores.tolist())
                if image_detections.labels[index] == label
            )
            matched = set()
            curve = []
            right = wrong = 0
            for _, image, index in ordered:
                objects = truths[image]
                best, which = -1.0, None
                for j, box in enumerate(objects.boxes.tolist()):
                    if objects.labels[j] != label:
                        continue
                    overlap = iou(found[image].boxes[index].tolist(), box)
                    if overlap > best:
                        best, which = overlap, j
                if best > threshold / 100:
                    if not objects.difficult[which]:
                        right += (image, which) not in matched
                        wrong += (image, which) in matched
                        matched.add((image, which))
                else:
                    wrong += 1
                curve.append((right / count, right / max(right + wrong, 1)))
            at = [max((p for r, p in curve if r >= t * 0.1), default=0) for t in range(11)]
            row.append(100 * sum(at) / 11)
        table.append(row)
    mean = np.mean(table, axis=0)
    return mean.mean(), mean[0], mean[5]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_cocos_rule_is_pycocotools(seed, ties):
    found, truths, classes = random_case(seed, ties=ties)
    got = average_precision(found, truths, classes=classes, rule="coco")
    expected = by_pycocotools(found, truths, classes)
    assert [got.ap, got.ap50, got.ap75] == pytest.approx(expected[:3], abs=1e-9)
    assert got.by_class == pytest.approx(expected[3], abs=1e-9, nan_ok=True)
    assert math.isnan(got.by_class[-1])
    assert 0 < got.ap < got.ap50


@pytest.mark.parametrize("seed", range(3))
def test_coco_counts_a_hundred_detections_per_class_and_image(seed):
    found, truths, classes = random_case(seed, images=3, classes=2, most=500, ties=seed == 2)
    assert max(int(one.labels.bincount().max()) for one in found) > 110
    got = average_precision(found, truths, classes=classes, rule="coco")
    expected = by_pycocotools(found, truths, classes)
    assert [got.ap, got.ap50, got.ap75] == pytest.approx(expected[:3], abs=1e-9)


def test_the_hundredth_detection_counts_and_the_next_does_not():
    box = [0, 0, 10, 10]
    stray = [[20, 20, 30, 30]] * 100
    for before, expected in ((99, 1.0), (100, 0.0)):
        one = detections([*stray[:before], box], [0.9] * before + [0.5], [0] * (before + 1))
        got = average_precision([one], [truth([box])], classes=1, rule="coco")
        assert got.ap50 == pytest.approx(expected)
    other = detections([*stray, box], [0.9] * 100 + [0.5], [1] * 100 + [0])
    assert average_precision([other], [truth([box])], classes=2, rule="coco").ap50 == 100
    one = detections([*stray, box], [0.9] * 100 + [0.5])
    assert average_precision([one], [truth([box])], classes=1, rule="voc07").ap50 == (
        pytest.approx(100 / 101)
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_vocs_rule_is_its_definition(seed, ties):
    found, truths, classes = random_case(seed, ties=ties)
    got = average_precision(found, truths, classes=classes, rule="voc07")
    expected = by_definition(found, truths, classes)
    assert [got.ap, got.ap50, got.ap75] == pytest.approx(expected, abs=1e-9)
    assert 0 < got.ap < got.ap50


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_images_does_not_matter_when_scores_differ(seed, rule):
    found, truths, classes = random_case(seed)
    order = np.random.default_rng(seed).permutation(len(found))
    one = average_precision(found, truths, classes=classes, rule=rule)
    other = average_precision(
        [found[i] for i in order], [truths[i] for i in order], classes=classes, rule=rule
    )
    assert (one.ap, one.ap50, one.ap75) == (other.ap, other.ap50, other.ap75)


# By hand

A, B, FAR = [0, 0, 10, 10], [20, 0, 30, 10], [50, 50, 60, 60]


@pytest.mark.parametrize("rule", RULES)
def test_all_found_is_100_and_nothing_found_is_0(rule):
    objects = [truth([A, B]), truth([])]
    full = average_precision(
        [detections([A, B], [0.9, 0.8]), detections([], [])], objects, classes=1, rule=rule
    )
    assert (full.ap, full.ap50, full.ap75) == pytest.approx((100, 100, 100))
    none = average_precision(
        [detections([], []), detections([FAR], [0.9])], objects, classes=1, rule=rule
    )
    assert (none.ap, none.ap50, none.ap75, none.by_class) == (0, 0, 0, [0])


def test_one_right_one_wrong_one_right_of_two():
    """Recall .5 at precision 1, recall 1 at precision 2/3."""
    one = detections([A, FAR, B], [0.9, 0.8, 0.7])
    got = average_precision([one], [truth([A, B])], classes=1, rule="voc07")
    assert got.ap50 == pytest.approx(100 * (6 + 5 * 2 / 3) / 11)
    got = average_precision([one], [truth([A, B])], classes=1, rule="coco")
    assert got.ap50 == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)


def test_an_overlap_on_the_threshold_is_enough_for_coco_and_not_for_voc():
    one, objects = [detections([[0, 0, 10, 5]], [0.9])], [truth([A])]
    assert average_precision(one, objects, classes=1, rule="coco").ap50 == 100
    assert average_precision(one, objects, classes=1, rule="voc07").ap50 == 0
    wide, objects = [detections([[0, 0, 3, 1]], [0.9])], [truth([[0, 0, 4, 1]])]
    assert average_precision(wide, objects, classes=1, rule="coco").ap75 == 100
    assert average_precision(wide, objects, classes=1, rule="voc07").ap75 == 0


def test_overlaps_count_up_to_their_threshold():
    """IoU .8: right at .5 to .75 (and at .8 for COCO)."""
    one, objects = [detections([[0, 0, 10, 8]], [0.9])], [truth([A])]
    assert average_precision(one, objects, classes=1, rule="voc07").ap == pytest.approx(60)
    assert average_precision(one, objects, classes=1, rule="coco").ap == pytest.approx(70)


@pytest.mark.parametrize("rule", RULES)
def test_a_second_detection_of_one_object_is_wrong(rule):
    one = detections([A, A, B], [0.9, 0.8, 0.7])
    got = average_precision([one], [truth([A, B])], classes=1, rule=rule).ap50
    points = (6, 5) if rule == "voc07" else (51, 50)
    assert got == pytest.approx(100 * (points[0] + points[1] * 2 / 3) / sum(points))


def test_a_matched_object_leaves_the_next_detection_a_free_one_only_by_cocos_rule():
    objects = [truth([[0, 0, 10, 10], [2, 0, 12, 10]])]
    one = [
        detections([[0, 0, 10, 10], [0.5, 0, 10.5, 10]], [0.9, 0.8])
    ]  # both overlap the first one most
    assert average_precision(one, objects, classes=1, rule="coco").ap50 == 100
    assert average_precision(one, objects, classes=1, rule="voc07").ap50 == pytest.approx(600 / 11)


def test_difficult_objects_do_not_count():
    objects = [truth([A, B], difficult=[True, False])]
    for rule in RULES:
        both = average_precision([detections([A, B], [0.9, 0.8])], objects, classes=1, rule=rule)
        alone = average_precision([detections([B], [0.8])], objects, classes=1, rule=rule)
        assert both == alone
        assert both.ap == pytest.approx(100)
    again = [detections([A, A, B], [0.9, 0.85, 0.8])]  # a second one on the difficult object
    assert average_precision(again, objects, classes=1, rule="voc07").ap50 == 100
    assert average_precision(again, objects, classes=1, rule="coco").ap50 == pytest.approx(50)


@pytest.mark.parametrize("rule", RULES)
def test_other_classes_do_not_match_and_absent_classes_are_left_out(rule):
    objects = [truth([A, B], [0, 1]), truth([FAR], [2], [True])]
    one = [detections([A, B], [0.9, 0.8], [0, 0]), detections([FAR], [0.9], [3])]
    got = average_precision(one, objects, classes=4, rule=rule)
    assert got.by_class[:2] == [100, 0]
    assert all(map(math.isnan, got.by_class[2:]))
    assert got.ap50 == 50


@pytest.mark.parametrize("rule", RULES)
def test_boxes_without_area_are_wrong(rule):
    point = [5, 5, 5, 5]
    one = detections([point, A], [0.9, 0.8])
    got = average_precision([one], [truth([A])], classes=1, rule=rule)
    assert got.ap50 == pytest.approx(50)
    got = average_precision([detections([point], [0.9])], [truth([point, A])], classes=1, rule=rule)
    assert got.ap50 == 0


@pytest.mark.parametrize("rule", RULES)
def test_bad_input_is_refused(rule):
    def evaluate(found, truths, classes=2):
        return average_precision(found, truths, classes=classes, rule=rule)

    with pytest.raises(ValueError, match="1 images and the objects of 0"):
        evaluate([detections([A], [0.5])], [])
    with pytest.raises(ValueError, match="0 images"):
        evaluate([], [])
    with pytest.raises(ValueError, match="image 1: labels 0 to 2; need 0 to 1"):
        evaluate([detections([A], [0.5])] * 2, [truth([A]), truth([A], [2])])
    with pytest.raises(ValueError, match="image 0: labels -1"):
        evaluate([detections([A], [0.5], [-1])], [truth([A])])
    with pytest.raises(ValueError, match="not finite"):
        evaluate([detections([A], [math.nan])], [truth([A])])
    with pytest.raises(ValueError, match="not finite"):
        evaluate([detections([[0, 0, math.inf, 1]], [0.5])], [truth([A])])
    with pytest.raises(ValueError, match="nothing but difficult"):
        evaluate([detections([A], [0.5])], [truth([A], difficult=[True])])


# Matching


def test_detections_are_matched_with_objects():
    one = detections([FAR, B, A, A, [0, 0, 10, 9]], [0.9, 0.8, 0.7, 0.4, 0.6])
    objects = truth([A, B, [80, 80, 90, 90]])
    of_found, of_truth = match_detections(one, objects)
    assert of_found.tolist() == [-1, 1, 0, -1, -1]
    assert of_truth.tolist() == [2, 1, -1]
    of_found, of_truth = match_detections(one, objects, min_score=0.75)
    assert of_found.tolist() == [-1, 1, -1, -1, -1]
    assert of_truth.tolist() == [-1, 1, -1]
    overlapping = detections([[0, 0, 10, 8]], [0.5])
    for threshold, expected in ((0.8, [0]), (0.81, [-1])):
        of_found, _ = match_detections(overlapping, truth([A]), threshold=threshold)
        assert of_found.tolist() == expected


def test_the_class_must_match_and_difficult_objects_come_last():
    of_found, of_truth = match_detections(detections([A], [0.9], [1]), truth([A], [0]))
    assert of_found.tolist() == [-1]
    assert of_truth.tolist() == [-1]
    objects = truth([A, [0, 0, 10, 9]], difficult=[True, False])
    of_found, of_truth = match_detections(detections([A, A, A], [0.7, 0.9, 0.8]), objects)
    assert of_found.tolist() == [-1, 1, 0]
    assert of_truth.tolist() == [2, 1]


@pytest.mark.parametrize(("one", "objects"), [([], [A]), ([A], []), ([], [])])
def test_images_without_detections_or_objects_have_no_matches(one, objects):
    of_found, of_truth = match_detections(detections(one, [0.9] * len(one)), truth(objects))
    assert of_found.tolist() == [-1] * len(one)
    assert of_truth.tolist() == [-1] * len(objects)
