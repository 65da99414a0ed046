"""What each extra adds to the core, in MB on disk: `python tools/install_sizes.py`.

Reads the packages of the environment that it runs in; an extra that is not installed there is
skipped. What an extra adds is counted whole, also where several extras share a package.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def needed(requirements: list[str], extra: str = "") -> set[str]:
    """The names of all packages that requirements need, directly or through others."""
    found: set[str] = set()
    pending = [(text, extra) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while pending:
        text, chosen = pending.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": chosen}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "meanshift":
            pending += [(each, "") for extra in requirement.extras for each in EXTRAS[extra]]
            continue
        found.add(name)
        for option in {"", *requirement.extras}:
            if (name, option) not in seen:
                seen.add((name, option))
                pending += [(each, option) for each in distribution(name).requires or ()]
    return found


def size(names: set[str]) -> float:
    """The files of packages, in MB."""
    files = [file.locate() for name in names for file in distribution(name).files or ()]
    return sum(Path(file).stat().st_size for file in files if Path(file).exists()) / 1e6


def main() -> None:
    core = needed(PROJECT["dependencies"])
    cuda = {name for name in core if name.startswith(("nvidia-", "cuda-", "triton"))}
    torch = needed(["torch", "torchvision"])
    print(f"{'core':12} {size(core):7.0f} MB in {len(core)} packages")
    print(f"{'  PyTorch':12} {size(torch):7.0f} MB, of these {size(cuda):.0f} MB CUDA and Triton")
    for extra, requirements in EXTRAS.items():
        try:
            added = needed(requirements) - core
        except PackageNotFoundError as error:
            print(f"{extra:12} skipped: {error.name} is not installed")
            continue
        print(f"{extra:12} {size(added):7.0f} MB in {len(added)} packages")


if __name__ == "__main__":
    main()
