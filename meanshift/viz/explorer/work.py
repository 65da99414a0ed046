"""Long work beside the requests: one piece at a time, with its progress, and stopped on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

THREAD = "meanshift work"
_LATELY = 3.0  # seconds; a page that waits asks twice a second
Told = Callable[[int, int], None]
"""Called by work with (done, total); it raises `Stopped` where the work is no longer wanted."""


class Stopped(Exception):
    """Somebody asked the work to end."""


class Pending(Exception):
    """The answer is being made: ask again."""

    def __init__(self, title: str, done: int, total: int) -> None:
        super().__init__(title)
        self.title, self.done, self.total = title, done, total


class _Piece:
    def __init__(self, title: str) -> None:
        self.title, self.done, self.total = title, 0, 0
        self.ended, self.unwanted, self.begun = threading.Event(), False, False
        self.asked = 0.0
        self.result: Any = None
        self.error: Exception | None = None

    def forgotten(self) -> bool:
        """Whether it waits for its turn, and nobody has asked for it lately."""
        return not self.begun and time.monotonic() - self.asked > _LATELY

    def told(self, done: int, total: int) -> None:
        if self.unwanted:
            raise Stopped("stopped")
        self.done, self.total = done, total


class Work:
    """Answers that take long, each made once by a thread, the newest few kept.

    >>> work = Work()
    >>> work.ask("features", "reading images", lambda told: compute(told))  # or raises Pending
    """

    def __init__(self, *, keep: int = 6, patience: float = 0.25) -> None:
        self._pieces: dict[Hashable, _Piece] = {}
        self._keep, self._patience = keep, patience
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def ask(self, key: Hashable, title: str, make: Callable[[Told], Any]) -> Any:
        """What `make` returned or raised; `Pending` while it works. Short work is waited for."""
        with self._lock:
            piece = self._pieces.pop(key, None)
            if piece is None:
                for old in [k for k, held in self._pieces.items() if held.forgotten()]:
                    self._pieces.pop(old).unwanted = True
                piece = _Piece(title)
                threading.Thread(
                    target=self._do, args=(piece, make), name=THREAD, daemon=True
                ).start()
            piece.asked = time.monotonic()
            self._pieces[key] = piece  # at the end: asked for last
            ended = [k for k, held in self._pieces.items() if held.ended.is_set() and k != key]
            for old in ended[: max(0, len(ended) - self._keep + 1)]:
                del self._pieces[old]
        if not piece.ended.wait(self._patience):
            raise Pending(piece.title, piece.done, piece.total)
        if piece.error is not None:
            with self._lock:
                self._pieces.pop(key, None)  # who asks again may be luckier
            raise piece.error
        return piece.result

    def stop(self) -> None:
        """End what is under way, at its next word."""
        with self._lock:
            for key, piece in list(self._pieces.items()):
                if not piece.ended.is_set():
                    piece.unwanted = True
                    del self._pieces[key]

    def _do(self, piece: _Piece, make: Callable[[Told], Any]) -> None:
        with self._turn:
            try:
                piece.told(0, 0)
                piece.begun = True
                piece.result = make(piece.told)
            except Exception as error:
                piece.error = error
            finally:
                piece.ended.set()
