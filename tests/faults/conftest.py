"""Faults are injected with the tools of the attacks."""

from __future__ import annotations

from tests.attacks.conftest import child, client, leases, rival

__all__ = ["child", "client", "leases", "rival"]
