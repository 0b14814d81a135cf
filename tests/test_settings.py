"""Options of the primitives from the environment."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pglease import ConfigurationError, MemoryBackend, PGLease
from pglease.primitives.configs import KINDS as CONFIGS
from pglease.settings import KINDS, Setting, Settings, in_a_variable


@pytest.mark.parametrize(
    ("name", "written"),
    [("cart", "CART"), ("order:42", "ORDER_3A_42"), ("Cart", "_43_ART"), ("a_b", "A_5F_B"), ("\u00fc", "_C3BC_")],
)
def test_a_name_in_a_variable(name, written):
    assert in_a_variable(name) == written


@given(st.text(max_size=8), st.text(max_size=8))
def test_no_two_names_share_a_variable(one, other):
    assert (in_a_variable(one) == in_a_variable(other)) == (one == other)


def test_code_comes_first_then_the_name_then_the_kind():
    settings = Settings({"PGLEASE_LOCK_TTL": "120", "PGLEASE_LOCK_CART_TTL": "30s", "PGLEASE_LOCK_CART_FAIR": "yes"})

    assert settings.apply("lock", "cart", {}) == {"ttl": "30s", "fair": True}
    assert settings.apply("lock", "order", {}) == {"ttl": "120"}
    assert settings.apply("lock", "cart", {"fair": False}, ttl=5) == {"ttl": 5, "fair": False}
    assert settings.apply("task_lock", "cart", {}) == {}


def test_it_can_be_explained():
    settings = Settings({"PGLEASE_SEMAPHORE_DB_LIMIT": "3", "PGLEASE_SEMAPHORE_TTL": "9"})

    found = settings.explain("semaphore", "db", {"on_lost": "log"})

    assert Setting("limit", 3, "PGLEASE_SEMAPHORE_DB_LIMIT") in found
    assert Setting("ttl", "9", "PGLEASE_SEMAPHORE_TTL") in found
    assert Setting("on_lost", "log", "code") in found
    assert Setting("fair", False, "default") in found


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PGLEASE_LOCK_FAIR", "perhaps"), ("PGLEASE_SEMAPHORE_LIMIT", "many"), ("PGLEASE_LOCK_ON_LOST", "x")],
)
def test_what_cannot_be_read_is_said_with_its_variable(variable, value):
    kind = variable.split("_")[1].lower()

    with pytest.raises(ConfigurationError, match=f"{variable} must be .*'{value}'"):
        Settings({variable: value}).apply(kind, "x", {})


def test_a_client_applies_it(monkeypatch):
    monkeypatch.setenv("PGLEASE_LOCK_CART_TTL", "2m")
    monkeypatch.setenv("PGLEASE_SEMAPHORE_DB_LIMIT", "2")
    with PGLease(MemoryBackend()) as leases:
        with leases.lock("cart") as held:
            assert 110 < held.remaining() < 120
        with leases.lock("cart", 600) as held:
            assert held.remaining() > 500
        assert leases.semaphore("db").limit == 2
        assert leases.semaphore("db", 3).limit == 3
        with pytest.raises(ConfigurationError, match="'other' needs a limit"):
            leases.semaphore("other")


def test_a_wrong_value_is_refused_like_one_in_code(monkeypatch):
    monkeypatch.setenv("PGLEASE_LOCK_TTL", "soon")
    with (
        PGLease(MemoryBackend()) as leases,
        pytest.raises(ConfigurationError, match="PGLEASE_LOCK_TTL must be a duration"),
    ):
        leases.lock("cart")


@pytest.mark.parametrize(
    ("variable", "value"), [("PGLEASE_TASK_LOCK_ONCE_PER", "now and then"), ("PGLEASE_SEMAPHORE_LIMIT", "10001")]
)
def test_a_value_that_breaks_a_rule_is_said_with_its_variable(variable, value):
    kind = variable.removeprefix("PGLEASE_").rsplit("_", 1 + variable.endswith("_PER"))[0].lower()

    with pytest.raises(ConfigurationError, match=variable):
        Settings({variable: value}).apply(kind, "x", {})


def test_a_prefix_of_its_own_stands_for_the_name_and_the_kind_goes_on_beneath():
    settings = Settings({"SHOP_CART_TTL": "7", "PGLEASE_LOCK_CART_TTL": "5", "PGLEASE_LOCK_MAX_HOLD": "1h"})

    assert settings.apply("lock", "cart", {"env_prefix": "SHOP_CART_"}) == {"ttl": "7", "max_hold": "1h"}
    assert settings.apply("lock", "cart", {}) == {"ttl": "5", "max_hold": "1h"}
    assert Settings({"SHOP_CART_TTL": "7"}).apply("lock", "cart", {"env_prefix": "SHOP_CART_"}) == {"ttl": "7"}
    with pytest.raises(ConfigurationError, match="env_prefix must be letters"):
        settings.apply("lock", "cart", {"env_prefix": "shop cart"})


def test_every_option_that_can_be_set_is_one_of_the_kind_s():
    assert set(KINDS) == set(CONFIGS)
    for kind, readers in KINDS.items():
        assert set(readers) <= {field.name for field in fields(CONFIGS[kind])}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *((word, False) for word in ("0", "false", "no", "off", " OFF ")),
        *((word, True) for word in ("1", "true", "yes", "on", "True")),
    ],
)
def test_a_switch_in_a_variable_is_said_in_any_of_these_words(word, meant):
    assert Settings({"PGLEASE_LOCK_FAIR": word}).apply("lock", "cart", {}) == {"fair": meant}


@pytest.mark.parametrize(
    ("kind", "option", "written"),
    [
        ("lock", "min_hold", "0"),
        ("lock", "on_lost", "log"),
        ("leader_election", "on_lost", "exit"),
        ("leader_election", "defer", "0"),
        ("task_lock", "once_per", "0 3 * * *"),
    ],
)
def test_what_stands_in_a_variable_applies_as_it_is_written(kind, option, written):
    variable = f"PGLEASE_{kind.upper()}_{option.upper()}"

    assert Settings({variable: written}).apply(kind, "job", {}) == {option: written}


def test_the_variables_of_a_name_are_its_own_and_everybodys():
    variables = Settings({}).variables("read_write_lock", "cart")

    assert variables["ttl"] == ("PGLEASE_READ_WRITE_LOCK_CART_TTL", "PGLEASE_READ_WRITE_LOCK_TTL")
