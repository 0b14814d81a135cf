"""Tokens never go back, also where the store itself has lost grants: epochs, lineages, quarantines.

The upper half of a token is its epoch. A new one begins when the server that grants is not the one that granted last:
a replica was promoted, a dump restored, a backup recovered. Then nobody can say which tokens were given out, and all
tokens of the next epoch are above them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pglease import options
from pglease.backends.postgres_errors import INSUFFICIENT_PRIVILEGE, sqlstate
from pglease.backends.postgres_link import Link
from pglease.backends.postgres_schema import RAISING
from pglease.backends.postgres_sql import Statements, lineage_of
from pglease.errors import BackendMisconfigured
from pglease.schema import TableNames

_NEEDED = ("pg_control_system()", "pg_walfile_name(pg_lsn)", "pg_current_wal_lsn()")
_MAY_ASK = """
SELECT current_user::text, pg_catalog.array_to_string(ARRAY(
  SELECT f FROM pg_catalog.unnest(%(needed)s::text[]) AS f WHERE NOT coalesce(
    pg_catalog.has_function_privilege(pg_catalog.to_regprocedure('pg_catalog.' || f), 'EXECUTE'), false)), ', ')
"""
_ASK = "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL ELSE {lineage} END"
_REFUSALS = ("0A", "22", "38", "39", "42", "55", "P0", "XX")
"""Classes of SQLSTATE that mean: the server has such functions, and they do not work here."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which server this is, by which history, in its own words.

    Attributes:
        present: its lineage; None on a standby, and where it cannot be told.
        untold: why it cannot be told; empty where it can.
    """

    present: str | None
    untold: str = ""


def ask_lineage(link: Link, names: TableNames) -> Lineage:
    """Ask the server who it is; look at the rights first, so that a server that cannot tell logs no error."""
    ((role, lacking),) = link.rows(_MAY_ASK, {"needed": list(_NEEDED)})
    if lacking:
        return Lineage(None, f"{lacking} is missing, or {role} may not call it")
    try:
        ((present,),) = link.rows(_ASK.format(lineage=lineage_of(names)))
    except Exception as error:
        if not (sqlstate(error) or "").startswith(_REFUSALS):
            raise
        return Lineage(None, str(error).strip().splitlines()[0])
    return Lineage(present)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """How long nothing is granted once a new epoch began.

    Attributes:
        seconds: at least so long; None for no quarantine.
        longest: whether it is as long as the longest ttl in the table, where that is longer.
    """

    seconds: float | None = None
    longest: bool = False

    @classmethod
    def of(cls, knob: bool | options.Duration) -> Quarantine:
        """Read the knob `failover_quarantine`."""
        if isinstance(knob, bool):
            return cls(60.0, longest=True) if knob else cls()
        return cls(options.seconds(knob, "failover_quarantine", zero=True) or None)


def raise_epoch(link: Link, sql: Statements, quarantine: Quarantine, *, anyway: bool = False) -> int | None:
    """Begin a new epoch if another server granted last, or `anyway`; None when there was nothing to do.

    Raises:
        BackendMisconfigured: this role may not.
    """
    params = {"anyway": anyway, "quarantine": quarantine.seconds, "longest": quarantine.longest}
    try:
        rows = link.rows(sql.raise_epoch, params)
    except Exception as error:
        if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
            raise
        raise BackendMisconfigured(
            "the server was promoted or restored since the last grant, so tokens must go on in a new epoch, which this "
            f"role may not begin: run `pglease bump-epoch` as one that may, or GRANT {RAISING} on the meta table to it "
            "(`pglease schema grants`)"
        ) from None
    return int(rows[0][0]) if rows else None
