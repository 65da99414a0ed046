"""Search by image, outliers and duplicates: in the probe at once, in whole sources when made."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as TF

from meanshift.data import Source, UnreadableSample
from meanshift.data.decode import read_image
from meanshift.evaluation.knn import CHUNK, neighbors
from meanshift.models.encoder import build_backbone
from meanshift.models.features import cached_features, extract_features
from meanshift.models.weights import fingerprint
from meanshift.runtime import checkpoint
from meanshift.runtime.device import pick_device
from meanshift.viz.explorer.work import Told, Work
from meanshift.viz.run_reader import MissingData, Run

NEAR = 10  # neighbors by which outliers are told
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # no decoder that runs programs


@dataclass(frozen=True)
class Found:
    """Images by index in their source, each with a score and its nearest other."""

    indices: list[int]
    scores: list[float]
    nearest: list[int]
    distances: list[float]


class Searcher:
    """Neighbors of any image after any epoch, in the probe or a whole source."""

    def __init__(self, run: Run, sources: dict[str, Source]) -> None:
        self.run, self.sources, self.work = run, sources, Work()
        self._device = pick_device("auto")

    def features(
        self, part: str, epoch: int
    ) -> tuple[Float[Tensor, "n features"], Int[Tensor, " n"]]:
        """Features after an epoch, and whose they are; raises `Pending` while they are made."""
        moment = self.run.moment(epoch)  # says which epochs there are
        if part == "probe":
            return moment.features, moment.indices
        source = self.sources[part]

        def make(told: Told) -> tuple[Tensor, Tensor]:
            network = self._network(epoch)
            return cached_features(
                network,
                _Counted(source, told),
                weights=fingerprint(network),
                folder=self.run.folder / "features",
                image_size=self.run.config.data.image_size,
                device=self._device,
            )

        title = f"Features of {len(source):,} images after epoch {epoch}"
        found: tuple[Tensor, Tensor] = self.work.ask(("features", part, epoch), title, make)
        return found

    def search(
        self, image: UInt8[Tensor, "3 height width"], *, part: str, epoch: int, count: int
    ) -> tuple[list[int], list[float]]:
        """The images nearest to any image, nearest first, and their distances (1 - cosine)."""
        features, whose = self.features(part, epoch)
        query = extract_features(
            self._network(epoch),
            _One(image, self.sources.get("train")),
            image_size=self.run.config.data.image_size,
            device=self._device,
        )
        ((slots, similarity),) = neighbors(features, query, min(count, len(features)))
        return whose[slots[0]].tolist(), _distance(similarity[0]).tolist()

    def clean(self, order: str, *, part: str, epoch: int) -> Found:
        """All images from the farthest from their neighbors, or pairs from the nearest."""
        if order not in ("outliers", "duplicates"):
            raise ValueError(f"order: got {order!r}, need outliers or duplicates")
        features, whose = self.features(part, epoch)
        if len(features) < 2:
            raise MissingData(f"got {len(features)} images, need 2 or more to compare")
        title = f"Neighbors of {len(features):,} images after epoch {epoch}"
        slots, similarity = self.work.ask(
            ("near", part, epoch), title, lambda told: _all_neighbors(features, told)
        )
        far, rows = _distance(similarity), torch.arange(len(slots))
        if order == "outliers":
            score, file, other = far.mean(1), rows, slots[:, 0]
            ranked = score.argsort(descending=True, stable=True)
        else:  # each pair once, the later image as the copy of the earlier
            score, (other, file) = far[:, 0], torch.stack([rows, slots[:, 0]]).sort(0).values
            ranked = score.argsort(stable=True)
            ranked = ranked[_first_of_each((other * len(slots) + file)[ranked])]
        told = whose[file[ranked]], score[ranked], whose[other[ranked]], far[ranked, 0]
        return Found(*(column.tolist() for column in told))

    @functools.lru_cache(maxsize=3)  # noqa: B019 (lives as long as the server)
    def _network(self, epoch: int) -> nn.Module:
        config = self.run.config
        network, _ = build_backbone(config.encoder, image_size=config.data.image_size)
        weights = checkpoint.read(self.run.snapshot(epoch))["weights"]
        network.load_state_dict({k: w.float() if w.is_floating_point() else w
                                 for k, w in weights.items()})  # fmt: skip
        return network.eval().to(self._device)


def decode(body: bytes) -> UInt8[Tensor, "3 height width"]:
    """An uploaded image; what is none, is cut off or would fill the memory is refused."""
    try:
        image = read_image(io.BytesIO(body), title="upload", formats=_FORMATS)
    except UnreadableSample as error:
        why = "no image was recognized" if "cannot identify" in error.why else error.why
        raise ValueError(
            f"the image cannot be read: {why}; need a whole {', '.join(_FORMATS)} file"
        ) from None
    # Only the middle of a strip is looked at, and enlarging a long one would fill the memory.
    height, width = image.shape[1:]
    most = 4 * min(height, width)
    if max(height, width) > most:
        image = TF.center_crop(image, [min(height, most), min(width, most)])
    return image


def _all_neighbors(features: Tensor, told: Told) -> tuple[Tensor, Tensor]:
    """The nearest others of each row, and how similar they are."""
    count, parts = min(NEAR, len(features) - 1), []
    for start in range(0, len(features), CHUNK):
        told(start, len(features))
        ((slots, similarity),) = neighbors(features, features[start : start + CHUNK], count + 1)
        own = slots == torch.arange(start, start + len(slots))[:, None]
        own[~own.any(1), -1] = True  # more copies of an image than neighbors are asked for
        parts.append((slots[~own].view(-1, count), similarity[~own].view(-1, count)))
    return torch.cat([slots for slots, _ in parts]), torch.cat([near for _, near in parts])


def _distance(similarity: Tensor) -> Tensor:
    return (1 - similarity).clamp(min=0)


def _first_of_each(keys: Int[Tensor, " n"]) -> Int[Tensor, " distinct"]:
    """Where each value stands first, rising."""
    _, number = keys.unique(return_inverse=True)
    first = torch.full((int(number.max()) + 1,), len(keys))
    first.scatter_reduce_(0, number, torch.arange(len(keys)), "amin")
    return first.sort().values


class _Counted(Source):
    """A source that tells how many of its images were read."""

    def __init__(self, whole: Source, told: Told) -> None:
        self.name, self.labels, self.classes = whole.name, whole.labels, whole.classes
        self._whole, self._told, self._read = whole, told, 0

    def __len__(self) -> int:
        return len(self._whole)

    def title(self, index: int) -> str:
        return self._whole.title(index)

    def contents(self) -> str:
        return self._whole.contents()

    def fingerprint(self) -> str:
        return self._whole.fingerprint()

    @property
    def uniform(self) -> bool:
        return self._whole.uniform

    def read(self, index: int) -> UInt8[Tensor, "channels height width"]:
        self._count(1)
        return self._whole.read(index)

    def gather(self, indices: Int[Tensor, " batch"]) -> UInt8[Tensor, "batch h w channels"]:
        self._count(len(indices))
        return self._whole.gather(indices)

    def _count(self, more: int) -> None:
        self._told(self._read, len(self))
        self._read += more


class _One(Source):
    """One image, prepared as the images of a source are."""

    def __init__(self, image: UInt8[Tensor, "3 height width"], like: Source | None) -> None:
        self.name, self.labels, self.classes = "upload", None, []
        self._like_arrays = like is not None and like.uniform
        if like is not None and like.uniform:  # all of one size, so this one too
            size = like.gather(torch.tensor([0])).shape[1:3]
            scale = max(size[0] / image.shape[1], size[1] / image.shape[2])
            if scale != 1:
                fitting = [max(size[i], round(image.shape[i + 1] * scale)) for i in (0, 1)]
                image = TF.resize(image, fitting, antialias=True)
            image = TF.center_crop(image, list(size))
        self._image = image

    def __len__(self) -> int:
        return 1

    def title(self, index: int) -> str:  # noqa: ARG002
        return self.name

    @property
    def uniform(self) -> bool:
        return self._like_arrays

    def read(self, index: int) -> UInt8[Tensor, "channels height width"]:  # noqa: ARG002
        return self._image

    def gather(self, indices: Int[Tensor, " batch"]) -> UInt8[Tensor, "batch h w channels"]:
        return self._image.permute(1, 2, 0)[None].expand(len(indices), -1, -1, -1)
