"""What those who wait hear: one watch of all leases of a namespace, continued where it ended.

Every change passes by, so a mark writes nothing here. What a change was is read off the new version alone: a hold that
was just begun, one that was given back, or a renewal, which nobody is told of. A watch that ends, is cut, or meets a
restarted server goes on from the last version it heard, and nothing is missed; only a server that no longer remembers
that version (410) ends the subscription.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from pglease import clock
from pglease.backends.base import Budget
from pglease.backends.kubernetes_api import Leases, said
from pglease.backends.kubernetes_http import Answer, Stream
from pglease.backends.kubernetes_objects import LABEL, NOTHING, Row, named_row
from pglease.errors import BackendClosed, BackendError, BackendMisconfigured, BackendUnavailable
from pglease.records import Change

WATCH_SECONDS = 50
"""Seconds after which the server ends a watch, to be continued: what is silent for longer is a dead link."""
_GRACE = 10.0
_AGAIN = 10.0
"""Seconds to reach the server again after a watch was cut."""


class Watch:
    """A subscription. See `Subscription` for the verbs.

    Args:
        leases: what to watch.
        saw: told of every version that passes by.
        budget: how long beginning may take.

    Raises:
        BackendUnavailable: it could not begin.
        BackendMisconfigured: we may not list or watch.
    """

    def __init__(self, leases: Leases, saw: Callable[[Row], object], budget: Budget) -> None:
        self._leases, self._saw = leases, saw
        self._heard: queue.SimpleQueue[Change | BackendError] = queue.SimpleQueue()
        self._over = threading.Event()
        self._version = leases.present_version(budget)
        self._stream = self._opened(budget)
        thread = threading.Thread(target=self._run, name="pglease-kubernetes-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._stream.close()
            raise BackendUnavailable(f"nothing can be heard: {error}") from None

    def next(self, seconds: float) -> Sequence[Change]:
        """See `Subscription.next`."""
        changes: list[Change] = []
        try:
            heard = self._heard.get(timeout=max(0.0, seconds))
            while isinstance(heard, Change):
                changes.append(heard)
                heard = self._heard.get_nowait()
        except queue.Empty:
            return changes
        self._heard.put(heard)  # for whoever asks again
        if changes:
            return changes
        raise heard

    @property
    def over(self) -> bool:
        """Whether it was closed or has ended."""
        return self._over.is_set()

    def close(self) -> None:
        """See `Subscription.close`."""
        self._over.set()
        self._stream.hang_up()
        self._heard.put(BackendClosed("this subscription was closed"))

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._listen()
                self._stream.close()
                if not self._over.is_set():
                    self._stream = self._continued()
        except BackendError as error:
            self._heard.put(error)
        except Exception as error:  # noqa: BLE001  # a thread of its own: whoever listens is told
            self._heard.put(BackendUnavailable(f"the watch of the leases ended: {error}"))
        finally:
            self._over.set()
            self._stream.close()

    def _continued(self) -> Stream:
        box = Budget.of(_AGAIN, clock.now)
        stream = self._leases.again(lambda: self._opened(box), box)
        if self._over.is_set():  # closed meanwhile, when this stream could not yet be hung up
            stream.hang_up()
        return stream

    def _listen(self) -> None:
        """Hear one stream to its end, which a cut connection brings as well as the server."""
        try:
            for line in self._stream.reply:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _ended(event["object"])
                self._hear(event["type"], event["object"])
        except (OSError, http.client.HTTPException, ValueError):
            return  # it is continued where it ended

    def _hear(self, kind: str, found: Mapping[str, Any]) -> None:
        self._version = found["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        try:
            row = named_row(found)
        except BackendMisconfigured:
            return  # looking says what is wrong with it
        if row is None:
            return
        if kind != "DELETED":
            self._saw(row)
        for change in _changes(kind, row):
            self._heard.put(change)

    def _opened(self, budget: Budget) -> Stream:
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": "=".join(LABEL),
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        stream = self._leases.stream(urlencode(query), budget)
        stream.listens_for(WATCH_SECONDS + _GRACE)
        return stream


def _changes(kind: str, row: Row) -> Iterator[Change]:
    """Tell what a version says that has just been written."""
    left = max(0.0, row.left(NOTHING).total_seconds())
    if kind == "DELETED":
        if left:  # by somebody who knows no better: the name is free
            yield Change(row.name, "released", 0.0)
    elif row.given_back:
        yield Change(row.name, "released", left)
    elif row.settled and row.renewed_after == NOTHING:
        yield Change(row.name, "granted", left)


def _ended(status: Mapping[str, Any]) -> BackendError:
    answer = Answer(int(status.get("code") or 0), status)
    return BackendUnavailable(f"the watch of the leases ended ({answer.status}): {said(answer)}")
