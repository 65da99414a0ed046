"""The house plan holds: imports point downwards, no drawers, short files, a light front door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meanshift

PACKAGE = Path(meanshift.__file__).parent

FLOORS = (  # from the ground up: a room may import rooms of lower floors only
    "fields missing",
    "config",
    "recipes keyed distributed journal machine progress pixels memory search signals",
    "data augment encoder bank norm whiten",
    "prepared",
    "methods shortlist optim health checkpoint features views look logistic detections detector",
    "console foreign run drawn",
    "snapshot tally weights resume",
    "train subject embed maps",
    "probe detecting",
    "evaluate",
    "bench figures gallery",
    "report explore reproduce",
    "__init__",
    "cli",
    "__main__",
)
NARROWER = {  # the rooms for which the plan allows less than every lower floor
    "keyed": "",
    "missing": "",
    "distributed": "missing",
    "machine": "",
    "progress": "",
    "pixels": "",
    "memory": "",
    "search": "",
    "signals": "",
    "norm": "distributed",
    "whiten": "distributed",
    "recipes": "config",
    "journal": "config",
    "data": "config keyed distributed journal progress",
    "augment": "config keyed pixels",
    "encoder": "config",
    "bank": "distributed search",
    "methods": "config encoder bank distributed whiten",
    "shortlist": "search",
    "optim": "config",
    "health": "",
    "logistic": "",
    "detections": "",
    "detector": "keyed machine",
    "drawn": "look detections",
    "checkpoint": "config encoder journal",
    "look": "journal",
    "views": "config keyed data pixels augment",
    "run": "config data search checkpoint journal views",
    "maps": "keyed journal run",
    "figures": "config keyed data augment look views run maps evaluate",
    "gallery": "keyed data augment search look views run maps evaluate",
    "report": "config recipes journal look run gallery evaluate",
    "weights": " ".join(FLOORS[: FLOORS.index("console foreign run drawn")]) + " foreign",
}
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
APART = (
    "evaluate",
    "figures",
)  # packages whose files may import the package itself but never each other
DRAWERS = {"utils", "util", "misc", "common", "helpers", "helper"}


def modules(package):
    return sorted(package.rglob("*.py"))


def room_of(package, module):
    return module.relative_to(package).with_suffix("").parts[0]


def imported(module):
    """The dotted names below `meanshift` that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import hides its arrow"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1:] for name in names if name.split(".")[0] == "meanshift")


def wrong_arrows(package):
    """Every import that the table forbids, and every room that the table does not know."""
    wrong = []
    for module in modules(package):
        room = room_of(package, module)
        if room not in FLOOR:
            wrong.append(f"{room} is not in the table of floors")
            continue
        for parts in imported(module):
            target = parts[0] if parts and parts[0] in FLOOR else "__init__"
            if is_wrong(module, room, target, parts):
                wrong.append(f"{module.relative_to(package)} imports {'.'.join(parts)}")
    return wrong


def is_wrong(module, room, target, parts):
    if target == room:
        sibling = module.parent / f"{parts[1]}.py" if len(parts) > 1 else module
        return room in APART and sibling.exists() and module.stem not in ("__init__", parts[1])
    narrower = NARROWER.get(room)
    allowed = narrower is None or target in narrower.split()
    return FLOOR[target] >= FLOOR[room] or not allowed


def drawers(package):
    return [path.name for path in package.rglob("*") if path.stem.lower() in DRAWERS]


def too_long(package, most, below=None):
    lengths = {m.relative_to(package).as_posix(): len(m.read_text().splitlines())
               for m in modules(package)}  # fmt: skip
    limits = dict.fromkeys(lengths, most) | (below or {})
    return {name: length for name, length in lengths.items() if length > limits[name]}


def without_docstring(package):
    return [m.name for m in modules(package) if not ast.get_docstring(ast.parse(m.read_text()))]


def in_fresh_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake_package(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_imports_point_downwards():
    assert wrong_arrows(PACKAGE) == []


def test_the_table_lists_no_room_that_is_gone():
    assert set(FLOOR) == {room_of(PACKAGE, module) for module in modules(PACKAGE)}


def test_the_checker_sees_each_kind_of_wrong_arrow(tmp_path):
    fake = fake_package(
        tmp_path,
        {
            "bank.py": "def f():\n    from meanshift.training.loop import pretrain\n",
            "augment.py": "import meanshift.models.encoder\n",
            "health.py": "from meanshift import config\n",
            "optim.py": "from meanshift import MeanShift\n",
            "shed.py": "import os\n",
            "evaluate/linear.py": "from meanshift.evaluation.knn import vote\n",
            "evaluate/knn.py": "from meanshift.evaluation import card\n",
        },
    )
    assert wrong_arrows(fake) == [
        "augment.py imports encoder",
        "bank.py imports train.pretrain",
        "evaluate/linear.py imports evaluate.knn.vote",
        "health.py imports config",
        "optim.py imports MeanShift",
        "shed is not in the table of floors",
    ]


def test_the_checker_lets_right_arrows_pass(tmp_path):
    fake = fake_package(
        tmp_path,
        {
            "train.py": "import torch\nfrom meanshift import config, health\n",
            "cli.py": "from meanshift import __version__\nfrom meanshift.training.loop import pretrain\n",
            "data/loader.py": "from meanshift.data.source import Source\n",
            "data/source.py": "",
        },
    )
    assert wrong_arrows(fake) == []


def test_there_are_no_drawers():
    assert drawers(PACKAGE) == []


def test_files_are_short():
    assert too_long(PACKAGE, 320) == {}


def test_the_paper_stays_on_one_page():
    assert too_long(PACKAGE, sys.maxsize, {"methods/msf.py": 199}) == {}


def test_every_module_opens_with_a_docstring():
    assert without_docstring(PACKAGE) == []


def test_the_other_checkers_can_fail(tmp_path):
    fake = fake_package(tmp_path, {"data/utils.py": "x = 1\n" * 5, "bank.py": '"""Rows."""\n'})
    assert drawers(fake) == ["utils.py"]
    assert too_long(fake, 4) == {"data/utils.py": 5}
    assert too_long(fake, 9, {"data/utils.py": 4}) == {"data/utils.py": 5}
    assert without_docstring(fake) == ["utils.py"]


def test_neither_the_package_nor_the_front_door_imports_torch():
    code = "import sys, meanshift, meanshift.cli; print('torch' in sys.modules)"
    assert in_fresh_python(code) == "False"


def test_public_names_come_from_the_package_itself():
    from meanshift import Config, MeanShift, MemoryBank, load_encoder, pretrain

    found = [Config, MeanShift, MemoryBank, load_encoder, pretrain]
    homes = ["config", "methods.msf", "bank", "weights", "train"]
    assert [thing.__module__ for thing in found] == [f"meanshift.{home}" for home in homes]
    assert {thing.__name__ for thing in found} < set(dir(meanshift))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = meanshift.Nonsense
