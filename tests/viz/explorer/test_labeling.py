"""Labeling through the API of the live page: probe, accuracy, proposals, colors, conflicts."""

import json

import pytest

from meanshift.evaluation.predict import Classifier
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run
from tests.support.explorer import (
    get,
    post,
    serving_explorer,
    wait_for,
    write_arrays,
    write_live_run,
)

COLORS = ["red", "green", "blue"]


@pytest.fixture
def run(tmp_path):
    return write_live_run(
        tmp_path / "run", write_arrays(tmp_path / "images.npz"), snapshot_images=45
    )


@pytest.fixture
def port(run):
    with serving_explorer(Explorer(Run(run))) as number:
        yield number


def give(port, indices, label, seen=10**6):
    body = json.dumps({"seen": seen, "indices": indices, "label": label})
    return post(port, "/api/labels", body)


def ask(port, path):
    return wait_for(lambda: get(port, path)).json


def test_from_no_label_to_a_classifier(port, run):
    state = get(port, "/api/labels").json
    assert (state["version"], state["given"], state["classes"]) == (0, [], [])
    assert get(port, "/api/labels?since=0").status == 204
    assert state["command"] == f"meanshift predict {run}/labels FOLDER"
    assert ask(port, "/api/label/probe")["predicted"] == {}
    assert ask(port, "/api/label/accuracy")["accuracy"] is None
    assert not (run / "labels").exists()

    proposed = ask(port, "/api/label/images?kind=proposed")["images"]
    assert len(proposed) == 10 and {image["label"] for image in proposed} == {"0", "1", "2"}
    for image in proposed:
        give(port, [image["index"]], COLORS[int(image["label"])])
    assert not (run / "labels/classifier.safetensors").exists()  # until the page asks for it
    probe = ask(port, "/api/label/probe")
    assert sum(probe["predicted"].values()) == 45 == probe["images"] and probe["outside"] == 0
    accuracy = ask(port, "/api/label/accuracy")
    assert accuracy["labels"] == 10 and accuracy["expected"] is None
    assert accuracy["interval"][0] <= accuracy["accuracy"] <= accuracy["interval"][1]
    classifier = Classifier.load(run / "labels")
    assert classifier.labels == classifier.version == 10 and set(classifier.classes) == set(COLORS)

    shown = ask(port, "/api/label/images?kind=proposed")["images"]
    assert not {i["index"] for i in shown} & {i["index"] for i in proposed}
    right = [COLORS[int(image["label"])] == image["predicted"] for image in shown]
    assert sum(right) >= 7  # of ten; the encoder is not trained
    red = ask(port, "/api/label/images?kind=predicted&label=red")["images"]
    confidences = [image["confidence"] for image in red]
    assert len(red) == probe["predicted"]["red"] and confidences == sorted(confidences)
    near = ask(port, "/api/label/images?kind=neighbors&index=7")["images"]
    assert near[0]["index"] == 7 and len(near) == 24
    some = ask(port, "/api/label/images?kind=selected&indices=3,1")["images"]
    assert [image["index"] for image in some] == [3, 1]

    colors = get(port, "/api/colors?by=given&epoch=2").json
    assert sum(colors["sizes"]) == 10 and colors["values"].count(None) == 35
    colors = get(port, "/api/colors?by=predicted&epoch=2").json
    assert dict(zip(colors["names"], colors["sizes"], strict=True)) == probe["predicted"]
    names = [value for value, _ in get(port, "/api/run").json["colorings"]]
    assert {"given", "predicted"} <= set(names)
    lines = get(port, "/labels.csv").body.decode().splitlines()
    assert lines[0] == "file,label" and len(lines) == 11


def test_images_outside_of_the_map_are_labeled_and_used(port, run):
    give(port, [0, 59], "a")  # 59 is not on the map
    give(port, [1, 58], "b")
    probe = ask(port, "/api/label/probe?in=snapshot")
    assert probe["images"] == 45 and probe["outside"] == 2
    assert not (run / "labels/classifier.safetensors").exists()  # it would miss two labels
    probe = ask(port, "/api/label/probe?in=train")
    assert probe["images"] == 60 and probe["outside"] == 0
    assert Classifier.load(run / "labels").labels == 4
    give(port, [1, 58], None)
    give(port, [58], "b")
    assert get(port, "/api/colors?by=predicted&epoch=2").json["names"] == ["a", "b"]
    images = ask(port, "/api/label/images?kind=neighbors&index=59&in=train")["images"]
    assert images[0]["row"] is None and images[0]["index"] == 59
    answer = get(port, "/api/label/images?kind=neighbors&index=59&in=snapshot")
    assert answer.status == 404 and "choose all training images" in answer.error


def test_a_page_that_has_not_seen_a_label_gets_it_instead_of_replacing_it(port):
    first = give(port, [5], "a", seen=0)
    assert first.status == 200 and first.json["version"] == 1
    late = give(port, [5], "b", seen=0)
    assert late.status == 409 and late.json["state"]["given"] == [[5, "a"]]
    assert "#5 was labeled a on another page" in late.error
    assert give(port, [5], "b", seen=1).json["given"] == [[5, "b"]]
    undone = post(port, "/api/labels", json.dumps({"seen": 2, "undo": 2}))
    assert undone.json["given"] == [[5, "a"]]
    again = post(port, "/api/labels", json.dumps({"seen": 2, "undo": 2}))
    assert again.status == 409 and "nothing was undone" in again.error


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"seen": "x"}',
        '{"seen": 0}',
        '{"seen": 0, "indices": [0], "label": 5}',
        '{"seen": 0, "indices": "12", "label": "a"}',
        '{"seen": 0, "indices": [1.5], "label": "a"}',
        '{"seen": 1e999, "indices": [0], "label": "a"}',
        "[" * 100_000,
    ],
    ids=range(10),
)
def test_nonsense_is_refused(port, run, body):
    assert post(port, "/api/labels", body).status == 400
    assert not (run / "labels/labels.jsonl").exists()


def test_unknown_lists_and_sources_are_refused(port):
    for path in (
        "/api/label/images?kind=other",
        "/api/label/images?kind=predicted&label=x",
        "/api/label/images?kind=selected&indices=999",
        "/api/label/images?kind=selected&indices=a",
        "/api/label/probe?in=validation",
        "/api/colors?by=predicted&epoch=2",
    ):
        answer = get(port, path)
        assert answer.status in (400, 404) and answer.error, path


def test_labels_of_a_page_from_elsewhere_are_refused(port, run):
    body = json.dumps({"seen": 0, "indices": [0], "label": "a"})
    assert post(port, "/api/labels", body, Origin="http://evil.example").status == 403
    assert not (run / "labels").exists()


def test_without_images_there_is_nothing_to_label(run):
    (run.parent / "images.npz").unlink()
    with serving_explorer(Explorer(Run(run))) as port:
        assert get(port, "/api/labels").status == 404
        assert give(port, [0], "a").status == 404
