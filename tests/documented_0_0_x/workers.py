"""Workers that run what the README of 0.0.3 shows, word for word; only addresses are replaced."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from pglease import PGLease

ADDRESSES = ("postgresql://user:pass@localhost/db", "postgresql://user:pass@host/db")


class Worker:
    """One pod of an application, as far as its code is concerned: a module's namespace of its own.

    Attributes:
        names: the namespace.
        did: what its functions were called for, in order.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.names: dict[str, Any] = {}
        self.did: list[Any] = []
        self._clients: list[PGLease] = []

    @property
    def pglease(self) -> PGLease:
        """The client, as all snippets call it."""
        client: PGLease = self.names["pglease"]
        return client

    def start(self, **arguments: Any) -> Worker:
        """Have the client that most snippets take for granted."""
        self.names["pglease"] = PGLease(self.dsn, **arguments)
        return self

    def can(self, *functions: str, meanwhile: Callable[[], object] = lambda: None) -> Worker:
        """Define functions that the snippets call: each notes its name, then does `meanwhile`."""

        def define(name: str) -> Callable[..., None]:
            def function(*_: object) -> None:
                self.did.append(name)
                meanwhile()

            return function

        self.names.update((name, define(name)) for name in functions)
        return self

    def run(self, snippet: str, *, instead: dict[str, str] | None = None) -> Worker:
        """Run a snippet in the namespace.

        Args:
            instead: what to read in place of something else, where the README's own would take minutes.
        """
        text = textwrap.dedent(snippet)
        for old, new in {**dict.fromkeys(ADDRESSES, self.dsn), **(instead or {})}.items():
            assert old in text or old in ADDRESSES, f"{old!r} is not in the snippet"
            text = text.replace(old, new)
        try:
            exec(compile(text, "<README 0.0.3>", "exec"), self.names)
        finally:
            client = self.names.get("pglease")
            if isinstance(client, PGLease) and client not in self._clients:
                self._clients.append(client)
        return self

    def stop(self) -> None:
        """End: close its clients."""
        for client in {id(each): each for each in [*self._clients, self.names.get("pglease")] if each}.values():
            client.close()
