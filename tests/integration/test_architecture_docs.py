"""docs/architecture.md is true: its examples run, and the files and functions it names exist."""

import json
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch

import meanshift
from meanshift.cli import main
from meanshift.config.recipes import recipe
from meanshift.evaluation import PROTOCOLS
from meanshift.evaluation.context import EvaluationContext
from meanshift.models.weights import load_weights
from meanshift.viz.figures import draw_figures
from meanshift.viz.run_reader import Run

ROOT = Path(__file__).parents[2]
PACKAGE = Path(meanshift.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TINY = {
    "data.image_size": 16,
    "data.workers": 0,
    "encoder.width": 0.125,
    "train.batch_size": 16,
    "train.epochs": 2,
    "train.log_every": 1,
    "train.device": "cpu",
    "train.precision": "float32",
}
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


def code(start):
    """The Python block of the page that begins with a line."""
    (block,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        if block.startswith(start)
    ]
    return block


def command(start):
    """The words of the indented command of the page that begins so."""
    (line,) = re.findall(rf"^    (meanshift {start}.*)$", PAGE, re.MULTILINE)
    return shlex.split(line)[1:]


@pytest.fixture
def install(monkeypatch):
    """Let the code of the page be the module that its first line names."""

    def add(path):
        name = path.removesuffix(".py").replace("/", ".")
        module = types.ModuleType(name)
        exec(compile(code(f"# {path}\n"), path, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return add


@pytest.fixture
def photos(tmp_path, monkeypatch, make_images):
    make_images(tmp_path / "PHOTOS", {"cats": 60, "dogs": 60}, size=(20, 24))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "PHOTOS"


def records(run, kind="train"):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.slow
def test_the_method_trains_from_the_command_line_and_from_python(photos, monkeypatch):
    Path("align_uniform.py").write_text(code("# align_uniform.py\n"))
    train = [*command("pretrain"), *FLAGS]
    assert main(train) == 0
    run = Path("runs/align")
    logged = records(run)
    steps = 2 * (len(list(photos.rglob("*.jpg"))) * 9 // 10 // 16)
    assert [line["step"] for line in logged] == list(range(1, steps + 1))
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert all(0 <= line["distance"] <= 4 and line["effective_rank"] >= 1 for line in logged)
    settings = json.loads((run / "config.json").read_text())["method"]
    assert settings["name"] == "align-uniform" and settings["uniformity"] == 0.5

    tiny = recipe("small").with_overrides(TINY)
    monkeypatch.setattr("meanshift.config.recipes.recipe", {"small": tiny}.get)
    exec(compile(code("from meanshift import pretrain\n"), "architecture.md", "exec"), {})
    again = records(Path("runs/align-python"))
    assert len(again) == steps and again[-1]["loss"] != logged[-1]["loss"]  # another uniformity


@pytest.mark.usefixtures("photos")
@pytest.mark.slow
def test_the_method_is_resumed_and_evaluated_like_any_other():
    Path("align_uniform.py").write_text(code("# align_uniform.py\n"))
    train = [*command("pretrain"), *FLAGS]
    assert main([*train, "--train.save_every", "0.5"]) == 0
    run = Path("runs/align")
    whole = {line["step"]: line["loss"] for line in records(run)}
    *_, last = sorted((run / "checkpoints").glob("step-*.pt"))
    last.unlink()
    assert main(train) == 0
    assert {line["step"]: line["loss"] for line in records(run)} == whole
    assert main(["evaluate", "knn", str(run), "--compare", f"untrained:{run}"]) == 0
    assert main(["figures", str(run), "--only", "curves", "views"]) == 0
    assert main(["export", str(run), "--out", "align.safetensors"]) == 0


def test_the_source_is_trained_and_evaluated_on(install, tmp_path, monkeypatch):
    module = install("meanshift/data/gradients.py")
    opened = []

    def open_source(spec, **_):  # the line that the page adds to data/open.py
        if spec == "gradients":
            opened.append(spec)
            return module.read_gradients()
        raise AssertionError(spec)

    assert 'if spec == "gradients": return gradients.read_gradients()' in PAGE
    monkeypatch.setattr("meanshift.data.splits.open_source", open_source)
    run = tmp_path / "run"
    assert main(["pretrain", "small", "--data", "gradients", "--out", str(run), *FLAGS]) == 0
    assert len(records(run)) == 2 * (160 // 16) and records(run, "monitor")
    assert main(["evaluate", "knn", "pixels", "--data", "gradients", "--out", str(run)]) == 0
    (result,) = (run / "results").glob("knn*.json")
    assert json.loads(result.read_text())["metrics"]["1-NN"] == 100  # the direction is visible
    assert len(opened) >= 2


@pytest.mark.usefixtures("photos")
@pytest.mark.slow
def test_the_evaluation_gives_a_result_and_a_card(install, monkeypatch):
    install("meanshift/evaluation/centroid.py")
    assert '"centroid": "meanshift.evaluation.centroid"' in PAGE
    monkeypatch.setitem(PROTOCOLS, "centroid", "meanshift.evaluation.centroid")
    assert main([*"pretrain small --data PHOTOS --out runs/photos".split(), *FLAGS]) == 0
    assert main(command("evaluate centroid")) == 0
    result = json.loads(Path("runs/photos/results/centroid.json").read_text())
    assert (
        result["card"]["protocol"] == "centroid" and Path("runs/photos/results/knn.json").exists()
    )

    context = EvaluationContext(load_weights("runs/photos"))
    unit = [torch.nn.functional.normalize(part.features) for part in (context.train, context.test)]
    means = torch.stack([unit[0][context.train.labels == label].mean(0) for label in range(2)])
    distances = torch.cdist(unit[1], torch.nn.functional.normalize(means))
    accuracy = (distances.argmin(1) == context.test.labels).float().mean()
    assert result["metrics"]["top-1"] == pytest.approx(100 * float(accuracy))


@pytest.mark.usefixtures("photos")
@pytest.mark.slow
def test_the_figure_is_drawn(install, tmp_path):
    install("meanshift/viz/figures/spread.py")
    assert main([*"pretrain small --data PHOTOS --out runs/photos".split(), *FLAGS]) == 0
    (outcome,) = draw_figures([Run("runs/photos")], tmp_path / "figures", names=["spread"])
    assert [file.name for file in outcome.files] == [
        f"spread.{suffix}" for suffix in ("png", "pdf", "svg", "txt")
    ]
    assert "Spread of the target embeddings" in (tmp_path / "figures" / "spread.svg").read_text()
    Path("runs/photos/metrics.jsonl").write_text("")
    (outcome,) = draw_figures([Run("runs/photos")], tmp_path / "figures", names=["spread"])
    assert "--train.log_every" in outcome.missing


def test_the_table_lists_the_packages_in_the_order_of_their_imports():
    order = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert set(order) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for position, package in enumerate(order):
        for file in (PACKAGE / package).rglob("*.py"):
            imported = re.findall(r"^\s*(?:from|import) meanshift\.(\w+)", file.read_text(), re.M)
            assert set(imported) <= set(order[: position + 1]), file


@pytest.mark.parametrize("page", ["architecture.md", "method.md"])
def test_the_files_and_names_of_the_page_exist(page):
    text = (ROOT / "docs" / page).read_text()
    code_removed = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    sources = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", sources)) | {file.stem for file in PACKAGE.rglob("*.py")}
    quoted = re.findall(r"`([^`\n]+)`", code_removed)
    examples = {"methods/align_uniform.py"}
    files = {name for name in quoted if re.fullmatch(r"[\w/]+\.py", name)} - examples
    assert files
    for name in files:
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), name
    names = [name for name in quoted if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name)]
    missing = {name for name in names if not set(name.split(".")) <= words}
    files_of_a_run = {"metrics.jsonl", "config.json", "spread.png", "spread.pdf"}
    files_of_a_run |= {"spread.svg", "spread.txt"}
    assert missing <= files_of_a_run | {"torchrun"}, missing
