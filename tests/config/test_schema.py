"""Settings check themselves, report what is wrong with them, and survive JSON."""

import dataclasses
import json
from typing import Literal, get_args, get_origin

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meanshift.config import (
    FORMAT,
    METHODS,
    MSF,
    RESUME_SAFE,
    Config,
    SampleSpec,
    check_setting_name,
    differences,
    resume_safe,
    settings,
)
from meanshift.config.parsing import parse, setting_text
from meanshift.config.recipes import RECIPES, recipe

SETTINGS = {name: (kind, default, text) for name, kind, default, text in settings()}


def change(**overrides):
    """The default config with `group__name` replaced."""
    return Config().with_overrides(
        {name.replace("__", "."): value for name, value in overrides.items()}
    )


def error_for(path, value, base=None):
    """The message of the error for a value."""
    with pytest.raises(ValueError, match=path.replace(".", r"\.")) as caught:
        (base or Config()).with_overrides({path: value})
    return str(caught.value)


def choices(kind):
    """Values of a setting's type that a config accepts whatever its other settings are."""
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    return {bool: st.booleans(), float: st.floats(0.01, 1), int: st.integers(100, 200)}.get(kind)


FREE = {
    name: choices(kind)
    for name, (kind, _, _) in SETTINGS.items()
    if choices(kind) is not None
    and name not in ("method.name", "method.k", "method.k_start", "method.bank_size")
    and name not in ("train.epochs", "optim.warmup_epochs")
    and name not in ("train.batch_size", "encoder.batch_groups")
    and name not in ("optim.name", "optim.momentum", "optim.heads_first")
}
OVERRIDES = st.fixed_dictionaries({}, optional=FREE)


@pytest.mark.parametrize("name", ["", *RECIPES])
def test_json_round_trip(name):
    config = recipe(name) if name else Config()
    assert Config.from_json(config.to_json()) == config
    stored = json.loads(config.to_json())
    assert stored["format"] == FORMAT and stored["method"]["name"] == config.method.name


@given(OVERRIDES)
@hypothesis.settings(max_examples=25)
def test_round_trip_of_any_overrides(overrides):
    config = Config().with_overrides(overrides)
    assert Config.from_json(config.to_json()) == config
    for path, value in overrides.items():
        group, name = path.split(".")
        assert getattr(getattr(config, group), name) == value


@given(OVERRIDES)
@hypothesis.settings(max_examples=25)
def test_text_from_the_command_line_means_the_value(overrides):
    texts = {path: str(value) for path, value in overrides.items()}
    assert Config().with_overrides(texts) == Config().with_overrides(overrides)


def test_tuples_come_from_lists_and_from_text():
    assert change(views__crop_area=[0.3, 0.9]).views.crop_area == (0.3, 0.9)
    assert change(views__crop_area="0.3,0.9").views.crop_area == (0.3, 0.9)
    assert change(views__crop_area="0.3 0.9").views.crop_area == (0.3, 0.9)


def test_samples_are_described_in_text_and_come_back():
    config = change(
        data__channels="2",
        data__dtype="int16",
        data__range="-1000,3000",
        data__mean="0.5,0.25",
        data__std="0.1 0.2",
    )
    expected = SampleSpec(
        channels=2, dtype="int16", range=(-1000.0, 3000.0), mean=(0.5, 0.25), std=(0.1, 0.2)
    )
    assert config.data.sample_spec == expected
    assert Config.from_json(config.to_json()) == config
    assert change(data__range="minmax").data.range == "minmax"
    assert Config().data.with_samples(expected).sample_spec == expected
    assert Config().data.with_samples(SampleSpec()) == Config().data


def test_a_run_recalls_its_samples_where_nothing_is_typed():
    run = Config().data.with_samples(SampleSpec(channels=1, mean=(0.5,), std=(0.1,)))
    assert change(data__range="minmax").data.recalling(run).sample_spec == run.sample_spec
    typed = change(data__range="0,9").data.recalling(run)
    assert typed.range == (0, 9) and typed.channels == 1


def test_validation_is_a_fraction_or_the_name_of_a_split():
    assert change(data__validation="0.2").data.validation == 0.2
    assert change(data__validation="test").data.validation == "test"


@pytest.mark.parametrize("text", ["true", "True", "1", "yes"])
def test_words_for_true(text):
    assert change(method__symmetric=text).method.symmetric is True


def test_an_override_leaves_the_original_and_the_rest_alone():
    config = Config()
    assert config.with_overrides({"method.k": 7}).method == MSF(k=7)
    assert config == Config()


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("method.kk", "method.k"),
        ("metod.momentum", "method.momentum"),
        ("train.epoch", "train.epochs"),
        ("batch_size", "train.batch_size"),
    ],
)
def test_an_unknown_setting_names_the_nearest(path, nearest):
    with pytest.raises(ValueError, match="unknown setting") as caught:
        Config().with_overrides({path: 1})
    assert path in str(caught.value) and nearest in str(caught.value)


def test_unknown_keys_of_a_file_are_refused():
    with pytest.raises(ValueError, match=r"'method\.bank_sise'.*method\.bank_size"):
        Config.from_dict({"method": {"bank_sise": 5}})
    with pytest.raises(ValueError, match=r"'metod'.*method"):
        Config.from_dict({"metod": {}})


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("method.k", "many", "whole number"),
        ("method.k", 2.5, "whole number"),
        ("method.k", "5.5", "whole number"),
        ("method.k", True, "whole number"),
        ("method.k", None, "whole number"),
        ("method.k", [5], "whole number"),
        ("method.k", float("inf"), "whole number"),
        ("method.k", 10**400, "whole number below 2^63"),
        ("method.k", str(10**400), "whole number below 2^63"),
        ("method.k", -(2**63), "whole number below 2^63"),
        ("optim.lr", "fast", "a finite number"),
        ("optim.lr", True, "a finite number"),
        ("optim.lr", "nan", "a finite number"),
        ("optim.lr", "1e400", "a finite number"),
        ("optim.lr", 10**400, "a finite number"),
        ("method.symmetric", "perhaps", "true or false"),
        ("method.symmetric", 2, "true or false"),
        ("views.crop_area", "0.2", "2 numbers"),
        ("views.crop_area", [0.1, 0.2, 0.3], "2 numbers"),
        ("views.crop_area", 0.2, "2 numbers"),
        ("views.crop_area", None, "2 numbers"),
        ("method.target_view", "medium", "weak, strong"),
        ("encoder.stem", "big", "imagenet, small, small-stride2"),
        ("method.bank_dtype", "int8", "float32, bfloat16, float16"),
        ("train.precision", "double", "auto, float32, bfloat16, float16"),
    ],
)
def test_a_wrong_type_says_got_and_need(path, value, wanted):
    message = error_for(path, value)
    assert f"got {value!r}" in message
    assert "need" in message and wanted in message


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1])
def test_a_large_seed_keeps_all_its_digits(seed):
    for value in (seed, str(seed)):
        config = Config().with_overrides({"train.seed": value})
        assert config.train.seed == seed
        assert Config.from_json(config.to_json()).train.seed == seed


def test_a_word_among_numbers_is_named():
    assert "got 'b', need a finite number" in error_for("views.crop_area", "0.1,b")


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("data.image_size", 7, "at least 8"),
        ("data.workers", -1, "0 or more"),
        ("data.max_bad_fraction", 1.5, "between 0 and 1"),
        ("data.validation", 1.0, "a fraction in [0, 1)"),
        ("data.validation", -0.1, "a fraction in [0, 1)"),
        ("data.channels", -1, "0 to 100000"),
        ("data.dtype", "uint12", "one of auto, uint8"),
        ("data.range", (5.0, 5.0), "LOW,HIGH with LOW below HIGH"),
        ("data.range", "percentiles", "auto or minmax"),
        ("data.mean", "imagenet", "a number for each channel"),
        ("data.std", (0.5, 0.0), "above 0"),
        ("views.noise", -0.1, "0 or more"),
        ("views.channel_dropout", 1.5, "a probability in [0, 1]"),
        ("views.flip", 1.1, "a probability in [0, 1]"),
        ("views.blur", -0.1, "a probability in [0, 1]"),
        ("views.solarize", 1.1, "a probability in [0, 1]"),
        ("views.crop_area", (0.0, 1.0), "0 < low <= high <= 1"),
        ("views.crop_area", (0.9, 0.2), "0 < low <= high <= 1"),
        ("views.blur_sigma", (2.0, 1.0), "0 < low <= high"),
        ("views.jitter_strength", (0.4, 0.4, 0.4, 0.6), "hue in [0, 0.5]"),
        ("encoder.width", 0.0, "above 0"),
        ("encoder.width", 5.0, "at most 4"),
        ("method.k", 0, "1 or more"),
        ("method.k_start", 6, "1 to k (5)"),
        ("method.momentum", 1.01, "between 0 and 1"),
        ("method.dim", -1, "0 or more"),
        ("train.epochs", 0, "1 or more"),
        ("train.batch_size", 1, "2 or more"),
        ("optim.lr", 0.0, "above 0"),
        ("train.save_every", 0.0, "above 0"),
        ("optim.weight_decay", -1e-4, "0 or more"),
        ("train.log_every", 0, "1 or more"),
        ("train.snapshot_images", 0, "1 or more"),
        ("optim.warmup_epochs", -1, "0 or more"),
        ("optim.warmup_epochs", 0.5, "--optim.schedule step"),
        ("optim.heads_first", 1.0, "below 1"),
        ("optim.momentum", 1.0, "below 1"),
        ("method.momentum_batch", -1, "0 or more"),
        ("optim.accumulate", 0, "1 or more"),
        ("optim.clip_norm", -1.0, "0 or more"),
        ("train.seed", -1, "below 2^63"),
        ("train.seed", 2**63, "below 2^63"),
    ],
)
def test_out_of_range_says_got_and_need(path, value, wanted):
    message = error_for(path, value)
    assert f"got {value!r}" in message
    assert "need" in message and wanted in message


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_learning_rate_of_sgd_is_refused_for_adamw_and_muon(name):
    with pytest.raises(ValueError, match=rf"got 0\.05.*{name}.*--optim\.lr 1e-3"):
        change(optim__name=name)
    assert change(optim__name=name, optim__lr=1e-3).optim.name == name


def test_the_momentum_follows_the_batch_by_the_ema_scaling_rule():
    """Two updates of 128 images move the target as far as one of 256."""
    method = MSF(momentum=0.99, momentum_batch=256)
    assert method.for_batch(128).momentum ** 2 == pytest.approx(0.99)
    assert method.for_batch(512).momentum == pytest.approx(0.99**2)
    assert method.for_batch(256).momentum == method.for_batch(0).momentum == 0.99
    assert MSF(momentum=0.99).for_batch(64).momentum == 0.99


def test_more_neighbors_than_the_bank_has_rows():
    message = error_for("method.k", 300, change(train__batch_size=100, method__bank_size=200))
    assert "got 300" in message and "200" in message and "--method.bank_size" in message
    assert change(method__k=300, method__bank_size=300).method.k == 300


def test_a_batch_larger_than_the_bank():
    message = error_for("method.bank_size", 255)
    assert "got 255" in message and "256" in message and "--train.batch_size" in message
    assert change(method__bank_size=256).method.bank_size == 256


def test_a_symmetric_step_adds_two_rows_an_image():
    assert "512" in error_for("method.bank_size", 511, change(method__symmetric=True))


@pytest.mark.parametrize(("size", "wanted"), [(100, 104), (8, 16)])
def test_a_batch_is_a_multiple_of_the_groups_of_batch_norm(size, wanted):
    message = error_for("train.batch_size", size, change(encoder__batch_groups=8))
    assert f"got {size}" in message and f"--train.batch_size {wanted}," in message
    assert "--encoder.batch_groups 1" in message
    assert change(encoder__batch_groups=8, train__batch_size=wanted).encoder.batch_groups == 8


def test_groups_of_batch_norm_are_not_synchronized():
    message = error_for("train.batch_norm", "sync", change(encoder__batch_groups=8))
    assert "got 'sync'" in message and "--train.batch_norm shuffle" in message
    assert change(train__batch_norm="sync").train.batch_norm == "sync"


def test_k_of_one_needs_no_bank():
    assert change(method__k=1, method__bank_size=2).method.bank_size == 2


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_tried_for_one_epoch(name):
    assert recipe(name).with_overrides({"train.epochs": 1}).train.epochs == 1


@pytest.mark.parametrize("content", ["5", "null", '{"name": 5}', '{"name": []}', '{"name": "'])
def test_a_broken_file_is_a_value_error(content):
    with pytest.raises(ValueError, match=r"method|line 1"):
        Config.from_json(f'{{"format": {FORMAT}, "method": {content}}}')


@pytest.mark.parametrize("text", ["[]", "5", "null"])
def test_a_file_without_groups_is_a_value_error(text):
    with pytest.raises(ValueError, match="need groups of settings"):
        Config.from_json(text)


@pytest.mark.parametrize(
    ("version", "action"),
    [
        (None, "train it again"),  # the first edition stored no format
        (FORMAT - 1, "train it again"),
        (FORMAT + 1, "install a newer meanshift"),
        ("new", "train it again"),
    ],
)
def test_a_file_of_another_format_is_refused_with_what_to_do(version, action):
    stored = json.loads(Config().to_json())
    del stored["format"]
    if version is not None:
        stored["format"] = version
    with pytest.raises(ValueError, match=f"this version reads {FORMAT}.*{action}"):
        Config.from_json(json.dumps(stored))


def test_settings_are_frozen():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.method = MSF()
    for group in dataclasses.fields(config):
        first = dataclasses.fields(getattr(config, group.name))[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(getattr(config, group.name), first, None)


def test_every_setting_has_a_help_text():
    fields = {
        f"{group.name}.{field.name}"
        for group in dataclasses.fields(Config)
        for field in dataclasses.fields(getattr(Config(), group.name))
    }
    assert set(SETTINGS) == fields
    assert all(len(text) > 10 for _, _, text in SETTINGS.values())
    assert "neighbors" in SETTINGS["method.k"][2]


def test_the_defaults_are_the_papers():
    config = Config()
    assert (config.method.k, config.method.bank_size, config.method.momentum) == (5, 128_000, 0.99)
    assert (config.method.target_view, config.method.online_view) == ("weak", "strong")
    assert (config.train.epochs, config.train.batch_size) == (200, 256)
    optim = config.optim
    assert (optim.lr, optim.schedule, optim.accumulate, optim.clip_norm) == (0.05, "epoch", 1, 0)
    assert (optim.momentum, optim.weight_decay, optim.warmup_epochs) == (0.9, 1e-4, 0)


def test_differences_are_old_and_new():
    old, new = Config(), change(method__k=7, optim__lr=0.1)
    assert differences(old, new) == {"method.k": (5, 7), "optim.lr": (0.05, 0.1)}
    assert differences(old, Config.from_json(old.to_json())) == {}


def test_settings_that_are_safe_to_change_exist_and_none_alters_a_weight():
    assert set(SETTINGS) >= RESUME_SAFE
    assert {"data.workers", "train.log_every", "train.save_every"} <= RESUME_SAFE
    changing = ("method.k", "optim.lr", "train.epochs", "train.seed", "train.batch_size")
    assert RESUME_SAFE.isdisjoint(changing)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_adds_settings_that_are_safe_to_change(name):
    config = Config().with_overrides({"method.name": name})
    safe = resume_safe(config)
    assert {path for path, *_ in settings(type(config.method))} >= safe >= RESUME_SAFE
    assert ("method.bank_layout" in safe) == (name in ("msf", "cmsf"))


def test_a_setting_name_is_checked_without_a_value():
    check_setting_name(Config(), "method.k")
    for path in ("method.kk", "methods.k", "method"):
        with pytest.raises(ValueError, match=f"unknown setting '{path}'; did you mean"):
            check_setting_name(Config(), path)


def test_the_text_of_a_value_is_parsed_to_the_value():
    for path, kind, default, _ in settings():
        assert parse(setting_text(default), kind, path) == default


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ValueError, match="'smal'") as caught:
        recipe("smal")
    assert all(name in str(caught.value) for name in RECIPES)


@pytest.mark.parametrize("name", ["vector", "signal"])
def test_another_method_keeps_the_operators_of_other_kinds_and_small_settings(name):
    base = recipe(name)
    other = base.with_overrides({"method.name": "vicreg", "data.image_size": 16_000})
    assert other.views.noise == base.views.noise > 0
    assert (other.views.mix, other.views.gain) == (base.views.mix, base.views.gain)
    assert other.method.hidden <= 2048  # not the 8192 of ImageNet
