"""The baseline: the paper's step as its authors' program computes it, written plainly.

Images are transformed one by one in loader workers, everything is float32 in PyTorch's default
layout, query and target are both compared with the whole bank, with autograd through the first,
the bank is copied in each step, and the target is updated in a Python loop. The tests prove that it
computes the same loss as ours.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

from meanshift.config import Views
from meanshift.config.samples import IMAGENET_MEAN as MEAN
from meanshift.config.samples import IMAGENET_STD as STD
from meanshift.models.heads import mlp

Transform = Callable[[Image.Image], Tensor]


class GaussianBlur:
    """The blur of MoCo v2: Pillow's, with a standard deviation drawn from U(0.1, 2)."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))


def weak_and_strong(views: Views, size: int) -> tuple[Transform, Transform]:
    """The two transforms of the paper, on Pillow images."""
    crop = T.RandomResizedCrop(size, scale=views.crop_area)
    common = [T.RandomHorizontalFlip(views.flip), T.ToTensor(), T.Normalize(MEAN, STD)]
    strong = [
        T.RandomApply([T.ColorJitter(*views.jitter_strength)], p=views.jitter),
        T.RandomGrayscale(views.gray),
        T.RandomApply([GaussianBlur()], p=views.blur),
    ]
    return T.Compose([crop, *common]), T.Compose([crop, *strong, *common])


class TwoCrops:
    """The transform of one image to (target view, online view)."""

    def __init__(self, views: Views, size: int) -> None:
        self.weak, self.strong = weak_and_strong(views, size)

    def __call__(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        return self.weak(image), self.strong(image)


class Images(Dataset[tuple[tuple[Tensor, Tensor], int]]):
    """An array of images, read one at a time like torchvision's CIFAR-10."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, transform: TwoCrops) -> None:
        self.pixels = pixels
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], int]:
        return self.transform(Image.fromarray(self.pixels[index])), int(self.labels[index])


def endless_batches(
    dataset: Dataset[tuple[tuple[Tensor, Tensor], int]], batch_size: int, workers: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Batches of both views and their labels, epoch after epoch."""
    loader = DataLoader(
        dataset, batch_size=batch_size, shuffle=True, num_workers=workers, drop_last=True
    )
    while True:
        yield from loader


class MeanShift(nn.Module):
    """The authors' model: two encoders, a predictor, a queue of embeddings and labels."""

    queue: Tensor
    labels: Tensor

    def __init__(
        self, encoder: nn.Module, dim: int, *, k: int, bank_size: int, momentum: float
    ) -> None:
        super().__init__()
        self.k = k
        self.bank_size = bank_size
        self.momentum = momentum
        self.position = 0
        self.online = encoder
        self.target = copy.deepcopy(encoder)
        self.predictor = mlp(dim, 8 * dim, dim)
        for parameter in self.target.parameters():
            parameter.requires_grad = False
        queue = nn.functional.normalize(torch.randn(bank_size, dim), dim=1)
        self.register_buffer("queue", queue)
        self.register_buffer("labels", torch.full((bank_size,), -1))

    @torch.no_grad()
    def after_update(self) -> None:
        pairs = zip(self.online.parameters(), self.target.parameters(), strict=True)
        for online, target in pairs:
            target.data = target.data * self.momentum + online.data * (1 - self.momentum)

    @torch.no_grad()
    def enqueue(self, rows: Tensor, labels: Tensor) -> None:
        end = self.position + len(rows)
        self.queue[self.position : end] = rows
        self.labels[self.position : end] = labels
        self.position = end % self.bank_size

    def forward(self, target_view: Tensor, online_view: Tensor, labels: Tensor) -> Tensor:
        query = nn.functional.normalize(self.predictor(self.online(online_view)), dim=1)
        with torch.no_grad():
            self.after_update()
            current = nn.functional.normalize(self.target(target_view), dim=1)
        return self.compare(query, current, labels)

    def compare(self, query: Tensor, current: Tensor, labels: Tensor) -> Tensor:
        """Both against the whole bank; the k nearest of the target select those of the query."""
        self.enqueue(current, labels)
        bank = self.queue.clone().detach()
        bank_labels = self.labels.clone().detach()
        target_distance = 2 - 2 * torch.einsum("bc,kc->bk", current, bank)
        query_distance = 2 - 2 * torch.einsum("bc,kc->bk", query, bank)
        _, nearest = target_distance.topk(self.k, dim=1, largest=False)
        distance = torch.gather(query_distance, 1, nearest)
        same_label = (bank_labels[nearest] == labels[:, None]).float()
        self.purity = (same_label.sum(dim=1) / self.k).mean()
        return (distance.sum(dim=1) / self.k).mean()
