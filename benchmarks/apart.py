"""Contenders in processes of their own, each with its own memory and threads, that take turns."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


class Apart:
    """A generator in a fresh process: its first value says that it is ready, others are asked for.

    It rests while the others run, since a generator does nothing between its values.
    """

    def __init__(self, contender: Callable[..., Iterator[Any]], *given: Any) -> None:
        context = mp.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender, given))
        self._process.start()
        theirs.close()
        self._receive()

    def ask(self) -> Any:
        self._ours.send(True)
        return self._receive()

    def lap(self) -> float:
        return float(self.ask())

    def end(self) -> None:
        self._ours.send(False)
        self._process.join()

    def _receive(self) -> Any:
        try:
            return self._ours.recv()
        except EOFError:
            raise RuntimeError("a contender ended before its turn; its error is above") from None


def _serve(connection: Connection, contender: Callable[..., Iterator[Any]], given: Any) -> None:
    mp.set_start_method(mp.get_all_start_methods()[0], force=True)  # a spawned process's is spawn
    values = contender(*given)
    connection.send(next(values))
    while connection.recv():
        connection.send(next(values))
