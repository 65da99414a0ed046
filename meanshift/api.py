"""The Python API: train, load, embed, search and evaluate in a few lines.

Data is a SOURCE as on the command line (a folder, a file, a name), or it is in memory: a list of
samples, one array (n, ...), a torch Dataset, or a mapping of splits (`train`, `val`, `test`) to any
of them. A sample is a path, a PIL image, a numpy array or a tensor.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import shutil
import signal
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Float
from torch import nn
from torch.utils.data import Dataset

from meanshift.config import Config
from meanshift.config import settings as all_settings
from meanshift.config.methods import settings_class
from meanshift.config.parsing import close
from meanshift.config.recipes import RECIPES, describe
from meanshift.config.recipes import recipe as find_recipe
from meanshift.data import Source, Subset, open_source
from meanshift.data.in_memory import IN_MEMORY, SampleSource, as_source
from meanshift.data.open import SourceSpec
from meanshift.evaluation import PROTOCOLS
from meanshift.evaluation.context import EncoderContext, EvaluationContext, FeatureSet
from meanshift.evaluation.knn import KNNMonitor
from meanshift.evaluation.knn import neighbors as nearest
from meanshift.evaluation.result import Result
from meanshift.evaluation.samples import (
    Neighbors,
    Sample,
    as_several,
    embed_samples,
    extract_readable,
    label_of,
    path_of,
)
from meanshift.models.export import export_weights
from meanshift.models.features import BATCH_SIZE
from meanshift.models.weights import Weights, export, load_weights, source_places
from meanshift.runtime.signals import Stopped
from meanshift.training.loop import pretrain

Data = str | Path | Iterable[Sample] | Dataset[Any] | Source | Mapping[str, Any]
"""a SOURCE or samples in memory; a mapping has them by split"""


def fit(
    data: Data,
    y: Any = None,
    *,
    out: Path | str | None = None,
    recipe: str | Config = "small",
    **settings: Any,
) -> Model:
    """Train a model, or continue the run in `out` that was stopped; return the trained model.

    Ctrl-C finishes the step, saves a checkpoint and raises `KeyboardInterrupt`; the same call then
    continues the run.

    Args:
        data: a SOURCE as after `--data` (a folder, a file, a name), or samples in memory: a list of
            paths, PIL images and arrays, one array, a torch `Dataset`, or a mapping of splits.
        y: labels of samples in memory, for the k-NN monitor and for metrics: only supervised
            methods train with them.
        out: folder of the run. Without it the run is in a temporary directory, which is deleted
            with the model.
        recipe: name of a recipe, or a whole `Config`.
        **settings: settings of the run by their own name, as `epochs=3`, or by group and name, as
            `optim__name="adamw"`, where several groups have the name. `method`, `encoder` and
            `optim` stand for the `name` of their group: `method="byol"`.

    Returns:
        The trained model.

    Raises:
        ValueError: for data or settings that do not fit; nothing is written then.

    >>> model = fit("photos/", out="runs/photos", k=5, epochs=2)
    """
    source = _source_spec(data, y)
    name = source if isinstance(source, str) else IN_MEMORY
    config = _configure(recipe, settings).with_overrides({"data.source": name})
    temporary = None if out is not None else _TemporaryFolder()
    folder = temporary.path if temporary is not None else Path(str(out))
    splits = None if isinstance(source, str) else source
    try:
        pretrain(config, folder, data=splits, make_monitor=_make_monitor)
    except Stopped as stopped:
        if stopped.code != 128 + signal.SIGINT:
            raise
        lost = "stopped; the run was temporary: give out=FOLDER to continue one"
        # An interactive session goes on.
        raise KeyboardInterrupt(lost if temporary is not None else str(stopped)) from None
    return Model(load_weights(folder), source, config.train.device, temporary)


def load(weights: Path | str, *, device: str = "auto") -> Model:
    """Load a trained encoder with its preprocessing.

    Args:
        weights: a run, a checkpoint, an exported or third-party file, `torchvision:NAME:WEIGHTS`,
            or `meanshift:NAME` for weights that are part of this package.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, ...

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: if nothing is there, or if a file fits no known network completely.

    >>> model = load("runs/photos")
    >>> load("meanshift:cifar10-small").weights.image_size
    32
    """
    return Model(load_weights(weights), device=device)


class Model:
    """A trained encoder with its preprocessing; `fit` and `load` return it.

    >>> model = load("runs/photos")
    >>> features = model.embed(["a.jpg", "photos/b/0.png"])
    >>> model.neighbors("photos/b/0.png", k=5).paths[0]
    'photos/b/0.png'
    """

    def __init__(
        self,
        weights: Weights,
        data: SourceSpec | None = None,
        device: str = "auto",
        temporary: _TemporaryFolder | None = None,
    ) -> None:
        if temporary is not None:
            weights = replace(weights, output_dir=temporary.path)
        self.weights = weights
        self._data = data
        self._device = device
        self._temporary = temporary
        self._context = EncoderContext(weights, device=device)

    def __repr__(self) -> str:
        size = self.weights.image_size
        return f"Model({self.weights.spec!r}: {self.weights.title}; images of {size} pixels)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Model, (self.weights, self._data, self._device, self._temporary)

    @property
    def backbone(self) -> nn.Module:
        """The network, for torch: normalized images in, features out."""
        return self._context.backbone

    @property
    def config(self) -> Config | None:
        """The settings of the run; None for weights of another program."""
        return self.weights.config

    def embed(
        self, samples: Sample | Iterable[Sample] | Dataset[Any], *, batch_size: int = BATCH_SIZE
    ) -> Float[np.ndarray, "n features"]:
        """Compute the features of samples: one row each, also for a single sample.

        Samples are resized, cropped and normalized as by `evaluate`.

        Args:
            samples: a path, a PIL image or an array, or several of them. An array is one sample or,
                with a dimension more, several: an image has up to 3 dimensions, a signal up to 2, a
                vector 1.
            batch_size: samples that pass through the network at a time.

        Returns:
            The features, float32.

        Raises:
            ValueError: for a sample that cannot be read; the message names it.

        >>> len(load("runs/photos").embed("a.jpg"))
        1
        """
        return embed_samples(self._context, samples, batch_size=batch_size).numpy()

    def neighbors(self, sample: Sample, k: int = 5, *, data: Data | None = None) -> Neighbors:
        """Find the samples that are most similar to one sample, by the cosine of their features.

        Args:
            sample: a path, a PIL image or an array.
            k: how many to find.
            data: what is searched, anything that `fit` takes; by default what the run was trained
                on. Its features are extracted once and cached.

        Returns:
            Indices, similarities and paths, the most similar first. If the sample itself is among
            them, it is found first, with similarity 1.
        """
        if data is None:
            features = self._own_features
        else:
            features = self._context.features(open_source(_source_spec(data))["train"])
        searched = features.source
        if not 1 <= k <= len(searched):
            raise ValueError(
                f"k: got {k}, need 1 to {len(searched)}: {searched.name} has {len(searched)} "
                f"readable samples"
            )
        kind = self._context.kind
        several = as_several(sample, kind)
        if len(several) != 1:
            raise TypeError(f"neighbors: got {len(several)} samples, need one; call it for each")
        query = (
            as_source(several, kind=kind) if searched.uniform else SampleSource(several, kind=kind)
        )
        rows_of_query = extract_readable(self._context, query)
        found = nearest(features.features, rows_of_query, k, device=self._context.device)
        ((indices, similarities),) = found
        rows = indices[0]
        in_source = searched.indices[rows] if isinstance(searched, Subset) else rows
        paths = [path_of(searched, row) for row in rows.tolist()]
        labels = [label_of(searched, row) for row in rows.tolist()]
        return Neighbors(in_source.numpy(), similarities[0].numpy(), paths, labels)

    def save(self, path: Path | str) -> Path:
        """Export the backbone to a .safetensors, .pt or .pth file; `load` and torch read it.

        Args:
            path: the file to write; its parameters have torchvision's names.

        Returns:
            The path.
        """
        return export(self.weights, Path(path))

    def export(
        self,
        path: Path | str | None = None,
        *,
        format: str | None = None,
        data: Data | None = None,
        license: str = "unknown",
        verify: bool = False,
    ) -> Path:
        """Export the backbone for other programs; return the file or folder.

        The format is torchvision, timm, safetensors, torch, onnx or huggingface, or follows from
        the suffix of `path`, which by default is in `export/` of the run. Features are compared on
        `data` (default: what the run was trained on). With `verify` the export is read by the
        other program in a fresh process, and features that differ are an error.
        """
        if path is None and self._temporary is not None:
            raise ValueError("export: the run is temporary; give a path")
        job = export_weights(
            self.weights,
            None if path is None else Path(path),
            format=format,
            data=self._data if data is None else _source_spec(data),
            license=license,
            check=verify,
        )
        return job.out

    @functools.cached_property
    def _own_features(self) -> FeatureSet:
        """The features of the samples that the run was trained on, of the whole train split."""
        return self._context.features(open_source(self._own_data)["train"])

    @property
    def _own_data(self) -> SourceSpec:
        if self._data is not None:
            return self._data
        if self.config is None:
            raise ValueError(f"{self.weights.spec}: is no run, so give samples: data=...")
        return source_places(self.weights, self.config)[0]


@overload
def evaluate(
    model: Model | Path | str,
    name: str,
    /,
    *,
    data: Data | None = None,
    y: Any = None,
    **options: Any,
) -> Result: ...


@overload
def evaluate(
    model: Model | Path | str,
    first: str,
    second: str,
    /,
    *names: str,
    data: Data | None = None,
    y: Any = None,
    **options: Any,
) -> dict[str, Result]: ...


def evaluate(
    model: Model | Path | str,
    /,
    *names: str,
    data: Data | None = None,
    y: Any = None,
    **options: Any,
) -> Result | dict[str, Result]:
    """Evaluate a model by one protocol or by several, on labeled samples.

    As after `meanshift evaluate`, results and features are also files: in the run, or in
    `evaluations/`.

    Args:
        model: a model, or what `load` takes.
        *names: the protocols: `knn`, `linear`, `semi`, `finetune`, `cluster`, `rank`.
        data: what to evaluate on, anything that `fit` takes. By default what the run was trained
            on; its validation samples are then tested.
        y: labels of samples in memory.
        **options: options of the protocols (as `ks` of knn, `cached` of linear, `clusters` of
            cluster), and `split`, `seed`, `labels`, `image_size`, `resize`, `workers`, `device`,
            `precision`, `output_dir`.

    Returns:
        One result, whose `metrics` are numbers by name; of several protocols a dictionary of
        results by the name of the protocol.

    Raises:
        ValueError: for an unknown protocol or option, and for data without labels.

    >>> accuracy = evaluate("runs/photos", "knn", data="photos/").metrics["1-NN"]
    """
    protocols = {name: _protocol(name) for name in names}
    if not protocols:
        raise ValueError(f"evaluate: need a protocol: {', '.join(PROTOCOLS)}")
    by_protocol = {name: inspect.signature(run).parameters for name, run in protocols.items()}
    of_context = set(_names(EncoderContext) + _names(EvaluationContext))
    known = of_context.union(*by_protocol.values()) - {"weights", "context", "like"}
    for name in options:
        if name not in known:
            near = close(name, sorted(known), sorted(known))
            raise ValueError(f"{', '.join(names)}: unknown option {name!r}; did you mean {near}?")
    if y is not None and data is None:
        raise ValueError("y: got labels without samples; give both: data=..., y=...")
    model = model if isinstance(model, Model) else load(model)
    spec = model._data if data is None else _source_spec(data, y)
    chosen = {name: value for name, value in options.items() if name in of_context}
    context = EvaluationContext(model.weights, spec, **{"device": model._device, **chosen})
    results = {}
    for name, run in protocols.items():
        taken = {key: value for key, value in options.items() if key in by_protocol[name]}
        results[name] = run(context, **taken)
        context.save(results[name])
    return results[names[0]] if len(names) == 1 else results


def recipes() -> dict[str, str]:
    """List every recipe by name, with its hardware, time and result; `fit(recipe=NAME)`."""
    return {name: describe(name) for name in RECIPES}


def _source_spec(data: Any, y: Any = None) -> SourceSpec:
    """What `open_source` takes: a text, or splits of samples in memory."""
    if isinstance(data, (str, Path)):
        if y is not None:
            raise ValueError(
                f"y: {data} has its own labels (class folders, labels.csv); leave y out"
            )
        return str(data)
    if not isinstance(data, Mapping):
        return {"train": as_source(data, y)}
    labels = {} if y is None else y
    if "train" not in data or not isinstance(labels, Mapping) or labels.keys() - data.keys():
        raise ValueError(
            f"got the splits {', '.join(map(str, data)) or 'none'}; need train, and y (if it is "
            f"given) as a mapping with the same names"
        )
    return {name: as_source(part, labels.get(name)) for name, part in data.items()}


def _configure(recipe: str | Config, given: Mapping[str, Any]) -> Config:
    """The configuration of a recipe with settings that are given as keywords."""
    base = find_recipe(recipe) if isinstance(recipe, str) else recipe
    method = given.get("method", given.get("method__name", ""))
    module = given.get("method__module", "")
    kind = settings_class(method, module) if method or module else type(base.method)
    paths = [path for path, *_ in all_settings(kind)]
    return base.with_overrides({_setting_path(name, paths): given[name] for name in given})


def _setting_path(name: str, paths: Sequence[str]) -> str:
    """The dotted name of a setting that is given as a keyword."""
    if name in ("source", "data__source"):
        raise ValueError(f"{name}: the samples are the first argument of fit")
    if "__" in name:
        return name.replace("__", ".", 1)  # checked with the others
    if f"{name}.name" in paths:
        return f"{name}.name"
    found = [path for path in paths if path.partition(".")[2] == name]
    if len(found) == 1:
        return found[0]
    if found:
        keywords = " or ".join(path.replace(".", "__") for path in found)
        raise ValueError(f"{name}: is a setting of several groups; write {keywords}")
    names = sorted({path.partition(".")[2] for path in paths})
    near = close(name, names, ["one of " + ", ".join(names)])
    raise ValueError(f"unknown setting {name!r}; did you mean {near}?")


def _make_monitor(config: Config, train: Source, validation: Source | None) -> KNNMonitor | None:
    """k-NN on the validation samples, where there are labels."""
    if validation is None or not train.labeled or not validation.labeled:
        return None
    size, workers = config.data.image_size, config.data.workers
    return KNNMonitor(train, validation, image_size=size, workers=workers)


class _TemporaryFolder:
    """A folder that is deleted with this object; a copy of the object has another one."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="meanshift-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _TemporaryFolder, ()


def _protocol(name: str) -> Any:
    """The function of a protocol that needs nothing but features."""
    if name not in PROTOCOLS:
        near = close(name, list(PROTOCOLS), list(PROTOCOLS))
        raise ValueError(f"evaluate: got {name!r}; did you mean {near}?")
    if name in ("transfer", "detect"):
        raise ValueError(f"{name}: has datasets of its own; type: meanshift evaluate {name} RUN")
    return importlib.import_module(PROTOCOLS[name]).evaluate


def _names(kind: type) -> list[str]:
    """The names of the arguments of a class, without those that collect others."""
    return [name for name in inspect.signature(kind).parameters if name not in ("options", "data")]
