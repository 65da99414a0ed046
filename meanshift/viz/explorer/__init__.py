"""The live page: serves a run directory to a browser on this machine, while it trains and after."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import threading
import time
import webbrowser
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from meanshift.viz.explorer.guard import Guard, is_loopback
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.explorer.server import application
from meanshift.viz.explorer.work import THREAD
from meanshift.viz.run_reader import Run

PORT = 8800


def build(explorer: Explorer, *, host: str = "127.0.0.1") -> tuple[ASGIApp, str]:
    """The guarded application of a run, and the token that it demands (none on loopback)."""
    token = "" if is_loopback(host) else secrets.token_urlsafe(32)
    return Guard(application(explorer), token=token), token


def server(app: ASGIApp) -> uvicorn.Server:
    """One that says little, to others and to the terminal."""
    settings = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(settings)


def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
    data: str | None = None,
    metadata: Path | None = None,
) -> None:
    """Serve until interrupted; prints the address, and opens it in a browser."""
    explorer = Explorer(Run(folder, data=data), metadata=metadata)
    app, token = build(explorer, host=host)
    if explorer.lacking:
        print(f"warning: {explorer.lacking}", file=sys.stderr)
    with listen(host, PORT if port is None else port, tries=50 if port is None else 1) as listening:
        address = url(host, listening.getsockname()[1], token)
        print(f"{folder}: {address}\nstop with Ctrl-C", flush=True)
        if token:
            print("or by another name or number of this machine; the connection is not encrypted")
        if browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with suppress(KeyboardInterrupt):  # how a user ends it, if it comes through at all
            server(app).run(sockets=[listening])
        print("stopped")
    explorer.close()
    _leave()


def _leave(*, patience: float = 2.0) -> None:
    """Wait a little for threads; where one still computes, end the process without a traceback.

    A thread inside torch or scikit-learn cannot be ended, and aborts when Python goes from under
    it.
    """
    until = time.monotonic() + patience
    threads = [t for t in threading.enumerate() if t.name in (THREAD, "AnyIO worker thread")]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def listen(host: str, port: int, *, tries: int = 50) -> socket.socket:
    """A socket on the port, or on the next one that is free."""
    if not 0 <= port <= 65_535:
        raise ValueError(f"--port: got {port}, need 0 (any free one) to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + tries, 65_536)):
        try:
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ValueError(
                    f"cannot listen on {host}, port {candidate} ({error}); need an address of "
                    f"this machine and a port that you may use: --host 127.0.0.1 --port {PORT}"
                ) from None
    which = f"port {port} is" if tries == 1 else f"ports {port} to {port + tries - 1} are all"
    raise ValueError(f"{which} taken; give another --port")


def url(host: str, port: int, token: str) -> str:
    """What to open: with the token where there is one."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
