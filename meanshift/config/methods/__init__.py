"""The settings of each method: one frozen dataclass per method, chosen by its name.

A method outside this program is given as `--method.module FILE.py:CLASS`; its settings are the
dataclass `CLASS.Settings`, a subclass of `MethodSettings`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from meanshift.config.methods.base import MethodSettings
from meanshift.config.methods.clustering import DeepClusterV2, SeLaV2, SwAV
from meanshift.config.methods.contrastive import CO2, ISD, MoCo, SimCLR
from meanshift.config.methods.distillation import CompRess
from meanshift.config.methods.mean_shift import MSF, BYOLAsym
from meanshift.config.methods.sample_memory import PIRL, InvP
from meanshift.config.methods.siamese import BYOL, CMSF, SimSiam, VICReg
from meanshift.config.methods.supervised import Supervised
from meanshift.config.parsing import close, need

__all__ = ["DEFAULT_METHOD", "METHODS", "MSF", "BYOLAsym", "MethodSettings"]

METHODS: dict[str, type[MethodSettings]] = {
    "msf": MSF,
    "byol-asym": BYOLAsym,
    "byol": BYOL,
    "simsiam": SimSiam,
    "vicreg": VICReg,
    "cmsf": CMSF,
    "swav": SwAV,
    "deepcluster-v2": DeepClusterV2,
    "sela-v2": SeLaV2,
    "invp": InvP,
    "pirl": PIRL,
    "compress": CompRess,
    "supervised": Supervised,
    "moco": MoCo,
    "co2": CO2,
    "isd": ISD,
    "simclr": SimCLR,
}
DEFAULT_METHOD: type[MethodSettings] = MSF
"""the method of a configuration that names none"""


def settings_class(name: str, module: str = "") -> type[MethodSettings]:
    """The settings class of a method of this program by its name, or of another by its module."""
    if module:
        chosen = getattr(load_class(module), "Settings", None)
        if not (isinstance(chosen, type) and issubclass(chosen, MethodSettings)):
            raise ValueError(
                f"method.module: {module} has no settings; need a class attribute Settings, a "
                f"frozen dataclass that extends meanshift.config.MethodSettings"
            )
        return chosen
    if name not in METHODS:
        suggestion = close(name, list(METHODS), list(METHODS))
        raise ValueError(
            f"method.name: got {name!r}, need one of {', '.join(METHODS)} (did you mean "
            f"{suggestion}?), or --method.module FILE.py:CLASS"
        )
    return METHODS[name]


def absolute_module(module: str) -> str:
    """FILE.py:CLASS with the whole path: a run may be continued or evaluated in another folder."""
    file, colon, name = module.rpartition(":")
    if not file.endswith(".py"):
        return module
    return f"{Path(file).expanduser().resolve()}{colon}{name}"


def load_class(spec: str, setting: str = "method.module") -> type:
    """The class that FILE.py:CLASS or PACKAGE.MODULE:CLASS names; errors name the setting."""
    return _load_class(absolute_module(spec), setting)


@functools.cache
def _load_class(spec: str, setting: str) -> type:
    """The class of an absolute path or a package; a file is executed once."""
    location, _, name = spec.rpartition(":")
    need(bool(location and name), setting, spec, "FILE.py:CLASS or PACKAGE.MODULE:CLASS")
    try:
        if location.endswith(".py"):
            module = _import_file(Path(location))
        else:
            module = importlib.import_module(location)
    except (ImportError, OSError) as error:
        raise ValueError(f"{setting}: {location} cannot be imported ({error})") from None
    loaded = getattr(module, name, None)
    if not isinstance(loaded, type):
        raise ValueError(f"{setting}: {location} has no class {name}")
    return loaded


def _import_file(file: Path) -> ModuleType:
    """Import a file under a name that no other module has, also if two files have one name."""
    path_hash = hashlib.sha256(str(file).encode()).hexdigest()[:16]
    name = f"meanshift_method_{file.stem}_{path_hash}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)
    return module
