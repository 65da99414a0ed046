"""Contenders in processes of their own, each with its own memory and threads."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


class Worker:
    """A generator in a fresh process: its first value means ready, the others are requested.

    It does not compute while other contenders are measured, since a generator waits at `yield`.
    """

    def __init__(self, contender: Callable[..., Iterator[Any]], *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, contender, arguments))
        self._process.start()
        remote.close()
        self._receive()

    def next(self) -> Any:
        """The next value of the generator."""
        self._connection.send(True)
        return self._receive()

    def seconds(self) -> float:
        """The next value of a generator of seconds."""
        return float(self.next())

    def close(self) -> None:
        """End the process."""
        self._connection.send(False)
        self._process.join()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("a contender's process ended; its error is above") from None


def _serve(connection: Connection, contender: Callable[..., Iterator[Any]], arguments: Any) -> None:
    mp.set_start_method(mp.get_all_start_methods()[0], force=True)  # a spawned process has spawn
    values = contender(*arguments)
    connection.send(next(values))
    while connection.recv():
        connection.send(next(values))
