"""The settings of each method: one frozen dataclass per method, chosen by its name.

A method outside this program is given as `--method.module FILE.py:CLASS`; its settings are the
dataclass `CLASS.Settings`, a subclass of `MethodSettings`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

from meanshift.config.parsing import close, need
from meanshift.config.views import Strength


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """The settings that every method has."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """settings that the method's paper uses, by dotted name: of views and optimizer where they
    differ from the defaults of `Views` and `Optim`, of other groups where they differ from what a
    recipe has"""
    resume_safe: ClassVar[frozenset[str]] = frozenset()
    """the method's own settings that may change when a run is continued, without `method.`"""

    name: str = ""
    """name of the method"""
    module: str = ""
    """a method that is not part of this program: FILE.py:CLASS or PACKAGE.MODULE:CLASS"""
    dim: int = 0
    """size of the embedding; 0 is the MSF authors' rule, a quarter of the backbone's features"""
    hidden: int = 0
    """size of the heads' hidden layer; 0 is the authors' rule, twice the backbone's features"""

    def __post_init__(self) -> None:
        need(self.dim >= 0, "method.dim", self.dim, "0 or more")
        need(self.hidden >= 0, "method.hidden", self.hidden, "0 or more")

    def check(self, *, batch_size: int) -> None:
        """Raise ValueError where the settings do not fit the batch size."""


@dataclass(frozen=True, kw_only=True)
class _Asymmetric(MethodSettings):
    """What MSF and BYOL-asym share: an online encoder that predicts the output of a target."""

    target_view: Strength = "weak"
    """view that the target encoder sees"""
    online_view: Strength = "strong"
    """view that the online encoder sees"""
    same_view: bool = False
    """show both encoders the same view (T1=T2); collapses, for use as a positive control"""
    momentum: float = 0.99
    """momentum of the target encoder's moving average"""
    momentum_batch: int = 0
    """images per update that `momentum` is meant for: with n images it becomes
    momentum^(n/momentum_batch), the EMA scaling rule; 0: as it is"""
    momentum_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine`: momentum rises to 1 at the end of training"""
    symmetric: bool = False
    """also swap the views' roles, at twice the cost"""
    whiten: bool = False
    """whiten the target embeddings, so that they lose less of their rank; ours, not the paper's"""
    variance: float = 0.0
    """weight of VICReg's variance term on the online embedding; ours, not the paper's"""
    covariance: float = 0.0
    """weight of VICReg's covariance term on the online embedding; ours, not the paper's"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(0 <= self.momentum <= 1, "method.momentum", self.momentum, "between 0 and 1")
        for name in ("momentum_batch", "variance", "covariance"):
            value = getattr(self, name)
            need(0 <= value < math.inf, f"method.{name}", value, "0 or more")

    def for_batch(self, batch_size: int) -> _Asymmetric:
        """The settings with the momentum for so many images per update (0: unknown).

        EMA scaling rule, Busbridge et al. 2023, https://arxiv.org/abs/2307.13813
        """
        if not (self.momentum_batch and batch_size):
            return self
        return replace(self, momentum=self.momentum ** (batch_size / self.momentum_batch))


@dataclass(frozen=True, kw_only=True)
class MSF(_Asymmetric):
    """Mean Shift for self-supervised learning, with the defaults of the paper.

    paper: Koohpayegani, Tejankar, Pirsiavash 2021, https://arxiv.org/abs/2105.07269
    cost: 2 forward passes and 1 backward pass per image (`symmetric`: 4 and 2); a bank search
    """

    resume_safe: ClassVar[frozenset[str]] = frozenset({"bank_layout"})
    name: Literal["msf"] = "msf"
    """name of the method"""
    k: int = 5
    """nearest neighbors that an embedding is pulled towards; the first is the target itself"""
    k_schedule: Literal["constant", "linear"] = "constant"
    """`linear`: k grows from `k_start` to `k`, each value for equally many epochs"""
    k_start: int = 1
    """first value of a growing k"""
    neighbor_weight: float = 0.0
    """weight of the k-1 neighbors together, the target itself has the rest; 0: all k count equally,
    as in the paper"""
    bank_size: int = 128_000
    """past target embeddings in the memory bank"""
    bank_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """data type of the memory bank"""
    bank_layout: Literal["replicated", "sharded"] = "replicated"
    """in several processes: the whole bank in each, or a part; the neighbors are the same"""
    same_image: Literal["keep", "skip"] = "keep"
    """whether an older view of the same image may be a neighbor"""
    search_filled_only: bool = False
    """search only rows that were written, not the random ones that the bank starts with"""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.k >= 1, "method.k", self.k, "1 or more")
        need(1 <= self.k_start <= self.k, "method.k_start", self.k_start, f"1 to k ({self.k})")
        need(
            0 <= self.neighbor_weight <= 1,
            "method.neighbor_weight",
            self.neighbor_weight,
            "between 0 and 1",
        )
        need(
            self.k == 1 or self.k <= self.bank_size,
            "method.k",
            self.k,
            f"at most the bank's {self.bank_size} rows (raise --method.bank_size)",
        )

    def check(self, *, batch_size: int) -> None:
        rows = batch_size * (2 if self.symmetric else 1)
        need(
            self.k == 1 or rows <= self.bank_size,
            "method.bank_size",
            self.bank_size,
            f"at least the {rows} rows that a step adds (lower --train.batch_size)",
        )


@dataclass(frozen=True, kw_only=True)
class BYOLAsym(_Asymmetric):
    """BYOL with an asymmetric loss, which the MSF paper compares itself with: Mean Shift with k=1.

    paper: Grill et al. 2020, https://arxiv.org/abs/2006.07733; asymmetric in the MSF paper
    cost: 2 forward passes and 1 backward pass per image (`symmetric`: 4 and 2)
    """

    k: ClassVar[int] = 1
    k_schedule: ClassVar[str] = "constant"
    bank_size: ClassVar[int] = 0
    name: Literal["byol-asym"] = "byol-asym"
    """name of the method"""


METHODS: dict[str, type[MethodSettings]] = {"msf": MSF, "byol-asym": BYOLAsym}
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


def load_class(spec: str) -> type:
    """The class that FILE.py:CLASS or PACKAGE.MODULE:CLASS names."""
    return _load_class(absolute_module(spec))


@functools.cache
def _load_class(spec: str) -> type:
    """The class of an absolute path or a package; a file is executed once."""
    location, _, name = spec.rpartition(":")
    need(bool(location and name), "method.module", spec, "FILE.py:CLASS or PACKAGE.MODULE:CLASS")
    try:
        if location.endswith(".py"):
            module = _import_file(Path(location))
        else:
            module = importlib.import_module(location)
    except (ImportError, OSError) as error:
        raise ValueError(f"method.module: {location} cannot be imported ({error})") from None
    loaded = getattr(module, name, None)
    if not isinstance(loaded, type):
        raise ValueError(f"method.module: {location} has no class {name}")
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
