"""What SQLite and its file seldom do."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pglease.backends import sqlite_errors, sqlite_file, sqlite_host, sqlite_turn
from pglease.backends.sqlite import SQLiteBackend
from pglease.backends.sqlite_errors import CANNOT_OPEN, READ_ONLY, TablesChanged, translated
from pglease.backends.sqlite_file import Moved
from pglease.backends.sqlite_guard import SQLiteGuard
from pglease.errors import BackendError, BackendMisconfigured, BackendUnavailable, ConfigurationError
from pglease.records import Claim, InTheWay, Refused, Request
from pglease.testing.harness import Worker, budget, new_id


def said(text: str, code: int = 1) -> sqlite3.Error:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with closing(SQLiteBackend(tmp_path / "leases.db")) as made:
        yield made


# -- what it says ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (said("attempt to write a readonly database", READ_ONLY), BackendMisconfigured, "cannot be written"),
        (said("no such table: leases"), TablesChanged, "no such table"),
        (said("near SELECT: syntax error"), BackendMisconfigured, "syntax error"),
    ],
)
def test_what_its_errors_mean(tmp_path: Path, error: sqlite3.Error, kind: type[Exception], text: str) -> None:
    ours = translated(error, tmp_path / "leases.db")

    assert type(ours) is kind
    assert text in str(ours)


def test_a_file_that_cannot_be_opened_says_why_as_far_as_can_be_seen(tmp_path: Path, monkeypatch: Any) -> None:
    error = said("unable to open database file", CANNOT_OPEN)

    assert "does not exist: make it first" in str(translated(error, tmp_path / "nowhere" / "leases.db"))
    monkeypatch.setattr(sqlite_errors.os, "access", lambda *_: False)
    assert "this user needs access" in str(translated(error, tmp_path / "leases.db"))
    monkeypatch.setattr(sqlite_errors.os, "access", lambda *_: True)
    assert isinstance(translated(error, tmp_path / "leases.db"), BackendUnavailable)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (said("attempt to write a readonly database", READ_ONLY), ConfigurationError, "may not write"),
        (said("no such table: main.pglease_leases"), ConfigurationError, "is not there"),
        (said("disk is on fire"), BackendError, "disk is on fire"),
    ],
)
def test_what_a_guard_that_could_not_be_asked_says(
    store: Any, error: sqlite3.Error, kind: type[Exception], text: str
) -> None:
    guard: Any = object.__new__(SQLiteGuard)
    guard._claim, guard._file = Claim("job", new_id(), 1), store._file

    ours = guard._explained(error)

    assert isinstance(ours, kind)
    assert text in str(ours)


@pytest.mark.parametrize("error", [None, KeyError()])
def test_a_block_whose_transaction_is_over_is_not_guarded_again(error: Any) -> None:
    guard: Any = object.__new__(SQLiteGuard)
    guard._caller = SimpleNamespace(driver=SimpleNamespace(in_transaction=False))
    guard._prove = lambda: pytest.fail("there is nothing to be proved")

    guard.__exit__(type(error), error, None)


def test_a_cancelled_block_is_left_at_once() -> None:
    guard: Any = object.__new__(SQLiteGuard)
    guard._caller = SimpleNamespace(driver=SimpleNamespace(in_transaction=True))
    guard._prove = lambda: pytest.fail("a cancellation waits for nobody")

    guard.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_that_moves_under_every_try_is_given_up(store: Any) -> None:
    tries: list[int] = []

    def moved(_: Any) -> Any:
        tries.append(1)
        raise Moved("it was replaced")

    with pytest.raises(Moved):
        store._file.read(moved, budget())

    assert len(tries) == 2


def test_a_file_that_was_replaced_while_it_was_opened_is_not_used(store: Any) -> None:
    Worker(store, "alice").hold("job")

    assert store._file._identity_of_one(None) == store._file._identity_of_one(store._file._identity_now())
    with pytest.raises(Moved, match="while it was opened"):
        store._file._identity_of_one("another")
    os.unlink(store._file.path)  # noqa: PTH108
    with pytest.raises(Moved, match="while it was opened"):
        store._file._identity_of_one(None)


def test_a_file_that_is_gone_is_mourned_once(store: Any, caplog: Any) -> None:
    link = SimpleNamespace(identity=("another", "file"))

    for _ in range(2):
        with pytest.raises(Moved):
            store._file._refuse_moved(link)

    assert caplog.text.count("the holds that were in it are lost") == 1


def test_a_file_system_without_a_write_ahead_log_is_refused(store: Any, monkeypatch: Any) -> None:
    class Answer(list[Any]):
        def fetchone(self) -> Any:
            return tuple(self)

    def execute(statement: str) -> Answer:
        return Answer([0] if "count" in statement else ["delete"])

    monkeypatch.setattr(sqlite_file, "_journal_mode", lambda _: "delete")

    with pytest.raises(BackendMisconfigured, match="cannot use its write-ahead log"):
        store._file._settle(SimpleNamespace(execute=execute))


def test_a_connection_is_its_parents_and_is_not_closed_in_a_forked_child(store: Any, monkeypatch: Any) -> None:
    Worker(store, "alice").hold("job")
    buried: list[Any] = []
    monkeypatch.setattr(sqlite_file.forks, "bury", buried.append)
    connection = store._file.writer._connection

    store._file.writer.forget()
    store._file.writer.forget()

    assert buried == [connection]
    connection.close()


def test_a_listener_of_a_backend_that_is_closed_meanwhile_is_closed(store: Any, monkeypatch: Any) -> None:
    listen = store._pipes.listen

    def listen_late() -> Any:
        listener = listen()
        store.close()
        return listener

    monkeypatch.setattr(store._pipes, "listen", listen_late)

    assert store.listen(budget()).closed


def test_a_forked_child_forgets_its_parents_listeners(store: Any) -> None:
    forgotten: list[int] = []
    store._listeners.append(SimpleNamespace(forget=lambda: forgotten.append(1)))

    store.forget()

    assert (forgotten, store._listeners) == ([1], [])


def test_nothing_to_tell_is_told_nobody(store: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(store._pipes, "_found", lambda: pytest.fail("nobody is to be looked for"))

    store._pipes.announce([])


def test_of_several_names_one_that_is_taken_between_the_look_and_the_lock_is_in_the_way() -> None:
    refused = Refused(None, 3.0, "first")
    free, taken = (Request(name, "me", new_id(), 60.0) for name in ("free", "taken"))
    turn: Any = SimpleNamespace(
        judged=lambda name: SimpleNamespace(answer=lambda _: refused if name == "taken" else None),
        do=lambda *_: pytest.fail("all or nothing"),
    )

    assert sqlite_turn.take_all(turn, [free, taken]) == InTheWay("taken", refused)


# -- the host ----------------------------------------------------------------------------------------------------------


def test_a_mac_is_asked_by_its_own_commands(monkeypatch: Any) -> None:
    def run(argv: list[str], **_: Any) -> Any:
        said = {"/usr/sbin/sysctl": "A-B-C\n", "/sbin/mount": "/dev/disk1 on / (apfs, local)\n"}[argv[0]]
        return subprocess.CompletedProcess(argv, 0, said, "")

    monkeypatch.setattr(sqlite_host.sys, "platform", "darwin")
    monkeypatch.setattr(sqlite_host.subprocess, "run", run)

    assert sqlite_host._boot_id() == "a-b-c"
    assert sqlite_host._mounts() == [("/", "apfs")]
