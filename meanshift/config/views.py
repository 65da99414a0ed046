"""How the views of an image are made: the settings, and the specification of one view."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meanshift.config.parsing import need

Strength = Literal["weak", "strong"]


@dataclass(frozen=True, kw_only=True)
class ViewSpec:
    """One view of an image: which crop, and which operators with which probability."""

    name: str
    stream: int
    """address of its randomness (see `runtime.rng`); views of one stream are cropped alike"""
    count: int = 1
    """views of this kind, each with a stream of its own"""
    size: int = 0
    """side in pixels; 0 is `scale` times `data.image_size`"""
    scale: float = 1.0
    crop_area: tuple[float, float] = (0.2, 1.0)
    flip: float = 0.5
    jitter: float = 0.0
    jitter_strength: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    gray: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize: float = 0.0
    noise: float = 0.0
    channel_dropout: float = 0.0
    mix: float = 0.0
    gain: float = 0.0
    mask: float = 0.0
    jigsaw: int = 0
    """n: cut the crop into n x n cells and give a random patch of each, 3/4 of its side, in random
    order, flipped and colored one by one"""

    def expand(self) -> list[ViewSpec]:
        """The views one by one: a view with a `count` becomes that many, numbered, each with a
        stream of its own."""
        if self.count == 1:
            return [self]
        return [
            replace(
                self,
                name=f"{self.name} {copy + 1}",
                stream=self.stream if copy == 0 else 1000 * (self.stream + 1) + copy,
                count=1,
            )
            for copy in range(self.count)
        ]

    @property
    def has_color(self) -> bool:
        """Whether anything but the crop and the flip can happen."""
        return self.jitter > 0 or self.gray > 0 or self.blur > 0 or self.solarize > 0

    @property
    def is_strong(self) -> bool:
        """Whether anything but crop, flip and noise can happen, to samples of any kind."""
        others = (self.channel_dropout, self.mix, self.gain, self.mask)
        return self.has_color or any(value > 0 for value in others)


@dataclass(frozen=True, kw_only=True)
class Views:
    """The operators of the augmentations; a method chooses which views they are applied to."""

    crop_area: tuple[float, float] = (0.2, 1.0)
    """smallest and largest fraction of the image's area that a crop covers"""
    flip: float = 0.5
    """probability of a horizontal flip"""
    jitter: float = 0.8
    """probability of color jitter in a strong view"""
    jitter_strength: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    """strength of brightness, contrast, saturation and hue jitter"""
    gray: float = 0.2
    """probability of a grayscale strong view"""
    blur: float = 0.5
    """probability of Gaussian blur in a strong view"""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """range of the blur's standard deviation in pixels"""
    solarize: float = 0.0
    """probability of solarization in a strong view: values of 0.5 and above are inverted"""
    noise: float = 0.0
    """largest standard deviation of Gaussian noise, in every view: of values in 0 to 1 for images,
    relative to the std of each column or channel for vectors and signals"""
    channel_dropout: float = 0.0
    """probability that a channel of an image, or a column of a vector, is replaced by its mean in a
    strong view"""
    mix: float = 0.0
    """vectors: largest weight of another sample that is mixed into a strong view"""
    gain: float = 0.0
    """signals: largest change of the loudness in a strong view, in decibels"""
    mask: float = 0.0
    """signals: largest fraction of the time that is silenced in a strong view"""
    module: str = ""
    """views of your own: FILE.py:CLASS or PACKAGE.MODULE:CLASS, a subclass of
    `meanshift.transforms.augment.MultiViewTransform` (docs/views.md)"""

    def __post_init__(self) -> None:
        for name in ("noise", "gain"):
            value = getattr(self, name)
            need(value >= 0, f"views.{name}", value, "0 or more")
        operators = "flip jitter gray blur solarize channel_dropout mix mask"
        for name in operators.split():
            probability = getattr(self, name)
            need(0 <= probability <= 1, f"views.{name}", probability, "a probability in [0, 1]")
        low, high = self.crop_area
        need(0 < low <= high <= 1, "views.crop_area", self.crop_area, "0 < low <= high <= 1")
        low, high = self.blur_sigma
        need(0 < low <= high, "views.blur_sigma", self.blur_sigma, "0 < low <= high")
        *blends, hue = self.jitter_strength
        need(
            all(0 <= blend <= 1 for blend in blends) and 0 <= hue <= 0.5,
            "views.jitter_strength",
            self.jitter_strength,
            "three values in [0, 1] and a hue in [0, 0.5]",
        )

    def without_image_operators(self) -> Views:
        """The defaults with only those operators of these that a method does not choose."""
        names = ("noise", "channel_dropout", "mix", "gain", "mask", "module")
        return replace(Views(), **{name: getattr(self, name) for name in names})

    def spec(self, name: str, strength: Strength, *, index: int) -> ViewSpec:
        """The view number `index` of a method: weak is crop and flip, strong adds color operators.

        Views of the same index have the same random numbers.
        """
        stream = index if index < 2 else 100 + index  # 2 to 99 are other uses of `runtime.rng`
        weak = ViewSpec(
            name=name,
            stream=stream,
            crop_area=self.crop_area,
            flip=self.flip,
            noise=self.noise,
        )
        if strength == "weak":
            return weak
        return replace(
            weak,
            channel_dropout=self.channel_dropout,
            mix=self.mix,
            gain=self.gain,
            mask=self.mask,
            jitter=self.jitter,
            jitter_strength=self.jitter_strength,
            gray=self.gray,
            blur=self.blur,
            blur_sigma=self.blur_sigma,
            solarize=self.solarize,
        )

    def pair(self, *, asymmetric: bool) -> tuple[ViewSpec, ViewSpec]:
        """Two strong views, alike or asymmetric as in BYOL.

        Of an asymmetric pair, the first view is blurred with the probability `blur` and never
        solarized, the second is blurred with a tenth of `blur` and solarized with `solarize`. BYOL
        has `blur=1.0` and `solarize=0.2`.
        """
        first = self.spec("first", "strong", index=0)
        second = self.spec("second", "strong", index=1)
        if not asymmetric:
            return first, second
        return replace(first, solarize=0.0), replace(second, blur=self.blur / 10)
