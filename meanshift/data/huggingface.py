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
from jaxtyping import Int, UInt8
from torch import Tensor

from meanshift.data.decode import read_image
from meanshift.data.shards import Local, Reading, Remote, base_name, split_of
from meanshift.data.source import Source, UnreadableSample, block_order, file_signature

_BUDGET = 256 << 20  # bytes of images that a process holds: how many row groups `order` may mix
_LARGE = 512 << 20  # bytes of one row group that deserve a warning


class HubSource(Source):
    """One split of a dataset that the `datasets` library maps from a disk."""

    def __init__(self, dataset: Any, *, name: str) -> None:
        self.name = name
        schema = dataset.features.arrow_schema
        column, label, names = _columns(schema, name)
        self.labels, self.classes = None, []
        if label is not None:
            told = dataset.select_columns([label]).with_format("arrow")[:]
            self.labels, self.classes = _labels(told.column(label), names, name)
        self.column, images = column, dataset.select_columns([column]).with_format(None)
        if type(dataset.features[column]).__name__ == "Image":  # bytes, for our own decoder
            images = images.cast_column(column, type(dataset.features[column])(decode=False))
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def title(self, index: int) -> str:
        return f"#{index}"

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        held = self.images[index][self.column]
        content = held.get("bytes") if isinstance(held, dict) else held
        if content is not None:
            return read_image(io.BytesIO(content), title=self.title(index))
        if isinstance(held, dict) and held.get("path"):
            return read_image(Path(held["path"]))
        raise UnreadableSample(self.title(index), "neither bytes nor the path of a file")

    def fingerprint(self) -> str:
        """Numbers are no names: the beginnings of some hundred images are read as well."""
        digest = hashlib.sha256(super().fingerprint().encode())
        for index in range(0, len(self), 1 + len(self) // 256):
            held = self.images[index][self.column]
            content = held.get("bytes") if isinstance(held, dict) else held
            digest.update(f"{len(content or b'')} ".encode() + (content or b"")[:4096])
        return digest.hexdigest()[:16]

    def contents(self) -> str:
        files = [Path(held["filename"]) for held in self.images.cache_files]
        return hashlib.sha256((self.fingerprint() + file_signature(files)).encode()).hexdigest()[
            :16
        ]


class StreamedSource(Source):
    """The images of some Parquet files, read by row group when one of its images is asked for.

    A process holds as many row groups as `order` mixes at a time, and no open file.
    """

    def __init__(self, files: Sequence[Local | Remote], *, name: str) -> None:
        import pyarrow as pa

        self.name, self.files = name, list(files)
        self.footers, held = list[Any](), list[Any]()
        for file in self.files:
            opened = _parquet(file)
            column, label, names = _columns(opened.schema_arrow, f"{name}: {file.address}")
            kind = opened.schema_arrow.field(column).type
            leaf = f"{column}.bytes" if pa.types.is_struct(kind) else column
            if not self.footers:
                self.leaf, self.told = leaf, (label, names)
            elif (self.leaf, self.told) != (leaf, (label, names)):
                raise ValueError(
                    f"{name}: {base_name(file.address)} has not the columns and classes of "
                    f"{base_name(self.files[0].address)}; give files of one dataset"
                )
            self.footers.append(opened.metadata)
            if label is not None:
                held.append(_tried(file, opened.read, columns=[label]).column(label))
        self.groups = [
            (number, group)
            for number, footer in enumerate(self.footers)
            for group in range(footer.num_row_groups)
        ]
        rows = [self.footers[number].row_group(group).num_rows for number, group in self.groups]
        self.rows = torch.tensor(rows, dtype=torch.int64)
        self.ends = self.rows.cumsum(0)
        if not len(self):
            raise ValueError(f"{name}: no row in {len(self.files)} files; give others")
        self.sizes = [
            _chunk(self.footers[number], group, self.leaf) for number, group in self.groups
        ]
        self.window = min(32, max(2, _BUDGET * len(self.sizes) // (sum(self.sizes) or 1)))
        if max(self.sizes) > _LARGE:
            warnings.warn(
                f"{name}: a row group has {max(self.sizes) >> 20} MB of images and is held whole "
                f"by each worker; write the files with smaller ones (row_group_size=500)",
                stacklevel=2,
            )
        self.labels, self.classes = None, []
        if held:
            told = pa.chunked_array([chunk for column in held for chunk in column.chunks])
            self.labels, self.classes = _labels(told, self.told[1], name)
        self._held, self._owner = dict[int, Any](), os.getpid()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def blockwise(self) -> bool:
        return True

    def order(self, seed: int, epoch: int) -> Int[Tensor, " n"]:
        return block_order(seed, epoch, self.rows, window=self.window)

    def title(self, index: int) -> str:
        number, _ = self.groups[int(torch.searchsorted(self.ends, index, right=True))]
        before = sum(footer.num_rows for footer in self.footers[:number])
        return f"{base_name(self.files[number].address)}#{index - before}"

    def read(self, index: int) -> UInt8[Tensor, "3 height width"]:
        block = int(torch.searchsorted(self.ends, index, right=True))
        row = index - int(self.ends[block] - self.rows[block])
        content = self._block(block)[row].as_py()
        if content is None:
            raise UnreadableSample(self.title(index), "no bytes in the Parquet file")
        return read_image(io.BytesIO(content), title=self.title(index))

    def _block(self, block: int) -> Any:
        """The bytes of a row group's images, from this process's few or from its file."""
        if self._owner != os.getpid():  # a forked worker's own
            self._held, self._owner = {}, os.getpid()
        found = self._held.pop(block, None)
        if found is None:
            while len(self._held) >= self.window:
                self._held.pop(next(iter(self._held)))  # the one that was used longest ago
            found = self._fetch(block)
        self._held[block] = found
        return found

    def _fetch(self, block: int) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        number, group = self.groups[block]
        file = self.files[number]
        opened = _parquet(file, footer=self.footers[number])
        table = _tried(file, opened.read_row_group, group, columns=[self.leaf], use_threads=False)
        column = table.column(0)
        return pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column

    def fingerprint(self) -> str:
        """The row groups count too: the order of an epoch depends on them."""
        told = f"{super().fingerprint()} {self.rows.tolist()} {self.sizes} {self.window}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def contents(self) -> str:
        told = [self.fingerprint(), *(file.version for file in self.files)]
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        """All but the row groups, which a worker reads itself."""
        return {**vars(self), "_held": {}}


class HubFile(Remote):
    """A file of a dataset on the Hub, through the file system of `huggingface_hub`."""

    def __init__(self, address: str) -> None:
        told = file_system().info(address)
        self.address, self.size = address, int(told["size"])
        self.version = f"{self.size} {told.get('blob_id')}"

    def read_at(self, offset: int, size: int) -> bytes:
        try:
            content: bytes = file_system().cat_file(self.address, start=offset, end=offset + size)
        except Exception as error:  # of the library, of its HTTP client, of the system
            raise OSError(
                f"hf://{self.address}: could not be read ({type(error).__name__}: {error}); look "
                f"at the network, then type the command again"
            ) from None
        return content


def file_system() -> Any:
    """The Hub's file system, which fsspec keeps one of for each process."""
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise ValueError(missing("huggingface_hub")) from None
    return HfFileSystem()


def hub_files(name: str, config: str, spec: str) -> list[str]:
    """The Parquet files of a dataset on the Hub, or of the branch where the Hub converts others."""
    files, system = list[str](), file_system()
    for root in (f"datasets/{name}", f"datasets/{name}@refs/convert/parquet"):
        try:
            files = files or sorted(system.glob(f"{root}/**/*.parquet"))
        except Exception as error:  # of the library, of its HTTP client, of the system
            raise OSError(
                f"{spec}: the Hub could not be asked ({type(error).__name__}: {error}); look at "
                f"the name and the network, then type the command again"
            ) from None
    configs = dict[str, list[str]]()
    for file in files:
        inside = (
            unquote(file).replace("@refs/convert/parquet", "").removeprefix(f"datasets/{name}/")
        )
        folders = [part for part in inside.split("/")[:-1] if part != "data"]
        configs.setdefault(folders[0] if folders and not split_of(folders[0]) else "", []).append(
            file
        )
    chosen = config or ("default" if "default" in configs else next(iter(configs), ""))
    if chosen not in configs or (len(configs) > 1 and chosen != (config or "default")):
        told = ", ".join(filter(None, configs)) or "none"
        raise ValueError(
            f"{spec}: got the config {config or 'of no name'}, its Parquet files have {told}; need "
            f"hf+stream:NAME:CONFIG with one of them, or hf:NAME, which downloads"
        )
    return configs[chosen]


def missing(library: str) -> str:
    return f"the library {library} is not installed: pip install 'meanshift[huggingface]'"


def _parquet(file: Local | Remote, *, footer: Any = None) -> Any:
    import pyarrow.parquet as pq

    return _tried(file, pq.ParquetFile, Reading(file), metadata=footer, pre_buffer=False)


def _tried(file: Local | Remote, read: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """What a call of pyarrow gives; its many errors become one that names the file."""
    import pyarrow as pa

    try:
        return read(*given, **more)
    except (pa.ArrowException, OSError) as error:  # Arrow's own are of both kinds
        if isinstance(error, OSError) and (error.errno or file.address in str(error)):
            raise  # of the system or the network
        raise OSError(
            f"{file.address}: not readable as Parquet ({error}); copy or write the file again"
        ) from None


def _chunk(footer: Any, group: int, leaf: str) -> int:
    """How many bytes a row group's images take in memory."""
    row_group = footer.row_group(group)
    columns = map(row_group.column, range(row_group.num_columns))
    return sum(each.total_uncompressed_size for each in columns if each.path_in_schema == leaf)


def _columns(schema: Any, name: str) -> tuple[str, str | None, list[str] | None]:
    """The column of the images, that of the labels if there is one, and the classes' names."""
    import pyarrow as pa

    told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = {
        column: feature
        for column, feature in told.get("info", {}).get("features", {}).items()
        if isinstance(feature, dict) and column in schema.names
    }
    kinds = {field.name: field.type for field in schema}
    images = [column for column, held in features.items() if held.get("_type") == "Image"] or [
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
    classes = [column for column, held in features.items() if held.get("_type") == "ClassLabel"]
    whole = [column for column, kind in kinds.items() if pa.types.is_integer(kind)]
    usual = [column for column in ("label", "labels") if column in classes + whole]
    label = next(iter(usual + classes), None)
    return images[0], label, None if label is None else features.get(label, {}).get("names")


def _labels(
    column: Any, names: list[str] | None, name: str
) -> tuple[Int[Tensor, " n"] | None, list[str]]:
    """Labels with -1 for none, and their classes; no labels where all are unknown."""
    import pyarrow as pa
    import pyarrow.compute as pc

    held = pc.fill_null(column.cast(pa.int64()), -1).to_numpy()
    labels = torch.from_numpy(np.maximum(held, -1))
    count = int(labels.max()) + 1 if len(labels) else 0
    if count > (1_000_000 if names is None else len(names)):
        raise ValueError(
            f"{name}: a label is {count - 1}; need classes numbered from 0"
            + (f", below the {len(names)} that have names" if names else "")
        )
    return (labels, names or list(map(str, range(count)))) if count else (None, [])
