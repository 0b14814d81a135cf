"""The Redis address a user gave: read by redis-py's own parser, its secrets never shown.

Error texts about a malformed address repeat pieces of it, passwords included. So everything is checked here first, and
what the parser says is never passed on.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import quote

import redis
from redis.connection import URL_QUERY_ARGUMENT_PARSERS, parse_url
from redis.sentinel import Sentinel

from pglease.backends.redis_errors import Node
from pglease.errors import ConfigurationError

_URL = re.compile(
    r"(?P<scheme>redis|rediss|valkey|valkeys)(?P<sentinel>\+sentinel)?://(?P<authority>[^/?]*)(?P<path>[^?]*)(?P<query>.*)\Z",
    re.DOTALL | re.IGNORECASE,
)
_SECRETS = ("password", "ssl_password", "sentinel_password")
_HIDDEN = "***"
_PASSED_ON = ("username", "password", "db", "client_name", "socket_keepalive")
_OURS = frozenset(URL_QUERY_ARGUMENT_PARSERS) | {
    "decode_responses",
    "encoding",
    "encoding_errors",
    "health_check_interval",
}
"""Options of redis-py's clients and pools that say how long, how often and in what form: here the budget says it."""
_SENTINEL_PORT = 26379


class Address:
    """A checked address. `repr` and `str` show it without its secrets.

    Args:
        address: `redis://user:pass@host:port/db`, `rediss://` with TLS, both also as `valkey://` and `valkeys://`, or
            `redis+sentinel://user:pass@host1:port1,host2:port2/service/db`. Options of TLS may stand in the query as
            redis-py has them (`ssl_ca_certs=…`).

    Raises:
        ConfigurationError: when no sense could be made of it; the text shows none of it.
    """

    __slots__ = ("_kind", "_options", "_sentinel_options", "_sentinels", "_service", "home")

    def __init__(self, address: str) -> None:
        url = _matched(address)
        kind, options = _parsed(url)
        self._sentinels = _hosts(url["authority"]) if url["sentinel"] else []
        self._service = _service(url["path"]) if url["sentinel"] else ""
        host, port = options.pop("host", "localhost"), options.pop("port", 6379)
        self.home: Node = (self._service, 0) if self._sentinels else (host, port)
        self._sentinel_options = {
            key: options.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in options
        }
        self._options = {key: value for key, value in options.items() if key in _PASSED_ON or key.startswith("ssl_")}
        if set(options) - set(self._options) - _OURS:
            raise ConfigurationError("the Redis address has an option in its query that is none of Redis's")
        self._kind: Any = _with_socket(kind)
        sound = False
        with suppress(redis.RedisError, TypeError, ValueError):
            self._made(self.home, 1.0)
            sound = True
        if not sound:
            raise ConfigurationError("the Redis address has an option of TLS that redis-py does not take")

    @property
    def has_sentinels(self) -> bool:
        """Whether the server is to be asked for each time."""
        return bool(self._sentinels)

    def connect(self, node: Node, timeout: float) -> Any:
        """Connect, log in and return the connection. May take several times `timeout` seconds, or a resolver's time."""
        if self._sentinels:
            node = self._primary(timeout)
        connection = self._made(node, timeout)
        connection.connect()
        connection.unbounded()
        return connection

    def _primary(self, timeout: float) -> Node:
        """Ask the sentinels, one after the other, where the primary is now."""
        bounds = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        tls = {key: value for key, value in self._options.items() if key.startswith("ssl_")}
        ssl = {"ssl": True, **tls} if issubclass(self._kind, redis.SSLConnection) else {}
        sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
            self._sentinels, sentinel_kwargs={**ssl, **bounds, **self._sentinel_options}
        )
        try:
            host, port = sentinel.discover_master(self._service)
        finally:
            for client in sentinel.sentinels:
                client.close()
        return host, port

    def _made(self, node: Node, timeout: float) -> Any:
        bounds = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        return self._kind(host=node[0], port=node[1], protocol=2, **bounds, **self._options)

    def scrub(self, text: str) -> str:
        """Return `text` without any of the secrets, should something foreign have put one there."""
        for secret in self._secrets():
            text = text.replace(secret, _HIDDEN)
        return text

    def _secrets(self) -> list[str]:
        everything = {**self._options, "sentinel_password": self._sentinel_options.get("password")}
        found = [str(everything[key]) for key in _SECRETS if everything.get(key)]
        return [form for secret in found for form in {secret, quote(secret, safe="")} if len(form) > 2]

    def __str__(self) -> str:
        if self._sentinels:
            return f"{self._service} of the sentinels {', '.join(f'{host}:{port}' for host, port in self._sentinels)}"
        return f"{self.home[0]}:{self.home[1]}/{self._options.get('db', 0)}"

    def __repr__(self) -> str:
        return f"Address({str(self)!r})"

    def __reduce__(self) -> Any:
        raise TypeError("an address with secrets is not pickled")


def _matched(address: str) -> re.Match[str]:
    if not isinstance(address, str):
        raise ConfigurationError(f"the Redis address must be text, not {type(address).__name__}")
    url = _URL.match(address)
    if url is None:
        raise ConfigurationError(
            "the Redis address must begin with redis://, rediss://, valkey:// or redis+sentinel://"
        )
    path = r"/[^/]+(/\d+)?/?" if url["sentinel"] else r"(/\d*)?"
    if url["authority"].count("@") > 1 or not re.fullmatch(path, url["path"]) or "#" in address:
        raise ConfigurationError(
            "the Redis address has an '@', '/', '?' or '#' too many, or a database that is no number: percent-encode "
            "them in user and password (%40, %2F, %3F, %23)"
        )
    return url


def _parsed(url: re.Match[str]) -> tuple[Hashable, dict[str, Any]]:
    """Let redis-py read user, password, host, port, database and query; return the kind of connection too."""
    scheme = "rediss" if url["scheme"].lower() in ("rediss", "valkeys") else "redis"
    authority, database = url["authority"], url["path"]
    if url["sentinel"]:
        login, at, _ = authority.rpartition("@")
        authority, database = f"{login}{at}", (*database.split("/"), "")[2]
    options: dict[str, Any] | None = None
    with suppress(ValueError, UnicodeError):
        options = parse_url(  # type: ignore[no-untyped-call]
            f"{scheme}://{authority}/{database.strip('/')}{url['query']}"
        )
    if options is None:  # raised outside the handler, so that the error's context does not carry the parser's text
        raise ConfigurationError(
            "the Redis address cannot be parsed: percent-encode special characters in user and password"
        )
    return options.pop("connection_class", redis.Connection), options


def _hosts(authority: str) -> list[Node]:
    places = authority.rpartition("@")[2].split(",")
    if not all(re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(:\d{1,5})?", place) for place in places):
        raise ConfigurationError("the sentinels must be host:port, with commas between them")
    split = [re.fullmatch(r"\[?([^\]]+?)\]?(?::(\d+))?", place) for place in places]
    return [(found[1], int(found[2] or _SENTINEL_PORT)) for found in split if found]


def _service(path: str) -> str:
    return path.split("/")[1]


@cache
def _with_socket(kind: Hashable) -> type[Any]:
    """Return redis-py's connection, with what it keeps to itself: its socket."""

    class Connection(kind):  # type: ignore[misc,valid-type]
        @property
        def source(self) -> Any:
            """Its socket."""
            return self._sock

        def explained(self, text: str) -> Any:
            """Return redis-py's exception for an error of the server's."""
            return self._parser.parse_error(text)

        def unbounded(self) -> None:
            """Wait for answers without a time-out of its own: a cutoff ends what takes too long."""
            self._sock.settimeout(None)

    return Connection
