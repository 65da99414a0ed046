"""The architecture: one order of imports, a small core, no catch-alls, the paper on one page."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import meanshift

PACKAGE = Path(meanshift.__file__).parent
TESTS = Path(__file__).parent

ORDER = [  # a package may import only those before it
    "config", "runtime", "ops", "data", "transforms", "models", "methods", "training",
    "evaluation", "viz", "reproduce", "doctor", "api", "estimator", "__init__", "cli", "__main__",
]  # fmt: skip
CATCH_ALLS = {"utils", "util", "misc", "common", "helpers", "helper"}


def modules(package):
    return sorted(package.rglob("*.py"))


def package_of(root, module):
    return module.relative_to(root).with_suffix("").parts[0]


def imported(module):
    """The dotted names below `meanshift` that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: use absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1:] for name in names if name.split(".")[0] == "meanshift")


def wrong_imports(root):
    """Every import against the order, and every package that the order does not list."""
    wrong = []
    for module in modules(root):
        package = package_of(root, module)
        if package not in ORDER:
            wrong.append(f"{package} is not in the order")
            continue
        for parts in imported(module):
            target = parts[0] if parts and parts[0] in ORDER else "__init__"
            if ORDER.index(target) > ORDER.index(package):
                wrong.append(f"{module.relative_to(root)} imports {'.'.join(parts)}")
    return wrong


def cycles(root):
    """Modules that import each other at import time, directly or through others."""
    names = {".".join(m.relative_to(root).with_suffix("").parts): m for m in modules(root)}
    graph = {}
    for name, module in names.items():
        graph[name] = set()
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meanshift"):
                base = node.module.split(".")[1:]
                for alias in node.names:
                    full = ".".join([*base, alias.name])
                    target = full if full in names else ".".join(base)
                    graph[name] |= {target} & names.keys()
    found, done = [], set()

    def visit(name, path):
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def catch_alls(root):
    return [path.name for path in root.rglob("*") if path.stem.lower() in CATCH_ALLS]


def without_docstring(root):
    return [m.name for m in modules(root) if not ast.get_docstring(ast.parse(m.read_text()))]


def core_dependencies():
    """The names by which the packages that are always installed are imported."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    names = {text.partition(">=")[0] for text in project["dependencies"]}
    return {"PIL" if name == "pillow" else name for name in names}


def needed_at_import(root):
    """Third-party packages that modules import when they are imported, by module."""
    for module in modules(root):
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue  # inside of functions, or for type checkers
            for name in names:
                package = name.partition(".")[0]
                if package not in {*sys.stdlib_module_names, "meanshift"}:
                    yield str(module.relative_to(root)), package


def imported_tests(root):
    """Test files that import from another test file."""
    return sorted(
        {
            module.name
            for module in root.rglob("test_*.py")
            for node in ast.walk(ast.parse(module.read_text()))
            if isinstance(node, ast.ImportFrom)
            for part in (node.module or "").split(".")
            if part.startswith("test_")
        }
    )


def in_fresh_python(code):
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def fake_package(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_imports_follow_the_order():
    assert wrong_imports(PACKAGE) == []


def test_the_order_lists_what_is_there():
    assert set(ORDER) == {package_of(PACKAGE, module) for module in modules(PACKAGE)}


def test_there_are_no_import_cycles():
    assert cycles(PACKAGE) == []


def test_wrong_imports_are_detected(tmp_path):
    fake = fake_package(
        tmp_path,
        {
            "ops/topk.py": "def f():\n    from meanshift.training.loop import pretrain\n",
            "data/folder.py": "import meanshift.models.encoder\n",
            "methods/msf.py": "from meanshift import MeanShift\n",
            "training/loop.py": "from meanshift import config\nfrom meanshift.methods import msf\n",
            "cli/pretrain.py": "from meanshift import __version__\n",
            "shed.py": "import os\n",
        },
    )
    assert wrong_imports(fake) == [
        "data/folder.py imports models.encoder",
        "methods/msf.py imports MeanShift",
        "ops/topk.py imports training.loop.pretrain",
        "shed is not in the order",
    ]


def test_cycles_are_detected(tmp_path):
    fake = fake_package(
        tmp_path,
        {
            "ops/a.py": "from meanshift.ops import b\n",
            "ops/b.py": "from meanshift.ops.c import x\n",
            "ops/c.py": "from meanshift.ops.a import y\n",
            "ops/d.py": "def f():\n    from meanshift.ops import d\n",
        },
    )
    assert cycles(fake) == ["ops.a -> ops.b -> ops.c -> ops.a"]


def test_only_the_explorer_and_the_estimator_need_more_than_the_core_when_they_are_imported():
    core = core_dependencies()
    more = {module for module, name in needed_at_import(PACKAGE) if name not in core}
    others = {module for module in more if not module.startswith("viz/explorer/")}
    assert others == {"estimator.py"}


def test_what_is_needed_at_import_is_detected(tmp_path):
    text = (
        "import json, sklearn.cluster\nfrom matplotlib import figure\n"
        "if True:\n    import pyarrow\ndef f():\n    import faiss\n"
    )
    fake = fake_package(tmp_path, {"ops/topk.py": text})
    found = list(needed_at_import(fake))
    assert found == [("ops/topk.py", "sklearn"), ("ops/topk.py", "matplotlib")]


def test_no_test_imports_another_test_file(tmp_path):
    assert imported_tests(TESTS) == []
    fake_package(tmp_path, {"a/test_a.py": "from tests.b.test_b import helper\n"})
    assert imported_tests(tmp_path) == ["test_a.py"]


def test_there_are_no_catch_alls():
    assert catch_alls(PACKAGE) == []


def test_the_paper_stays_on_one_page():
    assert len((PACKAGE / "methods" / "msf.py").read_text().splitlines()) < 200


def test_every_module_opens_with_a_docstring():
    assert without_docstring(PACKAGE) == []


def test_the_other_checks_can_fail(tmp_path):
    fake = fake_package(tmp_path, {"data/utils.py": "x = 1\n", "ops/topk.py": '"""Rows."""\n'})
    assert catch_alls(fake) == ["utils.py"]
    assert without_docstring(fake) == ["utils.py"]


def test_neither_the_package_nor_the_command_line_imports_torch():
    code = "import sys, meanshift, meanshift.cli; print('torch' in sys.modules)"
    assert in_fresh_python(code) == "False"


def test_an_encoder_without_torchvision_is_used_without_importing_it():
    # torchvision takes as long to import as torch: its operators import torch's compiler.
    code = (
        "import sys, numpy, meanshift\n"
        "model = meanshift.load('meanshift:cifar10-small')\n"
        "model.embed(numpy.zeros((32, 32, 3), numpy.uint8))\n"
        "print('torchvision' in sys.modules)"
    )
    assert in_fresh_python(code) == "False"


def test_public_names_come_from_the_package_itself():
    for name in meanshift.__all__:
        assert getattr(meanshift, name) is not None
    assert set(meanshift.__all__) <= set(dir(meanshift))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = meanshift.Nonsense
