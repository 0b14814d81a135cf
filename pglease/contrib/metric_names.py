"""What stands for a lease's name in a label: few values, however many leases there are. Pure text."""

from __future__ import annotations


def stem(name: str) -> str:
    """Return the part of a name before its first `:`, and all of it where there is none.

    `webhook:4711` and `webhook:4712` are two leases and one time series.
    """
    return name.partition(":")[0] or name
