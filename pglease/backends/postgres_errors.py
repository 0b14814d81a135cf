"""What a driver's error means for us: worth retrying, misconfigured, or a statement to be prepared again.

psycopg 3 and psycopg2 say the same things differently (after `pg_terminate_backend` one has SQLSTATE 57P01, the other
none and a closed connection), so errors are read by SQLSTATE first and by the names of their classes second; no driver
is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pglease.errors import BackendError, BackendMisconfigured, BackendUnavailable

UNDEFINED_TABLE = "42P01"
LOCK_NOT_AVAILABLE = "55P03"
UNIQUE_VIOLATION = "23505"
READ_ONLY = "25006"
INSUFFICIENT_PRIVILEGE = "42501"
COLUMNS_CHANGED = "0A000"
STALE_PREPARED = frozenset({"26000", "42P05", COLUMNS_CHANGED})
"""The pooler gave us a session without our statement, or with it already, or the table's columns changed under it."""

_NOT_APPLIED = ("22", "23", "25", "40001", "40P01", "42", "53", "54", "55", "57014")
"""The server refused the statement itself: whatever it would have done, it did not do."""
_WRONG_SETUP = ("22", "23", "28", "3D", "3F", "42", "54")
_TRANSPORT = frozenset(
    {"OperationalError", "InterfaceError", "PoolError", "PoolTimeout", "PoolClosed", "TooManyRequests", "TimeoutError"}
)
_WRONG_SETUP_WHILE_CONNECTING = {
    "password authentication failed": "correct the user or the password in the address",
    "no password supplied": "put the password into ~/.pgpass or into the address",
    "no pg_hba.conf entry": "the server's pg_hba.conf has to admit this user from this host",
    "is not permitted to log in": "ALTER ROLE … LOGIN",
    "root certificate file": "name one that exists in the address, as ?sslrootcert=/path/to/ca.crt",
    "does not exist": "create it, or correct the address",
    "unsupported startup parameter": "the pooler has to let it through (ignore_startup_parameters)",
    "permission denied for database": "GRANT CONNECT on it to this role",
    "invalid ": "correct the address",
    "server does not support SSL": "take sslmode=prefer, or a server with TLS",
}
"""What a driver says of a connection that no second try makes, and what mends it."""
_NOBODY_THERE = ("refused", "No such file", "failed to resolve", "could not translate host name")


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error of either driver, or None when the server did not give one."""
    found = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    wrapped = getattr(error, "orig", None)  # SQLAlchemy
    return found or (sqlstate(wrapped) if isinstance(wrapped, BaseException) else None)


def is_transport(error: BaseException) -> bool:
    """Tell whether the conversation broke, rather than a statement being refused."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(names & _TRANSPORT)


def translated(error: BaseException, scrub: Callable[[str], str], *, sent: bool) -> BackendError:
    """Return our error for a driver's.

    Args:
        error: what the driver raised.
        scrub: takes secrets out of its text.
        sent: whether a request was on its way, so that it may have been applied.
    """
    ours = _translated(error, scrub, sent=sent)
    ours.sqlstate = sqlstate(error)
    return ours


def _translated(error: BaseException, scrub: Callable[[str], str], *, sent: bool) -> BackendError:
    state = sqlstate(error)
    text = scrub(_first_line(error))
    if state is None:
        mends = None if sent else _first(text, _WRONG_SETUP_WHILE_CONNECTING)
        if mends is not None:
            return BackendMisconfigured(f"PostgreSQL refuses the connection: {text}; {mends}")
        if is_transport(error):
            nobody = not sent and any(sign in text for sign in _NOBODY_THERE)
            to_do = "; look whether it runs, and whether the address is right" if nobody else ""
            return BackendUnavailable(f"PostgreSQL cannot be reached: {text}{to_do}", outcome_unknown=sent)
        return BackendMisconfigured(f"PostgreSQL's driver refused the statement: {type(error).__name__}: {text}")
    if state == INSUFFICIENT_PRIVILEGE:
        return BackendMisconfigured(f"PostgreSQL: {text}; `pglease schema grants` lists what each role needs")
    if state == UNDEFINED_TABLE:
        return BackendMisconfigured(f"PostgreSQL: {text}; run `pglease schema apply`")
    if state.startswith(_WRONG_SETUP) and state not in STALE_PREPARED:
        return BackendMisconfigured(f"PostgreSQL refuses the statement: {text} (SQLSTATE {state})")
    return BackendUnavailable(
        f"PostgreSQL: {text} (SQLSTATE {state})", outcome_unknown=sent and not state.startswith(_NOT_APPLIED)
    )


def _first(text: str, signs: Mapping[str, str]) -> str | None:
    return next((mends for sign, mends in signs.items() if sign in text), None)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
