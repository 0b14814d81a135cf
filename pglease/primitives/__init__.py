"""The primitives: locks, elections and their like, all of them leases on the one contract."""

from __future__ import annotations
