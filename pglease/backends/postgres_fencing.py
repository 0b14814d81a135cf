"""What a caller gets from `guard`: the proof, made, and as a block made once more where it was undone meanwhile."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Literal, Self

from pglease.backends import postgres_guard
from pglease.backends.paramstyles import Statement
from pglease.backends.postgres_callers import OPEN, Caller, caller_of, refuse_unfit
from pglease.backends.postgres_guard import Place
from pglease.errors import BackendError, ConfigurationError, PgleaseError
from pglease.records import Claim

Manner = Literal["at once", "patiently", "again"]
"""How a hold is proved: if its row can be locked at once; waiting for that; the same, if its guard was undone."""
FIRST: tuple[Manner, ...] = ("at once", "patiently")
AGAIN: tuple[Manner, ...] = ("again",)
_MOST = 256
"""Statements that are kept written."""


class Whereabouts:
    """Where one backend's leases are, looked for when somebody first asks, and again once a guard was not at home.

    Args:
        look: looks, on a connection of our own.
    """

    def __init__(self, look: Callable[[], Place]) -> None:
        self._look = look
        self.known: Place | None = None
        self._statements: dict[tuple[float, Manner], Statement] = {}

    def find(self) -> Place:
        """Return it; the first time in this process, ask."""
        place = self.known
        if place is None:
            place = self.known = self._look()
        return place

    def statement(self, idle: float, manner: Manner) -> Statement:
        """Return the guarding statement for it, written once for each length of idling."""
        known = self._statements.get((idle, manner))
        if known is None:
            known = Statement(self._written(idle, manner))
            if len(self._statements) >= _MOST:  # each lease has a ttl of its own, it seems
                self._statements = {}
            self._statements[idle, manner] = known
        return known

    def _written(self, idle: float, manner: Manner) -> str:
        if manner == "at once":
            return postgres_guard.guard(self.find(), idle)
        return postgres_guard.patient_guard(self.find(), idle, again=manner == "again")

    def forget(self) -> None:
        """Look again next time."""
        self.known, self._statements = None, {}


class _Proof:
    """What both kinds of guards are made of: a hold, a connection, and what is sent there."""

    __slots__ = ("_caller", "_claim", "_connection", "_idle", "_params", "_whereabouts")

    def __init__(self, claim: Claim, caller: Caller, connection: Any, whereabouts: Whereabouts, idle: float) -> None:
        self._caller = caller
        self._connection = connection
        self._claim = claim
        self._params = {"name": claim.name, "token": str(claim.fencing_token), "lease_id": claim.lease_id}
        self._whereabouts = whereabouts
        self._idle = idle

    def _explained(self, error: Exception) -> PgleaseError:
        """Return what a refusal means."""
        if isinstance(error, PgleaseError):
            return error
        ours = postgres_guard.refusal(error, self._claim)
        if isinstance(ours, ConfigurationError):
            self._whereabouts.forget()  # perhaps it is the lease that has moved
        return ours

    def _unanswered(self) -> PgleaseError:
        """Return the error for a patient answer that neither passes nor refuses, which no server gives."""
        return BackendError(f"the guard of {self._claim.name!r} was not answered: nothing is proved")

    def _is_needed_again(self, error: BaseException | None) -> bool:
        """Tell whether something could still be committed here that must not be.

        Not after an interruption or a cancellation, since that must not wait for the server.
        """
        return self._caller.state(self._connection) == OPEN and (error is None or isinstance(error, Exception))


class PostgresGuard(_Proof):
    """A guard on a synchronous connection: proved by whoever makes it."""

    __slots__ = ()

    def prove(self, manners: tuple[Manner, ...] = FIRST) -> None:
        """Ask the server, which refuses what is not current; in the next manner where it has no answer."""
        for manner in manners:
            statement = self._whereabouts.statement(self._idle, manner)
            try:
                row = self._caller.run(self._connection, statement, self._params)
            except Exception as error:
                raise self._explained(error) from error
            if row is not None:
                return
        raise self._unanswered()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_needed_again(error):
            try:
                self.prove(AGAIN)
            except PgleaseError as refused:
                _tell(refused, error)

    def __await__(self) -> Generator[Any, None, Self]:
        raise ConfigurationError("this connection is synchronous: nothing is to be awaited")

    async def __aenter__(self) -> Self:
        raise ConfigurationError("this connection is synchronous: `with`, not `async with`")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: it was not entered."""


class AsyncPostgresGuard(_Proof):
    """A guard on an asynchronous connection: proved when it is awaited or entered."""

    __slots__ = ("_proved",)

    def __init__(self, claim: Claim, caller: Caller, connection: Any, whereabouts: Whereabouts, idle: float) -> None:
        super().__init__(claim, caller, connection, whereabouts, idle)
        self._proved = False

    async def _prove(self, manners: tuple[Manner, ...] = FIRST) -> None:
        self._proved = True
        if self._whereabouts.known is None:
            await asyncio.to_thread(self._whereabouts.find)
        for manner in manners:
            statement = self._whereabouts.statement(self._idle, manner)
            try:
                row = await self._caller.run(self._connection, statement, self._params)
            except Exception as error:
                raise self._explained(error) from error
            if row is not None:
                return
        raise self._unanswered()

    async def _proven(self) -> Self:
        if not self._proved:
            await self._prove()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._proven().__await__()

    async def __aenter__(self) -> Self:
        return await self._proven()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_needed_again(error):
            try:
                await self._prove(AGAIN)
            except PgleaseError as refused:
                _tell(refused, error)

    def __enter__(self) -> Self:
        self._proved = True  # told already
        raise ConfigurationError("this connection is asynchronous: `async with`, not `with`")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: it was not entered."""

    def __del__(self) -> None:
        if not getattr(self, "_proved", True):
            warnings.warn(
                "a guard on an asynchronous connection was never awaited: nothing was guarded",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )


def guard(claim: Claim, connection: Any, whereabouts: Whereabouts, idle: float) -> PostgresGuard | AsyncPostgresGuard:
    """Prove a hold on a caller's connection, or return what proves it when awaited."""
    caller = caller_of(connection)
    if (state := caller.state(connection)) != OPEN:
        refuse_unfit(state)
    if caller.is_async:
        return AsyncPostgresGuard(claim, caller, connection, whereabouts, idle)
    proof = PostgresGuard(claim, caller, connection, whereabouts, idle)
    proof.prove()
    return proof


def _tell(refused: PgleaseError, error: BaseException | None) -> None:
    """Raise a refusal at the end of a block, unless the block has raised: then add it to that."""
    if error is None:
        raise refused
    error.add_note(f"pglease: {refused}")
