"""Fencing for data that is not in the lease's database: a high-water mark of tokens per resource.

Whoever keeps the data asks, for each write, whether its fencing token is at least as large as the largest seen for that
resource. Equal ones pass, since one holder writes often; smaller ones come from a holder that has been succeeded. Each
question is one atomic step.

For data in the lease's own PostgreSQL there is `HeldLease.guard`, which needs no mark.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, Protocol

from pglease import options
from pglease.backends.paramstyles import Statement
from pglease.backends.postgres_callers import FAILED, GONE, Caller, caller_of, refuse_unfit
from pglease.backends.postgres_errors import UNDEFINED_TABLE, sqlstate
from pglease.errors import BackendMisconfigured, ConfigurationError
from pglease.schema import TableNames, table_names

__all__ = ["MemoryMarks", "RedisMarks", "accept", "accept_async", "ddl"]

TABLE = "pglease_fences"
LARGEST = 2**63 - 1
"""The largest token: they are bigints in PostgreSQL."""

# Locks the row until the caller's transaction ends, so that two writers come one after the other.
_ACCEPT = """
INSERT INTO {table} AS f (resource, token) VALUES (%(resource)s, CAST(CAST(%(token)s AS text) AS bigint))
ON CONFLICT (resource) DO UPDATE SET token = excluded.token WHERE f.token <= excluded.token
RETURNING f.token
"""

# Decimal numbers of up to 19 digits are compared as text: Lua's numbers are exact to 2**53 only.
_SCRIPT = """
local seen, token = redis.call('GET', KEYS[1]), ARGV[1]
if seen and (#seen > #token or (#seen == #token and seen > token)) then
  return 0
end
if seen ~= token then
  redis.call('SET', KEYS[1], token)
end
return 1
"""


def ddl(table: str = TABLE, schema: str | None = None) -> str:
    """Return the statement that makes the table of marks for `accept`. Running it again is harmless.

    Args:
        table: its name; one identifier. Default `pglease_fences`.
        schema: its schema; default: wherever the `search_path` would create it.

    Raises:
        ConfigurationError: one of them is no identifier.
    """
    return (
        f"CREATE TABLE IF NOT EXISTS {_name(table, schema)} "
        '(resource text COLLATE "C" PRIMARY KEY, token bigint NOT NULL) WITH (fillfactor = 50)'
    )


def accept(connection: Any, resource: str, token: int, *, table: str = TABLE, schema: str | None = None) -> bool:
    """Tell whether `token` is at least the largest seen for `resource`, and note it, in one statement.

    Inside a transaction the mark stands or falls with it, and other writers of the resource wait until it has ended: so
    call it in the transaction that writes the data, before the write.

    Args:
        connection: as for `HeldLease.guard`, but for asynchronous ones; a database of any purpose.
        resource: what is written to: 1 to 255 characters.
        token: the writer's fencing token, 1 to 2**63 - 1.
        table, schema: where the marks are (see `ddl`). Default: `pglease_fences`, wherever the search_path finds it.

    Returns:
        False when a larger token has been seen: refuse the write.

    Raises:
        ConfigurationError: an argument is wrong; an asynchronous, closed or failed connection.
        BackendMisconfigured: the table is missing; nothing was noted, and an open transaction is aborted. Other errors
            are the driver's own.

    Source:
        the check that Martin Kleppmann asks of a storage service in *How to do distributed locking* (2016).
    """
    caller = _caller(connection)
    if caller.is_async:
        raise ConfigurationError("accept needs a synchronous connection: there is accept_async for others")
    statement, params = _question(resource, token, table, schema)
    try:
        return caller.run(connection, statement, params) is not None
    except Exception as error:
        _explain(error, table, schema)
        raise


async def accept_async(
    connection: Any, resource: str, token: int, *, table: str = TABLE, schema: str | None = None
) -> bool:
    """Tell the same as `accept`, on an asynchronous connection."""
    caller = _caller(connection)
    if not caller.is_async:
        raise ConfigurationError("accept_async needs an asynchronous connection: there is accept for others")
    statement, params = _question(resource, token, table, schema)
    try:
        return await caller.run(connection, statement, params) is not None
    except Exception as error:
        _explain(error, table, schema)
        raise


class RedisMarks:
    """Marks in Redis or Valkey: one script, one key per resource.

    Args:
        client: a redis-py client. It must not evict (`maxmemory-policy noeviction`) and must survive a restart (AOF): a
            mark that is lost lets the next token pass, whichever it is.
        prefix: what the keys begin with. Default `pglease:fence:`.
    """

    def __init__(self, client: Any, prefix: str = "pglease:fence:") -> None:
        self._script = client.register_script(_SCRIPT)
        self._prefix = prefix

    def accept(self, resource: str, token: int) -> bool:
        """Tell whether `token` is at least the largest seen for `resource`, and note it. See `accept`."""
        key = self._prefix + options.text(resource, "resource")
        return bool(self._script(keys=[key], args=[str(_token(token))]))


class MemoryMarks:
    """Marks in this process: for a service of one process that may forget them when it restarts, and for tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}

    def accept(self, resource: str, token: int) -> bool:
        """Tell whether `token` is at least the largest seen for `resource`, and note it. See `accept`."""
        options.text(resource, "resource")
        _token(token)
        with self._lock:
            accepted = token >= self._seen.get(resource, 0)
            if accepted:
                self._seen[resource] = token
            return accepted


class Marks(Protocol):
    """What `RedisMarks` and `MemoryMarks` have in common, and a keeper of marks of your own."""

    def accept(self, resource: str, token: int) -> bool:
        """Tell whether `token` is at least the largest seen for `resource`, and note it, in one atomic step."""


def _name(table: str, schema: str | None) -> str:
    names: TableNames = table_names(table, schema)
    return names.leases  # quoted


def _caller(connection: Any) -> Caller:
    caller = caller_of(connection)
    if (state := caller.state(connection)) in (FAILED, GONE):
        refuse_unfit(state)
    return caller


def _question(resource: str, token: int, table: str, schema: str | None) -> tuple[Statement, dict[str, Any]]:
    params = {"resource": options.text(resource, "resource"), "token": str(_token(token))}
    return _statement(_name(table, schema)), params


@lru_cache(maxsize=64)
def _statement(table: str) -> Statement:
    return Statement(_ACCEPT.format(table=table))


def _token(token: int) -> int:
    if options.count(token, "token") > LARGEST:
        raise ConfigurationError(f"token must be at most {LARGEST}, not {token}")
    return token


def _explain(error: Exception, table: str, schema: str | None) -> None:
    if (sqlstate(error) or sqlstate(error.__cause__ or error)) == UNDEFINED_TABLE:
        raise BackendMisconfigured(f"the table of marks is missing; make it: {ddl(table, schema)}") from error
