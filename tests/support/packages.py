"""Packages that look as if they were not installed."""

import sys


def hide_packages(monkeypatch, *packages):
    """Let every import of these packages fail as it does where they are not installed."""

    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name.partition(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
