"""Settings check themselves, say what is wrong with them, and survive JSON."""

import dataclasses
import json
from typing import Literal, get_args, get_origin

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meanshift.config import RESUME_SAFE, Config, Method, differences, settings
from meanshift.config.recipes import RECIPES, recipe

SETTINGS = {name: (kind, default, text) for name, kind, default, text in settings()}


def change(**overrides):
    """The default config with `group__name` replaced."""
    return Config().with_overrides(
        {name.replace("__", "."): value for name, value in overrides.items()}
    )


def refusal(path, value, base=None):
    """The message with which a value is refused."""
    with pytest.raises(ValueError, match=path.replace(".", r"\.")) as caught:
        (base or Config()).with_overrides({path: value})
    return str(caught.value)


def choices(kind):
    """Values of a setting's type that the whole config accepts whatever else is chosen."""
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    return {bool: st.booleans(), float: st.floats(0.01, 1), int: st.integers(100, 200)}.get(kind)


FREE = {
    name: choices(kind)
    for name, (kind, _, _) in SETTINGS.items()
    if choices(kind) is not None
    and name not in ("method.name", "method.k", "method.k_start", "method.bank_size")
    and name not in ("train.epochs", "optim.warmup_epochs", "train.batch_size")
}
OVERRIDES = st.fixed_dictionaries({}, optional=FREE)


@pytest.mark.parametrize("name", ["", *RECIPES])
def test_json_round_trip(name):
    config = recipe(name) if name else Config()
    assert Config.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["method"]["k"] == config.method.k


@given(OVERRIDES)
@hypothesis.settings(max_examples=50, deadline=None)
def test_round_trip_of_any_overrides(overrides):
    config = Config().with_overrides(overrides)
    assert Config.from_json(config.to_json()) == config
    for path, value in overrides.items():
        group, name = path.split(".")
        assert getattr(getattr(config, group), name) == value


@given(OVERRIDES)
@hypothesis.settings(max_examples=50, deadline=None)
def test_text_from_the_command_line_means_the_value(overrides):
    texts = {path: str(value) for path, value in overrides.items()}
    assert Config().with_overrides(texts) == Config().with_overrides(overrides)


def test_tuples_come_from_lists_and_from_text():
    assert change(views__crop_area=[0.3, 0.9]).views.crop_area == (0.3, 0.9)
    assert change(views__crop_area="0.3,0.9").views.crop_area == (0.3, 0.9)
    assert change(views__crop_area="0.3 0.9").views.crop_area == (0.3, 0.9)


def test_held_out_is_a_share_or_a_word():
    assert change(data__validation="0.2").data.validation == 0.2
    assert change(data__validation="test").data.validation == "test"


@pytest.mark.parametrize("text", ["true", "True", "1", "yes"])
def test_words_for_true(text):
    assert change(method__symmetric=text).method.symmetric is True


def test_an_override_leaves_the_original_and_the_rest_alone():
    config = Config()
    assert config.with_overrides({"method.k": 7}).method == Method(k=7)
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
        ("optim.lr", "fast", "a number"),
        ("optim.lr", True, "a number"),
        ("optim.lr", "nan", "a number"),
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
    message = refusal(path, value)
    assert f"got {value!r}" in message
    assert "need" in message and wanted in message


def test_a_word_among_numbers_is_named():
    assert "got 'b', need a number" in refusal("views.crop_area", "0.1,b")


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("data.image_size", 7, "at least 8"),
        ("data.workers", -1, "0 or more"),
        ("data.max_bad_fraction", 1.5, "between 0 and 1"),
        ("data.validation", 1.0, "a share in [0, 1)"),
        ("data.validation", -0.1, "a share in [0, 1)"),
        ("views.flip", 1.1, "between 0 and 1"),
        ("views.blur", -0.1, "between 0 and 1"),
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
        ("optim.warmup_epochs", -1, "0 "),
    ],
)
def test_out_of_range_says_got_and_need(path, value, wanted):
    message = refusal(path, value)
    assert f"got {value!r}" in message
    assert "need" in message and wanted in message


def test_byol_with_neighbors_says_what_to_type():
    message = refusal("method.name", "byol-asym").partition("need")[2]
    assert "--method.k 1" in message
    assert change(method__name="byol-asym", method__k=1).method.k == 1


def test_more_neighbors_than_the_bank_has_rows():
    message = refusal("method.k", 300, change(train__batch_size=100, method__bank_size=200))
    assert "got 300" in message and "200" in message and "--method.bank_size" in message
    assert change(method__k=300, method__bank_size=300).method.k == 300


def test_a_batch_larger_than_the_bank():
    message = refusal("method.bank_size", 255)
    assert "got 255" in message and "256" in message and "--train.batch_size" in message
    assert change(method__bank_size=256).method.bank_size == 256


def test_a_symmetric_step_adds_two_rows_an_image():
    assert "512" in refusal("method.bank_size", 511, change(method__symmetric=True))


def test_k_of_one_needs_no_bank():
    assert change(method__k=1, method__bank_size=2).method.bank_size == 2


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_tried_for_one_epoch(name):
    assert recipe(name).with_overrides({"train.epochs": 1}).train.epochs == 1


@pytest.mark.parametrize("broken", ['{"method": 5}', '{"method": null}', '{"method": '])
def test_a_broken_file_is_a_value_error(broken):
    with pytest.raises(ValueError, match=r"method|line 1"):
        Config.from_json(broken)


def test_settings_are_frozen():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.method = Method()
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
    train = config.train
    assert (train.epochs, train.batch_size, optim.lr) == (200, 256, 0.05)
    assert (optim.momentum, optim.weight_decay, optim.warmup_epochs) == (0.9, 1e-4, 0)


def test_differences_are_old_and_new():
    old, new = Config(), change(method__k=7, optim__lr=0.1)
    assert differences(old, new) == {"method.k": (5, 7), "optim.lr": (0.05, 0.1)}
    assert differences(old, Config.from_json(old.to_json())) == {}


def test_harmless_settings_exist_and_none_alters_a_weight():
    assert set(SETTINGS) >= RESUME_SAFE
    assert {"data.workers", "train.log_every", "train.save_every"} <= RESUME_SAFE
    changing = ("method.k", "optim.lr", "train.epochs", "train.seed", "train.batch_size")
    assert RESUME_SAFE.isdisjoint(changing)


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ValueError, match="'smal'") as caught:
        recipe("smal")
    assert all(name in str(caught.value) for name in RECIPES)
