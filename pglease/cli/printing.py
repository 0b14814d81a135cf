"""What the commands print: tables and sentences for people, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pglease.records import Lease


def say(text: str) -> None:
    """Print a line for people on standard output."""
    click.echo(text)


def write(path: str, text: str) -> None:
    """Write a file, or standard output where it is `-`."""
    with click.open_file(path, "w", encoding="utf-8", atomic=path != "-") as file:
        file.write(text)


def complain(text: str) -> None:
    """Print one sentence on standard error, after the program's name."""
    click.echo(f"pglease: {visible(text)}", err=True)


def say_json(facts: dict[str, Any]) -> None:
    """Print one object on one line, in ASCII, so that no terminal's encoding can spoil it."""
    click.echo(json.dumps(facts, default=_as_json))


def _as_json(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else dict(value)


def visible(text: str) -> str:
    """Return text that cannot steer a terminal: whatever does not print is written as an escape."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def duration(seconds: float) -> str:
    """Return a duration as people say it, in at most two units."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, lower, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"


def facts_of(lease: Lease) -> dict[str, Any]:
    """Return a record as JSON facts. Times are the store's."""
    return {
        "name": lease.name,
        "held": not lease.is_expired(),
        "owner_id": lease.owner_id,
        "fencing_token": lease.fencing_token,
        "acquired_at": lease.acquired_at,
        "heartbeat_at": lease.heartbeat_at,
        "expires_at": lease.expires_at,
        "seen_at": lease.seen_at,
        "remaining": round(lease.time_remaining(), 3),
        "renewed_ago": round(_renewed_ago(lease), 3),
        "late": is_late(lease),
        "transitions": lease.transitions,
        "metadata": lease.metadata,
    }


def state(lease: Lease) -> str:
    """Return `held` or `free`, in one word."""
    return "free" if lease.is_expired() else "held"


def is_late(lease: Lease) -> bool:
    """Tell whether a hold has gone without a renewal for longer than its holder, were all well, would let it.

    A holder renews at least three times in its ttl. One that renews nothing (`heartbeat=False`, a task lock) looks the
    same; so this is a hint for people, and no licence to take over.
    """
    ttl = (lease.expires_at - lease.heartbeat_at).total_seconds()
    return not lease.is_expired() and _renewed_ago(lease) > ttl / 2


def _renewed_ago(lease: Lease) -> float:
    return (lease.seen_at - lease.heartbeat_at).total_seconds()


def table(leases: Iterable[Lease]) -> None:
    """Print one line a lease."""
    rows = [("NAME", "STATE", "HOLDER", "TOKEN", "SINCE", "RENEWED", "LEFT")]
    for lease in leases:
        ended = lease.is_expired()
        since = "-" if ended else duration((lease.seen_at - lease.acquired_at).total_seconds())
        left = "-" if ended else duration(lease.time_remaining())
        renewed = "-" if ended else duration(_renewed_ago(lease)) + (" (late)" if is_late(lease) else "")
        token = str(lease.fencing_token)
        rows.append((visible(lease.name), state(lease), visible(lease.owner_id), token, since, renewed, left))
    columns(rows)


def details(lease: Lease, queue: Sequence[str] | None = None) -> None:
    """Print everything the store says about one name."""
    rows = [
        ("name", visible(lease.name)),
        ("state", state(lease) if lease.is_expired() else f"held for another {duration(lease.time_remaining())}"),
        ("holder" if not lease.is_expired() else "last holder", visible(lease.owner_id)),
        ("fencing token", str(lease.fencing_token)),
        ("acquired at", f"{lease.acquired_at:%Y-%m-%d %H:%M:%S %Z}"),
        ("renewed at", f"{lease.heartbeat_at:%Y-%m-%d %H:%M:%S %Z}, {_renewal(lease)}"),
        ("expires at" if not lease.is_expired() else "ended at", f"{lease.expires_at:%Y-%m-%d %H:%M:%S %Z}"),
        ("transitions", str(lease.transitions)),
    ]
    if queue is not None:
        rows.append(("queue", ", ".join(map(visible, queue)) or "nobody"))
    if lease.metadata:
        rows.append(("metadata", visible(json.dumps(dict(lease.metadata), ensure_ascii=False))))
    columns(rows)


def _renewal(lease: Lease) -> str:
    ago = f"{duration(_renewed_ago(lease))} ago"
    if lease.is_expired():
        return ago
    return f"{ago}: late, or a hold that is not renewed" if is_late(lease) else f"{ago}: in time"


def columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def never_choke() -> None:
    """Write what the terminal's encoding lacks as an escape instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
