"""What redis-py's errors mean for us: worth retrying, misconfigured, or another node of a Cluster to ask.

redis-py takes the code off the errors it has a class for and leaves it on the others; servers before Redis 7 wrap the
error of a command inside a script in a sentence. So an error is read by its class first and by its words second.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable

from redis import exceptions

from pglease.errors import BackendError, BackendMisconfigured, BackendUnavailable

Node = tuple[str, int]

_NOT_APPLIED = (
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)
_NO_RIGHT = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
_PASSING = re.compile(r"\b(BUSY|MISCONF|NOREPLICAS|READONLY|OOM|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|UNKILLABLE)\b")
"""The server refused before anything was done, and may not do so for long: a full disk or memory, a script that runs,
a replica that is missing."""
_KILLED = "Script killed"


class Elsewhere(BackendUnavailable):
    """Another node of the Cluster has the slot, for good (`asking` False) or for this one request."""

    def __init__(self, slot: int, node: Node, *, asking: bool) -> None:
        super().__init__(f"slot {slot} of the Cluster is at {node[0]}:{node[1]}")
        self.slot = slot
        self.node = node
        self.asking = asking


class OutOfTime(BackendUnavailable):
    """The budget ended before anything was sent. An earlier trouble says more."""


class NotReplicated(BackendUnavailable):
    """Too few replicas have what was written. It has been waited for already: trying again at once is of no use."""


def translated(error: BaseException, scrub: Callable[[str], str], *, sent: bool) -> BackendError:
    """Return our error for one of redis-py's.

    Args:
        error: what was raised.
        scrub: takes secrets out of its text.
        sent: whether a request was on its way, so that it may have been applied.
    """
    text = scrub(str(error).strip() or type(error).__name__)
    if isinstance(error, exceptions.AskError):  # the parent of MovedError
        moved = isinstance(error, exceptions.MovedError)
        return Elsewhere(error.slot_id, (error.host, error.port), asking=not moved)
    if isinstance(error, _NO_RIGHT):
        return BackendMisconfigured(f"Redis refuses this user or password: {text}")
    if isinstance(error, _NOT_APPLIED) or (isinstance(error, exceptions.ResponseError) and _may_pass(text)):
        return BackendUnavailable(f"Redis: {text}")
    if isinstance(error, exceptions.ResponseError):
        return BackendMisconfigured(f"Redis refuses the request: {text}")
    if (distrust := _distrust(error)) is not None:
        return BackendMisconfigured(
            f"the certificate of Redis is not trusted: {distrust.verify_message}; name the authority that signed it in "
            "the address, as ?ssl_ca_certs=/path/to/ca.crt, and the host as the certificate does"
        )
    if isinstance(error, exceptions.RedisError | OSError):
        nobody = not sent and ("refused" in text or "Name or service not known" in text)
        to_do = " Look whether it runs, and whether the address is right." if nobody else ""
        return BackendUnavailable(f"Redis cannot be reached: {text}{to_do}", outcome_unknown=sent)
    return BackendMisconfigured(f"redis-py refused the request: {type(error).__name__}: {text}")


def _distrust(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return what was wrong with the server's certificate, which redis-py wraps: no second look makes it better."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _may_pass(text: str) -> bool:
    return _KILLED in text or _PASSING.search(text) is not None


def is_elsewhere(answer: object) -> bool:
    """Tell whether an answer is a redirection to another node of the Cluster."""
    return isinstance(answer, exceptions.AskError)  # the parent of MovedError


def is_answered(error: BaseException) -> bool:
    """Tell whether the server answered in full, so that the next answer belongs to the next request.

    A primary that was demoted answers too, but is to be left: only a new connection finds the present one.
    """
    demoted = isinstance(error, exceptions.ReadOnlyError) or "READONLY" in str(error)
    return isinstance(error, exceptions.ResponseError) and not demoted
