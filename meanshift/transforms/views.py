"""The transform that makes the training views of a source, by the kind of its samples."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from meanshift.config import ViewSpec
from meanshift.config.methods import load_class
from meanshift.data import Source, UnreadableSample
from meanshift.runtime import rng
from meanshift.transforms.augment import MultiViewTransform
from meanshift.transforms.signals import SignalTransform
from meanshift.transforms.vectors import MIXED_IN, VectorTransform

T = TypeVar("T", bound=MultiViewTransform)


def view_transform(
    views: Sequence[ViewSpec], source: Source, *, seed: int, size: int, module: str = ""
) -> MultiViewTransform:
    """The transform for these views of a source; `size` is the side of images and the length of
    signals, `module` the setting `views.module`."""
    spec = source.sample_spec
    if spec.kind != "image" and any(view.jigsaw for view in views):
        raise ValueError(
            f"method: it needs patches of images, and {source.name} holds {spec.kind}s; choose "
            f"another, such as --method.name msf"
        )
    if spec.kind == "vector":
        mixes = any(view.mix for view in views)
        others = _some_samples(source) if mixes else None
        vectors = _own_class(module, VectorTransform) if module else VectorTransform
        return vectors(tuple(views), seed, size, spec, others)
    kind = SignalTransform if spec.kind == "signal" else MultiViewTransform
    kind = _own_class(module, kind) if module else kind
    return kind(tuple(views), seed, size, spec)


def _own_class(module: str, kind: type[T]) -> type[T]:
    """The class of `views.module`, which must extend the transform for the kind of the samples."""
    own = load_class(module, "views.module")
    ours = (VectorTransform, SignalTransform, MultiViewTransform)
    if next((base for base in own.__mro__ if base in ours), None) is not kind:
        raise ValueError(
            f"views.module: {module} does not fit these samples; need a subclass of "
            f"{kind.__module__}.{kind.__name__}"
        )
    copyreg.pickle(own, functools.partial(_by_module, module=module))
    return own


def _by_module(transform: Any, *, module: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """How such a transform is sent to a process that has not loaded its file."""
    return _restore, (module, vars(transform))


def _restore(module: str, values: dict[str, Any]) -> Any:
    own = load_class(module, "views.module")
    transform: Any = object.__new__(own)
    transform.__dict__.update(values)
    return transform


def _some_samples(source: Source) -> torch.Tensor | None:
    """Samples that can be mixed into others; the same whatever the order of the run."""
    rows = []
    for index in rng.choice(0, len(source), MIXED_IN, rng.SAMPLE).tolist():
        try:
            rows.append(source.sample(index))
        except UnreadableSample:
            continue
    return torch.stack(rows) if rows else None
