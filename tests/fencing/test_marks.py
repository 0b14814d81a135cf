"""`pglease.fencing`: the largest token seen for each resource, in PostgreSQL, in Valkey and in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import redis

from pglease import BackendMisconfigured, ConfigurationError
from pglease.fencing import MemoryMarks, RedisMarks, accept, accept_async, ddl
from pglease.testing.local_valkey import LocalValkey
from tests.fencing.kinds import Async, Session
from tests.support.worlds import all_at_once, execute

Accept = Callable[[str, int], bool]
EPOCH = 1 << 32


@pytest.fixture(scope="module")
def valkey() -> Iterator[LocalValkey]:
    with LocalValkey() as server:
        yield server


@pytest.fixture(params=["PostgreSQL", "Valkey", "memory"])
def asked(request: pytest.FixtureRequest, dsn: str) -> Iterator[Accept]:
    """Ask for one write, in a step of its own, from any thread."""
    if request.param == "memory":
        yield MemoryMarks().accept
    elif request.param == "Valkey":
        server: LocalValkey = request.getfixturevalue("valkey")
        client = redis.Redis(host=server.host, port=server.port)
        client.flushall()
        yield RedisMarks(client).accept
        client.close()
    else:
        execute(dsn, ddl())
        execute(dsn, "TRUNCATE pglease_fences")
        connections = threading.local()
        opened: list[psycopg.Connection] = []

        def ask(resource: str, token: int) -> bool:
            if not hasattr(connections, "mine"):
                connections.mine = psycopg.connect(dsn, autocommit=True)
                opened.append(connections.mine)
            return accept(connections.mine, resource, token)

        yield ask
        for each in opened:
            each.close()


def test_equal_and_larger_tokens_are_accepted_and_smaller_ones_are_not(asked: Accept) -> None:
    said = [asked("report", token) for token in (3, 3, 2, 4, 3, 4, 1)]

    assert said == [True, True, False, True, False, True, False]


def test_resources_are_independent(asked: Accept) -> None:
    assert asked("report", 9)

    assert asked("report ", 1)
    assert asked("Report", 1)
    assert not asked("report", 8)


@pytest.mark.parametrize(
    ("larger", "smaller"),
    [(10, 9), (EPOCH + 1, EPOCH), (2**53 + 1, 2**53), (2**63 - 1, 2**63 - 2), (7 * EPOCH + 2, 7 * EPOCH + 1)],
)
def test_tokens_are_compared_as_numbers_and_exactly(asked: Accept, larger: int, smaller: int) -> None:
    assert asked("report", larger)

    assert not asked("report", smaller)
    assert asked("report", larger)


def test_of_many_at_once_none_is_accepted_after_a_larger_one(asked: Accept) -> None:
    order: list[int] = []
    lock = threading.Lock()

    def write(place: int) -> None:
        for token in range(1 + place, 120, 8):
            with lock:  # what is noted must be in the order of the answers
                if asked("report", token):
                    order.append(token)

    all_at_once([lambda place=place: write(place) for place in range(8)])  # type: ignore[misc]

    assert order == sorted(order)
    assert not asked("report", max(order) - 1)


@pytest.mark.parametrize(
    ("resource", "token"),
    [("", 1), ("a\n", 1), ("x" * 256, 1), ("a", 0), ("a", -1), ("a", True), ("a", 1.0), ("a", 2**63)],
)
def test_what_is_no_resource_or_no_token_is_refused(asked: Accept, resource: str, token: Any) -> None:
    with pytest.raises(ConfigurationError):
        asked(resource, token)


# -- in PostgreSQL


def say(session: Session, token: int) -> bool:
    if isinstance(session, Async):
        return bool(session.run(accept_async(session.connection, "report", token)))
    return accept(session.connection, "report", token)


def test_every_kind_of_connection_is_asked_inside_its_transaction(session: Session, dsn: str) -> None:
    execute(dsn, ddl())
    execute(dsn, "TRUNCATE pglease_fences")

    session.begin()
    assert say(session, 5)
    session.rollback()
    session.begin()
    assert say(session, 4)  # the larger one stood and fell with its transaction
    session.write("mine")
    session.commit()
    session.begin()
    assert not say(session, 3)
    session.rollback()

    assert execute(dsn, "SELECT * FROM pglease_fences") == [("report", 4)]


def test_a_smaller_token_waits_for_a_larger_one_and_is_refused(dsn: str) -> None:
    execute(dsn, ddl())
    execute(dsn, "TRUNCATE pglease_fences")
    said: list[bool] = []
    with psycopg.connect(dsn) as newer, psycopg.connect(dsn) as older:
        assert accept(newer, "report", 2)
        thread = threading.Thread(target=lambda: said.append(accept(older, "report", 1)))
        thread.start()
        newer.commit()
        thread.join(20)

    assert said == [False]


def test_the_table_may_have_any_name_and_place(dsn: str) -> None:
    execute(dsn, 'CREATE SCHEMA IF NOT EXISTS "Odd"')
    execute(dsn, ddl("order", "Odd"))
    execute(dsn, ddl("order", "Odd"))

    with psycopg.connect(dsn) as connection:
        assert accept(connection, "report", 1, table="order", schema="Odd")


def test_a_missing_table_is_told_with_the_statement_that_makes_it(dsn: str) -> None:
    with psycopg.connect(dsn) as connection, pytest.raises(BackendMisconfigured, match="CREATE TABLE IF NOT EXISTS"):
        accept(connection, "report", 1, table="nowhere")


def test_a_connection_of_the_other_kind_is_told_so(dsn: str) -> None:
    async def mistaken() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as each:
            with pytest.raises(ConfigurationError, match="accept_async"):
                accept(each, "report", 1)
        with psycopg.connect(dsn) as each_, pytest.raises(ConfigurationError, match="asynchronous"):
            await accept_async(each_, "report", 1)

    asyncio.run(mistaken())
