"""One thing that a doctor looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was seen, and what to do about it.

    Attributes:
        name: what was looked at.
        status: `ok`, `warn` (leases are kept, but something is worse than it could be) or `fail` (they are not).
        text: what was seen.
        remedy: what to do; empty when there is nothing to do.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""
