"""The error for a sample that cannot be read."""

from __future__ import annotations

from PIL import Image


class UnreadableSample(Exception):
    """A sample that cannot be read: `title` names it, `reason` says what is wrong with it."""

    def __init__(self, title: str, reason: str) -> None:
        super().__init__(title, reason)
        self.title = title
        self.reason = reason


def refuse_bomb(width: int, height: int, title: str) -> None:
    """Refuse an image that would fill the memory, by its header alone."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise UnreadableSample(
            title,
            f"{width} x {height} pixels, more than the limit of {limit} (it could be a "
            f"decompression bomb)",
        )
