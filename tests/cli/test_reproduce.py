"""The command `meanshift reproduce`: which scale it takes."""

import pytest


@pytest.mark.parametrize(
    ("typed", "recipe", "scale"),
    [
        ((), "small", "small"),
        (("--scale", "cpu"), "cifar10-cpu", "cpu"),
        (("--scale=cpu",), "cifar10-cpu", "cpu"),
    ],
)
def test_own_images_have_the_scale_made_for_folders_unless_another_is_typed(
    call, photos, typed, recipe, scale
):
    code, out, err = call(
        *("reproduce", "baseline", "--data", photos, "--seeds", 1, "--plan", *typed)
    )
    assert code == 0, err
    commands = [line for line in out.splitlines() if line.startswith("meanshift pretrain")]
    assert len(commands) == 6
    for command in commands:
        assert command.startswith(f"meanshift pretrain {recipe} --data {photos} ")
        assert f"--out runs/reproduce-{scale}/" in command


def test_without_images_the_scale_has_its_own(call):
    code, out, err = call("reproduce", "baseline", "--help")
    assert code == 0, err
    assert "[conv7]" in out and "[conv4]" not in out
    _, out, _ = call("reproduce", "baseline", "--data", "PHOTOS", "--help")
    assert "[conv4]" in out and "[conv7]" not in out


def test_the_scale_for_own_images_needs_some(call):
    code, _, err = call("reproduce", "baseline", "--scale", "small")
    assert code == 2 and "type --data SOURCE" in err
