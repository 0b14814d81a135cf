"""From an address to a store: schemes, knobs in the query, knobs as keywords."""

from __future__ import annotations

import pytest

from pglease import ConfigurationError, MemoryBackend, PGLease, PostgresBackend, SQLiteBackend, open_backend

URL = "postgresql://user:hunter22@db.example/shop"


@pytest.mark.parametrize(
    "url", [URL, "postgres://h/d", "postgresql+psycopg2://h/d", "postgresql+psycopg://h/d", "host=h dbname=d", "", "  "]
)
def test_addresses_of_postgresql(url):
    assert isinstance(open_backend(url), PostgresBackend)


@pytest.mark.parametrize("url", ["memory://", "memory://shop"])
def test_addresses_of_memory(url):
    assert isinstance(open_backend(url), MemoryBackend)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///leases.db", "leases.db"),
        ("sqlite:///a/../b/leases.db", "a/../b/leases.db"),
        ("sqlite:////var/lib/leases.db", "/var/lib/leases.db"),
        ("sqlite:////var/a%20b%3Fc%25.db", "/var/a b?c%.db"),
        ("sqlite:////var/leases.db?pglease.table_name=jobs", "/var/leases.db"),
    ],
)
def test_addresses_of_sqlite_have_three_slashes_for_a_relative_path_and_four_for_an_absolute_one(
    url, path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    backend = open_backend(url)

    assert isinstance(backend, SQLiteBackend)
    assert backend.path == tmp_path / path
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite://leases.db", "sqlite://host/leases.db", "sqlite:///a.db?mode=ro"]
)
def test_an_address_of_sqlite_that_names_no_file_says_how_it_is_written(url):
    with pytest.raises(ConfigurationError, match="SQLite"):
        open_backend(url)


def test_knobs_of_a_server_are_none_of_sqlites_but_the_clients_own_time():
    PGLease("sqlite:///leases.db", table_name="jobs", connect_timeout=3).close()

    with pytest.raises(ConfigurationError, match="SQLite has no knob 'pool_size'"):
        PGLease("sqlite:///leases.db", pool_size=3)
    with pytest.raises(ConfigurationError, match="SQLite has no knob 'schema'"):
        open_backend("sqlite:///leases.db?pglease.schema=ops")


def test_what_bounds_the_clients_own_time_may_be_said_to_every_store():
    for url in ("memory://", "sqlite:///leases.db", "postgresql://h/d", "redis://h", "kubernetes://jobs"):
        PGLease(url, connect_timeout="3s").close()
        open_backend(f"{url}?pglease.connect_timeout=3s").close()


def test_knobs_of_kubernetes_that_are_none_are_refused_all_at_once():
    with pytest.raises(
        ConfigurationError, match=r"namespace must be .*; connect_timeout must be .*; pool_size must be"
    ):
        open_backend("kubernetes://Jobs?pglease.connect_timeout=soon&pglease.pool_size=0")


def test_nothing_is_connected():
    backend = open_backend("postgresql://nobody@nowhere.invalid/nothing")

    assert isinstance(backend, PostgresBackend)
    backend.close()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://user:hunter22@h/d",
        "hybrid+mysql://user:hunter22@h/d",
        "memory+x+y//hunter22",
        "hunter22",
        "://hunter22",
        "user:hunter22@h://d",
        "/var/lib/hunter22",
    ],
)
def test_an_address_of_no_store_is_refused_and_not_shown(url):
    with pytest.raises(ConfigurationError) as caught:
        open_backend(url)

    assert "hunter22" not in str(caught.value) + repr(caught.value)


def test_a_colon_and_two_slashes_in_a_keyword_password_are_no_scheme():
    backend = open_backend("host=h password=hunter22://x dbname=d")

    assert backend.connections.params()["password"] == "hunter22://x"


@pytest.mark.parametrize("url", [None, 7, b"memory://", object()])
def test_an_address_is_text(url):
    with pytest.raises(ConfigurationError, match="address"):
        open_backend(url)


# -- knobs -------------------------------------------------------------------------------------------------------------


def test_knobs_may_stand_in_the_query_and_the_rest_of_it_is_libpqs():
    backend = open_backend(
        f"{URL}?pglease.pool_size=8&sslmode=require&pglease.table_name=j%6Fbs&pglease.schema=ops"
        "&application_name=a%20b%26c&pglease.connect_timeout=7&pglease.auto_initialize=off"
    )

    assert backend.connections.pool_size == 8
    assert backend._names.table == "jobs"
    assert backend._names.schema == "ops"
    assert backend._auto_initialize is False
    params = backend.connections.params()
    assert params["sslmode"] == "require"
    assert params["application_name"] == "a b&c"
    assert params["connect_timeout"] == 7
    assert not [key for key in params if key.startswith("pglease")]


def test_a_query_of_knobs_alone_leaves_no_question_mark():
    backend = open_backend(f"{URL}?pglease.pool_size=2")

    assert backend.connections.dsn.get("dbname") == "shop"


@pytest.mark.parametrize("value", ["0", "1", "false", "True", "NO", "on"])
def test_switches_are_read_in_words_and_digits(value):
    backend = open_backend(f"{URL}?pglease.auto_initialize={value}")

    assert backend._auto_initialize is (value.lower() in ("1", "true", "on"))


def test_the_number_one_is_no_switch():
    backend = open_backend(f"{URL}?pglease.pool_size=1&pglease.connect_timeout=1")

    assert backend.connections.pool_size == 1
    assert backend.connections._connect_timeout == 1


def test_a_password_in_the_query_survives_the_knobs_beside_it():
    backend = open_backend("postgresql://h/d?password=a%2Bb%20c%26d&pglease.pool_size=2")

    assert backend.connections.params()["password"] == "a+b c&d"


def test_a_plus_in_the_query_is_a_plus_as_libpq_reads_it():
    """Also beside a knob of ours: a web form would read a blank."""
    backend = open_backend("postgresql://h/d?password=a+b&pglease.pool_size=2")

    assert backend.connections.params()["password"] == "a+b"


def test_keywords_are_knobs_too():
    assert open_backend(URL, pool_size=3).connections.pool_size == 3


def test_the_same_knob_twice_is_an_error_unless_both_say_the_same():
    assert open_backend(f"{URL}?pglease.pool_size=3", pool_size=3).connections.pool_size == 3

    with pytest.raises(ConfigurationError, match="pool_size is given twice"):
        open_backend(f"{URL}?pglease.pool_size=3", pool_size=4)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("pglease.pool_size=0", "pool_size"),
        ("pglease.pool_size=many", "pool_size"),
        ("pglease.connect_timeout=soon", "connect_timeout"),
        ("pglease.table_name=a.b", "table_name"),
        ("pglease.auto_initialize=perhaps", "auto_initialize"),
        ("pglease.schema=a%22b", "schema"),
    ],
)
def test_a_wrong_value_names_the_knob(query, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        open_backend(f"{URL}?{query}")

    assert "hunter22" not in str(caught.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigurationError) as caught:
        open_backend(f"{URL}?pglease.pool_size=0&pglease.table_name=a.b")

    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("url", [f"{URL}?pglease.colour=red", "memory://?pglease.pool_size=4"])
def test_an_unknown_knob_is_named(url):
    with pytest.raises(ConfigurationError, match=r"knob '(colour|pool_size)'"):
        open_backend(url)


def test_only_the_unknown_knobs_are_called_unknown():
    with pytest.raises(ConfigurationError) as caught:
        open_backend(f"{URL}?pglease.pool_size=4&pglease.colour=red")

    assert "colour" in str(caught.value)
    assert "pool_size" not in str(caught.value)


# -- through the client ------------------------------------------------------------------------------------------------


def test_knobs_of_the_client_reach_the_store():
    client = PGLease(URL, table_name="jobs", schema="ops", auto_initialize=False, connect_timeout="7s", pool_size=2)

    backend = client.backend
    assert (backend._names.table, backend._names.schema) == ("jobs", "ops")
    assert backend._auto_initialize is False
    assert (backend.connections.pool_size, backend.connections._connect_timeout) == (2, 7.0)
    client.close()


@pytest.mark.parametrize(
    "knobs",
    [{"table_name": "jobs"}, {"schema": "ops"}, {"auto_initialize": False}, {"connect_timeout": 3}, {"pool_size": 9}],
)
def test_knobs_beside_a_backend_object_are_refused_by_name(knobs):
    with pytest.raises(ConfigurationError, match=next(iter(knobs))):
        PGLease(MemoryBackend(), **knobs)


def test_every_knob_beside_a_backend_object_is_named():
    with pytest.raises(ConfigurationError) as caught:
        PGLease(MemoryBackend(), table_name="jobs", pool_size=9)

    assert len(caught.value.problems) == 2


def test_a_knob_that_says_what_is_so_anyway_is_harmless_beside_a_backend_object():
    PGLease(MemoryBackend(), table_name="pglease_leases", pool_size=4).close()


@pytest.mark.parametrize("backend", [None, 7, object(), MemoryBackend])
def test_what_is_no_store_is_refused(backend):
    with pytest.raises(ConfigurationError, match="backend must be"):
        PGLease(backend)
