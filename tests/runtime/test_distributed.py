"""Several processes: the calls in one, and in real ones that know of each other."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from meanshift.runtime import distributed

# Starts one process alone and two together, with what torchrun would tell them (which is started
# itself in test_detect.py); each writes down what it saw.
PROGRAM = """
import json, os, socket, sys
from pathlib import Path

import torch
from torch import nn

from meanshift import config, distributed
from meanshift.cli import main
from meanshift.data.voc import Annotated, Boxes
from meanshift.detecting import learn
from meanshift.detector import Recipe, build_detector
from meanshift.encoder import build_backbone
from meanshift.evaluate import detect
from meanshift.subject import Judged
from meanshift.weights import Weights, fingerprint

home = Path(sys.argv[1])


class Toy(nn.Module):
    # a loss of each image alone, and their mean
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2, 0.5]))

    def forward(self, images, targets):
        means = torch.stack([image.mean((1, 2)) for image in images])
        sides = torch.stack([target["boxes"][0, 0] for target in targets]) / 10
        return {"loss": (means @ self.weight - sides).square().mean()}


def judged(name):
    torch.manual_seed(0)
    small = config.Encoder(name="resnet10", stem="small-stride2", width=0.125)
    backbone, _ = build_backbone(small)
    return Judged(Weights("made", backbone, "made", 64, home / name), device="cpu")


def images(name):
    found = []
    for index, file in enumerate(sorted(home.glob("*.png"))):
        boxes = torch.tensor([[4.0 + index, 5.0, 50.0, 60.0]])
        labels, difficult = torch.tensor([index % 2]), torch.tensor([False])
        found.append(Annotated(file.stem, file, (72, 80), boxes, labels, difficult))
    return Boxes(name, ["cat", "dog"], found)


def work():
    world, told = distributed.world_size(), {}
    told["before"] = [world, distributed.rank()]
    if world > 1:
        told["refused"] = [main(["evaluate", *words.split()]) for words in (
            "linear pixels --data sample", "linear detect pixels --data sample --root .")]
    with distributed.joined(torch.device("cpu")):
        rank = distributed.rank()
        told["inside"] = [distributed.world_size(), rank]
        told["gathered"] = distributed.gathered([rank] * (rank + 1) + ["so"])
        told["empty"] = distributed.gathered([])
        held = torch.tensor([1.0, 10.0]) * (rank + 1)
        distributed.average(held)
        told["average"] = held.tolist()
        told["own"] = [str(distributed.own_device(torch.device(name)))
                       for name in ("cpu", "cuda", "cuda:0")]
        train = images("train")
        for batch in (2, 3):
            toy, recipe = Toy(), Recipe.of(4, size=64, batch_size=batch, rois=8, lr=0.1)
            losses = learn(judged(f"toy{world}"), toy, train, recipe, 1).losses
            told[f"toy {batch}"] = toy.weight.tolist()
            told[f"toy {batch} losses"] = list(losses.values())
            if world > 1:  # from the last but one step of the one alone
                learned = learn(judged("toy1"), toy := Toy(), train, recipe, 1)
                told[f"joined {batch}"] = [toy.weight.tolist(), learned.processes]
                try:
                    learn(judged(["toy2", "none"][rank]), Toy(), train, recipe, 1)
                except ValueError as error:
                    told["apart"] = str(error)
        recipe = Recipe.of(3, size=64, batch_size=3, rois=8)
        real = build_detector(judged("real").backbone, 2, recipe=recipe)
        learn(judged(f"real{world}"), real, train, recipe, 0)
        told["real"] = fingerprint(real)
        told["untrained"] = fingerprint(build_detector(judged("real").backbone, 2, recipe=recipe))
        result = detect.evaluate(judged(f"real{world}"), train, train, recipe=recipe)
        told["result"] = [result.figures, result.settings, result.card]
        told["text"] = result.text
    (home / f"told-{world}-{rank}.json").write_text(json.dumps(told))


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
started = []
for world, rank in ((1, 0), (2, 0), (2, 1)):
    started.append(os.fork())
    if not started[-1]:
        told = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in told.items() if world > 1}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        work()
        sys.exit(0)
    if world == 1:
        failed = os.waitpid(started.pop(), 0)[1]
        for newest in home.glob("toy1/detectors/*/step-000000004.pt"):
            newest.unlink()
sys.exit(bool(failed) or any([os.waitpid(child, 0)[1] for child in started]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What was seen by one process alone and by each of two, by name: how many, which."""
    home = tmp_path_factory.mktemp("processes")
    random = np.random.default_rng(0)
    for index in range(5):
        pixels = random.integers(0, 256, (72, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels // (1 + index)).save(home / f"{index}.png")
    program = home / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(home)],
        capture_output=True, text=True, check=False, timeout=300,
        env={k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {name: json.loads((home / f"told-{name}.json").read_text()) for name in NAMES}
    return {**found, "stderr": done.stderr}


NAMES = ("1-0", "2-0", "2-1")


# One process


def test_one_process_is_the_first_of_one_and_talks_to_itself(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (distributed.world_size(), distributed.rank()) == (1, 0)
    own = [1, "two"]
    with distributed.process_group(torch.device("cpu")):
        assert distributed.all_gather_list(own) == own
        assert not torch.distributed.is_initialized()
        held = torch.tensor([1.0, 3.0])
        distributed.all_mean_(held)
        assert held.tolist() == [1, 3]
    for name in ("cpu", "cuda", "cuda:1"):
        assert distributed.local_device(torch.device(name)) == torch.device(name)


def test_of_several_processes_each_takes_its_own_gpu_unless_one_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert distributed.world_size() == 4
    for given, taken in {"cuda": "cuda:3", "cuda:1": "cuda:1", "cpu": "cpu"}.items():
        assert distributed.local_device(torch.device(given)) == torch.device(taken)


# Two


def test_each_process_knows_how_many_there_are_and_which_it_is(told):
    assert [told[name]["inside"] for name in NAMES] == [[1, 0], [2, 0], [2, 1]]
    assert [told[name]["before"] for name in NAMES] == [[1, 0], [2, 0], [2, 1]]
    assert told["2-0"]["own"] == ["cpu", "cuda:0", "cuda:0"]
    assert told["2-1"]["own"] == ["cpu", "cuda:1", "cuda:0"]


def test_lists_are_gathered_in_the_order_of_the_processes(told):
    assert told["1-0"]["gathered"] == [0, "so"]
    assert told["2-0"]["gathered"] == told["2-1"]["gathered"] == [0, "so", 1, 1, "so"]
    assert all(told[name]["empty"] == [] for name in NAMES)


def test_a_mean_over_processes_is_the_same_in_each(told):
    assert told["1-0"]["average"] == [1, 10]
    assert told["2-0"]["average"] == told["2-1"]["average"] == [1.5, 15]


@pytest.mark.parametrize("batch", [2, 3])
def test_steps_over_two_processes_are_those_of_one_also_with_shares_of_two_and_one(told, batch):
    alone, first, second = (told[name][f"toy {batch}"] for name in NAMES)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-5)
    assert first != pytest.approx([0.3, -0.2, 0.5], rel=1e-2)


def test_the_loss_of_two_processes_is_that_of_one(told):
    alone, first, second = (told[name]["toy 2 losses"] for name in NAMES)
    assert first == second == pytest.approx(alone, rel=1e-5) and len(set(alone)) == 4


def test_the_loss_of_uneven_shares_is_that_of_one(told):
    alone, first, second = (told[name]["toy 3 losses"] for name in NAMES)
    assert first == second == pytest.approx(alone, rel=1e-5)


def test_a_real_detector_and_its_result_are_the_same_in_both_processes(told):
    assert told["2-0"]["real"] == told["2-1"]["real"] != told["2-0"]["untrained"]
    assert told["2-0"]["result"] == told["2-1"]["result"]
    figures, settings, card = told["2-0"]["result"]
    assert settings["processes"] == [[2]] and card["unreadable"] == 0 and figures
    assert " of 5 objects found" in told["2-0"]["text"]
    assert told["2-1"]["text"] == ""  # the first draws the image
    assert told["1-0"]["result"][1]["processes"] == [[1]]


@pytest.mark.parametrize("batch", [2, 3])
def test_two_processes_go_on_where_one_was_stopped_and_the_card_tells(told, batch):
    alone = told["1-0"][f"toy {batch}"]
    for name in ("2-0", "2-1"):
        weight, processes = told[name][f"joined {batch}"]
        assert weight == pytest.approx(alone, rel=1e-5) and processes == [1, 2]


def test_processes_that_do_not_share_a_disk_are_refused(told):
    for name in ("2-0", "2-1"):
        assert "the processes found different checkpoints" in told[name]["apart"]
        assert "need a folder on a disk that all of them share" in told[name]["apart"]


def test_protocols_for_one_process_are_refused_in_several(told):
    assert told["2-0"]["refused"] == told["2-1"]["refused"] == [2, 2]
    words = "2 processes were started; of the protocols knn and detect work in several"
    assert told["stderr"].count(words) == 2  # one voice, two commands
