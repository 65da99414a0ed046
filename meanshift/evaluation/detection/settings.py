"""How a detector is trained: the paper's settings, and how they scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

_BATCH_SIZE = 16
_SIZE = 800
_ROIS = 512
_LR = 0.02


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """The paper's settings, which are those of MoCo.

    The learning rate rises over `warmup` iterations and falls to a tenth after 3/4 and 11/12 of
    all iterations.
    """

    iterations: int = 24_000
    size: int = _SIZE
    """short side of a test image; of a training image it is 0.6 to 1 times that, in 11 steps"""
    batch_size: int = _BATCH_SIZE
    rois: int = _ROIS
    """regions per image that the box head learns from"""
    lr: float = _LR
    warmup: int = 100
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        if min(self.iterations, self.batch_size, self.rois) < 1 or self.size < 32 or self.lr <= 0:
            raise ValueError(
                f"got --iterations {self.iterations}, --size {self.size}, --batch-size "
                f"{self.batch_size}, --rois {self.rois}, --lr {self.lr:g}; need 1 or more, a size "
                f"of 32 or more and a learning rate above 0"
            )

    @staticmethod
    def scaled(
        iterations: int = 24_000,
        *,
        size: int = 0,
        batch_size: int = 0,
        rois: int = 0,
        lr: float | None = None,
    ) -> DetectionSettings:
        """The paper's settings for another size and number of iterations.

        The batch size is proportional to the size, the regions to its square, the learning rate to
        the batch size; the warm-up is at most a tenth of the iterations.
        """
        size = size or _SIZE
        batch_size = batch_size or max(2, min(_BATCH_SIZE, round(_BATCH_SIZE * size / _SIZE)))
        return DetectionSettings(
            iterations=iterations,
            size=size,
            batch_size=batch_size,
            rois=rois or round(_ROIS * _region_fraction(size)),
            lr=_LR * batch_size / _BATCH_SIZE if lr is None else lr,
            warmup=min(100, iterations // 10),
        )

    @property
    def scale(self) -> float:
        """The size as a multiple of the paper's."""
        return self.size / _SIZE

    @property
    def tag(self) -> str:
        """The end of a result's name; empty for the paper's settings."""
        if self == DetectionSettings():
            return ""
        default = DetectionSettings.scaled(
            self.iterations, size=self.size, batch_size=self.batch_size
        )
        default_batch_size = DetectionSettings.scaled(size=self.size).batch_size
        default = replace(default, batch_size=default_batch_size)
        tag = f"-{self.iterations}-at-{self.size}"
        for name, word in {"batch_size": "batch", "rois": "rois", "lr": "lr"}.items():
            if getattr(self, name) != getattr(default, name):
                tag += f"-{word}-{getattr(self, name):g}"
        return tag

    @property
    def train_sizes(self) -> list[int]:
        """Short sides of the training images: 480 to 800 in steps of 32 in the paper."""
        return [round(self.size * (0.6 + 0.04 * step)) for step in range(11)]

    @property
    def max_size(self) -> int:
        """The longest side of an image: 1333 in the paper."""
        return round(1333 * self.scale)

    @property
    def proposals(self) -> dict[str, int]:
        """The number of proposals before and after suppression; the paper's at its size."""
        counts = {
            "rpn_pre_nms_top_n_train": 12_000,
            "rpn_pre_nms_top_n_test": 6_000,
            "rpn_post_nms_top_n_train": 2_000,
            "rpn_post_nms_top_n_test": 1_000,
        }
        return {name: round(count * _region_fraction(self.size)) for name, count in counts.items()}

    @property
    def batch_norm_batches(self) -> int:
        """Batches that the final statistics of the batch norms are computed on: MoCo's 200."""
        return min(200, 1 + self.iterations // 10)

    def lr_at(self, step: int) -> float:
        """The learning rate of an iteration, counted from 0."""
        if step < self.warmup:
            return self.lr * (0.001 + 0.999 * step / self.warmup)
        milestones = sum(step >= self.iterations * fraction for fraction in (3 / 4, 11 / 12))
        return float(self.lr * 0.1**milestones)


def _region_fraction(size: int) -> float:
    """The fraction of the paper's regions that smaller images have."""
    return max(1 / 8, min(1.0, (size / _SIZE) ** 2))
