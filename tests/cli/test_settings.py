"""Settings on the command line: they follow the recipe, the file and the method that are named."""

import pytest

from meanshift.cli import parse_arguments
from meanshift.cli.settings import configure, prescan_base_config
from meanshift.config import METHODS, Config, settings
from meanshift.config.parsing import setting_text
from meanshift.config.recipes import RECIPES, recipe

OUT = ["--out", "run"]


def parse(*words):
    return configure(parse_arguments(["pretrain", *words, *OUT]))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("command", ["demo", "pretrain"])
def test_help_has_the_settings_of_the_method_that_is_named(call, command, name):
    words = ["small-resnet18"] if command == "pretrain" else []
    code, out, _ = call(command, *words, "--method.name", name, "--help")
    flat = " ".join(out.split())
    assert code == 0
    for path, _, _, text in settings(METHODS[name]):
        assert f"--{path} " in flat
        assert text.split()[-1] in flat
    own = {path for path, *_ in settings(METHODS[name])}
    others = {path for other in METHODS.values() for path, *_ in settings(other)} - own
    assert not any(f"--{path} " in flat for path in others)


@pytest.mark.parametrize("name", ["small-resnet18", "imagenet-r50-byol-ws"])
def test_help_has_the_values_of_the_recipe_that_is_named(call, name):
    _, out, _ = call("pretrain", name, "--help")
    flat = " ".join(out.split())
    values = recipe(name).to_dict()
    for path, _, _, text in settings(type(recipe(name).method)):
        group, _, field = path.partition(".")
        value = values[group][field]
        assert " ".join(f"{text} [{setting_text(value)}]".split()) in flat


@pytest.mark.parametrize(
    "words",
    [
        "small --method.k 7 --train.epochs 3",
        "--method.k 7 small --train.epochs 3",
        "--method.symmetric true --train.epochs 3 small --method.k=7 --method.symmetric=false",
        "--train.epochs 3 --data sample --method.k 7 small",
    ],
)
def test_the_recipe_is_found_wherever_it_is_typed(words):
    expected = recipe("small").with_overrides({"method.k": 7, "train.epochs": 3})
    source = "sample" if "sample" in words else ""
    assert parse(*words.split()) == expected.with_overrides({"data.source": source})


def test_a_value_that_is_the_name_of_a_recipe_is_not_the_recipe():
    args = parse_arguments(["pretrain", "--out", "small-resnet18", "--data", "demo", "cifar10-r18"])
    expected = recipe("cifar10-r18").with_overrides({"data.source": "demo"})
    assert configure(args) == expected and str(args.out) == "small-resnet18"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_flags_is_the_recipe(name):
    assert parse(name) == recipe(name)
    assert prescan_base_config([name]) == recipe(name)


@pytest.mark.parametrize("name", RECIPES)
def test_only_recipes_for_a_folder_have_no_images_of_their_own(name):
    assert (recipe(name).data.source == "") == (
        name in ("small", "vector", "signal", "small-resnet18", "small-convnext")
    )


@pytest.mark.parametrize("word", ["--train.batch-size", "--train.batch_size"])
def test_dashes_and_underscores_are_alike_in_settings(word):
    config = parse("small", word, "8", "--method.bank-size=99", "--views.crop-area", "0.5,1")
    assert (config.train.batch_size, config.method.bank_size) == (8, 99)
    assert config.views.crop_area == (0.5, 1.0)


def test_a_flag_without_a_value_sets_a_yes_or_no_setting():
    assert parse("small-resnet18", "--method.symmetric").method.symmetric is True
    assert parse("small-resnet18", "--method.whiten", "false").method.whiten is False


# Another method


def test_another_method_brings_its_own_views_optimizer_and_schedule():
    config = parse("small-resnet18", "--method.name", "byol-asym", "--optim.warmup_epochs", "4")
    expected = Config().with_overrides(
        {"method.name": "byol-asym", "optim.warmup_epochs": 4, "data.image_size": 96}
    )
    assert config.method == expected.method
    assert (config.views, config.optim) == (expected.views, expected.optim)
    assert (config.data, config.encoder, config.train) == (
        recipe("small-resnet18").data,
        recipe("small-resnet18").encoder,
        recipe("small-resnet18").train,
    )


def test_flags_that_the_defaults_of_another_method_must_fit_are_known_to_the_first_pass(tmp_path):
    """MoCo has 8 groups of batch norm at 32 pixels, which a batch of 100 does not have."""
    file = tmp_path / "config.json"
    file.write_text(recipe("cifar10-r18").with_overrides({"train.batch_size": 100}).to_json())
    words = ("--config", str(file), "--method.name", "moco")
    with pytest.raises(ValueError, match=r"got 100.*--train\.batch_size 104"):
        parse(*words)
    assert parse(*words, "--train.batch_size", "104").encoder.batch_groups == 8
    assert parse(*words, "--encoder.batch_groups", "1").train.batch_size == 100
    assert parse(*words, "--data.image_size", "64").encoder.batch_groups == 1


def test_the_settings_that_given_weights_change_are_printed(capsys):
    config = parse("small", "--encoder.weights", "a.pth", "--optim.heads_first", "0.1")
    assert capsys.readouterr().err.splitlines() == [
        "encoder.weights changes these settings:",
        "  encoder.init: random (small: pca)",
        "  encoder.batch_norm: fixed (small: batch)",
        "  optim.lr: 0.0003 (small: 0.001)",
    ]
    assert config.optim.heads_first == 0.1
    parse("small", "--method.k", "3")
    assert not capsys.readouterr().err


def test_the_settings_that_another_method_changes_are_printed(capsys):
    parse("small-resnet18", "--method.name", "byol-asym", "--optim.warmup_epochs", "4")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "the method byol-asym changes these settings:",
        "  method.whiten: False (small-resnet18: True)",
        "  optim.schedule: epoch (small-resnet18: step)",
    ]


def test_changed_settings_of_every_group_are_printed(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from meanshift.config import MethodSettings\n"
        "class Mine:\n"
        "    @dataclass(frozen=True, kw_only=True)\n"
        "    class Settings(MethodSettings):\n"
        "        defaults = {'train.batch_size': 32, 'train.epochs': 7, 'data.image_size': 64}\n"
        "        name: str = 'mine'\n"
    )
    parse("small-resnet18", "--method.module", f"{tmp_path}/mine.py:Mine", "--train.epochs", "9")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"the method mine of {tmp_path}/mine.py:Mine changes these settings:",
        "  data.image_size: 64 (small-resnet18: 96)",
        "  optim.schedule: epoch (small-resnet18: step)",
        "  optim.warmup_epochs: 0 (small-resnet18: 2)",
        "  train.batch_size: 32 (small-resnet18: 64)",
    ]


def test_nothing_is_printed_if_the_method_stays(capsys):
    parse("small-resnet18", "--method.name", "msf", "--optim.schedule", "epoch")
    assert capsys.readouterr().err == ""


# A whole configuration


def test_a_file_takes_the_place_of_a_recipe_and_flags_win(tmp_path, capsys):
    file = tmp_path / "run.json"
    config = recipe("demo").with_overrides({"method.name": "byol-asym", "train.epochs": 3})
    file.write_text(config.to_json())
    assert parse("--config", str(file)) == config
    changed = parse("--config", str(file), "--train.epochs", "9", "--data", "folder")
    assert changed == config.with_overrides({"train.epochs": 9, "data.source": "folder"})
    assert capsys.readouterr().err == ""


def test_the_settings_of_the_method_in_a_file_are_flags(call, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(recipe("imagenet-r50-byol-ss").to_json())
    _, out, _ = call("pretrain", "--config", file, "--help")
    assert "--method.momentum " in out and "--method.k " not in out


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (None, ["cannot be read", "RUN/config.json"]),
        ("{", ["run.json"]),
        ('{"format": 1}', ["run.json", "format 1"]),
        ('{"format": 2, "methods": {}}', ["run.json", "unknown group 'methods'"]),
        ('{"format": 2, "method": {"kk": 2}}', ["run.json", "method.k"]),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(call, tmp_path, contents, words):
    file = tmp_path / "run.json"
    if contents is not None:
        file.write_text(contents)
    code, _, err = call("pretrain", "--config", file, "--out", tmp_path / "run")
    assert code == 2 and all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_a_recipe_and_a_file_together_are_refused(call, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(recipe("demo").to_json())
    code, _, err = call("pretrain", "small-resnet18", "--config", file, "--out", tmp_path / "run")
    assert code == 2 and "small-resnet18" in err and str(file) in err and "need one of them" in err


# Errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["need a recipe", "small-resnet18", "--config"]),
        (["smal"], ["'smal'", "small-resnet18", "did you mean small?"]),
        (["small"], ["no images are named", "--data SOURCE", "sample"]),
        (["small", "--data", ""], ["no images are named", "--data SOURCE", "sample"]),
        (["small-resnet18", "--method.kk", "3"], ["method.kk", "did you mean method.k"]),
        (["--method.kk", "3", "small-resnet18"], ["method.kk", "did you mean method.k"]),
        (["small-resnet18", "--train.epoch=3"], ["train.epoch", "did you mean train.epochs"]),
        (
            ["small-resnet18", "--method.name", "simclar"],
            ["'simclar'", "msf, byol-asym", "did you mean simclr", "--method.module"],
        ),
        (
            ["small-resnet18", "--method.name", "byol-asym", "--method.k", "3"],
            ["method.k", "byol-asym has no such setting", "msf"],
        ),
        (["imagenet-r50-byol-ss", "--method.k", "3"], ["method.k", "belongs to msf"]),
        (["small-resnet18", "--method.module", "none.py:Mine"], ["none.py", "cannot be imported"]),
        (["small-resnet18", "--method.module", "json:dumps"], ["json", "no class dumps"]),
        (["small-resnet18", "--method.module", "json:JSONDecoder"], ["JSONDecoder", "Settings"]),
        (["small-resnet18", "--data", "no/such/folder"], ["no/such/folder", "need a folder"]),
        (
            ["small-resnet18", "--data", "sample", "--method.k", "3000"],
            ["method.k", "3000", "2048"],
        ),
        (["small-resnet18", "--train.batch_size", "4096"], ["4096", "--train.batch_size"]),
        (["small-resnet18", "--method.k", "many"], ["method.k", "'many'", "whole number"]),
        (["small-resnet18", "--optim.lr", "-1"], ["optim.lr", "-1", "above 0"]),
        (
            ["small-resnet18", "--method.target_view", "medium"],
            ["method.target_view", "'medium'", "weak, strong"],
        ),
        (
            ["small-resnet18", "--data", "sample", "--encoder.name", "resnet5"],
            ["encoder.name", "'resnet5'", "need resnet50 or resnet152\n"],
        ),
        (["small-resnet18", "--train.device", "toaster"], ["train.device", "'toaster'"]),
        (["demo", "--train.precision", "float16", "--train.device", "cpu"], ["float16", "GPU"]),
    ],
)
def test_a_mistake_is_one_clear_message(call, tmp_path, arguments, words):
    code, out, err = call("pretrain", *arguments, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.count("meanshift: ") == 1
    message = err.partition("meanshift: ")[2]
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()
