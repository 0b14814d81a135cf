"""Flask as it is: the extension, its configuration, the command group, and workers that were forked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask

from pglease import ConfigurationError, PGLease
from pglease.contrib.flask import PGLeaseExtension, client_of
from tests.support.worlds import is_free


@pytest.fixture
def other(dsn: str) -> Iterator[PGLease]:
    with PGLease(dsn, owner_id="the other") as made:
        yield made


def make_app(leases: PGLeaseExtension, **config: Any) -> Flask:
    """An application as a factory makes it."""
    app = Flask("shop")
    app.config.update(config)
    leases.init_app(app)

    @app.post("/cleanup")
    def cleanup() -> dict[str, Any]:
        with leases.client.acquire("cleanup", ttl="5m") as lease:
            return {"done": bool(lease), "by": lease.owner_id if lease else lease.held_by}

    return app


@pytest.fixture
def app(dsn: str) -> Iterator[Flask]:
    made = make_app(PGLeaseExtension(), PGLEASE_DSN=dsn, PGLEASE_OWNER_ID="the shop")
    yield made
    client_of(made).close()


def test_a_request_takes_a_lease_with_the_applications_client(app: Flask, other: PGLease, dsn: str) -> None:
    browser = app.test_client()

    assert browser.post("/cleanup").json == {"done": True, "by": "the shop"}
    assert is_free(dsn, "cleanup")

    other.try_acquire("cleanup")
    assert browser.post("/cleanup").json == {"done": False, "by": "the other"}


def test_the_end_of_a_request_ends_no_lease_of_another(app: Flask) -> None:
    leases = client_of(app)
    with app.app_context():
        assert app.extensions["pglease"].try_acquire("scheduler")

    app.test_client().post("/cleanup")

    assert leases.held("scheduler")


def test_each_application_of_an_extension_has_a_client_of_its_own(dsn: str) -> None:
    leases = PGLeaseExtension(owner_id="by default")
    one, two = make_app(leases, PGLEASE_DSN=dsn), make_app(leases, PGLEASE_DSN=dsn, PGLEASE_OWNER_ID="two")

    with one.app_context(), leases.client.acquire("cleanup") as held:
        assert held
        assert one.test_client().post("/cleanup").json == {"done": False, "by": "by default"}
        assert two.test_client().post("/cleanup").json == {"done": False, "by": "by default"}
    with two.app_context():
        assert leases.client.owner_id == "two"
    for app in (one, two):
        client_of(app).close()


def test_every_key_of_the_configuration_reaches_the_client(dsn: str) -> None:
    app = make_app(
        PGLeaseExtension(),
        PGLEASE_URL=dsn,
        PGLEASE_OWNER_ID="me",
        PGLEASE_HEARTBEAT_INTERVAL="10s",
        PGLEASE_MARGIN=0.5,
        PGLEASE_TABLE_NAME="shop_leases",
        PGLEASE_SCHEMA="public",
        PGLEASE_AUTO_INITIALIZE=True,
        PGLEASE_CONNECT_TIMEOUT=5,
        PGLEASE_POOL_SIZE=2,
    )

    with client_of(app) as leases:
        assert leases.try_acquire("job")
        assert "shop_leases" in leases.backend.ddl()  # type: ignore[attr-defined]


def test_what_is_wrong_with_the_configuration_is_said_at_once_and_shows_no_address() -> None:
    with pytest.raises(ConfigurationError) as broken:
        make_app(PGLeaseExtension(), PGLEASE_DSN="postgresql://u:s3cret@h/d", PGLEASE_MARGIN=-1, PGLEASE_POOL_SIZE="x")

    assert "margin" in str(broken.value)
    assert "pool_size" in str(broken.value)
    assert "s3cret" not in str(broken.value)


def test_without_an_address_the_environment_says_it(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    app = make_app(PGLeaseExtension())

    with client_of(app) as leases:
        assert leases.try_acquire("job")


def test_a_client_that_is_given_is_the_applications(dsn: str) -> None:
    with PGLease(dsn) as mine:
        assert client_of(make_app(PGLeaseExtension(backend=mine))) is mine


def test_an_application_that_was_not_initialised_says_so() -> None:
    with pytest.raises(ConfigurationError, match="init_app"):
        client_of(Flask("bare"))


# -- flask pglease


def test_the_command_line_is_part_of_the_applications(app: Flask, other: PGLease) -> None:
    other.try_acquire("cleanup", ttl=600)
    runner = app.test_cli_runner()

    listed = runner.invoke(args=["pglease", "list", "--json"])
    unknown = runner.invoke(args=["pglease", "show", "nothing"])
    wrong = runner.invoke(args=["pglease", "list", "--nonsense"])

    assert json.loads(listed.output)["owner_id"] == "the other"
    assert (listed.exit_code, unknown.exit_code, wrong.exit_code) == (0, 1, 2)
    assert "bump-epoch" in runner.invoke(args=["pglease", "--help"]).output
    assert "pglease" in runner.invoke(args=["--help"]).output


def test_it_asks_the_applications_own_store_whatever_that_is(dsn: str) -> None:
    app = make_app(PGLeaseExtension(), PGLEASE_DSN=dsn, PGLEASE_TABLE_NAME="shop_leases")
    leases = client_of(app)
    leases.try_acquire("cleanup", ttl=600)
    runner = app.test_cli_runner()

    assert "cleanup" in runner.invoke(args=["pglease", "list"]).output
    assert "shop_leases" in runner.invoke(args=["pglease", "schema"]).output
    assert runner.invoke(args=["pglease", "schema", "diff"]).exit_code == 0
    assert "cleanup" not in runner.invoke(args=["pglease", "list", "--dsn", "memory://"]).output

    assert runner.invoke(args=["pglease", "release", "cleanup", "--token", "1"]).exit_code == 0
    assert leases.get_lease("cleanup").is_expired()  # type: ignore[union-attr]  # and the store is still open
    leases.close()
