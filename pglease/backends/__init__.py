"""From an address to a store. Nothing is imported before it is needed, and nothing is connected here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pglease.backends.base import Backend, Traits
from pglease.errors import ConfigurationError

__all__ = ["Backend", "Traits", "open_backend"]

PLUGS = "pglease.backends"
"""The group of entry points by which other packages bring stores."""
_KNOB_PREFIX = "pglease."
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NUMBERS = ("connect_timeout", "pool_size", "max_advisory", "wait_replicas")
_SWITCH = {"0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True}


def open_backend(url: str, **knobs: Any) -> Backend:
    """Build the store an address names.

    Args:
        url: `postgresql://…` (also `postgres://` and `postgresql+driver://`), libpq's `host=… dbname=…`; `redis://…`,
            `rediss://…`, `valkey://…`, `redis+sentinel://…`; `kubernetes://namespace` for the Leases of a cluster
            (`?pglease.context=…`, `?pglease.kubeconfig=…`); `sqlite:///file` for the processes of one host
            (`sqlite:////absolute/file`); or `memory://` for the threads of one process (`memory://name` for a store
            apart). A store that another package brings has the scheme of its entry point in the group
            `pglease.backends`. Knobs of the store may stand in its query as `?pglease.pool_size=8`.
        knobs: the same knobs as keywords, which are those of the store's class.

    Returns:
        the store; it has connected to nothing, and is yours to close.

    Raises:
        ConfigurationError: an address that names no store, a knob that the store does not have, or one that is said
            twice and differently. The address is not shown.
        MissingDependencyError: the store's driver is not installed.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"the store must be an address (text) or a Backend object, not {type(url).__name__}")
    begins = _SCHEME.match(url)  # anything else before "://" may be a piece of a password, which is not to be shown
    scheme = begins[1] if begins else ""
    if not scheme and "=" not in url and url.strip():
        raise ConfigurationError("the address of the store must be like postgresql://user@host/db")
    kind = scheme.partition("+")[0] if not scheme.startswith("hybrid+") else scheme
    opener = _OPENERS.get(kind) or _plugged_in(kind)
    if opener is None:
        known = ", ".join(f"{name}://" for name in _OPENERS if name)
        meant = _meant(kind, filter(None, _OPENERS), "://")
        raise ConfigurationError(
            f"there is no store for addresses that begin with {scheme[:40]}://{meant}; known are {known}"
        )
    address, in_url = _without_knobs(url)
    return opener(address, {**knobs, **_merged(in_url, knobs)})


def _meant(word: str, known: Iterable[str], end: str = "") -> str:
    """Return the question after a typo, or nothing where no word is near."""
    from difflib import get_close_matches

    choices = list(known)
    near = [name for name in choices if name.startswith(f"{word}+")] or get_close_matches(word, choices, 1, 0.7)
    return f": did you mean {near[0]}{end}?" if near else ""


def _plugged_in(kind: str) -> Callable[[str, dict[str, Any]], Backend] | None:
    """Find a store that another package brings: an entry point in the group `pglease.backends`, named like its scheme.

    It is called with the address, without our own parameters in its query, and with those as a dictionary.
    """
    from importlib.metadata import entry_points

    for found in entry_points(group=PLUGS, name=kind):
        opener: Callable[[str, dict[str, Any]], Backend] = found.load()
        return opener
    return None


def _unquoted(text: str) -> str:
    from urllib.parse import unquote  # costs every import of ours a twentieth, and only addresses need it

    return unquote(text)


def _merged(in_url: Mapping[str, Any], knobs: Mapping[str, Any]) -> Mapping[str, Any]:
    twice = sorted(name for name in in_url if name in knobs and knobs[name] != in_url[name])
    if twice:
        raise ConfigurationError(*(f"{name} is given twice: in the address and as a keyword" for name in twice))
    return in_url


def _without_knobs(url: str) -> tuple[str, dict[str, Any]]:
    """Take our own `pglease.*` parameters out of the query."""
    base, mark, query = url.partition("?")
    if not mark or _KNOB_PREFIX not in query:
        return url, {}
    ours: dict[str, Any] = {}
    rest: list[str] = []  # to the letter: libpq reads a query otherwise than a web form
    for pair in query.split("&"):
        key, _, value = pair.partition("=")
        if _unquoted(key).startswith(_KNOB_PREFIX):
            name = _unquoted(key)[len(_KNOB_PREFIX) :]
            ours[name] = _read(name, _unquoted(value))
        else:
            rest.append(pair)
    return (f"{base}?{'&'.join(rest)}" if rest else base), ours


def _read(name: str, value: str) -> Any:
    if value.isdigit() and (name in _NUMBERS or value not in _SWITCH):
        return int(value)
    return _SWITCH.get(value.lower(), value)


def _postgres(address: str, knobs: dict[str, Any]) -> Backend:
    from pglease.backends.postgres import PostgresBackend

    _check_knobs("PostgreSQL", knobs, _knobs_of(PostgresBackend))
    return PostgresBackend(address, **knobs)


def _hybrid(address: str, knobs: dict[str, Any]) -> Backend:
    from pglease.backends.hybrid import HybridPostgresBackend
    from pglease.backends.postgres import PostgresBackend

    _check_knobs("the hybrid backend", knobs, _knobs_of(HybridPostgresBackend) | _knobs_of(PostgresBackend))
    return HybridPostgresBackend(address, **knobs)


def _redis(address: str, knobs: dict[str, Any]) -> Backend:
    from pglease.backends.redis import RedisBackend

    _check_knobs("Redis", knobs, _knobs_of(RedisBackend))
    return RedisBackend(address, **knobs)


def _check_knobs(kind: str, knobs: Mapping[str, Any], known: set[str]) -> None:
    """Refuse what is no keyword of the store's."""
    unknown = sorted(knobs.keys() - known)
    if unknown:
        raise ConfigurationError(*(f"{kind} has no knob {name!r}{_meant(name, sorted(known))}" for name in unknown))


def _knobs_of(store: type) -> set[str]:
    """Return what an address may say; a clock is for those who build the store by hand."""
    from inspect import Parameter, signature

    return {name for name, knob in signature(store).parameters.items() if knob.kind is Parameter.KEYWORD_ONLY} - {
        "clock"
    }


def _sqlite(address: str, knobs: dict[str, Any]) -> Backend:
    from pglease.backends.sqlite import SQLiteBackend

    path, _, query = address.partition("://")[2].partition("?")
    if query:
        raise ConfigurationError(f"an address of SQLite has no parameters but ?pglease.*, not {query!r}")
    if not path.startswith("/") or path == "/":
        raise ConfigurationError(
            f"an address of SQLite is sqlite:///file (relative) or sqlite:////absolute/file, not {address!r}"
        )
    knobs.pop("connect_timeout", None)  # the client keeps to it; opening a file takes no time of its own
    _check_knobs("SQLite", knobs, _knobs_of(SQLiteBackend))
    return SQLiteBackend(_unquoted(path[1:]), **knobs)


def _memory(address: str, knobs: dict[str, Any]) -> Backend:
    from pglease.backends.memory import shared

    knobs.pop("connect_timeout", None)  # the client keeps to it, as for SQLite
    if knobs:
        raise ConfigurationError(*(f"memory:// has no knob {name!r}" for name in sorted(knobs)))
    return shared(address.partition("://")[2])


def _kubernetes(address: str, knobs: dict[str, Any]) -> Backend:
    from pglease.backends.kubernetes import KubernetesBackend

    unknown = [f"Kubernetes has no knob {name!r}" for name in sorted(knobs.keys() - _knobs_of(KubernetesBackend))]
    namespace, _, more = address.partition("://")[2].rstrip("/").partition("?")
    if more:
        unknown.append(
            "what a Kubernetes address says beyond its namespace must begin with pglease., as pglease.context"
        )
    if unknown:
        raise ConfigurationError(*unknown)
    return KubernetesBackend(namespace, **knobs)


_OPENERS: dict[str, Callable[[str, dict[str, Any]], Backend]] = {
    "postgresql": _postgres,
    "postgres": _postgres,
    "hybrid+postgresql": _hybrid,
    "hybrid+postgres": _hybrid,
    "redis": _redis,
    "rediss": _redis,
    "valkey": _redis,
    "valkeys": _redis,
    "sqlite": _sqlite,
    "memory": _memory,
    "kubernetes": _kubernetes,
    "": _postgres,
}
