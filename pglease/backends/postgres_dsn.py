"""The PostgreSQL address a user gave: read by libpq's own parser, its secrets never shown.

libpq's error texts repeat pieces of what they could not parse, passwords included. So everything is checked here first,
and what libpq says about a malformed address is never passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import quote

from pglease.errors import BackendMisconfigured, ConfigurationError, MissingDependencyError

Address: TypeAlias = str | Callable[[], Mapping[str, Any]]
"""Text, or a function that returns libpq's parameters."""

_URL = re.compile(r"(?P<scheme>postgres(?:ql)?)(?:\+\w+)?://(?P<rest>.*)\Z", re.DOTALL)
_SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
_HIDDEN = "***"


class Dsn:
    """A checked address. `repr` and `str` show it without its secrets.

    Args:
        address: `postgresql://user:pass@host/db?option=…` (also `postgres://`, also with a driver as in
            `postgresql+psycopg2://`) or libpq's `host=… dbname=…`. Empty means libpq's environment variables alone. Or
            a function that returns libpq's parameters: it is asked whenever a connection is about to be made.

    Raises:
        ConfigurationError: when libpq could not make sense of it; the text shows none of it.
    """

    __slots__ = ("_ask", "_params")

    def __init__(self, address: Address) -> None:
        self._ask = address if callable(address) else None
        self._params: dict[str, Any] = {} if callable(address) else _parsed(address)

    def refresh(self) -> None:
        """Ask the function, if there is one.

        Raises:
            BackendMisconfigured: it failed, or told nonsense.
        """
        if self._ask is not None:
            self._params = _told(self._ask)

    def params(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return libpq's parameters, with `defaults` for those the user did not give."""
        return {**defaults, **self._params}

    def get(self, parameter: str) -> str | None:
        """Return one parameter as the user gave it. Never ask for a secret."""
        value = self._params.get(parameter)
        return None if value is None else str(value)

    def scrub(self, text: str) -> str:
        """Return `text` without any of the secrets, should something foreign have put one there."""
        for secret in self._secrets():
            text = text.replace(secret, _HIDDEN)
        return text

    def _secrets(self) -> list[str]:
        found = [str(self._params[key]) for key in _SECRETS if self._params.get(key)]
        return [form for secret in found for form in {secret, quote(secret, safe="")} if len(form) > 2]

    def __str__(self) -> str:
        shown = {key: value for key, value in self._params.items() if key not in _SECRETS}
        return " ".join(f"{key}={value}" for key, value in sorted(shown.items())) or "libpq's environment"

    def __repr__(self) -> str:
        return f"Dsn({str(self)!r})"

    def __reduce__(self) -> Any:
        raise TypeError("an address with secrets is not pickled")


def _told(ask: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    try:
        params = {name: value for name, value in ask().items() if value is not None}
        _check_port(params)
    except Exception as error:  # noqa: BLE001  # whatever the user's function raises becomes one of ours
        raise BackendMisconfigured(
            f"the function that tells PostgreSQL's address failed: {type(error).__name__}: {error}"
        ) from None
    return params


def _parsed(address: str) -> dict[str, Any]:
    plain = _checked(address)
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise MissingDependencyError(
            "PostgreSQL needs the package psycopg: install pglease with its dependencies"
        ) from None
    params: dict[str, Any] | None = None
    with suppress(ProgrammingError, UnicodeError, ValueError):
        params = conninfo_to_dict(plain)
    if params is None:  # raised outside the handler, so that the error's context does not carry libpq's text
        raise ConfigurationError(
            "the PostgreSQL address cannot be parsed: percent-encode special characters in user and password"
        )
    _check_port(params)
    return params


def _checked(address: str) -> str:
    """Return the address for libpq, or refuse what libpq would split at the wrong place."""
    if not isinstance(address, str):
        raise ConfigurationError(f"the PostgreSQL address must be text, not {type(address).__name__}")
    if "\0" in address:
        raise ConfigurationError("the PostgreSQL address must have no NUL character")
    url = _URL.match(address)
    if url is None:
        if "://" in address and "=" not in address.partition("://")[0]:
            raise ConfigurationError("the PostgreSQL address must begin with postgresql://")
        return address
    authority, _, path = url["rest"].partition("/")
    if authority.count("@") > 1 or "@" in path.partition("?")[0]:
        raise ConfigurationError(
            "the PostgreSQL address has an '@' or '/' too many: percent-encode them in user and password (%40, %2F)"
        )
    return f"{url['scheme']}://{url['rest']}"


def _check_port(params: Mapping[str, Any]) -> None:
    ports = str(params.get("port", "") or "").split(",")
    if not all(port == "" or (port.isdigit() and 0 < int(port) < 65536) for port in ports):
        raise ConfigurationError(
            "the PostgreSQL address has a port that is no number from 1 to 65535: "
            "percent-encode '/' and ':' in the password"
        )
