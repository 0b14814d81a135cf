"""Who may come in, and what browsers are told to be strict about.

A page on 127.0.0.1 is within reach of every site that its reader visits. Against that: names that only a DNS server of
somebody else's could point here are refused; whoever may change something has shown the access token; and a form counts
only with a secret that nobody else's page can read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from base64 import b64encode
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pglease.errors import ConfigurationError
from pglease.timeline import STYLE

COOKIE = "pglease"
SHORTEST_TOKEN = 16
MISDIRECTED = 421

_PICTURE = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        f"style-src 'self' 'sha256-{_PICTURE}'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # by `no-referrer`, our own form would come from the origin `null`
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Gate:
    """An ASGI application around another one: refuses foreign hosts, and adds the headers above to every answer.

    Args:
        app: what is behind it.
        hosts: names by which it may be called, besides `localhost` and every address in numbers: no name's owner can
            point those anywhere.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the request pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        app = self._app if self._is_ours(Headers(scope=scope).get("host", "")) else _misdirected()
        await app(scope, receive, strict)

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name.rstrip(".") in self._hosts or _is_number(name)


class Access:
    """Who was let in by the access token, and which forms are our own. The secrets live as long as the process.

    Args:
        token: what is to be shown; at least 16 characters.
    """

    def __init__(self, token: str) -> None:
        if len(token) < SHORTEST_TOKEN:
            raise ConfigurationError(f"an access token has at least {SHORTEST_TOKEN} characters")
        self._token = token
        secret = secrets.token_bytes(32)
        self.badge, self.seal = (hmac.digest(secret, what, "sha256").hex() for what in (b"pass", b"seal"))

    def opens(self, token: str) -> bool:
        """Tell whether this is the access token."""
        return _same(token, self._token)

    def knows(self, connection: HTTPConnection) -> bool:
        """Tell whether a browser has shown the access token before."""
        return _same(connection.cookies.get(COOKIE, ""), self.badge)

    def sealed(self, connection: HTTPConnection, seal: str) -> bool:
        """Tell whether a form is one of our own pages', sent from there."""
        return comes_from_here(connection) and _same(seal, self.seal)

    def admit(self, connection: HTTPConnection, response: Response) -> None:
        """Give a browser the cookie by which it is known. No script reads it, and no other site makes use of it."""
        https = connection.url.scheme == "https"
        path = connection.scope.get("root_path", "") + "/"
        response.set_cookie(COOKIE, self.badge, path=path, secure=https, httponly=True, samesite="strict")


def comes_from_here(connection: HTTPConnection) -> bool:
    """Tell whether a browser sends this from a page of ours, as far as it says where from.

    The cookie alone does not tell: to a browser all ports of one host are the same site.
    """
    site, origin = connection.headers.get("sec-fetch-site"), connection.headers.get("origin")
    if site not in {None, "same-origin"}:
        return False
    return origin is None or urlsplit(origin).netloc == connection.headers.get("host")


def new_token() -> str:
    """Return an access token that nobody guesses."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Tell whether nobody but this machine can reach an address."""
    return host == "localhost" or (_is_number(host) and ipaddress.ip_address(host).is_loopback)


def _misdirected() -> ASGIApp:
    return PlainTextResponse("this is not served under that name (see --allow-host)\n", MISDIRECTED)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _same(one: Any, other: str) -> bool:
    return hmac.compare_digest(str(one).encode("utf-8", "replace"), other.encode())
