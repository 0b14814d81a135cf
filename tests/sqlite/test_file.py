"""The lease file: what is refused, what is noticed, and that nothing of others is touched."""

from __future__ import annotations

import functools
import logging
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest

from pglease.backends import sqlite_file, sqlite_host, sqlite_turn
from pglease.backends.sqlite import SQLiteBackend
from pglease.errors import BackendMisconfigured, BackendUnavailable, ConfigurationError
from pglease.records import Gone, Granted
from pglease.testing.harness import Worker, budget
from tests.support.sqlite_files import plain


def test_nothing_is_made_before_the_first_use(path, alice) -> None:
    assert not path.exists()

    assert alice.names() == []

    assert path.exists()


def test_a_relative_path_is_where_it_was_when_it_was_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(SQLiteBackend("leases.db")) as backend:
        monkeypatch.chdir("/")

        backend.get("job", budget())

    assert (tmp_path / "leases.db").exists()


@pytest.mark.parametrize("path", ["", "  ", None, 7, b"leases.db", "a\0b", ":memory:", "file:leases.db?mode=ro"])
def test_what_is_no_path_is_refused_at_once(path) -> None:
    with pytest.raises(ConfigurationError, match="path must be the name of a file"):
        SQLiteBackend(path)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        SQLiteBackend("", table_name="a.b", auto_initialize="yes")

    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("name", ["a b%20c?d#e.db", 'leases\' "x".db', "grüße 🌙.db", "-db"])
def test_any_name_of_a_file_will_do(tmp_path, name) -> None:
    with closing(SQLiteBackend(tmp_path / name)) as backend:
        backend.get("job", budget())

    assert [found.name for found in tmp_path.iterdir()] == [name]


def test_two_tables_of_one_file_know_nothing_of_each_other(worker) -> None:
    worker("alice").hold("job")

    assert worker("bob", table_name="others").hold("job").token == 1


def test_a_missing_file_is_not_made_when_that_is_switched_off(path, worker) -> None:
    with pytest.raises(BackendMisconfigured, match="no lease file"):
        worker(auto_initialize=False).names()

    assert not path.exists()


def test_a_missing_table_is_not_made_when_that_is_switched_off(path, worker, alice) -> None:
    alice.names()

    with pytest.raises(BackendMisconfigured, match="no table others"):
        worker(auto_initialize=False, table_name="others").names()
    assert worker("bob", auto_initialize=False).names() == []


def test_tables_that_somebody_makes_while_we_look_are_ours_all_the_same(alice, bob, monkeypatch) -> None:
    real = sqlite_file._columns

    def meanwhile(connection, table):
        found = real(connection, table)
        monkeypatch.undo()
        bob.names()
        return found

    monkeypatch.setattr(sqlite_file, "_columns", meanwhile)

    alice.hold("job")
    bob.is_refused("job")


# -- what is not ours --------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(path, alice) -> None:
    path.write_text("dear diary, " * 500)

    with pytest.raises(BackendMisconfigured, match="is no SQLite file"):
        alice.hold("job")

    assert path.read_text() == "dear diary, " * 500


@pytest.mark.parametrize("name", ["pglease_leases", "pglease_leases_meta"])
def test_a_table_that_only_bears_our_name_is_refused_and_left_as_it_is(path, alice, name) -> None:
    with plain(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"CREATE TABLE {name} (id INTEGER, body TEXT)")

    with pytest.raises(BackendMisconfigured, match="not of this pglease"):
        alice.hold("job")

    with plain(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [(name,)]


def test_somebodys_database_keeps_its_journal_mode(path, alice) -> None:
    with plain(path) as connection:
        connection.execute("CREATE TABLE theirs (id INTEGER)")

    with pytest.raises(BackendMisconfigured, match="journal mode 'delete'"):
        alice.hold("job")

    with plain(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


class Meanwhile(sqlite3.Connection):
    """A connection after whose first look at the journal mode something happens."""

    happens: ClassVar[Callable[[], object] | None] = None

    def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
        """Run a statement, and let it happen."""
        rows = super().execute(sql, *rest)
        happens = Meanwhile.happens
        if happens is not None and sql == "PRAGMA journal_mode":
            found, Meanwhile.happens = rows.fetchall(), None
            assert found == [("delete",)]
            happens()
            return super().execute("SELECT 'delete'")
        return rows


def test_a_file_that_somebody_else_makes_while_it_is_opened_is_ours_too(path, alice, bob, monkeypatch) -> None:
    connect = functools.partial(sqlite3.connect, factory=Meanwhile)
    monkeypatch.setattr("pglease.backends.sqlite_file.sqlite3.connect", connect)
    monkeypatch.setattr(Meanwhile, "happens", lambda: bob.hold("theirs"))

    alice.hold("ours")

    assert Meanwhile.happens is None
    assert alice.names() == ["ours", "theirs"]


def test_our_tables_may_stand_in_an_applications_own_file(path, alice) -> None:
    with plain(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE theirs (id INTEGER)")

    alice.hold("job")

    with plain(path) as connection:
        assert connection.execute("SELECT count(*) FROM theirs").fetchone() == (0,)


def test_a_file_of_another_protocol_is_refused(path, alice, bob) -> None:
    alice.hold("job")
    with plain(path) as connection:
        connection.execute("UPDATE pglease_leases_meta SET protocol = 99")

    with pytest.raises(BackendMisconfigured, match="protocol"):
        bob.hold("job")


def test_a_file_without_its_mark_is_refused(path, alice) -> None:
    alice.hold("job")
    with plain(path) as connection:
        connection.execute("DELETE FROM pglease_leases_meta")

    for act in (lambda: alice.sees("job"), lambda: alice.hold("other"), alice.cleanup, alice.names):
        with pytest.raises(BackendMisconfigured, match="mark"):
            act()


def test_a_table_that_was_dropped_is_made_again(path, alice) -> None:
    hold = alice.hold("job")
    with plain(path) as connection:
        connection.executescript(
            "DROP TABLE pglease_leases; DROP TABLE pglease_leases_meta; DROP TABLE pglease_leases_queue"
        )

    assert hold.renew() == Gone("deleted")
    alice.hold("job")


@pytest.mark.parametrize(
    "column", ["fencing_token = 'x'", "fencing_token = 0", "expires_ns = 1e300", "acquired_ns = 'soon'"]
)
def test_what_is_no_number_cannot_be_written_by_hand(path, alice, column) -> None:
    alice.hold("job")

    with plain(path) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute(f"UPDATE pglease_leases SET {column}")


@pytest.mark.parametrize("metadata", ["[1]", "nonsense", "", "\x00"])
def test_metadata_written_by_hand_is_read_as_none(path, alice, metadata) -> None:
    alice.hold("job")
    with plain(path) as connection:
        connection.execute("UPDATE pglease_leases SET metadata = ?", (metadata,))

    assert dict(alice.sees("job").metadata) == {}


def test_times_beyond_the_calendar_can_be_read(path, alice) -> None:
    alice.hold("job")
    with plain(path) as connection:
        connection.execute("UPDATE pglease_leases SET expires_ns = ?, acquired_ns = ?", (2**63 - 1, -(2**63)))

    assert alice.sees("job").expires_at.year > 2200
    alice.is_refused("job")


def test_the_last_token_has_no_successor_and_does_not_wrap(path, alice) -> None:
    alice.hold("job").released()
    with plain(path) as connection:
        connection.execute("UPDATE pglease_leases SET fencing_token = ?", (2**63 - 1,))

    with pytest.raises(BackendMisconfigured, match="no successor"):
        alice.ask("job")

    assert alice.sees("job").fencing_token == 2**63 - 1


# -- files that go -----------------------------------------------------------------------------------------------------


def test_a_deleted_file_is_noticed_and_its_holds_are_lost(path, alice, bob, caplog) -> None:
    hold, other = alice.hold("job"), bob.hold("other")
    path.unlink()

    assert hold.renew() == Gone("deleted")
    assert other.renew() == Gone("deleted")
    assert bob.hold("job").token == 1
    alice.is_refused("job")
    warned = [record for record in caplog.records if "deleted or replaced" in record.message]
    assert [record.levelno for record in warned] == [logging.WARNING] * 2  # one for each client


def test_a_replaced_file_is_noticed(path, tmp_path, alice, bob) -> None:
    with closing(SQLiteBackend(tmp_path / "twin.db")) as twin:
        twin.get("job", budget())
    hold = alice.hold("job")
    for beside in ("-wal", "-shm"):
        path.with_name(path.name + beside).unlink()
    (tmp_path / "twin.db").replace(path)

    assert hold.renew() == Gone("deleted")
    assert bob.names() == []
    bob.hold("job")
    alice.is_refused("job")


def test_a_file_that_is_replaced_between_the_lock_and_the_grant_grants_nothing(path, alice, bob, monkeypatch) -> None:
    alice.names()
    real = sqlite_turn.take

    def replaced_meanwhile(turn, request):
        monkeypatch.undo()
        path.unlink()
        bob.hold("job")
        return real(turn, request)

    monkeypatch.setattr(sqlite_turn, "take", replaced_meanwhile)

    assert not isinstance(alice.ask("job"), Granted)
    assert bob.sees("job").owner_id == "bob"


def test_a_file_with_two_names_is_refused(path, tmp_path, alice, worker) -> None:
    alice.names()
    os.link(path, tmp_path / "alias.db")

    with pytest.raises(BackendMisconfigured, match="hard links"):
        worker("bob").names()


def test_a_symbolic_link_leads_to_the_same_leases(path, tmp_path, alice) -> None:
    alice.hold("job")
    (tmp_path / "alias.db").symlink_to(path)

    with closing(SQLiteBackend(tmp_path / "alias.db")) as other:
        lease = other.get("job", budget())

    assert lease is not None
    assert lease.owner_id == "alice"


def test_a_missing_directory_is_named(tmp_path) -> None:
    with (
        closing(SQLiteBackend(tmp_path / "no" / "leases.db")) as backend,
        pytest.raises(BackendMisconfigured) as caught,
    ):
        backend.get("job", budget())

    assert f"directory {tmp_path / 'no'}" in str(caught.value)


def test_a_directory_is_no_file(tmp_path) -> None:
    with closing(SQLiteBackend(tmp_path)) as backend, pytest.raises(BackendMisconfigured, match="no regular file"):
        backend.get("job", budget())


# -- places where nothing can be written -------------------------------------------------------------------------------

AS_NOBODY = """
import os, sys
from pglease.backends.sqlite import SQLiteBackend
from pglease.backends import sqlite_errors, sqlite_file, sqlite_host, sqlite_sql
from pglease.errors import BackendError
from pglease.testing.harness import Worker
import encodings.ascii, encodings.idna
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
worker = Worker(SQLiteBackend(sys.argv[1]), "nobody")
for act in (lambda: worker.sees("job").owner_id, lambda: worker.ask("job").held_by, lambda: worker.hold("other").token):
    try:
        print("ok", act())
    except BackendError as error:
        print(type(error).__name__, error)
"""


def as_nobody(path: Path) -> list[str]:
    """Look, be refused, and take, as a user without rights on the file; what came of each."""
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody may enter; pytest's own are this user's alone."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def kept_open(public: Path) -> Iterator[Path]:
    """A file with one hold, in whose directory SQLite's other two files are."""
    with closing(SQLiteBackend(public / "leases.db")) as backend:
        Worker(backend, "alice").hold("job")
        yield public / "leases.db"


def test_a_read_only_file_can_be_looked_at_and_not_be_written(kept_open) -> None:
    kept_open.chmod(0o444)
    for beside in ("-wal", "-shm"):
        kept_open.with_name(kept_open.name + beside).chmod(0o444)

    looked, refused, took = as_nobody(kept_open)

    assert (looked, refused) == ("ok alice", "ok alice")
    assert took.startswith("BackendMisconfigured")
    assert "write access" in took


def test_a_file_nobody_may_read_says_so(kept_open) -> None:
    kept_open.chmod(0o600)

    if os.geteuid() == 0:  # else it is our own file all the same
        for answer in as_nobody(kept_open):
            assert answer.startswith("BackendMisconfigured")
            assert "access" in answer


def test_a_read_only_directory_says_so(public) -> None:
    public.chmod(0o555)

    for answer in as_nobody(public / "leases.db"):
        assert answer.startswith("BackendMisconfigured")
        assert "directory" in answer


def test_a_file_that_may_not_grow_is_trouble_that_passes(path, alice, bob) -> None:
    """As on a full disk or beyond a quota: nothing is granted, nothing is broken, and afterwards all goes on."""
    hold = alice.hold("job")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        with pytest.raises(BackendUnavailable):
            for number in range(200):
                bob.hold(f"job-{number}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)

    hold.renewed()
    bob.hold("another")
    with plain(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.needs("root", "linux")
def test_a_full_disk_is_trouble_that_passes(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], check=True)
    try:
        with closing(SQLiteBackend(disk / "leases.db")) as backend:
            alice = Worker(backend, "alice")
            hold = alice.hold("job")
            with pytest.raises(OSError, match="space"), (disk / "ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(4096))

            with pytest.raises(BackendUnavailable, match="full"):
                for number in range(200):
                    alice.hold(f"job-{number}")
            assert alice.sees("job").owner_id == "alice"
            (disk / "ballast").unlink()

            hold.renewed()
            alice.hold("another")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# -- file systems ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "virtiofs", "fuse.sshfs", "fuse.glusterfs"])
def test_a_file_system_that_hosts_share_is_refused(path, alice, monkeypatch, kind) -> None:
    monkeypatch.setattr(sqlite_host, "_mounts", lambda: [("/", "ext4"), (str(path.parent), kind)])

    with pytest.raises(BackendMisconfigured, match=f"type {kind}"):
        alice.hold("job")

    assert not path.exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "apfs", "fuse.mergerfs", "fuseblk"])
def test_a_file_system_of_one_host_will_do(path, alice, monkeypatch, kind) -> None:
    monkeypatch.setattr(sqlite_host, "_mounts", lambda: [("/", "nfs"), (str(path.parent), kind)])

    alice.hold("job")


def test_of_two_mounts_on_one_place_the_later_one_counts(path, monkeypatch) -> None:
    monkeypatch.setattr(sqlite_host, "_mounts", lambda: [("/", "nfs"), ("/", "ext4")])

    assert sqlite_host.shared_file_system(path.parent) is None


def test_a_mount_point_is_no_beginning_of_a_name(monkeypatch) -> None:
    monkeypatch.setattr(sqlite_host, "_mounts", lambda: [("/", "ext4"), ("/mnt", "nfs")])

    assert sqlite_host.shared_file_system(Path("/mnt")) == "nfs"
    assert sqlite_host.shared_file_system(Path("/mnt/a")) == "nfs"
    assert sqlite_host.shared_file_system(Path("/mntx")) is None


def test_mounts_are_read_as_linux_tells_them() -> None:
    told = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "36 22 0:31 / /mnt/a\\040b rw,noatime shared:7 master:3 - nfs4 host:/export rw,vers=4.2\n"
    )

    assert sqlite_host.mounts_of_linux(told) == [("/", "ext4"), ("/mnt/a b", "nfs4")]


def test_mounts_are_read_as_macos_tells_them() -> None:
    told = (
        "/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)\n"
        "//me@server/share on /Volumes/share (smbfs, nodev, nosuid, mounted by me)\n"
        "map auto_home on /System/Volumes/Data/home (autofs, automounted, nobrowse)\n"
    )

    assert sqlite_host.mounts_of_macos(told) == [
        ("/", "apfs"),
        ("/Volumes/share", "smbfs"),
        ("/System/Volumes/Data/home", "autofs"),
    ]


def test_where_nothing_is_told_nothing_is_refused(alice, monkeypatch) -> None:
    monkeypatch.setattr(sqlite_host, "_MOUNTS", Path("/does/not/exist"))
    monkeypatch.setattr(sqlite_host.sys, "platform", "linux")

    alice.hold("job")


def test_an_old_sqlite_is_refused_with_a_sentence(alice, monkeypatch) -> None:
    monkeypatch.setattr(sqlite_file.sqlite3, "sqlite_version_info", (3, 34, 1))

    with pytest.raises(BackendMisconfigured, match=r"3\.35"):
        alice.names()


def test_a_copy_of_a_corrupt_file_says_what_to_do(path, alice) -> None:
    for number in range(50):
        alice.hold(f"job-{number}")
    alice.backend.close()
    wounded = bytearray(path.read_bytes())
    wounded[4096:] = os.urandom(len(wounded) - 4096)
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    copy.write_bytes(wounded)

    with closing(SQLiteBackend(copy)) as backend, pytest.raises(BackendMisconfigured, match="move it away"):
        backend.list("", budget())
