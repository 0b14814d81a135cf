"""What a newcomer does wrong in the first hour is answered by one sentence that says what to do.

Each of these is said where it happens, and says the thing by its name. What the type checker or Python itself says well
is left to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import sys
import uuid
import warnings
from functools import partial

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pglease
from pglease import (
    AsyncPGLease,
    BackendClosed,
    BackendMisconfigured,
    BackendUnavailable,
    ConfigurationError,
    MemoryBackend,
    MissingDependencyError,
    NotOwnedError,
    PGLease,
    default,
)
from pglease.cli import main

NOWHERE = "127.0.0.1:1"
"""A port at which nobody listens."""


@pytest.fixture
def leases():
    with PGLease(MemoryBackend()) as client:
        yield client


@pytest.fixture
def held(leases):
    """A lease that somebody else, `web-1`, has."""
    with PGLease(leases.backend, owner_id="web-1") as other:
        assert other.try_acquire("report")
        yield "report"


@contextlib.contextmanager
def refused(kind, *said):
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    for words in said:
        assert words in text, text


# -- where the store is


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("postgresqll", "postgresql"), ("hybrid", "hybrid+postgresql"), ("redi", "redis"), ("sqlit", "sqlite")],
)
def test_a_misspelt_kind_of_store_is_told_what_was_meant(typed, meant):
    with refused(ConfigurationError, f"{typed}://: did you mean {meant}://?"):
        PGLease(f"{typed}://user:hunter22@host/db")


def test_a_kind_of_store_that_there_is_not_is_told_those_there_are():
    with refused(ConfigurationError, "mysql://", "postgresql://", "redis://", "sqlite://"):
        PGLease("mysql://user:hunter22@host/db")


def test_an_address_without_a_kind_of_store_is_told_how_one_looks():
    with refused(ConfigurationError, "postgresql://user@host/db"):
        PGLease("localhost/db")


def test_no_address_at_all_is_told_where_to_put_it(monkeypatch):
    monkeypatch.delenv("PGLEASE_URL", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setattr(default, "_client", None)

    with refused(ConfigurationError, "PGLEASE_URL", "DATABASE_URL"):
        pglease.acquire("report")


def test_none_for_an_address_is_told_what_is_wanted():
    with refused(ConfigurationError, "address", "NoneType"):
        PGLease(None)


def test_a_misspelt_knob_is_told_what_was_meant():
    with refused(ConfigurationError, "'notifi'", "did you mean notify?"):
        PGLease("postgresql://host/db?pglease.notifi=0")


def test_a_password_that_is_not_encoded_is_told_to_be():
    with refused(ConfigurationError, "percent-encode"):
        PGLease("postgresql://user:hunter/22:x@host/db").try_acquire("report")


@pytest.mark.parametrize("store", ["postgresql", "redis"])
def test_where_no_server_listens_one_is_told_to_look_whether_it_runs(store):
    with (
        PGLease(f"{store}://user:hunter22@{NOWHERE}/0", connect_timeout=0.5) as leases,
        refused(BackendUnavailable, "cannot be reached", "refused", "hether it runs"),
    ):
        leases.try_acquire("report")


@pytest.mark.parametrize(
    ("wrong", "said", "to_do"),
    [
        ({"password": "wrong"}, "password authentication failed", "correct the user or the password"),
        ({"dbname": "no_such_database"}, "no_such_database", "create it, or correct the address"),
    ],
)
def test_what_is_wrong_in_an_address_is_told_by_the_server_and_to_be_corrected(dsn, wrong, said, to_do):
    with PGLease(make_conninfo(dsn, **wrong)) as leases, refused(BackendMisconfigured, said, to_do):
        leases.try_acquire("report")


@pytest.mark.parametrize(
    ("table_exists", "said", "to_do"),
    [(False, "schema", "pglease schema"), (True, "may not read", "GRANT SELECT ON")],
    ids=["no table", "somebody's table"],
)
def test_a_role_without_rights_is_told_how_to_get_them(admin, admin_dsn, dsn, table_exists, said, to_do):
    role = f"role_{uuid.uuid4().hex}"
    admin.execute(psycopg.sql.SQL("CREATE ROLE {}").format(psycopg.sql.Identifier(role)))
    try:
        if table_exists:
            with PGLease(dsn) as owner:
                owner.get_lease("report")
        with (
            PGLease(make_conninfo(admin_dsn, options=f"-c role={role}")) as leases,
            refused(BackendMisconfigured, said, to_do),
        ):
            leases.try_acquire("report")
    finally:
        admin.execute(psycopg.sql.SQL("DROP ROLE {}").format(psycopg.sql.Identifier(role)))


def test_a_table_that_nobody_made_is_told_how_to_make_it(dsn):
    with (
        PGLease(dsn, auto_initialize=False) as leases,
        refused(BackendMisconfigured, "pglease_leases", "pglease schema apply"),
    ):
        leases.try_acquire("report")


def test_a_directory_that_is_not_there_is_told_to_be_made(tmp_path):
    with refused(BackendMisconfigured, "make it first"), PGLease(f"sqlite:///{tmp_path}/no/leases.db") as leases:
        leases.try_acquire("report")


def test_an_sqlite_address_with_two_slashes_is_told_of_the_third():
    with refused(ConfigurationError, "sqlite:///file"):
        PGLease("sqlite://leases.db")


@pytest.mark.parametrize(
    ("module", "package", "use", "extra"),
    [
        ("pglease.backends.redis", "redis", lambda: PGLease("redis://host"), "pglease[redis]"),
        ("", "cronsim", lambda: pglease.Cron("0 4 * * *"), "pglease[cron]"),
    ],
)
def test_a_missing_package_is_told_by_its_extra(monkeypatch, module, package, use, extra):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)

    with refused(MissingDependencyError, package, extra):
        use()


# -- what is asked for


@pytest.mark.parametrize("ttl", ["5 minutes", "5x", "", None, True, 0, -1, float("nan")])
def test_a_ttl_that_is_none_is_told_how_one_is_written(leases, ttl):
    with refused(ConfigurationError, "ttl", repr(ttl)):
        leases.acquire("report", ttl=ttl)


def test_a_ttl_that_is_too_short_to_live_with_is_told_so_in_the_log(leases, caplog):
    with leases.acquire("report", ttl="50ms") as lease:
        assert lease or lease is not None

    assert "the ttl of 'report' is 0.05 s" in caplog.text


def test_a_ttl_that_leaves_a_command_no_time_to_end_is_told_how_long_it_must_be(capsys, tmp_path):
    code = main(["--dsn", f"sqlite:///{tmp_path}/l.db", "run", "report", "--ttl", "1s", "--grace", "5s", "--", "true"])

    assert code == 2
    assert "ttl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"), [("", "empty"), ("x" * 256, "at most 255"), ("a\nb", "control"), (7, "text"), (None, "text")]
)
def test_a_name_that_is_none_is_told_why(leases, name, said):
    with refused(ConfigurationError, "name", said):
        leases.acquire(name)


def test_all_that_is_wrong_is_told_at_once(leases):
    with refused(ConfigurationError, "name must not be empty", "ttl must be a duration"):
        leases.acquire("", ttl="soon")


def test_a_word_that_is_none_of_the_choices_is_told_the_choices(leases):
    with refused(ConfigurationError, "on_lost", "'raise'", "'log'", "'exit'"):
        leases.acquire("report", on_lost="cancel")


# -- how it is asked


def test_a_forgotten_with_is_told_by_the_if_that_would_have_been_true(leases):
    with refused(TypeError, "nothing is acquired yet", "with leases.acquire"):
        assert leases.acquire("report")


def test_a_forgotten_with_is_told_by_whatever_is_asked_of_the_block(leases):
    with refused(AttributeError, "'fencing_token'", "nothing is acquired yet", "with leases.acquire"):
        _ = leases.acquire("report").fencing_token
    assert not hasattr(leases.acquire("report"), "no_attribute_of_a_lease")


def test_a_forgotten_if_is_told_by_whatever_is_asked_of_the_answer(leases, held):
    with (
        refused(AttributeError, "'fencing_token'", "'web-1' has the lease 'report'", "if lease:"),
        leases.acquire(held) as lease,
    ):
        _ = lease.fencing_token
    assert not hasattr(lease, "no_attribute_of_a_lease")


def test_a_block_that_ran_without_the_lease_and_never_asked_is_told_so(leases, held):
    with pytest.warns(RuntimeWarning, match=r"without the lease 'report', which 'web-1' has: .*if lease:"):  # noqa: SIM117
        with leases.acquire(held):
            pass

    async def awaited():
        with pytest.warns(RuntimeWarning, match="without the lease"):
            async with AsyncPGLease(leases).acquire(held):
                pass
        with pytest.warns(RuntimeWarning, match="without the lease"):
            async with AsyncPGLease(leases).acquire_many(["other", held]):
                pass

    asyncio.run(awaited())
    with pytest.warns(RuntimeWarning, match="without the lease"):  # noqa: SIM117
        with leases.acquire_many(["other", held]):
            pass


def test_a_block_that_asked_in_any_way_is_told_nothing(leases, held):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with leases.acquire(held) as lease:
            assert not lease
        with leases.acquire(held) as lease:
            pass  # it may have asked by isinstance or match
        with contextlib.ExitStack() as stack:
            assert not stack.enter_context(leases.acquire(held))
        with leases.acquire("free"):
            pass


def test_a_block_that_raised_is_told_nothing_more(leases, held):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), leases.acquire(held):
            raise KeyError


def test_an_answer_that_was_refused_can_be_copied_all_the_same(leases, held):
    with leases.acquire(held) as lease:
        for again in (copy.copy(lease), pickle.loads(pickle.dumps(lease))):
            assert (again.name, again.held_by, bool(again)) == ("report", "web-1", False)


def test_async_with_on_the_client_for_threads_is_told_of_the_other_one(leases):
    async def enter(block):
        async with block:
            pass

    for block in (leases, leases.acquire("report"), leases.acquire_many(["report"])):
        with refused(TypeError, "AsyncPGLease", "plain `with`"):
            asyncio.run(enter(block))


def test_plain_with_on_the_client_for_asyncio_is_told_of_the_other_one(leases):
    awaited = AsyncPGLease(leases)

    for block in (awaited, awaited.acquire("report"), awaited.acquire_many(["report"])):
        with refused(TypeError, "PGLease", "`async with`"), block:
            pass


@pytest.mark.parametrize(
    "ask",
    [
        lambda leases: partial(leases.acquire, "report"),
        lambda leases: partial(leases.try_acquire, "report", ttl=5),
        lambda leases: partial(leases.wait_for_lease, "report"),
        lambda leases: leases.lock("report").acquire,
        lambda leases: leases.lock("report").acquire_nowait,
        lambda leases: leases.task_lock("report").acquire,
        lambda leases: leases.semaphore("report", 1).acquire,
        lambda leases: leases.semaphore("report", 1).acquire_nowait,
        lambda leases: leases.read_write_lock("report").acquire_read,
        lambda leases: leases.read_write_lock("report").acquire_write,
        lambda leases: leases.acquire_many(["report"]).acquire,
        lambda _: partial(pglease.acquire, "report"),
        lambda _: partial(pglease.try_acquire, "report"),
        lambda _: partial(pglease.wait_for_lease, "report"),
    ],
)
def test_await_on_the_client_for_threads_is_told_of_the_other_one_before_anything_is_held(leases, ask):
    call = ask(leases)

    async def story():
        await call()

    with default.standing_in(leases), refused(TypeError, "AsyncPGLease", "Nothing was acquired"):
        asyncio.run(story())

    assert leases.list_leases() == []


def test_a_call_of_the_client_for_threads_in_a_coroutine_that_awaits_something_else_is_answered(leases):
    async def story():
        await asyncio.sleep(0 if leases.try_acquire("report") else 1)
        taken = leases.wait_for_lease("other")
        await asyncio.sleep(0)
        with leases.acquire("third") as lease:
            return bool(lease) and taken.held

    assert asyncio.run(story())


def test_await_before_a_block_is_told_how_it_is_entered(leases):
    async def wait_for(block):
        await block

    for face in (leases, AsyncPGLease(leases)):
        for block in (face.acquire("report"), face.acquire_many(["report"])):
            with refused(TypeError, "nothing is acquired yet", "`with leases.acquire", "`async with` on asyncio"):
                asyncio.run(wait_for(block))


def test_an_answer_that_nobody_awaited_is_told_by_python(leases):
    with pytest.warns(RuntimeWarning, match=r"AsyncPGLease.try_acquire' was never awaited"):
        AsyncPGLease(leases).try_acquire("report")


def test_a_decorator_without_a_name_is_told_how_it_is_written(leases):
    @leases.singleton_task
    def report():
        pass

    with refused(ConfigurationError, '@leases.singleton_task("report")'):
        report()


def test_a_handle_that_nobody_keeps_is_told_of_its_release(leases):
    with pytest.warns(ResourceWarning, match="'report' was dropped without a release"):
        leases.acquire("report").__enter__()


def test_renewing_what_one_does_not_have_is_told_so(leases):
    with refused(NotOwnedError, "does not hold 'report'"):
        leases.renew("report")


def test_waiting_for_no_time_is_told_of_the_other_call(leases):
    with refused(ConfigurationError, "timeout must be more than 0 seconds"):
        leases.wait_for_lease("report", timeout=0)


def test_a_client_that_was_closed_says_so(leases):
    leases.close()

    with refused(BackendClosed, "closed"):
        leases.try_acquire("report")


def test_a_command_without_a_store_is_told_the_ways_to_name_one(capsys, monkeypatch):
    for name in ("PGLEASE_URL", "DATABASE_URL", "PGHOST", "PGSERVICE", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)

    assert main(["list"]) == 125
    assert "--dsn" in capsys.readouterr().err


def test_a_command_that_is_misspelt_is_told_where_the_right_ones_are(capsys):
    assert main(["lst"]) == 2
    said = capsys.readouterr().err
    assert "did you mean list?" in said
    assert "--help" in said
