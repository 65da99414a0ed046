"""The program as `pip install meanshift` gives it: without a single extra."""

import json
import subprocess
import sys

import pytest

from tests.support.toy_method import make_arrays

EXTRAS = (
    "aiohttp datasets faiss huggingface_hub jinja2 lightly matplotlib mlflow onnx onnxruntime "
    "pyarrow scipy sklearn starlette tensorboard timm uvicorn wandb"
)

PROGRAM = f"""
import sys
from importlib.machinery import PathFinder

class CoreFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {EXTRAS.split()}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path = [CoreFinder if finder is PathFinder else finder for finder in sys.meta_path]
from meanshift.cli import main

codes = []
for command in sys.argv[1].split(";"):
    try:
        codes.append(main(command.split()))
    except SystemExit as left:
        codes.append(left.code)
print(codes)
"""


@pytest.mark.slow
def test_training_evaluation_embedding_and_export_need_no_extra(tmp_path):
    """And a report says which one it needs."""
    arrays, run = make_arrays(tmp_path), tmp_path / "run"
    small = (
        "--train.epochs 1 --train.batch_size 8 --method.bank_size 16 --data.image_size 16 "
        "--encoder.width 0.125 --train.device cpu --train.precision float32"
    )
    commands = [
        f"pretrain demo --data {arrays} --out {run} {small}",
        f"evaluate knn {run} --device cpu",
        f"embed {run} {arrays} --out {tmp_path / 'rows.npz'} --device cpu",
        f"export {run} --out {tmp_path / 'weights.safetensors'}",
        "recipes",
        f"demo --data.source {arrays} --out {tmp_path / 'demo'} {small}",
        f"report {run}",
    ]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, ";".join(commands)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 2]", process.stderr
    assert "pip install 'meanshift[report]'" in process.stderr
    assert "Traceback" not in process.stderr
    (result,) = (run / "results").glob("knn*.json")
    assert "20-NN" in json.loads(result.read_text())["metrics"]
    assert (tmp_path / "rows.npz").exists() and (tmp_path / "weights.safetensors").exists()
