"""What a lease is called in Kubernetes: any text becomes a legal object name, and no two become the same.

The slug is for people who read `kubectl get leases`; the digest is what tells names apart. The name itself is kept in
an annotation, and compared whenever the object is read.
"""

from __future__ import annotations

import base64
import hashlib
import re

from pglease.errors import ConfigurationError

FLOOR = "pglease-floor"
"""The object that holds the floor of the tokens. No lease's name: those end in 52 characters of digest."""
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
_SLUG = 40


def object_name(name: str) -> str:
    """Return the name of the Lease object for a lease: `pglease-<slug>-<digest>`, at most 101 characters."""
    slug = re.sub("[^a-z0-9]+", "-", name.lower())[:_SLUG].strip("-")
    digest = base64.b32encode(hashlib.sha256(name.encode()).digest()).decode().rstrip("=").lower()
    return "-".join(filter(None, ("pglease", slug, digest)))


def checked_namespace(namespace: str) -> str:
    """Return a namespace as it is.

    Raises:
        ConfigurationError: Kubernetes has no such namespaces.
    """
    if not _NAMESPACE.match(namespace):
        raise ConfigurationError(
            f"a Kubernetes namespace must be 1 to 63 of a-z, 0-9 and inner hyphens, not {namespace!r}"
        )
    return namespace
