"""Hugging Face datasets: mapped from a disk, or streamed from Parquet by row group."""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from meanshift.data.decode import read_image
from meanshift.data.file_access import FileStream, RandomAccessFile, base_name, split_name
from meanshift.data.remote import find_remote
from meanshift.data.source import Source, block_order, file_signature
from meanshift.data.unreadable import UnreadableSample
from meanshift.runtime.extras import require

_BUDGET = 256 << 20  # bytes of images that a process keeps: how many row groups `order` may mix
_LARGE = 512 << 20  # bytes of one row group that deserve a warning


class HubSource(Source):
    """One split of a dataset that the `datasets` library maps from a disk."""

    def __init__(self, dataset: Any, *, name: str) -> None:
        self.name = name
        self.column, label, class_names = _columns(dataset.features.arrow_schema, name)
        self.labels = None
        self.classes = []
        if label is not None:
            table = dataset.select_columns([label]).with_format("arrow")[:]
            self.labels, self.classes = _read_labels(table.column(label), class_names, name)
        images = dataset.select_columns([self.column]).with_format(None)
        feature = dataset.features[self.column]
        if type(feature).__name__ == "Image":  # bytes, for our own decoder
            images = images.cast_column(self.column, type(feature)(decode=False))
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def title(self, index: int) -> str:
        return f"#{index}"

    def read(self, index: int) -> Shaped[Tensor, "channels height width"]:
        content, path = self._cell(index)
        if content is not None:
            return read_image(io.BytesIO(content), title=self.title(index))
        if path:
            return read_image(Path(path))
        raise UnreadableSample(self.title(index), "neither bytes nor the path of a file")

    def _cell(self, index: int) -> tuple[bytes | None, str | None]:
        """The bytes of an image, or the path of its file."""
        cell = self.images[index][self.column]
        if isinstance(cell, dict):
            return cell.get("bytes"), cell.get("path")
        return cell, None

    def fingerprint(self) -> str:
        """Titles are only numbers, so the beginnings of some hundred images are read as well."""
        digest = hashlib.sha256(super().fingerprint().encode())
        for index in range(0, len(self), 1 + len(self) // 256):
            content = self._cell(index)[0] or b""
            digest.update(f"{len(content)} ".encode() + content[:4096])
        return digest.hexdigest()[:16]

    def content_fingerprint(self) -> str:
        files = [Path(entry["filename"]) for entry in self.images.cache_files]
        content = self.fingerprint() + file_signature(files)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class StreamedSource(Source):
    """The images of some Parquet files; a row group is read when one of its images is needed.

    A process keeps as many row groups as `order` mixes at a time, and no open file.
    """

    def __init__(self, files: Sequence[RandomAccessFile], *, name: str) -> None:
        self.name = name
        self.files = list(files)
        self.footers = list[Any]()
        labels, class_names = self._open_files()
        self.row_groups = [
            (number, group)
            for number, footer in enumerate(self.footers)
            for group in range(footer.num_row_groups)
        ]
        rows = [self.footers[number].row_group(group).num_rows for number, group in self.row_groups]
        self.rows = torch.tensor(rows, dtype=torch.int64)
        self.ends = self.rows.cumsum(0)
        if not len(self):
            raise ValueError(f"{name}: no row in {len(self.files)} files; give others")
        self.sizes = [
            _image_bytes(self.footers[number], group, self.leaf)
            for number, group in self.row_groups
        ]
        self.window = min(32, max(2, _BUDGET * len(self.sizes) // (sum(self.sizes) or 1)))
        if max(self.sizes) > _LARGE:
            warnings.warn(
                f"{name}: a row group has {max(self.sizes) >> 20} MB of images and each worker "
                f"keeps it in memory; write the files with smaller ones (row_group_size=500)",
                stacklevel=2,
            )
        self.labels = None
        self.classes = []
        if labels is not None:
            self.labels, self.classes = _read_labels(labels, class_names, name)
        self._cache = dict[int, Any]()
        self._cache_owner = os.getpid()

    def _open_files(self) -> tuple[Any, list[str] | None]:
        """Read every footer and check that the files agree: the labels and the classes' names."""
        require("pyarrow", extra="parquet", what="Parquet files")
        import pyarrow as pa

        columns = list[Any]()
        for file in self.files:
            opened = _open_parquet(file)
            column, label, class_names = _columns(
                opened.schema_arrow, f"{self.name}: {file.address}"
            )
            kind = opened.schema_arrow.field(column).type
            leaf = f"{column}.bytes" if pa.types.is_struct(kind) else column
            layout = (leaf, label, class_names)
            if not self.footers:
                self.leaf = leaf
                first_layout = layout
            elif layout != first_layout:
                raise ValueError(
                    f"{self.name}: {base_name(file.address)} has not the columns and classes of "
                    f"{base_name(self.files[0].address)}; give files of one dataset"
                )
            self.footers.append(opened.metadata)
            if label is not None:
                columns.append(_call_arrow(file, opened.read, columns=[label]).column(label))
        if not columns:
            return None, None
        chunks = [chunk for column in columns for chunk in column.chunks]
        return pa.chunked_array(chunks), class_names

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def blockwise(self) -> bool:
        return True

    def order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        return block_order(seed, epoch, self.rows, window=self.window)

    def title(self, index: int) -> str:
        number, _ = self.row_groups[int(torch.searchsorted(self.ends, index, right=True))]
        before = sum(footer.num_rows for footer in self.footers[:number])
        return f"{base_name(self.files[number].address)}#{index - before}"

    def read(self, index: int) -> Shaped[Tensor, "channels height width"]:
        block = int(torch.searchsorted(self.ends, index, right=True))
        row = index - int(self.ends[block] - self.rows[block])
        content = self._block(block)[row].as_py()
        if content is None:
            raise UnreadableSample(self.title(index), "no bytes in the Parquet file")
        return read_image(io.BytesIO(content), title=self.title(index))

    def _block(self, block: int) -> Any:
        """The bytes of a row group's images, from the cache of this process or from the file."""
        if self._cache_owner != os.getpid():  # a forked worker begins its own
            self._cache = {}
            self._cache_owner = os.getpid()
        content = self._cache.pop(block, None)
        if content is None:
            while len(self._cache) >= self.window:
                self._cache.pop(next(iter(self._cache)))  # the least recently used
            content = self._read_block(block)
        self._cache[block] = content
        return content

    def _read_block(self, block: int) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        number, group = self.row_groups[block]
        file = self.files[number]
        opened = _open_parquet(file, footer=self.footers[number])
        table = _call_arrow(
            file, opened.read_row_group, group, columns=[self.leaf], use_threads=False
        )
        column = table.column(0)
        return pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column

    def fingerprint(self) -> str:
        """The row groups count too: the order of an epoch depends on them."""
        content = f"{super().fingerprint()} {self.rows.tolist()} {self.sizes} {self.window}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def content_fingerprint(self) -> str:
        versions = [self.fingerprint(), *(file.version for file in self.files)]
        return hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        """All but the row groups, which a worker reads itself."""
        return {**vars(self), "_cache": {}}


def hub_files(name: str, config: str, spec: str) -> list[str]:
    """The Parquet files of a dataset on the Hub, or of the branch where the Hub converts others."""
    top = f"hf://datasets/{name}"
    files = list[str]()
    for root in (top, f"{top}@refs/convert/parquet"):
        files = files or find_remote(f"{root}/**/*.parquet")
    configs = dict[str, list[str]]()
    for file in files:
        path = unquote(file).replace("@refs/convert/parquet", "")
        folders = path.removeprefix(f"{top}/").split("/")[:-1]
        folders = [folder for folder in folders if folder != "data"]
        own_config = folders[0] if folders and not split_name(folders[0]) else ""
        configs.setdefault(own_config, []).append(file)
    chosen = config or ("default" if "default" in configs else next(iter(configs), ""))
    if chosen not in configs or (len(configs) > 1 and chosen != (config or "default")):
        found = ", ".join(filter(None, configs)) or "none"
        raise ValueError(
            f"{spec}: got the config {config or 'of no name'}, its Parquet files have {found}; "
            f"need hf+stream:NAME:CONFIG with one of them, or hf:NAME, which downloads"
        )
    return configs[chosen]


def _open_parquet(file: RandomAccessFile, *, footer: Any = None) -> Any:
    import pyarrow.parquet as pq

    return _call_arrow(file, pq.ParquetFile, FileStream(file), metadata=footer, pre_buffer=False)


def _call_arrow(file: RandomAccessFile, read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call pyarrow; its many errors become one that names the file."""
    import pyarrow as pa

    try:
        return read(*args, **kwargs)
    except (pa.ArrowException, OSError) as error:  # Arrow's own are of both kinds
        if isinstance(error, OSError) and (error.errno or file.address in str(error)):
            raise  # of the system or the network
        raise OSError(
            f"{file.address}: not readable as Parquet ({error}); copy or write the file again"
        ) from None


def _image_bytes(footer: Any, group: int, leaf: str) -> int:
    """How many bytes a row group's images take in memory."""
    row_group = footer.row_group(group)
    columns = map(row_group.column, range(row_group.num_columns))
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema == leaf)


def _columns(schema: Any, name: str) -> tuple[str, str | None, list[str] | None]:
    """The column of the images, that of the labels if there is one, and the classes' names."""
    import pyarrow as pa

    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = {
        column: feature
        for column, feature in metadata.get("info", {}).get("features", {}).items()
        if isinstance(feature, dict) and column in schema.names
    }
    kinds = {field.name: field.type for field in schema}
    declared = [column for column, feature in features.items() if feature.get("_type") == "Image"]
    images = declared or [
        column
        for column, kind in kinds.items()
        if pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)
    ]
    if not images:
        raise ValueError(
            f"{name}: has the columns {', '.join(schema.names)}; need one of images: the feature "
            f"Image, or their files' bytes"
        )
    class_labels = [
        column for column, feature in features.items() if feature.get("_type") == "ClassLabel"
    ]
    usual = [column for column in ("label", "labels") if column in kinds]
    usable = [c for c in usual if c in class_labels or _is_label(kinds[c])] + class_labels
    label = next(iter(usable), None)
    if label is None and usual:
        warnings.warn(
            f"{name}: the column {usual[0]} has the type {kinds[usual[0]]} and is not used; "
            f"labels are integers or strings",
            stacklevel=4,
        )
    return images[0], label, None if label is None else features.get(label, {}).get("names")


def _is_label(kind: Any) -> bool:
    """Whether a column of this type can hold labels: integers or strings, also as categories."""
    import pyarrow as pa

    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)
    return any(is_kind(value) for is_kind in kinds)


def _read_labels(
    column: Any, class_names: list[str] | None, name: str
) -> tuple[Int[Tensor, " n"] | None, list[str]]:
    """Labels with -1 for none, and their classes; no labels where all are unknown."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not pa.types.is_integer(column.type):
        names = column.to_pylist()
        classes = sorted({*names} - {None, ""})
        number = {each: i for i, each in enumerate(classes)}
        numbers = torch.tensor([number.get(each, -1) for each in names])
        return (numbers, classes) if classes else (None, [])
    values = pc.fill_null(column.cast(pa.int64()), -1).to_numpy()
    labels = torch.from_numpy(np.maximum(values, -1))
    count = int(labels.max()) + 1 if len(labels) else 0
    if count > (1_000_000 if class_names is None else len(class_names)):
        raise ValueError(
            f"{name}: a label is {count - 1}; need classes numbered from 0"
            + (f", below the {len(class_names)} that have names" if class_names else "")
        )
    return (labels, class_names or list(map(str, range(count)))) if count else (None, [])
