"""docs/export.md: its commands and its code run, and the programs compute what the run computes."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from meanshift.models.export import FORMATS
from tests.support.runs import write_checkpoint, write_run, write_solid_images

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()


def test_every_format_is_described():
    rows = re.findall(r"^\| `(\w+)` \| `", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(FORMATS)


@pytest.mark.extras
def test_the_page_runs(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {
        "encoder__name": "resnet18",
        "encoder__stem": "imagenet",
        "encoder__width": 1.0,
        "encoder__output": "whitened",
        "data__image_size": 64,
    }
    Path("runs").mkdir()
    write_checkpoint(write_run(Path("runs/photos"), write_solid_images(tmp_path), **settings))
    commands = re.findall(r"^    meanshift (export runs/photos .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        code, _, err = call(*shlex.split(command))
        assert code == 0, err
    values = {}
    compared = 0
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        values.pop("features", None)
        exec(compile(block, "docs/export.md", "exec"), values)
        if "features" in values:
            features = torch.as_tensor(values["features"]).detach()
            largest = values["expected"].abs().max()
            assert (features - values["expected"]).abs().max() <= 1e-4 * largest
            compared += 1
    assert compared == 4
    assert values["size"] == 64 and Path("encoder.onnx").is_file()
