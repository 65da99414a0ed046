"""The newest target embeddings, over which rank and spread are measured."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from meanshift.runtime import distributed

ROWS = 1024
"""rows of all processes together; a rank can be at most this"""


class EmbeddingWindow:
    """The last `ROWS` target embeddings: one batch of 16 has a rank below 16, whatever it is.

    They stay on the device; each process keeps those of its own images.
    """

    def __init__(self) -> None:
        self.own: Tensor | None = None

    def add(self, embeddings: Float[Tensor, "batch dim"]) -> None:
        """Append the embeddings of a step and drop the oldest ones."""
        newest = embeddings.detach().float()
        if self.own is not None:
            newest = torch.cat([self.own.to(newest.device), newest])
        self.own = newest[-math.ceil(ROWS / distributed.world_size()) :]

    def gather(self) -> Float[Tensor, "rows dim"]:
        """The embeddings of all processes; there must be some."""
        assert self.own is not None
        return distributed.all_gather_rows(self.own)

    def state_dict(self) -> list[Tensor | None]:
        """The rows of every process."""
        own = None if self.own is None else self.own.cpu().clone()  # without the storage it views
        return distributed.all_gather_list([own])

    def load_state_dict(self, saved: list[Tensor | None]) -> None:
        """Each process takes its own; with another number of processes each takes a share."""
        if len(saved) == distributed.world_size():
            self.own = saved[distributed.rank()]
            return
        parts = [rows for rows in saved if rows is not None]
        whole = torch.cat(parts) if parts else None
        self.own = whole if whole is None else whole[slice(*distributed.shard_range(len(whole)))]
