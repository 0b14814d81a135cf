"""Whatever text arrives where text is read is understood as it was meant, or refused as ours; no secret is shown."""

from __future__ import annotations

import json
import re
import traceback
from datetime import datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pglease import ConfigurationError, Handover, MemoryBackend, MissingDependencyError, PGLease, open_backend, options
from pglease.backends import postgres_rows
from pglease.backends.postgres_schema import quoted
from pglease.schema import MAX_TABLE, table_names

patiently = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no finding."""
TEXTS = st.text(max_size=300)
NAMES = st.text(st.characters(blacklist_categories=("Cc", "Cs")), min_size=1, max_size=255).filter(
    lambda name: name.isprintable()
)
SECRET = "s3cr3t-of-the-fuzz"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
MOMENTS = st.floats(allow_nan=False) | st.sampled_from([0.0, 1e10, -1e10, 253402300800.0])


@patiently
@given(table=TEXTS | st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,70}", fullmatch=True), schema=st.none() | TEXTS)
def test_an_identifier_is_plain_or_refused(table: str, schema: str | None) -> None:
    try:
        names = table_names(table, schema)
    except ConfigurationError:
        return

    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", names.table)
    assert len(names.table) <= MAX_TABLE
    assert schema is None or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", schema)


@patiently
@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1, max_size=63))
def test_a_role_is_quoted_so_that_it_ends_where_it_should(role: str) -> None:
    written = quoted(role)

    assert written[0] == written[-1] == '"'
    assert written[1:-1].replace('""', "").count('"') == 0
    assert written[1:-1].replace('""', '"') == role


@patiently
@given(NAMES)
def test_a_name_is_held_and_read_back_to_the_letter(name: str) -> None:
    with PGLease(MemoryBackend()) as leases:
        assert leases.try_acquire(options.text(name, "name"))

        assert [lease.name for lease in leases.list_leases()] == [name]
        assert leases.held(name) is not None


@patiently
@given(st.builds(Handover, NAMES, st.from_regex(r"[0-9a-f]{32}", fullmatch=True), NAMES, st.integers(1, 2**63 - 1),
                 st.floats(0.001, 1e9)))  # fmt: skip
def test_a_handover_is_read_as_it_was_written(handover: Handover) -> None:
    assert Handover.read(str(handover)) == handover


NEARLY = st.recursive(st.none() | st.integers() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=6))


@patiently
@given(
    TEXTS
    | st.builds("pglease-handover-1:{}".format, st.text("0123456789abcdefXYZ", max_size=200))
    | st.builds(lambda facts: "pglease-handover-1:" + json.dumps(facts).encode().hex(), NEARLY)
)
def test_what_is_no_handover_is_refused_as_ours(text: str) -> None:
    try:
        found = Handover.read(text)
    except ConfigurationError:
        return

    assert Handover.read(str(found)) == found


SCHEMES = ["postgresql", "postgres", "hybrid+postgresql", "redis", "rediss", "valkey", "redis+sentinel", "sqlite",
           "kubernetes", "memory", "postgresql+psycopg2", "mysql", ""]  # fmt: skip


@patiently
@given(
    scheme=st.sampled_from(SCHEMES),
    before=st.text(max_size=8),
    after=st.text(st.characters(blacklist_categories=("Cs",)), max_size=20),
    query=st.sampled_from(["", "?sslmode=require", "?pglease.notify=0", "?pglease.nosuch=1", "?%zz", "?port=x"]),
)
def test_no_address_shows_its_password_whether_it_is_read_or_refused(
    scheme: str, before: str, after: str, query: str
) -> None:
    address = f"{scheme}://{before}:{SECRET}@{after}{query}"
    try:
        backend = open_backend(address)
    except (ConfigurationError, MissingDependencyError) as error:
        shown = "".join(traceback.format_exception(error))
    else:
        shown = f"{backend!r} {vars(backend) if hasattr(backend, '__dict__') else ''}"
        backend.close()

    if scheme not in {"sqlite", "kubernetes", "memory"}:  # whose addresses have no passwords
        assert SECRET not in shown


@patiently
@given(
    metadata=st.none() | JSON.map(json.dumps),
    moments=st.lists(MOMENTS | st.sampled_from([float("inf"), float("-inf")]), min_size=4, max_size=4),
    token=st.integers(-(2**63), 2**63 - 1),
    owner=st.text(),
)
def test_any_row_that_the_server_can_hold_is_read_as_a_record(metadata, moments, token: int, owner: str) -> None:
    acquired, heartbeat, expires, seen = moments

    lease = postgres_rows.lease_in(
        ("held", "job", owner, token, 0, metadata, acquired, heartbeat, expires, seen, False)
    )

    assert isinstance(lease.metadata, dict)
    assert isinstance(lease.expires_at, datetime)
    assert lease.time_remaining() >= 0
    assert lease.is_expired() in {True, False}
    repr(lease)


@pytest.mark.parametrize("read", [options.text, options.prefix, options.seconds, options.count, options.limit])
@patiently
@given(
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers())
)
def test_an_argument_of_any_kind_is_read_or_refused_as_ours(read, value) -> None:
    try:
        read(value, "argument")
    except ConfigurationError as error:
        refused = str(error)
    else:
        return

    assert "argument" in refused
