"""The command line: its surface, its refusals, and whole runs on folders of tiny images."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from meanshift import cli, load_encoder
from meanshift.config import settings
from meanshift.config.recipes import RECIPES
from meanshift.data import train_and_validation
from meanshift.evaluation import context

COMMANDS = "demo pretrain evaluate embed export figures report explore pack recipes bench".split()
NETWORK = (
    "--data.image_size 16 --encoder.width 0.125 --train.batch_size 4 --method.bank_size 16 "
    "--train.device cpu"
).split()
TINY = [
    *NETWORK,
    *"--train.epochs 2 --optim.warmup_epochs 0 --data.workers 0 --train.snapshots 2".split(),
]

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
GREY = pytest.mark.filterwarnings("ignore:.*count as gray:UserWarning")  # said by the snapshots


@pytest.fixture
def photos(tmp_path, make_images):
    """Two classes, with images to train on and others to judge with."""
    counts = {"train/a": 6, "train/b": 6, "val/a": 2, "val/b": 2}
    return make_images(tmp_path / "photos", counts, size=(20, 24))


@pytest.fixture
def trained(call, photos, tmp_path):
    """A finished run on `photos`."""
    code, _, err = call("pretrain", "small", "--data", photos, "--out", tmp_path / "run", *TINY)
    assert code == 0, err
    return tmp_path / "run"


def module(*arguments, **options):
    command = [sys.executable, "-m", "meanshift", *arguments]
    return subprocess.run(command, text=True, check=False, stderr=subprocess.PIPE, **options)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(run, kind):
    return [record for record in lines(run / "metrics.jsonl") if record["kind"] == kind]


def contents(run):
    """Every byte that training wrote; the environment tells of each session, so it is left out."""
    files = [path for path in run.rglob("*") if path.is_file()]
    return {p.relative_to(run): p.read_bytes() for p in files if p.name != "environment.json"}


def spoil(folder, count):
    for image in sorted(folder.iterdir())[:count]:
        image.write_bytes(b"not an image")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(call, command):
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: meanshift {command}")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_front_door_lists_the_commands(call, arguments):
    code, out, _ = call(*arguments)
    assert code == 0
    assert all(re.search(rf"^ +{command} ", out, re.MULTILINE) for command in COMMANDS)


def test_help_is_instant():
    """In processor time, which other tests on the same cores do not stretch."""
    taken = []
    for _ in range(3):
        before = os.times()
        assert module("--help", stdout=subprocess.DEVNULL).returncode == 0
        after = os.times()
        taken.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(taken) < 0.5


@pytest.mark.parametrize("command", ["demo", "pretrain", "bench"])
def test_every_setting_is_a_flag_with_its_help(call, command):
    _, out, _ = call(command, "--help")
    flat = " ".join(out.split())
    for name, _, default, text in settings():
        assert f"--{name} " in flat
        assert " ".join(f"{text} [{default}]".split())[-12:] in flat


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smal"], ["'smal'", "small"]),
        (["small", "--data", "no/such/folder"], ["no/such/folder", "need a folder"]),
        (["small", "--data", "sample", "--method.k", "3000"], ["method.k", "3000", "2048"]),
        (["small", "--train.batch_size", "4096"], ["4096", "--train.batch_size"]),
        (["small", "--method.k", "many"], ["method.k", "'many'", "whole number"]),
        (["small", "--optim.lr", "-1"], ["optim.lr", "-1", "above 0"]),
        (
            ["small", "--method.target_view", "medium"],
            ["method.target_view", "'medium'", "weak, strong"],
        ),
        (["small", "--method.name", "byol-asym"], ["method.k", "--method.k 1"]),
        (["small", "--encoder.name", "resnet81"], ["encoder.name", "resnet81", "resnet18"]),
        (["small", "--train.device", "toaster"], ["train.device", "'toaster'"]),
        (["small", "--train.precision", "float16", "--train.device", "cpu"], ["float16", "GPU"]),
    ],
)
def test_a_users_mistake_is_one_clear_message(call, tmp_path, arguments, words):
    code, out, err = call("pretrain", *arguments, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.count("meanshift: ") == 1
    message = err.partition("meanshift: ")[2]
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["pretrain", "small", "--out", "x", "--method.kk", "5"],
        ["pretrain", "small", "--out", "x", "--method.k"],
        ["pretrain", "small"],
        ["paint"],
    ],
)
def test_a_wrong_command_line_is_refused(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.count("error: ") == 1


def test_the_process_leaves_with_two_and_without_a_traceback(tmp_path):
    done = module("pretrain", "smal", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stderr.startswith("meanshift: ") and "Traceback" not in done.stderr


def test_an_empty_folder_is_refused(call, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = call("pretrain", "small", "--data", empty, "--out", tmp_path / "run")
    assert code == 2
    assert f"{empty}: no image found" in err and ".jpg" in err


def test_a_pipe_closed_by_its_reader_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = module("recipes", stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")


def test_recipes_tell_their_cost_and_result(call):
    code, out, _ = call("recipes")
    assert code == 0
    parts = re.split(r"^(?=\S)", out, flags=re.MULTILINE)[1:]
    assert [part.split()[0] for part in parts] == list(RECIPES)
    for part in parts:
        for told in ("command: meanshift ", "hardware: ", "time: ", "result: "):
            assert re.search(rf"^ +{told}\S", part, re.MULTILINE), (told, part)


def test_no_recipe_holds_a_blank_to_be_filled_in(call):
    _, out, _ = call("recipes")
    assert re.findall(r"\b[A-Z]+_[A-Z]+\b|TODO|\?\?", out) == []


def test_class_folders_give_purity_and_knn(trained):
    train = of_kind(trained, "train")
    assert {"loss", "agreement", "effective_rank", "spread", "same_image", "lr"} <= set(train[-1])
    assert [record["k"] for record in train] == [1, 3]
    assert "purity" in train[-1] and "purity_with_self" in train[-1]
    judged = of_kind(trained, "monitor")
    assert judged and 0 <= judged[-1]["1-NN"] <= 100


def test_a_finished_run_holds_what_the_plan_says(trained):
    assert {"config.json", "environment.json", "metrics.jsonl", "checkpoints", "snapshots"} <= {
        path.name for path in trained.iterdir()
    }
    config = json.loads((trained / "config.json").read_text())
    assert config["encoder"]["width"] == 0.125 and config["train"]["epochs"] == 2
    assert [p.name for p in sorted((trained / "snapshots").iterdir())] == [
        "epoch-0000.pt",
        "epoch-0002.pt",
    ]
    assert (trained / "checkpoints" / "step-000000006.pt").is_file()


def test_a_flat_folder_has_everything_but_purity_and_knn(call, tmp_path, make_images):
    flat, run = make_images(tmp_path / "flat", {"": 12}, size=(20, 24)), tmp_path / "run"
    code, out, err = call("pretrain", "small", "--data", flat, "--out", run, *TINY)
    assert code == 0 and f"finished: {run}" in out
    assert "no labels" in err and "epoch 2/2" in err and "images/s" in err
    last = of_kind(run, "train")[-1]
    assert {"loss", "agreement", "effective_rank", "spread", "same_image"} <= set(last)
    assert "purity" not in last and of_kind(run, "monitor") == []
    assert len(of_kind(run, "snapshot")) == 2


def test_the_same_command_again_says_finished_and_changes_nothing(call, trained, photos):
    before = contents(trained)
    code, out, _ = call("pretrain", "small", "--data", photos, "--out", trained, *TINY)
    assert code == 0 and f"finished: {trained}" in out
    assert contents(trained) == before


def test_a_changed_setting_is_refused(call, trained, photos):
    before = contents(trained)
    changed = [*TINY, "--method.k", "4", "--train.log_every", "3"]
    code, _, err = call("pretrain", "small", "--data", photos, "--out", trained, *changed)
    assert code == 2
    assert "method.k: 5 there, 4 now" in err and "log_every" not in err
    assert contents(trained) == before


@pytest.mark.parametrize("other", ["images", "settings"])
def test_a_refused_continuation_leaves_every_byte(call, trained, photos, other):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    changed = [*TINY, "--train.log_every", "3"]  # may change, but not when the run is refused
    if other == "images":
        shutil.copy(photos / "train/a/000.jpg", photos / "train/a/more.jpg")
    else:
        changed += ["--train.seed", "1"]
    code, _, err = call("pretrain", "small", "--data", photos, "--out", trained, *changed)
    assert code == 2 and f"other {other}" in err
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}


def test_evaluate_prints_a_table_and_writes_a_card(call, trained, photos):
    code, out, _ = call("evaluate", "knn", trained, "--ks", "1", "3")
    assert code == 0
    shown = dict(re.findall(r"^ *(\d+-NN) +([\d.]+)$", out, re.MULTILINE))
    held = json.loads((trained / "results" / "knn.json").read_text())
    assert set(shown) == set(held["figures"]) == {"1-NN", "3-NN"}
    assert {k: float(v) for k, v in shown.items()} == pytest.approx(held["figures"], abs=0.01)
    card = held["card"]
    assert (card["protocol"], card["data"]) == ("knn", str(photos))
    assert card["sizes"] == {"train": 12, "test": 4}
    assert {"weights", "seed", "versions", "date"} <= set(card)


def test_evaluate_takes_a_checkpoint_file(call, trained):
    first, last = sorted((trained / "checkpoints").iterdir())
    weights = []
    for path in (first, last):
        assert call("evaluate", "knn", path)[0] == 0
        held = json.loads((trained / "results" / f"knn-{path.stem}.json").read_text())
        weights.append(held["card"]["weights"])
    assert weights[0] != weights[1]


def test_evaluate_judges_on_the_images_that_the_run_held_out(
    call, tmp_path, make_images, monkeypatch
):
    source, run = make_images(tmp_path / "all", {"a": 10, "b": 10}, size=(20, 24)), tmp_path / "r"
    kept = ["--data.validation", "0.4", "--train.seed", "3", *TINY]
    assert call("pretrain", "small", "--data", source, "--out", run, *kept)[0] == 0
    judged, stored = [], context.stored

    def spy(network, part, **options):
        judged.append([part.title(i) for i in range(len(part))])
        return stored(network, part, **options)

    monkeypatch.setattr(context, "stored", spy)
    assert call("evaluate", "knn", run, "--ks", "1")[0] == 0
    parts = train_and_validation(str(source), 0.4, seed=3)
    titles = [[part.title(i) for i in range(len(part))] for part in parts]
    assert sorted(judged) == sorted(titles)


@pytest.mark.parametrize("words", [["knn"], ["magic", "run"], ["run"]])
def test_evaluate_says_what_it_needs(call, words):
    code, _, err = call("evaluate", *words)
    assert code == 2 and "need one or more of knn, linear, semi, cluster" in err


def test_evaluate_names_the_run_that_is_not_there(call, tmp_path):
    missing = tmp_path / "a" / "b" / "run"
    code, _, err = call("evaluate", "knn", missing)
    assert code == 2 and f"{missing}: " in err


@pytest.mark.parametrize("k", ["0", "-1", "1000"])
def test_evaluate_refuses_a_senseless_k(call, trained, k):
    code, _, err = call("evaluate", "knn", trained, "--ks", k)
    assert code == 2 and k in err


@pytest.mark.filterwarnings("always:.*not a complete meanshift file")
def test_evaluate_says_when_the_newest_checkpoint_is_cut(call, trained):
    newest = max((trained / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    code, _, err = call("evaluate", "knn", trained)
    assert code == 0 and newest.name in err


def test_load_encoder_gives_the_backbone_in_eval_mode(trained):
    backbone = load_encoder(trained)
    assert not any(part.training for part in backbone.modules())
    with torch.no_grad():
        assert backbone(torch.zeros(3, 3, 16, 16)).shape == (3, 64)
    newest = max((trained / "checkpoints").iterdir())
    saved = torch.load(newest, weights_only=True)["method"]
    for name, weights in backbone.state_dict().items():
        assert torch.equal(weights, saved[f"online.backbone.{name}"])


def test_load_encoder_refuses_what_holds_no_model(trained, tmp_path):
    with pytest.raises(ValueError, match="no whole model"):
        load_encoder(trained / "snapshots" / "epoch-0000.pt")
    with pytest.raises(ValueError, match=r"nothing\.pt: not found"):
        load_encoder(tmp_path / "nothing.pt")


def test_bench_step_prints_phases_and_the_ratio(call):
    code, out, _ = call("bench", "step", *NETWORK, "--rounds", "1")
    assert code == 0
    shares = dict(re.findall(r"^  (\w[\w ]*?) +([\d.]+)%$", out, re.MULTILINE))
    phases = "views,online forward,target forward,search and loss,backward,optimizer,target follows"
    assert list(shares) == phases.split(",")
    assert sum(map(float, shares.values())) == pytest.approx(100, abs=0.5)
    assert float(re.search(r"bare encoders.*: ([\d.]+)$", out.strip())[1]) > 0


@GREY
def test_few_bad_images_are_named_and_counted(call, photos, tmp_path):
    spoil(photos / "train" / "a", 1)
    run = tmp_path / "run"
    share = ["--data.max_bad_fraction", "0.5"]
    code, _, err = call("pretrain", "small", "--data", photos, "--out", run, *TINY, *share)
    assert code == 0
    assert "1 of 12 images could not be read" in err
    (warning,) = [w for w in lines(run / "warnings.jsonl") if w["kind"] == "bad image"]
    assert warning["file"].endswith("a/000.jpg") and warning["message"]


@GREY
def test_too_many_bad_images_stop_the_run_with_the_list(call, photos, tmp_path):
    spoil(photos / "train" / "b", 2)
    run = tmp_path / "run"
    share = ["--data.max_bad_fraction", "0.1"]
    code, _, err = call("pretrain", "small", "--data", photos, "--out", run, *TINY, *share)
    assert code == 2
    message = err.partition("meanshift: ")[2]
    assert "2 of 12 images" in message and "--data.max_bad_fraction" in message
    assert "b/000.jpg" in message and "b/001.jpg" in message


def test_the_advice_for_a_batch_that_is_too_large_can_be_followed(call, photos, tmp_path):
    command = ["pretrain", "small", "--data", photos, "--out", tmp_path / "run", *TINY]
    code, _, err = call(*command, "--train.batch_size", "16")
    assert code == 2 and "12 images" in err
    advice = re.search(r"--train\.batch_size (\d+)", err)
    code, _, err = call(*command, *advice[0].split())
    assert code == 0, err


# Threads that wait


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "30000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": "7"}, None),
    ],
)
def test_waiting_threads_sleep_sooner_unless_the_user_says_how(own, expected, monkeypatch):
    kept = {name: value for name, value in os.environ.items() if name not in WAITING}
    monkeypatch.setattr(os, "environ", kept | own)
    cli._wait_asleep()
    assert {name: os.environ[name] for name in WAITING if name in os.environ} == (expected or own)


def test_how_threads_wait_is_said_before_torch_is_loaded(tmp_path):
    """It asks once, so a call after the import would change nothing."""
    told = tmp_path / "told"
    watch = (
        "import os, sys\n"
        "from meanshift import cli\n"
        "assert 'torch' not in sys.modules\n"
        f"cli.showing._recipes = lambda _: open({str(told)!r}, 'w').write("
        "f\"{'torch' in sys.modules} {os.environ['GOMP_SPINCOUNT']}\") * 0\n"
        "cli.main(['recipes'])\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in WAITING}
    subprocess.run([sys.executable, "-c", watch], env=kept, check=True)
    assert told.read_text() == "False 30000"
