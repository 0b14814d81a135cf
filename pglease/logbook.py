"""The log as an observer: constant messages, one level for each kind of news, facts in `extra`.

All is well: DEBUG. A long wait, and a skipped call, by whoever skips it: INFO. Not known: WARNING, for each lease once
in a while. Lost: ERROR. The keys of `extra` begin with `lease_`, since `name` is a word of `logging` itself.
"""

from __future__ import annotations

import logging
from typing import Any

from pglease import clock
from pglease.events import Event, EventKind, Waiting
from pglease.handles import WORDS

log = logging.getLogger("pglease")

WARN_EVERY = 10.0
"""Seconds between two warnings about one lease whose renewal is unknown."""
_REMEMBERED = 1024

LEVELS: dict[EventKind, int] = {
    "attempted": logging.DEBUG,
    "acquired": logging.DEBUG,
    "busy": logging.DEBUG,
    "waited": logging.DEBUG,
    "failed": logging.DEBUG,  # whoever asked is told by an error
    "waiting": logging.INFO,  # somebody has it, as it should be
    "renewed": logging.DEBUG,
    "unknown": logging.WARNING,
    "at_risk": logging.WARNING,
    "lost": logging.ERROR,
    "released": logging.DEBUG,
    "unconfirmed": logging.WARNING,
    "released_late": logging.DEBUG,
    "transferred": logging.DEBUG,
    "forced": logging.INFO,
}
"""At which level each kind is written, at most: some ends are of one's own making, and written at INFO."""
_TEXTS: dict[EventKind, str] = {
    "attempted": "the lease %(name)r is asked for",
    "acquired": "the lease %(name)r was acquired in %(seconds).3f s (token %(token)s)",
    "busy": "the lease %(name)r is held by %(owner)r",
    "waited": "the lease %(name)r was waited for in vain, for %(seconds).1f s: it is held by %(owner)r",
    "failed": "the lease %(name)r was asked for in vain: %(error)s",
    "waiting": "still waiting for the lease %(name)r after %(seconds).1f s: it is %(stands)s",
    "renewed": "the lease %(name)r was renewed",
    "unknown": "it is unknown whether the lease %(name)r was renewed, %(seconds).1f s are left: %(error)s",
    "at_risk": "the lease %(name)r ends in %(seconds).1f s unless it is renewed",
    "lost": "the lease %(name)r was lost: %(words)s",
    "released": "the lease %(name)r was released after %(seconds).1f s",
    "unconfirmed": "the release of the lease %(name)r could not be confirmed, it is tried again or lapses: %(error)s",
    "released_late": "the release of the lease %(name)r is confirmed now",
    "transferred": "the lease %(name)r was handed over",
    "forced": "the lease %(name)r was taken from its holder (token %(token)s)",
}


class Logbook:
    """Writes events to the logger `pglease`. Every client has one."""

    def __init__(self) -> None:
        self._warned: dict[str, float] = {}

    def __repr__(self) -> str:
        return "<the log>"

    def notify(self, event: Event) -> None:
        """Write one event."""
        if event.kind == "unknown" and self._has_warned(event):
            return
        log.log(_level(event), _TEXTS[event.kind], _words(event), extra=facts(event))

    def _has_warned(self, event: Event) -> bool:
        if event.at - self._warned.get(event.name, float("-inf")) < WARN_EVERY:
            return True
        if len(self._warned) >= _REMEMBERED:
            now = clock.now()
            self._warned = {name: at for name, at in self._warned.items() if now - at < WARN_EVERY}
        self._warned[event.name] = event.at
        return False


def facts(event: Event) -> dict[str, Any]:
    """Return what is known about an event, for `extra`."""
    found: dict[str, Any] = {"lease_name": event.name, "lease_outcome": event.reason or event.kind}
    if event.owner_id is not None:
        found["lease_owner"] = event.owner_id
    if event.fencing_token is not None:
        found["lease_token"] = event.fencing_token
    if event.waiting is not None:
        found["lease_waited"] = event.waiting.seconds
    return found


def _level(event: Event) -> int:
    if event.reason == "closed" or (event.kind == "unconfirmed" and event.error is None):
        return logging.INFO  # an end of one's own making; a handle that nobody waits with
    return LEVELS[event.kind]


def _words(event: Event) -> dict[str, Any]:
    """Return what the texts are filled with."""
    return {
        "name": event.name,
        "owner": event.owner_id,
        "token": event.fencing_token,
        "seconds": event.seconds or 0.0,
        "error": event.error or "nobody waited for it",
        "words": WORDS.get(event.reason or "", ""),  # type: ignore[call-overload]
        "stands": _told(event.waiting) if event.waiting else "",
    }


def _told(stands: Waiting) -> str:
    lease = stands.lease
    if lease is not None:
        holder = (
            f"held by {lease.owner_id!r} since {lease.acquired_at:%Y-%m-%d %H:%M:%S} UTC until at least "
            f"{lease.expires_at:%H:%M:%S} ({lease.time_remaining():.1f} s left when it was seen)"
        )
    elif stands.reserved_for is not None:
        holder = f"reserved for {stands.reserved_for!r}, who waits first"
    else:
        holder = "held by somebody the store could not name"
    return holder + ("" if stands.place is None else f"; {stands.place.ahead} ahead in the queue")
