"""Optional packages are imported only where they are used."""

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
import meanshift.viz

for module in pkgutil.walk_packages(meanshift.viz.__path__, "meanshift.viz."):
    if module.name not in ("meanshift.viz.explorer.guard", "meanshift.viz.explorer.routes"):
        importlib.import_module(module.name)
        print(module.name)
optional = {"matplotlib", "jinja2", "sklearn", "starlette", "uvicorn"}
print("imported:", *sorted(optional & set(sys.modules)))
"""


def test_importing_all_modules_but_the_routes_imports_no_optional_package():
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *modules, imported = done.stdout.splitlines()
    assert len(modules) > 20 and imported == "imported:"
