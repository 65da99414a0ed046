"""The method's settings are a union tagged by name: choosing, changing and loading a method."""

import dataclasses
import json
import sys

import pytest

from meanshift.config import METHODS, MSF, BYOLAsym, Config, Optim, Views, differences, settings
from meanshift.config.methods import load_class, settings_class
from meanshift.config.recipes import RECIPES, command_for, recipe

EXTERNAL = """
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meanshift.config import MethodSettings


class Twin:
    @dataclass(frozen=True, kw_only=True)
    class Settings(MethodSettings):
        defaults: ClassVar = {"optim.lr": 0.3, "views.blur": 0.1}
        name: str = "twin"
        temperature: float = 0.2
        mode: Literal["fast", "slow"] = "fast"


class NoSettings:
    pass
"""


@pytest.fixture
def external(tmp_path):
    """A method that is not part of the program, as `method.module` names it."""
    file = tmp_path / "json.py"  # the name of a module that exists
    file.write_text(EXTERNAL)
    return f"{file}:Twin"


@pytest.mark.parametrize("name", METHODS)
def test_the_name_in_a_file_chooses_the_class(name):
    config = Config.from_dict({"method": {"name": name}})
    assert type(config.method) is METHODS[name]
    assert Config.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["method"]["name"] == name


def test_without_a_name_the_method_is_msf():
    assert Config.from_dict({"method": {"k": 3}}).method == MSF(k=3)


def test_an_unknown_method_names_the_known_ones():
    with pytest.raises(ValueError, match=r"method\.name: got 'mosf'.*msf, byol-asym.*msf"):
        Config().with_overrides({"method.name": "mosf"})
    with pytest.raises(ValueError, match=r"method\.name: got 'nonsense'"):
        Config.from_dict({"method": {"name": "nonsense"}})


@pytest.mark.parametrize("setting", ["k", "k_schedule", "bank_size", "same_image"])
def test_a_setting_of_another_method_says_whose_it_is(setting):
    with pytest.raises(ValueError, match=r"byol-asym has no such setting.*to msf") as caught:
        Config().with_overrides({"method.name": "byol-asym", f"method.{setting}": 1})
    assert f"method.{setting}" in str(caught.value)
    with pytest.raises(ValueError, match="has no such setting"):
        Config.from_dict({"method": {"name": "byol-asym", setting: 1}})


def test_settings_lists_those_of_one_method():
    of_msf, of_byol = ({name for name, *_ in settings(METHODS[m])} for m in ("msf", "byol-asym"))
    assert of_byol < of_msf
    assert {name.removeprefix("method.") for name in of_msf - of_byol} == {
        field.name for field in dataclasses.fields(MSF)
    } - {field.name for field in dataclasses.fields(BYOLAsym)}


# Changing the method


def test_another_method_resets_views_and_optimizer_and_leaves_the_rest():
    before = recipe("demo")
    after = before.with_overrides({"method.name": "byol-asym"})
    assert after.method == BYOLAsym()
    assert before.views != Views() and after.views == Views()
    assert before.optim != Optim() and after.optim == Optim()
    assert (after.data, after.encoder, after.train) == (before.data, before.encoder, before.train)


def test_flags_win_over_what_the_method_declares(external):
    flags = {"optim.lr": 0.7, "method.temperature": "0.5", "views.flip": 0.0}
    config = recipe("demo").with_overrides({"method.module": external, **flags})
    assert config.optim.lr == 0.7 and config.views.blur == 0.1 and config.views.flip == 0.0
    assert config.method.temperature == 0.5 and config.method.mode == "fast"


def test_the_same_name_again_changes_nothing():
    config = recipe("demo")
    assert config.with_overrides({"method.name": "msf"}) == config
    assert config.with_overrides({"method.name": "msf", "method.k": 7}).views == config.views


def test_changed_back_it_has_the_defaults():
    there = recipe("demo").with_overrides({"method.name": "byol-asym"})
    assert there.with_overrides({"method.name": "msf"}).method == MSF()


def test_what_a_method_declares_for_other_groups_is_undone_by_the_next():
    base = recipe("cifar10-r18")
    for names in (("moco", "byol"), ("byol", "moco"), ("moco", "isd"), ("simclr", "msf")):
        config = base
        for name in names:
            config = config.with_overrides({"method.name": name})
        expected = base.with_overrides({"method.name": names[1]})
        assert (config.encoder, config.train) == (expected.encoder, expected.train)
    chosen = base.with_overrides({"method.name": "moco", "train.batch_norm": "local"})
    assert chosen.with_overrides({"method.name": "isd"}).train.batch_norm == "local"


def test_differences_between_methods_have_none_for_what_one_lacks():
    changed = differences(Config(), Config(method=BYOLAsym(momentum=0.9)))
    assert changed["method.name"] == ("msf", "byol-asym")
    assert changed["method.k"] == (5, None)
    assert changed["method.momentum"] == (0.99, 0.9)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"method.name": "byol-asym", "optim.lr": 0.3},
        {"method.name": "msf", "method.k": 2},
        # What the method and given weights change by themselves, typed as it was.
        {"method.name": "moco", "method.temperature": 0.2, "data.image_size": 32},
        {"encoder.weights": "a.pth", "encoder.init": "random", "optim.lr": 0.001},
    ],
)
def test_the_command_gives_the_configuration(name, overrides):
    config = recipe(name).with_overrides({"data.source": "photos", **overrides})
    assert parsed(command_for(config, "out")) == config


def parsed(command):
    """The configuration that a command line without quotes describes."""
    words = command.split()[2:]
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    assert flags.pop("--out") == "out"
    given = {name.removeprefix("--"): value for name, value in flags.items() if "." in name}
    return recipe(words[0]).with_overrides({"data.source": flags["--data"], **given})


# Methods that are not part of the program


def test_an_external_method_brings_its_settings(external):
    config = Config().with_overrides(
        {"data.source": "photos", "method.module": external, "method.mode": "slow"}
    )
    assert (config.method.name, config.method.mode) == ("twin", "slow")
    assert config.optim == Optim(lr=0.3) and config.views == Views(blur=0.1)
    assert Config.from_json(config.to_json()) == config
    assert "method.temperature" in {name for name, *_ in settings(type(config.method))}
    assert parsed(command_for(config, "out")) == config


def test_an_external_file_replaces_no_module(external):
    load_class(external)
    assert sys.modules["json"] is json


def test_files_of_one_name_are_two_modules(tmp_path):
    classes = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(EXTERNAL)
        classes.append(load_class(f"{tmp_path / folder / 'mine.py'}:Twin"))
    for loaded in classes:
        assert vars(sys.modules[loaded.__module__])["Twin"] is loaded
    assert classes[0] is not classes[1]


def test_a_relative_path_becomes_absolute(external, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = "json.py:Twin"
    expected = Config().with_overrides({"method.module": external, "method.mode": "slow"})
    assert expected.method.module == external
    by_overrides = Config().with_overrides({"method.module": relative, "method.mode": "slow"})
    assert by_overrides == expected
    groups = expected.to_dict()
    groups["method"]["module"] = relative
    assert Config.from_dict(groups) == expected
    method = dataclasses.replace(expected.method, module=relative)
    assert dataclasses.replace(expected, method=method) == expected


def test_the_same_module_again_changes_nothing(external, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config().with_overrides({"method.module": external, "method.mode": "slow"})
    assert config.with_overrides({"method.module": "json.py:Twin"}) == config


def test_an_external_method_has_no_other_settings(external):
    with pytest.raises(ValueError, match=r"method twin has no such setting; it belongs to msf"):
        Config().with_overrides({"method.module": external, "method.k": 3})
    with pytest.raises(ValueError, match=r"did you mean method\.temperature"):
        Config().with_overrides({"method.module": external, "method.temprature": 3})


def test_choosing_a_method_by_name_leaves_the_external_one(external):
    there = Config().with_overrides({"method.module": external})
    assert there.with_overrides({"method.name": "msf"}).method == MSF()
    assert there.with_overrides({"optim.lr": 0.1}).method == there.method


def test_a_module_that_is_no_method_is_refused_in_words(external, tmp_path):
    file = external.rpartition(":")[0]
    for module, message in {
        "nonsense": "need FILE.py:CLASS",
        f"{tmp_path}/missing.py:A": "cannot be imported",
        "no.such.package:A": "cannot be imported",
        f"{file}:Missing": "has no class Missing",
        f"{file}:NoSettings": "has no settings",
    }.items():
        with pytest.raises(ValueError, match=f"method.module.*{message}"):
            settings_class("", module)
