"""The web server of the live page: its socket, its address, and how it starts and stops."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from meanshift.runtime.extras import require
from meanshift.viz.explorer.background import THREAD_NAME
from meanshift.viz.explorer.indexed import IndexedSource
from meanshift.viz.explorer.model import Explorer
from meanshift.viz.run_reader import Run

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

PORT = 8800


def serve(
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
    data: str | None = None,
    metadata: Path | None = None,
    bands: Sequence[int] = (),
    index: Path | None = None,
) -> None:
    """Serve a run until interrupted; print the address and open it in a browser."""
    require("uvicorn", extra="explore", what="live pages")
    run = Run(folder, data=data, bands=bands)
    indexed = None if index is None else IndexedSource.open(index, folder)
    explorer = Explorer(run, metadata=metadata, indexed=indexed)
    app, token = build_app(explorer, host=host)
    if explorer.missing:
        print(f"warning: {explorer.missing}", file=sys.stderr)
    with listen(host, PORT if port is None else port, tries=50 if port is None else 1) as sock:
        address = url(host, sock.getsockname()[1], token)
        print(f"{folder}: {address}\nstop with Ctrl-C", flush=True)
        if token:
            print("other names or addresses of this machine work too; nothing is encrypted")
        if browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with suppress(KeyboardInterrupt):  # the usual way to stop it
            make_server(app).run(sockets=[sock])
        print("stopped")
    explorer.close()
    _exit_with_threads()


def build_app(explorer: Explorer, *, host: str = "127.0.0.1") -> tuple[ASGIApp, str]:
    """The guarded application of a run, and the token that it demands (none on loopback)."""
    require("starlette", extra="explore", what="live pages")
    from meanshift.viz.explorer.guard import Guard, is_loopback
    from meanshift.viz.explorer.routes import application

    token = "" if is_loopback(host) else secrets.token_urlsafe(32)
    return Guard(application(explorer), token=token), token


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server that logs only warnings and does not name itself."""
    import uvicorn

    settings = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(settings)


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
    """The address to open, with the token if there is one."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    bracketed = f"[{name}]" if ":" in name else name
    return f"http://{bracketed}:{port}/" + (f"?token={token}" if token else "")


def _exit_with_threads(*, patience: float = 2.0) -> None:
    """Wait a little for threads; if one still computes, end the process without a traceback.

    A thread inside torch or scikit-learn cannot be stopped, and crashes when Python shuts down.
    """
    deadline = time.monotonic() + patience
    names = (THREAD_NAME, "AnyIO worker thread")
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
