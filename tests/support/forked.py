"""Several processes that run one function together, forked from a test, and what each returned."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meanshift.runtime import distributed


def in_processes(world: int, work: Callable[..., Any], *given: Any, timeout: float = 60.0) -> list:
    """`work(*given)` in each of `world` processes that know of each other; their results by rank.

    One process alone is no process of several: it runs here.
    """
    if world == 1:
        return [work(*given)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(world)]
        children = [_fork(world, rank, port, file, work, given, timeout)
                    for rank, file in enumerate(files)]  # fmt: skip
        for child in children:
            os.waitpid(child, 0)
        told = [pickle.loads(file.read_bytes()) if file.exists() else "died" for file in files]
    wrong = [one for one in told if isinstance(one, str)]
    assert not wrong, "\n".join(wrong)
    return [one[0] for one in told]


def _fork(world, rank, port, file, work, given, timeout):
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    told: Any = "left"
    try:
        os.environ |= {
            "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        torch.set_num_threads(1)
        with distributed.process_group(torch.device("cpu"), timeout=timeout):
            told = (work(*given),)
    except BaseException:
        told = traceback.format_exc()
    file.write_bytes(pickle.dumps(told))
    os._exit(0)
