"""The door of the server: who may ask, from where, and what every answer says to the browser."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets in who is on this machine, or who shows the token; nobody by way of another site.

    Without a token the name in `Host` must be a loopback one: a foreign page that had its own name
    resolved to 127.0.0.1 would otherwise read the answers.
    """

    def __init__(self, app: ASGIApp, *, token: str = "") -> None:
        self.app, self.token = app, token
        self.cookie = "meanshift-" + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither lifespan nor websockets: the server closes them
        refused = self._refused(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await (refused or self.app)(scope, receive, send_guarded)

    def _refused(self, scope: Scope) -> Response | None:
        headers, method = Headers(scope=scope), scope["method"]
        host = headers.get("host", "")
        if not self.token and not is_loopback(_name(host)):
            return _no(403, f"got the name {host!r}; open the page at 127.0.0.1 or localhost")
        if self.token:
            shown = QueryParams(scope["query_string"]).get("token")
            if shown is not None and scope["path"] == "/" and self._is_token(shown):
                return self._welcome()
            if not self._is_token(_cookie(headers.get("cookie", ""), self.cookie)):
                return _no(401, "a token is needed: open the address that the command printed")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not (
            scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        ):
            return _no(403, "asked by another site")
        if method not in ("GET", "HEAD"):
            origin = headers.get("origin", "")
            if origin not in (f"http://{host}", f"https://{host}"):
                return _no(403, f"got the origin {origin!r}, need this page's own")
        return None

    def _is_token(self, shown: str) -> bool:
        return secrets.compare_digest(shown.encode(), self.token.encode())

    def _welcome(self) -> Response:
        """The token moves from the address, which is kept in histories, into a cookie."""
        response = RedirectResponse("/", 303)
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
        return response


def _no(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status)


def _name(host: str) -> str:
    """The name of a `Host` without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _cookie(header: str, name: str) -> str:
    try:
        held = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if held is None else held.value
