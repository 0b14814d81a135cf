"""The address: read by libpq's own parser, its secrets never shown."""

from __future__ import annotations

import copy
import pickle
import re
import string
import sys
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pglease.backends.postgres_dsn import Dsn
from pglease.errors import BackendMisconfigured, ConfigurationError, MissingDependencyError

SPECIAL = "/:@?#[]%&=+ ,;'\"\\!$*()<>{}|^`~ä€🙂"
PIECES = st.text(string.ascii_letters + string.digits + SPECIAL, min_size=1, max_size=24)
MARK = "s3cr3t"


def marked(pieces: str) -> str:
    """A password whose every piece between special characters can be told from everything else in a message."""
    return re.sub(r"[A-Za-z0-9]+", MARK, pieces) if re.search(r"[A-Za-z0-9]", pieces) else MARK + pieces + MARK


def what_is_shown(address: str) -> str:
    """All that a person can see of an address, or of the error it ends in, causes and contexts included."""
    try:
        dsn = Dsn(address)
    except ConfigurationError as error:
        behind = [error.__cause__, error.__context__]
        return "".join([str(error), repr(error), *("a cause" for cause in behind if cause is not None)])
    return str(dsn) + repr(dsn)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme", ["postgresql", "postgres", "postgresql+psycopg2", "postgresql+psycopg", "postgres+x"]
)
def test_a_url_of_any_usual_scheme_is_read(scheme):
    dsn = Dsn(f"{scheme}://user:pass@db.example:6543/shop?application_name=till")

    assert dsn.params({}) == {
        "user": "user",
        "password": "pass",
        "host": "db.example",
        "port": "6543",
        "dbname": "shop",
        "application_name": "till",
    }


def test_the_keyword_form_is_read():
    dsn = Dsn(r"host=db port=5433 user=me password='it\'s here' dbname='my shop'")

    assert dsn.params({})["password"] == "it's here"
    assert dsn.get("dbname") == "my shop"


def test_an_empty_address_means_libpqs_environment():
    assert Dsn("").params({}) == {}
    assert str(Dsn("")) == "libpq's environment"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("postgresql://", {}),
        ("postgresql://db", {"host": "db"}),
        ("postgresql:///shop", {"dbname": "shop"}),
        ("postgresql:///shop?host=/var/run/postgresql", {"dbname": "shop", "host": "/var/run/postgresql"}),
        ("postgresql://%2Fvar%2Frun%2Fpostgresql/shop", {"dbname": "shop", "host": "/var/run/postgresql"}),
        ("host=/tmp dbname=shop", {"dbname": "shop", "host": "/tmp"}),
        ("postgresql://[::1]:5433/shop", {"host": "::1", "port": "5433", "dbname": "shop"}),
        ("postgresql://u@[2001:db8::7]/shop", {"host": "2001:db8::7", "user": "u", "dbname": "shop"}),
        ("postgresql://a:1,b:2,c/shop", {"host": "a,b,c", "port": "1,2,", "dbname": "shop"}),
        ("host=a,b port=1,2", {"host": "a,b", "port": "1,2"}),
        ("service=billing", {"service": "billing"}),
        ("postgresql://?service=billing", {"service": "billing"}),
        ("postgresql://u@h/d?sslmode=verify-full&channel_binding=require", {"sslmode": "verify-full"}),
        ("postgresql://u@h/d?options=-c%20search_path%3Dleases", {"options": "-c search_path=leases"}),
    ],
)
def test_sockets_several_hosts_ipv6_and_services_are_read_as_libpq_reads_them(address, expected):
    params = Dsn(address).params({})

    assert {key: params.get(key) for key in expected} == expected


def test_defaults_stand_back_behind_what_the_user_gave():
    dsn = Dsn("postgresql://h/d?connect_timeout=3")

    params = dsn.params({"connect_timeout": 10, "application_name": "pglease"})

    assert params["connect_timeout"] == "3"
    assert params["application_name"] == "pglease"
    assert dsn.get("application_name") is None


@settings(deadline=None)
@given(password=st.text(min_size=1, max_size=30).filter(lambda text: "\0" not in text and text.isprintable()))
def test_any_password_that_is_percent_encoded_comes_out_as_it_was_given(password):
    dsn = Dsn(f"postgresql://user:{quote(password, safe='')}@host/db")

    assert dsn.params({})["password"] == password


def test_without_its_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(MissingDependencyError, match="needs the package psycopg"):
        Dsn("postgresql://localhost/shop")


# -- refusing without a word about the secret --------------------------------------------------------------------------


@settings(deadline=None)
@given(pieces=PIECES, port=st.sampled_from(["", ":5432"]), query=st.sampled_from(["", "?sslmode=require"]))
@example(pieces="sec/ret", port="", query="")
@example(pieces="s3cr@t/pw", port="", query="")
@example(pieces="a#b", port="", query="")
@example(pieces="a?b=c", port="", query="")
@example(pieces="a?b", port="", query="")
@example(pieces="100%", port="", query="")
@example(pieces="%zz", port="", query="")
@example(pieces="%00", port="", query="")
@example(pieces="[x", port="", query="")
@example(pieces="x@y", port=":5432", query="")
@example(pieces="a/b@c", port="", query="")
@example(pieces="a?c=b@d", port="", query="")
def test_a_password_that_was_not_encoded_is_never_shown(pieces, port, query):
    """Whatever libpq makes of it: in no message, no repr, no traceback, no text of an accepted address."""
    shown = what_is_shown(f"postgresql://user:{marked(pieces)}@host{port}/db{query}")

    assert MARK not in shown
    assert "a cause" not in shown


@settings(deadline=None)
@given(pieces=PIECES)
@example(pieces="two words")
@example(pieces="quote'd")
@example(pieces="back\\")
@example(pieces="a=b")
@example(pieces="a b=c")
def test_a_keyword_password_that_was_not_quoted_is_never_shown(pieces):
    shown = what_is_shown(f"host=h user=u password={marked(pieces)} dbname=d")

    assert MARK not in shown
    assert "a cause" not in shown


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:s3cr3t/pw@h/x",
        "postgresql://u:a@s3cr3t@h/x",
        "postgresql://u:a/s3cr3t@h/x",
        "postgresql://u:s3cr3t%zz@h/x",
        "mysql://u:s3cr3t@h/x",
        "s3cr3t://u@h/x",
        "postgresql://u:s3cr3t@h:0/x",
        "postgresql://u:s3cr3t@h:65536/x",
        "postgresql://u:s3cr3t@h:5432,g:0/x",
        "postgresql://u:s3cr3t@h:5432x/x",
        "postgresql://u:s3cr3t@h/x?nonsense=1",
        "postgresql://u@h/x?password=s3cr3t&s3cr3t=1",
        "host=h s3cr3t",
        "host=h password='s3cr3t",
        "s3cr3t",
        "postgresql://u:s3cr3t\0@h/x",
    ],
)
def test_a_malformed_address_is_refused_and_nothing_of_it_is_shown(address):
    with pytest.raises(ConfigurationError) as caught:
        Dsn(address)

    assert MARK not in str(caught.value) + repr(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("address", [None, 7, b"postgresql://h/x", ["postgresql://h/x"]])
def test_an_address_is_text(address):
    with pytest.raises(ConfigurationError, match="must be text"):
        Dsn(address)


@pytest.mark.parametrize(
    ("address", "why"), [("mysql://u@h/x", "must begin with postgresql://"), ("host=h\0", "no NUL character")]
)
def test_what_libpq_would_misread_is_refused_by_its_own_reason(address, why):
    with pytest.raises(ConfigurationError, match=why):
        Dsn(address)


def test_a_value_of_the_keyword_form_may_look_like_a_url():
    assert Dsn("application_name=http://here host=h").get("application_name") == "http://here"


# -- showing and scrubbing ---------------------------------------------------------------------------------------------


def test_it_is_shown_without_its_secrets():
    dsn = Dsn("host=h user=u password=hunter22 sslpassword=hunter33 sslkey=k.pem")

    assert str(dsn) == "host=h sslkey=k.pem user=u"
    assert repr(dsn) == "Dsn('host=h sslkey=k.pem user=u')"


def test_every_form_of_a_secret_is_scrubbed_out_of_foreign_text():
    dsn = Dsn("postgresql://u:p%40ss%2Fword@h/x?sslpassword=other")

    scrubbed = dsn.scrub("failed: p@ss/word, p%40ss%2Fword, other")

    assert "p@ss/word" not in scrubbed
    assert "p%40ss%2Fword" not in scrubbed
    assert "other" not in scrubbed
    assert scrubbed.startswith("failed: ")


def test_what_is_too_short_to_be_told_from_other_text_is_not_scrubbed():
    text = "failed: abc, ab"

    assert "abc" not in Dsn("host=h password=abc").scrub(text)
    assert Dsn("host=h password=ab").scrub(text) == text


def test_an_address_without_secrets_scrubs_nothing():
    assert Dsn("host=h").scrub("connection refused") == "connection refused"


def test_it_is_neither_pickled_nor_copied():
    dsn = Dsn("host=h password=hunter22")

    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            leak(dsn)


# -- a function in the place of text -----------------------------------------------------------------------------------


def test_a_function_is_asked_whenever_somebody_is_about_to_connect():
    passwords = iter(["first", "second"])
    dsn = Dsn(lambda: {"host": "db", "port": None, "password": next(passwords)})

    assert dsn.params({}) == {}
    dsn.refresh()
    assert dsn.params({"port": 1}) == {"host": "db", "port": 1, "password": "first"}
    dsn.refresh()
    assert dsn.params({})["password"] == "second"
    assert dsn.scrub("no second chance") == "no *** chance"
    assert "second" not in repr(dsn)


@pytest.mark.parametrize("told", [None, {"port": "a"}])
def test_a_function_that_fails_is_wrong_setup(told):
    dsn = Dsn(lambda: told)

    with pytest.raises(BackendMisconfigured, match="the function that tells PostgreSQL's address failed"):
        dsn.refresh()
