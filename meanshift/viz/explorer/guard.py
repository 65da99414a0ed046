"""Access control of the server: who may ask, and the security headers of every response."""

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
    """Whether only this machine can reach a server that listens on this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Middleware that admits requests of this machine, or with the token; none of other sites.

    Without a token the name in `Host` must be a loopback one: otherwise a page of another site
    whose name resolves to 127.0.0.1 could read the responses (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, token: str = "") -> None:
        self.app = app
        self.token = token
        self.cookie = "meanshift-" + hashlib.sha256(token.encode()).hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither lifespan nor websockets: the server closes them
        own_response = self._respond(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await (own_response or self.app)(scope, receive, send_guarded)

    def _respond(self, scope: Scope) -> Response | None:
        """A refusal, or the redirect that sets the cookie; None if the request may pass."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        path = scope["path"]
        if not self.token and not is_loopback(_without_port(host)):
            return _refuse(403, f"got the name {host!r}; open the page at 127.0.0.1 or localhost")
        if self.token:
            given = QueryParams(scope["query_string"]).get("token")
            if given is not None and path == "/" and self._is_token(given):
                return self._set_cookie()
            if not self._is_token(_read_cookie(headers.get("cookie", ""), self.cookie)):
                return _refuse(401, "a token is needed: open the address that the command printed")
        same_site = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        followed_link = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        if not same_site and not followed_link:
            return _refuse(403, "requested by another site")
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get("origin", "")
            if origin not in (f"http://{host}", f"https://{host}"):
                return _refuse(403, f"got the origin {origin!r}, need this page's own")
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())

    def _set_cookie(self) -> Response:
        """Move the token from the address, which histories remember, into a cookie."""
        response = RedirectResponse("/", 303)
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
        return response


def _refuse(status: int, reason: str) -> Response:
    return PlainTextResponse(f"{reason}\n", status)


def _without_port(host: str) -> str:
    """The name in a `Host` header."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _read_cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value
