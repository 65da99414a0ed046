"""Optional packages are imported only where they are used."""

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys

class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name.partition(".")[0] in {"matplotlib", "jinja2", "sklearn", "starlette", "uvicorn"}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Finder)
import meanshift.viz

for module in pkgutil.walk_packages(meanshift.viz.__path__, "meanshift.viz."):
    if module.name not in ("meanshift.viz.explorer.guard", "meanshift.viz.explorer.routes"):
        importlib.import_module(module.name)
        print(module.name)
"""


def test_all_modules_but_the_web_server_can_be_imported_without_extras():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 20
