"""Which store a command talks to, and that no password comes out."""

import pytest

from pglease.backends.base import Budget
from pglease.cli import main
from pglease.cli.failures import CommandError, scrub
from pglease.cli.options import store_address

VARIABLES = ("PGLEASE_URL", "DATABASE_URL", "PGHOST", "PGSERVICE", "PGDATABASE", "PGPASSWORD")


@pytest.fixture
def nothing_set(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # Not ten seconds of retries for each address that is nowhere.
    monkeypatch.setattr(Budget, "of", classmethod(lambda cls, seconds, now: cls(now, now() + min(seconds, 0.2))))


def test_the_option_comes_before_the_variables():
    everything = {"PGLEASE_URL": "postgresql://b", "DATABASE_URL": "postgresql://c", "PGHOST": "d"}

    assert store_address("postgresql://a", local=False, environment=everything) == "postgresql://a"
    assert store_address(None, local=False, environment=everything) == "postgresql://b"
    assert store_address(None, local=False, environment={**everything, "PGLEASE_URL": ""}) == "postgresql://c"


@pytest.mark.parametrize("variable", ["PGHOST", "PGSERVICE", "PGDATABASE"])
def test_libpq_is_left_to_find_the_server_when_its_variables_name_one(variable):
    assert store_address(None, local=False, environment={variable: "x"}) == "postgresql://"


def test_without_any_store_the_ways_to_name_one_are_said(nothing_set, capsys):
    code = main(["list"])

    err = capsys.readouterr().err
    assert code == 125
    assert err.count("\n") == 1
    for way in ("--dsn", "PGLEASE_URL", "DATABASE_URL", "PGHOST", "--local"):
        assert way in err


def test_local_is_a_file_in_the_state_directory():
    address = store_address(None, local=True, environment={"XDG_STATE_HOME": "/state"})

    assert address == "sqlite:////state/pglease/leases.db"


def test_two_stores_at_once_are_bad_usage():
    with pytest.raises(CommandError) as refused:
        store_address("postgresql://a", local=True, environment={})

    assert refused.value.code == 2


def test_the_address_may_stand_before_the_command(nothing_set, capsys):
    code = main(["--dsn", "nonsense://", "list"])

    assert code == 125
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:c4n4ry@127.0.0.1:1/db",
        "postgresql://me:c4n4ry@[127.0.0.1/db",
        "postgresql://me:c4n%34ry@[127.0.0.1/db",
        "postgresql://me:c4n4ry@127.0.0.1:port/db",
        "postgresql://me:c4n4ry/with@slash@127.0.0.1:1/db",
        "postgresql://me:c4n4ry#and?all@127.0.0.1:1/db",
        "postgresql://127.0.0.1:1/db?user=me&password=c4n4ry",
        "postgres:/me:c4n4ry@127.0.0.1",
        "host=127.0.0.1 port=1 user=me password=c4n4ry",
        "host=127.0.0.1 port=1 password='c4n4ry",
        "nonsense://me:c4n4ry@host",
        "me:c4n4ry@host",
    ],
)
@pytest.mark.parametrize("arguments", [("list",), ("run", "job", "--", "true"), ("doctor",), ("schema", "apply")])
def test_no_password_comes_out_of_a_bad_address(address, arguments, nothing_set, capsys):
    code = main([arguments[0], "--dsn", address, *arguments[1:]])

    out, err = capsys.readouterr()
    assert code in (1, 125)
    assert "c4n" not in out + err
    assert "Traceback" not in err
    assert err.count("\n") + out.count("\n") == 1


def test_an_address_that_stands_where_a_name_belongs_is_scrubbed(nothing_set, capsys):
    code = main(["list", "one", "postgresql://me:c4n4ry@host/db"])

    assert code == 2
    assert "c4n4ry" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["postgresql://me:c4n4ry@host/db", "redis://:c4n4ry@host", "host=h password=c4n4ry", "password='c4n 4ry'"]
)
def test_what_looks_like_a_password_is_scrubbed_without_being_known(text):
    scrubbed = scrub(f"trouble with {text} and more", [])

    assert "c4n" not in scrubbed
    assert scrubbed.endswith(" and more")


def test_scrubbing_knows_the_decoded_form_too():
    assert "p@ss" not in scrub('password is "p@ss"', ["postgresql://me:p%40ss@host/db"])


def test_a_state_directory_of_any_name_is_written_as_an_address():
    address = store_address(None, local=True, environment={"XDG_STATE_HOME": "/a b?c%"})

    assert address == "sqlite:////a%20b%3Fc%25/pglease/leases.db"


def test_local_makes_a_directory_that_nobody_else_can_enter(nothing_set, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    code = main(["--local", "list"])

    assert (code, capsys.readouterr().err) == (0, "pglease: no leases\n")
    assert (tmp_path / "state" / "pglease" / "leases.db").is_file()
    assert (tmp_path / "state" / "pglease").stat().st_mode & 0o777 == 0o700


def test_a_state_directory_that_cannot_be_made_is_named(nothing_set, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))

    assert main(["--local", "list"]) == 125

    assert str(tmp_path / "file" / "pglease") in capsys.readouterr().err
